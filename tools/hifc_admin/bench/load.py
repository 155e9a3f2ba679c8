# SPDX-License-Identifier: Apache-2.0
"""Puts load on an open namespace and measures it: the engine of bench.

A load keeps a number of batches in flight, each with buffers and prepared requests of its own, so
that a turn costs one call down. Time of a batch is libhifc's own, from submission to its last
completion. Bounded in time, in bytes written, and in what it remembers.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hifc.namespace.namespace import Namespace
from hifc.namespace.ticket import Ticket
from hifc.native_lib.memory import ByteArray
from hifc.native_lib.request import Answer, BlockClass, KeyArray, Op, make_requests
from hifc.util.units import page_up

SAMPLES_MAX = 1_000_000
DELETE_AT_ONCE = 256
DELETE_TRIES = 10
RETRY_WAIT_S = 0.01
PREFIX = b"hifc-bench"  # of every key that bench writes; six bytes tell them apart
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}


@dataclass
class Outcome:
    """Of one load. Times are those of batches, in microseconds."""

    name: str
    value_bytes: int
    batch: int
    depth: int
    elapsed_s: float = 0.0
    cpu_s: float = 0.0  # of this process, all threads
    operations: int = 0
    moved_bytes: int = 0
    not_done: int = 0  # answered, and no value moved
    answers: dict[Answer, int] = field(default_factory=dict)  # what these were answered
    failed: int = 0
    first_error: str = ""
    times_us: list[float] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        elapsed_s = max(self.elapsed_s, 1e-9)
        gigabytes = self.moved_bytes / 1e9
        return {
            "load": self.name,
            "value_bytes": self.value_bytes,
            "batch": self.batch,
            "depth": self.depth,
            "elapsed_s": round(self.elapsed_s, 3),
            "operations": self.operations,
            "operations_per_s": round(self.operations / elapsed_s, 1),
            "bytes": self.moved_bytes,
            "bytes_per_s": round(self.moved_bytes / elapsed_s),
            "cpu_s_per_gb": round(self.cpu_s / gigabytes, 3) if gigabytes else None,
            "not_done": self.not_done,
            "answers": {answer.name.lower(): count for answer, count in self.answers.items()},
            "failed": self.failed,
            "latency_us": self.latency_us(),
        }

    def latency_us(self) -> dict[str, float | None]:
        if not self.times_us:
            return dict.fromkeys(QUANTILES)
        times = np.quantile(self.times_us, list(QUANTILES.values()))
        return {name: round(float(t), 1) for name, t in zip(QUANTILES, times, strict=True)}


@dataclass
class _Slot:
    """Memory and requests of one batch in flight."""

    requests: npt.NDArray[np.void]
    buffer: ByteArray


# An operation and the keys of a batch; None ends the load. Asked for with the size of a batch.
Turn: TypeAlias = tuple[Op, KeyArray]
Choose: TypeAlias = Callable[[int], Turn | None]


class Load:
    """Runs loads on a namespace. progress is called with the seconds that one has taken."""

    def __init__(self, namespace: Namespace, value_bytes: int, depth: int, batch: int = 1) -> None:
        self.namespace = namespace
        self.value_bytes = value_bytes
        self.depth = depth
        self.batch = batch
        self._slots = [self._slot() for _ in range(depth)]

    def _slot(self) -> _Slot:
        room = page_up(self.value_bytes)
        buffer = self.namespace.buffer(room * self.batch)
        buffer[:] = np.frombuffer(secrets.token_bytes(256), dtype=np.uint8)[
            np.arange(buffer.size) % 256
        ]
        requests = make_requests(self.batch)
        start = self.namespace.offset(buffer)
        requests["buffer_offset"] = start + np.arange(self.batch, dtype=np.uint64) * room
        requests["capacity"] = room
        return _Slot(requests, buffer)

    def run(
        self, name: str, choose: Choose, duration_s: float, progress: Callable[[float], None]
    ) -> Outcome:
        """Submits what choose names until it names nothing or the time is over."""
        outcome = Outcome(name, self.value_bytes, self.batch, self.depth)
        free = list(self._slots)
        pending: deque[tuple[Ticket, _Slot]] = deque()
        start_s, cpu_s = time.monotonic(), time.process_time()
        more = True
        while more or pending:
            now_s = time.monotonic() - start_s
            more = more and now_s < duration_s
            turn = choose(self.batch) if more and free else None
            if turn is not None:
                slot = free.pop()
                pending.append((self._submit(slot, turn), slot))
                continue
            more = more and not free
            if pending:
                ticket, slot = pending.popleft()
                ticket.wait()
                _count(outcome, ticket, slot.requests)
                free.append(slot)
            progress(now_s)
        outcome.elapsed_s = time.monotonic() - start_s
        outcome.cpu_s = time.process_time() - cpu_s
        return outcome

    def _submit(self, slot: _Slot, turn: Turn) -> Ticket:
        operation, slot.requests["key"] = turn
        slot.requests["op"] = int(operation)
        slot.requests["cls"] = int(BlockClass.SWAP)
        # For a get, 0 stands for the whole value.
        slot.requests["length"] = self.value_bytes if operation == Op.PUT else 0
        return self.namespace.submit(slot.requests)


def _count(outcome: Outcome, ticket: Ticket, requests: npt.NDArray[np.void]) -> None:
    status = requests["status"]
    done = int(np.count_nonzero(status == Answer.OK))
    failed = int(np.count_nonzero(status < 0))
    outcome.operations += done
    outcome.failed += failed
    outcome.not_done += status.size - done - failed
    for answer, count in zip(*np.unique(status[status > 0], return_counts=True), strict=True):
        kind = Answer(answer)
        outcome.answers[kind] = outcome.answers.get(kind, 0) + int(count)
    outcome.moved_bytes += ticket.bytes
    if failed and not outcome.first_error:
        try:
            ticket.raise_for_errors()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
            outcome.first_error = str(error)
    if done and len(outcome.times_us) < SAMPLES_MAX:
        outcome.times_us.append(ticket.elapsed_s * 1e6)


# ---- keys


class Scratch:
    """Keys that bench writes and deletes again, in no other program's way."""

    def __init__(self, count: int) -> None:
        self.keys = np.zeros((count, 16), dtype=np.uint8)
        self.keys[:, :10] = np.frombuffer(PREFIX, dtype=np.uint8)
        self.keys[:, 10:12] = np.frombuffer(secrets.token_bytes(2), dtype=np.uint8)
        self.keys[:, 12:] = np.arange(count, dtype="<u4").view(np.uint8).reshape(-1, 4)

    def delete(self, namespace: Namespace) -> int:
        """Deletes them all; returns how many could not be."""
        left: KeyArray = self.keys
        for _ in range(DELETE_TRIES):
            missed = [self._delete(namespace, part) for part in _parts(left)]
            left = np.concatenate(missed) if missed else left[:0]
            if not len(left):
                break
            time.sleep(RETRY_WAIT_S)
        return len(left)

    @staticmethod
    def _delete(namespace: Namespace, keys: KeyArray) -> KeyArray:
        requests = make_requests(len(keys), Op.DELETE)
        requests["key"] = keys
        namespace.submit(requests).wait()
        return keys[~np.isin(requests["status"], (Answer.OK, Answer.MISS))]


def _parts(keys: KeyArray) -> Iterator[KeyArray]:
    for start in range(0, len(keys), DELETE_AT_ONCE):
        yield keys[start : start + DELETE_AT_ONCE]


# ---- what the next batch does


def sequential_puts(keys: KeyArray) -> Choose:
    """Each key once, in order."""
    at = itertools.count()

    def choose(count: int) -> Turn | None:
        start = next(at) * count
        return None if start + count > len(keys) else (Op.PUT, keys[start : start + count])

    return choose


def sequential_gets(keys: KeyArray) -> Choose:
    """Round and round."""
    at = itertools.count()

    def choose(count: int) -> Turn | None:
        return Op.GET, keys[(next(at) * count + np.arange(count)) % len(keys)]

    return choose


def random_gets(keys: KeyArray, seed: int = 1) -> Choose:
    chance = np.random.default_rng(seed)

    def choose(count: int) -> Turn | None:
        return Op.GET, keys[chance.integers(0, len(keys), count)]

    return choose


def mixed(keys: KeyArray, fresh: KeyArray, put_share: float, seed: int = 2) -> Choose:
    """Random gets of `keys`, and puts of `fresh` ones in order until they are used up."""
    chance = np.random.default_rng(seed)
    get, put = random_gets(keys), sequential_puts(fresh)

    def choose(count: int) -> Turn | None:
        return put(count) if chance.random() < put_share else get(count)

    return choose
