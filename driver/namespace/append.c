/* SPDX-License-Identifier: Apache-2.0
 *
 * append.c - the write path, first half: an entry (put, move, tombstone, reservation, publish) goes to
 * the forming batch of its stream. acknowledge.c has the second half. Mutex held.
 */
#include <string.h>

#include "namespace/ns.h"
#include "util/invariant.h"

/* Builds what follows the body: the rest of the value, zeros, the checksum table. */
static bool op_make_tail(struct hifc_ns *ns, struct ns_op *op, uint32_t extent)
{
    op->body_bytes = op->length / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    if (op->body_bytes == extent || op->tail) {
        return true;
    }
    op->tail_bytes = extent - op->body_bytes;
    op->tail = ns_pages_alloc(&ns->pages, op->tail_bytes);
    if (!op->tail) {
        return false;
    }
    uint32_t rest = op->length - op->body_bytes;
    memset(op->tail, 0, op->tail_bytes);
    hifc_span_copy(op->tail, &op->payload, op->body_bytes, rest);
    ns->stats.bounce_bytes += rest;
    if (op->part_count > 1) {
        memcpy(op->tail + hifc_table_offset(op->length) - op->body_bytes, op->computed,
               op->part_count * 4ull);
    }
    return true;
}

int ns_append(struct hifc_ns *ns, struct ns_op *op, unsigned stream)
{
    bool value = op->kind != NS_OP_TOMBSTONE;
    uint32_t extent = value ? (uint32_t)hifc_extent_bytes(op->length, op->part_count) : 0;
    bool on_pages = value && hifc_extent_on_pages(op->length, op->part_count);
    int status = HIFC_RETRY;

    ns_assert_locked(ns);
    if (on_pages && !op_make_tail(ns, op, extent)) {
        return HIFC_RETRY;
    }
    struct ns_open *open = ns_stream_open(ns, stream, extent, false, &status);
    if (!open) {
        return status;
    }
    /* Reserved room stands last in a batch, so that the rest is one contiguous write. */
    if (open->forming && (ns_batch_full(ns, open->forming, extent) ||
                          open->forming->bytes != open->forming->write_bytes)) {
        ns_batch_close(ns, open->forming);
    }
    struct ns_batch *batch = ns_open_reserve_entry(open) ? ns_batch_forming(ns, open) : NULL;
    if (!batch) {
        return HIFC_RETRY;
    }
    uint32_t offset = 0;
    if (value) {
        offset = on_pages ? ns_batch_place(ns, batch, op, extent)
                          : ns_batch_pack(ns, batch, op, extent);
        if (offset == 0) {
            return HIFC_RETRY;
        }
    }
    struct hifc_disk_entry *entry =
        ns_batch_entry(batch, &op->key, value ? HIFC_ENTRY_VALUE : HIFC_ENTRY_TOMBSTONE);
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
    struct ns_batch *batch = ns_open_reserve_entry(open) ? ns_batch_forming(ns, open) : NULL;
    if (!batch) {
        return HIFC_RETRY;
    }
    uint32_t offset = batch->offset + batch->bytes;
    struct hifc_disk_entry *entry = ns_batch_entry(batch, &reservation->key, HIFC_ENTRY_RESERVED);
    entry->offset = offset / HIFC_UNIT_BYTES;
    entry->length = reservation->length;
    entry->part_count = (uint16_t)reservation->part_count;
    ns_batch_grow(ns, batch, extent, false);
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
    struct ns_batch *batch = ns_batch_forming(ns, open);
    if (!batch) {
        return HIFC_RETRY;
    }
    struct hifc_disk_entry *entry = ns_batch_entry(batch, &op->key, HIFC_ENTRY_PUBLISH);
    entry->offset = reservation->offset;
    entry->length = reservation->length;
    entry->checksum = op->checksum;
    entry->part_count = (uint16_t)reservation->part_count;
    op->segment = reservation->segment;
    op->offset = reservation->offset;
    op->next = NULL;
    *batch->ops_tail = op;
    batch->ops_tail = &op->next;
    hifc_count_down(open->reservations, 1u);
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
