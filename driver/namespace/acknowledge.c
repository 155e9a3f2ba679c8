/* SPDX-License-Identifier: Apache-2.0
 *
 * acknowledge.c - the write path, second half: transfers end, a segment acknowledges its batches in
 * the order of their headers, and only then do their entries become visible.
 *
 * A failed write ends its segment: what was acknowledged stays, everything after it that was not
 * is appended to another segment, NS_APPEND_ATTEMPTS_MAX times in all. Mutex held, except in the
 * callback.
 */

#include "namespace/ns.h"
#include "util/invariant.h"

/* There is room: whoever appended the entry reserved it. */
static void entries_add(struct ns_open *open, const struct hifc_disk_entry *entry,
                        uint64_t sequence)
{
    struct hifc_summary_entry *to = &open->entries[open->entry_count++];
    to->entry = *entry;
    to->sequence = sequence;
    if (entry->kind == HIFC_ENTRY_PUBLISH) {
        to->entry.kind = HIFC_ENTRY_VALUE;
    }
}

/* Answers a request; a move's answer is for the janitor, which waits for it and frees it. */
static void op_done(struct hifc_ns *ns, struct ns_op *op, int status, uint64_t bytes,
                    const struct hifc_error *error)
{
    if (op->req) {
        ns_answer(ns, op->ticket, op->req, op->callers_pool, status, bytes, error);
        ns_op_free(ns, op);
    } else {
        op->status = status;
        op->pending = 0;
    }
}

/* The entry of op is on the device and everything before it is: it becomes visible. */
static void op_acknowledge(struct hifc_ns *ns, struct ns_op *op)
{
    struct hifc_slot *slot = hifc_index_find(ns->index, &op->key);
    uint64_t bytes = op->length;
    switch (op->kind) {
    case NS_OP_MOVE:
        /* A lease that came meanwhile holds the segment it stood in: there it stays. */
        if (ns_slot_at(slot, op->previous.segment, op->previous.offset) &&
            ns->segments[op->previous.segment].leases == 0) {
            ns_slot_dead(ns, slot);
            slot->segment = op->segment;
            slot->offset = op->offset;
            slot->heat /= 2;
            ns->stats.reinserted_bytes += op->length;
        } else {
            ns_segment_dead(ns, op->segment, op->length, op->part_count);
        }
        break;
    case NS_OP_TOMBSTONE:
        ns->segments[op->segment].tombstones++;
        bytes = 0;
        break;
    default:
        hifc_assert(slot && slot->flags & HIFC_SLOT_PENDING);
        hifc_assert(slot->segment == op->segment && slot->offset == op->offset);
        slot->flags &= (uint8_t)~HIFC_SLOT_PENDING;
        if (op->has_previous) {
            ns_slot_dead(ns, &op->previous);
            ns_segment_unpin(ns, op->previous.segment);
            hifc_count_down(ns->entries_swap, op->previous.flags & HIFC_SLOT_SWAP ? 1u : 0u);
        }
        ns->entries_swap += op->cls == HIFC_SWAP;
        ns->stats.put_count++;
        ns->stats.put_bytes += op->length;
        ns->reinsert_credit_bytes +=
            (int64_t)op->length * (ns->opts.reinsert_percent_plus1 - 1) / 100;
        if (op->cls == HIFC_REUSE) {
            ns_events_add(&ns->events, &op->key, HIFC_EVENT_STORED, op->length);
        }
    }
    if (op->reservation) {
        ns_reservation_release(ns, op->reservation);
    }
    op_done(ns, op, HIFC_OK, bytes, NULL);
}

/* Takes back what a put or publish did to the index. */
static void op_undo(struct hifc_ns *ns, struct ns_op *op)
{
    if (op->kind == NS_OP_TOMBSTONE || op->kind == NS_OP_MOVE) {
        return;
    }
    struct hifc_slot *slot = hifc_index_find(ns->index, &op->key);
    if (op->has_previous) {
        *slot = op->previous;
        ns_segment_unpin(ns, op->previous.segment);
    } else {
        hifc_index_remove(ns->index, slot);
    }
}

static void op_fail(struct hifc_ns *ns, struct ns_op *op, int error)
{
    op_undo(ns, op);
    if (op->reservation) {
        ns_reservation_release(ns, op->reservation);
    }
    op_done(ns, op, error, 0, &ns->last_device_error);
}

/* An entry whose batch cannot be acknowledged: elsewhere, or the error. */
static void op_relocate(struct hifc_ns *ns, struct ns_op *op, int error)
{
    static const unsigned put_stream[] = {[HIFC_REUSE] = NS_STREAM_REUSE,
                                          [HIFC_SWAP] = NS_STREAM_SWAP};
    if (op->kind == NS_OP_PUBLISH) {
        ns_segment_dead(ns, op->segment, op->length, op->part_count);
        op_fail(ns, op, error);
        return;
    }
    const struct hifc_slot *newer = hifc_index_find(ns->index, &op->key);
    if (op->kind == NS_OP_TOMBSTONE && newer) {
        /* Put again in the meantime: with a new sequence it would delete what came after it. That
         * hides what was deleted just as well, once it is there. */
        if (newer->flags & HIFC_SLOT_PENDING) {
            op_fail(ns, op, error);
        } else {
            op_done(ns, op, HIFC_OK, 0, NULL);
        }
        return;
    }
    if (op->kind != NS_OP_TOMBSTONE) {
        ns_segment_dead(ns, op->segment, op->length, op->part_count);
    }
    if (op->kind == NS_OP_MOVE || ++op->attempts >= NS_APPEND_ATTEMPTS_MAX) {
        op_fail(ns, op, error);
        return;
    }
    int status = ns_append(ns, op, put_stream[op->cls]);
    if (status != 0) {
        op_fail(ns, op, error);
        return;
    }
    if (op->kind == NS_OP_PUT) {
        struct hifc_slot *slot = hifc_index_find(ns->index, &op->key);
        slot->segment = op->segment;
        slot->offset = op->offset;
    }
}

static void batch_acknowledge(struct hifc_ns *ns, struct ns_batch *batch)
{
    struct ns_open *open = batch->open;
    /* In the order of their headers: what follows is not visible before what it may replace. */
    hifc_assert(batch->completed && batch->error == 0 && !open->failed);
    hifc_assert(batch->header->index == open->acknowledged_batches);
    hifc_assert(batch->sequence > open->last_sequence);
    for (uint32_t i = 0; i < batch->entry_count; i++) {
        const struct hifc_disk_entry *entry = &batch->header->entries[i];
        if (entry->kind != HIFC_ENTRY_RESERVED) {
            entries_add(open, entry, batch->sequence);
        }
    }
    if (open->first_sequence == 0) {
        open->first_sequence = batch->sequence;
    }
    open->last_sequence = batch->sequence;
    open->acknowledged_chain = batch->header->head.checksum;
    open->acknowledged_batches++;
    open->acknowledged_bytes = batch->offset + batch->bytes;
    for (struct ns_op *op = batch->ops, *next; op; op = next) {
        next = op->next;
        op_acknowledge(ns, op);
    }
}

/* Takes every batch that was not acknowledged out of a failed segment. */
static void open_abandon(struct hifc_ns *ns, struct ns_open *open, int error)
{
    if (open->forming) {
        /* It never got a sequence number or an index: just forget it. */
        *open->tail = open->forming;
        open->tail = &open->forming->next;
        open->forming = NULL;
    }
    struct ns_batch *list = open->head;
    open->head = NULL;
    open->tail = &open->head;
    ns_reservations_fail(ns, open->segment);
    ns_open_close(ns, open);
    for (struct ns_batch *batch = list, *next; batch; batch = next) {
        next = batch->next;
        for (struct ns_op *op = batch->ops, *after; op; op = after) {
            after = op->next;
            op_relocate(ns, op, error);
        }
        ns_batch_release(ns, batch);
    }
}

/* Acknowledges, in order, what has completed of a segment. */
static void open_advance(struct hifc_ns *ns, struct ns_open *open)
{
    while (open->head && open->head->completed && open->header_done && !open->failed) {
        struct ns_batch *batch = open->head;
        if (batch->error != 0) {
            open->failed = true;
            break;
        }
        open->head = batch->next;
        if (!open->head) {
            open->tail = &open->head;
        }
        batch_acknowledge(ns, batch);
        ns_batch_release(ns, batch);
    }
    if (open->failed && open->inflight == 0 && open->header_done) {
        int error = ns->last_device_error.code ? ns->last_device_error.code : -EIO;
        open_abandon(ns, open, error);
    }
    if (ns->segments[open->segment].state == NS_CLOSING) {
        ns_want_janitor(ns);
    }
}

static void sequence_advance(struct hifc_ns *ns)
{
    while (ns->global_head && ns->global_head->completed) {
        struct ns_batch *batch = ns->global_head;
        ns->completed_sequence = batch->sequence;
        ns->global_head = batch->next_global;
        ns_batch_release(ns, batch);
    }
    if (!ns->global_head) {
        ns->global_tail = &ns->global_head;
    }
}

void ns_batches_completed(struct hifc_ns *ns, struct ns_batch *list)
{
    for (struct ns_batch *batch = list; batch; batch = batch->next_done) {
        hifc_assert(!batch->completed && batch->pending == 0 && batch->holders > 0);
        batch->completed = true;
        hifc_count_down(batch->open->inflight, 1u);
        if (batch->error != 0) {
            ns_command_error(ns, &batch->failed, &ns->last_device_error);
            ns->stats.device_error_count++;
        }
    }
    for (struct ns_batch *batch = list, *next; batch; batch = next) {
        next = batch->next_done;
        open_advance(ns, batch->open);
    }
    sequence_advance(ns);
    ns_close_forming(ns, false);
}

void ns_headers_completed(struct hifc_ns *ns, struct ns_open *list)
{
    for (struct ns_open *open = list, *next; open; open = next) {
        next = open->next_done;
        open->header_done = true;
        if (open->header_xfer.error != 0) {
            open->failed = true;
            ns->stats.device_error_count++;
            struct ns_command failed = ns_failed_command(&open->header_xfer, NS_OPCODE_WRITE);
            ns_command_error(ns, &failed, &ns->last_device_error);
        }
        open_advance(ns, open);
    }
}
