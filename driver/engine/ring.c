/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.c - the memory of a request ring; the protocol is told in hifc_ring.h.
 *
 * Every word that producer and consumer share is accessed by atomic built-ins, those of a
 * descriptor too: a producer that does not keep to the protocol may write them at any time, and
 * is found out by its laps. There is no fence, which the thread sanitizer would not understand.
 */
#define _GNU_SOURCE /* memfd_create */
#include "engine/ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/error.h"

#define PAGE_BYTES 4096ull
#define WORDS (sizeof(struct hifc_descriptor) / sizeof(uint32_t) - 1) /* without the sequence */

/* ---- create and destroy ---------------------------------------------------------------------- */

static uint64_t on_pages(uint64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* Populated at once: a ring has no page faults, on the host or under a GPU's mapping. */
static int map(uint64_t bytes, struct hifc_ring_memory *out)
{
    out->fd = memfd_create("hifc request ring", MFD_CLOEXEC);
    if (out->fd < 0) {
        return -errno;
    }
    void *base = MAP_FAILED;
    if (ftruncate(out->fd, (off_t)bytes) == 0) {
        base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, out->fd, 0);
    }
    if (base == MAP_FAILED) {
        int error = -errno;
        close(out->fd);
        return error;
    }
    out->header = base;
    out->region_bytes = bytes;
    return 0;
}

int hifc_ring_memory_create(uint32_t slots, uint32_t statuses, uint64_t arena_bytes,
                            uint32_t read_max_bytes, struct hifc_ring_memory *out)
{
    uint64_t slots_offset = PAGE_BYTES;
    uint64_t statuses_offset = slots_offset + on_pages(slots * sizeof(struct hifc_descriptor));
    uint64_t bytes = statuses_offset + on_pages(statuses * sizeof(int32_t));
    *out = (struct hifc_ring_memory){.slot_count = slots, .status_count = statuses, .fd = -1};
    out->seen = calloc(slots, sizeof *out->seen);
    int error = out->seen ? map(bytes, out) : -ENOMEM;
    if (error) {
        free(out->seen);
        out->seen = NULL;
        return hifc_fail(error, "cannot map %llu bytes for a request ring of %u slots: %s",
                         (unsigned long long)bytes, slots, strerror(-error));
    }
    out->slots = (struct hifc_descriptor *)((uint8_t *)out->header + slots_offset);
    out->statuses = (int32_t *)((uint8_t *)out->header + statuses_offset);
    for (uint32_t i = 0; i < statuses; i++) {
        out->statuses[i] = HIFC_RING_IDLE;
    }
    *out->header = (struct hifc_ring_header){.magic = HIFC_RING_MAGIC,
                                             .version = HIFC_RING_VERSION,
                                             .slots = slots,
                                             .statuses = statuses,
                                             .read_max_bytes = read_max_bytes,
                                             .region_bytes = bytes,
                                             .slots_offset = slots_offset,
                                             .statuses_offset = statuses_offset,
                                             .arena_bytes = arena_bytes,
                                             .state = HIFC_RING_OPEN};
    return 0;
}

void hifc_ring_memory_destroy(struct hifc_ring_memory *ring)
{
    if (ring->header) {
        munmap(ring->header, ring->region_bytes);
        close(ring->fd);
    }
    free(ring->seen);
    *ring = (struct hifc_ring_memory){.fd = -1};
}

/* ---- produce --------------------------------------------------------------------------------- */

/* Positions for up to count descriptors: how many, and the first in *from. */
static uint32_t claim(struct hifc_ring_memory *ring, uint32_t count, uint64_t *from)
{
    struct hifc_ring_header *header = ring->header;
    uint64_t tail = __atomic_load_n(&header->tail, __ATOMIC_RELAXED);
    for (;;) {
        /* Loaded after the tail, the head may be past it by now: the exchange then fails. Where it
         * does not, somebody wrote there who should not, and there is no room. */
        uint64_t used = tail - __atomic_load_n(&header->head, __ATOMIC_ACQUIRE);
        uint32_t room = used < ring->slot_count ? ring->slot_count - (uint32_t)used : 0;
        uint32_t claimed = count < room ? count : room;
        if (__atomic_compare_exchange_n(&header->tail, &tail, tail + claimed, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            *from = tail;
            return claimed;
        }
    }
}

uint32_t hifc_ring_produce(struct hifc_ring_memory *ring, const struct hifc_descriptor *from,
                           uint32_t count)
{
    uint64_t position;
    uint32_t claimed = claim(ring, count, &position);
    for (uint32_t i = 0; i < claimed; i++, position++) {
        struct hifc_descriptor *to = &ring->slots[HIFC_RING_SLOT(position, ring->slot_count)];
        uint32_t words[WORDS + 1];
        memcpy(words, &from[i], sizeof words);
        const struct hifc_descriptor *copy = (const struct hifc_descriptor *)words;
        uint32_t op = (copy->control & HIFC_RING_OP_MASK) >> HIFC_RING_OP_SHIFT;
        uint32_t index = copy->control & HIFC_RING_INDEX_MASK;
        /* A cancel's word is another's. Looked at in the copy, since whoever checked the caller's
         * descriptors before saw what another thread may have written over. */
        if (op != HIFC_RING_OP_CANCEL && index < ring->status_count) {
            __atomic_store_n(&ring->statuses[index], HIFC_RING_WAITING, __ATOMIC_RELAXED);
        }
        for (unsigned w = 0; w < WORDS; w++) {
            __atomic_store_n((uint32_t *)to + w, words[w], __ATOMIC_RELAXED);
        }
        __atomic_store_n(&to->sequence, HIFC_RING_LAP(position, ring->slot_count),
                         __ATOMIC_SEQ_CST); /* release, and before the look at who sleeps */
    }
    if (claimed < count) {
        __atomic_fetch_add(&ring->header->overflowed, count - claimed, __ATOMIC_RELAXED);
    }
    return claimed;
}

/* ---- consume --------------------------------------------------------------------------------- */

bool hifc_ring_news(const struct hifc_ring_memory *ring)
{
    uint32_t slot = HIFC_RING_SLOT(ring->head, ring->slot_count);
    return __atomic_load_n(&ring->slots[slot].sequence, __ATOMIC_SEQ_CST) != ring->seen[slot];
}

enum hifc_ring_took hifc_ring_take(struct hifc_ring_memory *ring, struct hifc_descriptor *out)
{
    uint32_t slot = HIFC_RING_SLOT(ring->head, ring->slot_count);
    struct hifc_descriptor *from = &ring->slots[slot];
    uint32_t words[WORDS + 1];
    uint32_t sequence = __atomic_load_n(&from->sequence, __ATOMIC_ACQUIRE);
    if (sequence == ring->seen[slot]) {
        return HIFC_RING_EMPTY;
    }
    for (unsigned w = 0; w < WORDS; w++) { /* acquire, so that the second look comes after them */
        words[w] = __atomic_load_n((uint32_t *)from + w, __ATOMIC_ACQUIRE);
    }
    words[WORDS] = __atomic_load_n(&from->sequence, __ATOMIC_RELAXED);
    memcpy(out, words, sizeof *out);
    uint32_t lap = HIFC_RING_LAP(ring->head, ring->slot_count);
    ring->seen[slot] = words[WORDS];
    ring->head++;
    return sequence == lap && words[WORDS] == lap ? HIFC_RING_TOOK : HIFC_RING_STALE;
}

void hifc_ring_credit(struct hifc_ring_memory *ring)
{
    __atomic_store_n(&ring->header->head, ring->head, __ATOMIC_RELEASE);
}

void hifc_ring_answer(struct hifc_ring_memory *ring, uint32_t index, int32_t status)
{
    __atomic_store_n(&ring->statuses[index], status, __ATOMIC_RELEASE);
    __atomic_store_n(&ring->header->answers, ++ring->answers, __ATOMIC_SEQ_CST);
}

void hifc_ring_set_state(struct hifc_ring_memory *ring, enum hifc_ring_state state)
{
    __atomic_store_n(&ring->header->state, (uint32_t)state, __ATOMIC_RELEASE);
}
