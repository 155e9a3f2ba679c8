# SPDX-License-Identifier: Apache-2.0
"""After an exception at any instruction of any operation of an engine nothing is wrong, lost,
leaked or stuck."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_loop import EngineLoop, check_accounts, key, pool_bytes, value, version_of
from interrupts import Interrupted, interrupt, unraisable_kept

import hifc.engine
from hifc import DeviceError, HiFC, HiFCPolicy, KVBlock, Namespace, NoSpace
from hifc.blocks import policy as policies
from hifc.blocks.codec import TRAILER_BYTES
from hifc.blocks.policy import POLICIES, NativePolicy
from hifc.namespace.ticket import Ticket
from hifc.util.units import page_up

HOME = Path(hifc.engine.__file__).parent
BUDGET = 48 << 10
TARGET = 0  # the key that operations are about
OTHERS = range(1, 12)
MISSING = 99
_turns = itertools.count()


def settings(**changes: Any) -> dict[str, Any]:
    """Memory for twelve pages of blocks, two of them leave at a time; a tier for about as much."""
    device = changes.get("device", f"ram://engine-interrupts-{next(_turns) % 4}?size=16MiB")
    if "device" not in changes:
        Namespace.format(device, segment_size="256KiB", force=True)
    return {
        "device": device,
        "memory_budget": BUDGET,
        "swap_buffer_size": "256KiB",
        "host_tier_bytes": 0,
        "swap_batch_size": 2,
        "pool_size": "2MiB",
        "owner_socket": False,
        "drive": "reactor",
    } | changes


class Rig:
    """An engine with blocks, which operations are tried on again and again."""

    def __init__(self, **changes: Any) -> None:
        self.hifc = HiFC(settings(**changes))
        self.known: dict[int, int | None] = {}
        self.version = 0
        for number in OTHERS:
            self.store(number)
        self.hifc.offload()
        self.pool_bytes = pool_bytes(self.hifc)

    def store(self, number: int) -> None:
        self.version += 1
        sequence = number % 3 if number % 4 else None
        cls = "reuse" if number % 5 == 2 else "swap"
        self.hifc.store(key(number), value(self.version), cls=cls, sequence=sequence, depth=number)
        self.known[number] = self.version

    def load(self, number: int) -> None:
        assert version_of(self.hifc.load(key(number))) == self.known.get(number), number

    def fill(self) -> None:
        """Memory is full of others than the target."""
        for number in OTHERS:
            self.load(number)

    def observe(self, *wanted: int) -> None:
        mass = np.zeros((2, len(OTHERS) + 1), np.float32)
        mass[:, list(wanted)] = 1
        self.hifc.observe_attention(mass, [key(number) for number in (TARGET, *OTHERS)])

    def go_on(self, turn: int) -> None:
        """What comes first after the interruption: each of the operations in turn."""
        number = OTHERS[turn % len(OTHERS)]
        match turn % 9:
            case 0:
                self.load(number)
            case 1:
                self.store(number)
            case 2:
                assert self.hifc.delete(key(number))
                self.store(number)
            case 3:
                self.hifc.offload()
            case 4:
                self.hifc.sync()
            case 5:
                self.hifc.prefetch([key(number), key(number + 1)])
            case 6:
                self.observe(number)
            case 7:
                assert key(number) in self.hifc
            case _:
                self.fill()

    def settle(self, where: str, allowed: set[int | None]) -> None:
        """The target has one of the allowed versions by now, the rest is as it was."""
        self.go_on(next(_turns))
        check_accounts(self.hifc)
        found = version_of(self.hifc.load(key(TARGET)))
        assert found in allowed, f"{found} at {where}"
        self.known[TARGET] = found
        self.hifc.offload()
        for number in (TARGET, *OTHERS, MISSING):
            assert (key(number) in self.hifc) == (self.known.get(number) is not None), where
            self.load(number)
        check_accounts(self.hifc)
        taken = pool_bytes(self.hifc)
        if taken > self.pool_bytes:
            gc.collect()
            taken = pool_bytes(self.hifc)
        assert taken <= self.pool_bytes, where
        self.pool_bytes = taken

    def end(self) -> None:
        """All values go, and with them what they held."""
        for number in (TARGET, *OTHERS):
            self.hifc.delete(key(number))
        check_accounts(self.hifc)
        assert len(self.hifc.blocks) == self.hifc.blocks.resident_bytes == 0
        assert pool_bytes(self.hifc) <= self.pool_bytes
        self.hifc.close()
        self.hifc.close()


def explore(
    rig: Rig,
    prepare: Callable[[], object],
    operation: Callable[[], object],
    *,
    target: str = "kept",
    step: int = 1,
) -> int:
    """Interrupts the operation at every step-th place, prepared anew each time. target: what may
    become of the target's value, which is kept, stored or deleted. Returns how many places."""
    for place in itertools.count(1, step):
        prepare()
        old = rig.known.get(TARGET)
        with unraisable_kept():
            where = interrupt(operation, place)
        if where is None:
            rig.known[TARGET] = version_of(rig.hifc.load(key(TARGET)))
            return place - 1
        allowed = {old}
        if target == "stored":
            allowed |= {rig.version, None}
        elif target == "deleted":
            allowed |= {None}
        rig.settle(where, allowed)
    raise AssertionError("unreachable")


# ---- store


def store_target(rig: Rig) -> None:
    rig.version += 1
    cls = "reuse" if rig.version % 2 else "swap"
    rig.hifc.store(key(TARGET), value(rig.version), cls=cls, sequence=1, depth=3)


def drop_target(rig: Rig) -> None:
    rig.hifc.delete(key(TARGET))
    rig.known.pop(TARGET, None)


def new(rig: Rig) -> None:
    drop_target(rig)
    rig.hifc.offload()


def resident(rig: Rig) -> None:
    rig.hifc.offload()
    drop_target(rig)
    rig.store(TARGET)
    assert rig.hifc.blocks.get(key(TARGET)).resident


def on_flash(rig: Rig) -> None:
    rig.store(TARGET)
    rig.hifc.offload()


def on_flash_and_resident(rig: Rig) -> None:
    on_flash(rig)
    rig.load(TARGET)


def of_an_earlier_process(rig: Rig) -> None:
    """On flash, and not in the table."""
    on_flash(rig)
    rig.hifc._forget(rig.hifc.blocks.get(key(TARGET)))


def new_and_memory_full(rig: Rig) -> None:
    drop_target(rig)
    rig.fill()


def dirty_memory_full(rig: Rig) -> None:
    """What leaves has to be written."""
    drop_target(rig)
    for number in itertools.islice(itertools.cycle(OTHERS), 100):
        rig.store(number)
        size = page_up(value(rig.version + 1).nbytes + TRAILER_BYTES)
        if rig.hifc.blocks.resident_bytes + size > BUDGET:
            break


def in_the_tier(rig: Rig) -> None:
    rig.hifc.offload()
    drop_target(rig)
    rig.store(TARGET)
    rig.hifc._swap_out(rig.hifc.blocks.residents())
    assert key(TARGET) in rig.hifc.tier


def on_its_way(rig: Rig) -> None:
    on_flash(rig)
    assert rig.hifc.prefetch([key(TARGET)]) == 1


def landed(rig: Rig) -> None:
    on_its_way(rig)
    rig.hifc.namespace.drain()


def expected(rig: Rig) -> None:
    on_flash(rig)
    rig.observe()
    rig.observe(TARGET, 3)
    assert key(TARGET) in rig.hifc.ahead
    ring = rig.hifc.ahead._ring
    assert ring is not None
    assert ring.wait(np.arange(ring.statuses.size), 30)


TIER = {"host_tier_bytes": "24KiB"}


@pytest.mark.parametrize(
    ("prepare", "changes"),
    [
        (new, {}),
        (new, {"enable_compression": True}),
        (resident, {}),
        (on_flash, {}),
        (on_flash_and_resident, {}),
        (of_an_earlier_process, {}),
        (new_and_memory_full, {}),
        (dirty_memory_full, {}),
        (dirty_memory_full, {"watermark": 0.0}),
        (dirty_memory_full, TIER | {"watermark": 0.0}),
        (in_the_tier, TIER),
        (on_its_way, {}),
        (expected, {}),
    ],
)
def test_store(prepare: Callable[[Rig], None], changes: dict[str, Any]) -> None:
    rig = Rig(**changes)
    count = explore(rig, lambda: prepare(rig), lambda: store_target(rig), target="stored")
    assert count > 40
    rig.end()


@pytest.mark.parametrize(
    ("prepare", "changes"),
    [
        (new, {}),
        (resident, {}),
        (on_flash, {}),
        (on_flash_and_resident, {}),
        (of_an_earlier_process, {}),
        (in_the_tier, TIER),
        (on_its_way, {}),
        (landed, {}),
        (expected, {}),
    ],
)
@pytest.mark.parametrize("operation", ["load", "delete"])
def test_load_and_delete(
    operation: str, prepare: Callable[[Rig], None], changes: dict[str, Any]
) -> None:
    rig = Rig(**changes)
    call = getattr(rig.hifc, operation)
    target = "deleted" if operation == "delete" else "kept"
    count = explore(rig, lambda: prepare(rig), lambda: call(key(TARGET)), target=target)
    assert count > 10
    rig.end()


def test_a_load_that_makes_room() -> None:
    rig = Rig(**TIER)

    def prepare() -> None:
        on_flash(rig)
        for number in OTHERS:
            rig.store(number)

    explore(rig, prepare, lambda: rig.hifc.load(key(TARGET)))
    rig.end()


@pytest.mark.parametrize("tier", [{}, TIER])
@pytest.mark.parametrize(
    "name", ["offload", "sync", "prefetch", "observe_attention", "in", "metrics", "prometheus"]
)
def test_the_other_operations(name: str, tier: dict[str, Any]) -> None:
    rig = Rig(**tier)
    engine = rig.hifc
    operations: dict[str, Callable[[], object]] = {
        "offload": engine.offload,
        "sync": engine.sync,
        "prefetch": lambda: engine.prefetch([key(TARGET), *map(key, OTHERS)]),
        "observe_attention": lambda: rig.observe(TARGET, 4),
        "in": lambda: key(TARGET) in engine,
        "metrics": lambda: (engine.metrics.snapshot(), engine.pool_size_bytes),
        "prometheus": engine.metrics.prometheus,
    }

    def prepare() -> None:
        rig.store(TARGET)
        if name in ("prefetch", "observe_attention"):
            engine.offload()
        elif name == "sync":
            for number in OTHERS:
                rig.store(number)

    step = 7 if name in ("metrics", "prometheus") else 3 if name == "observe_attention" else 1
    assert explore(rig, prepare, operations[name], step=step) > 1
    rig.end()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy(name: str) -> None:
    rig = Rig(policy=name, **TIER)
    explore(
        rig,
        lambda: dirty_memory_full(rig),
        lambda: store_target(rig),
        target="stored",
        step=3,
    )
    rig.end()


def test_recovery_itself() -> None:
    """An exception while what an exception left is put right."""
    rig = Rig(**TIER)

    def prepare() -> None:
        resident(rig)
        expected(rig)
        interrupt(lambda: rig.hifc.load(key(TARGET)), 30)
        assert rig.hifc._settled.broken

    explore(rig, prepare, lambda: key(TARGET) in rig.hifc)
    rig.end()


# ---- the end


@pytest.mark.parametrize("tier", [{}, TIER])
def test_close(tier: dict[str, Any]) -> None:
    device = "ram://engine-interrupts-close?size=16MiB"
    Namespace.format(device, segment_size="256KiB", force=True)
    for place in itertools.count(1):
        with HiFC(settings(device=device, memory_budget="64KiB", **tier)) as engine:
            version = place * 10
            for number in range(6):
                engine.store(key(number), value(version + number), cls="reuse")
            engine.store(key(50), value(1))
            engine.prefetch([key(51)])
            with unraisable_kept():
                where = interrupt(engine.close, place)
            engine.close()
            assert engine.namespace.closed
        with HiFC(settings(device=device)) as engine:
            for number in range(6):
                assert version_of(engine.load(key(number))) == version + number, where
                engine.delete(key(number))
        if where is None:
            break
    assert place > 30


def test_a_close_that_is_interrupted_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.fill()
    rig.store(2)  # of class reuse

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise Interrupted

    monkeypatch.setattr(rig.hifc, "_put", interrupted)
    with pytest.raises(Interrupted):
        rig.hifc.close()
    assert not rig.hifc.namespace.closed
    for number in OTHERS:
        rig.load(number)
    rig.end()


def test_an_engine_that_is_interrupted_as_it_opens() -> None:
    config = settings()
    for place in itertools.count(1, 5):
        with unraisable_kept():
            where = interrupt(lambda: HiFC(config).close(), place)
        gc.collect()
        HiFC(config).close()
        if where is None:
            break
    assert place > 50


def test_cache() -> None:
    pytest.importorskip("transformers")
    import kv_models

    rig = Rig(pool_size="64MiB")
    network = kv_models.model()

    def make() -> None:
        rig.hifc.cache(network.config, 64, resident=1.0)

    make()
    rig.pool_bytes = pool_bytes(rig.hifc)
    assert explore(rig, lambda: resident(rig), make, step=3) > 5
    rig.end()


# ---- what was reported


def test_between_the_table_and_the_policy() -> None:
    """Every later store that needed room, and close, said "block id 4294967295"."""
    rig = Rig()
    policy = rig.hifc.policy
    add = policy.add

    def interrupted(block: KVBlock) -> None:
        policy.add = add  # type: ignore[method-assign]
        raise Interrupted

    policy.add = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        rig.hifc.store(key(TARGET), value(1))
    rig.known[TARGET] = 1
    for _ in range(3):
        for number in OTHERS:
            rig.store(number)
        for number in (TARGET, *OTHERS):
            rig.load(number)
    check_accounts(rig.hifc)
    rig.end()


def test_resident_bytes_do_not_drift() -> None:
    rig = Rig()
    table = rig.hifc.blocks
    set_resident = table.set_resident
    for before in (False, True) * 5:

        def interrupted(block: KVBlock, memory: Any, first: bool = before) -> None:
            table.set_resident = set_resident  # type: ignore[method-assign]
            block.memory = memory
            if not first:
                set_resident(block, memory)
            raise Interrupted

        rig.hifc.offload()
        table.set_resident = interrupted  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            rig.hifc.load(key(3))
        check_accounts(rig.hifc)
        rig.load(3)
        assert rig.hifc.blocks.resident_bytes <= BUDGET
    rig.end()


def test_finalizers_of_policies_are_no_python() -> None:
    """An exception in a finalizer is swallowed, and what it had to do with it."""
    closed: list[int] = []
    policy = NativePolicy("lru", 0, 0.1)
    pointer = policy.pointer.value
    found = [closer for closer in policies._closers if closer() is policy]
    assert [closer._as_parameter_.value for closer in found] == [pointer]

    def watch(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            closed.append(frame)

    sys.setprofile(watch)
    try:
        del policy
    finally:
        sys.setprofile(None)
    assert not closed
    assert found[0]() is None
    NativePolicy("lru", 0, 0.1)
    assert found[0] not in policies._closers


# ---- other exceptions of the same kind


def test_a_policy_of_ones_own_that_raises() -> None:
    class Raises(HiFCPolicy):
        calls = 0
        at = 0

        def should_swap_out(self, kv_block: KVBlock) -> bool:
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("a fault of a policy")
            return kv_block.depth % 2 == 1

    policy = Raises()
    with HiFC(settings(**TIER), policy=policy) as engine:
        loop = EngineLoop(engine)
        loop.run(200)
        raised = 0
        for at in range(60):
            policy.calls, policy.at = 0, at
            try:
                loop.run(40)
            except RuntimeError:
                raised += 1
            loop.check()
        assert raised > 10


@pytest.mark.parametrize("cls", ["swap", "reuse"])
def test_memory_that_runs_out(cls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each return of a function of the engine in turn."""
    from hifc.blocks import host_tier, policy
    from hifc.blocks import keys as blocks
    from hifc.blocks import store as residency

    faults = [
        (residency.Residency, "_forget"),
        (residency.Residency, "_leave_pool"),
        (residency.Residency, "_put"),
        (residency.Residency, "_room"),
        (blocks.BlockTable, "count"),
        (blocks.BlockTable, "set_resident"),
        (blocks.BlockTable, "drop"),
        (host_tier.HostTier, "put"),
        (host_tier.HostTier, "drop"),
        (policy.HiFCPolicy, "add"),
        (policy.HiFCPolicy, "leave"),
        (policy.HiFCPolicy, "remove"),
        (policy.HiFCPolicy, "access"),
    ]
    with HiFC(settings(**TIER)) as engine:
        loop = EngineLoop(engine)
        loop.run(200)
        raised = 0
        for (owner, name), after in itertools.product(faults, (False, True)):
            call = getattr(owner, name)
            left = [3]

            def failing(
                *arguments: Any, call: Any = call, after: bool = after, left: list[int] = left
            ) -> Any:
                left[0] -= 1
                if left[0] == 0 and not after:
                    raise MemoryError
                result = call(*arguments)
                if left[0] == 0:
                    raise MemoryError
                return result

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                try:
                    loop.run(100)
                except MemoryError:
                    raised += 1
            loop.check()
        assert raised > 20


def test_a_full_device_takes_nothing() -> None:
    """NoSpace of a store leaves the value that was there, wherever it was."""
    device = "ram://engine-interrupts-full?size=6MiB"
    Namespace.format(device, segment_size="256KiB", force=True)
    with HiFC(settings(device=device)) as engine:
        stored: dict[int, int] = {}
        with pytest.raises(NoSpace):
            for number in range(100_000):
                engine.store(key(number), value(number))
                stored[number] = number
        for number in list(stored)[:: len(stored) // 20]:
            try:
                engine.store(key(number), value(number + 100_000))
            except NoSpace:
                continue
            stored[number] = number + 100_000
        check_accounts(engine)
        for number in stored:
            assert key(number) in engine
        for number in list(stored)[len(stored) // 2 :]:
            assert engine.delete(key(number))
            del stored[number]
        for number, version in stored.items():
            assert version_of(engine.load(key(number))) == version


@pytest.mark.parametrize(
    ("prepare", "changes"),
    [
        (resident, {}),
        (on_flash, {}),
        (on_flash_and_resident, {}),
        (of_an_earlier_process, {}),
        (in_the_tier, TIER),
    ],
)
@pytest.mark.parametrize("operation", ["store", "delete"])
def test_a_value_that_cannot_be_deleted_stays(
    operation: str,
    prepare: Callable[[Rig], None],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> bool:
        raise NoSpace("no room to note that a key is gone")

    rig = Rig(**changes)
    prepare(rig)
    block = rig.hifc.blocks.get(key(TARGET))
    with monkeypatch.context() as patch:
        patch.setattr(Namespace, "delete", full)
        if block is None or block.on_flash:
            with pytest.raises(NoSpace):
                if operation == "store":
                    rig.hifc.store(key(TARGET), value(9999))
                else:
                    rig.hifc.delete(key(TARGET))
        assert not rig.hifc._settled.broken, "the state is whole"
    for _ in range(2):
        for number in (TARGET, *OTHERS):
            rig.load(number)
        rig.hifc.offload()
    check_accounts(rig.hifc)
    rig.end()


@pytest.mark.parametrize("operation", ["store", "delete"])
def test_a_delete_that_fails_after_it_was_made(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    on_flash_and_resident(rig)
    delete = rig.hifc.namespace.delete

    def failing(name: bytes) -> bool:
        assert delete(name)
        raise DeviceError("the last write was not answered")

    with monkeypatch.context() as patch:
        patch.setattr(rig.hifc.namespace, "delete", failing)
        with pytest.raises(DeviceError):
            if operation == "store":
                rig.hifc.store(key(TARGET), value(9999))
            else:
                rig.hifc.delete(key(TARGET))
    rig.hifc.offload()
    rig.load(TARGET)
    rig.end()


def test_the_gate_is_not_filled_anew_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are made as a write begins: it would be taken for whole, and not be."""
    rig = Rig(**TIER)
    in_the_tier(rig)

    def interrupted(*_: Any) -> bool:
        monkeypatch.undo()
        raise Interrupted

    monkeypatch.setattr(Ticket, "wait", interrupted)
    with pytest.raises(Interrupted):
        rig.hifc.offload()
    assert rig.hifc.tier.gate_in_use
    waited: list[float] = []
    drain = rig.hifc.namespace.drain

    def counted(*arguments: Any) -> None:
        waited.append(rig.hifc.tier.used_bytes)
        drain(*arguments)

    monkeypatch.setattr(rig.hifc.namespace, "drain", counted)
    assert rig.hifc.offload() == 1
    assert waited
    assert not rig.hifc.tier.gate_in_use
    monkeypatch.undo()
    for number in (TARGET, *OTHERS):
        rig.load(number)
    rig.end()


@pytest.fixture
def looped() -> Iterator[EngineLoop]:
    with HiFC(settings(**TIER)) as engine:
        yield EngineLoop(engine)


def test_a_loop_that_is_interrupted_again_and_again(looped: EngineLoop) -> None:
    places = itertools.cycle([3, 1117, 59, 2311, 401, 7, 5003, 89])
    for round_, place in zip(range(300), places, strict=False):
        with unraisable_kept():
            interrupt(lambda: looped.run(60), place + 13 * round_)
        if round_ % 10 == 0:
            looped.check()
    looped.check()
    assert looped.operations > 1000
