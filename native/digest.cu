// SPDX-License-Identifier: Apache-2.0
//
// The cheap sketch of a layer's keys: the least and greatest value of each channel over the tokens of
// a block, exact in the keys' own type. What a query makes of them bounds the logits of the block.
//
//   digests [kv_heads, capacity, 2, dim]   least, greatest
//
// digest_append brings the blocks up to date in which new tokens stand. digest_scores leaves for each
// query head and block a Score that says: every token here has the bound as its logit.
#include "scores.cuh"

using namespace hifc;

constexpr u32 DIGEST_THREADS = 256;
constexpr u32 BOUND_LANES = 8; // threads that share a block's channels
constexpr u32 BOUND_BLOCKS = DIGEST_THREADS / BOUND_LANES;

struct DigestAppendArgs {
    const void *keys; // [kv_heads, tokens, dim], the channels side by side
    void *digests;
    i64 head_stride; // of keys, in items
    i64 token_stride;
    u32 type; // of keys and digests
    u32 dim;
    u32 tokens;
    u32 start; // place of the first of them
    u32 capacity;
    u32 block_tokens;
};

// Grid: kv_heads x blocks that the new tokens touch.
HIFC_KERNEL(hifc_digest_append, DIGEST_THREADS, DigestAppendArgs)
{
    const u32 first_block = args.start / args.block_tokens;
    const u32 touched = (args.start + args.tokens - 1) / args.block_tokens - first_block + 1;
    const u32 head = block.index / touched;
    const u32 place = first_block + block.index % touched;
    const u32 begin = max_of(place * args.block_tokens, args.start);
    const u32 end = min_of((place + 1) * args.block_tokens, args.start + args.tokens);
    const bool begun = begin > place * args.block_tokens; // holds older tokens already

    HIFC_LAST_PHASE (t) {
        for (u32 channel = t; channel < args.dim; channel += DIGEST_THREADS) {
            const i64 at = (i64(head) * args.capacity + place) * 2 * args.dim + channel;
            const i64 key = head * args.head_stride + channel;
            float low = begun ? load_item(args.digests, at, args.type)
                              : load_item(args.keys, key + (begin - args.start) * args.token_stride,
                                          args.type);
            float high = begun ? load_item(args.digests, at + args.dim, args.type) : low;
            for (u32 token = begin; token < end; token++) {
                const float value = load_item(
                    args.keys, key + (token - args.start) * args.token_stride, args.type);
                low = min_of(low, value);
                high = max_of(high, value);
            }
            store_item(args.digests, at, args.type, low);
            store_item(args.digests, at + args.dim, args.type, high);
        }
    }
}

struct DigestScoresArgs {
    const void *queries; // [count, heads, dim], the channels side by side
    const void *digests;
    Score *scores;       // [count, heads, blocks]
    i64 query_stride;    // of queries, in items
    i64 head_stride;
    u32 query_type;
    u32 digest_type;
    u32 dim;
    u32 count;           // of queries; the last of them is of the token length - 1
    u32 heads;
    u32 kv_heads;        // a divisor of heads
    u32 capacity;        // blocks
    u32 length;          // tokens
    u32 block_tokens;
    float scale;         // of the product of query and key
};

// Grid: count x kv_heads x chunks of HEADS_AT_ONCE x ceil(blocks / BOUND_BLOCKS).
HIFC_KERNEL(hifc_digest_scores, DIGEST_THREADS, DigestScoresArgs)
{
    HIFC_SHARED float query[HEADS_AT_ONCE][SKETCH_DIM_MAX];
    HIFC_SHARED float bounds[HEADS_AT_ONCE][DIGEST_THREADS];
    const u32 blocks = (args.length + args.block_tokens - 1) / args.block_tokens;
    const u32 tiles = (blocks + BOUND_BLOCKS - 1) / BOUND_BLOCKS;
    const Work work = work_of(block.index, tiles, args.heads, args.kv_heads);
    const u32 seen = args.length - args.count + 1 + work.query; // tokens that this query may see

    HIFC_PHASE (t) {
        load_queries<DIGEST_THREADS>(query, args.queries, args.query_type, args.query_stride,
                                     args.head_stride, work, args.dim, t);
    }
    HIFC_PHASE (t) {
        const u32 place = work.tile * BOUND_BLOCKS + t / BOUND_LANES;
        const i64 at = (i64(work.kv_head) * args.capacity + place) * 2 * args.dim;
        float sum[HEADS_AT_ONCE] = {};
        for (u32 channel = t % BOUND_LANES; channel < args.dim && place < blocks;
             channel += BOUND_LANES) {
            const float low = load_item(args.digests, at + channel, args.digest_type);
            const float high = load_item(args.digests, at + args.dim + channel, args.digest_type);
            for (u32 h = 0; h < HEADS_AT_ONCE; h++) {
                if (h < work.heads) {
                    sum[h] += max_of(query[h][channel] * low, query[h][channel] * high);
                }
            }
        }
        for (u32 h = 0; h < HEADS_AT_ONCE; h++) {
            bounds[h][t] = sum[h];
        }
    }
    HIFC_LAST_PHASE (t) {
        const u32 h = t / BOUND_BLOCKS, place = work.tile * BOUND_BLOCKS + t % BOUND_BLOCKS;
        if (h < work.heads && place < blocks) {
            float bound = 0;
            for (u32 i = 0; i < BOUND_LANES; i++) {
                bound += bounds[h][t % BOUND_BLOCKS * BOUND_LANES + i];
            }
            const u32 start = place * args.block_tokens;
            const u32 tokens = start < seen ? min_of(args.block_tokens, seen - start) : 0;
            const float logit = bound * args.scale;
            const Score score = is_finite(logit) ? Score{logit, float(tokens)} : no_score();
            args.scores[(u64(work.query) * args.heads + work.first_head + h) * blocks + place] =
                tokens ? score : Score{NEVER, 0};
        }
    }
}
