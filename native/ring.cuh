// SPDX-License-Identifier: Apache-2.0
//
// ring.cuh - producing into a request ring, as driver/include/hifc_ring.h tells: on a GPU with a tail
// in its own memory, on the host with that of the ring's header.
#ifndef HIFC_RING_CUH
#define HIFC_RING_CUH

#include "portable.cuh"

// As in stdint.h of Linux, so that they may also come from there.
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
#define HIFC_RING_NO_STDINT
#include "hifc_ring.h"

namespace hifc
{

// A claim that others win so often in a row is given up, and what it wanted is lost.
constexpr u32 CLAIM_TRIES = 256;

struct Claim {
    u64 position; // of the first slot
    u32 count;
};

// Up to `wanted` positions, as many as there is room for. One thread of a block calls it for all.
HIFC_DEVICE Claim ring_claim(const u64 *head, u64 *tail, u32 slots, u32 wanted)
{
    u64 position = atomic_add(tail, u64(0));
    for (u32 i = 0; i < CLAIM_TRIES; i++) {
        // Loaded after the tail, the head may be past it; then the exchange fails.
        const u64 used = position - load_acquire_system(head);
        const u32 room = used < slots ? slots - u32(used) : 0;
        const u32 count = min_of(wanted, room);
        if (count == 0) {
            break;
        }
        const u64 before = atomic_compare_exchange(tail, position, position + count);
        if (before == position) {
            return Claim{position, count};
        }
        position = before;
    }
    return Claim{0, 0};
}

// Publishes one descriptor, whose sequence is filled in, and sets its status word to waiting.
HIFC_DEVICE void ring_publish(hifc_descriptor *slots, i32 *statuses, u32 slot_count, u64 position,
                              const u32 (&words)[7])
{
    u32 *slot = reinterpret_cast<u32 *>(slots + HIFC_RING_SLOT(position, slot_count));
    *static_cast<volatile i32 *>(statuses + (words[6] & HIFC_RING_INDEX_MASK)) = HIFC_RING_WAITING;
    store16(slot, Vec16{{words[0], words[1], words[2], words[3]}});
    slot[4] = words[4];
    slot[5] = words[5];
    slot[6] = words[6];
    store_release_system(slot + 7, HIFC_RING_LAP(position, slot_count));
}

} // namespace hifc

#endif
