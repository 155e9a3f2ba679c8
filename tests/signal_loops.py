# SPDX-License-Identifier: Apache-2.0
"""The process of tests/unit/test_signals.py: loops under a timer whose handler raises.

    python signal_loops.py namespace-reactor 4000

Prints what it counted as one line of JSON. A wrong value ends it at once.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hifc import Answer, HiFC, HiFCError, Namespace


class Interrupted(KeyboardInterrupt):
    """What the handler raises."""


class Timer:
    """Sends this process SIGALRM after a random time, again and again, while a step runs."""

    def __init__(self, seed: int) -> None:
        self.raised = 0
        self._random = random.Random(seed)
        self._armed = False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *_arguments: object) -> None:
        if self._armed:
            self._armed = False
            self.raised += 1
            raise Interrupted

    def step(self, work: Callable[[], Any], longest_s: float = 2e-3) -> bool:
        """Runs work, and interrupts it after at most longest_s. False: it was interrupted."""
        try:
            self._armed = True
            after_s = longest_s * self._random.choice([0.01, 0.05, 0.25, 1.0])
            signal.setitimer(signal.ITIMER_REAL, after_s)
            work()
        except Interrupted:
            return False
        finally:
            self._armed = False
        return True


def key(number: int) -> bytes:
    return b"signal" + number.to_bytes(10, "little")


class NamespaceLoop:
    """Puts, gets, batches, two-phase puts, leases and deletes of 16 swap keys."""

    def __init__(self, drive: str) -> None:
        Namespace.format("ram://signals?size=64MiB", segment_size="2MiB", force=True)
        self.ns = Namespace.open("ram://signals?size=64MiB", drive=drive, pool_size="4MiB")
        self._random = random.Random(5)
        self._versions: dict[int, set[int]] = {number: {-1} for number in range(16)}
        self._version = 0
        self.wrong = self.lost = 0

    def value(self, number: int, version: int) -> np.ndarray:
        """What a key holds in a version; its first bytes tell which."""
        size = 3000 + 977 * number
        made = np.full(size, (number * 31 + version) % 251, dtype=np.uint8)
        made[:8] = np.frombuffer(version.to_bytes(8, "little"), dtype=np.uint8)
        return made

    def check(self, number: int, found: np.ndarray | None) -> None:
        """A value that was read is one that may be there; nothing else is afterwards."""
        version = -1 if found is None else int.from_bytes(found[:8].tobytes(), "little")
        if version not in self._versions[number]:
            self.lost += 1
        elif found is not None and not np.array_equal(found, self.value(number, version)):
            self.wrong += 1
        else:
            return
        raise SystemExit(f"key {number}: version {version}, may be {self._versions[number]}")

    def step(self, timer: Timer) -> None:
        """One operation; what an interruption leaves open stays possible until it was read."""
        number = self._random.randrange(16)
        match self._random.randrange(6):
            case 0 | 1:
                self._write(timer, number, self._put)
            case 2:
                self._write(timer, number, self._put_two_phases)
            case 3:
                self._write(timer, number, self._put_batch)
            case 4:
                before = self._versions[number]
                self._versions[number] = before | {-1}
                if timer.step(lambda: self.ns.delete(key(number))):
                    self._versions[number] = {-1}
            case 5:
                self._read(timer, number)

    def _write(self, timer: Timer, number: int, put: Callable[[int, np.ndarray], bool]) -> None:
        self._version += 1
        version = self._version
        before = self._versions[number]
        self._versions[number] = before | {version}
        done: list[bool] = []
        data = self.value(number, version)
        if timer.step(lambda: done.append(put(number, data))):
            self._versions[number] = {version} if done[0] else before

    def _put(self, number: int, data: np.ndarray) -> bool:
        return self.ns.put(key(number), data, cls="swap") == Answer.OK

    def _put_batch(self, number: int, data: np.ndarray) -> bool:
        ticket = self.ns.put_many([key(number)], [data], cls="swap")
        ticket.wait()
        return bool(ticket.answers[0] == Answer.OK)

    def _put_two_phases(self, number: int, data: np.ndarray) -> bool:
        with self.ns.reserve(key(number), data.size, cls="swap") as held:
            if not held:
                return False
            held.write(0, data[:4096])
            if data.size > 4096:
                return False  # leaving the block aborts it
            return held.commit() == Answer.OK

    def _read(self, timer: Timer, number: int) -> None:
        found: list[np.ndarray | None] = []
        with_lease = self._random.random() < 0.3

        def read() -> None:
            if with_lease:
                with self.ns.lease([key(number)]):
                    found.append(self.ns.get(key(number)))
            elif self._random.random() < 0.5:
                out = np.zeros(3000 + 977 * number, dtype=np.uint8)
                ticket = self.ns.get_many([key(number)], [out])
                ticket.wait()
                if ticket.answers[0] in (Answer.OK, Answer.MISS):  # else an abandoned put runs
                    found.append(out if ticket.answers[0] == Answer.OK else None)
            else:
                found.append(self.ns.get(key(number)))

        timer.step(read)
        for one in found:
            self.check(number, one)

    def end(self) -> dict[str, int]:
        """After everything: each key is what it may be, and nothing is left."""
        gc.collect()
        self.ns.drain()
        for number in range(16):
            self.check(number, self.ns.get(key(number)))
        gc.collect()
        self.ns.drain()
        self.ns._handle.collect()
        stats = self.ns.stats()
        left = {
            "loans": len(self.ns._handle.loans) + stats.reservations + stats.leases,
            "inflight": stats.requests_inflight,
            "wrong": self.wrong,
            "lost": self.lost,
        }
        self.ns.close()
        return left


class EngineSignals:
    """Stores, loads, deletes, attention, offload and sync of an engine."""

    def __init__(self) -> None:
        from engine_loop import EngineLoop

        device = "ram://signals-engine?size=16MiB"
        Namespace.format(device, segment_size="256KiB", force=True)
        self.engine = HiFC(
            device=device,
            memory_budget=48 << 10,
            swap_buffer_size="256KiB",
            host_tier_bytes=24 << 10,
            swap_batch_size=2,
            pool_size="2MiB",
            owner_socket=False,
        )
        self._loop = EngineLoop(self.engine)

    def step(self, timer: Timer) -> None:
        """Some operations."""
        timer.step(lambda: self._loop.run(4))

    def end(self) -> dict[str, int]:
        """Each key is what it may be, the accounts agree, and nothing is left in flight."""
        self._loop.check()
        gc.collect()
        self.engine.namespace.drain()
        inflight = self.engine.namespace.stats().requests_inflight
        self.engine.close()
        return {"engine_operations": self._loop.operations, "inflight": inflight}


class CacheSignals:
    """Forwards, saved and loaded prefixes of a small model."""

    def __init__(self) -> None:
        import torch
        from cache_loop import CacheLoop

        torch.set_num_threads(1)
        device = "ram://signals-cache?size=16MiB"
        Namespace.format(device, segment_size="512KiB", force=True)
        self.ns = Namespace.open(device, pool_size="8MiB", owner_socket=False)
        self._loop = CacheLoop(self.ns)
        self._rounds = 0

    def step(self, timer: Timer) -> None:
        """A round; an interrupted one is gone on with, which may be interrupted as well."""
        if timer.step(self._loop.once, longest_s=0.2):
            self._rounds += 1
        else:
            timer.step(self._loop.go_on, longest_s=0.02)

    def end(self) -> dict[str, int]:
        """A whole round is exact, and nothing is left of all of them."""
        self._loop.once()
        self._loop.close()
        gc.collect()
        self.ns.drain()
        self.ns._handle.collect()
        stats = self.ns.stats()
        left = {
            "rounds": self._rounds,
            "resets": self._loop.resets,
            "inflight": stats.requests_inflight,
            "loans": len(self.ns._handle.loans) + stats.reservations + stats.leases,
            "entries": stats.entries,
        }
        self.ns.close()
        return left


LOOPS: dict[str, Callable[[], Any]] = {
    "engine": EngineSignals,
    "cache": CacheSignals,
    "namespace-reactor": lambda: NamespaceLoop("reactor"),
    "namespace-inline": lambda: NamespaceLoop("inline"),
}


def main(name: str, interrupts: int) -> None:
    """Runs a loop until the timer has raised that often."""
    faulthandler.enable()
    loop = LOOPS[name]()
    timer = Timer(7)
    steps = 0
    while timer.raised < interrupts:
        steps += 1
        try:
            loop.step(timer)
        except HiFCError as error:
            raise SystemExit(f"step {steps}: {type(error).__name__}: {error}") from error
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"steps": steps, "interrupts": timer.raised, **loop.end()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
