# SPDX-License-Identifier: Apache-2.0
"""Tickets in asyncio: awaited by one task or many, in one loop or several, cancelled, dropped."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hifc import Answer, ConfigError, Namespace, Ticket

if TYPE_CHECKING:
    from conftest import Opener

COUNT = 32
SIZE = 64 << 10


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def rows(ns: Namespace) -> Any:
    memory = ns.buffer(COUNT * SIZE).reshape(COUNT, SIZE)
    memory[:] = np.arange(COUNT, dtype=np.uint8).reshape(-1, 1)
    return memory


def put_all(ns: Namespace, memory: Any) -> Ticket:
    return ns.put_many([key(i) for i in range(COUNT)], memory)


def test_await_a_ticket(device: Opener) -> None:
    ns = device.open()
    memory = rows(ns)

    async def main() -> None:
        ticket = await put_all(ns, memory)
        assert ticket.raise_for_errors().ok
        back = np.zeros((COUNT, SIZE), dtype=np.uint8)
        ticket = await ns.get_many([key(i) for i in range(COUNT)], back)
        assert ticket.ok
        assert (back == memory).all()
        assert await ticket is ticket  # again, when it is done

    asyncio.run(main())


class Gate:
    """A namespace whose tickets seem not to be done before `open`."""

    def __init__(self, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = ns
        self._is_open = False
        lib = ns._handle.lib
        wait = lib.hifc_ticket_wait
        monkeypatch.setattr(
            lib, "hifc_ticket_wait", lambda *arguments: self._is_open and wait(*arguments)
        )

    def open(self) -> None:
        self._is_open = True


@pytest.fixture
def gate(ram: Opener, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(ram.open(), monkeypatch)


def test_the_loop_goes_on_meanwhile(gate: Gate) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            if ticks > 5:
                gate.open()
            await asyncio.sleep(0)

    async def main() -> None:
        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        ticket = await asyncio.wait_for(put_all(gate.ns, rows(gate.ns)), 120)
        ticker.cancel()
        assert ticket.ok

    asyncio.run(main())
    assert ticks > 5


def test_many_tasks_await_many_tickets_and_one(device: Opener) -> None:
    ns = device.open()

    async def one(number: int) -> Any:
        ticket = await ns.put_many([key(number)], [bytes([number]) * 10_000])
        assert ticket.ok
        out = bytearray(10_000)
        assert (await ns.get_many([key(number)], [out])).ok
        return bytes(out)

    async def main() -> None:
        results = await asyncio.gather(*(one(i) for i in range(100)))
        assert results == [bytes([i]) * 10_000 for i in range(100)]

        async def wait_for(ticket: Ticket) -> Ticket:
            return await ticket

        ticket = ns.get_many([key(i) for i in range(100)], [bytearray(10_000) for _ in range(100)])
        assert set(await asyncio.gather(*(wait_for(ticket) for _ in range(10)))) == {ticket}

    asyncio.run(main())


def test_two_loops_await_one_ticket(device: Opener) -> None:
    ns = device.open()
    memory = rows(ns)
    failures: list[BaseException] = []

    async def main(ticket: Ticket) -> None:
        assert (await ticket).ok

    def run(ticket: Ticket) -> None:
        try:
            asyncio.run(main(ticket))
        except BaseException as error:  # noqa: BLE001  (raised in the test's thread)
            failures.append(error)

    for _ in range(10):
        ns.delete(key(0))
        ticket = ns.put_many([key(0)], memory[:1])
        threads = [threading.Thread(target=run, args=(ticket,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert not failures


def test_cancelled_await_leaves_the_ticket_whole(gate: Gate) -> None:
    memory = rows(gate.ns)

    async def main() -> None:
        ticket = put_all(gate.ns, memory)
        task = asyncio.ensure_future(asyncio.wait_for(ticket, 120))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not ticket.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert (await ticket).ok
        put_all(gate.ns, memory)  # dropped in a loop

    asyncio.run(main())
    gc.collect()
    assert gate.ns.put(key(99), b"x") is Answer.OK


def test_no_descriptor_is_leaked(device: Opener) -> None:
    ns = device.open()
    memory = rows(ns)

    async def main() -> int:
        await put_all(ns, memory)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(50):
            await ns.get_many([key(i) for i in range(COUNT)], memory)
        return len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208

    assert asyncio.run(main()) <= 1


def test_close_in_a_task_wakes_those_who_wait(device: Opener) -> None:
    ns = device.open()
    memory = rows(ns)

    async def main() -> None:
        ticket = put_all(ns, memory)
        waiter = asyncio.ensure_future(asyncio.wait_for(ticket, 120))
        await asyncio.sleep(0)
        ns.close()
        assert (await waiter).ok

    asyncio.run(main())


def test_inline_cannot_be_awaited(device: Opener) -> None:
    ns = device.open(drive="inline")

    async def main() -> None:
        ticket = ns.put_many([key(1)], [b"x"])
        with pytest.raises(ConfigError, match="reactor"):
            await ticket
        assert ticket.wait(120)
        with pytest.raises(ConfigError, match="reactor"):
            await ticket

    asyncio.run(main())
