# SPDX-License-Identifier: Apache-2.0
"""The hot ratio follows the hit rate and comes to rest; the watermark."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hifc.blocks.classifier import HotColdClassifier

TOOL = Path(__file__).parents[2] / "tools/bench/ratio"


@pytest.fixture(scope="module")
def bench() -> Any:
    """tools/bench/ratio, which has no suffix: its memories are the ones to try."""
    loader = importlib.machinery.SourceFileLoader("ratio_bench", str(TOOL))
    module = types.ModuleType(loader.name)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


def feed(classifier: HotColdClassifier, rate: float, windows: int) -> None:
    """Windows of just that hit rate, hits first."""
    for _ in range(windows):
        hits = round(rate * classifier.window)
        for number in range(classifier.window):
            classifier.observe(number < hits)


def test_it_starts_at_thirty_percent() -> None:
    classifier = HotColdClassifier()
    assert classifier.hot_count(100) == 30
    assert classifier.hit_rate is None


def test_bounds() -> None:
    classifier = HotColdClassifier(hot_ratio_min=0.1, hot_ratio_max=0.8)
    feed(classifier, 0.0, 60)
    assert classifier.hot_ratio == 0.8
    feed(classifier, 1.0, 300)
    assert classifier.hot_ratio == 0.1


def test_steps_are_bounded() -> None:
    classifier = HotColdClassifier()
    ratios = [classifier.hot_ratio]
    for rate in (0.0, 0.84, 1.0):
        for _ in range(40):
            feed(classifier, rate, 1)
            ratios.append(classifier.hot_ratio)
    steps = np.abs(np.diff(ratios))
    moved = steps[steps > 0]
    assert moved.max() <= classifier.step_max + 1e-12
    assert moved[:-1].min() >= classifier.step_min - 1e-12


@pytest.mark.parametrize("rate", [0.86, 0.88, 0.9, 0.93, 0.94])
def test_dead_band(rate: float) -> None:
    classifier = HotColdClassifier(window=100)
    feed(classifier, rate, 200)
    assert classifier.hot_ratio == 0.30
    assert classifier.hit_rate == pytest.approx(rate)


def test_one_window_alone_moves_nothing() -> None:
    classifier = HotColdClassifier()
    for _ in range(50):
        feed(classifier, 0.5, 1)
        feed(classifier, 0.9, 1)
        feed(classifier, 1.0, 1)
    assert classifier.hot_ratio == 0.30


def test_a_window_is_as_long_as_there_are_resident_blocks() -> None:
    classifier = HotColdClassifier()
    for _ in range(2 * 999):
        classifier.observe(False, blocks=1000)
    assert classifier.hot_ratio == 0.30
    for _ in range(2):
        classifier.observe(False, blocks=1000)
    assert classifier.hot_ratio == pytest.approx(0.40)


def test_a_shrink_that_hurts_is_taken_back_and_then_waits() -> None:
    """Too small a ratio is tried less and less often."""
    classifier = HotColdClassifier(hot_ratio=0.5)
    tried = []
    for window in range(400):
        feed(classifier, 1.0 if classifier.hot_ratio >= 0.5 else 0.0, 1)
        assert classifier.hot_ratio in (0.5, pytest.approx(0.475))
        if classifier.hot_ratio < 0.5:
            tried.append(window)
    gaps = np.diff(tried)
    assert (gaps[:3] * 1.5 < gaps[1:4]).all()
    assert gaps.max() <= classifier.pause_max + 4
    assert len(tried) < 10


@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0, 3.9])
def test_a_gentle_slope_is_met_from_one_side(slope: float) -> None:
    """Where slope * gain < 1 the sampled integrator has its pole in (0, 1): no overshoot."""
    classifier = HotColdClassifier(window=1000, step_max=1.0)
    rates = []
    for _ in range(400):
        rate = min(1.0, 0.5 + slope * (classifier.hot_ratio - 0.3))
        feed(classifier, rate, 1)
        rates.append(rate)
    # What a step of the least size can add is not the controller's doing.
    assert max(rates) <= 0.9 - 0.05 + max(slope * classifier.step_min, 0.05)
    assert rates[-1] >= 0.85 or classifier.hot_ratio == classifier.hot_ratio_max


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["gentle", "steep", "late", "zipf", "scan"])
def test_it_comes_to_rest_after_every_change(bench: Any, name: str, seed: int) -> None:
    """Noise, delay, cliffs, and a working set that changes at once."""
    grow_first, grow, shrink = bench.simulate(name, seed, 60_000).stretches
    classifier = HotColdClassifier()
    for one in (grow_first, grow):
        assert one["rest"] > one["from"]
        assert one["overshoot"] <= 0.10 + 1e-9  # a step
        assert one["spread"] <= 0.06
        # All that is left is one shrink and its undoing, with pauses that double.
        assert one["turns"] <= 12
        assert one["hit_rate"] >= 0.85
    assert shrink["rest"] <= shrink["from"]
    assert shrink["turns"] <= 14
    assert shrink["hit_rate"] >= 0.85
    assert classifier.hot_ratio_min <= shrink["rest"]


def test_without_the_undo_a_cliff_would_cost_more(bench: Any) -> None:
    """The test above can fail: a controller that follows every window does."""

    class Restless(HotColdClassifier):
        def _judge(self, missing: float) -> None:
            self._move(0.25 * missing)

    bench.HotColdClassifier, kept = Restless, bench.HotColdClassifier
    try:
        stretches = bench.simulate("scan", 0, 60_000).stretches
    finally:
        bench.HotColdClassifier = kept
    assert max(one["turns"] for one in stretches) > 12
    assert max(one["spread"] for one in stretches) > 0.06


def test_watermark() -> None:
    classifier = HotColdClassifier(watermark=0.15)
    assert not classifier.should_offload(85, 100)
    assert classifier.should_offload(86, 100)


def test_the_bench_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--accesses", "2000", "--json", "--plot", str(tmp_path / "ratio.svg")]
    done = subprocess.run(
        [sys.executable, str(TOOL), *words],
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    results = json.loads(done.stdout)["results"]
    assert list(results) == ["gentle", "steep", "late", "zipf", "scan"]
    assert all(len(stretches) == 3 for stretches in results.values())
    assert "<svg" in (tmp_path / "ratio.svg").read_text()
