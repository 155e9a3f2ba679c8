# SPDX-License-Identifier: Apache-2.0
"""A KV cache that is larger than memory, streamed layer by layer, exact."""
