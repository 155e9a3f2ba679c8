// SPDX-License-Identifier: Apache-2.0
//
// Whether a request ring ever shows a torn descriptor: a producer whose descriptors tell the position
// that they were written for, and a consumer that checks every word. The producer runs on a GPU or on
// host threads, the consumer on the host; both are what a kernel and the reactor do, and neither
// waits, so whoever runs them calls them again. tools/bench/ring does.
#include "ring.cuh"

using namespace hifc;

constexpr u32 LITMUS_THREADS = 256;

enum Result : u32 { RESULT_COUNT, RESULT_TORN, RESULT_STALE, RESULT_EARLY };

struct LitmusArgs {
    hifc_descriptor *slots;
    i32 *statuses;
    u64 *head;    // of the ring's header
    u64 *tail;
    u64 *results; // by Result
    u32 slot_count;
    u32 status_count; // at least slot_count
    u32 wanted;       // descriptors of each block of threads, or a consumer's looks at a slot
};

// The words of a descriptor but the last, which each tell the position in another way.
HIFC_DEVICE u32 litmus_word(u64 position, u32 word, u32 status_count)
{
    if (word == 6) {
        return HIFC_RING_CONTROL(HIFC_RING_OP_READ, u32(position % status_count));
    }
    const u64 mixed = (position + word) * 0x9e3779b97f4a7c15ull;
    return u32(mixed >> 32) ^ u32(mixed);
}

// Any grid: blocks compete for the ring.
HIFC_KERNEL(hifc_litmus_produce, LITMUS_THREADS, LitmusArgs)
{
    HIFC_SHARED Claim claimed;
    HIFC_PHASE (t) {
        if (t == 0) {
            claimed = ring_claim(args.head, args.tail, args.slot_count, args.wanted);
            atomic_add(&args.results[RESULT_COUNT], u64(claimed.count));
        }
    }
    HIFC_LAST_PHASE (t) {
        for (u32 i = t; i < claimed.count; i += LITMUS_THREADS) {
            const u64 position = claimed.position + i;
            u32 words[7];
            for (u32 word = 0; word < 7; word++) {
                words[word] = litmus_word(position, word, args.status_count);
            }
            ring_publish(args.slots, args.statuses, args.slot_count, position, words);
        }
    }
}

HIFC_DEVICE bool is_whole(const LitmusArgs &args, const u32 *slot, u64 position)
{
    bool whole = true;
    for (u32 word = 0; word < 7; word++) {
        whole = whole && slot[word] == litmus_word(position, word, args.status_count);
    }
    return whole;
}

// Grid: 1. Takes what comes while it looks `wanted` times.
HIFC_KERNEL(hifc_litmus_consume, LITMUS_THREADS, LitmusArgs)
{
    HIFC_LAST_PHASE (t) {
        u64 position = *args.head;
        for (u32 i = 0; t == 0 && i < args.wanted; i++) {
            u32 *slot =
                reinterpret_cast<u32 *>(args.slots + HIFC_RING_SLOT(position, args.slot_count));
            u32 *status = reinterpret_cast<u32 *>(args.statuses + position % args.status_count);
            const u32 sequence = load_acquire_system(slot + 7);
            const u32 lap = HIFC_RING_LAP(position, args.slot_count);
            if (sequence == lap - 1) {
                continue; // of the lap before: nothing yet
            }
            args.results[RESULT_STALE] += sequence != lap;
            args.results[RESULT_TORN] += !is_whole(args, slot, position);
            args.results[RESULT_EARLY] += load_acquire_system(status) != HIFC_RING_WAITING;
            args.results[RESULT_COUNT]++;
            store_release_system(status, 0u);
            store_release_system(args.head, ++position);
        }
    }
}
