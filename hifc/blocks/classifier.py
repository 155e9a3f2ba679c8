# SPDX-License-Identifier: Apache-2.0
"""Hot or cold: which share of the blocks is kept in memory, and when memory is too full.

The hot ratio starts at 30 % and follows the hit rate, judged once a window of accesses:

- Within `dead_band` of the target nothing moves. Outside, two windows in a row must agree, and the
  window after a move does not count: blocks are still on their way then. A window is as long as
  there are resident blocks, which is the time that a step takes to show.
- A step is `gain` times the error, from `step_min` to `step_max`. So the loop is a sampled
  integrator, ratio += gain * error: where the hit rate rises by less than 1 / gain per unit of
  ratio it comes to the target from one side. Where it rises steeper, up to a cliff (a cyclic scan
  hits all or nothing), it steps over the target once and meets the next rule.
- A shrink is on trial for 8 windows: the first of them in which hits are missing takes it back, all
  of it, and shrinking pauses for 8 windows, then for twice as many each time, up to `pause_max`. So
  what is left of an oscillation is one step deep, a window long and seldom. A shrink that lasts
  ends that.

Free memory below the watermark starts offload on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hifc.kernels.heat import HeatTable, Split

# Windows after a shrink in which missing hits are its fault.
TRIAL_WINDOWS = 8
PAUSE_WINDOWS = 8


@dataclass
class HotColdClassifier:
    """Decides which share of the blocks is hot, that is kept in memory, from the hit rate.

    Not thread-safe: the engine holds its lock.
    """

    hot_ratio: float = 0.30
    hot_ratio_min: float = 0.05
    hot_ratio_max: float = 0.95
    hit_rate_target: float = 0.90
    watermark: float = 0.15
    window: int = 128  # accesses, at least
    dead_band: float = 0.05  # of the hit rate, to either side of the target
    gain: float = 0.25  # of the ratio, per unit of missing hit rate
    step_min: float = 0.01
    step_max: float = 0.10
    pause_max: int = 64  # windows
    hit_rate: float | None = None  # of the latest window; None before the first has ended
    _seen: int = field(default=0, init=False, repr=False)
    _hits: int = field(default=0, init=False, repr=False)
    _settling: bool = field(default=False, init=False, repr=False)
    _side: int = field(default=0, init=False, repr=False)  # of the window before: -1, 0, 1
    _taken: float = field(default=0.0, init=False, repr=False)  # by a shrink on trial
    _trial: int = field(default=0, init=False, repr=False)  # windows left of it
    _pause: int = field(default=0, init=False, repr=False)  # windows without shrinking left
    _pause_next: int = field(default=PAUSE_WINDOWS, init=False, repr=False)

    def observe(self, hit: bool, blocks: int = 0) -> None:
        """One access: hit tells whether the block was in memory; blocks: how many are resident."""
        self._seen += 1
        self._hits += hit
        if self._seen >= max(self.window, blocks):
            self.hit_rate = self._hits / self._seen
            self._seen = self._hits = 0
            self._judge(self.hit_rate_target - self.hit_rate)

    def _judge(self, missing: float) -> None:
        """A window has ended, with so much of its hit rate missing, or to spare below 0."""
        self._pause = max(0, self._pause - 1)
        if self._trial:
            self._trial -= 1
            if not self._trial:  # the shrink has lasted
                self._taken = 0.0
                self._pause_next = PAUSE_WINDOWS
        side = 0 if abs(missing) <= self.dead_band else 1 if missing > 0 else -1
        if self._taken and side > 0:
            self._take_back()
        elif self._settling:
            self._settling = False
        elif side == self._side > 0:
            self._move(self._step(missing))
        elif side == self._side < 0 and not self._pause:
            self._shrink(-missing)
        else:
            self._side = side

    def _take_back(self) -> None:
        self._move(self._taken)
        self._taken, self._trial = 0.0, 0
        self._pause, self._pause_next = (
            self._pause_next,
            min(2 * self._pause_next, self.pause_max),
        )

    def _shrink(self, spare: float) -> None:
        before = self.hot_ratio
        self._move(-self._step(spare))
        self._taken, self._trial = before - self.hot_ratio, TRIAL_WINDOWS

    def _step(self, error: float) -> float:
        return min(self.step_max, max(self.step_min, self.gain * error))

    def _move(self, step: float) -> None:
        self.hot_ratio = min(self.hot_ratio_max, max(self.hot_ratio_min, self.hot_ratio + step))
        self._settling, self._side = True, 0

    def hot_count(self, blocks: int) -> int:
        """How many of that many blocks are hot."""
        return min(blocks, round(self.hot_ratio * blocks))

    def split(
        self, table: HeatTable, *, eligible: Any = None, mass: Any = None, elapsed_s: float = 0.0
    ) -> Split:
        """Hot and cold of all blocks of a heat table by the hot ratio of now, and the victims, by
        kernels where the table is; arguments and answer as of HeatTable.split."""
        return table.split(
            hot_ratio=self.hot_ratio, eligible=eligible, mass=mass, elapsed_s=elapsed_s
        )

    def should_offload(self, used_bytes: int, total_bytes: int) -> bool:
        """True once less than the watermark's share of total_bytes is free."""
        return total_bytes - used_bytes < self.watermark * total_bytes
