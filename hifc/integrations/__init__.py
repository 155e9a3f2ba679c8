# SPDX-License-Identifier: Apache-2.0
"""HiFC inside other programs, through their own interfaces. Nothing here is imported by default."""
