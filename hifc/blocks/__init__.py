# SPDX-License-Identifier: Apache-2.0
"""KV blocks of an engine: their keys, where they are, and which of them leave."""
