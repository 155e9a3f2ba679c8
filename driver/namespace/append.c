/* SPDX-License-Identifier: Apache-2.0
 *
 * append.c - the write path, first half: entries gather in a forming batch, and a batch goes out as
 * one transfer. acknowledge.c has the second half.
 *
 * A batch closes when it is full, when its segment is, or when fewer than batch_inflight batches of
 * its segment are on their way: so a lone put goes out at once, and under load puts coalesce.
 * Mutex held.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"

/* ---- forming -------------------------------------------------------------------------------- */

void ns_batch_close(struct hifc_ns *ns, struct ns_batch *batch)
{
    struct ns_open *open = batch->open;
    struct hifc_batch_header *header = batch->header;
    uint64_t base = ns_segment_base(ns, open->segment);

    batch->sequence = ++ns->sequence;
    header->generation = ns->segments[open->segment].generation;
    header->epoch = ns->sb.open_epoch;
    header->sequence = batch->sequence;
    header->flushed_sequence = ns->flushed_sequence;
    header->segment = open->segment;
    header->index = open->batch_count++;
    header->previous = open->chain;
    header->length_pages = batch->bytes / HIFC_PAGE_BYTES;
    header->entry_count = batch->entry_count;
    memset(header->reserved, 0, sizeof header->reserved);
    memset(&header->entries[batch->entry_count], 0,
           (HIFC_BATCH_ENTRIES_MAX - batch->entry_count) * sizeof header->entries[0]);
    hifc_page_seal(header, HIFC_MAGIC_BATCH, ns->sb.uuid, base + batch->offset,
                   header->generation);
    open->chain = header->head.checksum;

    batch->xfer = (struct hifc_xfer){.spans = batch->spans,
                                     .span_count = batch->span_count,
                                     .op = HIFC_IO_WRITE,
                                     .offset_bytes = base + batch->offset,
                                     .length_bytes = batch->write_bytes,
                                     .done = ns_batch_xfer_done,
                                     .owner = batch};
    batch->pending++;
    ns_issue(ns, &batch->xfer);
    for (struct ns_op *op = batch->ops; op; op = op->next) {
        if (op->kind == NS_OP_PUBLISH && op->tail) {
            batch->pending++;
            ns_issue(ns, &op->xfer);
        }
    }
    *open->tail = batch;
    open->tail = &batch->next;
    open->inflight++;
    open->forming = NULL;
    batch->holders++;
    *ns->global_tail = batch;
    ns->global_tail = &batch->next_global;
    ns->stats.batches++;
    ns->stats.batch_entries += batch->entry_count;
}

void ns_close_forming(struct hifc_ns *ns, bool force)
{
    for (struct ns_open *open = ns->open_list; open; open = open->next) {
        bool due = force || open->inflight < ns->opts.batch_inflight ||
                   ns->segments[open->segment].state == NS_CLOSING;
        if (open->forming && due && !open->failed) {
            ns_batch_close(ns, open->forming);
        }
    }
}

/* The forming batch of a segment, a new one if there is none. NULL: too many are in flight. */
static struct ns_batch *batch_forming(struct hifc_ns *ns, struct ns_open *open)
{
    if (open->forming) {
        return open->forming;
    }
    struct ns_batch *batch = ns_batch_alloc(ns);
    if (!batch) {
        return NULL;
    }
    struct ns_segment *segment = &ns->segments[open->segment];
    batch->open = open;
    batch->offset = segment->used_bytes;
    batch->bytes = batch->write_bytes = HIFC_PAGE_BYTES;
    segment->used_bytes += HIFC_PAGE_BYTES;
    segment->metadata_bytes += HIFC_PAGE_BYTES;
    open->forming = batch;
    return batch;
}

static void batch_grow(struct hifc_ns *ns, struct ns_batch *batch, uint32_t bytes, bool written)
{
    batch->bytes += bytes;
    if (written) {
        batch->write_bytes += bytes;
    }
    ns->segments[batch->open->segment].used_bytes += bytes;
    ns->segments[batch->open->segment].payload_bytes += bytes;
}

static struct hifc_disk_entry *batch_entry(struct ns_batch *batch, const struct hifc_key *key,
                                           enum hifc_entry_kind kind)
{
    struct hifc_disk_entry *entry = &batch->header->entries[batch->entry_count++];
    memset(entry, 0, sizeof *entry);
    entry->key = *key;
    entry->kind = (uint8_t)kind;
    return entry;
}

/* Small values share pages; an extent never crosses one. Returns its offset, 0 on no memory. */
static uint32_t batch_pack(struct hifc_ns *ns, struct ns_batch *batch, struct ns_op *op,
                           uint32_t extent)
{
    if (!batch->packed || batch->packed_used + extent > HIFC_PAGE_BYTES) {
        uint8_t *page = ns_pages_alloc(ns, HIFC_PAGE_BYTES);
        if (!page) {
            return 0;
        }
        memset(page, 0, HIFC_PAGE_BYTES);
        batch->pages[batch->page_count++] = page;
        batch->packed = page;
        batch->packed_offset = batch->offset + batch->bytes;
        batch->packed_used = 0;
        batch->spans[batch->span_count++] =
            (struct hifc_span){.base = page, .bytes = HIFC_PAGE_BYTES};
        batch_grow(ns, batch, HIFC_PAGE_BYTES, true);
    }
    uint8_t *to = batch->packed + batch->packed_used;
    ns_span_copy(to, &op->payload, 0, op->length);
    if (op->part_count > 1) {
        memcpy(to + hifc_table_offset(op->length), op->computed, op->part_count * 4ull);
    }
    ns->stats.bounce_bytes += op->length;
    uint32_t offset = batch->packed_offset + batch->packed_used;
    batch->packed_used += extent;
    return offset;
}

/* Payloads of a page or more start on a page: the body moves from where it lies, what does not
 * fill a page follows with the table in pages of our own. */
static uint32_t batch_place(struct hifc_ns *ns, struct ns_batch *batch, struct ns_op *op,
                            uint32_t extent)
{
    uint32_t offset = batch->offset + batch->bytes;
    if (op->body_bytes > 0) {
        batch->spans[batch->span_count] = op->payload;
        batch->spans[batch->span_count].bytes = op->body_bytes;
        if (op->payload.piece_bytes >= op->body_bytes) {
            batch->spans[batch->span_count].piece_bytes = 0;
        }
        batch->span_count++;
    }
    if (op->tail) {
        batch->spans[batch->span_count++] =
            (struct hifc_span){.base = op->tail, .bytes = op->tail_bytes};
    }
    batch_grow(ns, batch, extent, true);
    return offset;
}

/* Builds what follows the body: the rest of the value, zeros, the checksum table. */
static bool op_make_tail(struct hifc_ns *ns, struct ns_op *op, uint32_t extent)
{
    op->body_bytes = op->length / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    if (op->body_bytes == extent || op->tail) {
        return true;
    }
    op->tail_bytes = extent - op->body_bytes;
    op->tail = ns_pages_alloc(ns, op->tail_bytes);
    if (!op->tail) {
        return false;
    }
    uint32_t rest = op->length - op->body_bytes;
    memset(op->tail, 0, op->tail_bytes);
    ns_span_copy(op->tail, &op->payload, op->body_bytes, rest);
    ns->stats.bounce_bytes += rest;
    if (op->part_count > 1) {
        memcpy(op->tail + hifc_table_offset(op->length) - op->body_bytes, op->computed,
               op->part_count * 4ull);
    }
    return true;
}

static bool batch_full(const struct hifc_ns *ns, const struct ns_batch *batch, uint64_t extent)
{
    return batch->entry_count == HIFC_BATCH_ENTRIES_MAX ||
           (batch->entry_count > 0 && batch->bytes + extent > ns->opts.batch_size_max_bytes);
}

int ns_append(struct hifc_ns *ns, struct ns_op *op, unsigned stream)
{
    bool value = op->kind != NS_OP_TOMBSTONE;
    uint32_t extent = value ? (uint32_t)hifc_extent_bytes(op->length, op->part_count) : 0;
    bool on_pages = value && hifc_extent_on_pages(op->length, op->part_count);
    int status = HIFC_RETRY;

    if (on_pages && !op_make_tail(ns, op, extent)) {
        return HIFC_RETRY;
    }
    struct ns_open *open = ns_stream_open(ns, stream, extent, false, &status);
    if (!open) {
        return status;
    }
    /* Reserved room stands last in a batch, so that the rest is one contiguous write. */
    if (open->forming && (batch_full(ns, open->forming, extent) ||
                          open->forming->bytes != open->forming->write_bytes)) {
        ns_batch_close(ns, open->forming);
    }
    struct ns_batch *batch = ns_open_reserve_entry(open) ? batch_forming(ns, open) : NULL;
    if (!batch) {
        return HIFC_RETRY;
    }
    uint32_t offset = 0;
    if (value) {
        offset = on_pages ? batch_place(ns, batch, op, extent)
                          : batch_pack(ns, batch, op, extent);
        if (offset == 0) {
            return HIFC_RETRY;
        }
    }
    struct hifc_disk_entry *entry =
        batch_entry(batch, &op->key, value ? HIFC_ENTRY_VALUE : HIFC_ENTRY_TOMBSTONE);
    if (value) {
        entry->offset = offset / HIFC_UNIT_BYTES;
        entry->length = op->length;
        entry->checksum = op->checksum;
        entry->part_count = (uint16_t)op->part_count;
        ns_segment_live(ns, open->segment, op->length, op->part_count);
    }
    open->entry_count_max++;
    op->segment = open->segment;
    op->offset = offset / HIFC_UNIT_BYTES;
    op->next = NULL;
    *batch->ops_tail = op;
    batch->ops_tail = &op->next;
    return 0;
}

int ns_append_reserved(struct hifc_ns *ns, struct ns_reservation *reservation, unsigned stream)
{
    uint32_t extent =
        (uint32_t)hifc_whole_pages(
            hifc_extent_bytes(reservation->length, reservation->part_count));
    int status = HIFC_RETRY;
    struct ns_open *open = ns_stream_open(ns, stream, extent, true, &status);
    if (!open) {
        return status;
    }
    if (open->forming && open->forming->entry_count == HIFC_BATCH_ENTRIES_MAX) {
        ns_batch_close(ns, open->forming);
    }
    struct ns_batch *batch = ns_open_reserve_entry(open) ? batch_forming(ns, open) : NULL;
    if (!batch) {
        return HIFC_RETRY;
    }
    uint32_t offset = batch->offset + batch->bytes;
    struct hifc_disk_entry *entry = batch_entry(batch, &reservation->key, HIFC_ENTRY_RESERVED);
    entry->offset = offset / HIFC_UNIT_BYTES;
    entry->length = reservation->length;
    entry->part_count = (uint16_t)reservation->part_count;
    batch_grow(ns, batch, extent, false);
    ns_segment_live(ns, open->segment, reservation->length, reservation->part_count);
    open->reservations++;
    reservation->segment = open->segment;
    reservation->offset = offset / HIFC_UNIT_BYTES;
    return 0;
}

int ns_append_publish(struct hifc_ns *ns, struct ns_op *op)
{
    struct ns_reservation *reservation = op->reservation;
    struct ns_open *open = ns->segments[reservation->segment].open;
    if (open->forming && open->forming->entry_count == HIFC_BATCH_ENTRIES_MAX) {
        ns_batch_close(ns, open->forming);
    }
    struct ns_batch *batch = batch_forming(ns, open);
    if (!batch) {
        return HIFC_RETRY;
    }
    struct hifc_disk_entry *entry = batch_entry(batch, &op->key, HIFC_ENTRY_PUBLISH);
    entry->offset = reservation->offset;
    entry->length = reservation->length;
    entry->checksum = op->checksum;
    entry->part_count = (uint16_t)reservation->part_count;
    op->segment = reservation->segment;
    op->offset = reservation->offset;
    op->next = NULL;
    *batch->ops_tail = op;
    batch->ops_tail = &op->next;
    open->reservations--;
    open->entry_count_max++;
    if (op->tail) {
        op->spans[0] = (struct hifc_span){.base = op->tail, .bytes = op->tail_bytes};
        op->xfer = (struct hifc_xfer){.spans = op->spans,
                                      .span_count = 1,
                                      .op = HIFC_IO_WRITE,
                                      .offset_bytes = ns_segment_base(ns, op->segment) +
                                                      (uint64_t)op->offset * HIFC_UNIT_BYTES +
                                                      op->body_bytes,
                                      .length_bytes = op->tail_bytes,
                                      .done = ns_batch_xfer_done,
                                      .owner = batch};
    }
    return 0;
}
