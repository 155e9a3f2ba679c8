# SPDX-License-Identifier: Apache-2.0
"""One namespace in many threads: no wrong byte, no lost count, no call inside after close."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hifc import Answer, ClosedError, Namespace, Ticket
from hifc.namespace.ring import RingStatus

if TYPE_CHECKING:
    from conftest import Opener

THREADS = 6


def key(thread: int, number: int) -> bytes:
    return thread.to_bytes(8, "little") + number.to_bytes(8, "little")


def run(work: Callable[[int], None], count: int = THREADS) -> None:
    """In count threads at once; the first error of any is raised."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  (raised in the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "hangs"
    if failures:
        raise failures[0]


def test_mixed_work(ns: Namespace) -> None:
    def work(thread: int) -> None:
        rng = random.Random(thread)
        model: dict[int, bytes] = {}
        for step in range(150):
            number = rng.randrange(10)
            match rng.randrange(5):
                case 0 | 1:
                    data = rng.randbytes(rng.choice([10, 5000, 20_000]))
                    assert ns.put(key(thread, number), data, cls="swap") is Answer.OK
                    model[number] = data
                case 2:
                    found = ns.get(key(thread, number))
                    expected = model.get(number)
                    assert (None if found is None else found.tobytes()) == expected, step
                case 3:
                    assert ns.delete(key(thread, number)) == (number in model)
                    model.pop(number, None)
                case 4:
                    out = [ns.buffer(20_000) for _ in range(5)]
                    ticket = ns.get_many([key(thread, i) for i in range(5)], out)
                    answers = ticket.raise_for_errors().answers.tolist()
                    for i, answer in enumerate(answers):
                        if answer == Answer.OK:
                            expected = model[i]
                            assert out[i][: len(expected)].tobytes() == expected
                        else:
                            assert answer == Answer.RETRY or i not in model

    run(work)
    gc.collect()
    stats = ns.stats()
    assert stats.requests_inflight == 0
    assert ns.check().ok


def test_all_threads_wait_for_one_ticket(ns: Namespace) -> None:
    for _ in range(20):
        ns.put_many([key(0, i) for i in range(8)], [b"x" * 50_000] * 8).wait()
        out = [np.zeros(50_000, dtype=np.uint8) for _ in range(8)]
        ticket = ns.get_many([key(0, i) for i in range(8)], out)

        def wait(thread: int, ticket: Ticket = ticket, out: list[np.ndarray] = out) -> None:
            while not ticket.wait(0.0 if thread % 2 else None):
                time.sleep(0)
            assert ticket.ok  # and then the bytes are there, whoever copied them
            assert all((one == ord("x")).all() for one in out)
            assert ticket.bytes == 400_000

        run(wait)


def test_close_while_others_work(device: Opener) -> None:
    for drive in ("reactor", "inline"):
        ns = device.open(drive=drive)
        at_work = threading.Barrier(THREADS + 1)

        def work(thread: int, ns: Namespace = ns, at_work: threading.Barrier = at_work) -> None:
            kept = []
            try:
                for number in range(1 << 30):
                    ns.put(key(thread, number % 100), b"x" * 5000, cls="swap")
                    ns.get(key(thread, number % 100))
                    kept.append(ns.put_many([key(thread, 1000)], [b"y" * 50_000], cls="swap"))
                    kept = kept[-4:]
                    if number == 4:
                        at_work.wait(120)
            except ClosedError:
                assert all(ticket.wait(120) for ticket in kept)

        def close(ns: Namespace = ns, at_work: threading.Barrier = at_work) -> None:
            at_work.wait(120)
            ns.close()

        closer = threading.Thread(target=close)
        closer.start()
        run(work)
        closer.join(120)
        assert not closer.is_alive()
        assert ns.closed
    with device.open() as again:
        assert again.check().ok


def test_close_from_many_threads(device: Opener) -> None:
    for _ in range(5):
        ns = device.open()
        ns.put_many([key(0, i) for i in range(8)], [b"x" * 50_000] * 8, cls="swap")
        run(lambda _, ns=ns: ns.close())
        assert ns.closed


def test_buffers_made_and_dropped_everywhere(ns: Namespace) -> None:
    gc.collect()
    before = ns.stats().buffer_used_bytes

    def work(thread: int) -> None:
        rng = random.Random(thread)
        held = []
        for _ in range(300):
            buffer = ns.buffer(rng.randrange(1, 100_000))
            buffer[:] = thread
            held.append(buffer)
            if len(held) > 8:
                victim = held.pop(rng.randrange(len(held)))
                assert (victim == thread).all()

    run(work)
    gc.collect()
    assert ns.stats().buffer_used_bytes == before


@pytest.fixture
def no_switches() -> Iterator[None]:
    """Python takes the interpreter from no thread that does not give it away."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_switches")
def test_the_gil_is_free_while_waiting(ram: Opener) -> None:
    """A thread waits in libhifc for what only another thread of Python will do."""
    ns = ram.open()
    ring = ns.ring(ns.buffer(4096), 4096, slots=16)
    ring.statuses[3] = RingStatus.WAITING
    answers: list[bool] = []
    waits = threading.Thread(target=lambda: answers.append(ring.wait([3], 120)), daemon=True)
    waits.start()
    ring.statuses[3] = RingStatus.OK  # here at all only because the thread let go
    ring.kick()
    waits.join(120)
    assert answers == [True]
