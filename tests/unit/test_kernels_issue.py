# SPDX-License-Identifier: Apache-2.0
"""From the trend to descriptors in a request ring, on every backend: which blocks, in which order,
what is lost where there is no room, and what becomes of the answers."""

from __future__ import annotations

import math
from typing import Any

import classify_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import NAMES, back, make_backend, to
from ring_memory import RingMemory, in_flight, item_of, keys_for, word_of

from hifc import Namespace
from hifc.errors import ClosedError, ConfigError, InvalidRequest
from hifc.kernels.backend import Backend
from hifc.kernels.heat import from_bits, to_bits
from hifc.namespace.ring import RingOp, RingStatus
from hifc.prefetch.issue import Issuer
from hifc.prefetch.trend import HiFCPrefetcher

backends = pytest.mark.parametrize("name", NAMES)
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 1 << 32)
READ = RingOp.READ << 24


@pytest.fixture(params=NAMES)
def where(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param)


@backends
@given(
    rows=st.integers(1, 4),
    heads_of_row=st.integers(1, 3),
    blocks=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    window=st.integers(2, 6),
    seed=seeds,
)
@few
def test_the_trend(
    name: str, rows: int, heads_of_row: int, blocks: list[int], window: int, seed: int
) -> None:
    where = make_backend(name)
    heads = rows * heads_of_row
    rng = np.random.default_rng(seed)
    prefetcher = HiFCPrefetcher(heads, window, where=where)
    masses = [rng.random((heads, count)).astype(np.float32) for count in blocks]
    for mass in masses:
        prefetcher.update(mass)
    assert prefetcher.num_blocks == blocks[-1]
    history = np.zeros((min(window, len(blocks)), heads, blocks[-1]), np.float32)
    for step, mass in zip(history, masses[-len(history) :], strict=True):
        known = min(mass.shape[1], blocks[-1])
        step[:, :known] = mass[:, :known]
    expected = reference.trend(history, heads_of_row)
    found = back(prefetcher._scores(rows))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found.shape == (rows, blocks[-1])


def expected_issues(scores: Any, skip: Any, degree: int, score_min: float) -> list[tuple[int, int]]:
    """(row, block) in the order of issue: the best of each row before the second of any."""
    by_row = reference.candidates(scores, skip, degree, score_min)
    return [
        (row, blocks[rank])
        for rank in range(degree)
        for row, blocks in enumerate(by_row)
        if rank < len(blocks)
    ]


@backends
@given(
    rows=st.integers(1, 5),
    blocks=st.integers(1, 100) | st.integers(1, 3000),
    degree=st.integers(1, 40),
    kind=st.sampled_from(["any", "few", "zero", "same"]),
    skipped=st.sampled_from([0.0, 0.3, 1.0]),
    score_min=st.sampled_from([0.0, 0.4]),
    seed=seeds,
)
@few
def test_what_is_issued(
    name: str,
    rows: int,
    blocks: int,
    degree: int,
    kind: str,
    skipped: float,
    score_min: float,
    seed: int,
) -> None:
    where = make_backend(name)
    rng = np.random.default_rng(seed)
    scores = {
        "any": lambda: rng.random((rows, blocks)),
        "few": lambda: rng.integers(0, 4, (rows, blocks)) / 5,
        "zero": lambda: np.zeros((rows, blocks)),
        "same": lambda: np.full((rows, blocks), 0.7),
    }[kind]().astype(np.float32)
    skip = rng.random((rows, blocks)) < skipped
    ring = RingMemory(256, 256, 256)
    with Issuer(ring, keys_for(rows, blocks), where=where) as issuer:
        issuer.resident[...] = to(where, to_bits(skip))
        issuer.issue(to(where, scores), degree, score_min=score_min)
        expected = expected_issues(scores, skip, degree, score_min)
        taken = ring.take()
        assert [item_of(one) for one in taken] == expected
        assert [int(one["place"]) for one in taken] == list(range(len(expected)))
        assert [int(one["control"]) for one in taken] == [READ | i for i in range(len(expected))]
        assert issuer.totals["issued"] == len(expected)
        on_their_way = np.zeros((rows, blocks), bool)
        on_their_way[tuple(np.array(expected, int).reshape(-1, 2).T)] = True
        np.testing.assert_array_equal(from_bits(in_flight(issuer), blocks), on_their_way)
        skipped_now = reference.passed_over(scores, skip, degree, score_min)
        assert issuer.totals["skipped"] == skipped_now
        # The next ones are those that follow.
        issuer.issue(to(where, scores), degree, score_min=score_min)
        again = expected_issues(scores, skip | on_their_way, degree, score_min)
        skipped_now += reference.passed_over(scores, skip | on_their_way, degree, score_min)
        assert issuer.totals["skipped"] == skipped_now
        assert [item_of(one) for one in ring.take()] == again[: 256 - len(expected)]


def test_the_ring_wraps_and_landings_come_back(where: Backend) -> None:
    ring = RingMemory(16, 12, 24, read_max=8000)  # twelve landings of two pages
    blocks, laps = 40, 5
    with Issuer(ring, keys_for(1, blocks), where=where) as issuer:
        assert issuer.landings == 12
        scores = to(where, np.linspace(1, 2, blocks, dtype=np.float32)[None])
        seen: list[int] = []
        for _ in range(laps * 16 // 5):
            issuer.issue(scores, 5)
            taken = ring.take()
            seen += [item_of(one)[1] for one in taken]
            for one in taken:
                assert int(one["place"]) == 2 * word_of(one)
                ring.statuses[word_of(one)] = RingStatus.OK
            landed = issuer.settle()
            assert landed.blocks.tolist() == [item_of(one)[1] for one in taken]
            assert landed.landings.tolist() == [word_of(one) for one in taken]
            issuer.release(landed.landings)
        assert seen == [39, 38, 37, 36, 35] * (laps * 16 // 5)
        assert ring.header.head == len(seen)
        assert not in_flight(issuer).any()
        assert ring.kicks == (0 if where.name == "cuda" else laps * 16 // 5)


def test_what_finds_no_room_is_lost_and_counted(where: Backend) -> None:
    ring = RingMemory(16, 30, 30)
    with Issuer(ring, keys_for(2, 50), where=where) as issuer:
        scores = to(where, np.random.default_rng(1).random((2, 50)).astype(np.float32))
        issuer.issue(scores, 10)  # 20 wanted, 16 slots
        expected = {"issued": 16, "overflowed": 4, "no_landing": 0, "failed": 0, "skipped": 0}
        assert issuer.totals == expected
        issuer.issue(scores, 2)  # no slot has been taken
        assert issuer.totals["overflowed"] == 8 == ring.header.overflowed
        assert len(ring.take()) == 16
        issuer.issue(scores, 10)  # 14 landings are left
        assert {**issuer.totals, "skipped": 0} == expected | {
            "issued": 30,
            "overflowed": 8,
            "no_landing": 6,
        }
        assert len(ring.take()) == 14
        issuer.issue(scores, 1)
        assert issuer.totals["no_landing"] == 8
        assert ring.take() == []
        assert issuer.settle().on_their_way == 30


def test_the_only_producer_keeps_its_own_tail() -> None:
    """As on a GPU, whose atomics do not reach the host's memory."""
    ring = RingMemory(16, 64, 64)
    with Issuer(ring, keys_for(1, 64), where=make_backend("host")) as issuer:
        issuer._share_ring(False)
        scores = np.linspace(1, 2, 64, dtype=np.float32)[None].copy()
        for lap in range(1, 4):
            issuer.issue(scores, 20)  # 16 slots
            assert [item_of(one)[1] for one in ring.take()] == list(
                range(63 - 16 * (lap - 1), 63 - 16 * lap, -1)
            )
            assert ring.header.tail == 0
            assert ring.header.overflowed == 4 * lap == issuer.totals["overflowed"]
        assert issuer._own_tail[0] == 48


def test_answers(where: Backend) -> None:
    ring = RingMemory()
    with Issuer(ring, keys_for(2, 8), where=where) as issuer:
        scores = to(where, np.arange(16, dtype=np.float32).reshape(2, 8) + 1)
        issuer.issue(scores, 3)
        taken = ring.take()
        assert [item_of(one) for one in taken] == [(0, 7), (1, 7), (0, 6), (1, 6), (0, 5), (1, 5)]
        for word, status in {0: 0, 1: RingStatus.MISS, 3: 0, 4: -5}.items():
            ring.statuses[word] = status
        landed = issuer.settle()
        assert landed.landings.tolist() == [0, 3]
        assert list(zip(landed.rows.tolist(), landed.blocks.tolist(), strict=True)) == [
            (0, 7),
            (1, 6),
        ]
        assert landed.on_their_way == 2
        assert issuer.totals["failed"] == 2
        # What failed may be asked for again; what is on its way cannot be released.
        issuer.release([0, 0, 2, 5, 9, 999])
        assert from_bits(in_flight(issuer), 8)[0].nonzero()[0].tolist() == [6]
        assert from_bits(in_flight(issuer), 8)[1].nonzero()[0].tolist() == [5, 6]
        assert issuer.settle().landings.tolist() == [3]
        issuer.release(np.array([3]), resident=True)
        assert from_bits(back(issuer.resident), 8)[1].nonzero()[0].tolist() == [6]
        issuer.issue(scores, 1)
        assert [item_of(one) for one in ring.take()] == [(0, 7), (1, 7)]
        assert issuer.bytes_of(3).shape == (4096,)


def test_parts_and_keys_that_rows_share(where: Backend) -> None:
    ring = RingMemory()
    with Issuer(ring, keys_for(1, 8)[0], rows=3, parts=(4, 2, 2), where=where) as issuer:
        issuer.issue(to(where, np.ones((3, 5), np.float32)), 1)
        taken = ring.take()
        assert [item_of(one) for one in taken] == [(0, 0)] * 3
        assert [(int(one["first_part"]), int(one["part_count"])) for one in taken] == [
            (4, 2),
            (6, 2),
            (8, 2),
        ]


def test_the_prefetcher_issues_what_it_expects(where: Backend) -> None:
    ring = RingMemory()
    with Issuer(ring, keys_for(2, 100), where=where) as issuer:
        prefetcher = HiFCPrefetcher(4, issuer=issuer, degree=2, score_min=0.25)
        assert prefetcher.where is where
        attention = np.zeros((4, 6), np.float32)
        attention[0, 1], attention[1, 2], attention[1, 4], attention[3, 5] = 0.3, 0.4, 0.5, 0.6
        prefetcher.update(attention)
        assert [item_of(one) for one in ring.take()] == [(0, 4), (1, 5), (0, 2)]
        attention[3, 5], attention[3, 0] = 0.0, 0.2  # 0 is expected to rise to 0.4
        prefetcher.update(attention)
        assert [item_of(one) for one in ring.take()] == [(0, 1), (1, 0)]


def test_what_is_refused(where: Backend) -> None:
    with pytest.raises(ConfigError, match="3 heads do not share out over 2 rows"):
        HiFCPrefetcher(3, issuer=Issuer(RingMemory(), keys_for(2, 8), where=make_backend("host")))
    for keys, rows in (
        (keys_for(2, 8), 3),
        (keys_for(1, 8)[0], None),
        (np.zeros((8, 15), "u1"), 1),
    ):
        with pytest.raises(InvalidRequest, match="keys of shape"):
            Issuer(RingMemory(), keys, rows=rows, where=where)
    for keys in (np.full((8, 16), 300), np.ones((8, 16)), [b"k" * 16]):
        with pytest.raises(InvalidRequest, match="no array of uint8"):
            Issuer(RingMemory(), keys, rows=1, where=where)
    for parts in ((0, 1), (0.5, 0, 1), (-1, 0, 1), None):
        with pytest.raises(InvalidRequest, match="parts"):
            Issuer(RingMemory(), keys_for(2, 8), parts=parts, where=where)
    with pytest.raises(InvalidRequest, match="parts"):
        Issuer(RingMemory(), keys_for(2, 8), parts=(0, 2, 0), where=where)
    with pytest.raises(InvalidRequest, match="no room for a read of 70000"):
        Issuer(RingMemory(read_max=70000), keys_for(2, 8), where=where)
    ring = RingMemory()
    issuer = Issuer(ring, keys_for(2, 8), where=where)
    for shape, dtype in (((2, 9), "float32"), ((1, 8), "float32"), ((2, 8), "float64")):
        with pytest.raises(InvalidRequest, match="scores are"):
            issuer.issue(where.xp.zeros(shape, dtype=dtype), 1)
    for degree in (1025, -1, 2.5, True):
        with pytest.raises(InvalidRequest, match="degree"):
            issuer.issue(where.xp.zeros((2, 8), dtype="float32"), degree)
    with pytest.raises(InvalidRequest, match="score_min"):
        issuer.issue(where.xp.zeros((2, 8), dtype="float32"), 1, score_min=math.nan)
    for landing in (16, -1, 0.5):
        with pytest.raises(InvalidRequest, match="landing"):
            issuer.bytes_of(landing)
    for name in ("keys", "resident"):  # kernels keep to the size of what they were given
        with pytest.raises(AttributeError):
            setattr(issuer, name, where.xp.zeros((0, 0), dtype="uint32"))
    ring.closed = True
    with pytest.raises(ClosedError):
        issuer.settle()
    ring.closed = False
    issuer.close()
    issuer.close()
    with pytest.raises(ClosedError):
        issuer.issue(where.xp.zeros((2, 8), dtype="float32"), 1)


def test_attention_of_odd_kinds() -> None:
    where = make_backend("host")
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(ConfigError, match="degree"):
            HiFCPrefetcher(2, degree=wrong, where=where)
    with pytest.raises(ConfigError, match="score_min"):
        HiFCPrefetcher(2, score_min=math.nan, where=where)
    prefetcher = HiFCPrefetcher(2, where=where)
    with pytest.raises(InvalidRequest, match="real numbers"):
        prefetcher.update(np.ones((2, 4), complex))
    prefetcher.update(np.zeros((2, 0)))
    assert prefetcher.predict().shape == (2, 0)
    prefetcher.reset()
    prefetcher.update(np.array([[0.25, 0.75], [1, 0]], ">f4"))
    assert prefetcher.scores().tolist() == [[0.25, 0.75], [1, 0]]


def test_only_numbers_of_landings_release_them(where: Backend) -> None:
    ring = RingMemory()
    issuer = Issuer(ring, keys_for(1, 8), where=where)
    issuer.issue(where.xp.ones((1, 8), dtype="float32"), 2)
    ring.statuses[:2] = RingStatus.OK
    for wrong in ([0.0], where.xp.zeros(1, dtype=bool), "x"):
        with pytest.raises(InvalidRequest, match="integers"):
            issuer.release(wrong)
    for none in ([-1], [1 << 32], [99], []):
        issuer.release(none)
    assert sorted(issuer.settle().landings.tolist()) == [0, 1]
    issuer.release([1])
    assert issuer.settle().landings.tolist() == [0]


def test_a_scribbled_header_moves_no_descriptor(where: Backend) -> None:
    ring = RingMemory()
    issuer = Issuer(ring, keys_for(1, 8), where=where)
    ring.header.slots = 1 << 30
    ring.header.head = ring.header.tail = 1 << 20
    issuer.issue(where.xp.ones((1, 8), dtype="float32"), 2)
    assert ring.descriptors["sequence"][:2].tolist() == [(1 << 16) + 1] * 2


def test_blocks_come_from_a_namespace(ns: Namespace) -> None:
    """The whole way: attention, trend, descriptors, verified reads, bytes."""
    where = make_backend("host")
    size = 20_000
    keys = keys_for(1, 12)
    bodies = np.random.default_rng(2).integers(0, 256, (12, size), np.uint8)
    for key, body in zip(keys[0], bodies, strict=True):
        ns.put(key.tobytes(), body)
    with ns.ring(ns.buffer(8 * 20480), size) as ring, Issuer(ring, keys, where=where) as issuer:
        prefetcher = HiFCPrefetcher(1, issuer=issuer, degree=4)
        attention = np.arange(12, dtype=np.float32)[None]
        brought = {}
        for _ in range(3):
            prefetcher.update(attention)
            assert ring.wait(np.arange(4), timeout_s=120)
            landed = issuer.settle()
            for landing, block in zip(landed.landings, landed.blocks.tolist(), strict=True):
                brought[block] = issuer.bytes_of(landing)[:size].copy()
            issuer.release(landed.landings, resident=True)
        assert sorted(brought) == list(range(1, 12))  # of block 0 nothing is expected
        for block, body in brought.items():
            np.testing.assert_array_equal(body, bodies[block])
        totals = {"issued": 11, "overflowed": 0, "no_landing": 0, "failed": 0, "skipped": 4 + 8}
        assert issuer.totals == totals
        assert ns.stats().prefetch_completed == 11
