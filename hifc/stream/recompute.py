# SPDX-License-Identifier: Apache-2.0
"""Load a stored prefix, or compute it again: whichever is expected to end sooner.

Measured while running, per model, in tokens:

    load       n tokens take  a + b n                          (latency, bandwidth)
    compute    n tokens after a context of c take  a + b n + d n (c + n / 2) + e c
               (calls, matrices, attention, passing over the context once)
    one token  after c takes  a + e c                          (another path: a decoding step)

The choice is between load(s) + compute(p - s after s) and compute(p after 0), s being the tokens
that are stored and p those of the prompt. Loading a part of what is there is no third way: load is
linear in s and what is saved grows with s at least linearly, so the best is at either end.

What has not been measured is loaded: that is measured then. After PROBE_EVERY prompts in a row that
were computed one is loaded all the same, since nothing else would tell that the device has become
faster. What a decision said is compared with what came, see `error`.
"""

from __future__ import annotations

import collections
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hifc.errors import ConfigError
from hifc.metrics.counters import Metrics
from hifc.stream.cost_model import CostModel

MODES = ("auto", "load", "recompute")
PROBE_EVERY = 16
ERRORS_KEPT = 16
# Nothing is judged by measurements of what was so many times shorter: a short load says nothing of
# bandwidth, a short forward nothing of attention.
LOAD_EXTRAPOLATION = 4
COMPUTE_EXTRAPOLATION = 16


@dataclass(frozen=True)
class Decision:
    """load: what was chosen. reason: forced, unmeasured, measured or probe. The predictions are of
    both ways, in seconds to the prompt's last token, None where nothing was measured."""

    load: bool
    reason: str
    stored_tokens: int
    prompt_tokens: int
    load_s: float | None
    compute_s: float | None

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {'not measured' if seconds is None else f'{seconds:.3f} s'}"
            for name, seconds in (("loading", self.load_s), ("computing", self.compute_s))
        )
        return (
            f"{'load' if self.load else 'compute'} {self.stored_tokens} stored of "
            f"{self.prompt_tokens} tokens ({self.reason}; {times})"
        )

    @property
    def predicted_s(self) -> float | None:
        """Of the way that was chosen."""
        return self.load_s if self.load else self.compute_s


class LoadOrRecompute:
    """The measurements of one model on one device. Thread-safe.

    mode: auto, or load or recompute to force either; measured is in any case.
    """

    def __init__(
        self,
        mode: str = "auto",
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"load_or_recompute: {mode!r} is none of {', '.join(MODES)}")
        self.mode = mode
        self.clock = clock
        self._metrics = Metrics() if metrics is None else metrics
        self._lock = threading.Lock()
        self._load = CostModel(lambda tokens, _context: (tokens, 1.0))
        self._compute = CostModel(
            lambda tokens, context: (tokens, tokens * (context + tokens / 2), 1.0, context)
        )
        self._one = CostModel(lambda _tokens, context: (1.0, context))
        self._computed_in_a_row = 0
        self._errors: collections.deque[float] = collections.deque(maxlen=ERRORS_KEPT)

    # ---- what was measured

    def loaded(self, tokens: int, seconds: float) -> None:
        """A prefix of that many tokens was loaded."""
        with self._lock:
            self._load.add(tokens, 0, seconds)
        self._metrics.add("prefix_loaded")

    def computed(self, tokens: int, context: int, seconds: float) -> None:
        """A forward over tokens came after context."""
        with self._lock:
            (self._one if tokens == 1 else self._compute).add(tokens, context, seconds)

    def ended(self, decision: Decision, actual_s: float) -> None:
        """The prompt of a decision is there, so long after the decision (time between forwards,
        which is not ours, left out)."""
        predicted_s = decision.predicted_s
        if predicted_s is None or actual_s <= 0:
            return
        with self._lock:
            self._errors.append(abs(predicted_s / actual_s - 1))
        self._metrics.add("prefix_predicted_us", round(predicted_s * 1e6))
        self._metrics.add("prefix_actual_us", round(actual_s * 1e6))

    # ---- what follows

    def decide(self, stored: int, prompt: int) -> Decision:
        """For a prompt of which the first stored tokens can be loaded; counts it."""
        with self._lock:
            decision = self._decide(stored, prompt)
            self._computed_in_a_row = 0 if decision.load else self._computed_in_a_row + 1
        if not decision.load:
            self._metrics.add("prefix_recomputed")
        if decision.reason == "probe":
            self._metrics.add("prefix_probed")
        return decision

    def _decide(self, stored: int, prompt: int) -> Decision:
        load_s = _sum(self._loading(stored), self._forward(prompt - stored, stored))
        compute_s = self._forward(prompt, 0)
        if self.mode != "auto":
            load, reason = self.mode == "load", "forced"
        elif load_s is None or compute_s is None:
            load, reason = True, "unmeasured"
        elif load_s < compute_s:
            load, reason = True, "measured"
        elif self._computed_in_a_row >= PROBE_EVERY:
            load, reason = True, "probe"
        else:
            load, reason = False, "measured"
        return Decision(load, reason, stored, prompt, load_s, compute_s)

    def _loading(self, tokens: int) -> float | None:
        if tokens > LOAD_EXTRAPOLATION * self._load.tokens_max:
            return None
        return self._load.predict(tokens, 0)

    def _forward(self, tokens: int, context: int) -> float | None:
        if tokens == 1:
            return self._one.predict(1, context)
        if tokens > COMPUTE_EXTRAPOLATION * self._compute.tokens_max:
            return None
        return self._compute.predict(tokens, context)

    # ---- what is exported

    def break_even_tokens(self) -> int:
        """The shortest prefix from which on loading is expected to be faster than computing it; -1:
        there is none, or it was not measured. As far as the measurements reach."""
        with self._lock:
            least = -1
            tokens = min(
                LOAD_EXTRAPOLATION * self._load.tokens_max,
                COMPUTE_EXTRAPOLATION * self._compute.tokens_max,
            )
            while tokens > 1:
                load_s, compute_s = self._loading(tokens), self._forward(tokens, 0)
                if load_s is None or compute_s is None or load_s >= compute_s:
                    break
                least, tokens = tokens, tokens * 7 // 8
            return least

    def tokens_per_s(self) -> tuple[float, float]:
        """Of loading, and of computing from nothing, at the longest measured; NaN: not yet."""
        with self._lock:
            rates = []
            for model in (self._load, self._compute):
                seconds = model.predict(model.tokens_max, 0)
                rates.append(model.tokens_max / seconds if seconds else math.nan)
            return rates[0], rates[1]

    def error(self) -> float:
        """Median of |predicted / actual - 1| over the last decisions; NaN before the first."""
        with self._lock:
            return statistics.median(self._errors) if self._errors else math.nan


class Watch:
    """Times one cache and tells the measurements: used by the thread of its forwards."""

    def __init__(self, costs: LoadOrRecompute) -> None:
        self.costs = costs
        self.decision: Decision | None = None  # the latest
        self._open: Decision | None = None  # whose prompt is not there yet
        self._actual_s = 0.0
        self._since_s = 0.0

    def decide(self, stored: int, prompt: int) -> bool:
        """Whether to load; loading starts now."""
        self.decision = self._open = self.costs.decide(stored, prompt)
        self._actual_s = 0.0
        self._since_s = self.costs.clock()
        return self.decision.load

    def loaded(self, tokens: int) -> None:
        """It was loaded."""
        seconds = self.costs.clock() - self._since_s
        self._actual_s += seconds
        self.costs.loaded(tokens, seconds)

    def forward_begins(self) -> None:
        """The first layer of a forward has its keys."""
        self._since_s = self.costs.clock()

    def forward_ends(self, tokens: int, context: int, layers: int) -> None:
        """The last layer has: all but one layer of the forward lies between, which it counts in."""
        if layers < 2:
            return
        seconds = (self.costs.clock() - self._since_s) * layers / (layers - 1)
        self.costs.computed(tokens, context, seconds)
        if self._open is None:
            return
        self._actual_s += seconds
        if context + tokens >= self._open.prompt_tokens:
            self.costs.ended(self._open, self._actual_s)
            self._open = None

    def forget(self) -> None:
        """What was begun will not end: the cache was emptied or cropped."""
        self._open = None


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
