# SPDX-License-Identifier: Apache-2.0
"""Sparse decode: each head attends to the blocks that the current query wants most.

A step of one token estimates, per layer and KV head, which share of the attention each block would
get: the query against a sketch of all keys that stays in memory. The blocks with the most, with
sinks and recent ones, are made resident and attended to, with the tail. What the trend of the last
steps expects next is read meanwhile; it decides nothing. Longer forwards are exact.

What is missed is judged by hifc/sparse/quality.py. Beyond the bound more blocks stay resident;
where that ends, or where the sketch is found to misjudge, attention becomes exact until reset.

Same invariants and the same single thread as hifc/sparse/arena.py.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from hifc.blocks.keys import KeyScheme
from hifc.errors import BufferExhausted, NotSupported
from hifc.kernels.backend import backend
from hifc.kernels.heat import HeatTable
from hifc.namespace.namespace import Namespace
from hifc.prefetch.trend import HiFCPrefetcher
from hifc.sparse.arena import ArenaStream
from hifc.sparse.blocks import Mask, Mass, Moves, most_of
from hifc.sparse.plan import CHECK_BLOCKS, SparsePlan, SparseSettings, widened
from hifc.sparse.quality import Quality, Verdict
from hifc.stream.layers import UNDER_WAY

_LOG = logging.getLogger("hifc")


class SparseStream(ArenaStream):
    """The KV of one sequence, decoded sparsely. Made by SparseCache.

    heat: of each block of each head, [layer, head, block] flat, by the estimated mass of all steps.
    """

    def __init__(
        self,
        namespace: Namespace,
        plan: SparsePlan,
        dtype: torch.dtype,
        scheme: KeyScheme,
        settings: SparseSettings,
    ) -> None:
        shape = plan.shape
        self.quality = Quality(settings.missed_max)
        self.exact_reason: str | None = None  # why steps are exact from now on
        self._sinks = -(-settings.sink_tokens // plan.block_tokens)
        self._recent = -(-settings.recent_tokens // plan.block_tokens)
        self._trend = HiFCPrefetcher(shape.layers * shape.heads, settings.prefetch_window)
        self._ahead_of_step: Moves | None = None  # what was prefetched for this step
        blocks = shape.layers * shape.heads * plan.all_blocks
        self.heat = HeatTable(blocks, settings.decay_lambda, victims_max=1, where=backend("host"))
        self._mass = np.zeros((shape.layers, shape.heads, plan.all_blocks), dtype=np.float32)
        self._awaits: int | None = None  # the layer whose attention was not asked for yet
        self._lost: int | None = None  # the layer whose attention went elsewhere
        self._step_missed = 0.0  # of this step, over the layers so far
        self._step_at = time.monotonic()
        # Called with keys [heads, tokens, dim] and their positions [heads, tokens] before they are
        # attended to: hifc.verify draws them.
        self.on_attend: Callable[[torch.Tensor, npt.NDArray[np.int64]], None] | None = None
        super().__init__(namespace, plan, dtype, scheme, settings)

    # ---- a step

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An exact forward, as ArenaStream.update."""
        if layer == 0 and keys.shape[2] == 1:
            self.quality.exact_steps += 1
        return super().update(layer, keys, values)

    def begin(self) -> bool:
        """A step of one token comes: False if it is to be exact. Widens the budget if need be."""
        if self.last == 0 and self._awaits is not None:  # no other layer to have noticed it
            self._refuse_lost(self._awaits)
        if self._lost is not None:
            self._refuse_lost(self._lost)
        self.check_whole()
        self._judge()
        if self.exact_reason is not None:
            return False
        self._begin(self.lengths[0] + 1)
        self._ahead_of_step = None
        try:
            self._to_blocks()
            self._end_read_ahead()
        except Exception as error:
            self.broken = f"a step failed before its first layer: {error}"
            raise
        self._step_missed = 0.0
        self.broken = UNDER_WAY
        return True

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As ArenaStream.append; `attend` of the layer must follow."""
        if self._awaits is not None:
            self._refuse_lost(self._awaits)
        if self.broken is not UNDER_WAY:
            self._refuse_broken()
        self._awaits = layer
        try:
            super().append(layer, keys, values)
        except Exception as error:
            self.broken = f"layer {layer} failed: {error}"
            raise

    def _refuse_lost(self, layer: int) -> NoReturn:
        self._lost = layer
        self.broken = f"attention of layer {layer} was not asked of it"
        raise NotSupported(
            f"attention of layer {layer} did not reach the sparse cache, as this model changes "
            "keys on their way to attention: use an exact cache for it"
        )

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one query, [1, query heads, 1, dim], over what it wants most of the layer.

        Returns the same shape. CorruptionError, DeviceError, HiFCError: a block could not be read;
        the stream is broken until reset.
        """
        self._awaits = None
        try:
            output = self._attend(layer, query, scale)
            if layer == self.last:
                self._end_step()
        except Exception as error:
            self.broken = f"layer {layer} failed: {error}"
            raise
        if layer == self.last:
            self.broken = None
        return output

    def _attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        plan, maps = self.plan, self.maps[layer]
        heads = plan.shape.heads
        length = self.lengths[layer]
        blocks = (length - 1) // plan.block_tokens
        whole = self.estimate(layer, query[0, :, 0], scale)
        mass = self._mass[layer, :, :blocks]
        trusted = math.isfinite(whole.sum())
        mass[:] = whole[:, :blocks] if trusted else 0.0
        wanted = maps.choose(mass, self._sinks, self._recent)
        self._count_wanted(layer, wanted)
        moves = maps.place(wanted, wanted, mass)
        count = heads * min(blocks, plan.resident_blocks)  # so many are wanted
        self.total_access += count
        self.prefetch_hit += count - moves.heads.size
        batch = self.read(layer * heads, moves, self.room)
        resident = maps.resident(blocks)
        missed = 1.0 - whole[:, blocks] - (mass * resident).sum(axis=1)
        if batch is not None:
            self.flights.settle(batch, "read")
        group = query.view(heads, -1, plan.shape.head_dim)
        if not trusted:
            self.quality.exact_heads += heads
            output = torch.stack(
                [self._whole_head(layer, head, group[head], scale)[0] for head in range(heads)]
            )
            return output.view_as(query)
        keys, values = self.attended(layer)
        if self.on_attend is not None:
            self.on_attend(keys[0], self.positions(layer))
        output = torch.nn.functional.scaled_dot_product_attention(
            group[None], keys, values, scale=scale
        )
        self._observe(layer, missed, group, output[0], scale)
        return output.view_as(query)

    # ---- ahead

    def _read_ahead(self) -> None:
        """At the end of a step: reads what the trend expects of the next one, all layers at once,
        in place of what it expects least."""
        degree, count = self.settings.prefetch_degree, self.plan.resident_blocks
        blocks = (self.lengths[0] - 1) // self.plan.block_tokens
        if degree == 0 or blocks <= count:
            return
        self._trend.update(self._mass[:, :, :blocks].reshape(-1, blocks))
        expected = self._trend.scores()
        keep = self.all_maps.choose(expected, self._sinks, self._recent)
        missing = keep & ~self.all_maps.resident(blocks)
        missing &= most_of(np.where(missing, expected, -1.0), degree)
        moves = self.all_maps.place(missing, keep, expected)
        batch = self.read(0, moves, self.part_requests(moves.heads.size))
        if batch is not None:
            self._prefetch = batch, moves
            self.quality.prefetched += moves.heads.size

    def _end_read_ahead(self) -> None:
        """At the beginning of a step: what was prefetched is there."""
        if self._prefetch is None:
            return
        batch, moves = self._prefetch
        self.flights.settle(batch, "read")
        self._prefetch = None
        self._ahead_of_step = moves

    def _count_wanted(self, layer: int, wanted: Mask) -> None:
        """How much of what was prefetched this step's query wants."""
        moves, heads = self._ahead_of_step, wanted.shape[0]
        if moves is not None:
            first, end = np.searchsorted(moves.heads, (layer * heads, (layer + 1) * heads))
            ours = moves.heads[first:end] - layer * heads
            self.quality.prefetch_wanted += int(wanted[ours, moves.blocks[first:end]].sum())

    # ---- how much is missed

    def _observe(
        self, layer: int, missed: Mass, group: torch.Tensor, output: torch.Tensor, scale: float
    ) -> None:
        """Counts what the sketch says was missed, [heads]; now and then, what really was."""
        self._step_missed += float(missed.sum()) / missed.size
        heads, every = missed.size, self.settings.check_every
        if every and self.quality.steps % every == 0:
            turn = self.quality.steps // every % (heads * len(self.arena))
            if turn // heads == layer:
                head = turn % heads
                exact, share = self._whole_head(layer, head, group[head], scale)
                error = torch.linalg.vector_norm(output[head] - exact)
                error /= torch.linalg.vector_norm(exact)
                self.quality.check(share, float(missed[head]), float(error))

    def _end_step(self) -> None:
        self.quality.step(self._step_missed / len(self.arena))
        now = time.monotonic()
        self.heat.update(self._mass.reshape(-1), now - self._step_at)
        self._step_at = now
        self._read_ahead()

    def _whole_head(
        self, layer: int, head: int, query: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float]:
        """Exact attention of the queries of one KV head, [group, dim], whatever is resident, and
        the share of it that blocks have which are not."""
        keys, values = self.attended(layer)
        total, resident = _partial(query, keys[0, head], values[0, head], scale)
        sums = [(total, resident)]
        blocks = (self.lengths[layer] - 1) // self.plan.block_tokens
        absent = np.flatnonzero(~self.maps[layer].resident(blocks)[head])
        for first in range(0, absent.size, CHECK_BLOCKS):
            sums.append(
                _partial(
                    query, *self.read_absent(layer, head, absent[first:][:CHECK_BLOCKS]), scale
                )
            )
        logs = torch.stack([log for log, _ in sums])  # [pieces, group]
        shares = torch.softmax(logs, dim=0)
        output = (shares[..., None] * torch.stack([part for _, part in sums])).sum(0)
        return output.to(query.dtype), 1.0 - float(shares[0].mean())

    def _judge(self) -> None:
        """Before a step: more blocks, or no sparse steps any more, if too much is missed."""
        if self.exact_reason is not None:
            return
        quality = self.quality
        match quality.verdict():
            case Verdict.DISTRUST:
                found, said = quality.checked_missed, quality.checked_estimate
                self._give_up(
                    f"exact checks found {found / quality.checks:.3f} of the attention missed "
                    f"where the sketch said {said / quality.checks:.3f}"
                )
            case Verdict.WIDEN:
                self._widen()

    def _widen(self) -> None:
        """More blocks of a head stay resident, as resident_max and the pool allow."""
        old, limit = self.plan, self.settings.resident_max
        plan = widened(old, limit)
        missed = f"{self.quality.missed:.3f} of the attention is missed, sparse_missed_max is "
        missed += f"{self.settings.missed_max}"
        if plan is None:
            self._give_up(f"{missed}, and sparse_resident_max {limit} is reached")
            return
        try:
            self.replace_arena(plan)
        except BufferExhausted as error:
            self.replace_arena(old)
            self._give_up(f"{missed}, and the pool has no room: {error}")
            return
        self.quality.changed()
        _LOG.info(
            "sparse attention on %s widens to %d blocks of a head (%d): %s",
            self.namespace.uri,
            plan.resident_blocks,
            old.resident_blocks,
            missed,
        )

    def _give_up(self, reason: str) -> None:
        self.exact_reason = reason
        warnings.warn(f"attention is exact from now on, until reset(): {reason}", stacklevel=2)

    def _clear(self) -> None:
        """Sparse again if it had become exact. A widened budget stays."""
        super()._clear()
        self._trend.reset()
        self._ahead_of_step = None
        self._mass.fill(0.0)
        self.heat.heat.fill(0.0)
        self._awaits = self._lost = None
        self.exact_reason = None
        self.quality = Quality(self.settings.missed_max, widened=self.quality.widened)


def _partial(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over some tokens: log of the sum of exp(logit), [group], and attention, [group, dim]."""
    logits = query.float() @ keys.float().T * scale
    return logits.logsumexp(-1), torch.softmax(logits, -1) @ values.float()
