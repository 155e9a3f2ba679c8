# SPDX-License-Identifier: Apache-2.0
"""Policies rank cold to hot; the hot ratio follows the hit rate; the prefetcher sees trends."""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import pytest

from hifc.blocks.keys import KVBlock
from hifc.blocks.policy import HiFCPolicy, LRUPolicy, coldest, make_policy, victims
from hifc.errors import ConfigError, InvalidRequest
from hifc.prefetch.trend import HiFCPrefetcher


class Clock:
    """Time by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def block(number: int, **settings: object) -> KVBlock:
    return KVBlock(key=number.to_bytes(16, "little"), **settings)  # type: ignore[arg-type]


def names(blocks: list[KVBlock]) -> list[int]:
    return [int.from_bytes(found.key, "little") for found in blocks]


def test_weight_is_the_sum_over_accesses() -> None:
    clock = Clock()
    policy = HiFCPolicy(0.1, clock=clock)
    blocks = [block(i) for i in range(20)]
    accesses: list[list[float]] = [[] for _ in blocks]
    rng = random.Random(1)
    for i, one in enumerate(blocks):
        policy.add(one)
        accesses[i].append(clock.now)
    for _ in range(500):
        clock.now += rng.random()
        i = rng.randrange(20)
        policy.access(blocks[i])
        accesses[i].append(clock.now)
    clock.now += 3.0
    policy.rank(blocks)
    for one, times in zip(blocks, accesses, strict=True):
        expected = sum(math.exp(-0.1 * (clock.now - at)) for at in times)
        assert one.weight == pytest.approx(expected, rel=1e-9)
        assert one.access_count == len(times)


def test_frequency_beats_recency_and_lru_differs() -> None:
    clock = Clock()
    frequent, recent = block(1), block(2)
    for policy, first in ((HiFCPolicy(clock=clock), 2), (LRUPolicy(clock=clock), 1)):
        policy.add(frequent)
        for _ in range(5):
            clock.now += 0.1
            policy.access(frequent)
        clock.now += 0.1
        policy.add(recent)
        assert names(coldest(policy, [frequent, recent], 1)) == [first]
        policy.remove(frequent)
        policy.remove(recent)


def test_tail_goes_before_head_even_if_used_more() -> None:
    for policy in (HiFCPolicy(clock=Clock()), LRUPolicy(clock=Clock())):
        chain = [block(i, sequence="s", depth=i) for i in range(5)]
        loner = block(9)
        for one in (*chain, loner):
            policy.add(one)
        for _ in range(3):
            policy.access(chain[4])
        ranked = names(coldest(policy, [*chain, loner], 6))
        assert [i for i in ranked if i != 9] == [4, 3, 2, 1, 0]


def test_tail_first_holds_for_any_access_pattern() -> None:
    rng = random.Random(3)
    clock = Clock()
    policy = HiFCPolicy(clock=clock)
    blocks = [
        block(s * 100 + d, sequence=s, depth=d, head=d % 3) for s in range(7) for d in range(9)
    ]
    rng.shuffle(blocks)
    for one in blocks:
        policy.add(one)
    for _ in range(300):
        clock.now += rng.random()
        policy.access(rng.choice(blocks))
    ranked = coldest(policy, blocks, len(blocks))
    assert len(ranked) == len(blocks)
    for sequence in range(7):
        depths = [one.depth for one in ranked if one.sequence == sequence]
        assert depths == sorted(depths, reverse=True)


def test_blocks_of_one_head_leave_together() -> None:
    clock = Clock()
    policy = HiFCPolicy(clock=clock, cluster_pull=1.0)
    blocks = [block(i, head=i % 2) for i in range(8)]
    for one in blocks:
        policy.add(one)
    for one in blocks:
        if one.head == 1:
            for _ in range(3):
                policy.access(one)
    policy.access(blocks[0])
    policy.access(blocks[0])
    assert {one.head for one in coldest(policy, blocks, 4)} == {0}


def test_slots_are_reused() -> None:
    policy = HiFCPolicy(clock=Clock())
    for _ in range(10):
        blocks = [block(i, sequence=i % 5) for i in range(100)]
        for one in blocks:
            policy.add(one)
        assert len({one.slot for one in blocks}) == 100
        for one in blocks:
            policy.remove(one)
            policy.remove(one)
    assert len(policy._depth) <= 256
    assert not policy._chains


def calls_of_a_ranking(count: int) -> int:
    """How many functions, of Python and of C, one ranking of so many blocks calls."""
    policy = HiFCPolicy(clock=Clock())
    blocks = [block(i, sequence=i % 50, depth=i // 50, head=i % 8) for i in range(count)]
    for one in blocks:
        policy.add(one)
    calls = 0

    def count_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        policy.rank(blocks)
    finally:
        sys.setprofile(None)
    return calls


def test_ranking_is_linear_in_the_blocks() -> None:
    assert calls_of_a_ranking(10_000) < 11 * calls_of_a_ranking(1_000)


def test_users_own_policy() -> None:
    class KeepHeads(HiFCPolicy):
        def should_swap_out(self, kv_block: KVBlock) -> bool:
            return kv_block.depth > 0 and kv_block.weight < 10

    policy = KeepHeads(clock=Clock())
    blocks = [block(i, sequence="s", depth=i) for i in range(4)]
    for one in blocks:
        policy.add(one)
    assert names(victims(policy, blocks, hot_count=4, limit=8)) == [3, 2, 1]
    assert names(victims(policy, blocks, hot_count=4, limit=2)) == [3, 2]


def test_default_gives_up_the_cold_share() -> None:
    policy = HiFCPolicy(clock=Clock())
    blocks = [block(i) for i in range(10)]
    for one in blocks:
        policy.add(one)
        for _ in range(int.from_bytes(one.key, "little")):
            policy.access(one)
    assert names(victims(policy, blocks, hot_count=3, limit=100)) == [0, 1, 2, 3, 4, 5, 6]


def test_policy_by_name() -> None:
    assert isinstance(make_policy("lru", 0.1), LRUPolicy)
    with pytest.raises(ConfigError, match="policy"):
        make_policy("x", 0.1)
    with pytest.raises(ConfigError, match="lambda"):
        HiFCPolicy(float("nan"))


def test_prefetcher_follows_the_trend() -> None:
    prefetcher = HiFCPrefetcher(num_heads=2, window_size=3)
    assert prefetcher.predict().shape == (2, 0)
    for step in range(3):
        falling, rising = 0.5 - 0.1 * step, 0.2 + 0.1 * step
        prefetcher.update(np.array([[falling, rising, 0.3], [rising, falling, 0.3]]))
    # Last masses are 0.3, 0.4, 0.3; the line through them leads to 0.2, 0.5, 0.3.
    assert prefetcher.scores()[0] == pytest.approx([0.2, 0.5, 0.3], abs=1e-6)
    assert prefetcher.predict(2).tolist() == [[1, 2], [0, 2]]
    assert prefetcher.predict(99).shape == (2, 3)


def test_prefetcher_window_slides_and_sequences_grow() -> None:
    prefetcher = HiFCPrefetcher(num_heads=1, window_size=2)
    prefetcher.update(np.array([[9.0]]))
    prefetcher.update(np.array([[0.0, 1.0]]))
    prefetcher.update(np.array([[0.0, 1.0, 2.0]]))
    assert prefetcher.scores()[0] == pytest.approx([0.0, 1.0, 4.0])
    assert prefetcher.predict(1).tolist() == [[2]]
    prefetcher.reset()
    assert prefetcher.num_blocks == 0


def test_prefetcher_takes_raw_attention_from_torch() -> None:
    torch = pytest.importorskip("torch")
    prefetcher = HiFCPrefetcher(num_heads=2, block_tokens=4)
    weights = torch.zeros(1, 2, 3, 10, dtype=torch.bfloat16)
    weights[0, 0, :, 9] = 1.0
    weights[0, 1, :, 0:4] = 0.25
    prefetcher.update(weights)
    assert prefetcher.predict(1).tolist() == [[2], [0]]
    with pytest.raises(InvalidRequest, match="heads"):
        prefetcher.update(np.zeros((3, 4)))
