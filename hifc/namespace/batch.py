# SPDX-License-Identifier: Apache-2.0
"""Buffers of a batch become offsets in the pool.

A buffer from `ns.buffer()` is taken where it is. Any other gets room in the pool and is copied,
before the submission of a put and after the completion of a get. Where the pool has no room for
all of them, the rest of the batch is answered Retry: back pressure is an answer, not a stall.
"""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hifc.errors import BufferExhausted, InvalidRequest
from hifc.native_lib.handle import Handle
from hifc.native_lib.layouts import PAGE_BYTES, VALUE_MAX_BYTES
from hifc.native_lib.memory import ByteArray, Memory, copy_memory, memory_of
from hifc.native_lib.request import Answer
from hifc.util.checking import items


@dataclass(slots=True)
class Placement:
    """Where each buffer of a batch stands: pool and offset, which is -1 where there was no room."""

    pools: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    keep: object
    bounced: list[tuple[int, Memory]] = field(default_factory=list)  # index, the caller's memory
    room: list[ByteArray] = field(default_factory=list)  # pool memory made for them


def memories_of(buffers: Any, count: int) -> list[Memory] | Memory:
    """One Memory a buffer, or a single one where buffers is an array with a row a buffer."""
    shape = getattr(buffers, "shape", None)
    if shape is not None:
        if len(shape) < 2 or shape[0] != count:
            raise InvalidRequest(
                f"an array of buffers has shape (n, ...) with n = {count} keys, not {tuple(shape)}"
            )
        return memory_of(buffers)
    if isinstance(buffers, bytes | bytearray | memoryview | str):
        raise InvalidRequest("buffers are a sequence with one buffer a key: write [buffer]")
    memories = [memory_of(buffer) for buffer in items("buffers", buffers)]
    if len(memories) != count:
        raise InvalidRequest(f"{count} keys, but {len(memories)} buffers")
    return memories


def place(handle: Handle, buffers: Any, count: int, *, writable: bool) -> Placement:
    """Finds or makes room in the pool for each buffer.

    writable: the buffers will be written to. Copies nothing.
    """
    found = memories_of(buffers, count)
    if isinstance(found, Memory):
        row = found.size_bytes // count if count else 0
        pool, base = handle.locate(found, on_page=not writable)
        if row % PAGE_BYTES and count > 1 and not writable:
            base = -1
        check_value(found, row, writable)
        if base >= 0:
            pools = np.full(count, pool, dtype=np.int64)
            offsets = base + row * np.arange(count, dtype=np.int64)
            return Placement(pools, offsets, np.full(count, row, dtype=np.int64), buffers)
        found = [
            Memory(found.address + i * row, row, found.readonly, buffers) for i in range(count)
        ]
    for memory in found:
        check_value(memory, memory.size_bytes, writable)
    places = np.array(
        [handle.locate(memory, on_page=not writable) for memory in found], dtype=np.int64
    ).reshape(-1, 2)
    pools, offsets = places[:, 0], places[:, 1]
    sizes = np.array([memory.size_bytes for memory in found], dtype=np.int64)
    placement = Placement(pools, offsets, sizes, buffers)
    outside = np.flatnonzero(offsets < 0)
    if outside.size:
        _allocate(handle, placement, outside, found)
    return placement


def check_value(memory: Memory, size_bytes: int, writable: bool) -> None:
    """InvalidRequest unless memory can hold a value of size_bytes."""
    if size_bytes == 0:
        raise InvalidRequest("an empty buffer holds no value: values have 1 byte or more")
    if size_bytes > VALUE_MAX_BYTES:
        raise InvalidRequest(f"a value has at most {VALUE_MAX_BYTES} bytes, not {size_bytes}")
    if writable and memory.readonly:
        raise InvalidRequest("the buffer is read-only: get needs one that it may write to")


def _allocate(
    handle: Handle, placement: Placement, outside: npt.NDArray[Any], found: list[Memory]
) -> None:
    """Room for the buffers outside the pool: in one piece, otherwise as far as it goes."""
    pages = -(-placement.sizes[outside] // PAGE_BYTES) * PAGE_BYTES
    largest = int(pages.max())
    if largest > handle.pool_size_bytes:
        handle.buffer(largest)  # raises and says what to do
    try:
        placement.room = [handle.buffer(int(pages.sum()))]
        base = handle.offset_of(placement.room[0])
        placement.offsets[outside] = base + np.concatenate(([0], np.cumsum(pages)[:-1]))
    except BufferExhausted:
        for index, size in zip(outside.tolist(), pages.tolist(), strict=True):
            try:
                placement.room.append(handle.buffer(size))
            except BufferExhausted:
                break
            placement.offsets[index] = handle.offset_of(placement.room[-1])
    placement.bounced = [
        (index, found[index]) for index in outside.tolist() if placement.offsets[index] >= 0
    ]


def stage(
    handle: Handle, memory: Memory, size_bytes: int, *, writable: bool
) -> tuple[int, int, ByteArray | None]:
    """Pool and offset of the first size_bytes of memory, and, where it lies elsewhere, the pool
    memory that stands in for it. Copies nothing."""
    pool, offset = handle.locate(memory, on_page=not writable)
    if offset >= 0:
        return pool, offset, None
    room = handle.buffer(size_bytes)
    return 0, handle.offset_of(room), room


def copy_in(handle: Handle, placement: Placement) -> None:
    """Before a put: the caller's bytes into the pool."""
    total = 0
    for index, memory in placement.bounced:
        target = handle.pool_base + int(placement.offsets[index])
        copy_memory(target, memory.address, memory.size_bytes)
        total += memory.size_bytes
    if total:
        handle.count_bounce(total)


def copy_out(handle: Handle, placement: Placement, requests: npt.NDArray[np.void]) -> None:
    """After a get: bytes from the pool to the caller; a corrupt value leaves zeros."""
    handle.written(placement.pools)
    total = 0
    for index, memory in placement.bounced:
        status = int(requests["status"][index])
        length = int(requests["value_length"][index])
        if status == Answer.OK:
            source = handle.pool_base + int(placement.offsets[index])
            copy_memory(memory.address, source, length)
            total += length
        elif status == -errno.EBADMSG:
            ctypes.memset(memory.address, 0, length)
    if total:
        handle.count_bounce(total)
