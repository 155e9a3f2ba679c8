# SPDX-License-Identifier: Apache-2.0
"""hifc-admin bench: its loads, what it leaves, its plot, and the baseline that doctor compares."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest

from admin_shell import Shell, code_of
from hifc.namespace.namespace import Namespace
from hifc.native_lib.request import Answer, Op
from hifc_admin.bench import load as bench_load
from hifc_admin.bench import plot as bench_plot
from hifc_admin.bench.load import Outcome, Scratch
from hifc_admin.doctor import baseline
from hifc_admin.doctor import measure as doctor_measure
from hifc_admin.doctor.checks import Row, Status, passed, warned
from hifc_admin.result import Exit
from hifc_admin.verbs import bench as bench_verb

QUICK = ("--duration", "0.1", "--size", "16KiB", "--depth", "4", "--data", "1MiB")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "kv.hifc"


@pytest.fixture
def uri(path: Path) -> str:
    """A namespace that holds ten values of 20,000 bytes."""
    uri = f"file://{path}?size=64MiB"
    Namespace.format(uri, segment_size="512KiB")
    with Namespace.open(uri) as namespace:
        for number in range(10):
            namespace.put(bytes([number]) * 16, bytes([number]) * 20_000)
    return uri


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where baselines go."""
    monkeypatch.setattr(baseline, "folder", lambda: tmp_path / "state")
    monkeypatch.setattr(doctor_measure, "DURATION_S", 0.2)
    return tmp_path / "state"


def test_all_loads_and_nothing_left(admin: Shell, uri: str, path: Path) -> None:
    code, document = admin.json("bench", uri, "--confirm", str(path), *QUICK)
    assert code == 0
    loads = {load["load"]: load for load in document["data"]["loads"]}
    assert list(loads) == ["write", "sequential", "random", "mixed", "swap out", "swap in"]
    for load in loads.values():
        assert load["operations"] > 0
        assert load["bytes"] == load["operations"] * (16 << 10)
        times = load["latency_us"]
        assert 0 < times["p50"] <= times["p95"] <= times["p99"] <= times["p999"] <= times["max"]
    assert loads["write"]["operations"] <= 64  # 1 MiB of values, as far as the duration allows
    with Namespace.open(uri) as namespace:
        assert sorted(entry.key for entry in namespace.list()) == [
            bytes([number]) * 16 for number in range(10)
        ]
        value = namespace.get(b"\x07" * 16)
        assert value is not None
        assert value.tobytes() == b"\x07" * 20_000


def test_too_little_data_is_not_too_little_room(admin: Shell, uri: str, path: Path) -> None:
    command = ["bench", uri, "--confirm", str(path), *QUICK[:-1], "64KiB"]
    code, document = admin.json(*command)
    assert (code, code_of(document)) == (Exit.USAGE, "bad-argument")
    assert "--data 64 KiB is too little" in document["problems"][0]["detail"]


def test_text_is_a_table_on_stdout(admin: Shell, uri: str, path: Path) -> None:
    assert admin("bench", uri, "--confirm", str(path), *QUICK, "--load", "random") == 0
    head, row = admin.out.splitlines()
    assert head.split()[:2] == ["LOAD", "SIZE"]
    assert row.startswith("random ")


def test_a_wrong_confirmation_is_refused(admin: Shell, uri: str, path: Path) -> None:
    before = path.read_bytes()
    code, document = admin.json("bench", uri, *QUICK, "--confirm", "/somewhere/else")
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    assert "overwrite" not in document["problems"][0]["fix"]
    assert path.read_bytes() == before


def test_without_confirmation_it_says_what_it_writes(admin: Shell, uri: str) -> None:
    """It overwrites nothing, so there is nothing to confirm."""
    assert admin("bench", uri, *QUICK) == 0
    assert admin.err.startswith("will write up to 3 MiB of values into free room")
    with Namespace.open(uri) as namespace:
        assert namespace.stats().entries == 10


def test_requests_that_moved_nothing_are_explained(
    admin: Shell, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = bench_load._count

    def some_wait(outcome: Outcome, ticket: Any, requests: Any) -> None:
        if outcome.name == "random" and not outcome.not_done:
            requests["status"][:] = Answer.RETRY
        count(outcome, ticket, requests)

    monkeypatch.setattr(bench_load, "_count", some_wait)
    words = ["bench", uri, *QUICK, "--load", "random"]
    _, document = admin.json(*words)
    (load,) = document["data"]["loads"]
    assert (load["not_done"], load["answers"]) == (1, {"retry": 1})
    assert admin(*words) == 0
    line = admin.out.splitlines()[-1]
    assert line.startswith(
        "random: 1 request moved nothing, outside all rates above: a queue was full"
    )
    assert "nothing is wrong" in line


def test_every_answer_has_a_meaning() -> None:
    assert set(bench_verb.MEANINGS) == set(Answer) - {Answer.OK, Answer.IN_FLIGHT}


def test_plot_and_table_have_the_same_unit() -> None:
    outcome = Outcome("random", 4096, 1, 4, elapsed_s=1.0, operations=1, moved_bytes=303 << 20)
    row = list(bench_verb._table([outcome]))[1]
    assert "303 MiB" in row
    assert bench_plot._label(outcome) == "random, 4 in flight, 303 MiB/s"


def test_read_only_changes_nothing(admin: Shell, uri: str, path: Path) -> None:
    before = path.read_bytes()
    code, document = admin.json("bench", uri, "--read-only", *QUICK)
    assert code == 0
    assert [load["load"] for load in document["data"]["loads"]] == ["sequential", "random"]
    assert path.read_bytes() == before


def test_read_only_of_nothing(admin: Shell, path: Path) -> None:
    uri = f"file://{path}?size=16MiB"
    Namespace.format(uri)
    code, document = admin.json("bench", uri, "--read-only")
    assert (code, code_of(document)) == (Exit.FAILED, "empty")


def test_a_namespace_that_is_nearly_full_is_not_evicted(admin: Shell, tmp_path: Path) -> None:
    path = tmp_path.resolve() / "full"
    uri = f"file://{path}?size=8MiB"
    Namespace.format(uri, segment_size="256KiB")
    with Namespace.open(uri) as namespace:
        for number in range(250):
            namespace.put(bytes([number]) * 16, bytes([number]) * 20_000)
    before = path.read_bytes()
    code, document = admin.json("bench", uri, "--confirm", str(path), *QUICK)
    assert (code, code_of(document)) == (Exit.FAILED, "no-space")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["--depth", "0"],
        ["--duration", "0"],
        ["--duration", "nan"],
        ["--size", "1GiB"],
        ["--size", "0"],
        ["--plot", "kv.txt"],
        ["--baseline"],
        ["--read-only", "--load", "mixed"],
        ["--read-only", "--baseline", "--load", "random"],
        ["--load", "everything"],
    ],
)
def test_wrong_usage(admin: Shell, uri: str, words: list[str]) -> None:
    assert admin.json("bench", uri, *words)[0] == Exit.USAGE


def test_scratch_goes_also_when_a_load_fails(
    admin: Shell, uri: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_load, "random_gets", broken)
    with pytest.raises(KeyboardInterrupt):
        admin("bench", uri, "--confirm", str(path), *QUICK)
    with Namespace.open(uri) as namespace:
        assert namespace.stats().entries == 10


# ---- the plot


def test_a_plot_is_an_svg(admin: Shell, uri: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "kv.svg"
    assert admin.json("bench", uri, "--read-only", *QUICK, "--plot", str(plot))[0] == 0
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_no_plot_without_matplotlib(
    admin: Shell, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    code, document = admin.json("bench", uri, "--read-only", "--plot", "kv.svg")
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "no-matplotlib")
    assert "hifc[bench]" in document["problems"][0]["fix"]


def test_a_load_without_times_is_no_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench_plot.draw([Outcome("write", 4096, 1, 1)], "nothing", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ---- parts


def test_scratch_keys_are_all_different() -> None:
    keys = Scratch(5000).keys
    assert len(np.unique(keys, axis=0)) == 5000
    assert keys[0, :10].tobytes() == bench_load.PREFIX
    assert Scratch(1).keys.tobytes() != Scratch(1).keys.tobytes()


def test_sequences_of_keys() -> None:
    keys = Scratch(5).keys
    puts = bench_load.sequential_puts(keys)
    first, second = puts(2), puts(2)
    assert first is not None
    assert second is not None
    assert np.array_equal(np.concatenate([first[1], second[1]]), keys[:4])
    assert puts(2) is None  # one key is left
    gets = bench_load.sequential_gets(keys)
    for start in (0, 3):
        turn = gets(3)
        assert turn is not None
        assert turn[0] == Op.GET
        assert np.array_equal(turn[1], keys[(start + np.arange(3)) % 5])


def test_mixed_ends_with_its_fresh_keys() -> None:
    keys = Scratch(20).keys
    choose = bench_load.mixed(keys[:10], keys[10:], 0.5)
    turns = []
    while (turn := choose(1)) is not None:
        turns.append(turn[0])
    assert turns.count(Op.PUT) == 10
    assert turns.count(Op.GET) > 0


# ---- the baseline


def test_a_baseline_is_kept_and_compared(admin: Shell, uri: str, kept: Path) -> None:
    code, document = admin.json("doctor", uri, "--measure")
    rows = {row["check"]: row for row in document["data"]["checks"]}
    assert rows["throughput"]["status"] == "WARN"
    assert "--baseline" in rows["throughput"]["fix"]
    code, document = admin.json("bench", uri, "--read-only", "--baseline", *QUICK)
    assert code == 0
    uuid = document["data"]["uuid"]
    assert document["data"]["baseline"] == str(kept / f"{uuid}.json")
    known = baseline.load(uuid)
    assert known is not None
    assert known.value_bytes == 20_000
    for factor, expected in ((1e-9, "PASS"), (1e9, "FAIL")):  # no machine is so much quicker
        baseline.save(dataclasses.replace(known, bytes_per_s=known.bytes_per_s * factor))
        rows = {
            row["check"]: row for row in admin.json("doctor", uri, "--measure")[1]["data"]["checks"]
        }
        assert rows["throughput"]["status"] == expected
    baseline.save(dataclasses.replace(known, value_bytes=1e6))
    _, document = admin.json("doctor", uri, "--measure")
    assert "another size" in document["problems"][-1]["detail"]


def test_measure_wants_a_device_at_rest(admin: Shell, uri: str) -> None:
    assert admin.json("doctor", "--measure")[0] == Exit.USAGE
    with Namespace.open(uri):
        _, document = admin.json("doctor", uri, "--measure")
    (row,) = (row for row in document["data"]["checks"] if row["check"] == "throughput")
    assert row["status"] == "WARN"
    assert "could not check" in row["detail"]


def test_what_explains_a_fall() -> None:
    rows = [
        Row("pcie link", warned("x2 where x4 fits")),
        Row("hits", warned("few")),
        Row("numa", passed("near")),
    ]
    found = doctor_measure.judged(80.0, 100.0, rows, "ram://")
    assert found.status is Status.FAIL
    assert found.evidence == "pcie link: x2 where x4 fits"
    assert "20% less" in found.detail
    assert doctor_measure.judged(86.0, 100.0, rows, "ram://").status is Status.PASS
    assert "none" in doctor_measure.judged(1.0, 100.0, rows[1:], "ram://").evidence


def test_a_broken_baseline_is_named(kept: Path) -> None:
    kept.mkdir()
    (kept / "ab.json").write_text("{}")
    with pytest.raises(Exception, match="not written by this version"):
        baseline.load("ab")
    assert baseline.load("cd") is None


def test_every_load_has_a_name() -> None:
    assert set(bench_verb.READING) < set(bench_verb.LOADS)


@pytest.mark.parametrize(
    ("status", "left"),
    [
        (Answer.OK, 0),
        (Answer.MISS, 0),
        *((answer, 3) for answer in Answer if answer not in (Answer.OK, Answer.MISS)),
        (-5, 3),
    ],
)
def test_what_was_not_deleted_is_told(
    monkeypatch: pytest.MonkeyPatch, status: int, left: int
) -> None:
    monkeypatch.setattr(bench_load, "RETRY_WAIT_S", 0.0)

    class Refusing:
        """A namespace that answers each delete alike."""

        def submit(self, requests: Any) -> Any:
            requests["status"] = status
            return SimpleNamespace(wait=lambda: True)

    assert bench_load.Scratch(3).delete(cast(Namespace, Refusing())) == left
