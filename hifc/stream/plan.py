# SPDX-License-Identifier: Apache-2.0
"""Which layers of a KV cache stay in memory, and how much memory that takes.

In exact attention every layer is read once a token, in the same order: a cyclic scan, in which
recency and frequency say nothing. So whole layers are pinned, evenly spaced, and the others are
streamed through a few rotating slots, each of which holds one whole layer. Of a streamed layer
only its tail stays: the tokens that do not fill a block yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hifc.errors import ConfigError
from hifc.native_lib.layouts import PAGE_BYTES, PARTS_MAX, VALUE_MAX_BYTES
from hifc.util import checking
from hifc.util.units import parse_size

# Of all KV, what stays in memory unless it is said otherwise: the one default of configuration,
# caches and tools. Two layers of eight and their tails take a little more than a quarter.
RESIDENT_RATIO = 0.27
# Streaming wants one layer of a block to be 256 KiB or as near as it gets.
BLOCK_TOKENS = 256
# One slot is being attended to while the other is being filled.
SLOTS = 2
# What the namespace takes from the pool beside our buffers: pages for headers, and per block a
# checksum table while it is written or first read.
OVERHEAD_PAGES = 64
OVERHEAD_PAGES_PER_BLOCK = 2


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one model keeps per token: layers x (K and V) x rows x heads x head_dim items.

    rows: sequences in the batch, beams counted. heads: KV heads, not query heads.
    """

    layers: int
    heads: int
    head_dim: int
    item_bytes: int
    rows: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "item_bytes", "rows"):
            checking.whole(f"KV shape, {name}", getattr(self, name), 1, error=ConfigError)

    @property
    def head_token_bytes(self) -> int:
        """K, or V, of one token of one head."""
        return self.head_dim * self.item_bytes

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token of one layer, all rows."""
        return 2 * self.rows * self.heads * self.head_token_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all layers and rows."""
        return self.layers * self.layer_token_bytes

    @property
    def page_tokens(self) -> int:
        """The least number of tokens whose piece of one head is whole pages."""
        return PAGE_BYTES // math.gcd(PAGE_BYTES, self.head_token_bytes)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Memory of a streamed cache. `make_plan` makes it.

    With L layers, P of them pinned, N slots, M tokens of capacity and blocks of T tokens,

        resident = ((P + N) * M + (L - P) * T) * layer_token_bytes + overhead

    where M is max_tokens rounded up to whole pages. overhead is what the namespace takes from the
    pool for headers and checksum tables.
    """

    shape: KVShape
    max_tokens: int
    block_tokens: int
    pinned: tuple[int, ...]
    slots: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a slot or pinned layer: max_tokens rounded up to whole pages."""
        return round_up(self.max_tokens, self.shape.page_tokens)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the layers that live on the device."""
        kept = set(self.pinned)
        return tuple(layer for layer in range(self.shape.layers) if layer not in kept)

    @property
    def blocks(self) -> int:
        """Most blocks that a streamed layer can have on the device."""
        return self.max_tokens // self.block_tokens if self.streamed else 0

    @property
    def piece_bytes(self) -> int:
        """K, or V, of one block of one head and row: contiguous on the device and in a slot."""
        return self.block_tokens * self.shape.head_token_bytes

    @property
    def head_major(self) -> bool:
        """Within a layer [head][K|V], not [K|V][head]."""
        return False

    @property
    def layer_parts(self) -> int:
        """Parts of a value that belong to one layer."""
        return 2 * self.shape.rows * self.shape.heads

    @property
    def share_bytes(self) -> int:
        """One layer of one block: what a streamed read moves."""
        return self.block_tokens * self.shape.layer_token_bytes

    @property
    def layer_bytes(self) -> int:
        """A slot, or a pinned layer."""
        return self.capacity_tokens * self.shape.layer_token_bytes

    @property
    def block_overhead_pages(self) -> int:
        """Pages that the namespace takes for a block."""
        return OVERHEAD_PAGES_PER_BLOCK

    @property
    def overhead_bytes(self) -> int:
        """Allowed for what the namespace itself takes from the pool."""
        if not self.streamed:
            return 0
        return (OVERHEAD_PAGES + self.block_overhead_pages * self.blocks) * PAGE_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Pinned layers, slots and tails."""
        tails = len(self.streamed) * self.share_bytes
        return (len(self.pinned) + self.slots) * self.layer_bytes + tails

    @property
    def pool_bytes(self) -> int:
        """What of buffer_bytes comes from the pool."""
        return self.buffer_bytes

    @property
    def resident_bytes(self) -> int:
        """All memory of the cache."""
        return self.buffer_bytes + self.overhead_bytes

    @property
    def total_bytes(self) -> int:
        """KV of max_tokens tokens: what a cache in memory needs."""
        return self.max_tokens * self.shape.token_bytes

    @property
    def ratio(self) -> float:
        """resident_bytes over total_bytes."""
        return self.resident_bytes / self.total_bytes

    def describe(self) -> str:
        """One line for people."""
        mib = 1 << 20
        return (
            f"{len(self.pinned)} of {self.shape.layers} layers pinned, {self.slots} slots, blocks "
            f"of {self.block_tokens} tokens: {self.resident_bytes / mib:.1f} of "
            f"{self.total_bytes / mib:.1f} MiB resident ({self.ratio:.4f})"
        )


def make_plan(
    shape: KVShape,
    max_tokens: int,
    resident: float | int | str,
    *,
    block_tokens: int | None = None,
    slots: int = SLOTS,
) -> StreamPlan:
    """The plan that pins as many layers as the budget allows.

    resident: a ratio of the whole KV (a float up to 1.0), or bytes (an int, or "90MiB").
    block_tokens: None takes 256, or less where tails of 256 tokens do not fit the budget.
    ConfigError: the budget is too small, with the smallest that would do; a block that is not
    whole pages.
    """
    max_tokens = checking.whole("max_tokens, prompt and new ones", max_tokens, 1, error=ConfigError)
    slots = checking.whole("slots", slots, 0, error=ConfigError)
    if slots < 2:
        raise ConfigError(f"slots is {slots}: use 2 or more, one is attended to while others load")
    room_bytes = budget_bytes(resident, max_tokens * shape.token_bytes)
    sizes = block_sizes(shape, block_tokens)
    whole = StreamPlan(shape, max_tokens, sizes[0], tuple(range(shape.layers)), 0)
    if whole.resident_bytes <= room_bytes:
        return whole
    plans = [_fit(shape, max_tokens, tokens, slots, room_bytes) for tokens in sizes]
    for plan in plans:
        if plan.resident_bytes <= room_bytes:
            return plan
    least = min([*plans, whole], key=lambda plan: plan.resident_bytes)
    raise ConfigError(
        f"resident: {room_bytes} bytes ({room_bytes / whole.total_bytes:.3f} of the KV) do "
        f"not hold {slots} layers and the tails of {shape.layers}: the least for {max_tokens} "
        f"tokens is {least.resident_bytes} bytes, resident={_ceil3(least.ratio)}"
    )


def spread(count: int, layers: int) -> tuple[int, ...]:
    """count of layers, evenly spaced, so that each gives the reads beside it the same time."""
    return tuple(math.floor((i + 0.5) * layers / count) for i in range(count))


def round_up(value: int, unit: int) -> int:
    """The least multiple of unit that is not below value."""
    return -(-value // unit) * unit


def budget_bytes(resident: float | int | str, total_bytes: int) -> int:
    """What a ratio, or bytes, or a text of bytes, allows of total_bytes."""
    if isinstance(resident, bool):
        raise ConfigError(f"resident: {resident!r} is neither a ratio nor bytes")
    if isinstance(resident, float):
        if not 0.0 < resident <= 1.0:
            raise ConfigError(f"resident: {resident} is no ratio in (0, 1]; bytes are an int")
        return math.floor(resident * total_bytes) if resident < 1.0 else 1 << 62
    return parse_size(resident, "resident")


def block_sizes(shape: KVShape, block_tokens: int | None) -> list[int]:
    """Block lengths to try, longest first."""
    unit = shape.page_tokens
    if block_tokens is None:
        sizes = [round_up(BLOCK_TOKENS, unit)]
        while sizes[-1] > unit and sizes[-1] % (2 * unit) == 0:
            sizes.append(sizes[-1] // 2)
    else:
        block_tokens = checking.whole("block_tokens", block_tokens, 1, error=ConfigError)
        if block_tokens % unit:
            raise ConfigError(
                f"block_tokens: {block_tokens} tokens of a head are {block_tokens} * "
                f"{shape.head_token_bytes} bytes, not whole pages of {PAGE_BYTES}: use a multiple "
                f"of {unit}, or None"
            )
        sizes = [block_tokens]
    fitting = [size for size in sizes if size * shape.token_bytes <= VALUE_MAX_BYTES]
    if not fitting:
        raise ConfigError(
            f"block_tokens: a block of {sizes[-1]} tokens is {sizes[-1] * shape.token_bytes} "
            f"bytes, more than a value may have ({VALUE_MAX_BYTES}): use shorter blocks or "
            "a smaller batch"
        )
    if 2 * shape.rows * shape.heads * shape.layers > PARTS_MAX:
        raise ConfigError(
            f"{shape.layers} layers of {shape.heads} heads and {shape.rows} rows are more than "
            f"{PARTS_MAX} parts of a value: use a smaller batch"
        )
    return fitting


def _fit(shape: KVShape, max_tokens: int, tokens: int, slots: int, budget_bytes: int) -> StreamPlan:
    """The plan with blocks of that length that pins most within the budget, or pins nothing."""
    slots = min(slots, shape.layers)
    bare = StreamPlan(shape, max_tokens, tokens, (), slots)
    gain = bare.layer_bytes - bare.share_bytes  # a pinned layer has no tail
    spare = budget_bytes - bare.resident_bytes
    count = shape.layers if gain <= 0 else max(0, spare // gain)
    count = min(count, shape.layers - slots)
    return StreamPlan(shape, max_tokens, tokens, spread(count, shape.layers), slots)


def _ceil3(ratio: float) -> float:
    return math.ceil(ratio * 1000) / 1000
