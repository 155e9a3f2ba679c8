/* SPDX-License-Identifier: Apache-2.0
 *
 * overlay.h - the unflushed blocks of a faulty device (overlay.c).
 */
#ifndef HIFC_DEVICE_OVERLAY_H
#define HIFC_DEVICE_OVERLAY_H

#include <stddef.h>
#include <stdint.h>

struct hifc_overlay_slot {
    uint64_t lba;
    uint32_t older; /* slot of the version before, plus 1; 0: the one below the overlay */
};

struct hifc_overlay {
    uint32_t lba_bytes;
    uint32_t slots_per_chunk;
    uint32_t slot_count, slot_room, slots_max;
    uint32_t chunk_count, chunk_room;
    uint64_t lba_count;
    uint32_t *newest; /* by LBA: slot of its newest version, plus 1; 0: none */
    struct hifc_overlay_slot *slots;
    uint8_t **chunks;
};

/* Writes blocks down to the device below; 0 or a negative errno. */
typedef int hifc_overlay_write(void *owner, uint64_t lba, uint8_t *data, uint32_t count);

int hifc_overlay_init(struct hifc_overlay *overlay, uint32_t lba_bytes, uint64_t lba_count);
void hifc_overlay_free(struct hifc_overlay *overlay);
/* Memory for a new version of the block, above all versions of it so far; NULL when the overlay is
 * full or memory is out: drain it and try again. */
uint8_t *hifc_overlay_put(struct hifc_overlay *overlay, uint64_t lba);
/* The newest version, NULL when the block is not in the overlay. */
const uint8_t *hifc_overlay_get(const struct hifc_overlay *overlay, uint64_t lba);
/* Empties the overlay. Of each block the newest version is written down unless a draw loses it,
 * then the one before, and so on; drop_percent 0 loses none, 100 all. The same state and *random
 * give the same outcome. On an error of write the rest is kept. */
int hifc_overlay_drain(struct hifc_overlay *overlay, uint32_t drop_percent, uint64_t *random,
                       hifc_overlay_write *write, void *owner);

/* The next of a sequence that *state alone determines (splitmix64). */
static inline uint64_t hifc_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

#endif
