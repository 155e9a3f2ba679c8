# SPDX-License-Identifier: Apache-2.0
"""What stays in memory of keys that have left it: sketches and digests of one layer.

From them, and the current query, mass.py estimates how much attention each block of tokens gets,
which no fused attention tells. Both live where the kernels run.

A Sketch keeps 4 bits a channel, and for each token and KV head a step and an offset (the asymmetric
form of KIVI, ICML 2024). With heads of 64 channels that is 36 bytes, where 16-bit keys and values
take 256. On SmolLM2's keys the quarter of all blocks that it chooses misses 0.0005 of the attention
that the best quarter gets; codes symmetric about zero missed 0.0009 for 34 bytes, and codes of 3
bits 0.0025.

A Digest keeps the least and greatest value of each channel over a block (Quest, ICML 2024), which
missed 0.025 there. For blocks of 16 tokens it is half as large as the sketch, for longer ones much
smaller.
"""

from __future__ import annotations

from typing import Any

from hifc.errors import InvalidRequest
from hifc.kernels.backend import Backend, Strided, address_of, backend, strided
from hifc.util.checking import whole

CODE_BITS = 4
COUNT_MAX = (1 << 31) - 1  # of tokens, in a block or in all
DIM_MAX = 256  # SKETCH_DIM_MAX of native/scores.cuh
ITEM_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # ItemType of native/items.cuh
_APPEND_TOKENS = 32  # APPEND_TOKENS of native/sketch.cu


def item_type(array: Strided) -> int:
    """The number that kernels know an item type by. InvalidRequest: they do not take it."""
    if array.dtype not in ITEM_TYPES:
        raise InvalidRequest(f"an array of {array.dtype}: give one of {', '.join(ITEM_TYPES)}")
    return ITEM_TYPES[array.dtype]


def item_strides(array: Strided) -> list[int]:
    """Strides in items. InvalidRequest: the last axis is not contiguous, or items are not aligned,
    as in a field of a structure."""
    step = array.item_bytes
    if array.size == 0:
        return [0] * len(array.shape)
    if array.shape[-1] != 1 and array.strides[-1] != step:
        raise InvalidRequest(
            f"an array of shape {array.shape} whose last axis is strided: make it contiguous"
        )
    if any(offset % step for offset in (array.address, *array.strides)):
        raise InvalidRequest(
            f"items of {step} bytes at {array.address:#x}, strides of {array.strides} bytes: they "
            "are not aligned, copy the array"
        )
    return [stride // step for stride in array.strides]


class _OfKeys:
    """What sketch and digest share. Not thread-safe."""

    def __init__(self, kv_heads: int, dim: int, capacity: int, where: Backend | None) -> None:
        kv_heads, capacity = (
            whole("kv_heads", kv_heads, 1),
            whole("capacity", capacity, 1, COUNT_MAX),
        )
        dim = whole("dim", dim, 1)
        if not 8 <= dim <= DIM_MAX or dim % 8:
            raise InvalidRequest(
                f"KV heads of {dim} channels: channels are a multiple of 8 up to {DIM_MAX}"
            )
        self.where = backend() if where is None else where
        self.kv_heads = kv_heads
        self.dim = dim
        self.capacity = capacity
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens that are in it; what stands behind them has no meaning."""
        return self._length

    def _new_keys(self, keys: Any) -> Strided:
        found = strided(keys, self.where)
        if len(found.shape) != 3 or (found.shape[0], found.shape[2]) != (self.kv_heads, self.dim):
            raise InvalidRequest(
                f"keys of shape {found.shape}: ({self.kv_heads}, tokens, {self.dim}) are wanted"
            )
        if found.shape[1] > self.capacity - self.length:
            raise InvalidRequest(
                f"{found.shape[1]} tokens after {self.length}: there is room for {self.capacity}"
            )
        return found

    def _cut(self, length: int) -> None:
        self._length = whole("truncate: tokens", length, 0, self.length)


class Sketch(_OfKeys):
    """4-bit codes of the keys of one layer and sequence.

    codes: uint8 (kv_heads, capacity, dim / 2), channel i in the low half of byte i, channel i + dim
    / 2 in the high one. params: float16 (kv_heads, capacity, 2), the step between two codes and the
    value of code 0. length: tokens that are in it; what stands behind them has no meaning.
    """

    def __init__(
        self, kv_heads: int, dim: int, capacity: int, where: Backend | None = None
    ) -> None:
        """Room for `capacity` tokens; dim: channels of a head, a multiple of 8 up to DIM_MAX."""
        super().__init__(kv_heads, dim, capacity, where)
        xp = self.where.xp
        self.codes = xp.zeros((kv_heads, capacity, dim * CODE_BITS // 8), dtype="uint8")
        self.params = xp.zeros((kv_heads, capacity, 2), dtype="float16")
        # Looked up once: a step of decode asks for them at every layer, and does little else there.
        self.addresses = {
            "codes": address_of(self.codes, self.where),
            "params": address_of(self.params, self.where),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of codes and parameters, used or not."""
        return int(self.codes.nbytes + self.params.nbytes)

    def append(self, keys: Any) -> None:
        """Takes the keys of the next tokens, after position encoding.

        keys: (kv_heads, tokens, dim) of float32, float16 or bfloat16; numpy, CuPy or torch, in the
        backend's memory, of any strides but the last. They have to be finite.
        """
        found = self._new_keys(keys)
        tokens = found.shape[1]
        head_stride, token_stride, _ = item_strides(found)
        self.where.launch(
            "hifc_sketch_append",
            self.kv_heads * -(-tokens // _APPEND_TOKENS),
            keys=found.address,
            **self.addresses,
            head_stride=head_stride,
            token_stride=token_stride,
            type=item_type(found),
            dim=self.dim,
            tokens=tokens,
            start=self.length,
            capacity=self.capacity,
        )
        self._length += tokens

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        self._cut(length)


class Digest(_OfKeys):
    """Least and greatest value of each channel over each block of tokens of one layer and sequence.

    values: (kv_heads, blocks, 2, dim) in the type of the keys, and exact. length: tokens in it.
    """

    def __init__(
        self,
        kv_heads: int,
        dim: int,
        capacity: int,
        block_tokens: int,
        dtype: str = "float32",
        where: Backend | None = None,
    ) -> None:
        """Room for `capacity` tokens; dtype: of the keys, by name."""
        super().__init__(kv_heads, dim, capacity, where)
        if dtype not in ITEM_TYPES:
            raise InvalidRequest(f"a digest of {dtype}: give one of {', '.join(ITEM_TYPES)}")
        self.block_tokens = block_tokens = whole("block_tokens", block_tokens, 1, COUNT_MAX)
        self.dtype = dtype
        # numpy has no bfloat16; the bits are the kernels' business.
        kept = "uint16" if dtype == "bfloat16" else dtype
        blocks = -(-capacity // block_tokens)
        self.values = self.where.xp.zeros((kv_heads, blocks, 2, dim), dtype=kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, used or not."""
        return int(self.values.nbytes)

    def append(self, keys: Any) -> None:
        """Takes the keys of the next tokens, after position encoding; keys as in Sketch.append, of
        the digest's type.
        """
        found = self._new_keys(keys)
        tokens = found.shape[1]
        if found.dtype != self.dtype:
            raise InvalidRequest(f"keys of {found.dtype} for a digest of {self.dtype}")
        if not tokens:
            return
        head_stride, token_stride, _ = item_strides(found)
        first = self.length // self.block_tokens
        last = (self.length + tokens - 1) // self.block_tokens
        self.where.launch(
            "hifc_digest_append",
            self.kv_heads * (last - first + 1),
            keys=found.address,
            digests=address_of(self.values, self.where),
            head_stride=head_stride,
            token_stride=token_stride,
            type=item_type(found),
            dim=self.dim,
            tokens=tokens,
            start=self.length,
            capacity=self.values.shape[1],
            block_tokens=self.block_tokens,
        )
        self._length += tokens

    def reset(self) -> None:
        """Forgets all tokens: of a part of a block nothing can be taken back."""
        self._cut(0)


def build_sketch(keys: Any, capacity: int | None = None, where: Backend | None = None) -> Sketch:
    """A sketch of keys (kv_heads, tokens, dim), room for `capacity` tokens or for just them."""
    if len(getattr(keys, "shape", ())) != 3:
        raise InvalidRequest(f"keys: {type(keys).__name__} is no array (kv_heads, tokens, dim)")
    kv_heads, tokens, dim = keys.shape
    sketch = Sketch(kv_heads, dim, tokens if capacity is None else capacity, where)
    sketch.append(keys)
    return sketch
