# SPDX-License-Identifier: Apache-2.0
"""Running engines, by the sockets of their owners."""
