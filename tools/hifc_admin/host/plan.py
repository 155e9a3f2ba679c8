# SPDX-License-Identifier: Apache-2.0
"""What a verb is about to do to the host: said first, then done in order, undone on a failure.

A verb that changes something makes a Plan and runs it; with --dry-run it only shows it. Whatever
ends a step early, an error, Ctrl-C, a termination signal or the terminal's end, the steps done so
far and the failed one are undone in reverse. Only a kill leaves things half done: who may be killed
writes down first what cleanup needs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeAlias

from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem

Handler: TypeAlias = signal.Handlers | Callable[[int, FrameType | None], None]


# What asks this process to end; the last one comes when a terminal or a connection closes.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """One of the signals that end a process arrived."""


@dataclass(frozen=True)
class Step:
    """One change: `what` in the words of an order ("write 8 to ..."), and how to take it back.

    undo must cope with a step that failed half way, or before it did anything.
    """

    what: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None


@dataclass
class Plan:
    """Steps in their order."""

    subject: str
    steps: list[Step] = field(default_factory=list)

    def add(
        self, what: str, do: Callable[[], None], undo: Callable[[], None] | None = None
    ) -> None:
        self.steps.append(Step(what, do, undo))

    def put(self, system: System, name: str, text: str, why: str = "") -> None:
        """A step that writes a file, unless it says that already."""
        before = system.exact(name)
        if before == text:
            return
        what = f"{'write' if before is None else 'replace'} {name}{why and ': '}{why}"
        self.add(what, lambda: system.put(name, text), lambda: _put_back(system, name, before))

    def remove(self, system: System, name: str) -> None:
        """A step that removes a file or a link, if there is one."""
        link = system.link(name)
        if link is not None:
            self.add(
                f"remove {name}", lambda: system.remove(name), lambda: system.symlink(name, link)
            )
        elif system.exists(name):
            before = system.exact(name)
            self.add(
                f"remove {name}",
                lambda: system.remove(name),
                lambda: _put_back(system, name, before),
            )

    def lines(self) -> list[str]:
        return [step.what for step in self.steps]

    def would(self) -> list[str]:
        """What a dry run shows."""
        return would(self.lines())

    def run(self, announce: Callable[[str], None]) -> None:
        """Says all steps, then does them. Raises Failure where one failed; then all are undone."""
        begun: list[Step] = []
        with _handling(_interrupt):
            try:
                for step in self.steps:
                    announce(f"will {step.what}")
                for step in self.steps:
                    begun.append(step)
                    step.do()
            except BaseException as error:
                # From here on nothing may interrupt what puts things back.
                with _handling(signal.SIG_IGN):
                    self._give_up(begun, error, announce)
                raise

    def _give_up(
        self, begun: list[Step], error: BaseException, announce: Callable[[str], None]
    ) -> None:
        left: list[str] = []
        for step in reversed(begun):
            if step.undo is None:
                continue
            announce(f"undo: {step.what}")
            try:
                step.undo()
            except (OSError, Failure) as second:
                left.append(f"{step.what}: {second}")
        if not isinstance(error, OSError | Failure | KeyboardInterrupt | Interrupted):
            return  # a bug: its traceback says more than a problem would
        problem = _problem(self.subject, begun[-1].what if begun else "", error)
        if left:
            detail = f"{problem.detail}; and could not put back: {'; '.join(left)}"
            problem = Problem("not-restored", self.subject, detail, problem.evidence, problem.fix)
        exit_code = error.exit if isinstance(error, Failure) and not left else Exit.FAILED
        raise Failure(exit_code, problem) from error


def would(steps: list[str]) -> list[str]:
    """What a dry run shows to people: silence could be taken for a failure."""
    return [f"would {step}" for step in steps] or ["would change nothing"]


def _put_back(system: System, name: str, text: str | None) -> None:
    if text is None:
        system.remove(name)
    else:
        system.put(name, text)


def _problem(subject: str, what: str, error: BaseException) -> Problem:
    if isinstance(error, Failure):
        return error.problem
    if isinstance(error, OSError):
        return Problem("step-failed", subject, f"failed to {what}", str(error))
    return Problem("interrupted", subject, f"interrupted while going to {what}", str(error))


@contextlib.contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Of the signals that end a process; one that is ignored (nohup) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        for number in _ENDING:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # One is enough: a second must not come between this one and what puts things back.
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(f"signal {number}")
