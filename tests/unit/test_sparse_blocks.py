# SPDX-License-Identifier: Apache-2.0
"""Which blocks are chosen, which slots they get, and how much memory a sparse cache plans."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hifc.config import Config
from hifc.errors import ConfigError
from hifc.sparse.blocks import STAY, HeadBlocks, most_of
from hifc.sparse.plan import SparseSettings, make_sparse_plan, widened
from hifc.sparse.quality import CHECKS_MIN, SETTLE_STEPS, Quality, Verdict
from hifc.stream.plan import KVShape

SHAPE = KVShape(30, 3, 64, 4)


def masses(heads: int, blocks: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = random.random((heads, blocks), dtype=np.float32)
    return found / found.sum(axis=1, keepdims=True)


def test_the_blocks_with_the_most_mass_are_chosen() -> None:
    mass = masses(3, 40)
    chosen = HeadBlocks(3, 40, 10).choose(mass, sinks=1, recent=2)
    for head in range(3):
        middle = np.argsort(-mass[head, 1:38], kind="stable")[:7] + 1
        assert set(np.flatnonzero(chosen[head])) == {0, 38, 39, *middle.tolist()}


def test_all_blocks_are_chosen_where_they_fit() -> None:
    assert HeadBlocks(2, 40, 10).choose(masses(2, 10), 1, 2).all()
    assert most_of(masses(2, 3), 5).all()


def test_a_resident_block_stays_unless_another_has_much_more() -> None:
    blocks = HeadBlocks(1, 8, 2)
    mass = np.array([[0.1, 0.2, 0.3, 0.4]], dtype=np.float32)
    wanted = blocks.choose(mass, 0, 0)
    blocks.place(wanted, wanted, mass)
    nearly = np.array([[0.1, 0.55, 0.3, 0.3]], dtype=np.float32)
    assert nearly[0, 1] < STAY * nearly[0, 2]
    assert blocks.choose(nearly, 0, 0)[0].tolist() == [False, False, True, True]
    more = np.array([[0.1, 0.65, 0.3, 0.31]], dtype=np.float32)
    assert blocks.choose(more, 0, 0)[0].tolist() == [False, True, False, True]


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=12), st.integers(1, 9))
def test_slots_and_blocks_name_each_other(seeds: list[int], slots: int) -> None:
    heads, most = 3, 24
    maps = HeadBlocks(heads, most, slots)
    for step, seed in enumerate(seeds):
        mass = masses(heads, min(most, 4 + 2 * step), seed)
        wanted = maps.choose(mass, 1, 1) if slots > 1 else most_of(mass, slots)
        before = maps.slot_of.copy()
        moves = maps.place(wanted, wanted, mass)
        assert (before[moves.heads, moves.blocks] < 0).all()
        assert maps.resident(mass.shape[1])[wanted].all()
        filled = min(slots, mass.shape[1])
        assert (maps.block_in[:, :filled] >= 0).all(), "slots are filled from the first on"
        for head in range(heads):
            for slot in range(slots):
                block = maps.block_in[head, slot]
                assert block < 0 or maps.slot_of[head, block] == slot
            for block in np.flatnonzero(maps.slot_of[head] >= 0):
                assert maps.block_in[head, maps.slot_of[head, block]] == block


def test_the_least_wanted_block_leaves_first() -> None:
    maps = HeadBlocks(1, 8, 3)
    mass = np.array([[0.3, 0.1, 0.2, 0.4]], dtype=np.float32)
    first = np.array([[True, True, True, False]])
    maps.place(first, first, mass)
    one = np.array([[False, False, False, True]])
    moves = maps.place(one, one, mass)
    assert moves.blocks.tolist() == [3]
    assert maps.resident(4)[0].tolist() == [True, False, True, True]


# ---- memory


def test_plan_counts_all_that_it_keeps() -> None:
    plan = make_sparse_plan(SHAPE, 7552, 0.25, SparseSettings())
    assert plan.block_tokens == 16
    assert plan.ratio <= 0.25
    assert dataclasses.replace(plan, resident_blocks=plan.resident_blocks + 1).ratio > 0.25
    tokens = (plan.resident_blocks + 2) * plan.block_tokens  # the tail, twice
    kept = tokens * SHAPE.token_bytes + plan.sketch_bytes + plan.trend_bytes + plan.check_bytes
    assert plan.buffer_bytes == kept
    assert plan.sketch_bytes == 7552 * 90 * (32 + 4)
    assert plan.slots * plan.layer_bytes <= plan.arena_bytes


def test_sixteen_bit_items_take_longer_blocks() -> None:
    plan = make_sparse_plan(dataclasses.replace(SHAPE, item_bytes=2), 7552, 0.4, SparseSettings())
    assert plan.block_tokens == 32


@pytest.mark.parametrize(
    ("shape", "resident", "settings", "message"),
    [
        (SHAPE, 0.1, {}, "too few for sparse mode"),
        (dataclasses.replace(SHAPE, rows=2), 0.25, {}, "one sequence"),
        (dataclasses.replace(SHAPE, head_dim=36), 0.25, {}, "multiple of 8"),
        (SHAPE, 0.25, {"block_tokens": 24}, "whole pages"),
        (SHAPE, 0.25, {"sink_tokens": 4096, "recent_tokens": 4096}, "too few"),
    ],
)
def test_bad_plans(shape: KVShape, resident: float, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sparse_plan(shape, 7552, resident, SparseSettings(**settings))


def test_the_least_budget_that_an_error_names_does() -> None:
    with pytest.raises(ConfigError) as caught:
        make_sparse_plan(SHAPE, 7552, 0.1, SparseSettings())
    least = float(str(caught.value).rsplit("resident=", 1)[1])
    assert make_sparse_plan(SHAPE, 7552, least, SparseSettings()).ratio <= least


def test_widening_ends_at_the_limit() -> None:
    plan = make_sparse_plan(SHAPE, 7552, 0.25, SparseSettings())
    wider = widened(plan, 0.5)
    assert wider is not None
    assert plan.resident_blocks < wider.resident_blocks
    assert wider.ratio <= 0.5
    while (more := widened(wider, 0.5)) is not None:
        wider = more
    assert 0.49 < wider.ratio <= 0.5
    assert widened(plan, plan.ratio) is None


def test_settings_of_a_configuration() -> None:
    config = Config(
        attention="sparse", sparse_missed_max=0.2, sparse_sketch="digest", sparse_prefetch_degree=5
    )
    settings = SparseSettings.of(config)
    assert settings.missed_max == 0.2
    assert settings.sketch == "digest"
    assert settings.prefetch_degree == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "dense"},
        {"sparse_missed_max": 1.5},
        {"sparse_sketch": "3bit"},
        {"sparse_check_every": -1},
        {"sparse_resident_max": "half"},
        {"attention": "sparse", "resident_ratio": 0.5, "sparse_resident_max": 0.4},
    ],
)
def test_bad_settings(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=list(settings)[-1]):
        Config.from_mapping(settings)


# ---- verdicts


def test_too_much_missed_widens_once_it_has_settled() -> None:
    quality = Quality(missed_max=0.1)
    for _ in range(SETTLE_STEPS - 1):
        quality.step(0.2)
        assert quality.verdict() is Verdict.FINE
    quality.step(0.2)
    assert quality.verdict() is Verdict.WIDEN
    quality.changed()
    assert quality.verdict() is Verdict.FINE
    for _ in range(SETTLE_STEPS):
        quality.step(0.05)
    assert quality.verdict() is Verdict.FINE
    assert quality.widened == 1


def test_checks_correct_what_the_sketch_says() -> None:
    quality = Quality(missed_max=0.1)
    for _ in range(max(SETTLE_STEPS, CHECKS_MIN)):
        quality.step(0.08)
        quality.check(missed=0.15, estimate=0.1, error=0.01)
    assert quality.missed == pytest.approx(0.12)
    assert quality.verdict() is Verdict.WIDEN


def test_a_sketch_that_misjudges_is_not_trusted() -> None:
    quality = Quality(missed_max=1.0)
    for _ in range(CHECKS_MIN):
        assert quality.verdict() is Verdict.FINE
        quality.check(missed=0.3, estimate=0.05, error=0.5)
    assert quality.verdict() is Verdict.DISTRUST
