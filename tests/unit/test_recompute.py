# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: what is learned from times that a script gives, and what is decided."""

from __future__ import annotations

import math
import random

import pytest
from interrupts import each_place

from hifc import ConfigError, Metrics
from hifc.stream import cost_model
from hifc.stream.cost_model import CLASS_SAMPLES, CLASSES_MAX, CostModel
from hifc.stream.recompute import ERRORS_KEPT, PROBE_EVERY, LoadOrRecompute, Watch


def load_s(tokens: int, per_s: float = 50_000) -> float:
    """A device with 5 ms of latency."""
    return 0.005 + tokens / per_s


def compute_s(tokens: int, context: int = 0) -> float:
    """As seen with SmolLM2: matrices, attention, and passing over the context."""
    if tokens == 1:
        return 0.08 + 1e-5 * context
    return 0.05 + 3e-3 * tokens + 4e-7 * tokens * (context + tokens / 2) + 1e-4 * context


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Serves prompts as HiFCCache does, by a clock that a script moves."""

    def __init__(self, mode: str = "auto") -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.costs = LoadOrRecompute(mode, self.metrics, self.clock)
        self.load = load_s
        self.compute = compute_s

    def serve(self, stored: int, prompt: int) -> Watch:
        watch = Watch(self.costs)
        loads = stored > 0 and watch.decide(stored, prompt)
        if loads:
            self.clock.now += self.load(stored)
            watch.loaded(stored)
        self.clock.now += 10  # what others do meanwhile is not counted
        start = stored if loads else 0
        watch.forward_begins()
        self.clock.now += self.compute(prompt - start, start) * 29 / 30
        watch.forward_ends(prompt - start, start, 30)
        return watch


# ---- the model of costs


def test_the_weights_are_found() -> None:
    model = CostModel(lambda n, c: (n, n * (c + n / 2), 1.0, c))
    for tokens in (2, 16, 100, 600, 4000):
        for context in (0, 300, 2000, 7000):
            model.add(tokens, context, compute_s(tokens, context))
    for tokens, context in ((50, 50), (1000, 100), (7000, 0), (30, 7500)):
        assert model.predict(tokens, context) == pytest.approx(compute_s(tokens, context), rel=0.02)


def test_one_sample_is_taken_in_proportion() -> None:
    model = CostModel(lambda n, c: (n, n * (c + n / 2), 1.0, c))
    assert model.predict(10, 0) is None
    model.add(1000, 0, 4.0)
    assert model.predict(2000, 0) == pytest.approx(8.0)


def test_outliers_and_noise() -> None:
    rng = random.Random(1)
    model = CostModel(lambda n, _c: (n, 1.0))
    for _ in range(400):
        tokens = int(2 ** rng.uniform(4, 13))
        seconds = load_s(tokens) * rng.lognormvariate(0, 0.1)
        if rng.random() < 0.1:
            seconds *= rng.choice((10, 100))
        model.add(tokens, 0, seconds)
    for tokens in (32, 500, 8000):
        assert model.predict(tokens, 0) == pytest.approx(load_s(tokens), rel=0.25)


def test_memory_is_bounded_and_old_times_go() -> None:
    model = CostModel(lambda n, _c: (n, 1.0))
    for tokens in range(1, 20_000, 7):
        model.add(tokens, tokens * 31 % 9000, 1.0 + tokens)
    assert len(model) <= CLASSES_MAX * CLASS_SAMPLES
    model = CostModel(lambda n, _c: (n, 1.0))
    for _ in range(50):
        model.add(1000, 0, 1.0)
    for _ in range(CLASS_SAMPLES // 2 + 1):
        model.add(1000, 0, 9.0)
    assert model.predict(1000, 0) == pytest.approx(9.0)
    assert len(model) == CLASS_SAMPLES


def test_no_prediction_is_negative() -> None:
    rng = random.Random(2)
    model = CostModel(lambda n, c: (n, n * (c + n / 2), 1.0, c))
    for _ in range(60):
        model.add(rng.randrange(2, 5000), rng.randrange(5000), rng.uniform(0.01, 5))
        predicted = model.predict(rng.randrange(2, 9000), rng.randrange(9000))
        assert predicted is not None
        assert predicted >= 0


def test_an_exception_anywhere_leaves_what_was_learned() -> None:
    def terms(n: float, _c: float) -> tuple[float, float]:
        return n, 1.0

    model = CostModel(terms)
    lengths = iter(range(100))

    def add() -> None:
        model.add(1 << next(lengths), 0, 1.0)  # a class of its own

    def check(_where: str) -> None:
        assert (model.predict(1, 0) is None) == (len(model) == 0)

    assert each_place(add, check, only=(cost_model.__file__,)) > 3
    assert model.predict(1, 0) is not None


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    model = CostModel(lambda n, _c: (n, 1.0))
    model.add(10, 0, 0.0)
    assert len(model) == 0


# ---- the decision


def test_unmeasured_is_loaded() -> None:
    machine = Machine()
    assert machine.costs.break_even_tokens() == -1
    assert all(math.isnan(rate) for rate in machine.costs.tokens_per_s())
    assert math.isnan(machine.costs.error())
    watch = machine.serve(4000, 4010)
    assert watch.decision is not None
    assert (watch.decision.load, watch.decision.reason) == (True, "unmeasured")
    assert watch.decision.load_s is None
    assert machine.costs.tokens_per_s()[0] == pytest.approx(4000 / load_s(4000))


def teach(machine: Machine) -> None:
    for tokens in (64, 500, 4000):
        machine.serve(0, tokens)
        machine.serve(tokens, tokens + 1)
        machine.serve(tokens, tokens + 40)


def test_a_fast_device_is_loaded_from_and_the_time_is_foreseen() -> None:
    machine = Machine()
    teach(machine)
    for _ in range(ERRORS_KEPT):
        decision = machine.serve(3000, 3200).decision
    assert decision is not None
    assert (decision.load, decision.reason) == (True, "measured")
    assert decision.load_s == pytest.approx(load_s(3000) + compute_s(200, 3000), rel=0.15)
    assert decision.compute_s == pytest.approx(compute_s(3200), rel=0.15)
    assert machine.costs.error() < 0.01
    predicted = machine.metrics["prefix_predicted_us"]
    assert predicted == pytest.approx(machine.metrics["prefix_actual_us"], rel=0.05)


def test_a_slow_device_is_not() -> None:
    machine = Machine()
    machine.load = lambda tokens: 0.05 + tokens / 100
    teach(machine)
    before = machine.metrics["prefix_recomputed"]
    watch = machine.serve(3000, 3200)
    assert watch.decision is not None
    assert not watch.decision.load
    assert machine.metrics["prefix_recomputed"] == before + 1
    # Attention grows with the square of the prompt: 0.01 n = 0.003 n + 2e-7 n^2, beyond what was
    # loaded.
    assert machine.costs.break_even_tokens() == -1


def test_latency_makes_short_prefixes_not_worth_it() -> None:
    """Half a second of latency: from some length on, loading wins."""
    machine = Machine()
    machine.load = lambda tokens: 0.5 + tokens / 50_000
    teach(machine)
    least = machine.costs.break_even_tokens()
    assert compute_s(least // 2) < machine.load(least // 2)
    assert compute_s(least * 2) > machine.load(least * 2)
    short = machine.serve(least // 3, least // 3 + 1).decision
    long = machine.serve(least * 3, least * 3 + 1).decision
    assert short is not None
    assert long is not None
    assert (short.load, long.load) == (False, True)


def test_a_tail_after_a_long_context_counts() -> None:
    """What remains is dearer after the prefix than from nothing: passing over the context."""
    machine = Machine()
    machine.compute = lambda tokens, context=0: (
        0.01 * tokens + 5e-3 * context if tokens > 1 else 0.1
    )
    machine.load = lambda tokens: 1e-3 + tokens * 5.5e-3
    teach(machine)
    whole = machine.serve(3000, 3001).decision
    tail = machine.serve(3000, 3040).decision
    assert whole is not None
    assert tail is not None
    # Either loads as fast, and one token after it is a step, many are a forward over it all.
    assert (whole.load, tail.load) == (True, False)


def test_a_device_that_becomes_faster_is_noticed() -> None:
    machine = Machine()
    machine.load = lambda tokens: 0.05 + tokens / 100
    teach(machine)
    assert machine.costs.decide(3000, 3040).load is False
    machine.load = load_s
    loads = [
        watch.decision.load
        for watch in (machine.serve(3000, 3040) for _ in range(6 * PROBE_EVERY))
        if watch.decision
    ]
    assert machine.metrics["prefix_probed"] >= 1
    assert all(loads[-PROBE_EVERY:])


def test_forced() -> None:
    for mode, loads in (("load", True), ("recompute", False)):
        machine = Machine(mode)
        machine.load = lambda tokens: 0.05 + tokens / 100
        for _ in range(3 * PROBE_EVERY):
            decision = machine.serve(300, 340).decision
            assert decision is not None
            assert (decision.load, decision.reason) == (loads, "forced")
    with pytest.raises(ConfigError, match="load_or_recompute"):
        LoadOrRecompute("never")


def test_small_forwards_do_not_judge_long_prompts() -> None:
    machine = Machine()
    for tokens in (2, 4, 8):
        machine.serve(0, tokens)
        machine.serve(100, 101)
    decision = machine.costs.decide(5000, 5001)
    assert (decision.load, decision.reason, decision.compute_s) == (True, "unmeasured", None)


def test_a_prompt_in_chunks_is_one_prediction() -> None:
    machine = Machine("recompute")
    teach(machine)
    watch = Watch(machine.costs)
    assert not watch.decide(1000, 1200)
    before = machine.metrics["prefix_actual_us"]
    for context in (0, 400, 800):
        watch.forward_begins()
        machine.clock.now += 1.0
        watch.forward_ends(400, context, 30)
    assert machine.metrics["prefix_actual_us"] - before == pytest.approx(3e6 * 30 / 29, rel=1e-3)
    watch.forward_begins()
    machine.clock.now += 1.0
    watch.forward_ends(1, 1200, 30)  # decoding is no part of it
    assert machine.metrics["prefix_actual_us"] - before == pytest.approx(3e6 * 30 / 29, rel=1e-3)


def test_what_was_dropped_is_not_judged() -> None:
    machine = Machine()
    teach(machine)
    before = machine.metrics["prefix_actual_us"]
    watch = Watch(machine.costs)
    watch.decide(1000, 1200)
    watch.forget()
    watch.forward_begins()
    machine.clock.now += 1.0
    watch.forward_ends(1200, 0, 30)
    assert machine.metrics["prefix_actual_us"] == before


def test_the_error_is_a_median_of_the_last() -> None:
    machine = Machine()
    teach(machine)
    for _ in range(ERRORS_KEPT):
        machine.serve(3000, 3200)
    calm = machine.costs.error()
    machine.compute = lambda tokens, context=0: 50 * compute_s(tokens, context)
    machine.serve(3000, 3200)
    assert machine.costs.error() == pytest.approx(calm, abs=0.05)
