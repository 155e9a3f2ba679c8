// SPDX-License-Identifier: Apache-2.0
//
// scores.cuh - what sketch_scores, digest_scores and softmax_mass agree on: how work is dealt out,
// and what stands between the kernels that score and the one that turns scores into shares.
//
// A block of tokens is cut into cells of CELL_TOKENS tokens, the last one maybe shorter, so that
// cells never cross a block. A cell has one Score for each query head.
#ifndef HIFC_SCORES_CUH
#define HIFC_SCORES_CUH

#include "items.cuh"

namespace hifc
{

constexpr u32 CELL_TOKENS = 16;
constexpr u32 HEADS_AT_ONCE = 8; // query heads of a KV head that a block of threads takes together
constexpr u32 SKETCH_DIM_MAX = 256;
constexpr float NEVER = -3.0e38f; // the logit of a token that is not there

struct Score {
    float peak; // greatest logit of the cell
    float sum;  // of exp(logit - peak) over its tokens, 0 if there is none; NaN: see no_score
};

HIFC_DEVICE bool is_finite(float value)
{
    return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

// Of a cell with a logit that is not finite. Comparisons would lose a NaN; in a sum it stays, and
// makes the mass of the whole KV head NaN.
HIFC_DEVICE Score no_score()
{
    return Score{NEVER, float_of(0x7fc00000u)};
}

struct Cells {
    u32 block_tokens;
    u32 of_block;
    u32 count;
};

HIFC_DEVICE Cells cells_of(u32 tokens, u32 block_tokens)
{
    const u32 of_block = (block_tokens + CELL_TOKENS - 1) / CELL_TOKENS;
    return Cells{block_tokens, of_block, (tokens + block_tokens - 1) / block_tokens * of_block};
}

// The token at place i of a cell; past all tokens where there is none.
HIFC_DEVICE u32 cell_token(const Cells &cells, u32 cell, u32 i)
{
    const u32 in_block = cell % cells.of_block * CELL_TOKENS + i;
    const bool there = cell < cells.count && in_block < cells.block_tokens;
    return there ? cell / cells.of_block * cells.block_tokens + in_block : 0xffffffffu;
}

// Which query, heads and tile a block of threads has. A grid has queries x kv_heads x
// ceil(heads of a KV head / HEADS_AT_ONCE) x tiles of them.
struct Work {
    u32 query;
    u32 kv_head;
    u32 first_head; // of `heads` query heads, all of kv_head
    u32 heads;
    u32 tile;
};

HIFC_DEVICE Work work_of(u32 index, u32 tiles, u32 query_heads, u32 kv_heads)
{
    const u32 group = query_heads / kv_heads;
    const u32 chunks = (group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    const u32 chunk = index / tiles % chunks * HEADS_AT_ONCE;
    const u32 kv_head = index / tiles / chunks % kv_heads;
    return Work{index / tiles / chunks / kv_heads, kv_head, kv_head * group + chunk,
                min_of(HEADS_AT_ONCE, group - chunk), index % tiles};
}

// Thread t's share of reading the work's query heads, as 32-bit floats. Strides in items.
template <u32 THREADS, u32 WIDTH>
HIFC_DEVICE void load_queries(float (&into)[HEADS_AT_ONCE][WIDTH], const void *queries, u32 type,
                              i64 query_stride, i64 head_stride, const Work &work, u32 dim, u32 t)
{
    for (u32 i = t; i < work.heads * dim; i += THREADS) {
        const u32 h = i / dim, channel = i % dim;
        into[h][channel] = load_item(
            queries, work.query * query_stride + (work.first_head + h) * head_stride + channel,
            type);
    }
}

} // namespace hifc

#endif
