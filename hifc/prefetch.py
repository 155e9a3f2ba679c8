# SPDX-License-Identifier: Apache-2.0
"""HiFCPrefetcher: which blocks attention will look at next, from the trend of its mass.

Per head and block, a straight line through the attention mass of the last window_size steps is
extended by one step. In exact mode every block is used in every step and the order is known, so
this serves sparse mode and the warming of reused prefixes only.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import numpy.typing as npt

from hifc.errors import ConfigError, InvalidRequest

_Mass = npt.NDArray[np.float32]


class HiFCPrefetcher:
    """Not thread-safe. Memory: window_size x num_heads x blocks x 4 bytes."""

    def __init__(self, num_heads: int, window_size: int = 3, *, block_tokens: int = 1) -> None:
        if num_heads < 1 or window_size < 2 or block_tokens < 1:
            raise ConfigError(
                f"num_heads {num_heads}, window_size {window_size} and block_tokens "
                f"{block_tokens} must be at least 1, 2 and 1"
            )
        self.num_heads = num_heads
        self.window_size = window_size
        self.block_tokens = block_tokens
        self._window: collections.deque[_Mass] = collections.deque(maxlen=window_size)

    @property
    def num_blocks(self) -> int:
        """Blocks seen in the latest update."""
        return self._window[-1].shape[1] if self._window else 0

    def update(self, attn_weights: Any) -> None:
        """Takes the attention of one step.

        attn_weights: numpy or torch, (heads, keys) or (..., heads, queries, keys); batches and
        queries are averaged, keys are summed by block_tokens (1: keys are blocks already).
        """
        if hasattr(attn_weights, "detach"):
            attn_weights = attn_weights.detach().float().cpu().numpy()
        mass = np.asarray(attn_weights, dtype=np.float32)
        if mass.ndim >= 3:
            mass = mass.mean(axis=-2)
            mass = mass.reshape(-1, *mass.shape[-2:]).mean(axis=0)
        if mass.ndim != 2 or mass.shape[0] != self.num_heads:
            raise InvalidRequest(
                f"attention of shape {np.shape(attn_weights)}: (heads, keys) or "
                f"(..., heads, queries, keys) with {self.num_heads} heads is wanted"
            )
        self._window.append(self._by_block(mass))

    def _by_block(self, mass: _Mass) -> _Mass:
        if self.block_tokens == 1:
            return mass.copy()
        starts = np.arange(0, mass.shape[1], self.block_tokens)
        summed: _Mass = np.add.reduceat(mass, starts, axis=1)
        return summed

    def scores(self) -> _Mass:
        """Expected mass in the next step, shape (heads, blocks); not negative."""
        if not self._window:
            return np.zeros((self.num_heads, 0), dtype=np.float32)
        blocks = self.num_blocks
        history = np.zeros((len(self._window), self.num_heads, blocks), dtype=np.float32)
        for step, mass in enumerate(self._window):
            known = min(blocks, mass.shape[1])
            history[step, :, :known] = mass[:, :known]
        if len(history) == 1:
            latest: _Mass = history[0]
            return latest
        steps = np.arange(len(history), dtype=np.float32) - (len(history) - 1) / 2
        slope = np.tensordot(steps / np.square(steps).sum(), history, axes=1)
        ahead = (len(history) + 1) / 2  # from the middle of the window to the next step
        expected: _Mass = np.maximum(history.mean(axis=0) + ahead * slope, 0.0)
        return expected

    def predict(self, degree: int | None = None) -> npt.NDArray[np.int64]:
        """Blocks by expected mass, most first: int64 of shape (heads, min(degree, blocks))."""
        scores = self.scores()
        count = scores.shape[1] if degree is None else min(degree, scores.shape[1])
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]

    def predict_blocks(self, degree: int) -> npt.NDArray[np.int64]:
        """The degree blocks with the most expected mass over all heads, most first."""
        total = self.scores().sum(axis=0)
        return np.argsort(-total, kind="stable")[:degree]

    def reset(self) -> None:
        """Forgets the window: another sequence begins."""
        self._window.clear()
