# SPDX-License-Identifier: Apache-2.0
"""How much attention sparse steps miss, and what is to be done about it.

Every step the sketch tells which share of the attention went to blocks that were not attended to.
Now and then one head's exact attention is computed beside it, which tells how far the sketch is to
be believed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

# Of a step's missed share, in the smoothed one.
SMOOTHING = 1 / 16
# Steps after the first, or after widening, before the smoothed share is acted on.
SETTLE_STEPS = 16
# The sketch misjudges if checks find more missed than so many times what it said, and so much.
CHECKS_MIN = 8
TRUST_FACTOR = 2.0
TRUST_MARGIN = 0.02


class Verdict(enum.Enum):
    """On the steps so far."""

    FINE = enum.auto()
    WIDEN = enum.auto()  # more is missed than may be
    DISTRUST = enum.auto()  # the sketch misjudges


@dataclass
class Quality:
    """Of the steps since reset. Shares are means over layers and heads.

    exact_steps: steps of one token that were exact. exact_heads: heads that had all of their
    attention since the sketch told nothing. checks: exact checks; with them sums over checks.
    """

    missed_max: float
    steps: int = 0
    exact_steps: int = 0
    exact_heads: int = 0
    missed_sum: float = 0.0
    checks: int = 0
    checked_missed: float = 0.0
    checked_estimate: float = 0.0
    checked_error: float = 0.0
    prefetched: int = 0
    prefetch_wanted: int = 0
    widened: int = 0
    _smoothed: float = field(default=0.0, repr=False)
    _settled: int = field(default=0, repr=False)

    def step(self, missed: float) -> None:
        """A step ended that missed that share, as the sketch says."""
        missed = max(0.0, missed)
        weight = SMOOTHING if self._settled else 1.0
        self._smoothed += weight * (missed - self._smoothed)
        self._settled += 1
        self.steps += 1
        self.missed_sum += missed

    def check(self, missed: float, estimate: float, error: float) -> None:
        """One head missed that share, where the sketch had said estimate; the norm of the error of
        its output, over that of the exact one."""
        self.checks += 1
        self.checked_missed += missed
        self.checked_estimate += max(0.0, estimate)
        self.checked_error += error

    def changed(self) -> None:
        """The budget was widened: what was missed before does not count."""
        self.widened += 1
        self._settled = 0

    @property
    def missed(self) -> float:
        """The share that steps miss now: what the sketch says, smoothed, times what exact checks
        found that to be wrong by."""
        if self.checks < CHECKS_MIN or self.checked_estimate <= 0.0:
            return self._smoothed
        return self._smoothed * self.checked_missed / self.checked_estimate

    def verdict(self) -> Verdict:
        """What is to be done before the next step."""
        bound = TRUST_FACTOR * self.checked_estimate + TRUST_MARGIN * self.checks
        if self.checks >= CHECKS_MIN and self.checked_missed > bound:
            return Verdict.DISTRUST
        if self._settled >= SETTLE_STEPS and self.missed > self.missed_max:
            return Verdict.WIDEN
        return Verdict.FINE
