/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.h - the memory of a request ring (hifc_ring.h): made, produced into by the host's threads,
 * consumed by one. It knows nothing of what descriptors mean.
 *
 * The consumer keeps its own head, geometry and what it last saw in each slot, and never reads them
 * back from the region, which anybody may have written.
 */
#ifndef HIFC_ENGINE_RING_H
#define HIFC_ENGINE_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "hifc_ring.h"

struct hifc_ring_memory {
    struct hifc_ring_header *header; /* where the region begins */
    struct hifc_descriptor *slots;
    int32_t *statuses;
    uint64_t region_bytes;
    uint32_t slot_count, status_count;
    int fd; /* of the memfd, for processes that attach */
    /* the consumer's */
    uint64_t head;
    uint32_t answers;
    uint32_t *seen; /* the sequence last looked at in each slot */
};

enum hifc_ring_took {
    HIFC_RING_EMPTY, /* nothing there, or not yet */
    HIFC_RING_TOOK,
    HIFC_RING_STALE  /* taken, but its lap cannot be, or it changed while it was read */
};

/* slots: a power of two within the bounds of hifc_ring.h, statuses: 1 and up. */
int hifc_ring_memory_create(uint32_t slots, uint32_t statuses, uint64_t arena_bytes,
                            uint32_t read_max_bytes, struct hifc_ring_memory *out);
void hifc_ring_memory_destroy(struct hifc_ring_memory *ring);

/* Any thread of the host, several at once: publishes as many of the descriptors as there is room
 * for, the first ones, and counts the others as overflowed. Fills in their sequences, and sets
 * their status words to waiting. Every status index has been checked. Returns how many. */
uint32_t hifc_ring_produce(struct hifc_ring_memory *ring, const struct hifc_descriptor *from,
                           uint32_t count);

/* ---- the consumer: one thread at a time ------------------------------------------------------ */

/* Whether take would find something. Sequentially consistent with produce: who produces and then
 * sees that the consumer does not sleep was seen, or the other way round. */
bool hifc_ring_news(const struct hifc_ring_memory *ring);
enum hifc_ring_took hifc_ring_take(struct hifc_ring_memory *ring, struct hifc_descriptor *out);
/* Gives the slots of everything taken back to the producers. */
void hifc_ring_credit(struct hifc_ring_memory *ring);
/* index is within bounds. */
void hifc_ring_answer(struct hifc_ring_memory *ring, uint32_t index, int32_t status);
void hifc_ring_set_state(struct hifc_ring_memory *ring, enum hifc_ring_state state);

#endif
