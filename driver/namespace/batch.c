/* SPDX-License-Identifier: Apache-2.0
 *
 * batch.c - a batch from its first entry to its one transfer: entries and payloads gather while it is
 * forming, and closing it gives it its sequence and sends it out.
 *
 * A batch closes when it is full, when its segment is, or when fewer than batch_inflight batches of
 * its segment are on their way: so a lone put goes out at once, and under load puts coalesce.
 * Mutex held, except in the callback of the transfers.
 */
#include <string.h>

#include "namespace/ns.h"
#include "util/invariant.h"

/* Driving thread, no mutex: the last transfer of a batch hands it to ns_batches_completed. */
void ns_batch_xfer_done(struct hifc_xfer *xfer)
{
    struct ns_batch *batch = xfer->owner;
    struct hifc_ns *ns = batch->open->ns;
    if (xfer->error != 0 && batch->error == 0) {
        batch->error = xfer->error;
        batch->failed = ns_failed_command(xfer, NS_OPCODE_WRITE);
    }
    if (--batch->pending == 0) {
        batch->next_done = NULL;
        *ns->done_batches_tail = batch;
        ns->done_batches_tail = &batch->next_done;
    }
}

void ns_batch_close(struct hifc_ns *ns, struct ns_batch *batch)
{
    struct ns_open *open = batch->open;
    struct hifc_batch_header *header = batch->header;
    uint64_t base = ns_segment_base(ns, open->segment);

    ns_assert_locked(ns);
    /* It may have no entry, where memory for its first value was short, and its segment may have
     * failed since: then it is taken out again with the rest (acknowledge.c). */
    hifc_assert(open->forming == batch);
    hifc_assert(batch->offset + batch->bytes == ns->segments[open->segment].used_bytes);
    hifc_assert(ns->segments[open->segment].used_bytes <= ns->segment_size);
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
struct ns_batch *ns_batch_forming(struct hifc_ns *ns, struct ns_open *open)
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

void ns_batch_grow(struct hifc_ns *ns, struct ns_batch *batch, uint32_t bytes, bool written)
{
    batch->bytes += bytes;
    if (written) {
        batch->write_bytes += bytes;
    }
    ns->segments[batch->open->segment].used_bytes += bytes;
    ns->segments[batch->open->segment].payload_bytes += bytes;
}

struct hifc_disk_entry *ns_batch_entry(struct ns_batch *batch, const struct hifc_key *key,
                                           enum hifc_entry_kind kind)
{
    struct hifc_disk_entry *entry = &batch->header->entries[batch->entry_count++];
    memset(entry, 0, sizeof *entry);
    entry->key = *key;
    entry->kind = (uint8_t)kind;
    return entry;
}

/* Small values share pages; an extent never crosses one. Returns its offset, 0 on no memory. */
uint32_t ns_batch_pack(struct hifc_ns *ns, struct ns_batch *batch, struct ns_op *op,
                           uint32_t extent)
{
    if (!batch->packed || batch->packed_used + extent > HIFC_PAGE_BYTES) {
        uint8_t *page = ns_pages_alloc(&ns->pages, HIFC_PAGE_BYTES);
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
        ns_batch_grow(ns, batch, HIFC_PAGE_BYTES, true);
    }
    uint8_t *to = batch->packed + batch->packed_used;
    hifc_span_copy(to, &op->payload, 0, op->length);
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
uint32_t ns_batch_place(struct hifc_ns *ns, struct ns_batch *batch, struct ns_op *op,
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
    ns_batch_grow(ns, batch, extent, true);
    return offset;
}

bool ns_batch_full(const struct hifc_ns *ns, const struct ns_batch *batch, uint64_t extent)
{
    return batch->entry_count == HIFC_BATCH_ENTRIES_MAX ||
           (batch->entry_count > 0 && batch->bytes + extent > ns->opts.batch_size_max_bytes);
}
