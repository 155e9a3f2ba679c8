// SPDX-License-Identifier: Apache-2.0
//
// select.cuh - the steps of a radix select: counting digits in bins, and finding the bin in which an
// item of a given rank stands.
#ifndef HIFC_SELECT_CUH
#define HIFC_SELECT_CUH

#include "items.cuh"

namespace hifc
{

struct Found {
    u32 digits; // of the item, as far as they are known
    u32 rank;   // its number, from 1, among those with these digits
};

// A bin is the block's own, in shared memory.
HIFC_DEVICE void bin_add(u32 *bin, u32 value)
{
#if HIFC_GPU
    atomicAdd(bin, value);
#else
    *bin += value;
#endif
}

template <u32 THREADS>
HIFC_DEVICE void clear(const Block<THREADS> &block, u32 *words, u32 count)
{
    HIFC_PHASE (t) {
        for (u32 i = t; i < count; i += THREADS) {
            words[i] = 0;
        }
    }
}

// The bin in which item number `rank`, counted from 1, stands, and its number within; {0, 0} for rank
// 0. `found` is shared memory that this call alone uses until the next barrier.
template <u32 BINS, u32 THREADS>
HIFC_DEVICE Found find_rank(const Block<THREADS> &block, const u32 *bins, u32 rank, Found *found)
{
    constexpr u32 OF_THREAD = (BINS + THREADS - 1) / THREADS;
    PerThread<u32, THREADS> before;
    HIFC_PHASE (t) {
        before[t] = 0;
        for (u32 bin = t * OF_THREAD; bin < min_of((t + 1) * OF_THREAD, BINS); bin++) {
            before[t] += bins[bin];
        }
        if (t == 0) {
            *found = Found{0, 0};
        }
    }
    block_exclusive_sum(block, before);
    HIFC_PHASE (t) {
        u32 sum = before[t];
        for (u32 bin = t * OF_THREAD; bin < min_of((t + 1) * OF_THREAD, BINS); bin++) {
            if (sum < rank && rank <= sum + bins[bin]) {
                *found = Found{bin, rank - sum};
            }
            sum += bins[bin];
        }
    }
    return *found;
}

} // namespace hifc

#endif
