# SPDX-License-Identifier: Apache-2.0
"""Every policy against a slow reference, Belady against brute force, the default against the best
of the others on generated traces, and traces that are none."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import access_traces
from hifc.blocks.policy import POLICIES, NativePolicy
from hifc.blocks.replay import ADMISSIONS, BELADY, Outcome, Trace, load_trace, make_trace, replay
from hifc.errors import HiFCError, InvalidRequest
from hifc.native_lib import layouts, libhifc

REPOSITORY = Path(__file__).resolve().parents[2]
CLASSIC = ["lru", "lfu", "frequency", "arc", "s3fifo"]

Accesses = list[tuple[float, int]]
requests = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 14), min_size=1, max_size=6)),
    min_size=1,
    max_size=60,
)


def by_time(steps: list[tuple[int, list[int]]]) -> list[tuple[float, list[int]]]:
    """Waiting times become times."""
    now = 0.0
    made = []
    for wait, chain in steps:
        now += wait
        made.append((now, chain))
    return made


def flat(found: list[tuple[float, list[int]]]) -> Accesses:
    return [(now, block) for now, chain in found for block in chain]


# ---- slow references, written from the papers


def slow_lru(accesses: Accesses, capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _, block in accesses:
        hits += block in cache
        if block not in cache and len(cache) == capacity:
            cache.popitem(last=False)
        cache[block] = None
        cache.move_to_end(block)
    return hits


def slow_lfu(accesses: Accesses, capacity: int) -> int:
    cache: dict[int, tuple[int, int]] = {}
    hits = 0
    for at, (_, block) in enumerate(accesses):
        hits += block in cache
        if block not in cache and len(cache) == capacity:
            del cache[min(cache, key=cache.__getitem__)]
        cache[block] = (cache.get(block, (0, 0))[0] + 1, at)
    return hits


def slow_frequency(accesses: Accesses, capacity: int) -> int:
    cache: set[int] = set()
    history: dict[int, list[tuple[float, int]]] = {}
    hits = 0

    def weight(block: int, now: float) -> tuple[float, int]:
        total = sum(math.exp(-0.1 * (now - used)) for used, _ in history[block])
        return (round(total, 9), history[block][-1][1])

    for at, (now, block) in enumerate(accesses):
        hits += block in cache
        if block not in cache and len(cache) == capacity:
            cache.discard(min(cache, key=functools.partial(weight, now=now)))
        history.setdefault(block, []).append((now, at))
        cache.add(block)
    return hits


def slow_arc(accesses: Accesses, capacity: int) -> int:
    t1: deque[int] = deque()
    t2: deque[int] = deque()
    b1: deque[int] = deque()
    b2: deque[int] = deque()
    target, hits = 0.0, 0

    def give_up() -> None:
        first = t1 and (len(t1) > target or not t2)
        (b1 if first else b2).append((t1 if first else t2).popleft())

    for _, block in accesses:
        if block in t1 or block in t2:
            hits += 1
            (t1 if block in t1 else t2).remove(block)
            t2.append(block)
            continue
        if len(t1) + len(t2) == capacity:
            give_up()
        if block in b1:
            target = min(capacity, target + max(1, len(b2) / len(b1)))
            b1.remove(block)
            t2.append(block)
        elif block in b2:
            target = max(0, target - max(1, len(b1) / len(b2)))
            b2.remove(block)
            t2.append(block)
        else:
            t1.append(block)
            while b1 and len(t1) + len(b1) > capacity:
                b1.popleft()
            while b2 and len(b1) + len(b2) > capacity:
                b2.popleft()
    return hits


def slow_s3fifo(accesses: Accesses, capacity: int) -> int:
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: deque[int] = deque()
    uses: dict[int, int] = {}
    share = capacity // 10
    hits = 0

    def give_up() -> None:
        while True:
            if small and (len(small) > max(1, share) or not main):
                block = small.popleft()
                if uses[block] <= 1:
                    ghost.append(block)
                    while len(ghost) > capacity - share:
                        ghost.popleft()
                    return
                uses[block] = 0
                main.append(block)
            else:
                block = main.popleft()
                if uses[block] == 0:
                    return
                uses[block] -= 1
                main.append(block)

    for _, block in accesses:
        if block in small or block in main:
            hits += 1
            uses[block] = min(3, uses[block] + 1)
            continue
        if len(small) + len(main) == capacity:
            give_up()
        uses[block] = 0
        if block in ghost:
            ghost.remove(block)
            main.append(block)
        else:
            small.append(block)
    return hits


SLOW: dict[str, Callable[[Accesses, int], int]] = {
    "lru": slow_lru,
    "lfu": slow_lfu,
    "frequency": slow_frequency,
    "arc": slow_arc,
    "s3fifo": slow_s3fifo,
}


@pytest.mark.parametrize("policy", CLASSIC)
@given(steps=requests, capacity=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_as_the_slow_reference(
    policy: str, steps: list[tuple[int, list[int]]], capacity: int
) -> None:
    found = by_time(steps)
    outcome = replay(make_trace(found), policy, capacity)
    assert outcome.reused_blocks == SLOW[policy](flat(found), capacity)
    assert outcome.written_blocks == outcome.access_count - outcome.reused_blocks


@pytest.mark.parametrize("policy", CLASSIC)
def test_as_the_slow_reference_on_a_longer_trace(policy: str) -> None:
    found = access_traces.agents(3, requests=250, prompts=12)
    for capacity in (20, 100):
        outcome = replay(make_trace(found), policy, capacity)
        assert outcome.reused_blocks == SLOW[policy](flat(found), capacity)


def most_hits(blocks: tuple[int, ...], capacity: int) -> int:
    """By trying every choice of what leaves."""

    @functools.cache
    def best(at: int, cache: frozenset[int]) -> int:
        if at == len(blocks):
            return 0
        block = blocks[at]
        if block in cache:
            return 1 + best(at + 1, cache)
        if len(cache) < capacity:
            return best(at + 1, cache | {block})
        return max(best(at + 1, cache - {left} | {block}) for left in cache)

    return best(0, frozenset())


@given(blocks=st.lists(st.integers(0, 6), min_size=1, max_size=18), capacity=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_belady_is_the_best_there_is(blocks: list[int], capacity: int) -> None:
    trace = make_trace([(0.0, [block]) for block in blocks])
    assert replay(trace, BELADY, capacity).reused_blocks == most_hits(tuple(blocks), capacity)


# ---- what all policies have in common


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=requests, capacity=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_what_every_replay_keeps(
    policy: str, steps: list[tuple[int, list[int]]], capacity: int
) -> None:
    found = [(now, list(dict.fromkeys(chain))) for now, chain in by_time(steps)]
    trace = make_trace(found)
    outcome = replay(trace, policy, capacity)
    assert outcome.access_count == sum(len(chain) for _, chain in found)
    assert outcome.written_blocks == outcome.access_count - outcome.reused_blocks
    if capacity >= trace.block_count:
        assert outcome.reused_blocks == outcome.access_count - trace.block_count
    assert outcome == replay(trace, policy, capacity)  # no chance in it


@pytest.mark.parametrize("policy", POLICIES)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["use", "leave", "forget"]),
            st.lists(st.integers(0, 30), min_size=1, max_size=5),
        ),
        max_size=80,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_engine_may_use_leave_and_forget_in_any_order(
    policy: str, steps: list[tuple[str, list[int]]]
) -> None:
    native = NativePolicy(policy, 0, 0.1)
    known: set[int] = set()
    for now, (what, ids) in enumerate(steps):
        slots = np.array(ids, np.uint32)
        if what == "use":
            native.use(float(now), slots)
            known |= set(ids)
        elif what == "leave":
            native.leave(slots)
        else:
            native.forget(slots)
            known -= set(ids)
        scores = native.scores(float(now), np.array(sorted(known), np.int64))
        assert np.isfinite(scores).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_used_all_the_time_scores_above_what_is_not(policy: str) -> None:
    native = NativePolicy(policy, 0, 0.1)
    for step in range(400):
        native.use(float(step), np.array([0], np.uint32))
        native.use(float(step), np.array([1000 + step], np.uint32))
        if step >= 50:
            native.leave(np.array([1000 + step - 50], np.uint32))
    hot, cold = native.scores(400.0, np.array([0, 1360]))
    assert hot > cold


def test_bad_ids_and_times_are_refused() -> None:
    native = NativePolicy("default", 0, 0.1)
    with pytest.raises(HiFCError, match="ids are dense"):
        native.use(0.0, np.array([1 << 31], np.uint32))
    with pytest.raises(HiFCError, match="time"):
        native.use(math.nan, np.array([1], np.uint32))
    with pytest.raises(HiFCError, match="no policy is called"):
        NativePolicy("x", 0, 0.1)


# ---- the default


@pytest.mark.parametrize("name", access_traces.GENERATORS)
def test_the_default_is_not_below_the_best_of_the_others(name: str) -> None:
    trace = make_trace(access_traces.GENERATORS[name](7))
    for share in (0.02, 0.1, 0.3):
        capacity = max(10, int(share * trace.block_count))
        best = max(replay(trace, policy, capacity).hit_ratio for policy in CLASSIC)
        assert replay(trace, "default", capacity).hit_ratio >= best - 0.003


def test_the_default_closes_part_of_the_gap_to_belady() -> None:
    trace = make_trace(access_traces.chat(11))
    for capacity in (500, 2500):
        lru, default, belady = (
            replay(trace, policy, capacity).hit_ratio for policy in ("lru", "default", BELADY)
        )
        assert (default - lru) / (belady - lru) > 0.08


# ---- admission


def test_admission_by_what_is_expected_halves_the_writes() -> None:
    trace = make_trace(access_traces.chat(11))
    for capacity in (500, 2500):
        always = replay(trace, "default", capacity)
        expected = replay(trace, "default", capacity, admission="expected")
        assert expected.written_blocks <= always.written_blocks / 2
        assert expected.hit_ratio >= always.hit_ratio - 0.02


def test_second_use_writes_what_is_asked_for_again() -> None:
    trace = make_trace([(float(at), [at % 5, 100 + at]) for at in range(50)])
    outcome = replay(trace, "lru", 10, admission="second_use")
    assert outcome.written_blocks == 5
    assert outcome.reused_blocks == 50 - 10


def test_a_write_budget_is_kept() -> None:
    trace = make_trace([(3600.0 * at, list(range(10 * at, 10 * at + 10))) for at in range(72)])
    outcome = replay(trace, "lru", 100, admission="budget", budget_blocks_per_day=24)
    assert outcome.written_blocks == 24 + 24 * 71 // 24
    with pytest.raises(HiFCError, match="budget"):
        replay(trace, "lru", 100, admission="budget")


def test_what_is_not_there_is_refused() -> None:
    lib = libhifc.library()
    policy = NativePolicy("lru", 1, 0.1).pointer
    ids = np.zeros(1, np.uint32)
    ids_at, trace = ids.ctypes.data, make_trace([(0.0, [1])])
    native, counts = ctypes.byref(trace.native()), ctypes.byref(layouts.Replay())
    for call in (
        lambda: lib.hifc_policy_use(None, 0.0, ids_at, 1),
        lambda: lib.hifc_policy_use(policy, 0.0, None, 1),
        lambda: lib.hifc_policy_leave(None, ids_at, 1),
        lambda: lib.hifc_policy_forget(policy, None, 1),
        lambda: lib.hifc_policy_scores(policy, 0.0, ids_at, 1, None),
        lambda: lib.hifc_policy_replay(None, native, counts),
        lambda: lib.hifc_policy_replay(policy, None, counts),
        lambda: lib.hifc_policy_replay(policy, native, None),
        lambda: lib.hifc_belady_replay(1, None, counts),
        lambda: lib.hifc_belady_replay(1, native, None),
    ):
        with pytest.raises(InvalidRequest):
            call()


def test_what_cannot_be_replayed() -> None:
    trace = make_trace([(0.0, [1])])
    with pytest.raises(InvalidRequest, match="capacity"):
        replay(trace, "lru", 0)
    with pytest.raises(InvalidRequest, match="admission"):
        replay(trace, "lru", 1, admission="sometimes")
    with pytest.raises(HiFCError, match="expects nothing"):
        replay(trace, "lru", 1, admission="expected")
    with pytest.raises(HiFCError, match="no policy is called"):
        replay(trace, "mru", 1)
    with pytest.raises(HiFCError, match="without requests"):
        replay(make_trace([]), "lru", 1)
    wrong = Trace(trace.times_s, trace.offsets, trace.ids + np.uint32(7), trace.answers, 1)
    with pytest.raises(HiFCError, match="not below"):
        replay(wrong, "lru", 1)
    assert Outcome(0, 0, 0).hit_ratio == 0
    assert Outcome(1, 0, 1).written_per_reused == math.inf


# ---- files


def line(timestamp: object = 0, hash_ids: object = (1, 2)) -> str:
    found = {"timestamp": timestamp, "hash_ids": hash_ids, "input_length": 9, "output_length": 1}
    return json.dumps(found) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no accesses"),
        ("\n\n", "no accesses"),
        (line(hash_ids=[]), "no accesses"),
        (line() + "{", ":2: is not JSON"),
        ("[" * 100000, ":1: is not JSON"),
        ("[1]", "wants an object"),
        ('{"timestamp": 1}', "wants an object"),
        (line(timestamp="0"), "milliseconds"),
        (line(timestamp=True), "milliseconds"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "milliseconds"),
        ('{"timestamp": 1e999, "hash_ids": [1]}', "milliseconds"),
        (line(hash_ids="12"), "whole numbers"),
        (line(hash_ids=[1, 2.5]), "whole numbers"),
        (line(hash_ids=[True]), "whole numbers"),
        ('{"timestamp": 0, "hash_ids": [1], "output_length": -1}', "number of tokens"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        load_trace(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_trace(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        load_trace(tmp_path / "binary")


def test_requests_out_of_order_are_sorted_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    big = 2**70
    file.write_text(line(2000, [3, big]) + line(1000, [-1, 2]) + line(3000, [3, big]))
    heard: list[str] = []
    trace = load_trace(file, heard.append)
    assert trace.times_s.tolist() == [1.0, 2.0, 3.0]
    assert trace.ids.tolist() == [0, 1, 2, 3, 2, 3]
    assert trace.offsets.tolist() == [0, 2, 4, 6]
    assert len(heard) == 1
    assert "1 requests are earlier" in heard[0]


# ---- the command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "tools/bench/policy_replay.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    made = access_traces.chat(5, requests=400)
    file.write_text("".join(line(round(1000 * now), chain) for now, chain in made))
    return file


def test_json_of_the_command(trace_file: Path) -> None:
    done = command(str(trace_file), "--capacity", "100,400", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert set(results[0]) == {
        "policy",
        "admission",
        "capacity_blocks",
        "hit_ratio",
        "written_blocks",
        "reused_blocks",
    }
    found = {
        (row["policy"], row["admission"], row["capacity_blocks"]): row["hit_ratio"]
        for row in results
    }
    assert len(found) == len(results)
    for capacity in (100, 400):
        for policy in ("default", *CLASSIC):
            assert found[policy, "always", capacity] <= found[BELADY, "always", capacity]
        assert ("default", "expected", capacity) in found


def test_table_and_plot_of_the_command(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    done = command(
        str(trace_file),
        *("--capacity", "100,400", "--policy", "default,lru,belady"),
        *("--admission", ",".join(ADMISSIONS), "--write-budget", "5000", "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    lines = [text.split()[:3] for text in done.stdout.splitlines()[1:]]
    assert ["100", "lru", "budget"] in lines
    assert ["400", "belady", "always"] in lines
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_reuse(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "trace.jsonl", tmp_path / "plot.png"
    file.write_text(line(0, [1, 2, 3]) + line(1000, [4, 5, 6]))
    done = command(str(file), "--capacity", "2,4", "--policy", "lru,belady", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "log" not in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "capacities"),
        (["--capacity", "many"], "capacities"),
        (["--policy", "mru"], "none of"),
        (["--admission", "budget"], "--write-budget"),
        (["--plot", "/nonexistent/x.png"], "x.png"),
        (["--plot", "/tmp"], "no file"),
        (["--plot", "x.what"], "png"),
    ],
)
def test_bad_arguments_are_refused(trace_file: Path, arguments: list[str], message: str) -> None:
    done = command(str(trace_file), "--capacity", "50", "--policy", "lru", *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "accesses a minute" not in done.stderr, "said before a replay"
