# SPDX-License-Identifier: Apache-2.0
"""Heat, hot and cold, victims and their order against plain numpy, on every backend."""

from __future__ import annotations

import math
from typing import Any

import classify_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import NAMES, back, make_backend, to

from hifc.blocks.classifier import HotColdClassifier
from hifc.errors import ConfigError, InvalidRequest
from hifc.kernels.backend import Backend, HostBackend
from hifc.kernels.heat import HeatTable, Split, from_bits, to_bits

backends = pytest.mark.parametrize("name", NAMES)
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 1 << 32)
sizes = st.integers(1, 70) | st.integers(1, 20_000)


def spread(name: str, wide: int) -> Backend:
    """A backend whose grids have that many blocks, also on the host."""
    if name == "cuda":
        return make_backend(name)
    where = HostBackend("a test", backwards=name == "backwards")
    where.wide = wide
    return where


def heats(kind: str, blocks: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    made = {
        "any": lambda: rng.random(blocks),
        "few": lambda: rng.integers(0, 4, blocks) / 7,
        "zero": lambda: np.zeros(blocks),
        "wide": lambda: np.exp(rng.normal(size=blocks) * 30),
        "near": lambda: 1 + rng.integers(0, 300, blocks) * 2.0**-23,
        "negative": lambda: rng.normal(size=blocks),
    }[kind]()
    with np.errstate(over="ignore"):
        return np.nan_to_num(made.astype(np.float32))


kinds = st.sampled_from(["any", "few", "zero", "wide", "near", "negative"])


def check(table: HeatTable, found: Split, eligible: Any, **how: float | None) -> Any:
    """The split is what numpy makes of the heat that the table has now. Returns the victims."""
    heat = back(table.heat)
    hot, victims = reference.split(heat, eligible, table.victims_max, **how)
    counts = back(found.counts).tolist()
    assert counts == [eligible.sum(), eligible.sum() - hot.sum(), len(victims)]
    np.testing.assert_array_equal(from_bits(back(found.hot), table.blocks), hot)
    np.testing.assert_array_equal(back(found.victims)[: len(victims)], victims)
    return victims


@backends
@given(
    kind=kinds,
    blocks=sizes,
    victims_max=st.integers(1, 300),
    hot_ratio=st.floats(0, 1),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    wide=st.integers(1, 30),
    seed=seeds,
)
@few
def test_split_by_ratio(
    name: str,
    kind: str,
    blocks: int,
    victims_max: int,
    hot_ratio: float,
    share: float,
    wide: int,
    seed: int,
) -> None:
    where = spread(name, wide)
    table = HeatTable(blocks, victims_max=victims_max, where=where)
    table.heat[:] = to(where, heats(kind, blocks, seed))
    eligible = np.random.default_rng(seed + 1).random(blocks) < share
    for _ in range(2):  # what one leaves behind does not change the next
        found = table.split(hot_ratio=hot_ratio, eligible=to(where, to_bits(eligible)))
        check(table, found, eligible, hot_ratio=hot_ratio)


@backends
@given(
    kind=kinds,
    blocks=sizes,
    victims_max=st.integers(1, 300),
    threshold=st.sampled_from([0.0, -1.0, 1e-3, 1 / 7, 0.5, 1 + 2.0**-20, 1e30]),
    wide=st.integers(1, 30),
    seed=seeds,
)
@few
def test_split_by_threshold(
    name: str, kind: str, blocks: int, victims_max: int, threshold: float, wide: int, seed: int
) -> None:
    where = spread(name, wide)
    table = HeatTable(blocks, victims_max=victims_max, where=where)
    table.heat[:] = to(where, heats(kind, blocks, seed))
    found = table.split(threshold=threshold)
    check(table, found, np.ones(blocks, bool), threshold=threshold)


@backends
@given(blocks=sizes, steps=st.integers(1, 4), wide=st.integers(1, 30), seed=seeds)
@few
def test_heat_decays_and_rises(name: str, blocks: int, steps: int, wide: int, seed: int) -> None:
    where = spread(name, wide)
    rng = np.random.default_rng(seed)
    table = HeatTable(blocks, decay_lambda=0.3, where=where)
    expected = np.zeros(blocks, dtype=np.float32)
    for step in range(steps):
        mass = rng.random(blocks).astype(np.float32)
        expected = expected * np.float32(math.exp(-0.3 * step)) + mass
        if step % 2:
            table.update(to(where, mass), step)
        else:
            found = table.split(hot_ratio=0.3, mass=to(where, mass), elapsed_s=step)
            check(table, found, np.ones(blocks, bool), hot_ratio=0.3)
        np.testing.assert_array_equal(back(table.heat), expected)
    table.update(elapsed_s=2.0)
    np.testing.assert_array_equal(back(table.heat), expected * np.float32(math.exp(-0.6)))


@backends
@given(
    kind=kinds,
    blocks=sizes,
    victims_max=st.sampled_from([1, 5, 128, 129, 1000]),
    known=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=seeds,
)
@few
def test_victims_leave_in_order(
    name: str, kind: str, blocks: int, victims_max: int, known: tuple[bool, ...], seed: int
) -> None:
    where = spread(name, 8)
    rng = np.random.default_rng(seed)
    table = HeatTable(blocks, victims_max=victims_max, where=where)
    table.heat[:] = to(where, heats(kind, blocks, seed))
    victims = check(table, table.split(hot_ratio=0.25), np.ones(blocks, bool), hot_ratio=0.25)
    columns = [
        rng.integers(-1, limit, blocks).astype(np.int32) if given else np.zeros(blocks, np.int32)
        for limit, given in zip((5, 40, 60), known, strict=True)
    ]
    passed = [
        to(where, column) if given else None for column, given in zip(columns, known, strict=True)
    ]
    found = back(table.order(*passed))[: len(victims)]
    expected = reference.victims_in_order(back(table.heat), victims, *columns)
    np.testing.assert_array_equal(found, expected)


@backends
@given(blocks=st.integers(1, 3000), hot_ratio=st.floats(0.05, 0.95))
@few
def test_the_classifier_splits_by_its_ratio(name: str, blocks: int, hot_ratio: float) -> None:
    where = make_backend(name)
    classifier = HotColdClassifier(hot_ratio=hot_ratio)
    table = HeatTable(blocks, where=where)
    table.heat[:] = to(where, heats("any", blocks, blocks))
    found = classifier.split(table, elapsed_s=3.0)
    check(table, found, np.ones(blocks, bool), hot_ratio=hot_ratio)
    eligible, cold, _ = back(found.counts).tolist()
    assert eligible - cold == classifier.hot_count(blocks)


@backends
def test_what_a_caller_writes_into_a_split_stays_within_the_table(name: str) -> None:
    where = make_backend(name)
    table = HeatTable(100, victims_max=40, where=where)
    table.heat[:] = to(where, heats("any", 100, 1))
    found = table.split(hot_ratio=0.7)
    if where.name == "host":
        for array in (found.hot, found.victims, found.counts):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            array.flags.writeable = True
    victims = back(found.victims).copy()
    victims[[0, 7]] = 100, 0xFFFFFFFF
    found.victims[:] = to(where, victims)
    expected = reference.victims_in_order(
        back(table.heat), np.delete(victims[:30], [0, 7]), *np.zeros((3, 100), np.int32)
    )
    np.testing.assert_array_equal(back(table.order())[:28], expected)
    found.counts[2] = 0xFFFFFFFF
    ordered = back(table.order())
    assert ordered.max() < 100
    found.victims[:] = 0xFFFFFFFF
    np.testing.assert_array_equal(back(table.order()), ordered)


def test_a_million_blocks() -> None:
    where = spread("host", 1056)  # as wide as an H200
    table = HeatTable(1_000_000, where=where)
    rng = np.random.default_rng(1)
    table.heat[:] = rng.random(1_000_000).astype(np.float32)
    mass = to(where, np.square(rng.random(1_000_000)).astype(np.float32))
    found = table.split(hot_ratio=0.3, mass=mass, elapsed_s=1.0)
    assert len(check(table, found, np.ones(1_000_000, bool), hot_ratio=0.3)) == 4096


@pytest.mark.parametrize("shape", [(1,), (31,), (32,), (3, 33), (2, 3, 100)])
def test_bits(shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(1).random(shape) < 0.5
    bits = to_bits(mask)
    assert bits.shape == (*shape[:-1], -(-shape[-1] // 32))
    place = np.argwhere(mask)
    for at in place.tolist():
        assert int(bits[(*at[:-1], at[-1] // 32)]) >> at[-1] % 32 & 1
    np.testing.assert_array_equal(from_bits(bits, shape[-1]), mask)


@backends
def test_what_is_refused(name: str) -> None:
    where = make_backend(name)
    for arguments in ((0,), (1.5,), (1, -1.0), (1, math.inf), (1, "x")):
        with pytest.raises(ConfigError):
            HeatTable(*arguments, where=where)
    with pytest.raises(ConfigError, match="victims"):
        HeatTable(1, victims_max=0, where=where)
    table = HeatTable(100, where=where)
    with pytest.raises(InvalidRequest, match="either"):
        table.split()
    with pytest.raises(InvalidRequest, match="either"):
        table.split(hot_ratio=0.5, threshold=0.5)
    with pytest.raises(InvalidRequest, match=r"1\.5"):
        table.split(hot_ratio=1.5)
    with pytest.raises(InvalidRequest, match="no number"):
        table.split(threshold=math.nan)
    for elapsed_s in (-1.0, math.inf, math.nan):
        with pytest.raises(InvalidRequest, match="elapsed"):
            table.update(elapsed_s=elapsed_s)
    mass = where.xp.zeros(101, dtype="float32")
    with pytest.raises(InvalidRequest, match=r"float32 \(100,\) is wanted"):
        table.update(mass)
    with pytest.raises(InvalidRequest, match="16 bytes"):
        table.update(to(where, np.zeros(101, np.float32))[1:])
    with pytest.raises(InvalidRequest, match=r"uint32 \(4,\) is wanted"):
        table.split(hot_ratio=0.5, eligible=mass)
    with pytest.raises(InvalidRequest, match=r"int32 \(100,\) is wanted"):
        table.order(mass)
