/* SPDX-License-Identifier: Apache-2.0
 *
 * scan.c - see scan.h. docs/format.md, "Recovery", gives the reasons for every rule here.
 */
#include "format/scan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/command.h"
#include "util/crc32c.h"
#include "util/error.h"

#define READ_BYTES (2u << 20) /* read at a time, so that several commands are in flight */

enum page_state { PAGE_UNREAD, PAGE_READ, PAGE_UNREADABLE };

void hifc_recover_damage(struct hifc_recover_result *result, const char *format, ...)
{
    if (result->damaged++ == 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(result->first_damage, sizeof result->first_damage, format, arguments);
        va_end(arguments);
    }
}

bool hifc_recover_unreadable(int error)
{
    struct hifc_error last;
    hifc_error_copy(&last);
    return error == -EIO && last.code == error && last.sct == HIFC_SCT_MEDIA;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

int hifc_scan_source_init(struct hifc_scan_source *source, struct hifc_blockio *io,
                          const struct hifc_superblock *sb)
{
    *source = (struct hifc_scan_source){.io = io, .sb = sb, .segment = UINT32_MAX};
    source->memory = aligned_alloc(HIFC_PAGE_BYTES, sb->segment_size_bytes);
    source->pages = malloc(sb->segment_size_bytes / HIFC_PAGE_BYTES);
    if (!source->memory || !source->pages) {
        hifc_scan_source_free(source);
        return hifc_fail(-ENOMEM, "no memory to read a segment of %" PRIu64 " bytes",
                         sb->segment_size_bytes);
    }
    return 0;
}

void hifc_scan_source_free(struct hifc_scan_source *source)
{
    free(source->memory);
    free(source->pages);
    source->memory = source->pages = NULL;
}

static uint64_t base_of(const struct hifc_scan_source *source)
{
    return hifc_segment_offset(source->sb->segment_size_bytes, source->segment);
}

static int read_pages(struct hifc_scan_source *source, uint32_t first, uint32_t count)
{
    uint64_t at = (uint64_t)first * HIFC_PAGE_BYTES;
    int error = hifc_blockio_read(source->io, base_of(source) + at, source->memory + at,
                                  (uint64_t)count * HIFC_PAGE_BYTES);
    if (error == 0 || (count == 1 && hifc_recover_unreadable(error))) {
        memset(source->pages + first, error ? PAGE_UNREADABLE : PAGE_READ, count);
        return 0;
    }
    if (!hifc_recover_unreadable(error)) {
        return error;
    }
    /* Some page of these is lost: find out which. */
    error = 0;
    for (uint32_t i = 0; i < count && error == 0; i++) {
        error = read_pages(source, first + i, 1);
    }
    return error;
}

/* Has the pages of [offset, +bytes) read, and some ahead. */
static int fetch(struct hifc_scan_source *source, uint64_t offset, uint64_t bytes)
{
    uint32_t all = (uint32_t)(source->sb->segment_size_bytes / HIFC_PAGE_BYTES);
    uint32_t end = (uint32_t)((offset + bytes + HIFC_PAGE_BYTES - 1) / HIFC_PAGE_BYTES);
    int error = 0;
    for (uint32_t page = (uint32_t)(offset / HIFC_PAGE_BYTES); page < end && error == 0; page++) {
        if (source->pages[page] != PAGE_UNREAD) {
            continue;
        }
        uint32_t count = 0, most = READ_BYTES / HIFC_PAGE_BYTES;
        while (count < most && page + count < all && source->pages[page + count] == PAGE_UNREAD) {
            count++;
        }
        error = read_pages(source, page, count);
    }
    return error;
}

static bool readable(const struct hifc_scan_source *source, uint64_t offset, uint64_t bytes)
{
    for (uint64_t at = offset / HIFC_PAGE_BYTES; at * HIFC_PAGE_BYTES < offset + bytes; at++) {
        if (source->pages[at] != PAGE_READ) {
            return false;
        }
    }
    return true;
}

static void turn_to(struct hifc_scan_source *source, uint32_t segment)
{
    if (source->segment != segment) {
        source->segment = segment;
        memset(source->pages, PAGE_UNREAD, source->sb->segment_size_bytes / HIFC_PAGE_BYTES);
    }
}

/* ---- walk ----------------------------------------------------------------------------------- */

static void *grown(void *items, uint32_t count, uint32_t *capacity, size_t item_bytes)
{
    if (count < *capacity) {
        return items;
    }
    uint32_t more = *capacity ? *capacity * 2 : 256;
    void *moved = realloc(items, more * item_bytes);
    if (moved) {
        *capacity = more;
    }
    return moved;
}

static int scan_add(struct hifc_scan *scan, const struct hifc_batch_header *header,
                    uint32_t offset, bool linked)
{
    struct hifc_scan_batch batch = {.sequence = header->sequence,
                                    .offset = offset,
                                    .bytes = header->length_pages * HIFC_PAGE_BYTES,
                                    .checksum = header->head.checksum,
                                    .entry_first = scan->entry_count,
                                    .linked = linked};
    for (uint32_t i = 0; i < header->entry_count; i++) {
        const struct hifc_disk_entry *entry = &header->entries[i];
        if (entry->kind == HIFC_ENTRY_RESERVED) {
            continue;
        }
        void *entries = grown(scan->entries, scan->entry_count, &scan->entry_capacity,
                              sizeof *scan->entries);
        if (!entries) {
            return hifc_fail(-ENOMEM, "no memory for the entries of an open segment");
        }
        scan->entries = entries;
        struct hifc_summary_entry *to = &scan->entries[scan->entry_count++];
        *to = (struct hifc_summary_entry){.entry = *entry, .sequence = header->sequence};
        if (entry->kind == HIFC_ENTRY_PUBLISH) {
            to->entry.kind = HIFC_ENTRY_VALUE;
        }
        batch.entry_count++;
    }
    void *batches = grown(scan->batches, scan->batch_count, &scan->batch_capacity,
                          sizeof *scan->batches);
    if (!batches) {
        return hifc_fail(-ENOMEM, "no memory for the batches of an open segment");
    }
    scan->batches = batches;
    scan->batches[scan->batch_count++] = batch;
    return 0;
}

/* What the entries of a batch at offset may name. */
static bool entries_sane(const struct hifc_batch_header *header, uint64_t offset)
{
    uint64_t end = offset + (uint64_t)header->length_pages * HIFC_PAGE_BYTES;
    for (uint32_t i = 0; i < header->entry_count; i++) {
        const struct hifc_disk_entry *entry = &header->entries[i];
        uint64_t from = (uint64_t)entry->offset * HIFC_UNIT_BYTES;
        uint64_t to = from + hifc_extent_bytes(entry->length, entry->part_count);
        switch (entry->kind) {
        case HIFC_ENTRY_VALUE:
        case HIFC_ENTRY_RESERVED:
            if (from < offset + HIFC_PAGE_BYTES || to > end) {
                return false;
            }
            break;
        case HIFC_ENTRY_PUBLISH: /* the room was reserved by this batch or an earlier one */
            if (from < 2 * HIFC_PAGE_BYTES || to > end) {
                return false;
            }
            break;
        case HIFC_ENTRY_TOMBSTONE:
            break;
        default:
            return false;
        }
    }
    return true;
}

/* The batch header at offset, or NULL if none of this life of the segment stands there that comes
 * after what scan has. */
static const struct hifc_batch_header *header_at(const struct hifc_scan_source *source,
                                                 const struct hifc_recovered_segment *segment,
                                                 struct hifc_scan *scan, uint32_t offset,
                                                 uint32_t end, uint32_t index_least)
{
    const struct hifc_batch_header *header = (const void *)(source->memory + offset);
    if (source->pages[offset / HIFC_PAGE_BYTES] != PAGE_READ ||
        !hifc_page_valid(header, HIFC_MAGIC_BATCH, source->sb->uuid, base_of(source) + offset,
                         segment->generation)) {
        return NULL;
    }
    uint64_t highest = header->sequence > header->flushed_sequence ? header->sequence
                                                                   : header->flushed_sequence;
    scan->sequence_highest = highest > scan->sequence_highest ? highest : scan->sequence_highest;
    const struct hifc_scan_batch *last =
        scan->batch_count ? &scan->batches[scan->batch_count - 1] : NULL;
    /* Another epoch: written by a process whose segment header never reached the media, so that
     * the same generation was opened again. */
    bool ours = header->epoch == segment->epoch && header->segment == segment->segment &&
                header->generation == segment->generation && header->index >= index_least &&
                header->sequence > (last ? last->sequence : 0) && header->length_pages > 0 &&
                header->length_pages <= (end - offset) / HIFC_PAGE_BYTES &&
                header->entry_count <= HIFC_BATCH_ENTRIES_MAX && entries_sane(header, offset);
    return ours ? header : NULL;
}

int hifc_scan_walk(struct hifc_scan_source *source, const struct hifc_recovered_segment *segment,
                   uint32_t header_checksum, uint32_t end, bool past, struct hifc_scan *out)
{
    struct hifc_scan *scan = out;
    uint32_t index = 0, previous = header_checksum;
    bool contiguous = true;
    int error = 0;
    turn_to(source, segment->segment);
    *scan = (struct hifc_scan){.header_checksum = header_checksum};
    scan->end = HIFC_PAGE_BYTES;
    while (scan->end + HIFC_PAGE_BYTES <= end && error == 0) {
        uint32_t offset = scan->end;
        error = fetch(source, offset, HIFC_PAGE_BYTES);
        const struct hifc_batch_header *header =
            error ? NULL : header_at(source, segment, scan, offset, end, index);
        bool linked = header && contiguous && header->index == index &&
                      header->previous == previous;
        if (!past && !linked) {
            break;
        }
        contiguous = header != NULL;
        if (!header) {
            scan->end += HIFC_PAGE_BYTES;
            continue;
        }
        error = scan_add(scan, header, offset, linked);
        scan->end += header->length_pages * HIFC_PAGE_BYTES;
        index = header->index + 1;
        previous = header->head.checksum;
        scan->flushed_sequence = header->flushed_sequence > scan->flushed_sequence
                                     ? header->flushed_sequence
                                     : scan->flushed_sequence;
    }
    return error;
}

/* ---- accept --------------------------------------------------------------------------------- */

/* Sets *good if the bytes that entry names are what its checksum says. */
static int verify_entry(struct hifc_scan_source *source, const struct hifc_disk_entry *entry,
                        bool *good)
{
    uint64_t offset = (uint64_t)entry->offset * HIFC_UNIT_BYTES;
    uint64_t bytes = hifc_extent_bytes(entry->length, entry->part_count);
    uint32_t parts = entry->part_count > 1 ? entry->part_count : 1;
    const uint8_t *value = source->memory + offset;
    int error = fetch(source, offset, bytes);
    *good = error == 0 && readable(source, offset, bytes) && entry->length % parts == 0;
    if (!*good) {
        return error;
    }
    uint32_t raw = 0, size = entry->length / parts;
    if (parts == 1) {
        raw = hifc_crc32c_update(0, value, entry->length);
    }
    for (uint32_t i = 0; parts > 1 && i < parts; i++) {
        uint32_t part = hifc_crc32c_update(0, value + (uint64_t)i * size, size);
        const uint8_t *stored = value + hifc_table_offset(entry->length) + i * sizeof part;
        *good &= memcmp(&part, stored, sizeof part) == 0;
        raw = hifc_crc32c_update(raw, &part, sizeof part);
    }
    *good &= hifc_bind_checksum(raw, &entry->key, entry->length, parts) == entry->checksum;
    return 0;
}

static int verify_batch(struct hifc_scan_source *source, const struct hifc_scan *scan,
                        const struct hifc_scan_batch *batch, bool *good)
{
    int error = 0;
    *good = true;
    for (uint32_t i = 0; i < batch->entry_count && *good && error == 0; i++) {
        const struct hifc_disk_entry *entry = &scan->entries[batch->entry_first + i].entry;
        if (entry->kind == HIFC_ENTRY_VALUE) {
            error = verify_entry(source, entry, good);
        }
    }
    return error;
}

int hifc_scan_accept(struct hifc_scan_source *source, const struct hifc_scan *scan, uint64_t mark,
                     struct hifc_recovered_segment *segment, struct hifc_recover_result *result)
{
    turn_to(source, segment->segment);
    segment->used_bytes = HIFC_PAGE_BYTES;
    segment->chain = scan->header_checksum;
    segment->entries = scan->entries;
    segment->batch_count = segment->entry_count = 0;
    segment->first_sequence = segment->last_sequence = 0;
    for (uint32_t i = 0; i < scan->batch_count; i++) {
        const struct hifc_scan_batch *batch = &scan->batches[i];
        if (batch->sequence > mark) {
            bool good = batch->linked;
            int error = good ? verify_batch(source, scan, batch, &good) : 0;
            if (error) {
                return error;
            }
            if (!good) {
                break;
            }
        } else if (!batch->linked) {
            hifc_recover_damage(result,
                                "segment %" PRIu32 ": no valid batch header at offset %" PRIu32
                                ", although batch %" PRIu64 " behind it, at %" PRIu32
                                ", was flushed",
                                segment->segment, segment->used_bytes, batch->sequence,
                                batch->offset);
        }
        segment->used_bytes = batch->offset + batch->bytes;
        segment->chain = batch->checksum;
        segment->batch_count++;
        segment->entry_count += batch->entry_count;
        segment->last_sequence = batch->sequence;
        if (i == 0) {
            segment->first_sequence = batch->sequence;
        }
    }
    result->dropped += scan->entry_count - segment->entry_count;
    return 0;
}

void hifc_scan_free(struct hifc_scan *scan)
{
    free(scan->batches);
    free(scan->entries);
    *scan = (struct hifc_scan){0};
}
