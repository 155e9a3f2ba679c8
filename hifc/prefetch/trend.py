# SPDX-License-Identifier: Apache-2.0
"""HiFCPrefetcher: which blocks attention will look at next, from the trend of its mass.

Per head and block, a straight line through the attention mass of the last window_size steps is
extended by one step. In exact mode every block is used in every step and the order is known, so
this serves sparse mode and the warming of reused prefixes only. Kernels take the masses and draw
the line, on a GPU where there is one; given an issuer, they ask for what is expected as well.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hifc.errors import ConfigError, InvalidRequest
from hifc.kernels.backend import Backend, address_of, backend
from hifc.kernels.mass import mass_from_weights
from hifc.kernels.sketch import ITEM_TYPES
from hifc.util.checking import number, whole

if TYPE_CHECKING:
    from hifc.prefetch.issue import Issuer

WINDOW_MAX = 1024
_BLOCKS_MIN = 64
_TREND_THREADS = 256  # of native/trend.cu


class HiFCPrefetcher:
    """Predicts from the attention of the last steps which blocks the next step will look at.

    `update` takes the attention of one step, `predict` names the blocks of each head that the most
    is expected of. HiFC.observe_attention has one of its own; make one to steer prefetches
    yourself.

    Not thread-safe. Memory: window_size x num_heads x blocks x 4 bytes, up to twice that.
    """

    def __init__(
        self,
        num_heads: int,
        window_size: int = 3,
        *,
        block_tokens: int = 1,
        issuer: Issuer | None = None,
        degree: int = 2,
        score_min: float = 0.0,
        where: Backend | None = None,
    ) -> None:
        """issuer: every update asks for the `degree` blocks a row that the most is expected of,
        among those that are neither resident nor on their way, if it is more than score_min. The
        heads are shared out evenly over the issuer's rows, the first ones to the first row. where:
        the backend of the kernels; the issuer's if there is one.
        """
        num_heads = whole("num_heads", num_heads, 1, error=ConfigError)
        window_size = whole("window_size", window_size, 2, WINDOW_MAX, error=ConfigError)
        block_tokens = whole("block_tokens", block_tokens, 1, error=ConfigError)
        if issuer is not None and num_heads % issuer.rows:
            raise ConfigError(f"{num_heads} heads do not share out over {issuer.rows} rows")
        self.num_heads = num_heads
        self.window_size = window_size
        self.block_tokens = block_tokens
        self.degree = whole("degree", degree, 0, error=ConfigError)
        self.score_min = number("score_min", score_min, error=ConfigError)
        self.issuer = issuer  # may be replaced by one of as many rows
        self._where = where
        self._capacity = 0
        self._history: Any = None  # (window_size, num_heads, capacity), a ring of steps
        self._known = [0] * window_size  # blocks of each slot; behind them stand zeros
        self._latest = -1  # slot
        self._steps = 0

    @property
    def num_blocks(self) -> int:
        """Blocks seen in the latest update."""
        return self._known[self._latest] if self._steps else 0

    @property
    def where(self) -> Backend:
        """Where the kernels run."""
        if self._where is None:
            self._where = backend() if self.issuer is None else self.issuer.where
        return self._where

    def update(self, attn_weights: Any) -> None:
        """Takes the attention of one step, and with an issuer asks for what it makes expected.

        attn_weights: numpy, CuPy or torch, (heads, keys) or (..., heads, queries, keys); batches
        and queries are averaged, keys are summed by block_tokens (1: keys are blocks already).
        """
        weights = self._weights(attn_weights)
        blocks = -(-weights.shape[-1] // self.block_tokens)
        self._make_room(blocks)
        slot = (self._latest + 1) % self.window_size
        before = self._known[slot]
        self._known[slot] = max(before, blocks)  # true also where an exception comes meanwhile
        mass_from_weights(
            weights,
            self.block_tokens,
            scale=1 / (weights.shape[0] * weights.shape[2]),
            out=self._history[slot, :, :blocks],
            where=self.where,
        )
        if before > blocks:
            self._history[slot, :, blocks:] = 0
        self._known[slot] = blocks
        self._latest = slot
        self._steps = min(self._steps + 1, self.window_size)
        if self.issuer is not None:
            scores = self._scores(self.issuer.rows)
            self.issuer.issue(scores, self.degree, score_min=self.score_min)

    def _weights(self, attn_weights: Any) -> Any:
        """As (batch, heads, queries, keys), where the kernels run, of a type that they take."""
        weights = attn_weights
        on_gpu = self.where.name == "cuda"
        if hasattr(weights, "detach"):
            weights = weights.detach()
            if weights.is_complex():
                raise InvalidRequest(f"attention is real numbers, not {weights.dtype}")
            if str(weights.dtype).removeprefix("torch.") not in ITEM_TYPES:
                weights = weights.float()
            weights = weights.to("cuda" if on_gpu else "cpu").contiguous()
        else:
            xp = self.where.xp
            try:
                weights = xp.asarray(
                    weights.get() if hasattr(weights, "get") and not on_gpu else weights
                )
                if weights.dtype.kind not in "biuf":
                    raise InvalidRequest(f"attention is real numbers, not {weights.dtype}")
                if weights.dtype.name not in ITEM_TYPES or not weights.dtype.isnative:
                    weights = weights.astype("float32")
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"attention is an array of numbers: {error}") from None
            weights = xp.ascontiguousarray(weights)
        shape = tuple(weights.shape)
        fits = len(shape) >= 2 and 0 not in shape[:-1]
        if fits and shape[-2 if len(shape) == 2 else -3] == self.num_heads:
            queries = 1 if len(shape) == 2 else shape[-2]
            batch = math.prod(shape[:-3])
            return weights.reshape(batch, self.num_heads, queries, shape[-1])
        raise InvalidRequest(
            f"attention of shape {shape}: (heads, keys) or (..., heads, queries, keys) with "
            f"{self.num_heads} heads is wanted"
        )

    def _make_room(self, blocks: int) -> None:
        if blocks <= self._capacity and self._history is not None:
            return
        capacity = max(_BLOCKS_MIN, blocks, 2 * self._capacity)
        grown = self.where.xp.zeros((self.window_size, self.num_heads, capacity), dtype="float32")
        if self._history is not None:
            grown[:, :, : self._capacity] = self._history
        self._history, self._capacity = grown, capacity

    def _scores(self, rows: int) -> Any:
        """Expected mass of the heads of each row, float32 (rows, blocks), where the kernels run."""
        blocks = self.num_blocks
        scores = self.where.xp.empty((rows, blocks), dtype="float32")
        if blocks:
            self.where.launch(
                "hifc_trend_scores",
                rows * -(-blocks // _TREND_THREADS),
                history=address_of(self._history, self.where),
                scores=address_of(scores, self.where),
                window=self.window_size,
                first=(self._latest + 1 - self._steps) % self.window_size,
                steps=self._steps,
                heads=self.num_heads,
                heads_of_row=self.num_heads // rows,
                capacity=self._capacity,
                token_blocks=blocks,
            )
        return scores

    def scores(self) -> npt.NDArray[np.float32]:
        """Expected mass in the next step, shape (heads, blocks); not negative."""
        return self._fetch(self._scores(self.num_heads))

    def predict(self, degree: int | None = None) -> npt.NDArray[np.int64]:
        """Blocks by expected mass, most first: int64 of shape (heads, min(degree, blocks))."""
        scores = self.scores()
        blocks = scores.shape[1]
        count = blocks if degree is None else min(whole("degree", degree, 0), blocks)
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]

    def reset(self) -> None:
        """Forgets the window: another sequence begins."""
        self._steps = 0

    def _fetch(self, array: Any) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = array if isinstance(array, np.ndarray) else array.get()
        return found
