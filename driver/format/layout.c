/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c - checksums and extents of the on-device structures. See layout.h and docs/format.md.
 *
 * Pure functions of their arguments: no I/O, no state, any thread.
 */
#include "format/layout.h"

#include <stddef.h>
#include <string.h>

#include "util/crc32c.h"

/* What every metadata checksum begins with, so that a page says where and when it belongs. */
struct seed {
    uint8_t uuid[16];
    uint64_t offset_bytes;
    uint64_t generation;
};
_Static_assert(sizeof(struct seed) == 32, "no holes in what is summed");

struct binding {
    struct hifc_key key;
    uint32_t length;
    uint32_t part_count;
};
_Static_assert(sizeof(struct binding) == 24, "no holes in what is summed");

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

static uint32_t seeded(const uint8_t *uuid, uint64_t offset_bytes, uint64_t generation)
{
    struct seed seed = {.offset_bytes = offset_bytes, .generation = generation};
    if (uuid) {
        memcpy(seed.uuid, uuid, sizeof seed.uuid);
    }
    return hifc_crc32c_update(UINT32_MAX, &seed, sizeof seed);
}

static uint32_t page_checksum(const void *page, const uint8_t *uuid, uint64_t offset_bytes,
                              uint64_t generation)
{
    static const uint8_t zero[sizeof(uint32_t)];
    const uint8_t *bytes = page;
    size_t at = offsetof(struct hifc_page_head, checksum), behind = at + sizeof zero;
    uint32_t crc = seeded(uuid, offset_bytes, generation);
    crc = hifc_crc32c_update(crc, bytes, at);
    crc = hifc_crc32c_update(crc, zero, sizeof zero);
    return ~hifc_crc32c_update(crc, bytes + behind, HIFC_PAGE_BYTES - behind);
}

void hifc_page_seal(void *page, uint64_t magic, const uint8_t uuid[16], uint64_t offset_bytes,
                    uint64_t generation)
{
    struct hifc_page_head head = {.magic = magic, .version = HIFC_FORMAT_VERSION};
    memcpy(page, &head, sizeof head);
    head.checksum = page_checksum(page, uuid, offset_bytes, generation);
    memcpy(page, &head, sizeof head);
}

bool hifc_page_valid(const void *page, uint64_t magic, const uint8_t uuid[16],
                     uint64_t offset_bytes, uint64_t generation)
{
    struct hifc_page_head head;
    memcpy(&head, page, sizeof head);
    return head.magic == magic &&
           head.checksum == page_checksum(page, uuid, offset_bytes, generation);
}

uint32_t hifc_summary_checksum(const struct hifc_summary_entry *entries, uint32_t count,
                               const uint8_t uuid[16], uint64_t offset_bytes, uint64_t generation)
{
    return ~hifc_crc32c_update(seeded(uuid, offset_bytes, generation), entries,
                               count * sizeof *entries);
}

uint32_t hifc_bind_checksum(uint32_t raw, const struct hifc_key *key, uint32_t length,
                            uint32_t part_count)
{
    struct binding binding = {.key = *key, .length = length, .part_count = part_count};
    return raw ^ ~hifc_crc32c_update(UINT32_MAX, &binding, sizeof binding);
}

uint64_t hifc_extent_bytes(uint32_t length, uint32_t part_count)
{
    uint64_t bytes = length;
    if (part_count > 1) {
        bytes = hifc_table_offset(length) + part_count * (uint64_t)sizeof(uint32_t);
    }
    uint64_t step = hifc_extent_on_pages(length, part_count) ? HIFC_PAGE_BYTES : HIFC_UNIT_BYTES;
    return (bytes + step - 1) / step * step;
}

uint64_t hifc_superblock_offset(unsigned copy, uint64_t size_bytes)
{
    uint64_t size = size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    return copy < 2 ? (uint64_t)copy * HIFC_SUPERBLOCK_DISTANCE_BYTES
                    : size - (HIFC_SUPERBLOCK_COPIES - copy) * (uint64_t)HIFC_SUPERBLOCK_DISTANCE_BYTES;
}

uint32_t hifc_segment_count_for(uint64_t size_bytes, uint64_t segment_size_bytes)
{
    uint64_t around = HIFC_DATA_OFFSET_BYTES + HIFC_TAIL_BYTES;
    uint64_t size = size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    uint64_t count = size > around ? (size - around) / segment_size_bytes : 0;
    return count < UINT32_MAX ? (uint32_t)count : UINT32_MAX;
}
