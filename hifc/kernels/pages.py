# SPDX-License-Identifier: Apache-2.0
"""How a KV cache lies in memory: planes (K or V of a layer) of pages of tokens of heads of items.

A layout is addresses and strides, found from the arrays themselves and the names of their axes, so
every engine's layout is one case:

    vLLM, a tensor a layer             "kv page token head dim"
    the same, blocks first             "page kv token head dim"
    the same, heads before tokens      "kv page head token dim"
    vLLM, one tensor for all layers    "page layer kv token head dim"
    transformers, (K, V) a layer       "head token dim", of row r of a batch: keys[r], values[r]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hifc.errors import InvalidRequest
from hifc.kernels.backend import Backend, Strided, strided
from hifc.util.checking import whole

ITEM_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}  # that kernels convert
AXES = ("layer", "kv", "page", "token", "head", "dim")


@dataclass(frozen=True)
class PageLayout:
    """A cache as the kernels see it. `page_layout` makes it.

    planes: address of the first item of K and V of each layer in turn (of each layer where there
    are no two of them); strides in bytes; tokens: those that the pages hold together.
    """

    planes: tuple[int, ...]
    page_tokens: int
    tokens: int
    heads: int
    dim: int
    page_stride: int
    token_stride: int
    head_stride: int
    item_stride: int
    item_bytes: int
    dtype: str
    planes_per_layer: int
    writable: bool
    plane_table: Any = field(repr=False, compare=False)  # planes as uint64, where the kernels run
    arrays: tuple[Any, ...] = field(repr=False, compare=False)  # keeps their memory alive

    @property
    def row_bytes(self) -> int:
        """Items of one head of one token."""
        return self.dim * self.item_bytes

    @property
    def run_bytes(self) -> int:
        """What is contiguous: a row, or an item where items stand apart."""
        together = self.item_stride == self.item_bytes or self.dim == 1
        return self.row_bytes if together else self.item_bytes

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 16, that every run begins and ends at a multiple of."""
        steps = [*self.planes, self.run_bytes]
        steps += [self.page_stride] if self.tokens > self.page_tokens else []
        steps += [self.token_stride] if self.page_tokens > 1 else []
        steps += [self.head_stride] if self.heads > 1 else []
        steps += [self.item_stride] if self.run_bytes < self.row_bytes else []
        return math.gcd(16, *steps)

    def block_bytes(self, tokens: int, item_bytes: int | None = None) -> int:
        """Of a packed block; item_bytes: as packed, by default as in the pages."""
        row = self.dim * (item_bytes or self.item_bytes)
        return len(self.planes) * self.heads * tokens * row


def page_layout(
    arrays: Any, axes: str, where: Backend, *, page_tokens: int | None = None, dtype: str = ""
) -> PageLayout:
    """The layout of a cache.

    arrays: one array; a sequence of them, one a layer; or a sequence of (K, V). axes: the names of
    the axes of one array in order, out of layer, kv, page, token, head and dim; those that it has
    not, and that the sequence does not bring, have one index. page_tokens: where an array has no
    axis "page", its tokens are cut into pages of so many (all of them by default). dtype: names
    what the bits are, where the array cannot: "bfloat16" in an array of uint16.

    InvalidRequest: an axis that is none or there twice, or arrays that differ.
    """
    names = axes.split()
    layers = _layers(arrays)
    found = [[strided(array, where) for array in layer] for layer in layers]
    _check(names, found)
    first = found[0][0]
    size = dict(zip(names, first.shape, strict=True))
    stride = dict(zip(names, first.strides, strict=True))
    planes = tuple(
        array.address + layer * stride.get("layer", 0) + kv * stride.get("kv", 0)
        for arrays_of_layer in found
        for layer in range(size.get("layer", 1))
        for array in arrays_of_layer
        for kv in range(size.get("kv", 1))
    )
    bits = ITEM_BITS.get(dtype, 8 * first.item_bytes)
    if bits != 8 * first.item_bytes:
        raise InvalidRequest(f"dtype {dtype} has {bits} bits, the items {8 * first.item_bytes}")
    tokens = size["token"]
    if "page" not in size:
        page_tokens = (
            tokens if page_tokens is None else whole("page_tokens", page_tokens, 1, (1 << 31) - 1)
        )
    elif page_tokens not in (None, tokens):
        raise InvalidRequest(f"page_tokens is {page_tokens}, the pages have {tokens} tokens")
    else:
        page_tokens = tokens
    return PageLayout(
        planes=planes,
        page_tokens=page_tokens,
        tokens=tokens * size.get("page", 1),
        heads=size.get("head", 1),
        dim=size["dim"],
        page_stride=stride.get("page", page_tokens * stride["token"]),
        token_stride=stride["token"],
        head_stride=stride.get("head", 0),
        item_stride=stride["dim"],
        item_bytes=first.item_bytes,
        dtype=dtype or first.dtype,
        planes_per_layer=len(found[0]) * size.get("kv", 1),
        writable=all(a.writable and not a.overlaps for layer in found for a in layer),
        plane_table=where.xp.asarray(np.array(planes, "u8")),
        arrays=tuple(itertools.chain.from_iterable(layers)),
    )


def _layers(arrays: Any) -> list[Sequence[Any]]:
    if not isinstance(arrays, list | tuple):
        return [(arrays,)]
    return [layer if isinstance(layer, list | tuple) else (layer,) for layer in arrays]


def _check(names: list[str], found: list[list[Strided]]) -> None:
    if len(set(names)) != len(names) or not set(names) <= set(AXES):
        raise InvalidRequest(f"axes are {' '.join(names)}: use each of {' '.join(AXES)} once")
    if not {"token", "dim"} <= set(names):
        raise InvalidRequest(f"axes are {' '.join(names)}: token and dim are missing")
    if not found or not found[0]:
        raise InvalidRequest("a cache without arrays has no layout")
    if "layer" in names and len(found) > 1:
        raise InvalidRequest("layers are an axis, or arrays of a sequence, not both")
    first = found[0][0]
    if len(first.shape) != len(names):
        raise InvalidRequest(f"axes are {' '.join(names)}, the arrays have shape {first.shape}")
    if 0 in first.shape:
        raise InvalidRequest(f"an array of shape {first.shape} is empty")
    if first.item_bytes not in (1, 2, 4, 8, 16):
        raise InvalidRequest(f"items of {first.item_bytes} bytes: use 1, 2, 4, 8 or 16")
    for layer in found:
        if len(layer) != len(found[0]) or ("kv" in names and len(layer) > 1):
            raise InvalidRequest("K and V are an axis, or two arrays of every layer, not both")
        for array in layer:
            for name in ("shape", "strides", "dtype"):
                if getattr(array, name) != getattr(first, name):
                    raise InvalidRequest(
                        f"arrays of one cache differ in {name}: {getattr(first, name)} and "
                        f"{getattr(array, name)}"
                    )
