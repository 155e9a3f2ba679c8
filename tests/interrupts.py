# SPDX-License-Identifier: Apache-2.0
"""An exception of a signal handler at every place where Python can raise one, a place a run.

CPython runs the handlers of signals between instructions of the main thread: as a function begins,
and after a call. `places` counts these in one run of an operation: each call and each return of a
function of the package (and of the library modules that it stands on), and each return of a
function that is written in C. `interrupt` runs the operation again and raises `Interrupted` at one
of them. What a caller of libhifc sees after the call is covered as well, since the check of its
result is a function of the package.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hifc

PACKAGE = tuple(str(Path(folder)) for folder in hifc.__path__)
# Written in Python, and called while the package changes what it holds.
LIBRARY = tuple(module.__file__ or "-" for module in (threading, weakref, contextlib))


class Interrupted(KeyboardInterrupt):
    """What the planted handler raises."""


class _Tracer:
    """Counts places, and raises at one of them once. target 0: only counts."""

    def __init__(self, target: int, only: tuple[str, ...]) -> None:
        self.count = 0
        self.where = ""
        self._target = target
        self._only = only

    def _ours(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        return name.startswith(self._only) or (
            name in LIBRARY
            and frame.f_back is not None
            and frame.f_back.f_code.co_filename.startswith(self._only)
        )

    def _place(self, frame: FrameType, event: str, what: str) -> None:
        self.count += 1
        if self.count == self._target:
            sys.settrace(None)
            sys.setprofile(None)
            code = frame.f_code
            self.where = f"{event} {what} in {code.co_filename}:{frame.f_lineno} ({code.co_name})"
            raise Interrupted(self.where)

    def trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        """For sys.settrace: calls of functions."""
        if event == "call":
            if not self._ours(frame):
                return None
            frame.f_trace_lines = False
            self._place(frame, event, frame.f_code.co_name)
            return self.trace
        if event == "return":
            self._place(frame, event, frame.f_code.co_name)
        return self.trace

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """For sys.setprofile: returns of functions written in C."""
        if event == "c_return" and frame.f_code.co_filename.startswith(self._only):
            if argument in (sys.settrace, sys.setprofile):
                return
            self._place(frame, event, getattr(argument, "__name__", "?"))


def _run(tracer: _Tracer, operation: Callable[[], Any]) -> None:
    sys.setprofile(tracer.profile)
    sys.settrace(tracer.trace)
    try:
        operation()
    finally:
        sys.settrace(None)
        sys.setprofile(None)


def places(operation: Callable[[], Any], only: tuple[str, ...] = PACKAGE) -> int:
    """How many places one run of the operation has. only: prefixes of the files that count."""
    tracer = _Tracer(0, only)
    _run(tracer, operation)
    return tracer.count


def interrupt(
    operation: Callable[[], Any], place: int, only: tuple[str, ...] = PACKAGE
) -> str | None:
    """Runs the operation with an exception at that place, counted from 1. Where it was raised;
    None if the run ended before it, or if the exception was raised where nobody can catch it (a
    finalizer), which `sys.unraisablehook` is told of."""
    tracer = _Tracer(place, only)
    with contextlib.suppress(Interrupted):
        _run(tracer, operation)
    return tracer.where or None


@contextlib.contextmanager
def unraisable_kept() -> Iterator[list[Any]]:
    """What finalizers raised meanwhile, in place of a message on stderr."""
    kept: list[Any] = []
    before = sys.unraisablehook
    sys.unraisablehook = kept.append
    try:
        yield kept
    finally:
        sys.unraisablehook = before


def each_place(
    operation: Callable[[], Any],
    check: Callable[[str], None],
    *,
    only: tuple[str, ...] = PACKAGE,
    most: int = 20000,
) -> int:
    """Interrupts the operation at its first place, its second, and so on until a run ends without
    an interruption; after each, `check` is called with the place. Returns how many places."""
    for place in range(1, most):
        where = interrupt(operation, place, only)
        if where is None:
            return place - 1
        check(where)
    raise AssertionError(f"more than {most} places: is the operation bounded?")
