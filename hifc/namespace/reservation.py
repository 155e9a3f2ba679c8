# SPDX-License-Identifier: Apache-2.0
"""Two things that a namespace hands out and takes back: reservations and leases."""

from __future__ import annotations

import ctypes
import errno
import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hifc.errors import InvalidRequest
from hifc.native_lib.handle import Handle
from hifc.native_lib.layouts import Request
from hifc.native_lib.libhifc import failure
from hifc.native_lib.request import Answer, KeyArray
from hifc.util.scoped import Scoped

if TYPE_CHECKING:
    from hifc.namespace.namespace import Namespace
    from hifc.native_lib.memory import Buffer


class Reservation(Scoped):
    """Phase one of a two-phase put: parts are written in any order, then committed or aborted.

    Invisible until `commit`. As a context manager it aborts what was not committed; dropped
    without either, it is aborted, too. False if the key was not reserved: see `answer`.
    """

    __slots__ = ("__weakref__", "_drop", "_namespace", "_request", "answer", "key", "length_bytes")

    def __init__(self, namespace: Namespace, handle: Handle, request: Request) -> None:
        """request: the one that will reserve; libhifc writes the handle into it."""
        self._namespace = namespace
        self._request = request
        self.key = bytes(request.key)
        self.length_bytes = int(request.length)
        self.answer = Answer.RETRY  # OK, or why there is no reservation: EXISTS, PENDING, ...
        handle.ready()
        held = ctypes.c_uint64.from_buffer(request, Request.handle.offset)
        self._drop = functools.partial(handle.lib.hifc_reservation_drop, handle.pointer, held)
        handle.loans.enter(self, self._drop, request)

    def __bool__(self) -> bool:
        return bool(self._request.handle)

    def __repr__(self) -> str:
        state = "open" if self else f"over, {self.answer}"
        return f"<Reservation of key {self.key.hex()}, {self.length_bytes} bytes, {state}>"

    @property
    def handle(self) -> int:
        """For the `handle` field of WRITE, COMMIT and ABORT requests given to submit."""
        if not self._request.handle:
            raise InvalidRequest(
                f"the reservation of key {self.key.hex()} is over (answer {self.answer.name}): "
                "reserve again"
            )
        return int(self._request.handle)

    def handle_on(self, handle: Handle) -> int:
        """`handle`, if this is a reservation of that namespace. InvalidRequest otherwise."""
        if self._namespace.owns(handle):
            return self.handle
        raise InvalidRequest(
            f"the reservation of key {self.key.hex()} is one of {self._namespace.uri}, not of "
            f"{handle.uri}: call its own methods"
        )

    def write(self, offset_bytes: int, data: Buffer) -> None:
        """Writes data at offset_bytes of the value. With several parts: whole parts only."""
        self._namespace.write(self, offset_bytes, data)

    def commit(self) -> Answer:
        """Makes the value visible; every byte must have been written."""
        answer = self._namespace.commit(self)
        if answer != Answer.RETRY:
            self._request.handle = 0
            self.answer = answer
        return answer

    def abort(self) -> None:
        """Gives the room back. Does nothing once committed or aborted."""
        if self._request.handle:
            self._namespace.abort(self)
            self._request.handle = 0

    def _end(self) -> None:
        self._drop()  # whatever state an exception left it in
        self._request.handle = 0


class Lease(Scoped):
    """Keeps the keys that were there from being evicted until release or until its time is up."""

    __slots__ = ("__weakref__", "_handle", "_lease", "answers")

    def __init__(self, handle: Handle, names: KeyArray, ttl_ms: int) -> None:
        self._handle = handle
        self._lease = ctypes.c_uint64()
        # int32 of shape (n,): OK, MISS or PENDING per key
        self.answers: npt.NDArray[np.int32] = np.empty(len(names), dtype=np.int32)
        lib, pointer = handle.lib, handle.pointer
        handle.ready()
        handle.loans.enter(self, functools.partial(lib.hifc_lease_release, pointer, self._lease))
        lib.hifc_lease(
            pointer,
            names.ctypes.data,
            len(names),
            ttl_ms,
            self.answers.ctypes.data,
            ctypes.byref(self._lease),
        )

    def __repr__(self) -> str:
        there = int((self.answers == Answer.OK).sum())
        state = "held" if self._lease.value else "over"
        return f"<Lease of {there} of {self.answers.size} keys, {state}>"

    def release(self) -> None:
        """Ends the lease. Idempotent."""
        if not self._lease.value:
            return
        lib = self._handle.lib
        code = lib.hifc_lease_release(self._handle.pointer, self._lease)
        if code not in (0, -errno.ENOENT):  # it ended by itself when its time was up
            raise failure(lib, code, "release a lease")
        self._lease.value = 0

    def _end(self) -> None:
        self._handle.lib.hifc_lease_release(self._handle.pointer, self._lease)
        self._lease.value = 0  # closing released it
