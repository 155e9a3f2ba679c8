# SPDX-License-Identifier: Apache-2.0
"""A KV cache of which each head attends only to the blocks that it wants most."""
