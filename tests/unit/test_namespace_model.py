# SPDX-License-Identifier: Apache-2.0
"""The namespace against a dictionary, with reopens and power cuts that hypothesis chooses.

The device is faulty+ram: at the nth write or flush after an open it is cut, a seeded subset of what
was not flushed is lost, and everything fails until it is opened again. What must hold then, for
each key: the value is one that it had since the last sync or was being given, never another one,
and swap entries are gone.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hifc import Answer, HiFCError, Namespace

KEYS = st.integers(0, 9)
SIZES = st.sampled_from([1, 100, 4000, 4096, 5000, 40_000, 150_000])
SEEDS = st.integers(0, 1 << 30)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def alive(step: Callable[..., None]) -> Callable[..., None]:
    """A step on a device that was cut opens it again first.

    Not a precondition: when the cut comes depends on timing, and hypothesis wants to choose steps
    without.
    """

    @functools.wraps(step)
    def wrapped(self: NamespaceMachine, **arguments: Any) -> None:
        if self.dead:
            self.recover()
        step(self, **arguments)

    return wrapped


class NamespaceMachine(RuleBasedStateMachine):
    """One namespace, and what it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.ns: Namespace | None = None
        # States of each reuse key since the last sync, oldest first; None: absent.
        self.history: dict[int, list[bytes | None]] = {}
        self.swap: dict[int, bytes] = {}
        self.armed = False
        self.dead = False

    # ---- the life of the device

    @initialize(seed=SEEDS, drive=st.sampled_from(["reactor", "inline"]))
    def format(self, seed: int, drive: str) -> None:
        self.seed = seed
        self.drive = drive
        lba = random.Random(seed).choice([512, 4096])
        self.image = f"model-{lba}?size=16MiB&lba={lba}"
        Namespace.format(f"ram://{self.image}", segment_size="256KiB", force=True)
        self.open()

    def open(self, cut: int = 0) -> None:
        uri = f"faulty+ram://{self.image}&fault_seed={self.seed}"
        self.seed += 1
        self.armed = cut > 0
        if cut:
            uri += f"&fault_cut_write={cut}"
        self.ns = Namespace.open(uri, pool_size="4MiB", drive=self.drive, owner_socket=False)

    def shut(self) -> None:
        namespace, self.ns = self.ns, None
        assert namespace is not None
        namespace.close()

    @contextlib.contextmanager
    def may_be_cut(self) -> Any:
        """An error is right once the device was cut, and wrong before."""
        try:
            yield
        except HiFCError:
            if not self.armed:
                raise
            self.dead = True

    @rule()
    @alive
    def reopen(self) -> None:
        with self.may_be_cut():
            self.shut()
            self.settled()
            self.open()

    @rule(cut=st.integers(1, 25))
    @alive
    def reopen_with_a_cut_ahead(self, cut: int) -> None:
        with self.may_be_cut():
            self.shut()
            self.settled()
            self.armed = True
            self.open(cut)

    def recover(self) -> None:
        if self.ns is not None:
            with contextlib.suppress(HiFCError):
                self.shut()
            self.ns = None
        self.dead = False
        self.swap = {}
        self.open()  # not armed any more
        assert self.ns is not None
        for number, states in self.history.items():
            found = self.ns.get(key(number))
            value = None if found is None else found.tobytes()
            assert value in states, f"key {number} holds what it never did since the last sync"
            self.history[number] = [value]
        assert self.ns.check().ok, self.ns.check().first_problem

    def settled(self) -> None:
        """Everything acknowledged is durable, and swap entries end with their process."""
        self.history = {number: states[-1:] for number, states in self.history.items()}
        self.swap = {}

    # ---- requests

    def now(self, number: int) -> bytes | None:
        return self.history.get(number, [None])[-1]

    def attempt(self, number: int, value: bytes | None) -> None:
        """It may be so from now on: in flight."""
        states = self.history.setdefault(number, [None])
        states.insert(len(states) - 1, value)

    def accept(self, number: int, value: bytes | None) -> None:
        self.history.setdefault(number, [None]).append(value)

    @rule(number=KEYS, size=SIZES, seed=SEEDS, parts=st.sampled_from([1, 1, 2, 5]))
    @alive
    def put(self, number: int, size: int, seed: int, parts: int) -> None:
        value = random.Random(seed).randbytes(size)
        parts = parts if size % parts == 0 else 1
        before = self.now(number)
        if before is None:
            self.attempt(number, value)
        with self.may_be_cut():
            answer = self.ns.put(key(number), value, parts=parts)
            if before is None:
                assert answer is Answer.OK
                self.accept(number, value)
            else:
                assert answer is Answer.EXISTS

    @rule(number=KEYS, size=SIZES, seed=SEEDS)
    @alive
    def put_swap(self, number: int, size: int, seed: int) -> None:
        value = random.Random(seed).randbytes(size)
        with self.may_be_cut():
            assert self.ns.put(key(100 + number), value, cls="swap") is Answer.OK
            self.swap[number] = value

    @rule(number=KEYS, swap=st.booleans())
    @alive
    def delete(self, number: int, swap: bool) -> None:
        if swap:
            with self.may_be_cut():
                assert self.ns.delete(key(100 + number)) == (number in self.swap)
                self.swap.pop(number, None)
            return
        there = self.now(number) is not None
        self.attempt(number, None)
        with self.may_be_cut():
            assert self.ns.delete(key(number)) == there
            self.accept(number, None)

    @rule(number=KEYS, swap=st.booleans())
    @alive
    def get(self, number: int, swap: bool) -> None:
        expected = self.swap.get(number) if swap else self.now(number)
        with self.may_be_cut():
            found = self.ns.get(key(100 + number if swap else number))
            assert (None if found is None else found.tobytes()) == expected

    @rule(number=KEYS, low=st.floats(0, 1), high=st.floats(0, 1))
    @alive
    def get_range(self, number: int, low: float, high: float) -> None:
        expected = self.now(number)
        size = len(expected or b"x")
        offset = min(int(low * size), size - 1)
        length = max(1, int(high * (size - offset)))
        with self.may_be_cut():
            found = self.ns.get_range(key(number), offset, length)
            if expected is None:
                assert found is None
            else:
                assert found is not None
                assert found.tobytes() == expected[offset : offset + length]

    @rule(seed=SEEDS, size=SIZES, numbers=st.sets(KEYS, min_size=1))
    @alive
    def put_many(self, seed: int, size: int, numbers: set[int]) -> None:
        rng = random.Random(seed)
        values = {number: rng.randbytes(size) for number in sorted(numbers)}
        before = {number: self.now(number) for number in values}
        for number, value in values.items():
            if before[number] is None:
                self.attempt(number, value)
        with self.may_be_cut():
            ticket = self.ns.put_many([key(n) for n in values], list(values.values()))
            ticket.wait()
            for number, answer in zip(values, ticket.answers.tolist(), strict=True):
                if answer == Answer.OK:
                    assert before[number] is None
                    self.accept(number, values[number])
                elif answer >= 0:
                    assert answer == (Answer.RETRY if before[number] is None else Answer.EXISTS)
            ticket.raise_for_errors()

    @rule(number=KEYS, seed=SEEDS, commit=st.booleans())
    @alive
    def two_phases(self, number: int, seed: int, commit: bool) -> None:
        if self.now(number) is not None:
            return
        rng = random.Random(seed)
        parts = rng.choice([1, 2, 4])
        value = rng.randbytes(parts * 8192)
        self.attempt(number, value)
        with self.may_be_cut(), self.ns.reserve(key(number), len(value), parts=parts) as room:
            assert room
            for part in rng.sample(range(parts), parts):
                room.write(part * 8192, value[part * 8192 : (part + 1) * 8192])
            if commit:
                assert room.commit() is Answer.OK
                self.accept(number, value)

    @rule(seed=SEEDS, count=st.integers(1, 12))
    @alive
    def burst(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            if self.dead:
                return
            number, size = rng.randrange(10), rng.choice([10, 4096, 5000, 40_000])
            match rng.randrange(5):
                case 0 | 1:
                    self.put(number=number, size=size, seed=rng.randrange(1 << 30), parts=1)
                case 2:
                    self.delete(number=number, swap=False)
                case 3:
                    self.put_swap(number=number, size=size, seed=rng.randrange(1 << 30))
                case 4:
                    self.get(number=number, swap=rng.random() < 0.5)

    @rule(seed=SEEDS, cut=st.integers(1, 60))
    @alive
    def crash(self, seed: int, cut: int) -> None:
        """Work with syncs in between, on a device that is cut somewhere in it."""
        self.reopen_with_a_cut_ahead(cut=cut)
        rng = random.Random(seed)
        for _ in range(8):
            if self.dead:
                break
            self.burst(seed=rng.randrange(1 << 30), count=rng.randrange(1, 6))
            if not self.dead:
                self.sync()
        if self.dead:
            self.recover()

    @rule()
    @alive
    def sync(self) -> None:
        with self.may_be_cut():
            self.ns.sync()
            self.history = {number: states[-1:] for number, states in self.history.items()}

    # ---- what must hold between any two steps

    @invariant()
    def look_ups_agree(self) -> None:
        if self.ns is None or self.dead or self.armed:
            return
        found = {entry.key: entry.length_bytes for entry in self.ns.list()}
        expected = {
            key(number): len(states[-1])
            for number, states in self.history.items()
            if states[-1] is not None
        } | {key(100 + number): len(value) for number, value in self.swap.items()}
        assert found == expected
        keys = [key(number) for number in range(10)]
        there = [self.now(number) is not None for number in range(10)]
        assert (self.ns.lookup(keys) == np.where(there, Answer.OK, Answer.MISS)).all()
        assert self.ns.longest_prefix(keys) == [*there, False].index(False)
        stats = self.ns.stats()
        assert stats.entries == len(expected)
        parts = stats.live_bytes + stats.dead_bytes + stats.free_bytes + stats.metadata_bytes
        assert parts == stats.capacity_bytes

    def teardown(self) -> None:
        if self.dead:
            self.recover()
        with self.may_be_cut():
            self.ns.close()


@pytest.mark.usefixtures("faulty_library")
def test_namespace_is_a_dictionary() -> None:
    run_state_machine_as_test(
        NamespaceMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("faulty_library")
def test_namespace_is_a_dictionary_for_long() -> None:
    run_state_machine_as_test(
        NamespaceMachine,
        settings=settings(
            max_examples=400,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
