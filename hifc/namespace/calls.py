# SPDX-License-Identifier: Apache-2.0
"""How a namespace calls libhifc: one request and wait, a batch and a ticket, a look-up.

An exception of a signal handler may be raised at every call: what is in flight then is given up by
libhifc (hifc_ticket_drop), and what was made by it goes back as loans do (native_lib/loans.py).
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from hifc.errors import BackPressure, CorruptionError, InvalidRequest, error_of
from hifc.namespace import batch
from hifc.namespace.ticket import Ticket
from hifc.native_lib import layouts
from hifc.native_lib.handle import WAIT_SLICE_US, Handle
from hifc.native_lib.layouts import Request
from hifc.native_lib.memory import Buffer, ByteArray, Memory, copy_memory, memory_of
from hifc.native_lib.request import Answer, Op
from hifc.util.checking import whole

# A synchronous call that is answered Retry tries again for this long, at growing intervals.
RETRY_WAIT_S = 10.0
DELAY_MIN_S = 50e-6
DELAY_MAX_S = 10e-3
# An interrupted call waits this long for the device to be done with memory of the caller; after it,
# the device may still transfer what is in flight.
INTERRUPT_WAIT_US = 10_000_000


class Calls:
    """What Namespace builds on."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._lib = handle.lib

    @property
    def uri(self) -> str:
        """What it was opened with."""
        return self._handle.uri

    def owns(self, handle: Handle) -> bool:
        """True for the handle that this object calls libhifc with."""
        return handle is self._handle

    def _inside(self, symbol: str, *arguments: Any) -> Any:
        """One call of libhifc that takes the namespace first."""
        self._handle.ready()
        return getattr(self._lib, symbol)(self._handle.pointer, *arguments)

    def _lookup(self, names: npt.NDArray[np.uint8], lengths: Any) -> npt.NDArray[np.int32]:
        answers = np.empty(len(names), dtype=np.int32)
        self._inside(
            "hifc_lookup",
            names.ctypes.data,
            len(names),
            answers.ctypes.data,
            None if lengths is None else lengths.ctypes.data,
        )
        return answers

    def _look(self, name: bytes) -> tuple[Answer, int]:
        answer, length = ctypes.c_int32(), ctypes.c_uint32()
        key = (ctypes.c_uint8 * layouts.KEY_BYTES)(*name)
        self._inside(
            "hifc_lookup",
            ctypes.addressof(key),
            1,
            ctypes.addressof(answer),
            ctypes.addressof(length),
        )
        return Answer(answer.value), length.value

    def _misses(self, name: bytes) -> bool:
        """Asks for a key that look-up does not know, so that the miss is counted and a swap value
        that was quarantined raises CorruptionError. False: it is there by now."""
        request = Request(op=Op.GET, capacity=0)
        request.key[:] = name
        try:
            return self._call(request) == Answer.MISS
        except InvalidRequest:  # a hit, for which there is no memory
            return False

    def _submit_placed(
        self, requests: npt.NDArray[np.void], placement: batch.Placement, on_done: Any = None
    ) -> Ticket:
        """Submits the requests whose buffer has a place; the others are answered Retry."""
        requests["pool"] = placement.pools
        requests["buffer_offset"] = np.maximum(placement.offsets, 0)
        placed = np.flatnonzero(placement.offsets >= 0)
        sent = requests if placed.size == requests.size else requests[placed]
        finish = functools.partial(_finish_placed, requests, sent, placed, on_done)
        requests["status"] = Answer.IN_FLIGHT
        return Ticket(self._handle, requests, sent, placement, finish)

    def _call(self, request: Request, again: tuple[int, ...] = (Answer.RETRY,)) -> int:
        """Submits one request and waits. Answered one of again, it tries again for a bounded
        time."""
        deadline = time.monotonic() + RETRY_WAIT_S
        delay = DELAY_MIN_S
        while True:
            status = self._once(request)
            if status not in again or time.monotonic() > deadline:
                return status
            self._handle.pause(delay)
            delay = min(2 * delay, DELAY_MAX_S)

    def _once(self, request: Request) -> int:
        """An exception out of it leaves nothing of the request in flight that names memory of
        others: `finally` is one call of C, before which no signal handler runs."""
        handle = self._handle
        handle.ready()
        cell, info = ctypes.c_void_p(), layouts.TicketInfo()
        ticket, out, sent = ctypes.byref(cell), ctypes.byref(info), ctypes.byref(request)
        finish, drop = self._lib.hifc_ticket_finish, handle.drop_ticket
        try:
            done = self._lib.hifc_execute(handle.pointer, sent, WAIT_SLICE_US, ticket, out)
            while not done:
                done = finish(ticket, WAIT_SLICE_US, out)
        except BackPressure:  # no ticket is free
            return Answer.RETRY
        finally:
            if cell.value:
                drop(ticket, INTERRUPT_WAIT_US)
        status = int(request.status)
        if status >= 0:
            return status
        doing = f"{Op(request.op).name.lower()} of key {bytes(request.key).hex()}"
        raise error_of(status, info.first_error.detail(), doing=doing, where=self.uri)

    def _write(self, request: Request, data: Buffer) -> int:
        """A put or write of data: in place if in the pool, otherwise through it."""
        memory = memory_of(data)
        batch.check_value(memory, memory.size_bytes, writable=False)
        handle = self._handle
        pool, offset, room = batch.stage(handle, memory, memory.size_bytes, writable=False)
        if room is not None:
            copy_memory(handle.pool_base + offset, memory.address, memory.size_bytes)
            handle.count_bounce(memory.size_bytes)
        request.pool = pool
        request.buffer_offset = offset
        request.length = memory.size_bytes
        return self._call(request)

    def _read(
        self, name: bytes, target: Memory, offset_bytes: int = 0, length_bytes: int = 0
    ) -> ByteArray | Answer:
        """A range of a value, or with length_bytes 0 the whole value, into target; the answer
        where that is not OK. InvalidRequest with code -EMSGSIZE: target is too small for it."""
        size = length_bytes or target.size_bytes
        batch.check_value(target, size, writable=True)
        handle = self._handle
        pool, offset, room = batch.stage(handle, target, size, writable=True)
        request = Request(
            op=Op.GET,
            pool=pool,
            buffer_offset=offset,
            value_offset=offset_bytes,
            length=length_bytes,
            capacity=size,
        )
        request.key[:] = name
        try:
            answer = Answer(self._call(request))
        except CorruptionError:
            ctypes.memset(target.address, 0, length_bytes or request.value_length)
            raise
        if answer != Answer.OK:
            return answer
        handle.written((pool,))
        length = length_bytes or request.value_length
        if room is not None:
            copy_memory(target.address, handle.pool_base + offset, length)
            handle.count_bounce(length)
        return target.array(length)

    def _expect_ok(self, status: int, doing: str) -> None:
        if status == Answer.RETRY:
            raise BackPressure(
                f"{doing} on {self.uri}: no room in its queues for {RETRY_WAIT_S:.0f} s"
            )
        if status != Answer.OK:
            raise InvalidRequest(f"{doing} on {self.uri}: answered {Answer(status).name}")


def parts_of(parts: int) -> int:
    """parts, if a value can have that many."""
    return whole("parts", parts, 1, layouts.PARTS_MAX)


def _finish_placed(
    requests: npt.NDArray[np.void],
    sent: npt.NDArray[np.void],
    placed: npt.NDArray[np.intp],
    on_done: Any,
) -> None:
    if sent is not requests:
        requests["status"] = Answer.RETRY
        requests[placed] = sent
    if on_done is not None:
        on_done(requests)
