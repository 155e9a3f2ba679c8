/* SPDX-License-Identifier: Apache-2.0
 *
 * overlay.c - the unflushed blocks of a faulty device, every version of them.
 *
 * A table with one number a block of the device finds the newest version; the versions lie in
 * chunks in the order in which they were written, each naming the one it replaced, because a cache
 * that loses the last write of a block may have kept the one before. Filling and draining allocate
 * nothing once the chunks are there. One thread at a time.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "faulty/overlay.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "util/error.h"

#define CHUNK_BYTES (256u << 10)
#define OVERLAY_MAX_BYTES (1u << 30)
#define SLOTS_FIRST 256u

int hifc_overlay_init(struct hifc_overlay *overlay, uint32_t lba_bytes, uint64_t lba_count)
{
    *overlay = (struct hifc_overlay){.lba_bytes = lba_bytes, .lba_count = lba_count,
                                     .slots_per_chunk = CHUNK_BYTES / lba_bytes,
                                     .slots_max = OVERLAY_MAX_BYTES / lba_bytes};
    void *map = mmap(NULL, lba_count * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        return hifc_fail(-ENOMEM, "faulty device: no memory for a table of %llu blocks",
                         (unsigned long long)lba_count);
    }
    overlay->newest = map;
    return 0;
}

void hifc_overlay_free(struct hifc_overlay *overlay)
{
    for (uint32_t i = 0; i < overlay->chunk_count; i++) {
        free(overlay->chunks[i]);
    }
    free(overlay->chunks);
    free(overlay->slots);
    if (overlay->newest) {
        munmap(overlay->newest, overlay->lba_count * sizeof(uint32_t));
    }
    memset(overlay, 0, sizeof(*overlay));
}

static uint8_t *slot_data(const struct hifc_overlay *overlay, uint32_t slot)
{
    return overlay->chunks[slot / overlay->slots_per_chunk] +
           (size_t)(slot % overlay->slots_per_chunk) * overlay->lba_bytes;
}

static bool grow_slots(struct hifc_overlay *overlay)
{
    uint32_t room = overlay->slot_room ? overlay->slot_room * 2 : SLOTS_FIRST;
    void *slots = realloc(overlay->slots, room * sizeof(overlay->slots[0]));
    if (slots) {
        overlay->slots = slots;
        overlay->slot_room = room;
    }
    return slots;
}

static bool grow_chunks(struct hifc_overlay *overlay)
{
    if (overlay->chunk_count == overlay->chunk_room) {
        uint32_t room = overlay->chunk_room ? overlay->chunk_room * 2 : 16;
        void *chunks = realloc(overlay->chunks, room * sizeof(overlay->chunks[0]));
        if (!chunks) {
            return false;
        }
        overlay->chunks = chunks;
        overlay->chunk_room = room;
    }
    uint8_t *chunk = aligned_alloc(4096, CHUNK_BYTES); /* the device below may want O_DIRECT */
    if (chunk) {
        overlay->chunks[overlay->chunk_count++] = chunk;
    }
    return chunk;
}

uint8_t *hifc_overlay_put(struct hifc_overlay *overlay, uint64_t lba)
{
    uint32_t slot = overlay->slot_count;
    if (slot >= overlay->slots_max ||
        (slot == overlay->slot_room && !grow_slots(overlay)) ||
        (slot / overlay->slots_per_chunk == overlay->chunk_count && !grow_chunks(overlay))) {
        return NULL;
    }
    overlay->slot_count++;
    overlay->slots[slot].lba = lba;
    overlay->slots[slot].older = overlay->newest[lba];
    overlay->newest[lba] = slot + 1;
    return slot_data(overlay, slot);
}

const uint8_t *hifc_overlay_get(const struct hifc_overlay *overlay, uint64_t lba)
{
    uint32_t newest = overlay->newest[lba];
    return newest ? slot_data(overlay, newest - 1) : NULL;
}

/* The version of slot's block that survives, plus 1; 0: the one below. */
static uint32_t draw(const struct hifc_overlay *overlay, uint32_t slot, uint32_t drop_percent,
                     uint64_t *random)
{
    uint32_t version = slot + 1;
    while (version && drop_percent && hifc_random(random) % 100 < drop_percent) {
        version = overlay->slots[version - 1].older;
    }
    return version;
}

/* How many slots from this one on are the newest of blocks in a row and lie in a row. */
static uint32_t run_length(const struct hifc_overlay *overlay, uint32_t slot)
{
    uint32_t end = (slot / overlay->slots_per_chunk + 1) * overlay->slots_per_chunk;
    uint32_t length = 1;
    while (slot + length < end && slot + length < overlay->slot_count &&
           overlay->slots[slot + length].lba == overlay->slots[slot].lba + length &&
           overlay->newest[overlay->slots[slot + length].lba] == slot + length + 1) {
        length++;
    }
    return length;
}

int hifc_overlay_drain(struct hifc_overlay *overlay, uint32_t drop_percent, uint64_t *random,
                       hifc_overlay_write *write, void *owner)
{
    for (uint32_t slot = 0; slot < overlay->slot_count;) {
        uint64_t lba = overlay->slots[slot].lba;
        uint32_t length = 1;
        int rc = 0;
        if (overlay->newest[lba] == slot + 1 && drop_percent == 0) {
            length = run_length(overlay, slot);
            rc = write(owner, lba, slot_data(overlay, slot), length);
        } else if (overlay->newest[lba] == slot + 1) {
            uint32_t version = draw(overlay, slot, drop_percent, random);
            rc = version ? write(owner, lba, slot_data(overlay, version - 1), 1) : 0;
        }
        if (rc) {
            return rc;
        }
        slot += length;
    }
    for (uint32_t slot = 0; slot < overlay->slot_count; slot++) {
        overlay->newest[overlay->slots[slot].lba] = 0;
    }
    overlay->slot_count = 0;
    return 0;
}
