// SPDX-License-Identifier: Apache-2.0
//
// Heat of blocks: decayed and raised by their mass in place, and split into hot and cold; the coldest
// become victims. Blocks that are not eligible (not resident, pinned) are neither.
//
// The split is a radix select over the bits of heat, from the highest 12 over 12 to the lowest 8, each
// a launch that counts and finds the digit of two boundaries: that of the cold blocks and that of the
// victims, which are the coldest of them. The last launch writes. Four launches read heat four times,
// from the cache where a million blocks fit into it; nothing goes to the host in between.
//
//   heat_update   heat = heat * decay + mass; counts the highest digits
//   heat_middle   finds the highest digit of each boundary, counts the middle digits below it
//   heat_low      finds the middle digit; counts the lowest, also by range of blocks
//   heat_split    finds the lowest digit; writes which blocks are hot, and the victims
//
// All of it is one answer, whatever the order in which threads run: among blocks of the same heat the
// last ones are the colder ones, and victims stand in the order of their index. That needs no atomics
// in the last launch, since each range knows from the counts of the others where its victims begin.
//
// HeatState outlives the calls. `high` and `below` are zeros before and after each of them; what
// heat_update finds in the others is cleared by it.
#include "select.cuh"

using namespace hifc;

constexpr u32 HEAT_THREADS = 512;
constexpr u32 HIGH_BINS = 4096, MIDDLE_BINS = 4096, LOW_BINS = 256;
constexpr u32 BOUNDARIES = 2; // of the cold blocks, of the victims
constexpr u32 TILE = 4 * HEAT_THREADS;

struct HeatState {
    u32 high[HIGH_BINS];
    u32 middle[BOUNDARIES][MIDDLE_BINS];
    u32 low[BOUNDARIES][LOW_BINS];
    u32 below; // the threshold
    u32 cold;
    Found high_found[BOUNDARIES];
    Found middle_found[BOUNDARIES];
};
constexpr u32 STATE_WORDS = 12810; // known to hifc/kernels/heat.py
static_assert(sizeof(HeatState) == 4 * STATE_WORDS, "hifc/kernels/heat.py allocates it");

// What a range of blocks holds for one boundary.
struct Range {
    u32 colder;               // blocks below the digits found before the lowest
    u32 before[LOW_BINS + 1]; // of those with these digits, how many are below each lowest digit,
                              // from a number on that is the same for all
};

struct HeatArgs {
    float *heat;         // [count], a multiple of 16
    const float *mass;   // [count], a multiple of 16, or null
    const u32 *eligible; // bits [count], or null: all
    HeatState *state;    // null: heat_update is all that is wanted
    Range *ranges;       // [blocks of the grid, BOUNDARIES]
    u32 *hot;            // bits [count]
    u32 *victims;        // [victims_max]
    u32 *counts;         // eligible, cold, victims
    double hot_ratio;    // of the eligible blocks; negative: cold is what is below the threshold
    u32 count;
    u32 range_blocks;    // a multiple of TILE; the grid is one block a range, at most HEAT_THREADS
    u32 victims_max;
    float decay;
    float threshold;
};

struct Quad {
    u32 key[4];
    u32 eligible; // a bit each
};

// Four blocks from i on, a multiple of 4.
HIFC_DEVICE Quad load_quad(const HeatArgs &args, u32 i)
{
    Quad quad{};
    if (i >= args.count) {
        return quad;
    }
    quad.eligible = args.eligible ? args.eligible[i / 32] >> i % 32 & 15u : 15u;
    if (i + 4 <= args.count) {
        const Vec16 heat = load16(args.heat + i);
        for (u32 j = 0; j < 4; j++) {
            quad.key[j] = key_of(float_of(heat.word[j]));
        }
        return quad;
    }
    quad.eligible &= 15u >> (i + 4 - args.count);
    for (u32 j = 0; i + j < args.count; j++) {
        quad.key[j] = key_of(args.heat[i + j]);
    }
    return quad;
}

HIFC_DEVICE void update_quad(const HeatArgs &args, u32 i)
{
    if (i + 4 <= args.count) {
        Vec16 heat = load16(args.heat + i);
        const Vec16 mass = args.mass ? load16_once(args.mass + i) : Vec16{};
        for (u32 j = 0; j < 4; j++) {
            heat.word[j] = bits_of(float_of(heat.word[j]) * args.decay + float_of(mass.word[j]));
        }
        store16(args.heat + i, heat);
        return;
    }
    for (u32 j = i; j < args.count; j++) {
        args.heat[j] = args.heat[j] * args.decay + (args.mass ? args.mass[j] : 0.0f);
    }
}

// Adds a block's bins to all blocks' and clears nothing: they are the block's own.
template <u32 BINS>
HIFC_DEVICE void add_bins(const Block<HEAT_THREADS> &block, const u32 *bins, u32 *all)
{
    HIFC_LAST_PHASE (t) {
        for (u32 bin = t; bin < BINS; bin += HEAT_THREADS) {
            if (bins[bin]) {
                atomic_add(&all[bin], bins[bin]);
            }
        }
    }
}

HIFC_KERNEL(hifc_heat_update, HEAT_THREADS, HeatArgs)
{
    HIFC_SHARED u32 bins[HIGH_BINS];
    PerThread<u32, HEAT_THREADS> below;
    const u32 first = block.index * args.range_blocks;
    const u32 end = min_of(args.count, first + args.range_blocks);
    const u32 threshold = key_of(args.threshold);
    const bool changes = args.mass || args.decay != 1;

    clear(block, bins, HIGH_BINS);
    if (block.index == 0 && args.state) {
        clear(block, args.state->middle[0], BOUNDARIES * (MIDDLE_BINS + LOW_BINS));
    }
    HIFC_PHASE (t) {
        below[t] = 0;
        for (u32 i = first + 4 * t; i < end; i += TILE) {
            if (changes) {
                update_quad(args, i);
            }
            if (args.state) {
                const Quad quad = load_quad(args, i);
                for (u32 j = 0; j < 4; j++) {
                    if (quad.eligible >> j & 1u) {
                        bin_add(&bins[quad.key[j] >> 20], 1);
                        below[t] += quad.key[j] < threshold;
                    }
                }
            }
        }
    }
    if (args.state) {
        const u32 all = block_reduce<Sum>(block, below);
        HIFC_LAST_PHASE (t) {
            if (t == 0) {
                atomic_add(&args.state->below, all);
            }
        }
        add_bins<HIGH_BINS>(block, bins, args.state->high);
    }
}

// Blocks that are cold, of `eligible` ones.
HIFC_DEVICE u32 cold_of(const HeatArgs &args, u32 eligible)
{
    if (args.hot_ratio < 0) {
        return args.state->below;
    }
    return eligible - min_of(eligible, u32(round_even(args.hot_ratio * eligible)));
}

HIFC_KERNEL(hifc_heat_middle, HEAT_THREADS, HeatArgs)
{
    HIFC_SHARED u32 bins[BOUNDARIES * MIDDLE_BINS];
    HIFC_SHARED Found found[BOUNDARIES];
    PerThread<u32, HEAT_THREADS> sum;
    const u32 first = block.index * args.range_blocks;
    const u32 end = min_of(args.count, first + args.range_blocks);

    HIFC_PHASE (t) {
        sum[t] = 0;
        for (u32 bin = t; bin < HIGH_BINS; bin += HEAT_THREADS) {
            sum[t] += args.state->high[bin];
        }
    }
    const u32 eligible = block_reduce<Sum>(block, sum);
    const u32 cold = cold_of(args, eligible);
    const u32 ranks[BOUNDARIES] = {cold, min_of(cold, args.victims_max)};
    for (u32 b = 0; b < BOUNDARIES; b++) {
        find_rank<HIGH_BINS>(block, args.state->high, ranks[b], &found[b]);
    }
    clear(block, bins, BOUNDARIES * MIDDLE_BINS);
    HIFC_PHASE (t) {
        for (u32 i = first + 4 * t; i < end; i += TILE) {
            const Quad quad = load_quad(args, i);
            for (u32 j = 0; j < 4; j++) {
                const bool in = quad.eligible >> j & 1u;
                for (u32 b = 0; b < BOUNDARIES; b++) {
                    if (in && quad.key[j] >> 20 == found[b].digits) {
                        bin_add(&bins[b * MIDDLE_BINS + (quad.key[j] >> 8 & 4095u)], 1);
                    }
                }
            }
        }
        if (block.index == 0 && t < BOUNDARIES) {
            args.state->high_found[t] = found[t];
            args.state->cold = cold;
            args.counts[0] = eligible;
            args.counts[1] = cold;
            args.counts[2] = ranks[1];
        }
    }
    add_bins<BOUNDARIES * MIDDLE_BINS>(block, bins, args.state->middle[0]);
}

HIFC_KERNEL(hifc_heat_low, HEAT_THREADS, HeatArgs)
{
    HIFC_SHARED u32 bins[BOUNDARIES * LOW_BINS];
    HIFC_SHARED Found found[BOUNDARIES];
    HIFC_SHARED u32 colder[BOUNDARIES];
    PerThread<u32, HEAT_THREADS> before;
    const u32 first = block.index * args.range_blocks;
    const u32 end = min_of(args.count, first + args.range_blocks);
    Range *ranges = args.ranges + block.index * BOUNDARIES;

    for (u32 b = 0; b < BOUNDARIES; b++) {
        find_rank<MIDDLE_BINS>(block, args.state->middle[b], args.state->high_found[b].rank,
                               &found[b]);
    }
    HIFC_PHASE (t) {
        bins[t] = 0; // as many as threads
        if (t < BOUNDARIES) {
            colder[t] = 0;
            found[t].digits |= args.state->high_found[t].digits << 12;
        }
    }
    HIFC_PHASE (t) {
        u32 below[BOUNDARIES] = {};
        for (u32 i = first + 4 * t; i < end; i += TILE) {
            const Quad quad = load_quad(args, i);
            for (u32 j = 0; j < 4; j++) {
                const bool in = quad.eligible >> j & 1u;
                for (u32 b = 0; b < BOUNDARIES; b++) {
                    below[b] += in && quad.key[j] >> 8 < found[b].digits;
                    if (in && quad.key[j] >> 8 == found[b].digits) {
                        bin_add(&bins[b * LOW_BINS + (quad.key[j] & 255u)], 1);
                    }
                }
            }
        }
        for (u32 b = 0; b < BOUNDARIES; b++) {
            bin_add(&colder[b], below[b]);
        }
        if (block.index == 0 && t < BOUNDARIES) {
            args.state->middle_found[t] = found[t];
        }
    }
    if (block.index == 0) { // done with since heat_middle
        clear(block, args.state->high, HIGH_BINS);
        clear(block, &args.state->below, 1);
    }
    HIFC_PHASE (t) {
        before[t] = bins[t];
    }
    block_exclusive_sum(block, before);
    HIFC_LAST_PHASE (t) {
        const u32 b = t / LOW_BINS, bin = t % LOW_BINS;
        ranges[b].before[bin] = before[t];
        if (bin == LOW_BINS - 1) {
            ranges[b].before[LOW_BINS] = before[t] + bins[t];
            ranges[b].colder = colder[b];
        }
    }
    add_bins<BOUNDARIES * LOW_BINS>(block, bins, args.state->low[0]);
}

HIFC_DEVICE u32 count_bits(u32 four)
{
    return (four & 1u) + (four >> 1 & 1u) + (four >> 2 & 1u) + (four >> 3 & 1u);
}

// What a block of heat_split knows of its range before it looks at a single block of KV.
struct Share {
    u32 boundary[BOUNDARIES]; // the key of each
    u32 kept[BOUNDARIES];     // blocks of that very heat, the first ones, that stay on the hot side
};

// Whether a block is on the cold side of a boundary; rank: blocks of the boundary's heat before it.
HIFC_DEVICE bool is_beyond(const Share &share, u32 b, u32 key, u32 rank)
{
    return key < share.boundary[b] || (key == share.boundary[b] && rank >= share.kept[b]);
}

// Boundary b: the ranges after this one give their blocks of the boundary's heat first. Returns how
// many blocks the ranges before this one have on its cold side.
HIFC_DEVICE u32 find_share(const Block<HEAT_THREADS> &block, const HeatArgs &args, u32 b,
                            Found *found, Share *share)
{
    PerThread<u32, HEAT_THREADS> equal, taken, before;
    const Found last = find_rank<LOW_BINS>(block, args.state->low[b],
                                           args.state->middle_found[b].rank, found);
    // Thread t looks at range count - 1 - t, so that a sum over threads before is one over ranges after.
    HIFC_PHASE (t) {
        if (t == 0) {
            share->boundary[b] = share->kept[b] = 0;
        }
        equal[t] = taken[t] = 0;
        if (t < block.count) {
            const Range &range = args.ranges[(block.count - 1 - t) * BOUNDARIES + b];
            equal[t] = range.before[last.digits + 1] - range.before[last.digits];
            taken[t] = range.colder + range.before[last.digits] - range.before[0];
        }
        before[t] = equal[t];
    }
    block_exclusive_sum(block, before);
    HIFC_PHASE (t) {
        const u32 range = block.count - 1 - t;
        const u32 wanted = before[t] < last.rank ? min_of(equal[t], last.rank - before[t]) : 0;
        if (t < block.count && range == block.index) {
            share->boundary[b] = args.state->middle_found[b].digits << 8 | last.digits;
            share->kept[b] = equal[t] - wanted;
        }
        taken[t] = t < block.count && range < block.index ? taken[t] + wanted : 0;
    }
    return block_reduce<Sum>(block, taken);
}

HIFC_KERNEL(hifc_heat_split, HEAT_THREADS, HeatArgs)
{
    HIFC_SHARED Found found[BOUNDARIES];
    HIFC_SHARED Share share;
    HIFC_SHARED u8 hot[HEAT_THREADS]; // four bits each
    PerThread<Quad, HEAT_THREADS> quad;
    PerThread<u64, HEAT_THREADS> equal;
    PerThread<u32, HEAT_THREADS> chosen, place;
    const u32 first = block.index * args.range_blocks;
    const u32 end = min_of(args.count, first + args.range_blocks);

    find_share(block, args, 0, &found[0], &share);
    u32 victims = find_share(block, args, 1, &found[1], &share); // place of the next
    u64 seen = 0; // blocks of the heat of boundary 0 so far, and of boundary 1 above
    for (u32 tile = first; tile < end; tile += TILE) {
        HIFC_PHASE (t) {
            quad[t] = load_quad(args, tile + 4 * t);
            equal[t] = 0;
            for (u32 j = 0; j < 4; j++) {
                if (quad[t].eligible >> j & 1u) {
                    equal[t] += quad[t].key[j] == share.boundary[0];
                    equal[t] += u64(quad[t].key[j] == share.boundary[1]) << 32;
                }
            }
        }
        const u64 equals = block_exclusive_sum(block, equal);
        HIFC_PHASE (t) {
            u64 rank = seen + equal[t];
            u32 cold = 0;
            chosen[t] = 0;
            for (u32 j = 0; j < 4; j++) {
                if (quad[t].eligible >> j & 1u) {
                    const u32 key = quad[t].key[j];
                    cold |= u32(is_beyond(share, 0, key, u32(rank))) << j;
                    chosen[t] |= u32(is_beyond(share, 1, key, u32(rank >> 32))) << j;
                    rank += key == share.boundary[0];
                    rank += u64(key == share.boundary[1]) << 32;
                }
            }
            hot[t] = u8(quad[t].eligible & ~cold);
            place[t] = count_bits(chosen[t]);
        }
        const u32 here = block_exclusive_sum(block, place);
        HIFC_PHASE (t) {
            u32 at = victims + place[t];
            for (u32 j = 0; j < 4; j++) {
                if (chosen[t] >> j & 1u) {
                    args.victims[at++] = tile + 4 * t + j;
                }
            }
            if (t < TILE / 32 && tile + 32 * t < args.count) {
                u32 word = 0;
                for (u32 i = 0; i < 8; i++) {
                    word |= u32(hot[8 * t + i]) << 4 * i;
                }
                args.hot[tile / 32 + t] = word;
            }
        }
        seen += equals;
        victims += here;
    }
}
