# SPDX-License-Identifier: Apache-2.0
"""The flat key-value namespace on a device: open, put, get, batches, tickets, leases, rings."""
