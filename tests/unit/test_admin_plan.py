# SPDX-License-Identifier: Apache-2.0
"""A plan: in order, undone in reverse, and what it says when it fails."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable

import pytest

from hifc_admin.host.plan import Plan
from hifc_admin.result import Exit, Failure, Problem

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


def raise_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    signal.sigtimedwait([], 5)


@pytest.mark.parametrize(
    ("failing", "code", "exit_code"),
    [
        (raise_error, "step-failed", Exit.FAILED),
        (raise_failure, "special", Exit.REFUSED),
        (raise_ctrl_c, "interrupted", Exit.FAILED),
        (functools.partial(raise_signal, signal.SIGINT), "interrupted", Exit.FAILED),
        (functools.partial(raise_signal, signal.SIGTERM), "interrupted", Exit.FAILED),
        (functools.partial(raise_signal, signal.SIGHUP), "interrupted", Exit.FAILED),
    ],
)
def test_what_was_begun_is_undone(failing: Callable[[], None], code: str, exit_code: Exit) -> None:
    log: list[str] = []
    before = [signal.getsignal(number) for number in ENDING]
    with pytest.raises(Failure) as caught:
        plan_of(log, failing).run(ignore)
    assert log == ["one", "two", "undo three", "undo one"]
    assert (caught.value.problem.code, caught.value.exit) == (code, exit_code)
    assert [signal.getsignal(number) for number in ENDING] == before


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
    plan.add("two", lambda: None, lambda: [os.kill(os.getpid(), number) for number in ENDING])
    plan.add("three", raise_error)
    with pytest.raises(Failure):
        plan.run(ignore)
    assert log == ["undo one"]


def test_the_end_of_a_terminal_that_is_ignored_stays_so() -> None:
    """Under nohup the plan goes on."""
    done: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        plan = plan_of(done, lambda: os.kill(os.getpid(), signal.SIGHUP))
        plan.run(ignore)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done == ["one", "two", "four"]


def test_a_second_signal_does_not_keep_the_first_from_undoing() -> None:
    """It may arrive between the first one and the undoing."""
    log: list[str] = []

    def twice() -> None:
        try:
            raise_signal(signal.SIGHUP)
        finally:
            for number in ENDING:
                os.kill(os.getpid(), number)

    with pytest.raises(Failure):
        plan_of(log, twice).run(ignore)
    assert log == ["one", "two", "undo three", "undo one"]
