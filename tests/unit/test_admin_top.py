# SPDX-License-Identifier: Apache-2.0
"""hifc-admin top: rates between two looks, Prometheus text, and the view of a real engine that runs
in another process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from admin_shell import Shell, code_of
from hifc.namespace.stats import latency_us
from hifc_admin import text
from hifc_admin.engine import owner, prometheus, rates
from hifc_admin.result import Exit
from hifc_admin.verbs import live as live_verbs

ENGINE = """
import select, sys
import numpy as np
from hifc import HiFC
config = {"device": sys.argv[1], "format": "always", "segment_size": "256KiB",
          "memory_budget": "4MiB", "pool_size": "16MiB"}
with HiFC(config) as engine:
    blocks = [np.full(16384, n, dtype=np.float32) for n in range(8)]
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:  # until the test is over
        for n, block in enumerate(blocks):
            engine.store(bytes([n]) * 16, block)
        engine.offload()
        for n in [*range(8), *range(8)]:
            engine.load(bytes([n]) * 16)
"""


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of a device that an engine in another process is busy with."""
    uri = f"file://{tmp_path_factory.mktemp('top').resolve()}/kv?size=32MiB"
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield uri
    process.kill()
    process.wait(120)


@pytest.fixture
def intervals(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an interval last until the engine has put and got something and published its hits,
    however little of the processor it has."""
    path = owner.find(engine)
    assert path is not None

    def counters() -> list[int]:
        stats = owner.ask(path, "stats")
        published = stats.get("published", {})
        return [
            *(stats[name] for name in ("put_count", "get_count")),
            *(published.get(name, 0) for name in ("hit",)),
        ]

    def sleep(_seconds: float) -> None:
        before, end_s = counters(), time.monotonic() + 120
        while not all(now > then for now, then in zip(counters(), before, strict=True)):
            assert time.monotonic() < end_s, "the engine does nothing"
            time.sleep(0.01)

    sleep(0)  # the first stores of all look for what is not there yet
    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(live_verbs, "time", clock)


@pytest.mark.usefixtures("intervals")
def test_top_once_of_a_running_engine(admin: Shell, engine: str) -> None:
    code, document = admin.json("top", engine, "--interval", "0.5")
    assert code == 0
    data = document["data"]
    assert data["put_per_s"] > 0
    assert data["get_bytes_per_s"] > 0
    assert 0 < data["get_latency_us"]["p50"] <= data["get_latency_us"]["p99"]
    assert data["hit_ratio"] == 1
    assert data["write_amplification"] >= 1
    assert 0 < data["engine"]["memory_hit_ratio"] <= 1
    assert data["engine"]["resident_bytes"] >= 0


@pytest.mark.usefixtures("intervals")
def test_top_as_text_of_a_socket(admin: Shell, engine: str) -> None:
    path = owner.find(engine)
    assert admin("top", str(path), "--once", "--interval", "0.2") == 0
    assert admin.out.startswith(f"{engine}  process ")
    assert re.search(r"^get +[\d.]+ [KMG]?i?B +\d+ +\d+ +\d+ +\d+$", admin.out, re.M)
    assert "no write budget" in admin.out


def test_top_stops_after_its_count(admin: Shell, engine: str) -> None:
    assert admin("top", engine, "--count", "2", "--interval", "0.1") == 0
    assert admin.out.count("requests in flight") == 2
    assert "\x1b" not in admin.out  # no terminal, no redrawing


def test_prometheus_text_of_a_running_engine(admin: Shell, engine: str) -> None:
    assert admin("top", engine, "--prometheus") == 0
    lines = admin.out.splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    sample = re.compile(r'hifc_[a-z0-9_]+\{uri="[^"]+",uuid="[0-9a-f]+"(,le="[^"]+")?\} \S+')
    assert all(line.startswith(("# TYPE ", "# HELP ")) or sample.fullmatch(line) for line in lines)
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert helped == families, "each family says what it is"
    assert all(len(line.split(maxsplit=3)) == 4 for line in lines if line.startswith("# HELP"))
    assert "hifc_break_even_tokens" not in families, "nothing was measured yet"
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    values = {name: float(value) for name, _, value in samples}
    (put,) = (value for name, value in values.items() if "put_bytes_total{" in name)
    assert put > 65536
    (count,) = (
        v
        for name, v in values.items()
        if name.startswith("hifc_namespace_get_latency_") and "_count{" in name
    )
    (last,) = (
        v
        for name, v in values.items()
        if "get_latency_seconds_bucket" in name and 'le="+Inf"' in name
    )
    assert count == last > 0


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon", "1e9"])
def test_intervals_are_bounded(admin: Shell, interval: str) -> None:
    assert admin.json("top", "ram://", f"--interval={interval}")[0] == Exit.USAGE


def test_nobody_to_watch(admin: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "owners", lambda: iter([]))
    code, document = admin.json("top")
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "not-owned")


def test_two_to_choose_from(admin: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(Path("/a"), {"uri": "ram://a"}), (Path("/b"), {"uri": "ram://b"})]
    monkeypatch.setattr(owner, "owners", lambda: iter(found))
    _, document = admin.json("top")
    assert document["problems"][0]["fix"] == "name one: ram://a, ram://b"


def test_the_view_ends_with_its_engine(admin: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([look(0), look(1)])

    def ask(path: Path, _: str) -> dict[str, Any]:
        answer = next(answers, None)
        if answer is None:
            raise ConnectionRefusedError("nobody listens")
        return answer

    monkeypatch.setattr(owner, "ask", ask)
    assert admin("top", "/a.sock", "--interval", "0.1") == Exit.FAILED
    assert "requests in flight" in admin.out
    assert "does not answer any more" in admin.err


# ---- from numbers alone


def look(step: int, **more: Any) -> dict[str, Any]:
    """Counters of an owner after that many steps."""
    names = {*rates.PER_SECOND, *rates.AS_OF_NOW, "poll_count", "poll_empty_count"}
    zero: dict[str, Any] = dict.fromkeys(sorted(names), 0)
    counted = {
        "get_count": 90 * step,
        "miss_count": 10 * step,
        "put_bytes": 1000 * step,
        "device_write_bytes": 1100 * step,
        "poll_count": 100 * step,
        "poll_empty_count": 75 * step,
        "get_latency": [0, 98 * step, 0, 0, 2 * step],
        "put_latency": [0] * 5,
        "get_elapsed_ns": 7_000_000 * step,
        "put_elapsed_ns": 0,
    }
    return zero | {"uri": "ram://", "pid": 1, "uuid": "ab", "label": ""} | counted | more


def test_rates_are_differences_over_time() -> None:
    found = rates.between(look(2), look(4), 2.0)
    assert found["get_per_s"] == 90
    assert found["put_bytes_per_s"] == 1000
    assert found["hit_ratio"] == 0.9
    assert found["poll_busy_ratio"] == 0.25
    assert found["write_amplification"] == pytest.approx(1.1)
    assert 2 < found["get_latency_us"]["p50"] < 4.1
    assert found["get_latency_us"]["p99"] > 16
    assert found["put_latency_us"] == {"p50": None, "p95": None, "p99": None}


def test_an_engine_that_began_again_has_no_negative_rates() -> None:
    found = rates.between(look(9), look(0), 1.0)
    assert min(found[name] for name in rates.PER_SECOND.values()) == 0
    assert found["hit_ratio"] is None
    assert list(rates.lines(found))


def test_an_engines_ratios() -> None:
    before = look(1, published={"total_access": 10, "hit": 5, "prefetch_issued": 4})
    after = look(
        2,
        published={
            "total_access": 30,
            "hit": 20,
            "prefetch_issued": 8,
            "prefetch_hit": 3,
            "hot_ratio": 0.3,
        },
    )
    engine = rates.between(before, after, 1.0)["engine"]
    assert engine["memory_hit_ratio"] == 0.75
    assert engine["prefetch_accuracy"] == 0.75
    assert engine["hot_ratio"] == 0.3
    assert rates.between(after, after, 1.0)["engine"]["memory_hit_ratio"] == pytest.approx(2 / 3)


def test_a_write_budget_is_shown() -> None:
    after = look(1, write_budget_bytes=10 << 30, write_budget_left_bytes=4 << 30)
    assert any(
        "4 GiB left of 10 GiB a day" in line
        for line in rates.lines(rates.between(look(0), after, 1))
    )


def test_prometheus_groups_owners_and_escapes() -> None:
    lines = list(prometheus.text([look(1), look(2, uri='file:///a"b\\c')]))
    at = lines.index("# TYPE hifc_namespace_get_total counter")
    assert lines[at + 1 : at + 3] == [
        'hifc_namespace_get_total{uri="ram://",uuid="ab"} 90',
        'hifc_namespace_get_total{uri="file:///a\\"b\\\\c",uuid="ab"} 180',
    ]
    buckets = [line for line in lines if "get_latency_seconds_bucket" in line][:5]
    assert [line.rpartition(" ")[2] for line in buckets] == ["0", "98", "98", "98", "100"]
    assert 'le="2.048e-06"' in buckets[0]
    assert 'le="+Inf"' in buckets[4]
    assert 'hifc_namespace_get_latency_seconds_sum{uri="ram://",uuid="ab"} 0.007' in lines


def test_latency_within_its_bucket() -> None:
    assert latency_us([], 0.5) is None
    assert latency_us([0, 0], 0.5) is None
    assert latency_us([10], 1.0) == pytest.approx(2.048)
    assert latency_us([0, 0, 4], 0.5) == pytest.approx(6 * 1.024)


def test_what_never_happened_has_no_dash() -> None:
    """An engine that just began: no get, no poll, no prefetch."""
    found = rates.between(look(0), look(0, published={"blocks": 0, "hot_ratio": 0.3}), 1.0)
    shown = "\n".join(rates.lines(found))
    assert not re.search(r"(?<!\S)-(?!\S)", shown), shown
    assert "prefetched blocks" not in shown
    assert re.search(r"^gets +none; ", shown, re.M)
    assert "30% of blocks kept hot" in shown
    assert "BYTES/S" in shown


def test_rates_and_failures_stand_out() -> None:
    found = rates.between(look(0), look(1, corrupt_count=3), 1.0)
    shown = "\n".join(rates.lines(found))
    assert "\x1b[1;31m3 wrong checksums\x1b[0m" in shown
    assert "\x1b[1m      90\x1b[0m" in shown, "gets a second"
    assert "\x1b" not in text.plain(shown)
