# SPDX-License-Identifier: Apache-2.0
"""What libhifc gave to Python objects, and how each of it is given back once its object is gone.

The exception of a signal handler (Ctrl-C) can be raised in the main thread as a function of Python
begins, after each call, and at the end of each round of a loop. So:

- Whatever libhifc gives out, it writes into memory that an object holds already for which a loan
  was entered before: one call of C, and no moment at which it was given and nobody knows of it.
- Finalizers run no Python. When an object dies, the interpreter itself appends its loan to a deque;
  an exception in a finalizer would be swallowed, and the finalizer with it.
- The next caller collects: it gives back by one call of C, which does nothing when it is repeated,
  and forgets the loan afterwards.
"""

from __future__ import annotations

import collections
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

# What a call that gives back answers where it has to be called again later.
_LATER = (-errno.ETIMEDOUT, -errno.EBUSY)


class Loan(weakref.ref[Any]):
    """One thing that libhifc gave to an object.

    give_back: takes no argument, runs no Python, may be called again. keep: stays alive until the
    thing was given back.
    """

    __slots__ = ("give_back", "keep")

    give_back: Callable[[], int | None]
    keep: object

    # By identity, in C: a loan must be found once its object is gone.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Loans:
    """The loans of one namespace, or of this process. Thread-safe."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._open: set[Loan] = set()
        self._dead: collections.deque[Loan] = collections.deque()
        self._lock = threading.RLock()

    def enter(
        self, owner: object, give_back: Callable[[], int | None], keep: object = None
    ) -> Loan:
        """To be called before libhifc gives out what give_back gives back."""
        loan = Loan(owner, self._dead.append)
        loan.give_back = give_back
        loan.keep = keep
        self._open.add(loan)
        return loan

    def collect(self) -> None:
        """Gives back what belongs to objects that died, in the order in which they did."""
        if not self._dead or self.pid != os.getpid():
            return
        with self._lock:
            while self._dead:
                loan = self._dead[0]
                if loan.give_back() in _LATER:
                    self._dead.rotate(-1)
                    return
                self._forget(loan)
                if self._dead and self._dead[0] is loan:  # else a signal handler collected it
                    self._dead.popleft()

    def end(self) -> None:
        """As collect, for the last time: nobody collects afterwards.

        The garbage collector clears all weak references of a cycle before it calls the first
        callback. So the loan of an object may be over while its callback, which appends to the
        deque, is still to come.
        """
        self.collect()
        with self._lock:
            for loan in list(self._open):
                if loan() is None and loan.give_back() not in _LATER:
                    self._forget(loan)

    def _forget(self, loan: Loan) -> None:
        """keep is let go of by hand: an array over pool memory names the namespace, and through
        its loans this loan, and the garbage collector does not look into arrays."""
        self._open.discard(loan)
        loan.keep = None

    def owners(self) -> Iterator[Any]:
        """Objects that hold something."""
        for loan in list(self._open):
            owner = loan()
            if owner is not None:
                yield owner

    @property
    def waiting(self) -> bool:
        """True where something is left to collect."""
        return bool(self._dead)

    def __len__(self) -> int:
        return len(self._open)
