# SPDX-License-Identifier: Apache-2.0
"""A device as a whole: what it says of itself, what is on it, erasing it."""
