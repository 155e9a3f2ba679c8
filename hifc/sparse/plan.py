# SPDX-License-Identifier: Apache-2.0
"""Memory of a sparse cache: how many blocks of each head stay, beside a sketch of all keys.

Short blocks, so that little is read that attention does not want. Within a layer a value is
[head][K|V][token][dim], each (layer, head) a part: K and V of one head are one range, one read. The
blocks that stay lie in one arena, [layer][head][K|V][token][dim]; a forward in exact attention
streams whole layers through the same arena, since what it holds are copies.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hifc.config import Config
from hifc.errors import ConfigError
from hifc.stream.plan import KVShape, StreamPlan, block_sizes, budget_bytes, round_up

# Selection wants them short: with 32 tokens a block SmolLM2 loses half as much again.
BLOCK_TOKENS = 16
# Reads of an exact check go through a buffer of that many blocks of one head.
CHECK_BLOCKS = 64


@dataclass(frozen=True)
class SparseSettings:
    """Of a sparse cache: the settings of hifc.Config, those with `sparse_` before them without it.

    block_tokens: 0 takes the shortest that are whole pages, from BLOCK_TOKENS on. missed_max: the
    share of attention that may be missed, as a mean over layers and heads; beyond it the budget
    widens, up to resident_max (a ratio), then attention is exact. check_every: steps between two
    exact checks of one head; 0: none. prefetch_degree: blocks of a head that the trend may fetch
    ahead; 0: none, since on a fast device it costs more than the wait that it saves.
    """

    block_tokens: int = 0
    sink_tokens: int = 16
    recent_tokens: int = 32
    sketch: str = "4bit"
    missed_max: float = 0.1
    resident_max: float = 0.5
    check_every: int = 16
    prefetch_degree: int = 0
    prefetch_window: int = 3
    decay_lambda: float = 0.1

    @classmethod
    def of(cls, config: Config) -> SparseSettings:
        """What a configuration says."""
        own = ("prefetch_window", "decay_lambda")
        return cls(
            **{
                field.name: getattr(
                    config, field.name if field.name in own else f"sparse_{field.name}"
                )
                for field in dataclasses.fields(cls)
            }
        )


@dataclass(frozen=True, slots=True)
class SparsePlan(StreamPlan):
    """With L layers of H heads, S blocks of T tokens a head and M tokens of capacity,

        resident = L * H * (S + 2) * 2 * T * head_token_bytes + sketch + trend and heat
                 + check buffer + overhead

    the 2 beside S being the tail, which attention reads in the arena and which outlives an exact
    forward beside it.
    """

    resident_blocks: int = 0
    sketch: str = "4bit"
    window: int = 3

    @property
    def head_major(self) -> bool:
        """K and V of one head are one range."""
        return True

    @property
    def part_bytes(self) -> int:
        """K and V of one block of one head: what one read moves."""
        return 2 * self.piece_bytes

    @property
    def layer_parts(self) -> int:
        """Parts of a value that belong to one layer."""
        return self.shape.heads

    @property
    def arena_tokens(self) -> int:
        """Tokens of one head in the arena: the tail, then the resident blocks."""
        return (self.resident_blocks + 1) * self.block_tokens

    @property
    def arena_bytes(self) -> int:
        """The arena."""
        return self.arena_tokens * self.shape.token_bytes

    @property
    def sketch_bytes(self) -> int:
        """What tells where attention goes: 4 bits a channel, step and least value of a token; or
        the least and greatest value of each channel in a block."""
        shape = self.shape
        heads = shape.layers * shape.heads
        if self.sketch == "digest":
            return heads * self.all_blocks * 2 * shape.head_token_bytes
        return heads * self.all_blocks * self.block_tokens * (shape.head_dim // 2 + 4)

    @property
    def all_blocks(self) -> int:
        """Blocks of max_tokens tokens, the last one maybe not full."""
        return -(-self.max_tokens // self.block_tokens)

    @property
    def trend_bytes(self) -> int:
        """Masses of a window of steps, heat, and where each block is."""
        heads = self.shape.layers * self.shape.heads
        return heads * self.all_blocks * 4 * (self.window + 4)

    @property
    def check_bytes(self) -> int:
        """The buffer of exact checks."""
        return CHECK_BLOCKS * self.part_bytes

    @property
    def block_overhead_pages(self) -> int:
        """One more than for the long blocks of an exact cache: a prefill in one forward writes to
        all blocks at once, and of so many hundreds the pages are all in use together."""
        return 3

    @property
    def pool_bytes(self) -> int:
        """Arena, tails and check buffer."""
        return self.arena_bytes + self.share_bytes * self.shape.layers + self.check_bytes

    @property
    def buffer_bytes(self) -> int:
        """All but the namespace's."""
        return self.pool_bytes + self.sketch_bytes + self.trend_bytes

    def describe(self) -> str:
        """One line for people."""
        mib = 1 << 20
        return (
            f"{self.resident_blocks} of {self.all_blocks} blocks of {self.block_tokens} tokens a "
            f"head and a {self.sketch} sketch: {self.resident_bytes / mib:.1f} of "
            f"{self.total_bytes / mib:.1f} MiB resident ({self.ratio:.4f})"
        )


def make_sparse_plan(
    shape: KVShape, max_tokens: int, resident: float | int | str, settings: SparseSettings
) -> SparsePlan:
    """The plan that keeps as many blocks as the budget allows.

    resident: a ratio of the whole KV, or bytes, as make_plan takes it. ConfigError: the budget is
    too small, with the smallest that would do; a block that is not whole pages; more than one row.
    """
    if shape.rows != 1:
        raise ConfigError(
            f"sparse mode takes one sequence, not {shape.rows} rows: no batches and no beams; use "
            "attention: exact for those"
        )
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}: use prompt and new tokens together")
    if shape.head_dim % 8:
        raise ConfigError(
            f"sparse mode sketches heads of a multiple of 8 channels, not {shape.head_dim}"
        )
    unit = shape.page_tokens
    tokens = block_sizes(shape, settings.block_tokens or round_up(BLOCK_TOKENS, unit))[0]
    room_bytes = budget_bytes(resident, max_tokens * shape.token_bytes)

    def plan(blocks: int) -> SparsePlan:
        return _with_blocks(
            SparsePlan(
                shape,
                max_tokens,
                tokens,
                (),
                0,
                sketch=settings.sketch,
                window=settings.prefetch_window,
            ),
            blocks,
        )

    most = -(-max_tokens // tokens)
    room_blocks = (room_bytes - plan(0).resident_bytes) // (tokens * shape.token_bytes)
    blocks = min(most, room_blocks)
    # Exact attention rotates two whole layers through the arena.
    rotating = (
        math.ceil(min(2, shape.layers) * round_up(max_tokens, unit) / shape.layers / tokens) - 1
    )
    pinned = -(-settings.sink_tokens // tokens) - (-settings.recent_tokens // tokens)
    least = max(min(most, pinned + 1), rotating)
    if blocks < least:
        wanted = plan(least)
        raise ConfigError(
            f"resident: {room_bytes} bytes ({room_bytes / wanted.total_bytes:.3f} of the KV) are "
            f"too few for sparse mode: {least} blocks a head, the sketch and the tails of "
            f"{max_tokens} tokens take {wanted.resident_bytes} bytes, "
            f"resident={math.ceil(wanted.ratio * 1000) / 1000}"
        )
    return plan(blocks)


def widened(plan: SparsePlan, resident_max: float) -> SparsePlan | None:
    """The plan with half as many resident blocks again, or as many as resident_max of the KV
    allows; None if that is no more than there are."""
    room_bytes = math.floor(resident_max * plan.total_bytes) - plan.resident_bytes
    more = room_bytes // (plan.block_tokens * plan.shape.token_bytes)
    blocks = min(plan.all_blocks, plan.resident_blocks + more, plan.resident_blocks * 3 // 2 + 1)
    return _with_blocks(plan, blocks) if blocks > plan.resident_blocks else None


def _with_blocks(plan: SparsePlan, blocks: int) -> SparsePlan:
    """With that many resident blocks, and as many slots of whole layers as fit into the arena."""
    layers = plan.shape.layers
    slots = min(layers, (blocks + 1) * plan.block_tokens * layers // plan.capacity_tokens)
    return dataclasses.replace(plan, slots=slots, resident_blocks=blocks)
