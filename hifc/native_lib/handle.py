# SPDX-License-Identifier: Apache-2.0
"""The life of one open namespace: its memory, what must be given back, and the end.

Invariants:
- libhifc counts who is inside and refuses calls once the namespace was shut down, so that a call
  needs no guard here. The struct is freed when the last object that can name it has died.
- What libhifc gives out is entered as a loan first (hifc/native_lib/loans.py).
- Arrays over pool memory stay valid after close: libhifc keeps it mapped until the last one died.
- In a child of fork() nothing here touches libhifc.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from hifc.errors import (
    BackPressure,
    BufferExhausted,
    ClosedError,
    DeviceBusy,
    HiFCError,
    WaitTimeout,
)
from hifc.native_lib.layouts import PAGE_BYTES, OpenOpts
from hifc.native_lib.loans import Loans
from hifc.native_lib.memory import ByteArray, Memory, Span
from hifc.util.units import page_up

# How long an allocation waits for buffers of abandoned requests to come back.
ALLOC_WAIT_S = 5.0
_ALLOC_NAP_S = 0.0002
# A wait in C lasts no longer than this, so that Ctrl-C is answered.
WAIT_SLICE_US = 200_000
# What close waits before staging memory is taken from a GPU; libhifc has its own bound after it.
_DRAIN_US = 120_000_000
_NO_BUFFER = (1 << 64) - 1
# HIFC_POOL_OWN_SHARE: one part in so many of the pool is never given out.
RESERVE_SHARE = 16

# Every namespace that was opened and not freed. Those whose objects died are closed by the next
# opening, or at exit.
_namespaces = Loans()


def collect_namespaces() -> Loans:
    """Closes namespaces whose objects died without. Returns the register of this process."""
    global _namespaces
    if _namespaces.pid != os.getpid():
        _namespaces = Loans()
    for owner in _namespaces.owners():
        if isinstance(owner, Handle):
            owner.collect_late()
    _namespaces.collect()
    return _namespaces


atexit.register(collect_namespaces)


class Pool(NamedTuple):
    """Memory that requests may name: pool 0, and what was registered beside it."""

    number: int
    base: int
    size_bytes: int
    flush: Callable[[], None] | None  # to be called after the device wrote to it


class Handle:
    """A struct hifc_ns. Thread-safe."""

    def __init__(self, lib: Any, uri: str, opts: OpenOpts, reactor: bool) -> None:
        """Opens it; errors as of Namespace.open."""
        self.lib = lib
        self.uri = uri
        self.reactor = reactor
        self.reopen = "open it again with Namespace.open"  # what to do once it is closed
        self.pid = os.getpid()
        self.bounce_bytes = 0  # copied by Python between the pool and other buffers
        self.loans = Loans()
        # Run by close, before and after the device is released. Each may be called again.
        self.before_close: list[Callable[[], None]] = []
        self.after_close: list[Callable[[], None]] = []
        self.drop_ticket = lib.hifc_ticket_drop
        self._lock = threading.RLock()
        self._closing = threading.RLock()
        self._began = False  # to close
        self._closed = False
        cell = ctypes.c_void_p()
        held = ctypes.byref(cell)
        collect_namespaces().enter(self, functools.partial(lib.hifc_drop, held))
        lib.hifc_open(uri.encode(), ctypes.byref(opts), held)
        assert cell.value is not None
        self.pointer: int = cell.value
        size = ctypes.c_uint64()
        self.pool_base: int = lib.hifc_pool_base(self.pointer, 0, ctypes.byref(size)) or 0
        self.pool_size_bytes: int = size.value
        self._pools: tuple[Pool, ...] = (Pool(0, self.pool_base, self.pool_size_bytes, None),)

    @property
    def closed(self) -> bool:
        """True once close has begun, and in a child of fork()."""
        return self._began or os.getpid() != self.pid

    def collect(self) -> None:
        """Gives back what belongs to objects that died."""
        self.loans.collect()
        _namespaces.collect()

    def collect_late(self) -> None:
        """After close: gives back what a call of another thread still made meanwhile. Nothing else
        would, and what it keeps of the pool would keep the namespace."""
        if self._closed:
            self.loans.end()

    def ready(self) -> None:
        """Called by what needs the namespace, before it does. ClosedError: close has begun."""
        if self._began:
            raise ClosedError(f"{self.uri} is closed: {self.reopen}")
        self.collect()

    def count_bounce(self, size_bytes: int) -> None:
        """Counts a copy between pool and other memory."""
        with self._lock:
            self.bounce_bytes += size_bytes

    def pause(self, delay_s: float) -> None:
        """Lets what is in flight go on. Driven inline, nobody else may poll meanwhile."""
        if self.reactor:
            time.sleep(delay_s)
            return
        with contextlib.suppress(WaitTimeout):
            self.lib.hifc_drain(self.pointer, int(delay_s * 1e6))

    # ---- memory

    def buffer(self, size_bytes: int) -> ByteArray:
        """Page-aligned uint8 array over pool memory, freed when it and all its views died.

        BufferExhausted: there is no room, also after a bounded wait for buffers of requests that
        nobody waited for.
        """
        deadline = time.monotonic() + ALLOC_WAIT_S
        while True:
            self.ready()
            try:
                return self._buffer(size_bytes)
            except BackPressure as error:
                if time.monotonic() > deadline:
                    raise BufferExhausted(str(error)) from None
            except BufferExhausted:
                if not self.loans.waiting:
                    raise
            self.pause(_ALLOC_NAP_S)

    def _buffer(self, size_bytes: int) -> ByteArray:
        offset = ctypes.c_uint64(_NO_BUFFER)
        held = ctypes.byref(offset)
        span = Span(0, 0, self)
        self.loans.enter(span, functools.partial(self.lib.hifc_buffer_drop, self.pointer, held))
        self.lib.hifc_buffer_alloc(self.pointer, size_bytes, held)
        span.lie_at(self.pool_base + offset.value, size_bytes)
        return span.array()

    def result_buffer(self, size_bytes: int) -> ByteArray | None:
        """Pool memory for a result that the caller keeps as long as it likes.

        None where less than half of the pool would stay free: a program that collects results must
        not starve its own puts and gets, which need pool memory to pass through.
        """
        self.ready()
        lent_bytes = self.lib.hifc_pool_lent(self.pointer)
        if 2 * (lent_bytes + page_up(size_bytes)) > self.pool_size_bytes:
            return None
        try:
            return self.buffer(size_bytes)
        except BufferExhausted:  # in pieces, or libhifc itself has the rest
            return None

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

    # ---- the end

    def close(self) -> None:
        """Shuts the namespace down; every ticket is settled. Idempotent, also after an exception
        out of it; does nothing in a child.

        Raises what hifc_shutdown raises (it is closed in any case), and WaitTimeout, after which
        close is to be called again, while another thread's call does not return.
        """
        if os.getpid() != self.pid:
            return
        with self._closing:
            if self._closed:
                return
            self._began = True
            if self.before_close:
                with contextlib.suppress(HiFCError):
                    self.lib.hifc_drain(self.pointer, _DRAIN_US)
            for release in self.before_close:
                release()
            failure = self._shut_down()
            for owner in self.loans.owners():
                if callable(settle := getattr(owner, "settle", None)):
                    settle()
            for release in self.after_close:
                release()
            self.loans.end()
            _namespaces.collect()
            self._closed = True
            if failure is not None:
                raise failure

    def _shut_down(self) -> HiFCError | None:
        """What could not be written, if something could not."""
        try:
            self.lib.hifc_shutdown(self.pointer)
        except DeviceBusy as error:
            raise WaitTimeout(f"{error}; let them end and close again") from None
        except HiFCError as error:
            return error
        return None


def close_quietly(handle: Handle) -> None:
    """For a namespace that was dropped or left open at exit: its data is sealed all the same."""
    with contextlib.suppress(HiFCError):
        handle.close()


__all__ = ["PAGE_BYTES", "Handle", "close_quietly", "collect_namespaces"]
