# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every place of every operation of a namespace: nothing is wrong, lost, leaked or stuck.

tests/interrupts.py raises the exception of a signal handler wherever CPython can run one. Real
signals are in tests/unit/test_signals.py.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupts import Interrupted, each_place, interrupt, places

from hifc import Answer, ClosedError, Namespace, make_requests
from hifc.namespace.ring import RingStatus, make_descriptors
from hifc.native_lib.handle import collect_namespaces
from hifc.native_lib.request import Op

if TYPE_CHECKING:
    from conftest import Opener

BLOCK = 20_000
KEPT = 4  # keys that no operation writes


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What is there already is not looked at by the many collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def key(number: int) -> bytes:
    return b"interrupted" + number.to_bytes(5, "little")


def value(seed: int, size: int = BLOCK) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Watched:
    """A namespace with values that stay, and what must hold after each interruption."""

    def __init__(self, ns: Namespace) -> None:
        self.ns = ns
        for number in range(KEPT):
            assert ns.put(key(number), value(number)) is Answer.OK
        self.room = ns.buffer(1 << 16)
        self.settle()
        self.loans = len(ns._handle.loans)
        self.used_bytes = ns.stats().buffer_used_bytes

    def settle(self) -> None:
        gc.collect()
        self.ns.drain()
        self.ns._handle.collect()

    def check(self, where: str) -> None:
        """What is kept is there, exact, and everything that was made has been given back."""
        self.settle()
        for number in range(KEPT):
            found = self.ns.get(key(number), out=self.room)
            assert found is not None, where
            assert (found == value(number)).all(), where
        self.settle()
        stats = self.ns.stats()
        assert stats.requests_inflight == 0, where
        assert stats.reservations == 0, where
        assert stats.leases == 0, where
        assert len(self.ns._handle.loans) == self.loans, where
        # Pages of the library's own come and go with batches; buffers do not.
        assert stats.buffer_used_bytes < self.used_bytes + BLOCK, where


@pytest.fixture(params=["reactor", "inline"])
def watched(request: pytest.FixtureRequest, ram: Opener) -> Iterator[Watched]:
    ns = ram.open(drive=request.param, pool_size="4MiB")
    ns.put(key(99), value(99))
    ns.delete(key(99))
    yield Watched(ns)
    ns.close()
    assert ns.closed


def put_foreign(ns: Namespace) -> None:
    ns.put(key(10), value(10), cls="swap")


def put_in_place(ns: Namespace) -> None:
    room = ns.buffer(BLOCK)
    room[:] = value(10)
    ns.put(key(10), room, cls="swap")


def get_made(ns: Namespace) -> None:
    assert (ns.get(key(1)) == value(1)).all()


def get_into(ns: Namespace) -> None:
    out = bytearray(BLOCK)
    ns.get(key(1), out=out)
    assert bytes(out) == value(1).tobytes()


def get_range(ns: Namespace) -> None:
    assert (ns.get_range(key(1), 5000, 5000) == value(1)[5000:10_000]).all()


def miss(ns: Namespace) -> None:
    assert ns.get(key(77)) is None


def delete(ns: Namespace) -> None:
    ns.put(key(11), value(11))
    ns.delete(key(11))


def look(ns: Namespace) -> None:
    names = [key(number) for number in range(KEPT)]
    assert ns.longest_prefix(names) == KEPT
    assert (ns.lookup(names) == Answer.OK).all()
    assert ns.exists(key(0))
    ns.touch(names)


def tell(ns: Namespace) -> None:
    assert KEPT <= len(list(ns.list())) <= KEPT + 10
    ns.events()
    ns.stats()
    ns.sync()


def put_many(ns: Namespace) -> None:
    names = [key(20 + number) for number in range(3)]
    ns.put_many(names, [value(20 + number) for number in range(3)], cls="swap").wait()


def get_many(ns: Namespace) -> None:
    out = [np.zeros(BLOCK, dtype=np.uint8) for _ in range(KEPT)]
    ticket = ns.get_many([key(number) for number in range(KEPT)], out)
    ticket.raise_for_errors()
    assert ticket.ok
    assert all((out[number] == value(number)).all() for number in range(KEPT))


def dropped_ticket(ns: Namespace) -> None:
    ns.get_many([key(0)], [ns.buffer(BLOCK)])


def prepared(ns: Namespace) -> None:
    room = ns.buffer(BLOCK)
    requests = make_requests(1, Op.GET)
    requests["key"] = np.frombuffer(key(2), dtype=np.uint8)
    requests["buffer_offset"] = ns.offset(room)
    requests["capacity"] = BLOCK
    ns.submit(requests).wait()
    assert (room == value(2)).all()


def lease(ns: Namespace) -> None:
    with ns.lease([key(0), key(1)]) as held:
        assert (held.answers == Answer.OK).all()


def two_phases(ns: Namespace) -> None:
    with ns.reserve(key(12), BLOCK, cls="swap") as reservation:
        if reservation:
            reservation.write(0, value(12)[:8192])
            reservation.write(8192, value(12)[8192:])
            reservation.commit()
    ns.delete(key(12))


def abort(ns: Namespace) -> None:
    ns.reserve(key(13), BLOCK).abort()
    ns.reserve(key(14), BLOCK)


def ring(ns: Namespace) -> None:
    arena = ns.buffer(4 * 20_480)
    with ns.ring(arena, 20_480, slots=16) as made:
        made.submit(make_descriptors([key(0), key(1)], np.array([0, 5]), np.array([0, 1])))
        made.wait([0, 1])
        if made.statuses[0] == RingStatus.OK:
            assert (arena[:BLOCK] == value(0)).all()
        made.cancel([1])


def awaited(ns: Namespace) -> None:
    if not ns.reactor:
        return

    async def main() -> None:
        out = np.zeros(BLOCK, dtype=np.uint8)
        await ns.get_many([key(3)], [out])
        assert (out == value(3)).all()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


OPERATIONS: list[Callable[[Namespace], None]] = [
    put_foreign,
    put_in_place,
    get_made,
    get_into,
    get_range,
    miss,
    delete,
    look,
    tell,
    put_many,
    get_many,
    dropped_ticket,
    prepared,
    lease,
    two_phases,
    abort,
    ring,
    awaited,
]


@pytest.mark.filterwarnings("ignore:coroutine")  # pytest would keep it, and its ticket
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_each_place_of(operation: Callable[[Namespace], None], watched: Watched) -> None:
    operation(watched.ns)  # what is imported and made once
    watched.check("before")
    seen = each_place(lambda: operation(watched.ns), watched.check)
    # Whatever was made by an interrupted put is the value, or is not there.
    for number in (10, 11, 12, 20, 21, 22):
        found = watched.ns.get(key(number))
        assert found is None or (found == value(number)).all()
    assert seen > 5 or operation is awaited


def test_opening_and_closing(ram: Opener) -> None:
    """A namespace whose opening was interrupted is closed: the device can be opened again."""
    ram.open().close()
    before = len(collect_namespaces())

    def cycle() -> None:
        with Namespace.open(ram.uri, pool_size="1MiB") as ns:
            ns.put(key(1), value(1))

    def check(where: str) -> None:
        gc.collect()
        collect_namespaces()
        with Namespace.open(ram.uri, pool_size="1MiB") as ns:
            found = ns.get(key(1))
            assert found is None or (found == value(1)).all(), where

    assert each_place(cycle, check) > 20
    gc.collect()
    assert len(collect_namespaces()) == before


@pytest.mark.parametrize("what", ["put", "get", "reservation", "lease", "buffer", "ring"])
def test_what_dies_in_one_cycle_with_its_namespace_is_freed(ram: Opener, what: str) -> None:
    """The garbage collector finds them together, and closes the namespace before it has told of the
    others."""
    ram.open().close()
    before = len(collect_namespaces())

    class Owner:
        """Names itself."""

    def cycle() -> None:
        owner: Any = Owner()
        owner.itself = owner
        owner.ns = ns = Namespace.open(ram.uri, pool_size="1MiB")
        keys = [key(number) for number in range(4)]
        if what == "put":
            owner.held = ns.put_many(keys, [value(number) for number in range(4)])
        elif what == "get":
            owner.held = ns.get_many(keys)
        elif what == "reservation":
            owner.held = ns.reserve(key(9), 4096)
        elif what == "lease":
            owner.held = ns.lease(keys)
        elif what == "buffer":
            owner.held = ns.buffer(4096)
        else:
            owner.held = ns.ring(ns.buffer(4096), 4096, slots=16)

    gc.disable()
    try:
        for _ in range(4):
            cycle()
            gc.collect()
    finally:
        gc.enable()
    collect_namespaces()
    assert len(collect_namespaces()) == before


def test_a_call_that_comes_while_another_thread_closes_leaves_nothing(
    ram: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram.open().close()
    before = len(collect_namespaces())

    def cycle() -> None:
        ns = Namespace.open(ram.uri, pool_size="1MiB")
        ready = ns._handle.ready
        blocks = ns.buffer(8192).reshape(2, 4096)

        def ready_and_then_closed() -> None:
            ready()
            monkeypatch.undo()
            ns.close()

        monkeypatch.setattr(ns._handle, "ready", ready_and_then_closed)
        with pytest.raises(ClosedError):
            ns.put_many([key(1), key(2)], blocks)

    cycle()
    gc.collect()
    collect_namespaces()
    assert len(collect_namespaces()) == before


def test_close_can_be_repeated_after_an_exception(ram: Opener) -> None:
    """And what was written by then survives."""
    place = 0
    while True:
        place += 1
        ns = ram.open(pool_size="1MiB")
        ns.put(key(place), value(place))
        ticket = ns.get_many([key(place)], [room := np.zeros(BLOCK, dtype=np.uint8)])
        where = interrupt(ns.close, place)
        ns.close()
        assert ns.closed
        with pytest.raises(ClosedError):
            ns.get(key(place))
        assert ticket.wait(), where
        assert (room == value(place)).all(), where
        with Namespace.open(ram.uri, pool_size="1MiB") as again:
            assert (again.get(key(place)) == value(place)).all(), where
        if where is None:
            break
    assert place > 5


def test_an_interrupted_read_does_not_reach_memory_of_others(ram: Opener) -> None:
    """The report: an exception between the submission and the wait let the device write into
    memory that belonged to somebody else by then."""
    ns = ram.open(pool_size="2MiB")
    size = 100_000
    ns.put(key(1), value(1, size))
    ns.put(key(2), value(2, size))
    lib = ns._handle.lib
    checked = lib.hifc_execute.errcheck

    def interrupted(*_arguments: Any) -> Any:
        raise Interrupted

    for _ in range(3000):
        lib.hifc_execute.errcheck = interrupted
        try:
            with pytest.raises(Interrupted):
                ns.get(key(1))
        finally:
            lib.hifc_execute.errcheck = checked
        found = ns.get(key(2))
        assert found is not None
        assert (found == value(2, size)).all()
    del found
    gc.collect()
    ns.drain()
    ns._handle.collect()
    assert len(ns._handle.loans) == 0


def test_the_tool_sees_places() -> None:
    """Were the tracing broken, everything above would pass."""

    def nothing() -> None:
        pass

    assert places(nothing) == 0
    assert places(lambda: Answer(0)) == 0  # nothing of the package runs
    assert places(collect_namespaces) > 2
    raised = [interrupt(collect_namespaces, place) for place in range(1, 4)]
    assert all(raised)
    assert sys.gettrace() is None
