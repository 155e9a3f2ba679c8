# SPDX-License-Identifier: Apache-2.0
"""Attention mass: how much of the attention each block of tokens gets, from the weights or, where a
fused attention gives none, from the query against a sketch or digest of all keys.

A query's mass sums to 1 over the blocks. A KV head's is the mean over its query heads (with the
greatest instead, what is chosen gets 0.001 less of the attention of SmolLM2).
"""

from __future__ import annotations

from typing import Any

from hifc.errors import InvalidRequest
from hifc.kernels.backend import Backend, Strided, address_of, backend, strided
from hifc.kernels.sketch import COUNT_MAX, ITEM_TYPES, Digest, Sketch, item_strides, item_type
from hifc.util.checking import number, whole

_MASS_THREADS = 256  # of native/mass.cu
_CELL_TOKENS, _SCORE_CELLS = 16, 16  # of native/scores.cuh and native/sketch.cu
_HEADS_AT_ONCE = 8  # of native/scores.cuh
_BOUND_BLOCKS = 32  # of native/digest.cu


def mass_from_weights(
    weights: Any,
    block_tokens: int,
    *,
    scale: float = 1.0,
    out: Any = None,
    where: Backend | None = None,
) -> Any:
    """Attention weights summed by block and head: float32 (heads, blocks).

    weights: (heads, queries, keys) or (batch, heads, queries, keys) of float32, float16 or bfloat16
    in the backend's memory, of any strides but the last; batch and queries are summed as well, and
    the sums multiplied by scale. out: where to put them, (heads, blocks), else a new array.
    InvalidRequest: shapes or types that do not fit, an out that is read-only.
    """
    where = backend() if where is None else where
    found = strided(weights, where)
    block_tokens = whole("block_tokens", block_tokens, 1, COUNT_MAX)
    scale = number("scale", scale)
    if len(found.shape) not in (3, 4):
        raise InvalidRequest(
            f"weights of shape {found.shape}: ([batch,] heads, queries, keys) is wanted"
        )
    batch, heads, queries, keys = (1, *found.shape)[-4:]
    strides = [0, *item_strides(found)][-4:]
    blocks = -(-keys // block_tokens)
    if out is None:
        out = where.xp.empty((heads, blocks), dtype="float32")
    into = strided(out, where)
    if into.shape != (heads, blocks) or into.dtype != "float32":
        raise InvalidRequest(
            f"out is {into.dtype} {into.shape}: float32 {(heads, blocks)} is wanted"
        )
    into.check_output("out")
    of_tile = max(1, _MASS_THREADS // block_tokens)
    where.launch(
        "hifc_weights_mass",
        heads * -(-blocks // of_tile),
        weights=found.address,
        mass=into.address,
        batch_stride=strides[0],
        head_stride=strides[1],
        query_stride=strides[2],
        mass_stride=item_strides(into)[0],
        type=item_type(found),
        batch=batch,
        heads=heads,
        queries=queries,
        keys=keys,
        block_tokens=block_tokens,
        scale=scale,
        blocks_of_tile=of_tile,
    )
    return out


def mass_from_sketch(
    queries: Any, sketch: Sketch, block_tokens: int, *, scale: float | None = None
) -> Any:
    """Estimated mass by block of tokens and KV head: float32 (kv_heads, blocks) for queries
    (heads, dim), (count, kv_heads, blocks) for (count, heads, dim).

    queries: float32, float16 or bfloat16 after position encoding, in the backend's memory; heads is
    a multiple of kv_heads, and query head h belongs to KV head h // (heads / kv_heads). The last
    query is that of the sketch's last token, each one sees the tokens up to its own. scale: of the
    product of query and key, 1 / sqrt(dim) unless given. blocks: sketch.length / block_tokens,
    rounded up. The bits are the same on every backend. A KV head with a logit that is not finite,
    as of a query with a NaN or an infinity, has NaN for all of its mass.
    """
    of_block = -(-whole("block_tokens", block_tokens, 1, COUNT_MAX) // _CELL_TOKENS)
    task = _Task(queries, sketch, block_tokens, of_block, scale)
    sketch.where.launch(
        "hifc_sketch_scores",
        task.groups * -(-task.cells // _SCORE_CELLS),
        **sketch.addresses,
        type=task.type,
        capacity=sketch.capacity,
        **task.arguments,
    )
    return task.mass()


def mass_from_digest(queries: Any, digest: Digest, *, scale: float | None = None) -> Any:
    """As mass_from_sketch, of what the digest's bounds say: every token of a block counts with the
    greatest logit that a key within its block's bounds could have.
    """
    task = _Task(queries, digest, digest.block_tokens, 1, scale)
    digest.where.launch(
        "hifc_digest_scores",
        task.groups * -(-task.blocks // _BOUND_BLOCKS),
        digests=address_of(digest.values, digest.where),
        query_type=task.type,
        digest_type=ITEM_TYPES[digest.dtype],
        capacity=digest.values.shape[1],
        **task.arguments,
    )
    return task.mass()


class _Task:
    """Queries against what is kept of keys: checked, with room for the scores."""

    def __init__(
        self,
        queries: Any,
        keys: Sketch | Digest,
        block_tokens: int,
        cells_of_block: int,
        scale: float | None,
    ) -> None:
        self.where = keys.where
        found = strided(queries, self.where)
        self.single = len(found.shape) == 2
        self.count, self.heads, dim = self._shape(found, keys)
        self.kv_heads = keys.kv_heads
        self.type = item_type(found)
        self.blocks = -(-keys.length // block_tokens)
        self.cells_of_block = cells_of_block
        self.cells = self.blocks * cells_of_block
        chunks = -(-(self.heads // self.kv_heads) // _HEADS_AT_ONCE)
        self.groups = self.count * self.kv_heads * chunks
        self.scores = self.where.xp.empty((self.count, self.heads, self.cells, 2), dtype="float32")
        strides = [0, *item_strides(found)][-3:]
        self.arguments = {
            "queries": found.address,
            "scores": address_of(self.scores, self.where),
            "query_stride": strides[0],
            "head_stride": strides[1],
            "dim": dim,
            "count": self.count,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "length": keys.length,
            "block_tokens": block_tokens,
            "scale": dim**-0.5 if scale is None else number("scale", scale),
        }

    @staticmethod
    def _shape(found: Strided, keys: Sketch | Digest) -> tuple[int, int, int]:
        if len(found.shape) in (2, 3):
            count, heads, dim = (1, *found.shape)[-3:]
            if dim == keys.dim and heads and heads % keys.kv_heads == 0 and count:
                if count <= keys.length:
                    return count, heads, dim
                raise InvalidRequest(f"{count} queries of {keys.length} tokens")
        raise InvalidRequest(
            f"queries of shape {found.shape}: ([count,] heads, {keys.dim}) with a multiple of "
            f"{keys.kv_heads} heads are wanted"
        )

    def mass(self) -> Any:
        """The softmax of the scores, a block's cells added up, meaned over a KV head's queries."""
        mass = self.where.xp.empty((self.count, self.kv_heads, self.blocks), dtype="float32")
        self.where.launch(
            "hifc_softmax_mass",
            self.count * self.kv_heads,
            scores=self.arguments["scores"],
            mass=address_of(mass, self.where),
            heads=self.heads,
            kv_heads=self.kv_heads,
            token_blocks=self.blocks,
            cells_of_block=self.cells_of_block,
        )
        return mass[0] if self.single else mass
