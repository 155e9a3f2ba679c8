# SPDX-License-Identifier: Apache-2.0
"""Two things that a namespace hands out and takes back: reservations and leases."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hifc.errors import ClosedError, InvalidRequest
from hifc.request import Answer
from hifc.scoped import Scoped

if TYPE_CHECKING:
    from hifc.memory import Buffer
    from hifc.namespace import Namespace


class Reservation(Scoped):
    """Phase one of a two-phase put: parts are written in any order, then committed or aborted.

    Invisible until `commit`. As a context manager it aborts what was not committed; dropped
    without either, it is aborted, too. False if the key was not reserved: see `answer`.
    """

    __slots__ = ("__weakref__", "_handle", "_namespace", "answer", "key", "length_bytes")

    def __init__(
        self, namespace: Namespace, key: bytes, length_bytes: int, answer: Answer, handle: int
    ) -> None:
        self._namespace = namespace
        self._handle: int | None = handle if answer == Answer.OK else None
        self.key = key
        self.length_bytes = length_bytes
        self.answer = answer  # OK, or why there is no reservation: EXISTS, PENDING, RETRY, ...

    def __bool__(self) -> bool:
        return self._handle is not None

    @property
    def handle(self) -> int:
        """For the `handle` field of WRITE, COMMIT and ABORT requests given to submit."""
        if self._handle is None:
            raise InvalidRequest(
                f"the reservation of key {self.key.hex()} is over (answer {self.answer.name}): "
                "reserve again"
            )
        return self._handle

    def write(self, offset_bytes: int, data: Buffer) -> None:
        """Writes data at offset_bytes of the value. With several parts: whole parts only."""
        self._namespace.write(self, offset_bytes, data)

    def commit(self) -> Answer:
        """Makes the value visible; every byte must have been written."""
        answer = self._namespace.commit(self)
        if answer != Answer.RETRY:
            self._handle = None
            self.answer = answer
        return answer

    def abort(self) -> None:
        """Gives the room back. Does nothing once committed or aborted."""
        if self._handle is not None:
            self._namespace.abort(self)
            self._handle = None

    def _end(self) -> None:
        with contextlib.suppress(ClosedError):  # closing aborted it
            self.abort()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._namespace.abandon(handle)


class Lease(Scoped):
    """Keeps the keys that were there from being evicted until release or until its time is up."""

    __slots__ = ("_lease", "_namespace", "answers")

    def __init__(self, namespace: Namespace, lease: int, answers: npt.NDArray[np.int32]) -> None:
        self._namespace = namespace
        self._lease: int | None = lease
        self.answers = answers  # int32 of shape (n,): OK, MISS or PENDING per key

    def release(self) -> None:
        """Ends the lease. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            self._namespace.release(lease)
        except InvalidRequest as error:
            if error.code != -errno.ENOENT:  # it ended by itself when its time was up
                raise

    def _end(self) -> None:
        with contextlib.suppress(ClosedError):  # closing released it
            self.release()
