/* SPDX-License-Identifier: Apache-2.0
 *
 * index.h - where every live key of a namespace is: in memory, open addressing, 32-byte slots.
 *
 * Shards by the upper bits of a seeded hash; each is one run of slots with linear probing in hash
 * order (Robin Hood), grows on its own by a sixteenth, splits in two at 8192 slots, and deletes by
 * shifting back, so there are no tombstones. From a few thousand entries on, a live entry costs at
 * most 40 bytes. Slots live in one sparse memfd and are addressed by offsets, so that another
 * process can map them. Not thread-safe: the namespace's mutex guards it.
 *
 * A slot pointer is valid until the next insert or remove.
 */
#ifndef HIFC_INDEX_H
#define HIFC_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "hifc.h"

struct hifc_slot {
    struct hifc_key key;
    uint32_t checksum;    /* of the value, bound to the key */
    uint32_t segment : 20;
    uint32_t shape_low : 4;
    uint32_t heat : 8;    /* accesses, saturating */
    uint32_t offset : 24; /* within the segment, in units of 16 bytes */
    uint32_t flags : 8;
    uint32_t length : 29; /* bytes */
    uint32_t shape_high : 3;
};
_Static_assert(sizeof(struct hifc_slot) == 32, "a slot is 32 bytes");

enum {
    HIFC_SLOT_USED = 1,
    HIFC_SLOT_PENDING = 2,    /* its batch is in flight, or reserved */
    HIFC_SLOT_SWAP = 4,       /* class swap */
    HIFC_SLOT_QUARANTINED = 8 /* its bytes failed their checksum: a miss */
};

struct hifc_index;

/* Address space for more than these cannot be had. */
#define HIFC_INDEX_ENTRIES_MAX (1ull << 34)

/* seed: of the hash, fresh for every open. max_entries bounds it; memory is taken as it grows. */
int hifc_index_create(uint64_t max_entries, uint64_t seed, struct hifc_index **out);
void hifc_index_destroy(struct hifc_index *index);
struct hifc_slot *hifc_index_find(struct hifc_index *index, const struct hifc_key *key);
/* A slot with key and USED set and all else zero. The key must not be there. NULL: full. */
struct hifc_slot *hifc_index_insert(struct hifc_index *index, const struct hifc_key *key);
void hifc_index_remove(struct hifc_index *index, struct hifc_slot *slot);
uint64_t hifc_index_count(const struct hifc_index *index);
uint64_t hifc_index_bytes(const struct hifc_index *index); /* memory really held */
/* Starts the fetch of what find(key) will touch; batches call it for all keys first. */
void hifc_index_prefetch(const struct hifc_index *index, const struct hifc_key *key);
/* The next used slot at or after *cursor (0 first), or NULL; moves *cursor behind it. Inserts and
 * removals in between are fine: an entry that stays is seen exactly once. */
struct hifc_slot *hifc_index_next(struct hifc_index *index, uint64_t *cursor);

static inline unsigned hifc_slot_shape(const struct hifc_slot *slot)
{
    return slot->shape_low | (unsigned)slot->shape_high << 4;
}

static inline void hifc_slot_set_shape(struct hifc_slot *slot, unsigned shape)
{
    slot->shape_low = shape & 15u;
    slot->shape_high = (shape >> 4) & 7u;
}

#endif
