# SPDX-License-Identifier: Apache-2.0
"""Hot or cold: which share of the blocks is kept in memory, and when memory is too full.

The hot ratio starts at 30 % and follows the hit rate: too few hits and it grows, more than wanted
and it shrinks, by small damped steps within its bounds. Free memory below the watermark starts
offload on its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HotColdClassifier:
    """Not thread-safe: the engine holds its lock."""

    hot_ratio: float = 0.30
    hot_ratio_min: float = 0.05
    hot_ratio_max: float = 0.95
    hit_rate_target: float = 0.90
    watermark: float = 0.15
    smoothing: float = 0.05  # weight of one access in the smoothed hit rate
    gain: float = 0.02  # of the ratio, per access and unit of missing hit rate
    hit_rate: float | None = None  # smoothed; None before the first access

    def observe(self, hit: bool) -> None:
        """One access: hit tells whether the block was in memory."""
        value = 1.0 if hit else 0.0
        if self.hit_rate is None:
            self.hit_rate = value
        else:
            self.hit_rate += self.smoothing * (value - self.hit_rate)
        step = self.gain * (self.hit_rate_target - self.hit_rate)
        self.hot_ratio = min(self.hot_ratio_max, max(self.hot_ratio_min, self.hot_ratio + step))

    def hot_count(self, blocks: int) -> int:
        """How many of that many blocks are hot."""
        return min(blocks, round(self.hot_ratio * blocks))

    def should_offload(self, used_bytes: int, total_bytes: int) -> bool:
        """True once less than the watermark's share of total_bytes is free."""
        return total_bytes - used_bytes < self.watermark * total_bytes

    def excess_bytes(self, used_bytes: int, total_bytes: int) -> int:
        """Bytes to give up until the watermark's share is free again."""
        return max(0, used_bytes - int((1.0 - self.watermark) * total_bytes))
