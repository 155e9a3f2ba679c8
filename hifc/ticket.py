# SPDX-License-Identifier: Apache-2.0
"""A ticket: one submitted batch, to be waited for, polled or awaited.

It keeps the request array and every buffer of its batch alive until the batch is done, also when
the caller drops it. Thread-safe: several threads and event loops may wait for one ticket.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from hifc.errors import ClosedError, ConfigError, Detail, ForkError, error_of
from hifc.handle import Handle
from hifc.layouts import TicketInfo
from hifc.request import Answer, KeyArray

_NOTHING = TicketInfo()


class Ticket:
    """Made by Namespace.submit, put_many and get_many."""

    __slots__ = (
        "__weakref__",
        "_finished",
        "_handle",
        "_info",
        "_keep",
        "_lock",
        "_on_done",
        "_pointer",
        "_requests",
        "_users",
    )

    def __init__(
        self,
        handle: Handle,
        pointer: int | None,
        requests: npt.NDArray[np.void],
        keep: object = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self._handle = handle
        self._pointer = pointer
        self._requests = requests
        self._keep = keep
        self._on_done = on_done
        self._info: TicketInfo = _NOTHING
        self._finished = False
        self._users = 0
        self._lock = threading.RLock()
        if pointer is None:
            self._finish()
        else:
            handle.tickets[pointer] = weakref.ref(self)

    def __del__(self) -> None:
        pointer = getattr(self, "_pointer", None)
        if pointer is not None:
            self._pointer = None
            self._handle.tickets.pop(pointer, None)
            self._handle.dropped.append((pointer, (self._requests, self._keep)))

    # ---- waiting

    def done(self) -> bool:
        """True once every request of the batch has its answer."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until done, at most timeout_s seconds (None: bounded by the command timeout).

        Returns True when done, False when the time ran out. Errors of single requests do not
        raise here: see `raise_for_errors`.
        """
        if not self._enter():
            return True
        try:
            pointer = self._acquire()
            if pointer is None:
                return True
            done = False
            try:
                done = self._handle.wait(pointer, timeout_s)
            finally:
                self._release(done)
            return done
        finally:
            self._handle.leave()

    def __await__(self) -> Generator[Any, None, Ticket]:
        """`await ticket` in asyncio; returns the ticket. ConfigError with drive="inline"."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> Ticket:
        if not self._handle.reactor:
            raise ConfigError(
                f"{self._handle.uri} is driven inline, so nobody polls while you await: open it "
                'with drive="reactor", or use ticket.wait()'
            )
        loop = asyncio.get_running_loop()
        while not self.done():
            descriptor = self._descriptor()
            if descriptor is None:
                break
            ready = asyncio.Event()
            loop.add_reader(descriptor, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self

    def _descriptor(self) -> int | None:
        """A duplicate of the ticket's eventfd, so that it outlives the ticket; None if done."""
        if not self._enter():
            return None
        try:
            pointer = self._acquire()
            if pointer is None:
                return None
            try:
                return os.dup(self._handle.lib.hifc_ticket_fd(pointer))
            finally:
                self._release(False)
        finally:
            self._handle.leave()

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

    def raise_for_errors(self) -> Ticket:
        """Waits, then raises the first error of a request, if there was one. Answers such as
        Miss or Retry are no errors. Returns the ticket."""
        self.wait()
        status = self._requests["status"]
        failed = np.flatnonzero(status < 0)
        if failed.size == 0:
            return self
        first = int(failed[0])
        detail: Detail = self._info.first_error.detail()
        code = detail.code if detail.code < 0 else int(status[first])
        key = self._requests["key"][first].tobytes().hex()
        error = error_of(code, detail, doing="request", where=self._handle.uri)
        error.add_note(f"{failed.size} of {status.size} requests failed; the first has key {key}")
        raise error

    def __repr__(self) -> str:
        status = self._requests["status"]
        left = int((status == Answer.IN_FLIGHT).sum())
        state = f"{left} of {status.size} in flight" if left else f"{status.size} done"
        return f"<Ticket {state}>"

    # ---- keeping the C ticket alive while somebody is in it

    def _enter(self) -> bool:
        """Enters the handle; False where that is not needed, since the ticket was settled."""
        if self._pointer is None:
            return False
        try:
            self._handle.enter()
        except ForkError:
            raise
        except ClosedError:
            self._handle.await_closed()  # close settles every ticket
            if self.settled:
                return False
            raise
        return True

    @property
    def settled(self) -> bool:
        """True once libhifc knows nothing of the ticket any more."""
        return self._pointer is None

    def _acquire(self) -> int | None:
        with self._lock:
            if self._pointer is not None:
                self._users += 1
            return self._pointer

    def _release(self, done: bool) -> None:
        with self._lock:
            self._users -= 1
            if done and not self._finished:
                self._finish()
            if self._finished and self._users == 0:
                self._free()

    def _look(self) -> TicketInfo:
        if self._finished or not self._enter():
            return self._info
        try:
            pointer = self._acquire()
            if pointer is None:
                return self._info
            info = TicketInfo()
            try:
                self._handle.lib.hifc_ticket_info(pointer, ctypes.byref(info))
            finally:
                self._release(False)
            return info
        finally:
            self._handle.leave()

    def _finish(self) -> None:
        """Takes the result over. Once, under the lock, when done."""
        if self._pointer is not None:
            info = TicketInfo()
            self._handle.lib.hifc_ticket_info(self._pointer, ctypes.byref(info))
            self._info = info
        if self._on_done is not None:
            self._on_done()
            self._on_done = None
        self._finished = True

    def _free(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is None:
            return
        self._handle.tickets.pop(pointer, None)
        self._handle.lib.hifc_ticket_free(pointer)
        self._keep = None

    def settle(self) -> None:
        """For close, which has made sure that no other thread is inside: waits and takes over."""
        with self._lock:
            if self._pointer is None:
                return
            self._handle.wait(self._pointer, None)
            if not self._finished:
                self._finish()
            self._free()
