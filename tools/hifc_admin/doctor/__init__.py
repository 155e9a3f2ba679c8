# SPDX-License-Identifier: Apache-2.0
"""The checks of doctor, each with what to do about it."""
