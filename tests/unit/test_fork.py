# SPDX-License-Identifier: Apache-2.0
"""After a fork every call in the child refuses, close and finalizers do nothing, and the parent
goes on as if nothing had been."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hifc import Answer, ForkError, Namespace, make_requests

if TYPE_CHECKING:
    from conftest import Opener

KEY = b"k" * 16


def in_child(work: Callable[[], None]) -> None:
    """Runs work in a forked child; its failure fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that the process has threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  (a child ends by _exit)
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_call_refuses_in_the_child(ns: Namespace) -> None:
    ns.put(KEY, b"x" * 10_000)
    ticket = ns.get_many([KEY], [bytearray(10_000)])
    reservation = ns.reserve(b"r" * 16, 4096)
    lease = ns.lease([KEY])

    def child() -> None:
        assert ns.closed
        for call in (
            lambda: ns.get(KEY),
            lambda: ns.put(KEY, b"x"),
            lambda: ns.delete(KEY),
            lambda: ns.lookup([KEY]),
            lambda: ns.submit(make_requests(1)),
            lambda: ns.buffer(1),
            ns.stats,
            ns.sync,
            ns.drain,
            lambda: list(ns.list()),
            lambda: reservation.write(0, b"x"),
        ):
            with pytest.raises(ForkError, match="after fork"):
                call()
        with pytest.raises(ForkError):
            ticket.wait()
        ns.close()
        ns.close()

    in_child(child)
    assert ticket.wait(120)
    assert ticket.ok
    assert ns.get(KEY).tobytes() == b"x" * 10_000
    assert reservation.commit is not None
    lease.release()
    reservation.abort()


def test_finalizers_in_the_child_do_nothing(ns: Namespace) -> None:
    held = [
        ns.put_many([bytes([i]) * 16 for i in range(8)], [b"x" * 50_000] * 8),
        ns.buffer(1 << 20),
        ns.reserve(b"r" * 16, 4096),
        ns.lease([KEY]),
        ns,
    ]

    def child() -> None:
        held.clear()
        gc.collect()

    in_child(child)
    assert ns.put(b"z" * 16, b"after") is Answer.OK
    assert ns.stats().buffer_used_bytes >= 1 << 20
    assert ns.stats().reservations == 1
    held.pop()
    held.clear()


def test_the_childs_exit_handlers_leave_the_parents_namespace_alone(device: Opener) -> None:
    ns = device.open()
    ns.put(KEY, b"kept")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        import weakref

        # What the interpreter does at exit, without the rest of pytest's own exit.
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not ns.closed
    assert bytes(ns.get(KEY)) == b"kept"
    ns.close()
    with device.open() as again:
        assert bytes(again.get(KEY)) == b"kept"


def test_memory_of_the_parent_outlives_the_child(device: Opener) -> None:
    ns = device.open()
    buffer = ns.buffer(4096)
    buffer[:] = 5
    ns.close()
    held = [buffer]

    def child() -> None:
        held.clear()
        gc.collect()

    in_child(child)
    assert (buffer == 5).all()


def test_a_child_opens_a_namespace_of_its_own(ns: Namespace, tmp_path: Path) -> None:
    """As a worker that was started by fork does."""
    ns.put(KEY, b"parent")
    uri = f"file://{tmp_path}/own.img"

    def child() -> None:
        Namespace.format(f"{uri}?size=64MiB", segment_size="2MiB")
        with Namespace.open(uri, pool_size="16MiB") as own:
            assert own.put(KEY, b"child") is Answer.OK
            assert bytes(own.get(KEY)) == b"child"

    in_child(child)
    assert bytes(ns.get(KEY)) == b"parent"
    with Namespace.open(uri, pool_size="16MiB") as own:
        assert bytes(own.get(KEY)) == b"child"
