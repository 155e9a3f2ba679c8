// SPDX-License-Identifier: Apache-2.0
//
// Attention mass by block: from the weights of an attention that gives them, and from the scores that
// sketch_scores or digest_scores left where it gives none. Sums are taken in one order always, so
// the same input gives the same bits.
#include "scores.cuh"

using namespace hifc;

constexpr u32 MASS_THREADS = 256;

struct WeightsMassArgs {
    const void *weights; // [batch, heads, queries, keys], the keys side by side
    float *mass;         // [heads, blocks], mass_stride apart
    i64 batch_stride;    // of weights, in items
    i64 head_stride;
    i64 query_stride;
    i64 mass_stride;
    u32 type;
    u32 batch;
    u32 heads;
    u32 queries;
    u32 keys;
    u32 block_tokens;
    u32 blocks_of_tile; // that a thread block sums: what MASS_THREADS keys hold, at least one
    float scale;        // of the sums
};

// The weights of one key, summed over batch and queries.
HIFC_DEVICE float key_mass(const WeightsMassArgs &args, u32 head, u32 key)
{
    float sum = 0;
    for (u32 b = 0; b < args.batch; b++) {
        const i64 first = b * args.batch_stride + head * args.head_stride + key;
        for (u32 q = 0; q < args.queries; q++) {
            sum += load_item(args.weights, first + q * args.query_stride, args.type);
        }
    }
    return sum;
}

// Grid: heads x ceil(blocks / blocks_of_tile).
HIFC_KERNEL(hifc_weights_mass, MASS_THREADS, WeightsMassArgs)
{
    HIFC_SHARED float sums[MASS_THREADS];
    PerThread<float, MASS_THREADS> sum;
    const u32 blocks = (args.keys + args.block_tokens - 1) / args.block_tokens;
    const u32 tiles = (blocks + args.blocks_of_tile - 1) / args.blocks_of_tile;
    const u32 head = block.index / tiles;
    const u32 first = block.index % tiles * args.blocks_of_tile;
    const u32 start = first * args.block_tokens;
    const u32 end = min_of(args.keys - start, args.blocks_of_tile * args.block_tokens) + start;
    float *mass = args.mass + head * args.mass_stride;

    HIFC_PHASE (t) {
        sum[t] = 0;
        for (u32 key = start + t; key < end; key += MASS_THREADS) {
            sum[t] += key_mass(args, head, key);
        }
        sums[t] = sum[t];
    }
    if (args.blocks_of_tile == 1) {
        const float all = block_reduce<Sum>(block, sum);
        HIFC_LAST_PHASE (t) {
            if (t == 0) {
                mass[first] = all * args.scale;
            }
        }
    } else {
        HIFC_LAST_PHASE (t) {
            if (t < min_of(args.blocks_of_tile, blocks - first)) {
                float all = 0;
                for (u32 i = 0; i < args.block_tokens; i++) {
                    all += sums[t * args.block_tokens + i];
                }
                mass[first + t] = all * args.scale;
            }
        }
    }
}

struct SoftmaxMassArgs {
    const Score *scores; // [count, heads, token_blocks * cells_of_block]
    float *mass;         // [count, kv_heads, token_blocks]
    u32 heads;
    u32 kv_heads;
    u32 token_blocks;
    u32 cells_of_block;
};

// The mean of the softmaxes of a KV head's queries. Grid: count x kv_heads.
HIFC_KERNEL(hifc_softmax_mass, MASS_THREADS, SoftmaxMassArgs)
{
    PerThread<float, MASS_THREADS> of_thread;
    const u32 group = args.heads / args.kv_heads;
    const u32 cells = args.token_blocks * args.cells_of_block;
    float *mass = args.mass + u64(block.index) * args.token_blocks;

    for (u32 h = 0; h < group; h++) {
        const Score *scores = args.scores + (u64(block.index) * group + h) * cells;
        HIFC_PHASE (t) {
            of_thread[t] = NEVER;
            for (u32 i = t; i < cells; i += MASS_THREADS) {
                of_thread[t] = max_of(of_thread[t], scores[i].peak);
            }
        }
        const float peak = block_reduce<Max>(block, of_thread);
        HIFC_PHASE (t) {
            of_thread[t] = 0;
            for (u32 i = t; i < cells; i += MASS_THREADS) {
                of_thread[t] += scores[i].sum * exponential(scores[i].peak - peak);
            }
        }
        const float share = 1 / (block_reduce<Sum>(block, of_thread) * float(group));
        HIFC_PHASE (t) {
            for (u32 i = t; i < args.token_blocks; i += MASS_THREADS) {
                float sum = 0;
                for (u32 j = i * args.cells_of_block; j < (i + 1) * args.cells_of_block; j++) {
                    sum += scores[j].sum * exponential(scores[j].peak - peak);
                }
                mass[i] = (h == 0 ? 0 : mass[i]) + sum * share;
            }
        }
    }
}
