# SPDX-License-Identifier: Apache-2.0
"""Moves KV between the pages of a cache and contiguous blocks, and checks blocks, by kernels."""

from __future__ import annotations

from typing import Any

from hifc.errors import InvalidRequest
from hifc.kernel_table import KERNELS
from hifc.kernels import Backend, address_of, strided

# A chunk is what a block of threads takes at a time: at most this many rows of 4 KiB.
CHUNK_ROWS_MAX = 16
ROW_BYTES = 16 * KERNELS["hifc_checksum"].threads


def chunk_rows(total_bytes: int, where: Backend) -> int:
    """Rows of a chunk: as many as leave each block of threads that `where` holds one to do."""
    return max(1, min(CHUNK_ROWS_MAX, total_bytes // (ROW_BYTES * where.wide)))


def checksums(data: Any, part_bytes: int, where: Backend) -> Any:
    """Raw CRC-32C of each part of a value, as the driver keeps them: uint32, shape (parts,).

    data: contiguous, its address a multiple of 16, whole parts; an array of `where`. The result is
    an array of `where`, on a GPU perhaps not computed yet.
    """
    found = strided(data, where)
    address, size = address_of(data, where), found.item_bytes
    for length in found.shape:
        size *= length
    if part_bytes < 1 or size % part_bytes:
        raise InvalidRequest(f"{size} bytes are no whole parts of {part_bytes} bytes")
    parts = size // part_bytes
    if address % 16 or (parts > 1 and part_bytes % 16):
        raise InvalidRequest(
            f"data at {address:#x} in parts of {part_bytes} bytes: address and length of a part "
            "must be multiples of 16"
        )
    found_sums = where.xp.zeros(parts, "u4")
    rows = chunk_rows(size, where)
    chunks = max(1, -(-(part_bytes // 16 * 16) // (rows * ROW_BYTES)))
    where.launch(
        "hifc_checksum",
        min(parts * chunks, where.wide),
        data=address,
        checksums=address_of(found_sums, where),
        part_stride_bytes=part_bytes,
        part_bytes=part_bytes,
        parts=parts,
        chunk_rows=rows,
        chunks=chunks,
    )
    return found_sums
