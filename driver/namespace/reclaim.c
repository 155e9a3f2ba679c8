/* SPDX-License-Identifier: Apache-2.0
 *
 * reclaim.c - getting segments back.
 *
 * A segment with nothing live is freed at once. When free segments run low, swap segments that are
 * half dead are compacted; else the oldest reuse segment goes: its hot entries are reinserted
 * within the write budget, the others evicted. Nothing is overwritten before what replaces it is
 * flushed: moved copies flushed, header overwritten as free with the next generation, flushed,
 * then deallocated, then reused. The janitor's thread; blocks.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/crc32c.h"

#define MOVES_MAX 16u                /* entries moved at a time ... */
#define MOVE_BYTES_MAX (32u << 20)   /* ... and their bytes, unless one alone is larger */
#define HOT_HEAT 1u                  /* accesses since it was written that make an entry hot */
#define COMPACT_BELOW_PERCENT 50u    /* live: swap segments compacted before reuse is evicted */
#define COMPACT_DEAD_PERCENT 10u     /* dead: less would gain too little for what it moves */
#define PIN_WAIT_NS 60000000000ull

/* ---- freeing -------------------------------------------------------------------------------- */

int ns_write_free_header(struct hifc_ns *ns, uint32_t segment)
{
    struct hifc_segment_header *header = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    if (!header) {
        return hifc_fail(-ENOMEM, "no memory for a segment header");
    }
    memset(header, 0, sizeof *header);
    header->generation = ns->segments[segment].generation + 1;
    header->epoch = ns->sb.open_epoch;
    header->segment = segment;
    header->state = HIFC_DISK_FREE;
    hifc_page_seal(header, HIFC_MAGIC_SEGMENT, ns->sb.uuid, ns_segment_base(ns, segment), 0);
    int error = hifc_blockio_write(ns->io, ns_segment_base(ns, segment), header, sizeof *header);
    free(header);
    return error;
}

/* Segments in state RECLAIMING with nothing live and nobody reading. */
static int free_segments(struct hifc_ns *ns, const uint32_t *list, uint32_t count)
{
    bool has_room[NS_RECLAIM_DEAD_MAX] = {false};
    uint32_t kept = 0;
    int error = ns_flush(ns);
    for (uint32_t i = 0; i < count && !error; i++) {
        error = ns_write_free_header(ns, list[i]);
    }
    if (!error) {
        error = hifc_blockio_flush(ns->io);
    }
    for (uint32_t i = 0; i < count && !error; i++) {
        ns_lock(ns);
        bool keep = ns_room_low(ns, kept);
        ns_unlock(ns);
        has_room[i] = ns_room_of_freed(ns, list[i], keep);
        kept += has_room[i];
    }
    ns_lock(ns);
    ns->stats.flush_count++;
    for (uint32_t i = 0; i < count; i++) {
        if (error) {
            ns_segment_enter(ns, list[i], NS_SEALED);
            continue;
        }
        ns_segment_reset(ns, list[i], ns->segments[list[i]].generation + 1);
        ns_free_add(ns, list[i], has_room[i]);
        ns->stats.reclaimed_segments++;
    }
    pthread_cond_broadcast(&ns->changed);
    ns_unlock(ns);
    return error;
}

int ns_reclaim_dead(struct hifc_ns *ns)
{
    uint32_t list[NS_RECLAIM_DEAD_MAX], count = 0;
    ns_lock(ns);
    for (uint32_t i = 0; i < ns->segment_count && count < NS_RECLAIM_DEAD_MAX; i++) {
        struct ns_segment *segment = &ns->segments[i];
        bool tombstones = segment->cls == HIFC_REUSE && segment->tombstones > 0;
        if (segment->state == NS_SEALED && segment->live_entries == 0 && segment->pins == 0 &&
            segment->leases == 0 && !tombstones) {
            ns_segment_enter(ns, i, NS_RECLAIMING);
            list[count++] = i;
        }
    }
    ns_unlock(ns);
    if (count == 0) {
        return 0;
    }
    int error = free_segments(ns, list, count);
    return error ? error : (int)count;
}

int ns_summary_read(struct hifc_ns *ns, uint32_t segment, struct hifc_summary_entry **entries,
                    uint32_t *entry_count)
{
    struct ns_segment *state = &ns->segments[segment];
    if (state->entries) {
        size_t bytes = state->entry_count * sizeof **entries;
        *entries = malloc(bytes ? bytes : 1);
        *entry_count = state->entry_count;
        if (!*entries) {
            return hifc_fail(-ENOMEM, "no memory for a summary");
        }
        memcpy(*entries, state->entries, bytes);
        return 0;
    }
    struct hifc_footer *footer = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    if (!footer) {
        return hifc_fail(-ENOMEM, "no memory for a footer");
    }
    uint64_t base = ns_segment_base(ns, segment);
    uint64_t at = base + ns->segment_size - HIFC_PAGE_BYTES;
    int error = hifc_blockio_read(ns->io, at, footer, HIFC_PAGE_BYTES);
    if (!error && (!hifc_page_valid(footer, HIFC_MAGIC_FOOTER, ns->sb.uuid, at,
                                    state->generation) ||
                   footer->summary_offset % HIFC_PAGE_BYTES != 0 ||
                   footer->summary_offset > ns->segment_size - HIFC_PAGE_BYTES)) {
        error = hifc_fail(-EBADMSG, "the footer of segment %u is damaged: run hifc-admin fsck",
                          segment);
    }
    uint8_t *memory = NULL;
    if (!error) {
        uint64_t bytes = ns->segment_size - HIFC_PAGE_BYTES - footer->summary_offset;
        memory = aligned_alloc(HIFC_PAGE_BYTES, bytes ? bytes : HIFC_PAGE_BYTES);
        if (!memory) {
            error = hifc_fail(-ENOMEM, "no memory for a summary of %u entries",
                              footer->entry_count);
        } else if (bytes > 0) {
            error = hifc_blockio_read(ns->io, base + footer->summary_offset, memory, bytes);
        }
        if (!error && ((uint64_t)footer->entry_count * sizeof **entries > bytes ||
                       hifc_summary_checksum((void *)memory, footer->entry_count, ns->sb.uuid,
                                             base + footer->summary_offset, state->generation) !=
                           footer->summary_checksum)) {
            error = hifc_fail(-EBADMSG, "the summary of segment %u is damaged: run hifc-admin fsck",
                              segment);
        }
    }
    *entry_count = footer->entry_count;
    *entries = (struct hifc_summary_entry *)memory;
    free(footer);
    if (error) {
        free(memory);
    }
    return error;
}

/* ---- choosing, mutex held ------------------------------------------------------------------- */

#define NO_SEGMENT UINT32_MAX

static uint32_t choose(const struct hifc_ns *ns)
{
    uint32_t oldest = NO_SEGMENT, emptiest = NO_SEGMENT;
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        const struct ns_segment *s = &ns->segments[i];
        if (s->state != NS_SEALED || s->leases > 0 || s->stuck) {
            continue;
        }
        if (s->cls == HIFC_SWAP) {
            uint64_t dead = s->payload_bytes - s->live_bytes;
            if (dead * 100 < (uint64_t)ns->segment_size * COMPACT_DEAD_PERCENT) {
                continue;
            }
            if (emptiest == NO_SEGMENT || s->live_bytes < ns->segments[emptiest].live_bytes) {
                emptiest = i;
            }
        } else if (oldest == NO_SEGMENT || s->open_sequence < ns->segments[oldest].open_sequence) {
            oldest = i;
        }
    }
    uint64_t live = emptiest == NO_SEGMENT ? 0 : ns->segments[emptiest].live_bytes * 100;
    if (emptiest != NO_SEGMENT && live <= (uint64_t)ns->segment_size * COMPACT_BELOW_PERCENT) {
        return emptiest;
    }
    return oldest != NO_SEGMENT ? oldest : emptiest;
}

/* A tombstone still hides something only while a reuse segment is left that was opened before it was
 * written. Returns when the oldest of them, the victim aside, was opened: the victim's tombstones
 * with an earlier sequence are not needed any more. It is computed once a victim, not for every
 * tombstone; a segment that is opened later cannot be older. */
static uint64_t oldest_beside(const struct hifc_ns *ns, uint32_t victim)
{
    uint64_t oldest = UINT64_MAX;
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        const struct ns_segment *s = &ns->segments[i];
        if (i != victim && s->state != NS_FREE && s->cls == HIFC_REUSE) {
            uint64_t opened = s->state == NS_DAMAGED ? 0 : s->open_sequence;
            oldest = opened < oldest ? opened : oldest;
        }
    }
    return oldest;
}

/* ---- moving --------------------------------------------------------------------------------- */

struct moves {
    struct ns_op *ops[MOVES_MAX];
    uint8_t *memory[MOVES_MAX];
    uint32_t memory_bytes[MOVES_MAX];
    uint32_t count;
    uint64_t bytes;
    uint64_t oldest; /* oldest_beside the victim */
};

static void evict(struct hifc_ns *ns, struct hifc_slot *slot)
{
    bool quarantined = slot->flags & HIFC_SLOT_QUARANTINED;
    ns->stats.evicted_count++;
    ns->stats.evicted_bytes += slot->length;
    if (!quarantined) {
        ns_events_add(&ns->events, &slot->key, HIFC_EVENT_EVICTED, slot->length);
    }
    ns_slot_dead(ns, slot);
    hifc_index_remove(ns->index, slot);
}

/* Reads one entry into memory of our own and checks it: 0, or why it cannot be moved. */
static int move_read(struct hifc_ns *ns, uint32_t segment, const struct hifc_disk_entry *entry,
                     uint8_t *memory, uint32_t memory_bytes)
{
    uint64_t at = ns_segment_base(ns, segment) + (uint64_t)entry->offset * HIFC_UNIT_BYTES;
    uint64_t page = at / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    int error = hifc_blockio_read(ns->io, page, memory, memory_bytes);
    if (error) {
        return error;
    }
    const uint8_t *value = memory + (at - page);
    uint32_t raw = entry->part_count > 1
                       ? hifc_crc32c_update(0, value + hifc_table_offset(entry->length),
                                            entry->part_count * 4ull)
                       : hifc_crc32c_update(0, value, entry->length);
    return hifc_bind_checksum(raw, &entry->key, entry->length, entry->part_count) ==
                   entry->checksum
               ? 0
               : hifc_fail(-EBADMSG, "an entry of segment %u fails its checksum", segment);
}

/* Appends what has been read and waits until it is acknowledged. 0, or why it stopped. */
static int moves_finish(struct hifc_ns *ns, struct moves *moves)
{
    int error = 0;
    ns_lock(ns);
    for (uint32_t i = 0; i < moves->count; i++) {
        struct ns_op *op = moves->ops[i];
        struct hifc_slot *slot = hifc_index_find(ns->index, &op->key);
        op->pending = 0;
        op->status = HIFC_OK;
        if (op->kind == NS_OP_MOVE &&
            !ns_slot_at(slot, op->previous.segment, op->previous.offset)) {
            continue; /* deleted or replaced in the meantime */
        }
        if (op->kind == NS_OP_TOMBSTONE && slot) {
            continue; /* put again: the newer entry wins without it */
        }
        unsigned stream = op->cls == HIFC_SWAP ? NS_STREAM_SWAP_MOVED : NS_STREAM_REUSE_MOVED;
        op->pending = 1;
        int status = ns_append(ns, op, stream);
        if (status != 0) {
            op->pending = 0;
            op->status = status;
        }
    }
    ns_close_forming(ns, true);
    ns_unlock_and_issue(ns);

    ns_lock(ns);
    for (uint32_t i = 0; i < moves->count; i++) {
        struct ns_op *op = moves->ops[i];
        while (op->pending != 0) {
            ns_wait_changed(ns);
        }
        if (op->status != HIFC_OK && op->kind == NS_OP_MOVE && op->cls == HIFC_REUSE &&
            ns->segments[op->previous.segment].leases == 0) {
            struct hifc_slot *slot = hifc_index_find(ns->index, &op->key);
            if (ns_slot_at(slot, op->previous.segment, op->previous.offset)) {
                evict(ns, slot); /* no room for it: it may go */
            }
        } else if (op->status != HIFC_OK) {
            error = op->status > 0 ? -EAGAIN : op->status;
        }
        op->computed = op->crcs_inline; /* it pointed into the memory below */
        ns_op_free(ns, op);
        if (moves->memory[i]) {
            ns_pages_free(&ns->pages, moves->memory[i], moves->memory_bytes[i]);
        }
    }
    ns_unlock(ns);
    moves->count = 0;
    moves->bytes = 0;
    return error;
}

/* Mutex held. An operation for one entry of the victim, with memory for its bytes. */
static int moves_add(struct hifc_ns *ns, struct moves *moves, uint32_t segment,
                     const struct hifc_disk_entry *entry, const struct hifc_slot *slot)
{
    struct ns_op *op = ns_op_alloc(ns);
    uint8_t *memory = NULL;
    uint32_t bytes = 0;
    if (op && slot) {
        uint64_t extent = hifc_extent_bytes(entry->length, entry->part_count);
        bytes = (uint32_t)hifc_whole_pages(extent);
        memory = ns_pages_alloc(&ns->pages, bytes);
    }
    if (!op || (slot && !memory)) {
        if (op) {
            ns_op_free(ns, op);
        }
        return -ENOMEM;
    }
    op->kind = slot ? NS_OP_MOVE : NS_OP_TOMBSTONE;
    op->key = entry->key;
    op->cls = ns->segments[segment].cls;
    op->length = entry->length;
    op->part_count = entry->part_count;
    op->checksum = entry->checksum;
    if (slot) {
        op->previous = *slot;
        uint32_t within = entry->offset * HIFC_UNIT_BYTES % HIFC_PAGE_BYTES;
        op->payload = (struct hifc_span){.base = memory + within, .bytes = entry->length};
        op->computed = (uint32_t *)(memory + within + hifc_table_offset(entry->length));
    }
    moves->ops[moves->count] = op;
    moves->memory[moves->count] = memory;
    moves->memory_bytes[moves->count] = bytes;
    moves->count++;
    moves->bytes += bytes;
    return 0;
}

/* ---- one victim ----------------------------------------------------------------------------- */

enum verdict { VERDICT_DEAD, VERDICT_EVICT, VERDICT_MOVE };

static enum verdict judge(struct hifc_ns *ns, uint32_t segment, const struct hifc_disk_entry *entry,
                          const struct hifc_slot *slot)
{
    if (!ns_slot_at(slot, segment, entry->offset)) {
        return VERDICT_DEAD;
    }
    if (slot->flags & HIFC_SLOT_QUARANTINED) {
        return slot->flags & HIFC_SLOT_SWAP ? VERDICT_MOVE : VERDICT_EVICT;
    }
    if (ns->segments[segment].cls == HIFC_SWAP) {
        return VERDICT_MOVE;
    }
    if (slot->heat >= HOT_HEAT && ns->reinsert_credit_bytes >= (int64_t)entry->length) {
        ns->reinsert_credit_bytes -= entry->length;
        return VERDICT_MOVE;
    }
    return VERDICT_EVICT;
}

/* The last move's bytes are not what they should be. A reuse entry goes; a swap entry is carried on
 * as it is, quarantined, so that its owner learns of it; what cannot be read at all stays. */
static int move_unreadable(struct hifc_ns *ns, uint32_t segment, struct moves *moves,
                           const struct hifc_disk_entry *entry, int error)
{
    ns_lock(ns);
    bool swap = ns->segments[segment].cls == HIFC_SWAP;
    struct hifc_slot *slot = hifc_index_find(ns->index, &entry->key);
    bool here = ns_slot_at(slot, segment, entry->offset);
    ns->stats.corrupt_count += error == -EBADMSG && here &&
                               !(slot->flags & HIFC_SLOT_QUARANTINED);
    if (swap && error == -EBADMSG) {
        if (here) {
            slot->flags |= HIFC_SLOT_QUARANTINED;
        }
        ns_unlock(ns);
        return 0;
    }
    if (here && !swap) {
        evict(ns, slot);
        error = 0;
    }
    moves->count--;
    moves->ops[moves->count]->computed = moves->ops[moves->count]->crcs_inline;
    ns_op_free(ns, moves->ops[moves->count]);
    ns_pages_free(&ns->pages, moves->memory[moves->count], moves->memory_bytes[moves->count]);
    ns_unlock(ns);
    return error;
}

/* One entry of the victim: forgets, evicts, or adds it to moves. -EBUSY: a lease came. */
static int handle_entry(struct hifc_ns *ns, uint32_t segment, struct moves *moves,
                        const struct hifc_summary_entry *summary)
{
    const struct hifc_disk_entry *entry = &summary->entry;
    int error = 0;
    uint32_t slot_moves = moves->count;
    ns_lock(ns);
    struct hifc_slot *slot = hifc_index_find(ns->index, &entry->key);
    if (ns->segments[segment].leases > 0) {
        error = -EBUSY;
    } else if (entry->kind == HIFC_ENTRY_TOMBSTONE) {
        if (!slot && moves->oldest <= summary->sequence) {
            error = moves_add(ns, moves, segment, entry, NULL);
        }
    } else {
        switch (judge(ns, segment, entry, slot)) {
        case VERDICT_DEAD:
            break;
        case VERDICT_EVICT:
            evict(ns, slot);
            break;
        case VERDICT_MOVE:
            error = moves_add(ns, moves, segment, entry, slot);
            if (error && ns->segments[segment].cls == HIFC_REUSE) {
                evict(ns, slot);
                error = 0;
            }
        }
    }
    ns_unlock(ns);
    if (error || moves->count == slot_moves || !moves->memory[slot_moves]) {
        return error;
    }
    error = move_read(ns, segment, entry, moves->memory[slot_moves],
                      moves->memory_bytes[slot_moves]);
    return error ? move_unreadable(ns, segment, moves, entry, error) : 0;
}

static int empty_segment(struct hifc_ns *ns, uint32_t segment)
{
    struct hifc_summary_entry *entries;
    uint32_t count;
    int error = ns_summary_read(ns, segment, &entries, &count);
    if (error) {
        return error;
    }
    struct moves *moves = calloc(1, sizeof *moves);
    error = moves ? 0 : hifc_fail(-ENOMEM, "no memory to reclaim");
    if (moves) {
        ns_lock(ns);
        moves->oldest = oldest_beside(ns, segment);
        ns_unlock(ns);
    }
    for (uint32_t i = 0; i < count && !error; i++) {
        error = handle_entry(ns, segment, moves, &entries[i]);
        if (moves->count == MOVES_MAX || moves->bytes >= MOVE_BYTES_MAX || error) {
            int finish = moves_finish(ns, moves);
            error = error ? error : finish;
        }
    }
    if (moves && moves->count > 0) {
        int finish = moves_finish(ns, moves);
        error = error ? error : finish;
    }
    free(moves);
    free(entries);
    return error;
}

/* Waits, within a bound, until nobody reads the segment. Mutex held. */
static bool wait_unpinned(struct hifc_ns *ns, uint32_t segment)
{
    uint64_t deadline = hifc_now_ns() + PIN_WAIT_NS;
    while (ns->segments[segment].pins > 0 && hifc_now_ns() < deadline) {
        ns_wait_changed(ns);
    }
    return ns->segments[segment].pins == 0;
}

int ns_reclaim_one(struct hifc_ns *ns)
{
    ns_lock(ns);
    uint32_t segment = choose(ns);
    if (segment == NO_SEGMENT) {
        ns_unlock(ns);
        return 0;
    }
    ns_segment_enter(ns, segment, NS_RECLAIMING);
    ns_unlock(ns);

    int error = empty_segment(ns, segment);
    ns_lock(ns);
    bool emptied = !error && wait_unpinned(ns, segment) &&
                   ns->segments[segment].live_entries == 0 && ns->segments[segment].leases == 0;
    if (!emptied) {
        /* Transient (a lease, a reader, a full pool): retry later. It does not mean that the
         * device is full. */
        bool passing = error == 0 || error == -EBUSY || error == -ENOMEM;
        bool no_room = error == -EAGAIN || error == -ENOSPC;
        ns_segment_enter(ns, segment, NS_SEALED);
        ns->segments[segment].stuck = !passing && !no_room;
        ns_unlock(ns);
        return passing ? -EAGAIN : no_room ? 0 : error;
    }
    ns_unlock(ns);
    error = free_segments(ns, &segment, 1);
    return error == -ENOSPC ? 0 : error ? error : 1;
}
