/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c - the invariants of docs/format.md, verified on a namespace at rest: what fsck and the
 * crash simulation call.
 *
 * It takes a copy of the index under the mutex and then compares it with what stands on the device;
 * requests in between would show as problems.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/crc32c.h"

struct state {
    struct hifc_ns *ns;
    struct hifc_check_result *result;
    struct hifc_slot *slots;
    uint64_t slot_count;
};

__attribute__((format(printf, 2, 3))) static void problem(struct state *state, const char *format,
                                                          ...)
{
    struct hifc_check_result *result = state->result;
    if (result->problems++ == 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(result->first_problem, sizeof result->first_problem, format, arguments);
        va_end(arguments);
    }
}

/* ---- the index and the accounts ------------------------------------------------------------- */

static int by_place(const void *a, const void *b)
{
    const struct hifc_slot *x = a, *y = b;
    if (x->segment != y->segment) {
        return x->segment < y->segment ? -1 : 1;
    }
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static int copy_index(struct state *state)
{
    struct hifc_ns *ns = state->ns;
    uint64_t count = hifc_index_count(ns->index), cursor = 0, taken = 0;
    state->slots = malloc((count ? count : 1) * sizeof *state->slots);
    if (!state->slots) {
        return hifc_fail(-ENOMEM, "no memory to check %" PRIu64 " entries", count);
    }
    const struct hifc_slot *slot;
    while (taken < count && (slot = hifc_index_next(ns->index, &cursor)) != NULL) {
        state->slots[taken++] = *slot;
    }
    state->slot_count = taken;
    qsort(state->slots, taken, sizeof *state->slots, by_place);
    if (taken != count) {
        problem(state, "the index counts %" PRIu64 " entries and holds %" PRIu64, count, taken);
    }
    return 0;
}

static void check_places(struct state *state)
{
    struct hifc_ns *ns = state->ns;
    uint64_t end = 0;
    for (uint64_t i = 0; i < state->slot_count; i++) {
        const struct hifc_slot *slot = &state->slots[i];
        uint64_t start = (uint64_t)slot->offset * HIFC_UNIT_BYTES;
        uint64_t extent = hifc_extent_bytes(slot->length, ns_slot_parts(ns, slot));
        if (i > 0 && state->slots[i - 1].segment == slot->segment && start < end) {
            problem(state, "two entries overlap in segment %u at %" PRIu64, slot->segment, start);
        }
        end = start + extent;
        if (slot->segment >= ns->segment_count || end > ns->segment_size ||
            ns->segments[slot->segment].state == NS_FREE) {
            problem(state, "an entry lies in segment %u at %" PRIu64 ", which is %s", slot->segment,
                    start, slot->segment < ns->segment_count ? "free" : "no segment");
        }
    }
}

static void check_accounts(struct state *state)
{
    struct hifc_ns *ns = state->ns;
    uint64_t at = 0, free_count = 0, extents[NS_PART_COUNTS_MAX] = {0};
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        const struct ns_segment *segment = &ns->segments[i];
        uint64_t live = 0, entries = 0;
        for (; at < state->slot_count && state->slots[at].segment == i; at++) {
            live += hifc_extent_bytes(state->slots[at].length,
                                      ns_slot_parts(ns, &state->slots[at]));
            entries++;
            extents[hifc_slot_shape(&state->slots[at])]++;
        }
        free_count += segment->state == NS_FREE;
        bool listed_free = ns_segment_set_has(&ns->free_set, i) ||
                           ns_segment_set_has(&ns->roomless_set, i);
        if ((segment->state == NS_FREE) != listed_free) {
            problem(state, "segment %u is free in one account and not in the other", i);
        }
        if (live != segment->live_bytes || entries != segment->live_entries) {
            problem(state, "segment %u accounts %" PRIu64 " live bytes in %u entries, the index "
                           "%" PRIu64 " in %" PRIu64,
                    i, segment->live_bytes, segment->live_entries, live, entries);
        }
        if (segment->live_bytes + segment->metadata_bytes > ns->segment_size) {
            problem(state, "segment %u accounts more bytes than it has", i);
        }
    }
    for (uint32_t i = 0; i < NS_PART_COUNTS_MAX; i++) {
        if (extents[i] != ns->part_counts.extents[i]) {
            problem(state, "%" PRIu64 " entries of %u parts, %" PRIu64 " accounted", extents[i],
                    ns->part_counts.counts[i], ns->part_counts.extents[i]);
        }
    }
    uint32_t listed = ns->free_set.count + ns->roomless_set.count;
    if (free_count != listed) {
        problem(state, "%" PRIu64 " segments are free, %u accounted", free_count, listed);
    }
}

/* ---- what stands on the device -------------------------------------------------------------- */

static bool same_entry(const struct hifc_disk_entry *a, const struct hifc_disk_entry *b)
{
    return memcmp(&a->key, &b->key, sizeof a->key) == 0 && a->offset == b->offset &&
           a->length == b->length && a->checksum == b->checksum && a->part_count == b->part_count &&
           (a->kind == HIFC_ENTRY_TOMBSTONE) == (b->kind == HIFC_ENTRY_TOMBSTONE);
}

/* Compares the headers of a sealed segment, batch by batch, with its summary. */
static int check_headers(struct state *state, uint32_t segment,
                         const struct hifc_summary_entry *entries, uint32_t count,
                         uint32_t used_bytes)
{
    struct hifc_ns *ns = state->ns;
    struct hifc_batch_header *header = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    uint32_t at = HIFC_PAGE_BYTES, seen = 0;
    int error = header ? 0 : hifc_fail(-ENOMEM, "no memory for a header");
    while (!error && at < used_bytes) {
        uint64_t place = ns_segment_base(ns, segment) + at;
        error = hifc_blockio_read(ns->io, place, header, HIFC_PAGE_BYTES);
        if (error || !hifc_page_valid(header, HIFC_MAGIC_BATCH, ns->sb.uuid, place,
                                      ns->segments[segment].generation)) {
            problem(state, "segment %u has no valid batch header at %u", segment, at);
            break;
        }
        for (uint32_t i = 0; i < header->entry_count && i < HIFC_BATCH_ENTRIES_MAX; i++) {
            const struct hifc_disk_entry *entry = &header->entries[i];
            if (entry->kind == HIFC_ENTRY_RESERVED) {
                continue;
            }
            if (seen >= count || !same_entry(entry, &entries[seen].entry) ||
                entries[seen].sequence != header->sequence) {
                problem(state, "entry %u of segment %u differs between header and summary", seen,
                        segment);
            }
            seen++;
        }
        at += header->length_pages ? header->length_pages * HIFC_PAGE_BYTES : ns->segment_size;
    }
    if (!error && seen != count) {
        problem(state, "segment %u: %u entries in headers, %u in the summary", segment, seen,
                count);
    }
    free(header);
    return error;
}

static int check_segment(struct state *state, uint32_t segment)
{
    struct hifc_ns *ns = state->ns;
    struct hifc_summary_entry *entries;
    uint32_t count, live = 0;
    int error = ns_summary_read(ns, segment, &entries, &count);
    if (error) {
        struct hifc_error why;
        hifc_error_copy(&why);
        problem(state, "%s", why.message);
        return error == -ENOMEM ? error : 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct hifc_disk_entry *entry = &entries[i].entry;
        ns_lock(ns);
        const struct hifc_slot *slot = hifc_index_find(ns->index, &entry->key);
        bool here = slot && entry->kind == HIFC_ENTRY_VALUE && slot->segment == segment &&
                    slot->offset == entry->offset;
        if (here && (slot->length != entry->length || slot->checksum != entry->checksum)) {
            problem(state, "entry %u of segment %u differs from the index", i, segment);
        }
        ns_unlock(ns);
        live += here;
    }
    if (live != ns->segments[segment].live_entries) {
        problem(state, "segment %u: the index names %u entries, its summary has %u of them",
                segment, ns->segments[segment].live_entries, live);
    }
    error = check_headers(state, segment, entries, count, ns->segments[segment].used_bytes);
    free(entries);
    return error;
}

static int check_superblock(struct state *state)
{
    struct hifc_superblock sb;
    uint64_t highest;
    int error = hifc_superblock_read(state->ns->io, &sb, &highest);
    if (error) {
        return error;
    }
    if (sb.sequence < state->ns->sb.sequence || sb.open_epoch != state->ns->sb.open_epoch) {
        problem(state, "the superblock went back from %" PRIu64 " to %" PRIu64,
                state->ns->sb.sequence, sb.sequence);
    }
    return 0;
}

/* ---- payloads ------------------------------------------------------------------------------- */

static bool payload_good(const struct hifc_slot *slot, uint32_t parts, const uint8_t *value)
{
    uint32_t size = slot->length / parts;
    const uint8_t *table = value + hifc_table_offset(slot->length);
    for (uint32_t i = 0; parts > 1 && i < parts; i++) {
        uint32_t raw = hifc_crc32c_update(0, value + (size_t)i * size, size);
        if (memcmp(&raw, table + i * 4ull, sizeof raw) != 0) {
            return false;
        }
    }
    uint32_t raw = parts > 1 ? hifc_crc32c_update(0, table, parts * 4ull)
                             : hifc_crc32c_update(0, value, slot->length);
    return hifc_bind_checksum(raw, &slot->key, slot->length, parts) == slot->checksum;
}

static int check_payload(struct state *state, const struct hifc_slot *slot)
{
    struct hifc_ns *ns = state->ns;
    uint32_t parts = ns_slot_parts(ns, slot);
    uint64_t at = ns_segment_base(ns, slot->segment) + (uint64_t)slot->offset * HIFC_UNIT_BYTES;
    uint64_t first = at / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    uint64_t end = at + hifc_extent_bytes(slot->length, parts);
    uint64_t bytes = hifc_whole_pages(end - first);
    uint8_t *memory = aligned_alloc(HIFC_PAGE_BYTES, bytes);
    if (!memory) {
        return hifc_fail(-ENOMEM, "no memory to verify a value of %u bytes", slot->length);
    }
    int error = hifc_blockio_read(ns->io, first, memory, bytes);
    if (error || !payload_good(slot, parts, memory + (at - first))) {
        problem(state, "the value in segment %u at %u, %u bytes, %s", slot->segment,
                slot->offset * HIFC_UNIT_BYTES, slot->length,
                error ? "cannot be read" : "does not match its checksum");
    }
    free(memory);
    return 0;
}

static int check_all(struct hifc_ns *ns, uint32_t kind, struct hifc_check_result *out)
{
    struct state state = {.ns = ns, .result = out};
    int error;
    ns_lock(ns);
    error = copy_index(&state);
    if (!error && kind & HIFC_CHECK_INDEX) {
        check_places(&state);
        check_accounts(&state);
    }
    ns_unlock(ns);
    for (uint32_t i = 0; i < ns->segment_count && !error && kind & HIFC_CHECK_INDEX; i++) {
        if (ns->segments[i].state == NS_SEALED && ns->segments[i].used_bytes > 0) {
            error = check_segment(&state, i);
        }
    }
    if (!error && kind & HIFC_CHECK_INDEX) {
        error = check_superblock(&state);
    }
    for (uint64_t i = 0; i < state.slot_count && !error; i++) {
        const struct hifc_slot *slot = &state.slots[i];
        if (kind & HIFC_CHECK_PAYLOAD &&
            !(slot->flags & (HIFC_SLOT_PENDING | HIFC_SLOT_QUARANTINED))) {
            error = check_payload(&state, slot);
        }
        out->entries_checked++;
    }
    free(state.slots);
    return error;
}

HIFC_API int hifc_check(struct hifc_ns *ns, uint32_t kind, struct hifc_check_result *out)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    memset(out, 0, sizeof *out);
    error = ns->read_only ? 0 : ns_settle(ns, 2000ll * ns->opts.command_timeout_ms);
    if (error) {
        return error;
    }
    ns_janitor_pause(ns); /* it would free a segment between two looks at it */
    error = check_all(ns, kind, out);
    ns_janitor_resume(ns);
    return error;
}
