# SPDX-License-Identifier: Apache-2.0
"""The C library libhifc in Python: the only place that knows ctypes."""
