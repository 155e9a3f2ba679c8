# SPDX-License-Identifier: Apache-2.0
"""The life of one open namespace: who is inside, what must be given back, and the end.

Invariants:
- hifc_close runs once, and never while a call is inside or a ticket lives: `enter` and `leave`
  count the calls, `close` settles the tickets first.
- Finalizers (of buffers, tickets, reservations, rings) may run in any thread and at any moment, so
  they only append to a deque. Whoever calls next reaps it.
- Arrays over pool memory stay valid after close: the mapping is then kept until the last dies.
- In a child of fork() nothing here touches libhifc.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from hifc import driver, layouts
from hifc.errors import BufferExhausted, ClosedError, ForkError, HiFCError, WaitTimeout
from hifc.layouts import PAGE_BYTES
from hifc.memory import ByteArray, Memory, Span
from hifc.units import page_up

# Dropped tickets looked at by one call; each call adds at most one, so the deque cannot grow.
REAP_MAX = 16
# How long close waits for calls of other threads to return.
CLOSE_WAIT_S = 120.0
# How long an allocation waits for dropped tickets to give their buffers back.
ALLOC_WAIT_S = 5.0
# One part in so many of the pool stays free for pages of libhifc's own: without any, no request
# could end and give its buffer back.
RESERVE_SHARE = 16
# A wait in C lasts no longer than this, so that Ctrl-C is answered.
WAIT_SLICE_US = 200_000

_OPEN, _CLOSING, _CLOSED = range(3)
_OP_ABORT = 7


class Pool(NamedTuple):
    """Memory that requests may name: pool 0, and what was registered beside it."""

    number: int
    base: int
    size_bytes: int
    flush: Callable[[], None] | None  # to be called after the device wrote to it


class Handle:
    """An open struct hifc_ns. Thread-safe."""

    def __init__(self, lib: Any, pointer: int, uri: str, reactor: bool) -> None:
        self.lib = lib
        self.pointer = pointer
        self.uri = uri
        self.reactor = reactor
        self.pid = os.getpid()
        self.bounce_bytes = 0  # copied by Python between the pool and other buffers
        self.tickets: dict[int, weakref.ref[Any]] = {}
        self.dropped: collections.deque[tuple[int, object]] = collections.deque()
        self.abandoned: collections.deque[int] = collections.deque()  # reservations
        self.dropped_rings: collections.deque[tuple[int, object]] = collections.deque()
        size = ctypes.c_uint64()
        self.pool_base: int = lib.hifc_pool_base(pointer, 0, ctypes.byref(size)) or 0
        self.pool_size_bytes: int = size.value
        self._pools: tuple[Pool, ...] = (Pool(0, self.pool_base, self.pool_size_bytes, None),)
        # Run by close, around hifc_close: once no ticket lives, and once no device knows memory.
        self.before_close: list[Callable[[], None]] = []
        self.after_close: list[Callable[[], None]] = []
        self._condition = threading.Condition(threading.RLock())
        self._state = _OPEN
        self._inside = 0
        self._live: dict[int, int] = {}  # offset and bytes of buffers that arrays point to
        self._live_bytes = 0
        self._room_bytes = self.pool_size_bytes - self.pool_size_bytes // RESERVE_SHARE
        self._freed: collections.deque[int] = collections.deque()
        self._kept: list[tuple[int, int]] = []  # mapping that outlives the namespace

    # ---- who is inside

    def enter(self) -> None:
        """Starts a call. Raises ClosedError, or ForkError in a child."""
        if os.getpid() != self.pid:
            raise ForkError(
                f"{self.uri} was opened by process {self.pid}: after fork(), open it again in "
                "the child once the parent has closed it, or start the child by spawn"
            )
        with self._condition:
            if self._state != _OPEN:
                raise ClosedError(f"{self.uri} is closed: open it again with Namespace.open")
            self._inside += 1

    def await_closed(self) -> None:
        """Returns once the close that is under way, in another thread, has ended."""
        with self._condition:
            self._condition.wait_for(lambda: self._state != _CLOSING, CLOSE_WAIT_S)

    def leave(self) -> None:
        """Ends a call."""
        with self._condition:
            self._inside -= 1
            if self._state != _OPEN and self._inside == 0:
                self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """True once close has begun, and in a child of fork()."""
        return self._state != _OPEN or os.getpid() != self.pid

    def count_bounce(self, size_bytes: int) -> None:
        """Counts a copy between pool and other memory."""
        with self._condition:
            self.bounce_bytes += size_bytes

    # ---- memory

    def buffer(self, size_bytes: int) -> ByteArray:
        """Page-aligned uint8 array over pool memory, freed when it and all its views died.

        Called inside. BufferExhausted: there is no room, also after a bounded wait for dropped
        tickets to give theirs back.
        """
        if size_bytes > self._room_bytes:
            raise BufferExhausted(
                f"a buffer of {size_bytes} bytes is larger than the pool has room for "
                f"({self._room_bytes} of {self.pool_size_bytes}): open {self.uri} with a larger "
                "pool_size"
            )
        deadline = time.monotonic() + ALLOC_WAIT_S
        while True:
            self.reap()
            try:
                offset = self._allocate(size_bytes)
                break
            except BufferExhausted:
                if not self.dropped or time.monotonic() > deadline:
                    raise
                self.reap(len(self.dropped))
                time.sleep(0.0002)
        span = Span(self.pool_base + offset, size_bytes, self)
        weakref.finalize(span, self._buffer_died, offset).atexit = False
        return span.array()

    def _allocate(self, size_bytes: int) -> int:
        held = page_up(size_bytes)
        with self._condition:
            if self._live_bytes + held > self._room_bytes:
                raise BufferExhausted(
                    f"no room for a buffer of {size_bytes} bytes: arrays hold {self._live_bytes} "
                    f"of {self._room_bytes} bytes of the pool of {self.uri}; drop some, or open "
                    "it with a larger pool_size"
                )
            offset = ctypes.c_uint64()
            self.lib.hifc_buffer_alloc(self.pointer, size_bytes, ctypes.byref(offset))
            self._live[offset.value] = held
            self._live_bytes += held
            return offset.value

    def offset_of(self, array: ByteArray) -> int:
        """Offset within pool 0 of an array made by `buffer`."""
        return int(array.__array_interface__["data"][0]) - self.pool_base

    def locate(self, memory: Memory, *, on_page: bool) -> tuple[int, int]:
        """The pool that memory lies in and its offset there; (0, -1) if it is not pool memory.

        on_page: what does not begin on a page does not count, since a device cannot read it.
        """
        for pool in self._pools:
            offset = memory.address - pool.base
            if offset >= 0 and offset + memory.size_bytes <= pool.size_bytes:
                return (0, -1) if on_page and offset % PAGE_BYTES else (pool.number, offset)
        return 0, -1

    def add_pool(self, base: int, size_bytes: int, flush: Callable[[], None] | None) -> int:
        """Makes memory a pool that the device reads and writes until close; returns its number.
        flush: what is to be called after the device wrote to it."""
        number = ctypes.c_uint32()
        self.lib.hifc_pool_register(self.pointer, base, size_bytes, ctypes.byref(number))
        self._pools = (*self._pools, Pool(number.value, base, size_bytes, flush))
        return number.value

    def written(self, pool_numbers: Collection[int]) -> None:
        """The device has written to these pools: what reads them next shall see it."""
        for pool in self._pools:
            if pool.flush is not None and pool.number in pool_numbers:
                pool.flush()

    def _buffer_died(self, offset: int) -> None:
        self._freed.append(offset)
        if self._kept:
            self._release_kept()

    def _release_kept(self) -> None:
        """Unmaps memory that outlived the namespace, once no array points to it."""
        if os.getpid() != self.pid:
            return
        while self._freed:
            with contextlib.suppress(IndexError):
                self._live.pop(self._freed.popleft(), None)
        if not self._live:
            with contextlib.suppress(IndexError):
                driver.unmap(*self._kept.pop())

    # ---- what finalizers left

    def reap(self, limit: int = REAP_MAX) -> None:
        """Frees what died since. Called inside; never waits."""
        while self._freed:
            try:
                offset = self._freed.popleft()
            except IndexError:
                break
            with self._condition:
                self._live_bytes -= self._live.pop(offset)
            with contextlib.suppress(ClosedError):  # detached from its owner's side
                self.lib.hifc_buffer_free(self.pointer, offset)
        for _ in range(min(limit, len(self.dropped))):
            try:
                item = self.dropped.popleft()
            except IndexError:
                break
            if self.lib.hifc_ticket_wait(item[0], 0):
                self.lib.hifc_ticket_free(item[0])
            else:
                self.dropped.append(item)
        self._reap_rings()
        while self.abandoned:
            try:
                handle = self.abandoned.popleft()
            except IndexError:
                break
            with contextlib.suppress(ClosedError):
                self._abort(handle)

    def _reap_rings(self) -> None:
        while self.dropped_rings:
            try:
                item = self.dropped_rings.popleft()
            except IndexError:
                break
            try:
                self.lib.hifc_ring_close(item[0])
            except WaitTimeout:  # a read of it does not end: its arena stays as long
                self.dropped_rings.append(item)
                break

    def ring_died(self, pointer: int, arena: object) -> None:
        """Of a ring that nobody closed, from its finalizer."""
        if os.getpid() == self.pid:
            self.dropped_rings.append((pointer, arena))
            if self._state == _CLOSED:
                self._reap_rings()  # the namespace has answered it: that does not block

    def _abort(self, handle: int) -> None:
        request = layouts.Request(op=_OP_ABORT, handle=handle)
        ticket = ctypes.c_void_p()
        self.lib.hifc_submit(self.pointer, ctypes.byref(request), 1, ctypes.byref(ticket))
        if ticket.value is not None:
            self.dropped.append((ticket.value, request))

    # ---- waiting for a ticket

    def wait(self, ticket: int, timeout_s: float | None) -> bool:
        """True once the ticket is done; False when timeout_s ran out. Called inside."""
        if timeout_s is not None and timeout_s <= 0:
            return bool(self.lib.hifc_ticket_wait(ticket, 0))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            slice_us = WAIT_SLICE_US
            if deadline is not None:
                left_us = int((deadline - time.monotonic()) * 1e6)
                if left_us <= 0:
                    return bool(self.lib.hifc_ticket_wait(ticket, 0))
                slice_us = min(slice_us, left_us)
            if self.lib.hifc_ticket_wait(ticket, slice_us):
                return True

    # ---- the end

    def close(self) -> None:
        """Settles every ticket, closes the namespace. Idempotent; does nothing in a child.

        Raises what hifc_close raises (it closes in any case), and WaitTimeout, with the
        namespace still open, while another thread's call does not return.
        """
        if os.getpid() != self.pid:
            return
        with self._condition:
            if self._state == _CLOSED:
                return
            self._state = _CLOSING
            if not self._condition.wait_for(lambda: self._inside == 0, CLOSE_WAIT_S):
                self._state = _OPEN
                self._condition.notify_all()
                raise WaitTimeout(
                    f"close of {self.uri}: {self._inside} calls of other threads did not return "
                    f"within {CLOSE_WAIT_S:.0f} s; let them end and close again"
                )
            if self.pointer == 0:  # another thread closed it while this one waited
                return
            self._state = _CLOSED
            try:
                self._settle()
            finally:
                self._close()
                self._condition.notify_all()

    def _settle(self) -> None:
        for reference in list(self.tickets.values()):
            ticket = reference()
            if ticket is not None:
                ticket.settle()
        self.reap()
        while self.dropped:
            item = self.dropped.popleft()
            self.lib.hifc_ticket_free(item[0])  # waits for it
            del item
        self.reap()

    def _close(self) -> None:
        kept = None
        if self._live:
            base, size = ctypes.c_void_p(), ctypes.c_uint64()
            self.lib.hifc_pool_disown(self.pointer, ctypes.byref(base), ctypes.byref(size))
            kept = (base.value or 0, size.value)
        try:
            with contextlib.ExitStack() as last:
                for release in self.after_close:
                    last.callback(release)
                last.callback(self.lib.hifc_close, self.pointer)
                for release in self.before_close:
                    last.callback(release)
        finally:
            self.pointer = 0
            self._reap_rings()
            if kept is not None:
                self._kept.append(kept)
                self._release_kept()


def close_quietly(handle: Handle) -> None:
    """For a namespace that was dropped or left open at exit: its data is sealed all the same."""
    with contextlib.suppress(HiFCError):
        handle.close()


__all__ = ["PAGE_BYTES", "Handle", "close_quietly"]
