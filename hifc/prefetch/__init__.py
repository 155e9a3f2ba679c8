# SPDX-License-Identifier: Apache-2.0
"""Which blocks attention will want next, and reads of them before it does."""
