# SPDX-License-Identifier: Apache-2.0
"""Which layers stay in memory: the plan never exceeds the budget, and says what would do."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hifc.errors import ConfigError
from hifc.stream.plan import KVShape, StreamPlan, make_plan, spread

SMOLLM2 = KVShape(layers=30, heads=3, head_dim=64, item_bytes=4)


def test_the_main_job_fits_and_pins_five_layers() -> None:
    plan = make_plan(SMOLLM2, 7658 + 63, 0.27)
    assert plan.pinned == (3, 9, 15, 21, 27)
    assert plan.slots == 2
    assert plan.block_tokens == 256
    assert plan.share_bytes == 384 * 1024
    assert plan.ratio <= 0.27
    assert plan.buffer_bytes == (7 * 7728 + 25 * 256) * 1536


@given(
    layers=st.integers(1, 48),
    heads=st.integers(1, 8),
    dim=st.sampled_from([16, 64, 80, 128]),
    item=st.sampled_from([2, 4]),
    rows=st.integers(1, 3),
    tokens=st.integers(1, 9000),
    ratio=st.floats(0.05, 1.0),
    slots=st.integers(2, 4),
)
def test_within_the_budget_or_refused_with_one_that_works(
    layers: int,
    heads: int,
    dim: int,
    item: int,
    rows: int,
    tokens: int,
    ratio: float,
    slots: int,
) -> None:
    shape = KVShape(layers, heads, dim, item, rows)
    try:
        plan = make_plan(shape, tokens, ratio, slots=slots)
    except ConfigError as error:
        least = re.search(r"tokens is (\d+) bytes", str(error))
        assert least, str(error)
        assert int(least[1]) > ratio * tokens * shape.token_bytes
        plan = make_plan(shape, tokens, int(least[1]), slots=slots)
    else:
        assert ratio == 1.0 or plan.resident_bytes <= ratio * plan.total_bytes
    assert plan.piece_bytes % 4096 == 0
    assert plan.capacity_tokens >= tokens
    assert plan.capacity_tokens * shape.head_token_bytes % 4096 == 0
    assert sorted({*plan.pinned, *plan.streamed}) == list(range(layers))
    if plan.streamed:
        assert 2 <= plan.slots <= len(plan.streamed)


def test_pinned_layers_are_evenly_spaced() -> None:
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            chosen = spread(count, layers)
            assert len(set(chosen)) == count
            gaps = [b - a for a, b in itertools.pairwise(chosen)]
            assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("budget", ["90MiB", 94371840, 0.2655])
def test_budget_as_bytes_or_ratio(budget: float | int | str) -> None:
    plan = make_plan(SMOLLM2, 7721, budget)
    assert len(plan.pinned) == 5
    assert isinstance(plan, StreamPlan)


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, True, "many"])
def test_bad_budget(budget: float | int | str) -> None:
    with pytest.raises(ConfigError):
        make_plan(SMOLLM2, 7721, budget)
