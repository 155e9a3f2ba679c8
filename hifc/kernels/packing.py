# SPDX-License-Identifier: Apache-2.0
"""Moves KV between the pages of a cache and contiguous blocks, and checks blocks, by kernels.

A packed block is layer-major: layer 0 K, V, layer 1 K, V, ...; within each [head, token, dim]. That
is what the namespace stores as one extent. On a GPU all calls go to CuPy's current stream and
return at once: whoever hands a packed block to a device waits for the stream before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hifc.errors import InvalidRequest
from hifc.kernels.backend import Backend, address_of, strided
from hifc.kernels.pages import PageLayout
from hifc.kernels.table import KERNELS, PACK_BLOCKS_MAX, divider
from hifc.native_lib.layouts import PARTS_MAX, VALUE_MAX_BYTES
from hifc.util.checking import whole

# A chunk is what a block of threads takes at a time: at most this many rows of 4 KiB.
CHUNK_ROWS_MAX = 16
ADDRESS_MAX = (1 << 63) - 1
ROW_BYTES = 16 * KERNELS["hifc_checksum"].threads

# enum Number of native/pages.cuh
_NUMBERS = {"raw": 0, "float32": 1, "float16": 2, "bfloat16": 3, "fp8_e4m3": 4, "int8": 5}
ENCODINGS = ("raw", "fp8_e4m3", "int8")
_BAD_SCALE = 2  # PackArgs.faults of native/pages.cuh
_SCALE_MIN = np.float32(2.0**-126)
_SCALE_RULE = "a scale is not a finite number from 2**-126 up: give those of pack, or none to it"


@dataclass(frozen=True)
class Moved:
    """What pack or unpack did; arrays of the backend.

    checksums: raw CRC-32C of each part, uint32 of shape (blocks, parts), or None; scales: float32
    of shape (blocks, planes, heads), or None for raw.
    """

    checksums: Any
    scales: Any
    _faults: Any

    def check(self) -> None:
        """Waits for the kernels. InvalidRequest: a page number was outside of the cache; what was
        packed for it is zeros, and nothing was unpacked to it. Or a scale was none; what was packed
        or unpacked by it has no meaning."""
        fault = int(self._faults[0])
        if fault == _BAD_SCALE:
            raise InvalidRequest(_SCALE_RULE)
        if fault:
            raise InvalidRequest("a page number of the block table is outside of the cache")


def chunk_rows(total_bytes: int, where: Backend) -> int:
    """Rows of a chunk: as many as leave each block of threads that `where` holds one to do."""
    rows = max(1, min(CHUNK_ROWS_MAX, total_bytes // (ROW_BYTES * where.wide)))
    return rows if rows < 4 else rows // 4 * 4  # four loads of a thread are in flight together


def chunks_of(part_bytes: int, rows: int) -> int:
    """Chunks of so many rows in a part; one for a part of less than 16 bytes."""
    return max(1, -(-(part_bytes // 16 * 16) // (rows * ROW_BYTES)))


def checksums(data: Any, part_bytes: int, where: Backend) -> Any:
    """Raw CRC-32C of each part of a value, as the driver keeps them: uint32, shape (parts,).

    data: contiguous, its address a multiple of 16, whole parts; an array of `where`. The result is
    an array of `where`, on a GPU perhaps not computed yet.
    """
    found = strided(data, where)
    address, size = address_of(data, where), found.item_bytes * math.prod(found.shape)
    if not whole("part_bytes", part_bytes, 0) or size % part_bytes:
        raise InvalidRequest(f"{size} bytes are no whole parts of {part_bytes} bytes")
    parts = size // part_bytes
    if address % 16 or (parts > 1 and part_bytes % 16):
        raise InvalidRequest(
            f"data at {address:#x} in parts of {part_bytes} bytes: address and length of a part "
            "must be multiples of 16"
        )
    sums = where.xp.zeros(parts, "u4")
    rows = chunk_rows(size, where)
    chunks = chunks_of(part_bytes, rows)
    where.launch(
        "hifc_checksum",
        min(parts * chunks, where.wide),
        data=address,
        checksums=address_of(sums, where),
        part_stride_bytes=part_bytes,
        part_bytes=part_bytes,
        parts=parts,
        chunk_rows=rows,
        chunks=chunks,
    )
    return sums


def pack(
    layout: PageLayout,
    pages: Any,
    packed: Any,
    where: Backend,
    *,
    tokens: int | None = None,
    encoding: str = "raw",
    scales: Any = None,
    parts: int | None = None,
    checksums: bool = False,
) -> Moved:
    """Gathers the pages of blocks into packed blocks.

    pages: page numbers, integers of shape (blocks, pages of a block). packed: where the blocks go:
    an array of bytes of shape (blocks, layout.block_bytes(...) or more), or a sequence of
    contiguous arrays or addresses, which may also be host memory that the GPU reaches. tokens: of
    each block, where it does not fill its last page. encoding: "raw", or "fp8_e4m3" or "int8" for
    a byte an item times the scale of its head. What is too large becomes the largest number; NaN
    stays NaN in fp8_e4m3 and becomes 0 in int8, which has none. scales: float32 of shape (blocks,
    planes, heads), finite and 2**-126 or more, None computes them from the largest finite number of
    each head. parts: equal parts of a block with a
    checksum each, by default one a layer; checksums: compute them.

    InvalidRequest: shapes, dtypes or lengths that do not fit; on the host also a page number or a
    scale that is none (on a GPU `Moved.check` tells).
    """
    call = _Call(layout, pages, packed, where, tokens, encoding, parts, checksums, unpacking=False)
    if encoding != "raw":
        call.scales(scales)
        if scales is None:
            call.launch("hifc_scales")
    return call.move("pack")


def unpack(
    layout: PageLayout,
    pages: Any,
    packed: Any,
    where: Backend,
    *,
    tokens: int | None = None,
    encoding: str = "raw",
    scales: Any = None,
    parts: int | None = None,
    checksums: bool = False,
) -> Moved:
    """Scatters packed blocks into the pages of a cache: the reverse of `pack`, with its arguments.

    scales are those that pack answered. checksums are of the packed bytes, read on the way: whoever
    verifies compares them before using the pages.
    """
    if encoding != "raw" and scales is None:
        raise InvalidRequest(f"unpacking {encoding} needs the scales that pack answered")
    call = _Call(layout, pages, packed, where, tokens, encoding, parts, checksums, unpacking=True)
    if encoding != "raw":
        call.scales(scales)
    return call.move("unpack")


class _Call:
    """One pack or unpack: arguments checked and brought into a kernel's struct."""

    def __init__(
        self,
        layout: PageLayout,
        pages: Any,
        packed: Any,
        where: Backend,
        tokens: int | None,
        encoding: str,
        parts: int | None,
        checksums: bool,
        *,
        unpacking: bool,
    ) -> None:
        if encoding not in ENCODINGS:
            raise InvalidRequest(f"encoding is {encoding!r}: use {', '.join(ENCODINGS)}")
        if encoding != "raw" and layout.dtype not in ("float32", "float16", "bfloat16"):
            raise InvalidRequest(
                f"items of {layout.dtype} are not converted to {encoding}: use encoding='raw', or "
                "name the dtype in page_layout"
            )
        self._layout, self._where, self._encoding = layout, where, encoding
        self._pages = _page_numbers(pages, where)
        self._blocks, self._block_pages = self._pages.shape
        room = self._block_pages * layout.page_tokens
        self._tokens = room if tokens is None else whole("tokens of a block", tokens, 1, room)
        self._raw = encoding == "raw"
        self._packed_item_bytes = layout.item_bytes if self._raw else 1
        self._bytes = layout.block_bytes(self._tokens, self._packed_item_bytes)
        if self._bytes > VALUE_MAX_BYTES:
            raise InvalidRequest(
                f"a packed block has {self._bytes} bytes, at most {VALUE_MAX_BYTES} fit: pack "
                "fewer layers or tokens"
            )
        self._packed = _addresses(packed, self._blocks, self._bytes, where, unpacking)
        layers = len(layout.planes) // layout.planes_per_layer
        self._parts = whole("parts", layers if parts is None else parts, 1)
        if self._parts > PARTS_MAX or self._bytes % self._parts:
            raise InvalidRequest(
                f"{self._bytes} bytes are no {self._parts} equal parts, or more than {PARTS_MAX}"
            )
        if unpacking and not layout.writable:
            raise InvalidRequest(
                "an array of the cache is read-only, or its items overlap: nothing is unpacked"
            )
        # One array, since each takes a call to make and to clear.
        sums = self._blocks * self._parts if checksums else 0
        self._results = where.xp.zeros(sums + 1, "u4")
        self._scales: Any = None
        self._sums = bool(sums)

    def scales(self, given: Any) -> None:
        """Takes or makes the array of scales."""
        shape = (self._blocks, len(self._layout.planes), self._layout.heads)
        made = given is None
        if made:
            given = self._where.xp.empty(shape, "f4")
        found = strided(given, self._where)
        if found.shape != shape or found.dtype != "float32":
            raise InvalidRequest(
                f"scales are {found.dtype} of shape {found.shape}, not float32 of shape {shape}"
            )
        address_of(given, self._where)
        if self._where.name == "host" and not made:
            numbers = np.asarray(given)
            if not (np.isfinite(numbers) & (numbers >= _SCALE_MIN)).all():
                raise InvalidRequest(_SCALE_RULE)
        self._scales = given

    def move(self, verb: str) -> Moved:
        self.launch(f"hifc_{verb}_{self._way()}")
        sums = self._results[1:].reshape(self._blocks, self._parts) if self._sums else None
        moved = Moved(sums, self._scales, self._results[:1])
        if self._where.name == "host":
            moved.check()
        return moved

    def _part_bytes(self) -> int:
        return self._bytes // self._parts

    def _packed_alignment(self) -> int:
        return math.gcd(16, self._part_bytes(), *self._packed)

    def _way(self) -> str:
        """The kernel that fits: see native/pack.cu."""
        layout = self._layout
        whole = layout.alignment == 16 and self._packed_alignment() == 16
        whole = whole and layout.run_bytes == layout.row_bytes
        if self._raw:
            return ("rows_crc" if self._sums else "rows") if whole else "bytes"
        return "converted" if whole and layout.dim % 16 == 0 else "items"

    def launch(self, kernel: str) -> None:
        """All blocks, as many at a time as the struct has addresses for."""
        for first in range(0, self._blocks, PACK_BLOCKS_MAX):
            count = min(PACK_BLOCKS_MAX, self._blocks - first)
            arguments = self._arguments(first, count)
            works = count * self._parts * int(arguments["chunks"])
            if kernel == "hifc_scales":
                works = count * len(self._layout.planes) * self._layout.heads
            self._where.launch(kernel, min(works, self._where.wide), **arguments)

    def _arguments(self, first: int, count: int) -> dict[str, Any]:
        layout, where, way = self._layout, self._where, self._way()
        rows = chunk_rows(count * self._bytes, where)
        row = layout.dim * self._packed_item_bytes
        by_16 = way in ("rows", "rows_crc", "converted")
        access = 16 if by_16 else math.gcd(8, layout.alignment, self._part_bytes())
        results, numbers = address_of(self._results, where), address_of(self._pages, where)
        scales = 0 if self._scales is None else address_of(self._scales, where)
        head_count = len(layout.planes) * layout.heads
        return {
            "packed": self._packed[first : first + count] + [0] * (PACK_BLOCKS_MAX - count),
            "planes": address_of(layout.plane_table, where),
            "pages": numbers + first * self._block_pages * 4,
            "scales": scales + first * head_count * 4 if scales else 0,
            "checksums": results + 4 + first * self._parts * 4 if self._sums else 0,
            "faults": results,
            "cache_tokens": layout.tokens,
            "page_stride": layout.page_stride,
            "token_stride": layout.token_stride,
            "head_stride": layout.head_stride,
            "item_stride": layout.item_stride,
            "row": divider(row // 16 if by_16 else row),
            "tokens": divider(self._tokens),
            "heads": divider(layout.heads),
            "page_tokens": divider(layout.page_tokens),
            "blocks": count,
            "block_pages": self._block_pages,
            "plane_count": len(layout.planes),
            "item_bytes": layout.item_bytes,
            "access_bytes": access,
            "packed_aligned": self._packed_alignment() == 16,
            "kind": _NUMBERS.get(layout.dtype, 0),
            "coded": _NUMBERS[self._encoding],
            "part_bytes": self._part_bytes(),
            "parts": self._parts,
            "chunk_rows": rows,
            "chunks": chunks_of(self._part_bytes(), rows),
        }


def _page_numbers(pages: Any, where: Backend) -> Any:
    """int32 of shape (blocks, pages of a block) in the memory of where; what does not fit is -1."""
    try:
        numbers = where.xp.asarray(pages)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"pages are no array of numbers: {error}") from None
    if numbers.ndim != 2 or numbers.dtype.kind not in "iu" or 0 in numbers.shape:
        raise InvalidRequest(
            f"pages are {numbers.dtype} of shape {numbers.shape}, not integers of shape (blocks, "
            "pages of a block)"
        )
    if numbers.dtype != np.int32:
        fits = (numbers >= 0) & (numbers <= np.iinfo(np.int32).max)
        numbers = where.xp.where(fits, numbers, -1).astype("i4")
    return where.xp.ascontiguousarray(numbers)


def _addresses(
    packed: Any, blocks: int, size_bytes: int, where: Backend, read_only: bool
) -> list[int]:
    """Of each packed block, each with room for size_bytes."""
    if isinstance(packed, list | tuple):
        if len(packed) != blocks:
            raise InvalidRequest(f"{len(packed)} packed blocks for {blocks} rows of pages")
        return [_address(one, size_bytes, where, read_only) for one in packed]
    found = strided(packed, where)
    if len(found.shape) != 2 or found.shape[0] != blocks:
        raise InvalidRequest(f"packed has shape {found.shape}: use ({blocks}, {size_bytes}) bytes")
    if found.strides[1] != found.item_bytes or found.shape[1] * found.item_bytes < size_bytes:
        raise InvalidRequest(
            f"packed has shape {found.shape} of {found.item_bytes} bytes: a block is {size_bytes} "
            "contiguous bytes"
        )
    if not read_only:
        found.check_output("packed")
    return [found.address + block * found.strides[0] for block in range(blocks)]


def _address(array: Any, size_bytes: int, where: Backend, read_only: bool) -> int:
    if isinstance(array, int):
        return whole("the address of a packed block", array, 4096, ADDRESS_MAX)
    found = strided(array, where)
    if found.item_bytes * math.prod(found.shape) < size_bytes:
        raise InvalidRequest(
            f"a packed block of shape {found.shape} of {found.item_bytes} bytes has no room for "
            f"{size_bytes} bytes"
        )
    if not read_only:
        found.check_output("packed")
    return address_of(array, where)
