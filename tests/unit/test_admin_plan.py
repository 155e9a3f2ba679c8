# SPDX-License-Identifier: Apache-2.0
"""A plan: in order, undone in reverse, and what it says when it fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from hifc_admin.plan import Plan
from hifc_admin.result import Exit, Failure, Problem


def plan_of(log: list[str], failing: Callable[[], None]) -> Plan:
    """Three steps, of which the last one fails."""
    plan = Plan("the device")
    plan.add("one", lambda: log.append("one"), lambda: log.append("undo one"))
    plan.add("two", lambda: log.append("two"))
    plan.add("three", failing, lambda: log.append("undo three"))
    plan.add("four", lambda: log.append("four"))
    return plan


def ignore(_: str) -> None:
    pass


def test_steps_are_announced_and_done_in_order() -> None:
    said: list[str] = []
    done: list[str] = []
    plan_of(done, lambda: done.append("three")).run(said.append)
    assert done == ["one", "two", "three", "four"]
    assert said == [f"will {what}" for what in done]


def raise_error() -> None:
    raise OSError(28, "No space left on device", "/x")


def raise_failure() -> None:
    raise Failure(Exit.REFUSED, Problem("special", "the device", "no"))


def raise_ctrl_c() -> None:
    raise KeyboardInterrupt


def raise_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([], 5)


@pytest.mark.parametrize(
    ("failing", "code", "exit_code"),
    [
        (raise_error, "step-failed", Exit.FAILED),
        (raise_failure, "special", Exit.REFUSED),
        (raise_ctrl_c, "interrupted", Exit.FAILED),
        (raise_signal, "interrupted", Exit.FAILED),
    ],
)
def test_what_was_begun_is_undone(failing: Callable[[], None], code: str, exit_code: Exit) -> None:
    log: list[str] = []
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(Failure) as caught:
        plan_of(log, failing).run(ignore)
    assert log == ["one", "two", "undo three", "undo one"]
    assert (caught.value.problem.code, caught.value.exit) == (code, exit_code)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_bug_is_undone_and_stays_a_bug() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        plan_of(log, lambda: log.append(str(1 // 0))).run(ignore)
    assert log == ["one", "two", "undo three", "undo one"]


def test_what_could_not_be_put_back_is_said() -> None:
    plan = Plan("the device")
    plan.add("move it", lambda: None, raise_error)
    plan.add("break", raise_failure)
    with pytest.raises(Failure) as caught:
        plan.run(ignore)
    assert caught.value.problem.code == "not-restored"
    assert caught.value.exit is Exit.FAILED
    assert "move it: " in caught.value.problem.detail
    assert caught.value.problem.detail.startswith("no; ")


def test_a_signal_while_undoing_does_not_stop_it() -> None:
    log: list[str] = []
    plan = Plan("the device")
    plan.add("one", lambda: None, lambda: log.append("undo one"))
    plan.add("two", lambda: None, lambda: os.kill(os.getpid(), signal.SIGTERM))
    plan.add("three", raise_error)
    with pytest.raises(Failure):
        plan.run(ignore)
    assert log == ["undo one"]
