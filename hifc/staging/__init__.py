# SPDX-License-Identifier: Apache-2.0
"""Memory that a drive reads and writes directly: of the host, pinned, or of a GPU."""
