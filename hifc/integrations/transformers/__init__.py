# SPDX-License-Identifier: Apache-2.0
"""Caches for models of Hugging Face transformers."""
