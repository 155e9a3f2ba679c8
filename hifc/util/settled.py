# SPDX-License-Identifier: Apache-2.0
"""Steps that belong together, and what is done where an exception came in between.

A handler of a signal may raise between any two instructions, memory may run out, and a policy of a
user's own may raise. So the engine keeps a small truth, each change of which is one store that
either happened or did not, and derives from it all else that it needs to be fast. An operation that
did not come to its end leaves a mark, and the next one derives everything anew before it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from hifc.errors import HiFCError


class Settled:
    """`with lock, settled:` around the steps. lock: of C, so that it is never left held.

    recover: derives anew, from whatever the steps left; may be interrupted, and is called again
    then. Not called after an error of HiFC itself: those are raised where the state is whole.
    """

    __slots__ = ("_recover", "broken")

    def __init__(self, recover: Callable[[], None]) -> None:
        self._recover = recover
        self.broken = False  # steps are under way, or did not come to their end

    def __enter__(self) -> None:
        if self.broken:
            self._recover()
        self.broken = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.broken = error is not None and not _is_whole(error)


def _is_whole(error: BaseException) -> bool:
    """Whether it is an error of HiFC, raised while nothing but errors was handled. Memory that ran
    out is none: that can happen anywhere."""
    if not isinstance(error, HiFCError):
        return False
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or not isinstance(found, Exception):
            return False
        found = found.__context__
    return True
