# SPDX-License-Identifier: Apache-2.0
"""Counters by name, and the text that Prometheus reads."""

from __future__ import annotations

import math
import threading

import pytest

from hifc import HiFC
from hifc.metrics.counters import COUNTERS, Metrics


def test_ratio_of_the_readme() -> None:
    metrics = Metrics()
    metrics.add("total_access", 4)
    metrics.add("prefetch_hit", 3)
    assert metrics["prefetch_hit"] / metrics["total_access"] == 0.75
    assert metrics.ratio("hit", "total_access") == 0.0
    assert Metrics().ratio("hit", "total_access") == 0.0


def test_unknown_names_are_errors() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.add("prefetch_hits")
    with pytest.raises(KeyError):
        metrics["prefetch_hits"]


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(10_000):
            metrics.add("hit")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics["hit"] == 40_000


def test_prometheus_text() -> None:
    metrics = Metrics()
    metrics.add("hit", 2**60)
    metrics.gauge("hot_ratio", "Share", lambda: 0.3)
    text = metrics.prometheus({"device": 'a"b\\c\nd'})
    assert text.endswith("\n")
    lines = text.splitlines()
    assert "# TYPE hifc_hit_total counter" in lines
    assert f'hifc_hit_total{{device="a\\"b\\\\c\\nd"}} {2**60}' in lines
    assert any(line.startswith("hifc_hot_ratio{") and line.endswith(" 0.3") for line in lines)
    assert len(lines) == 3 * (len(COUNTERS) + 1)
    assert set(metrics.snapshot()) == {*COUNTERS, "hot_ratio"}


def test_what_is_not_known_is_not_shown_as_a_number() -> None:
    metrics = Metrics()
    metrics.add("hit", 3)
    metrics.gauge("prefix_error", "Median relative error", lambda: math.nan)
    assert math.isnan(metrics["prefix_error"])
    for text in (metrics.prometheus(), str(metrics), repr(metrics)):
        assert "hit" in text
        assert "prefix_error" not in text


def test_costs_of_an_engine_without_a_cache_are_not_known() -> None:
    device = "ram://metrics-unknown?size=64MiB"
    with HiFC(device=device, format="always", memory_budget="1MiB", owner_socket=False) as engine:
        names = [name for name in engine.metrics if name.startswith("prefix_")]
        for name in ["break_even_tokens", *set(names) - set(COUNTERS)]:
            assert math.isnan(engine.metrics[name]), name
            assert f"hifc_{name}" not in engine.metrics.prometheus()
        assert len(set(names) - set(COUNTERS)) == 3
