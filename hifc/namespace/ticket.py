# SPDX-License-Identifier: Apache-2.0
"""A ticket: one submitted batch, to be waited for, polled or awaited.

It keeps the request array and every buffer of its batch alive until the batch is done. A caller may
drop it: libhifc then gives the ticket up, and the memory with it once nothing moves there any more.
Thread-safe: several threads and event loops may wait for one ticket.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import select
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hifc.errors import (
    BackPressure,
    ConfigError,
    Detail,
    HiFCError,
    InvalidRequest,
    NoSpace,
    NotSupported,
    WaitTimeout,
    error_of,
)
from hifc.native_lib.handle import WAIT_SLICE_US, Handle
from hifc.native_lib.layouts import TicketInfo
from hifc.native_lib.memory import ByteArray
from hifc.native_lib.request import Answer, KeyArray, Op
from hifc.util.checking import seconds


class Ticket:
    """Made by Namespace.submit, put_many and get_many.

    `ticket.result()`, or `await ticket`, waits and raises what went wrong; `ticket.wait()` only
    waits.
    """

    __slots__ = (
        "__weakref__",
        "_awaited",
        "_cell",
        "_finished",
        "_handle",
        "_info",
        "_loan",
        "_lock",
        "_on_done",
        "_outs",
        "_requests",
        "_ticket",
    )

    def __init__(
        self,
        handle: Handle,
        requests: npt.NDArray[np.void],
        sent: npt.NDArray[np.void],
        keep: object = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """Submits those of the requests that are to be sent: all, or a copy of some. Where no
        ticket is free, every one of them is answered Retry. keep: what has to live as long.
        on_done: run once they are done; it may be run again where an exception interrupted it."""
        self._handle = handle
        self._requests = requests
        self._on_done = on_done
        self._outs: list[ByteArray] | None = None
        self._info = TicketInfo()
        self._finished = False
        self._awaited = False
        self._lock = threading.RLock()
        self._cell = ctypes.c_void_p()
        self._ticket = ctypes.byref(self._cell)
        handle.ready()
        self._loan = handle.loans.enter(
            self, functools.partial(handle.drop_ticket, self._ticket, 0), (requests, sent, keep)
        )
        if sent.size:
            try:
                handle.lib.hifc_submit(
                    handle.pointer,
                    sent.ctypes.data,  # __array_interface__ would describe every field
                    sent.size,
                    self._ticket,
                )
            except BackPressure:
                sent["status"] = Answer.RETRY
        if self._cell.value is None:
            self._take()

    def __reduce__(self) -> NoReturn:
        """For copy and pickle: two tickets would take one result over."""
        raise NotSupported("a Ticket can be neither copied nor pickled: several may wait for one")

    # ---- waiting

    def done(self) -> bool:
        """True once every request of the batch has its answer."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until done, at most timeout_s seconds (None: bounded by the command timeout).

        Returns True when done, False when the time ran out. It only waits: True says nothing of
        how the requests ended, and none of their errors raises here. See `result`.
        """
        deadline = None if timeout_s is None else time.monotonic() + seconds("timeout_s", timeout_s)
        while not self._finished:
            slice_us, last = WAIT_SLICE_US, False
            if deadline is not None:
                left_us = int((deadline - time.monotonic()) * 1e6)
                last = left_us <= slice_us
                slice_us = max(0, min(slice_us, left_us))
            pointer = self._cell.value
            # Another thread may take it meanwhile; its memory stays, and the wait is short.
            if pointer is None or self._handle.lib.hifc_ticket_wait(pointer, slice_us):
                self._take()
            elif last:
                return self._finished
        return True

    def __await__(self) -> Generator[Any, None, Ticket]:
        """`await ticket` in asyncio: waits and returns the ticket, or raises what `result` raises.
        ConfigError with drive="inline"."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> Ticket:
        if not self._handle.reactor:
            raise ConfigError(
                f"{self._handle.uri} is driven inline, so nobody polls while you await: open it "
                'with drive="reactor", or use ticket.wait()'
            )
        loop = asyncio.get_running_loop()
        while not self.done():
            # Of its own, since a loop has one reader a descriptor; closed when it dies.
            awaited = self._event()
            if awaited is None:
                break
            ready = asyncio.Event()
            loop.add_reader(awaited.fileno(), ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(awaited.fileno())
        return self.result()

    def _event(self) -> select.epoll | None:
        """A descriptor that becomes readable when the batch is done; None if it is."""
        with self._lock:
            pointer = self._cell.value
            if pointer is None:
                return None
            self._awaited = True  # the descriptor of libhifc stays as long as the ticket
            event = select.epoll()
            event.register(self._handle.lib.hifc_ticket_fd(pointer), select.EPOLLIN)
            return event

    # ---- results

    @property
    def requests(self) -> npt.NDArray[np.void]:
        """The request array. It belongs to libhifc until the ticket is done."""
        return self._requests

    @property
    def answers(self) -> npt.NDArray[np.int32]:
        """int32 of shape (n,): `Answer` or a negative errno per request, as of now."""
        return self._requests["status"].copy()

    @property
    def keys(self) -> KeyArray:
        """uint8 of shape (n, 16)."""
        return self._requests["key"]

    @property
    def failed_keys(self) -> KeyArray:
        """Keys, shape (m, 16), whose request ended in an error."""
        return self._requests["key"][self._requests["status"] < 0]

    def give(self, outs: list[ByteArray]) -> Ticket:
        """What get_many calls with the memory that it made for the results, one array a key."""
        self._outs = outs
        return self

    @property
    def values(self) -> list[ByteArray | None]:
        """Of get_many without buffers: the value of each key as a uint8 array, None for a key that
        has none or whose request failed (`result` raises then). Waits.

        InvalidRequest: another batch, whose values are in the caller's own buffers.
        """
        if self._outs is None:
            raise InvalidRequest(
                "values: only get_many(keys) without buffers makes arrays for them; with buffers "
                'they are there, requests["value_length"] bytes of each'
            )
        self.wait()
        requests = self._requests
        return [
            out[:length] if status == Answer.OK else None
            for out, length, status in zip(
                self._outs,
                requests["value_length"].tolist(),
                requests["status"].tolist(),
                strict=True,
            )
        ]

    @property
    def bytes(self) -> int:
        """Bytes moved so far for requests that ended OK."""
        return int(self._look().bytes)

    @property
    def elapsed_s(self) -> float:
        """Seconds from submission to the last completion so far."""
        return float(self._look().elapsed_ns) * 1e-9

    @property
    def ok(self) -> bool:
        """True if the batch is done and every request was answered OK."""
        return self.done() and not self._requests["status"].any()

    def result(self, timeout_s: float | None = None) -> Ticket:
        """Waits, then raises unless every request did what it was asked for. Returns the ticket.

        An error of a request is raised as by `raise_for_errors`. NoSpace: a value was not written,
        or not deleted, since nothing that may be evicted is left. BackPressure: a request was
        answered RETRY (queues or pool had no room for it) or PENDING (another writer has the key,
        or its batch is in flight); submit those again. EXISTS, MISS and REJECTED are values, which
        `answers` holds. A note on the error tells how many requests it concerns. WaitTimeout:
        timeout_s seconds ran out before the batch was done; None is bounded by the command timeout.
        """
        if not self.wait(timeout_s):
            raise WaitTimeout(
                f"a batch of {self._requests.size} requests on {self._handle.uri} is not done "
                f"after {timeout_s} s; it goes on: wait for the ticket again"
            )
        self.raise_for_errors()
        status = self._requests["status"]
        refused = np.flatnonzero(status == Answer.NO_SPACE)
        if refused.size:
            raise self._noted(
                NoSpace(
                    f"{self._doing(refused)} on {self._handle.uri}: nothing that may be evicted "
                    "is left; delete swap entries, release leases or use a larger device"
                ),
                refused,
            )
        refused = np.flatnonzero((status == Answer.RETRY) | (status == Answer.PENDING))
        if refused.size:
            raise self._noted(
                BackPressure(
                    f"{self._doing(refused)} on {self._handle.uri}: answered "
                    f"{Answer(int(status[refused[0]]))}; submit those keys again once other "
                    "requests have ended, in smaller batches, or open it with a larger pool_size"
                ),
                refused,
            )
        return self

    def raise_for_errors(self) -> Ticket:
        """Waits, then raises the first error of a request, if there was one. Returns the ticket.

        Answers such as MISS, RETRY or NO_SPACE are not errors here: see `result`.
        """
        self.wait()
        status = self._requests["status"]
        failed = np.flatnonzero(status < 0)
        if failed.size == 0:
            return self
        detail: Detail = self._info.first_error.detail()
        code = detail.code if (status == detail.code).any() else int(status[failed[0]])
        error = error_of(code, detail, doing="request", where=self._handle.uri)
        raise self._noted(error, failed)

    def _doing(self, which: npt.NDArray[np.intp]) -> str:
        """What the first of these requests was to do."""
        request = self._requests[which[0]]
        return f"{Op(int(request['op'])).name.lower()} of key {request['key'].tobytes().hex()}"

    def _noted(self, error: HiFCError, which: npt.NDArray[np.intp]) -> HiFCError:
        """The error, with how many requests it concerns."""
        key = self._requests["key"][which[0]].tobytes().hex()
        count = self._requests.size
        error.add_note(f"{which.size} of {count} requests failed; the first has key {key}")
        return error

    def __repr__(self) -> str:
        status = self._requests["status"]
        left = int((status == Answer.IN_FLIGHT).sum())
        parts = [f"{left} of {status.size} in flight" if left else f"{status.size} done"]
        failed = int((status < 0).sum())
        if failed:
            parts.append(f"{failed} failed")
        for answer in Answer:
            count = int((status == answer).sum())
            if count and answer not in (Answer.OK, Answer.IN_FLIGHT):
                parts.append(f"{count} {answer}")
        return f"<Ticket {', '.join(parts)}>"

    # ---- taking over what libhifc knows

    def _look(self) -> TicketInfo:
        with self._lock:
            pointer = self._cell.value
            if not self._finished and pointer is not None:
                self._handle.lib.hifc_ticket_info(pointer, ctypes.byref(self._info))
            return self._info

    def _take(self) -> None:
        """Takes the result over, when done. Each step may be repeated."""
        with self._lock:
            if self._finished:
                return
            pointer = self._cell.value
            if pointer is not None and self._awaited:
                self._handle.lib.hifc_ticket_info(pointer, ctypes.byref(self._info))
            elif pointer is not None:
                self._handle.lib.hifc_ticket_finish(self._ticket, 0, ctypes.byref(self._info))
            if self._on_done is not None:
                self._on_done()
            self._on_done = None
            self._loan.keep = None if self._cell.value is None else self._requests
            self._finished = True

    def settle(self) -> None:
        """For close, after which nothing is in flight: takes the result over."""
        self.wait(0)
