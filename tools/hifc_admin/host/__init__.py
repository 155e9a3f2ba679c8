# SPDX-License-Identifier: Apache-2.0
"""The host: drives, who uses them, memory, what a verb changes there."""
