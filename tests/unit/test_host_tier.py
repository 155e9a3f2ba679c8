# SPDX-License-Identifier: Apache-2.0
"""HiFC with a tier in host memory: blocks stay exact, within both budgets, and off the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hifc import HiFC, Namespace, NoSpace

VALUES = 15328  # of float32: 61440 bytes with the trailer, less than 16 pages
STORED = VALUES * 4 + 128
_turns = itertools.cycle(range(8))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def tensor(number: int, values: int = VALUES) -> Any:
    return np.random.default_rng(number).standard_normal(values).astype(np.float32)


def settings(**changes: Any) -> dict[str, Any]:
    # Named images stay until the process ends, so a few take turns.
    device = changes.pop("device", f"ram://host-tier-{next(_turns)}?size=64MiB")
    Namespace.format(device, segment_size="256KiB", force=True)
    return {
        "device": device,
        "memory_budget": "1MiB",
        "swap_buffer_size": "1MiB",
        "host_tier_bytes": "1MiB",
        "owner_socket": False,
    } | changes


@pytest.fixture
def hifc() -> Iterator[HiFC]:
    with HiFC(settings()) as opened:
        yield opened


def test_nothing_is_written_before_the_tier_is_full(hifc: HiFC) -> None:
    before = hifc.metrics["namespace_device_write_bytes"]
    for i in range(24):
        hifc.store(key(i), tensor(i))
    assert hifc.metrics["host_tier_in_blocks"] >= 8
    assert hifc.namespace.stats().buffer_used_bytes <= 1 << 20  # none of the tier's
    assert hifc.metrics["host_tier_bytes"] == hifc.metrics["host_tier_in_blocks"] * STORED
    for i in range(24):
        assert key(i) in hifc
        assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()
    assert hifc.metrics["host_tier_hit"] >= 8
    assert hifc.metrics["host_tier_hit_bytes"] == hifc.metrics["host_tier_hit"] * STORED
    assert hifc.metrics["swap_in_blocks"] == hifc.metrics["swap_out_blocks"] == 0
    assert hifc.metrics["namespace_device_write_bytes"] == before


def test_what_was_there_longest_leaves_first_and_together(hifc: HiFC) -> None:
    for i in range(60):
        hifc.store(key(i), tensor(i))
    gone = int(hifc.metrics["swap_out_blocks"])
    assert gone >= 20
    assert gone / hifc.metrics["swap_batches"] >= 8  # swap_batch_size
    assert not any(hifc.blocks.get(key(i)).memory is not None for i in range(gone))
    assert all(hifc.blocks.get(key(i)).memory is not None for i in range(gone, 60))
    for i in range(60):
        assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()


def test_reuse_in_the_tier_survives() -> None:
    for synced in (True, False):
        config = settings()
        with HiFC(config) as hifc:
            for i in range(24):
                hifc.store(key(i), tensor(i), cls="reuse")
            assert hifc.metrics["host_tier_bytes"] > 0
            if synced:
                hifc.sync()
                assert all(hifc.namespace.exists(key(i)) for i in range(24))
        with HiFC(config) as hifc:
            for i in range(24):
                assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()


def test_replaced_and_deleted_in_the_tier(hifc: HiFC) -> None:
    for i in range(24):
        hifc.store(key(i), tensor(i))
    assert key(0) in hifc.tier
    hifc.store(key(0), tensor(1000))
    assert hifc.load(key(0)).tobytes() == tensor(1000).tobytes()
    assert key(1) in hifc.tier
    used = hifc.metrics["host_tier_bytes"]
    assert hifc.delete(key(1))
    assert key(1) not in hifc
    assert hifc.load(key(1)) is None
    assert hifc.metrics["host_tier_bytes"] <= used
    assert not hifc.delete(key(1))


def test_a_block_larger_than_the_tier_goes_to_flash() -> None:
    with HiFC(settings(host_tier_bytes="32KiB")) as hifc:
        for i in range(24):
            hifc.store(key(i), tensor(i))
        assert hifc.metrics["host_tier_in_blocks"] == 0
        assert hifc.metrics["swap_out_blocks"] > 0
        for i in range(24):
            assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()


def test_offload_empties_it(hifc: HiFC) -> None:
    for i in range(24):
        hifc.store(key(i), tensor(i))
    assert hifc.offload() == 24
    assert hifc.metrics["host_tier_bytes"] == 0
    assert hifc.prefetch([key(0)]) == 1
    for i in range(24):
        assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()


def test_nobody_prefetches_what_is_in_it(hifc: HiFC) -> None:
    keys = [key(i) for i in range(24)]
    mass = np.zeros((4, 24), dtype=np.float32)
    for i in range(24):
        hifc.store(keys[i], tensor(i))
        hifc.observe_attention(mass, keys)  # so that it follows them on their way down
    assert keys[3] in hifc.tier
    assert hifc.prefetch(keys[:4]) == 0
    issued = hifc.metrics["prefetch_issued"]
    mass[:, 3] = 0.9
    hifc.observe_attention(mass, keys)
    assert hifc.metrics["prefetch_issued"] == issued
    hifc.offload()
    assert hifc.observe_attention(mass, keys) >= 1


def test_a_full_device_loses_nothing() -> None:
    config = settings(device="ram://host-tier-full?size=6MiB", host_tier_bytes="512KiB")
    with HiFC(config) as hifc:
        stored = 0
        with pytest.raises(NoSpace, match="is full"):
            for i in range(1000):
                hifc.store(key(i), tensor(i))
                stored += 1
        held = hifc.tier.blocks()
        assert held
        for block in held:
            with pytest.raises(NoSpace):
                hifc.load(block.key)
        assert {block.key for block in hifc.tier.blocks()} == {block.key for block in held}
        hifc.delete(key(0))
        count = 0
        for i in range(1, stored):
            assert key(i) in hifc
            try:
                found = hifc.load(key(i))
            except NoSpace:
                continue  # no room to bring it back, but it is there
            assert found.tobytes() == tensor(i).tobytes()
            count += 1
        assert count > 10


class Against(RuleBasedStateMachine):
    """Whatever the order of calls: what a dictionary would give, within both budgets."""

    numbers = st.integers(0, 9)

    def __init__(self) -> None:
        super().__init__()
        small = {"memory_budget": "128KiB", "host_tier_bytes": "100KiB", "swap_batch_size": 2}
        self.hifc = HiFC(settings(**small))
        self.known: dict[int, Any] = {}
        self.version = 0

    @rule(number=numbers, pages=st.integers(1, 8), cls=st.sampled_from(["swap", "reuse"]))
    def store(self, number: int, pages: int, cls: str) -> None:
        self.version += 1
        value = tensor(self.version, pages * 1024 - 32)
        self.hifc.store(key(number), value, cls=cls)
        self.known[number] = value

    @rule(number=numbers)
    def load(self, number: int) -> None:
        found, known = self.hifc.load(key(number)), self.known.get(number)
        assert (found is None) == (known is None)
        assert found is None or found.tobytes() == known.tobytes()

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        assert self.hifc.delete(key(number)) == (number in self.known)
        self.known.pop(number, None)

    @rule(number=numbers)
    def prefetch(self, number: int) -> None:
        self.hifc.prefetch([key(number)])

    @rule()
    def offload(self) -> None:
        self.hifc.offload()
        assert self.hifc.metrics["host_tier_bytes"] == self.hifc.metrics["resident_bytes"] == 0

    @rule()
    def sync(self) -> None:
        self.hifc.sync()

    @invariant()
    def budgets_hold(self) -> None:
        held = self.hifc.tier.blocks()
        assert self.hifc.tier.used_bytes == sum(block.memory.size for block in held) <= 100 << 10
        assert self.hifc.blocks.resident_bytes <= 128 << 10
        assert not any(block.resident for block in held)
        for number in range(10):
            assert (key(number) in self.hifc) == (number in self.known)

    def teardown(self) -> None:
        self.hifc.close()


TestAgainst = Against.TestCase
TestAgainst.settings = hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None)
