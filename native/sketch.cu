// SPDX-License-Identifier: Apache-2.0
//
// The resident sketch of a layer's keys: 4 bits a channel, and for each token and KV head the step
// between two codes and the value of code 0, both in half precision. On real keys what is chosen by
// it loses half as much attention as by codes symmetric about zero, for 2 bytes more a token.
//
//   codes   u8  [kv_heads, capacity, dim / 2]   channel i low, channel i + dim / 2 high in byte i
//   params  f16 [kv_heads, capacity, 2]         step, value of code 0
//
// sketch_append writes the entries of new tokens. sketch_scores takes queries against all entries
// and leaves a Score for each query head and cell, of which softmax_mass makes shares of attention.
#include "scores.cuh"

using namespace hifc;

constexpr u32 APPEND_TOKENS = 32; // that a block of threads appends
constexpr u32 APPEND_THREADS = 128;
constexpr float CODE_MAX = 15;

struct SketchAppendArgs {
    const void *keys; // [kv_heads, tokens, dim], the channels side by side
    u8 *codes;
    u16 *params;
    i64 head_stride; // of keys, in items
    i64 token_stride;
    u32 type;
    u32 dim; // a multiple of 8, at most SKETCH_DIM_MAX
    u32 tokens;
    u32 start; // place of the first of them
    u32 capacity;
};

HIFC_DEVICE u32 code_of(float key, float low, float step)
{
    return step > 0 ? u32(min_of(max_of(round_even((key - low) / step), 0.0f), CODE_MAX)) : 0;
}

// Grid: kv_heads x ceil(tokens / APPEND_TOKENS).
HIFC_KERNEL(hifc_sketch_append, APPEND_THREADS, SketchAppendArgs)
{
    HIFC_SHARED float keys[APPEND_TOKENS][SKETCH_DIM_MAX + 1]; // a column is spread over the banks
    HIFC_SHARED float lows[APPEND_TOKENS];
    HIFC_SHARED float steps[APPEND_TOKENS];
    const u32 tiles = (args.tokens + APPEND_TOKENS - 1) / APPEND_TOKENS;
    const u32 head = block.index / tiles;
    const u32 first = block.index % tiles * APPEND_TOKENS;
    const u32 count = min_of(APPEND_TOKENS, args.tokens - first);
    const u64 entry = u64(head) * args.capacity + args.start + first;

    HIFC_PHASE (t) {
        for (u32 i = t; i < count * args.dim; i += APPEND_THREADS) {
            const u32 token = i / args.dim, channel = i % args.dim;
            keys[token][channel] = load_item(
                args.keys, head * args.head_stride + (first + token) * args.token_stride + channel,
                args.type);
        }
    }
    HIFC_PHASE (t) {
        if (t < count) {
            float low = keys[t][0], high = low;
            for (u32 channel = 1; channel < args.dim; channel++) {
                low = min_of(low, keys[t][channel]);
                high = max_of(high, keys[t][channel]);
            }
            const u16 low_half = half_of(low);
            lows[t] = half_to_float(low_half);
            const u16 step_half = half_of((high - lows[t]) / CODE_MAX);
            steps[t] = half_to_float(step_half);
            args.params[2 * (entry + t)] = step_half;
            args.params[2 * (entry + t) + 1] = low_half;
        }
    }
    HIFC_LAST_PHASE (t) {
        const u32 half = args.dim / 2;
        for (u32 i = t; i < count * half; i += APPEND_THREADS) {
            const u32 token = i / half, channel = i % half;
            const u32 low = code_of(keys[token][channel], lows[token], steps[token]);
            const u32 high = code_of(keys[token][channel + half], lows[token], steps[token]);
            args.codes[entry * half + i] = u8(low | high << 4);
        }
    }
}

constexpr u32 SCORE_CELLS = 16; // that a block of threads scores, a thread a token
constexpr u32 SCORE_THREADS = SCORE_CELLS * CELL_TOKENS;
constexpr float QUERY_MAX = 32767; // queries are taken in 16 bit, so that products are exact sums

struct SketchScoresArgs {
    const void *queries; // [count, heads, dim], the channels side by side
    const u8 *codes;
    const u16 *params;
    Score *scores;      // [count, heads, blocks * cells of a block]
    i64 query_stride;   // of queries, in items
    i64 head_stride;
    u32 type;           // of queries
    u32 dim;
    u32 count;          // of queries; the last of them is of the token length - 1
    u32 heads;
    u32 kv_heads;       // a divisor of heads
    u32 capacity;
    u32 length;         // tokens that have an entry
    u32 block_tokens;
    float scale;        // of the product of query and key
};

struct Query {
    alignas(8) i16 channel[HEADS_AT_ONCE][SKETCH_DIM_MAX];
    float unit[HEADS_AT_ONCE]; // of a channel's value
    i32 sum[HEADS_AT_ONCE];    // of the channels
};

#if HIFC_GPU
// sum + the products of four codes, a byte each, with four channels of a query.
HIFC_DEVICE i32 dot4(const i16 *query, u32 codes, i32 sum)
{
    const u32 *pairs = reinterpret_cast<const u32 *>(query);
    asm("dp2a.lo.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(pairs[0]), "r"(codes));
    asm("dp2a.hi.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(pairs[1]), "r"(codes));
    return sum;
}
#else
// The same on the host, where the codes are spread out once for all heads.
HIFC_DEVICE void multiply_wide(const u8 *codes, const Query &query, u32 dim, u32 heads,
                               i32 (&sums)[HEADS_AT_ONCE])
{
    alignas(64) i16 wide[SKETCH_DIM_MAX];
    const u32 half = dim / 2;
    for (u32 i = 0; i < half; i++) {
        wide[i] = codes[i] & 15;
        wide[half + i] = codes[i] >> 4;
    }
    for (u32 h = 0; h < heads; h++) {
        i32 sum = 0;
        for (u32 i = 0; i < dim; i++) {
            sum += wide[i] * query.channel[h][i];
        }
        sums[h] += sum;
    }
}
#endif

// sums[h] += the products of a token's codes and the query of head h.
HIFC_DEVICE void multiply_codes(const u8 *codes, const Query &query, u32 dim, u32 heads,
                                i32 (&sums)[HEADS_AT_ONCE])
{
#if HIFC_GPU
    const u32 half = dim / 2;
    for (u32 i = 0; i < half; i += 4) {
        const u32 word = *reinterpret_cast<const u32 *>(codes + i);
        const u32 low = word & 0x0f0f0f0fu, high = word >> 4 & 0x0f0f0f0fu;
#pragma unroll
        for (u32 h = 0; h < HEADS_AT_ONCE; h++) {
            if (h < heads) {
                sums[h] = dot4(query.channel[h] + i, low, sums[h]);
                sums[h] = dot4(query.channel[h] + half + i, high, sums[h]);
            }
        }
    }
#else
    // A loop whose length the compiler knows ends without a remainder: a fifth of the kernel less.
    switch (dim) {
    case 64:
        return multiply_wide(codes, query, 64, heads, sums);
    case 128:
        return multiply_wide(codes, query, 128, heads, sums);
    default:
        return multiply_wide(codes, query, dim, heads, sums);
    }
#endif
}

// Grid: count x kv_heads x chunks of HEADS_AT_ONCE of a KV head's queries x ceil(cells / SCORE_CELLS).
HIFC_KERNEL(hifc_sketch_scores, SCORE_THREADS, SketchScoresArgs)
{
    HIFC_SHARED float wide[HEADS_AT_ONCE][SKETCH_DIM_MAX + 1];
    HIFC_SHARED Query query;
    HIFC_SHARED float logits[HEADS_AT_ONCE][SCORE_THREADS];
    const Cells cells = cells_of(args.length, args.block_tokens);
    const u32 tiles = (cells.count + SCORE_CELLS - 1) / SCORE_CELLS;
    const Work work = work_of(block.index, tiles, args.heads, args.kv_heads);
    const u32 seen = args.length - args.count + 1 + work.query; // tokens that this query may see
    const u32 first_cell = work.tile * SCORE_CELLS;

    HIFC_PHASE (t) {
        load_queries<SCORE_THREADS>(wide, args.queries, args.type, args.query_stride,
                                    args.head_stride, work, args.dim, t);
    }
    HIFC_PHASE (t) {
        if (t < work.heads) {
            float most = 0;
            bool finite = true;
            for (u32 i = 0; i < args.dim; i++) {
                most = max_of(most, wide[t][i] < 0 ? -wide[t][i] : wide[t][i]);
                finite = finite && is_finite(wide[t][i]);
            }
            most = finite ? most : 0;
            query.unit[t] = finite ? most / QUERY_MAX : float_of(0x7fc00000u);
            query.sum[t] = 0;
            for (u32 i = 0; i < args.dim; i++) {
                const float value = most > 0 ? round_even(wide[t][i] / query.unit[t]) : 0;
                query.channel[t][i] = i16(max_of(min_of(value, QUERY_MAX), -QUERY_MAX));
                query.sum[t] += query.channel[t][i];
            }
        }
    }
    HIFC_PHASE (t) {
        const u32 token = cell_token(cells, first_cell + t / CELL_TOKENS, t % CELL_TOKENS);
        const u64 entry = u64(work.kv_head) * args.capacity + token;
        i32 sums[HEADS_AT_ONCE] = {};
        float step = 0, low = 0;
        if (token < seen) {
            multiply_codes(args.codes + entry * (args.dim / 2), query, args.dim, work.heads, sums);
            step = half_to_float(args.params[2 * entry]);
            low = half_to_float(args.params[2 * entry + 1]);
        }
        for (u32 h = 0; h < work.heads; h++) {
            const float product = float(sums[h]) * step + float(query.sum[h]) * low;
            logits[h][t] = token < seen ? product * query.unit[h] * args.scale : NEVER;
        }
    }
    HIFC_LAST_PHASE (t) {
        const u32 cell = first_cell + t % SCORE_CELLS, h = t / SCORE_CELLS;
        if (h < work.heads && cell < cells.count) {
            const float *logit = logits[h] + t % SCORE_CELLS * CELL_TOKENS;
            Score score{NEVER, 0};
            u32 finite = 1;
            for (u32 i = 0; i < CELL_TOKENS; i++) {
                score.peak = max_of(score.peak, logit[i]);
                finite &= u32(is_finite(logit[i]));
            }
            float shares[CELL_TOKENS]; // apart from their sum, so that the host takes them together
            for (u32 i = 0; i < CELL_TOKENS; i++) {
                shares[i] = logit[i] == NEVER ? 0 : exponential(logit[i] - score.peak);
            }
            for (u32 i = 0; i < CELL_TOKENS; i++) {
                score.sum += shares[i];
            }
            const u64 row = u64(work.query) * args.heads + work.first_head + h;
            args.scores[row * cells.count + cell] = finite ? score : no_score();
        }
    }
}
