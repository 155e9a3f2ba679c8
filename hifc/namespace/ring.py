# SPDX-License-Identifier: Apache-2.0
"""Request rings: reads that somebody will want soon, named by descriptors in shared memory.

    with ns.ring(arena, block_bytes) as ring:
        wanted = make_descriptors(keys, places, words)
        ring.submit(wanted)             # no Python object per block, does not wait
        ...
        ring.wait(words)
        ring.statuses[words] == RingStatus.OK

The layout, and how memory is ordered for producers of your own (a kernel on a GPU, a thread that
writes `ring.descriptors` itself), is told in driver/include/hifc_ring.h and docs/ring.md.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
import os
import time
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hifc.errors import InvalidRequest
from hifc.native_lib.handle import WAIT_SLICE_US, Handle, collect_namespaces
from hifc.native_lib.layouts import DESCRIPTOR, PAGE_BYTES, RingHeader, RingOpts
from hifc.native_lib.memory import ByteArray, memory_of
from hifc.native_lib.request import Keys, keys_array
from hifc.util.checking import seconds, whole
from hifc.util.scoped import Scoped

__all__ = ["DESCRIPTOR", "Ring", "RingOp", "RingStatus", "make_descriptors"]

Counts: TypeAlias = Any  # an int, or an integer array of shape (n,)

_OP_SHIFT = 24
_OP_MAX = 255
_STATUSES_MAX = 1 << 24
U32_MAX = (1 << 32) - 1


class RingOp(enum.IntEnum):
    """HIFC_RING_OP_*."""

    READ = 1
    CANCEL = 2


class RingStatus(enum.IntEnum):
    """What a status word holds, where it is no negative errno (see hifc_ring.h)."""

    OK = 0  # the bytes are there and verified
    MISS = 1
    PENDING = 3
    RETRY = 5
    WAITING = 7  # not answered yet
    CANCELLED = 8
    DUPLICATE = 9  # on its way already, to the place of who asked first
    IDLE = 10  # no descriptor has used this word yet


def make_descriptors(
    keys: Keys,
    places: Counts,
    words: Counts,
    *,
    first_part: Counts = 0,
    part_count: Counts = 0,
    op: RingOp = RingOp.READ,
) -> npt.NDArray[np.void]:
    """An array of n descriptors, for n keys: a (n, 16) uint8 array or a sequence of 16 bytes each.

    places: where the bytes go, in pages of 4 KiB from the arena's start. words: the status word of
    each. part_count 0 asks for the whole value. InvalidRequest: a number does not fit its field.
    """
    raw = keys_array(keys)
    descriptors = np.zeros(len(raw), dtype=DESCRIPTOR)
    descriptors["key"] = raw
    _fill(descriptors, "place", places, 1 << 32)
    _fill(descriptors, "first_part", first_part, 1 << 16)
    _fill(descriptors, "part_count", part_count, 1 << 16)
    _fill(descriptors, "control", words, _STATUSES_MAX)
    descriptors["control"] |= np.uint32(whole("op", op, 0, _OP_MAX) << _OP_SHIFT)
    return descriptors


def _fill(descriptors: npt.NDArray[np.void], name: str, values: Counts, limit: int) -> None:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.shape not in {(), descriptors.shape}:
        raise InvalidRequest(
            f"{name}: use an integer, or {descriptors.size} of them, not {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < limit:
        raise InvalidRequest(f"{name}: numbers are from 0 to {limit - 1}")
    descriptors[name] = array


class Ring(Scoped):
    """A request ring of a namespace. Made by `Namespace.ring`; a context manager that closes it.

    descriptors: array of DESCRIPTOR, shape (slots,), the slots themselves. statuses: int32 array,
    shape (statuses,). Both stay valid after close. Every method may be called from any thread.
    """

    def __init__(self, handle: Handle, opts: RingOpts, arena: ByteArray) -> None:
        self._handle = handle
        self._lib = handle.lib
        self._pool = int(opts.pool)
        self._arena = arena
        self._closed = False
        cell = ctypes.c_void_p()
        held = ctypes.byref(cell)
        # Beside namespaces, since it is to be freed also where its namespace died with it. The
        # arena stays as long as libhifc may place a read in it.
        self._loan = collect_namespaces().enter(
            self, functools.partial(self._lib.hifc_ring_drop, held), (handle, arena)
        )
        self._lib.hifc_ring_open(handle.pointer, ctypes.byref(opts), held)
        assert cell.value is not None
        self._pointer: int = cell.value
        # A mapping of its own, which lives as long as arrays point into it.
        descriptor = self._lib.hifc_ring_fd(self._pointer)
        self._region = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.header = RingHeader.from_buffer(self._region)
        self.descriptors: npt.NDArray[np.void] = np.frombuffer(
            self._region, DESCRIPTOR, self.header.slots, self.header.slots_offset
        )
        self.statuses: npt.NDArray[np.int32] = np.frombuffer(
            self._region, np.int32, self.header.statuses, self.header.statuses_offset
        )

    @property
    def address(self) -> int:
        """Of the region, in this process: what cudaHostRegister takes, with header.region_bytes."""
        return ctypes.addressof(self.header)

    @property
    def arena(self) -> ByteArray:
        """The memory that places count in."""
        return self._arena

    @property
    def closed(self) -> bool:
        """True once the ring, or its namespace, takes nothing any more."""
        return self._closed or self._handle.closed

    def submit(self, descriptors: npt.NDArray[np.void]) -> int:
        """Publishes an array of DESCRIPTOR, the first ones if the ring has no room for all.

        Returns how many; the others are lost, and counted in stats().prefetch_overflowed. Each
        status word waits until it is answered. The array may be used again at once.
        InvalidRequest: another dtype, or a status word that is not there.
        """
        if getattr(descriptors, "dtype", None) != DESCRIPTOR or descriptors.ndim != 1:
            raise InvalidRequest(
                "descriptors are an array of hifc.namespace.ring.DESCRIPTOR of shape (n,): see "
                "make_descriptors"
            )
        array = np.ascontiguousarray(descriptors)
        return int(self._inside("hifc_ring_submit", array.ctypes.data, array.size))

    def cancel(self, words: npt.ArrayLike) -> int:
        """Takes back the reads of these status words, where they have not started: those are
        answered CANCELLED. Returns how many cancellations the ring had room for."""
        indices = self._words(words)
        cancels = np.zeros(indices.size, dtype=DESCRIPTOR)
        cancels["control"] = indices | np.uint32(RingOp.CANCEL << _OP_SHIFT)
        return self.submit(cancels)

    def kick(self) -> None:
        """Tells that `descriptors` was written by hand. Otherwise it is seen within poll_us, or,
        with drive="inline", when somebody waits."""
        self._inside("hifc_ring_kick")

    def wait(self, words: npt.ArrayLike, timeout_s: float | None = None) -> bool:
        """Waits until none of these status words is WAITING, at most timeout_s seconds (None:
        bounded by the command timeout). False: the time ran out. How each ended, `statuses` says.
        ClosedError: one waits for a descriptor that came after the ring was closed."""
        indices = self._words(words)
        deadline = None
        if timeout_s is not None:
            deadline = time.monotonic() + seconds("timeout_s", timeout_s)
        while True:  # in slices, so that Ctrl-C is answered
            slice_us = WAIT_SLICE_US
            if deadline is not None:
                slice_us = max(0, min(slice_us, int((deadline - time.monotonic()) * 1e6)))
            if self._inside("hifc_ring_wait", indices.ctypes.data, indices.size, slice_us):
                self._handle.written((self._pool,))
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def poll(self, words: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which of these status words are answered, shape (n,)."""
        indices = self._words(words)
        self.wait(indices, 0)  # inline, this is what drives
        answered: npt.NDArray[np.bool_] = self.statuses[indices] != RingStatus.WAITING
        return answered

    def close(self) -> None:
        """Answers what has not started with -ESHUTDOWN, waits for reads in flight. Idempotent; does
        nothing in a child of fork().

        WaitTimeout: a read did not end in twice the command timeout; close again.
        """
        if os.getpid() != self._handle.pid or self._closed:
            return
        self._lib.hifc_ring_shutdown(self._pointer)
        self._loan.keep = self._handle
        self._closed = True

    def _end(self) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Ring of {self.header.slots} on {self._handle.uri}{state}>"

    def _inside(self, name: str, *arguments: Any) -> Any:
        return getattr(self._lib, name)(self._pointer, *arguments)

    def _words(self, words: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        array = np.atleast_1d(np.asarray(words))
        if array.size == 0:
            return np.zeros(0, np.uint32)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise InvalidRequest(f"status words are integers of shape (n,), not {array.dtype}")
        if not 0 <= int(array.min()) <= int(array.max()) < self.statuses.size:
            raise InvalidRequest(
                f"status words are from 0 to {self.statuses.size - 1}: ask ns.ring for more"
            )
        return np.ascontiguousarray(array, np.uint32)


def open_ring(
    handle: Handle, arena: ByteArray, read_max: int, slots: int, statuses: int, poll_us: int
) -> Ring:
    """What Namespace.ring calls."""
    memory = memory_of(arena)
    if memory.readonly:
        raise InvalidRequest("the arena is a read-only array: reads of a ring write to it")
    pool, offset = handle.locate(memory, on_page=True)
    if offset < 0:
        raise InvalidRequest("the arena is not on a page of a pool: make it with ns.buffer(...)")
    opts = RingOpts(
        slots=whole("slots", slots, 0, U32_MAX),
        statuses=whole("statuses", statuses, 0, U32_MAX),
        pool=pool,
        read_max_bytes=whole("read_max", read_max, 0, U32_MAX),
        arena_offset=offset,
        arena_bytes=memory.size_bytes // PAGE_BYTES * PAGE_BYTES,
        poll_us=whole("poll_us", poll_us, 0, U32_MAX),
    )
    return Ring(handle, opts, arena)
