# SPDX-License-Identifier: Apache-2.0
"""Caches for models of Hugging Face transformers; importing it registers their attention."""

from hifc.integrations.transformers.cache import HiFCCache

__all__ = ["HiFCCache"]
