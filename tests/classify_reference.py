# SPDX-License-Identifier: Apache-2.0
"""What the kernels classify and predict must answer, in plain numpy, written for reading.

Sums are taken in 64 bit; everything that a kernel promises to the bit (codes of a sketch, heat, the
set and the order of victims and of candidates) is computed in 32 bit in the kernel's order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
CODE_MAX = 15
HALF_MAX = 65504.0


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks that so many tokens take, the last one maybe in part."""
    return -(-tokens // block_tokens)


def by_block(values: npt.NDArray[Any], block_tokens: int) -> npt.NDArray[Any]:
    """(..., tokens) summed to (..., blocks)."""
    starts = np.arange(0, values.shape[-1], block_tokens)
    return np.add.reduceat(values, starts, axis=-1)


def weights_mass(weights: Floats, block_tokens: int, scale: float) -> Floats:
    """(batch, heads, queries, keys) to (heads, blocks)."""
    total = weights.astype(np.float64).sum(axis=(0, 2)) * scale
    return by_block(total, block_tokens).astype(np.float32)


def _half(values: Floats) -> Floats:
    return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)


def sketch(keys: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """keys (kv_heads, tokens, dim) to codes (kv_heads, tokens, dim / 2), the first half of the
    channels in the low halves of the bytes, and (kv_heads, tokens, 2): the step between two codes
    and the value of code 0.
    """
    low = _half(keys.min(axis=-1))
    step = _half((keys.max(axis=-1) - low) / np.float32(CODE_MAX))
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.rint((keys - low[..., None]) / step[..., None])
    codes = np.where(step[..., None] > 0, np.clip(scaled, 0, CODE_MAX), 0).astype(np.uint8)
    half = keys.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << 4, np.stack([step, low], -1).astype(np.float16)


def keys_of(codes: npt.NDArray[np.uint8], params: npt.NDArray[np.float16]) -> npt.NDArray[Any]:
    """What a sketch remembers of the keys, (kv_heads, tokens, dim) in 64 bit."""
    whole = np.concatenate([codes & 15, codes >> 4], axis=-1)
    wide = params.astype(np.float64)
    return whole * wide[..., :1] + wide[..., 1:]


def _softmax(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def sketch_mass(
    queries: Floats, keys: npt.NDArray[Any], length: int, block_tokens: int, scale: float
) -> Floats:
    """queries (count, heads, dim), the last of them at token length - 1, against the first length
    of keys (kv_heads, tokens, dim): (count, kv_heads, blocks), the mean over a KV head's queries.
    """
    count, heads, _ = queries.shape
    kv_heads = keys.shape[0]
    spread = np.repeat(keys[:, :length], heads // kv_heads, axis=0)
    logits = np.einsum("chd,htd->cht", queries.astype(np.float64), spread) * scale
    seen = length - count + 1 + np.arange(count)
    logits[np.arange(length) >= seen[:, None, None] + np.zeros((1, heads, 1))] = -np.inf
    mass = by_block(_softmax(logits), block_tokens)
    return mass.reshape(count, kv_heads, -1, mass.shape[-1]).mean(axis=2).astype(np.float32)


def digest(keys: Floats, block_tokens: int) -> Floats:
    """keys (kv_heads, tokens, dim) to the (kv_heads, blocks, 2, dim) least and greatest values."""
    starts = np.arange(0, keys.shape[1], block_tokens)
    return np.stack(
        [np.minimum.reduceat(keys, starts, axis=1), np.maximum.reduceat(keys, starts, axis=1)], 2
    )


def digest_mass(
    queries: Floats, digests: Floats, length: int, block_tokens: int, scale: float
) -> Floats:
    """The softmax over blocks of the greatest logit that a key within the digest could have, each
    block weighing as much as it has tokens; shapes as in sketch_mass.
    """
    count, _, dim = queries.shape
    kv_heads = digests.shape[0]
    blocks = blocks_of(length, block_tokens)
    grouped = queries.astype(np.float64).reshape(count, kv_heads, -1, 1, 1, dim)
    bound = (grouped * digests[:, None, :blocks]).max(axis=-2).sum(axis=-1) * scale
    seen = (length - count + 1 + np.arange(count))[:, None] - np.arange(blocks) * block_tokens
    tokens = np.clip(seen, 0, block_tokens)[:, None, None]
    with np.errstate(divide="ignore"):
        mass = _softmax(bound + np.log(tokens))
    return mass.mean(axis=2).astype(np.float32)


def heat_order(heat: Floats, eligible: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Indices of the eligible blocks, coldest first; among equals the last block."""
    chosen = np.flatnonzero(eligible)
    return chosen[np.lexsort((-chosen, heat[chosen]))]


def split(
    heat: Floats,
    eligible: npt.NDArray[np.bool_],
    victims_max: int,
    hot_ratio: float | None = None,
    threshold: float | None = None,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Which blocks are hot, and up to victims_max of the coldest in the order of their index."""
    order = heat_order(heat, eligible)
    if hot_ratio is not None:
        cold = len(order) - min(len(order), round(hot_ratio * len(order)))
    else:
        assert threshold is not None
        cold = int((heat[order] < np.float32(threshold)).sum())
    hot = eligible.copy()
    hot[order[:cold]] = False
    return hot, np.sort(order[: min(cold, victims_max)])


def victims_in_order(
    heat: Floats,
    victims: npt.NDArray[np.int64],
    head: npt.NDArray[np.int32],
    chain: npt.NDArray[np.int32],
    depth: npt.NDArray[np.int32],
) -> npt.NDArray[np.int64]:
    """Heads together, the one with the coldest victim first; in a head chain by chain, and of each
    chain the deepest first."""
    coldest = {h: heat[victims[head[victims] == h]].min() for h in set(head[victims].tolist())}
    return np.array(
        sorted(
            victims.tolist(),
            key=lambda v: (coldest[head[v]], head[v], chain[v], -int(depth[v]), -v),
        ),
        dtype=np.int64,
    )


def trend(history: Floats, heads_per_row: int) -> Floats:
    """history (steps, heads, blocks), oldest first, to the mass expected next, (rows, blocks).

    The least-squares line through the steps, extended by one, is a weighted sum of them.
    """
    steps, heads, blocks = history.shape
    expected = np.zeros((heads, blocks), dtype=np.float32)
    for weight, mass in zip(trend_weights(steps), history, strict=True):
        expected = expected + weight * mass
    expected = np.maximum(expected, np.float32(0))
    rows = np.zeros((heads // heads_per_row, blocks), dtype=np.float32)
    for one in range(heads_per_row):
        rows = rows + expected[one::heads_per_row]
    return rows


def trend_weights(steps: int) -> Floats:
    """By numpy's own least squares: what each step adds to the line's value one step ahead."""
    if steps == 1:
        return np.ones(1, dtype=np.float32)
    at = np.stack([np.ones(steps), np.arange(steps)], axis=1)
    return (np.array([1.0, steps]) @ np.linalg.pinv(at)).astype(np.float32)


def candidates(
    scores: Floats, skip: npt.NDArray[np.bool_], degree: int, score_min: float
) -> list[list[int]]:
    """For each row the blocks to fetch, the most expected first, among equals the first block."""
    found = []
    for score, leave in zip(scores, skip, strict=True):
        wanted = np.flatnonzero(~leave & (score > np.float32(score_min)))
        found.append(wanted[np.argsort(-score[wanted], kind="stable")][:degree].tolist())
    return found


def passed_over(scores: Floats, skip: npt.NDArray[np.bool_], degree: int, score_min: float) -> int:
    """How many blocks of all rows are in `skip` and expected more than the last to fetch, or more
    than score_min where there are fewer than degree of those."""
    count = 0
    fetched = candidates(scores, skip, degree, score_min)
    for score, leave, blocks in zip(scores, skip, fetched, strict=True):
        least = score[blocks[-1]] if len(blocks) == degree else np.float32(score_min)
        count += int((leave & (score > least)).sum())
    return count
