# SPDX-License-Identifier: Apache-2.0
"""What is on a device that is not open: the signatures that format would refuse to overwrite."""

from __future__ import annotations

import ctypes

from hifc.native_lib import layouts, libhifc

EDGE_BYTES = 1 << 20
_NAMES_MAX_BYTES = 4096


def edge_bytes(size_bytes: int) -> int:
    """How much `signatures` wants to see of either end of a device, in bytes."""
    return min(size_bytes // layouts.PAGE_BYTES * layouts.PAGE_BYTES, EDGE_BYTES)


def tail_offset(size_bytes: int) -> int:
    """Where the last of those bytes begin: whole pages count, as in libhifc."""
    return size_bytes // layouts.PAGE_BYTES * layouts.PAGE_BYTES - edge_bytes(size_bytes)


def signatures(head: bytes, tail: bytes, size_bytes: int) -> list[str]:
    """Names like "an ext4 file system", without their places; none where there is nothing known.

    head, tail: the first and the last `edge_bytes(size_bytes)` bytes. ValueError: other lengths.
    """
    edge = edge_bytes(size_bytes)
    if not len(head) == len(tail) == edge:
        raise ValueError(f"{edge} bytes of either end are wanted, not {len(head)} and {len(tail)}")
    out = ctypes.create_string_buffer(_NAMES_MAX_BYTES)
    libhifc.library().hifc_signatures(head, tail, edge, size_bytes, out, len(out))
    return out.value.decode("utf-8", "replace").splitlines()
