/* SPDX-License-Identifier: Apache-2.0
 *
 * open.c - what open makes of a recovery: the segment table, the index, and a summary for each
 * segment that was open when the last owner stopped. Runs before anything else does, so it takes no
 * mutex.
 */
#include "format/recover.h"

#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/clock.h"

struct recovery {
    struct hifc_ns *ns;
    uint64_t applied; /* values so far */
    uint64_t shape_applied[NS_PART_COUNTS_MAX]; /* `applied` when a part count was last seen */
};

static void keep_entries(struct ns_segment *segment, const struct hifc_recovered_segment *found)
{
    size_t bytes = found->entry_count * sizeof *found->entries;
    segment->entries = malloc(bytes ? bytes : 1);
    if (segment->entries && bytes > 0) {
        memcpy(segment->entries, found->entries, bytes);
    }
    segment->entry_count = found->entry_count;
}

/* A segment that was open is sealed with what was accepted and never appended to again. */
static int seal_scanned(struct hifc_ns *ns, const struct hifc_recovered_segment *found)
{
    struct ns_segment *segment = &ns->segments[found->segment];
    struct hifc_footer footer = {.epoch = found->epoch,
                                 .first_sequence = found->first_sequence,
                                 .last_sequence = found->last_sequence,
                                 .batch_count = found->batch_count,
                                 .chain = found->chain,
                                 .used_bytes = found->used_bytes,
                                 .cls = found->cls};
    /* What was accepted by its payload may still sit in a volatile cache: the summary must not
     * reach the media before it. */
    int error = ns->read_only ? -EROFS : hifc_blockio_flush(ns->io);
    error = error ? error
                  : ns_seal_write(ns, found->segment, &footer, found->entries, found->entry_count);
    if (error == -EROFS || error == -ENOSPC) { /* on a full disk the next open scans it again */
        keep_entries(segment, found);
        error = segment->entries ? 0 : hifc_fail(-ENOMEM, "no memory for a summary");
    }
    return error;
}

static int segment_found(void *ctx, const struct hifc_recovered_segment *found)
{
    struct hifc_ns *ns = ((struct recovery *)ctx)->ns;
    struct ns_segment *segment = &ns->segments[found->segment];
    segment->generation = found->generation;
    segment->cls = found->cls;
    segment->open_sequence = found->open_sequence;
    if (found->state == HIFC_RECOVERED_FREE) {
        return 0; /* as it was created */
    }
    ns_segment_enter(ns, found->segment,
                     found->state == HIFC_RECOVERED_DAMAGED ? NS_DAMAGED : NS_SEALED);
    switch (found->state) {
    case HIFC_RECOVERED_DAMAGED:
        segment->cls = HIFC_REUSE; /* unknown: so that tombstones are kept while it is there */
        segment->metadata_bytes = ns->segment_size;
        return 0;
    case HIFC_RECOVERED_SWAP_DEAD:
        segment->metadata_bytes = HIFC_PAGE_BYTES;
        ns->janitor_wanted = true;
        return 0;
    default:
        segment->used_bytes = found->used_bytes;
        segment->metadata_bytes =
            (found->batch_count + 2) * HIFC_PAGE_BYTES +
            (uint32_t)hifc_summary_bytes(found->entry_count);
        segment->payload_bytes =
            found->used_bytes - (found->batch_count + 1) * HIFC_PAGE_BYTES;
        if (found->entry_count == 0) {
            ns->janitor_wanted = true;
        }
        return found->state == HIFC_RECOVERED_SCANNED ? seal_scanned(ns, found) : 0;
    }
}

/* Entries that were evicted come back where their segment was not freed before a crash, and only so
 * can more part counts be found here than were ever in use at a time. They are the oldest: of the
 * part count that was not seen for longest, all go again. */
static void evict_oldest_shape(struct recovery *recovery)
{
    struct hifc_ns *ns = recovery->ns;
    unsigned oldest = 1;
    for (unsigned i = 2; i < NS_PART_COUNTS_MAX; i++) {
        oldest = recovery->shape_applied[i] < recovery->shape_applied[oldest] ? i : oldest;
    }
    uint64_t cursor = 0;
    for (struct hifc_slot *slot; (slot = hifc_index_next(ns->index, &cursor));) {
        if (hifc_slot_shape(slot) == oldest) {
            ns->stats.evicted_count++;
            ns->stats.evicted_bytes += slot->length;
            ns_slot_dead(ns, slot);
            hifc_index_remove(ns->index, slot);
        }
    }
}

static int apply_value(struct recovery *recovery, uint32_t segment,
                       const struct hifc_disk_entry *entry, struct hifc_slot *slot)
{
    struct hifc_ns *ns = recovery->ns;
    uint32_t parts = entry->part_count > 1 ? entry->part_count : 1;
    if (slot) {
        ns_slot_dead(ns, slot);
    }
    int shape = ns_part_counts_index(&ns->part_counts, parts);
    if (shape < 0) {
        if (slot) {
            hifc_index_remove(ns->index, slot);
        }
        slot = NULL;
        evict_oldest_shape(recovery);
        shape = ns_part_counts_index(&ns->part_counts, parts);
    }
    slot = slot ? slot : hifc_index_insert(ns->index, &entry->key);
    if (!slot) {
        return hifc_fail(-EINVAL, "more entries than index_entries_max allows: raise it");
    }
    recovery->shape_applied[shape] = ++recovery->applied;
    slot->checksum = entry->checksum;
    slot->segment = segment;
    slot->offset = entry->offset;
    slot->length = entry->length;
    slot->heat = 0;
    slot->flags = HIFC_SLOT_USED;
    hifc_slot_set_shape(slot, (unsigned)shape);
    ns_segment_live(ns, segment, entry->length, parts);
    return 0;
}

static int entry_found(void *ctx, uint32_t segment, const struct hifc_summary_entry *summary)
{
    struct recovery *recovery = ctx;
    struct hifc_ns *ns = recovery->ns;
    const struct hifc_disk_entry *entry = &summary->entry;
    struct hifc_slot *slot = hifc_index_find(ns->index, &entry->key);
    if (entry->kind == HIFC_ENTRY_TOMBSTONE) {
        ns->segments[segment].tombstones++;
        if (slot) {
            ns_slot_dead(ns, slot);
            hifc_index_remove(ns->index, slot);
        }
        return 0;
    }
    return apply_value(recovery, segment, entry, slot);
}

static void entry_ahead(void *ctx, const struct hifc_summary_entry *summary)
{
    struct recovery *recovery = ctx;
    hifc_index_prefetch(recovery->ns->index, &summary->entry.key);
}

int ns_recover(struct hifc_ns *ns)
{
    struct hifc_recover_opts opts = {0};
    struct recovery recovery = {.ns = ns};
    struct hifc_recover_callbacks callbacks = {
        .ctx = &recovery, .segment = segment_found, .apply = entry_found, .ahead = entry_ahead};
    struct hifc_recover_result result;
    uint64_t start = hifc_now_ns();
    int error = hifc_recover(ns->io, &ns->sb, &opts, &callbacks, &result);
    if (error) {
        return error;
    }
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        if (ns->segments[i].state == NS_FREE) {
            ns_free_add(ns, i, ns->read_only || !ns->device->geometry.thin);
        } else if (ns->segments[i].live_entries == 0) {
            ns->janitor_wanted = true;
        }
    }
    while (ns_room_low(ns, 0) && ns_room_one(ns)) {
    }
    ns->sequence = ns->completed_sequence = result.next_sequence - 1;
    ns->flushed_sequence = result.flushed_sequence;
    ns->stats.recovery_ns = hifc_now_ns() - start;
    ns->stats.recovered_entries = hifc_index_count(ns->index);
    ns->stats.recovery_dropped = result.dropped;
    ns->stats.recovery_damaged = result.damaged;
    return 0;
}
