// SPDX-License-Identifier: Apache-2.0
//
// Puts the victims of hifc_heat_split in the order in which they leave: heads one after another, the
// one with the coldest victim first, chains within a head one after another, and of each chain the
// deepest block first, so that a tail goes before what it continues.
//
// There are few victims, so each finds its place by counting those that go before it: all pairs, in
// parallel, without a barrier between blocks and with one answer.
//
// On a GPU a caller can write into victims and counts. A count beyond victims_max is taken for it, and
// a victim that is no block is neither looked up nor written to the result.
#include "items.cuh"

using namespace hifc;

constexpr u32 VICTIM_THREADS = 128;

// Compared from the first member to the last; no two are equal.
struct Order {
    u32 coldest; // key of the coldest victim of the head
    u32 head;
    u32 chain;
    u32 depth; // inverted: deeper is less
    u32 index; // inverted
};

struct VictimArgs {
    const float *heat;   // [blocks]
    const u32 *victims;  // [victims_max]
    const u32 *counts;   // the third is how many there are
    const i32 *head;     // [blocks], or null: all of one
    const i32 *chain;    // [blocks], or null: all of one
    const i32 *depth;    // [blocks], or null: that of the index
    Order *orders;       // [victims_max]
    u32 *ordered;        // [victims_max]
    u32 victims_max;
    u32 blocks;
};

HIFC_DEVICE u32 unsigned_of(const i32 *values, u32 i)
{
    return values ? u32(values[i]) ^ 0x80000000u : 0;
}

// Grid of both: victims_max / VICTIM_THREADS, rounded up.
HIFC_KERNEL(hifc_victims_group, VICTIM_THREADS, VictimArgs)
{
    HIFC_SHARED u32 heads[VICTIM_THREADS];
    HIFC_SHARED u32 keys[VICTIM_THREADS];
    PerThread<Order, VICTIM_THREADS> order;
    const u32 count = min_of(args.counts[2], args.victims_max);

    HIFC_PHASE (t) {
        const u32 place = block.index * VICTIM_THREADS + t;
        const u32 i = place < count ? args.victims[place] : 0;
        order[t] = Order{0xffffffffu, 0, 0, 0, ~i};
        if (i < args.blocks) {
            order[t].head = unsigned_of(args.head, i);
            order[t].chain = unsigned_of(args.chain, i);
            order[t].depth = ~unsigned_of(args.depth, i);
        }
    }
    for (u32 first = 0; first < count; first += VICTIM_THREADS) {
        HIFC_PHASE (t) {
            if (first + t < count) {
                const u32 i = args.victims[first + t];
                heads[t] = i < args.blocks ? unsigned_of(args.head, i) : 0;
                keys[t] = i < args.blocks ? key_of(args.heat[i]) : 0xffffffffu;
            }
        }
        HIFC_PHASE (t) {
            for (u32 j = 0; j < min_of(VICTIM_THREADS, count - first); j++) {
                if (heads[j] == order[t].head) {
                    order[t].coldest = min_of(order[t].coldest, keys[j]);
                }
            }
        }
    }
    HIFC_LAST_PHASE (t) {
        if (block.index * VICTIM_THREADS + t < count) {
            args.orders[block.index * VICTIM_THREADS + t] = order[t];
        }
    }
}

HIFC_DEVICE bool goes_before(const Order &a, const Order &b)
{
    return a.coldest != b.coldest ? a.coldest < b.coldest
           : a.head != b.head     ? a.head < b.head
           : a.chain != b.chain   ? a.chain < b.chain
           : a.depth != b.depth   ? a.depth < b.depth
                                  : a.index < b.index;
}

HIFC_KERNEL(hifc_victims_order, VICTIM_THREADS, VictimArgs)
{
    HIFC_SHARED Order others[VICTIM_THREADS];
    PerThread<Order, VICTIM_THREADS> order;
    PerThread<u32, VICTIM_THREADS> before;
    const u32 count = min_of(args.counts[2], args.victims_max);

    HIFC_PHASE (t) {
        const u32 place = block.index * VICTIM_THREADS + t;
        order[t] = place < count ? args.orders[place] : Order{};
        before[t] = 0;
    }
    for (u32 first = 0; first < count; first += VICTIM_THREADS) {
        HIFC_PHASE (t) {
            if (first + t < count) {
                others[t] = args.orders[first + t];
            }
        }
        HIFC_PHASE (t) {
            for (u32 j = 0; j < min_of(VICTIM_THREADS, count - first); j++) {
                before[t] += ~others[j].index < args.blocks && goes_before(others[j], order[t]);
            }
        }
    }
    HIFC_LAST_PHASE (t) {
        if (block.index * VICTIM_THREADS + t < count && ~order[t].index < args.blocks) {
            args.ordered[before[t]] = ~order[t].index;
        }
    }
}
