// SPDX-License-Identifier: Apache-2.0
//
// What attention will look at next: per head and block of tokens the least-squares line through the
// masses of the latest steps, extended by one step, and of each row of heads the blocks with the most
// of it that are neither resident nor on their way.
#include "select.cuh"

using namespace hifc;

constexpr u32 TREND_THREADS = 256;

struct TrendArgs {
    const float *history; // [window, heads, capacity], used from slot `first` on, in a ring
    float *scores;        // [rows, token_blocks]
    u32 window;
    u32 first;            // slot of the oldest step
    u32 steps;
    u32 heads;
    u32 heads_of_row;     // a divisor of heads: rows share them evenly, one after another
    u32 capacity;
    u32 token_blocks;
};

// Grid: rows x ceil(token_blocks / TREND_THREADS).
HIFC_KERNEL(hifc_trend_scores, TREND_THREADS, TrendArgs)
{
    const u32 tiles = (args.token_blocks + TREND_THREADS - 1) / TREND_THREADS;
    const u32 row = block.index / tiles;
    HIFC_LAST_PHASE (t) {
        const u32 place = block.index % tiles * TREND_THREADS + t;
        float score = 0;
        for (u32 h = 0; h < args.heads_of_row && place < args.token_blocks; h++) {
            float expected = 0;
            for (u32 step = 0; step < args.steps; step++) {
                const u32 slot = (args.first + step) % args.window;
                const u64 head = u64(slot) * args.heads + row * args.heads_of_row + h;
                // The line's value one step ahead is this sum of the points, 6 i - 2 (n - 1) over
                // n (n - 1) of each: the mean plus (n + 1) / 2 times the slope.
                const float weight =
                    args.steps == 1 ? 1.0f
                                    : float(i32(6 * step) - i32(2 * (args.steps - 1))) /
                                          float(args.steps * (args.steps - 1));
                expected += weight * args.history[head * args.capacity + place];
            }
            score += max_of(expected, 0.0f);
        }
        if (place < args.token_blocks) {
            args.scores[u64(row) * args.token_blocks + place] = score;
        }
    }
}

constexpr u32 CANDIDATE_THREADS = 512;
constexpr u32 DEGREE_MAX = 1024;
constexpr u32 DIGIT_BINS = 2048; // 11, 11 and 10 bits

struct CandidateArgs {
    const float *scores;  // [rows, token_blocks]
    const u32 *resident;  // bits [rows, 32 * words]
    const u32 *in_flight; // bits [rows, 32 * words]
    u32 *candidates;      // [rows, degree], the most expected first
    u32 *counts;          // [rows], how many of them there are
    u64 *skipped;         // how many were passed over, added to
    u32 token_blocks;
    u32 words;
    u32 degree;           // at most DEGREE_MAX
    float score_min;      // candidates have more
};

constexpr u32 NO_CANDIDATE = 0xffffffffu;

// Resident, or on its way.
HIFC_DEVICE bool is_here(const CandidateArgs &args, u32 row, u32 place)
{
    const u64 word = u64(row) * args.words + place / 32;
    return (args.resident[word] | args.in_flight[word]) >> place % 32 & 1u;
}

// The less, the more is expected of the block.
HIFC_DEVICE u32 expected_key(const CandidateArgs &args, u32 row, u32 place)
{
    const float score = args.scores[u64(row) * args.token_blocks + place];
    return score > args.score_min ? ~key_of(score) : NO_CANDIDATE;
}

HIFC_DEVICE u32 candidate_key(const CandidateArgs &args, u32 row, u32 place)
{
    if (place >= args.token_blocks || is_here(args, row, place)) {
        return NO_CANDIDATE;
    }
    return expected_key(args, row, place);
}

// How many that are here are expected more than what has `key`.
HIFC_DEVICE u32 passed_over(const Block<CANDIDATE_THREADS> &block, const CandidateArgs &args,
                            u32 key)
{
    PerThread<u32, CANDIDATE_THREADS> sum;
    HIFC_PHASE (t) {
        sum[t] = 0;
        for (u32 place = t; place < args.token_blocks; place += CANDIDATE_THREADS) {
            sum[t] += is_here(args, block.index, place) &&
                      expected_key(args, block.index, place) < key;
        }
    }
    return block_reduce<Sum>(block, sum);
}

// Finds the digits of the last candidate within the degree, from the highest on. Of those with these
// digits, `rank` are within it.
HIFC_DEVICE Found last_candidate(const Block<CANDIDATE_THREADS> &block, const CandidateArgs &args,
                                 u32 *bins, Found *found)
{
    PerThread<u32, CANDIDATE_THREADS> sum;
    Found last{0, 0};
    u32 shift = 32;
    for (u32 digit = 0; digit < 3; digit++) {
        const u32 bits = digit < 2 ? 11 : 10, before = shift;
        shift -= bits;
        clear(block, bins, DIGIT_BINS);
        HIFC_PHASE (t) {
            sum[t] = 0;
            for (u32 place = t; place < args.token_blocks; place += CANDIDATE_THREADS) {
                const u32 key = candidate_key(args, block.index, place);
                if (key != NO_CANDIDATE && (digit == 0 || key >> before == last.digits)) {
                    bin_add(&bins[key >> shift & ((1u << bits) - 1)], 1);
                    sum[t]++;
                }
            }
        }
        if (digit == 0) {
            last.rank = min_of(args.degree, block_reduce<Sum>(block, sum));
        }
        const Found next = find_rank<DIGIT_BINS>(block, bins, last.rank, found + digit);
        last = Found{last.digits << bits | next.digits, next.rank};
    }
    return last;
}

// Grid: rows.
HIFC_KERNEL(hifc_trend_candidates, CANDIDATE_THREADS, CandidateArgs)
{
    HIFC_SHARED u32 bins[DIGIT_BINS];
    HIFC_SHARED Found found[3];
    HIFC_SHARED u32 keys[DEGREE_MAX];
    HIFC_SHARED u32 places[DEGREE_MAX];
    PerThread<u32, CANDIDATE_THREADS> key, order;
    const Found last = last_candidate(block, args, bins, found);
    u32 count = 0, equals = 0;

    // In the order of their places, so that of equal ones the first are within.
    for (u32 first = 0; first < args.token_blocks && last.rank > 0; first += CANDIDATE_THREADS) {
        HIFC_PHASE (t) {
            key[t] = candidate_key(args, block.index, first + t);
            order[t] = key[t] == last.digits;
        }
        const u32 equals_here = block_exclusive_sum(block, order);
        HIFC_PHASE (t) {
            if (key[t] == last.digits && equals + order[t] >= last.rank) {
                key[t] = NO_CANDIDATE;
            }
            order[t] = key[t] <= last.digits;
        }
        const u32 taken = block_exclusive_sum(block, order);
        HIFC_PHASE (t) {
            if (key[t] <= last.digits) {
                keys[count + order[t]] = key[t];
                places[count + order[t]] = first + t;
            }
        }
        equals += equals_here;
        count += taken;
    }
    const u32 skipped = passed_over(block, args, count < args.degree ? NO_CANDIDATE : last.digits);
    HIFC_LAST_PHASE (t) {
        for (u32 i = t; i < count; i += CANDIDATE_THREADS) {
            u32 before = 0;
            for (u32 j = 0; j < count; j++) {
                before += keys[j] < keys[i] || (keys[j] == keys[i] && j < i);
            }
            args.candidates[u64(block.index) * args.degree + before] = places[i];
        }
        if (t == 0) {
            args.counts[block.index] = count;
            atomic_add(args.skipped, u64(skipped));
        }
    }
}
