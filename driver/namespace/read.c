/* SPDX-License-Identifier: Apache-2.0
 *
 * read.c - the read path: look up, pin the segment, read whole parts, verify, answer.
 *
 * Three ways to read: direct (the range asked for is whole parts and lies on pages: no copy but the
 * last partial page), bounced (it is not: the parts that cover it are read aside, verified, and the
 * range copied out), packed (a value smaller than a page: its page is read aside). A chunk is
 * verified as it arrives, while it is in cache; chunks come in any order, so each contributes its
 * CRC shifted to its place.
 *
 * ns_read_start and ns_read_completed hold the mutex; the callbacks between run on the driving
 * thread without it and touch nothing but their operation.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/crc32c.h"

static uint32_t page_down(uint32_t value)
{
    return value / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
}

static struct ns_value_place place_of(const struct hifc_ns *ns, const struct ns_op *op)
{
    return (struct ns_value_place){.generation = ns->segments[op->segment].generation,
                                   .segment = op->segment,
                                   .offset = op->offset,
                                   .part_count = op->part_count};
}

static uint32_t page_up(uint32_t value)
{
    return (uint32_t)hifc_whole_pages(value);
}

static uint32_t part_bytes(const struct ns_op *op)
{
    return op->length / op->part_count;
}

/* ---- callbacks ------------------------------------------------------------------------------ */

/* Adds the CRC of [position, +bytes) of the value, a run within one part, to that part's. */
static void part_add(struct ns_op *op, uint32_t position, uint32_t bytes, uint32_t crc)
{
    uint32_t part = position / part_bytes(op);
    uint32_t left = (part + 1) * part_bytes(op) - (position + bytes);
    op->computed[part - op->first_part] ^= left ? hifc_crc32c_shift(crc, left) : crc;
}

static void read_chunk(struct hifc_xfer *xfer, uint64_t position, const struct iovec *iov,
                       uint32_t iov_count)
{
    struct ns_op *op = xfer->owner;
    uint32_t at = page_down(op->cover_offset) + (uint32_t)position;
    uint32_t end = op->cover_offset + op->cover_bytes;
    uint32_t run_start = at, crc = 0;

    for (uint32_t i = 0; i < iov_count && at < end; i++) {
        const uint8_t *data = iov[i].iov_base;
        uint32_t size = (uint32_t)iov[i].iov_len;
        if (at < op->cover_offset) {
            uint32_t skip = op->cover_offset - at < size ? op->cover_offset - at : size;
            data += skip;
            size -= skip;
            at += skip;
            run_start = at;
        }
        while (size > 0 && at < end) {
            uint32_t part_end = (at / part_bytes(op) + 1) * part_bytes(op);
            uint32_t take = size < part_end - at ? size : part_end - at;
            crc = hifc_crc32c_update(crc, data, take);
            data += take;
            size -= take;
            at += take;
            if (at == part_end) {
                part_add(op, run_start, at - run_start, crc);
                run_start = at;
                crc = 0;
            }
        }
    }
    if (at > run_start) {
        part_add(op, run_start, at - run_start, crc);
    }
}

static uint32_t raw_of_parts(const uint32_t *parts, uint32_t count)
{
    return count > 1 ? hifc_crc32c_update(0, parts, count * 4ull) : parts[0];
}

static bool whole_value(const struct ns_op *op)
{
    return op->parts == op->part_count;
}

static uint32_t bound(const struct ns_op *op, uint32_t raw)
{
    return hifc_bind_checksum(raw, &op->key, op->length, op->part_count);
}

static const uint8_t *table_of(const struct ns_op *op)
{
    return op->table_memory + hifc_table_offset(op->length) % HIFC_PAGE_BYTES;
}

static uint32_t table_checksum(const struct ns_op *op)
{
    return bound(op, hifc_crc32c_update(0, table_of(op), op->part_count * 4ull));
}

/* The table that was read with the range: true if it is the one the value's checksum vouches for. */
static bool table_accept(struct ns_op *op)
{
    if (table_checksum(op) != op->checksum) {
        return false;
    }
    memcpy(op->expected, table_of(op) + op->first_part * 4ull, op->parts * 4ull);
    op->expected_known = true;
    return true;
}

static bool verify_packed(struct ns_op *op, const uint8_t *value)
{
    for (uint32_t i = 0; i < op->part_count; i++) {
        op->computed[i] = hifc_crc32c_update(0, value + (size_t)i * part_bytes(op),
                                             part_bytes(op));
    }
    return bound(op, raw_of_parts(op->computed, op->part_count)) == op->checksum;
}

static bool verify(struct ns_op *op)
{
    if (op->table_memory && !table_accept(op)) {
        return false;
    }
    if (op->checksums_out) {
        return true;
    }
    if (op->expected_known) {
        return memcmp(op->computed, op->expected, op->parts * 4ull) == 0;
    }
    return bound(op, raw_of_parts(op->computed, op->parts)) == op->checksum;
}

/* Puts what lies aside where the caller wants it. */
static void deliver(struct ns_op *op)
{
    if (op->bounce) {
        uint32_t skip = op->value_offset - page_down(op->cover_offset);
        if (op->packed) {
            skip = op->offset * HIFC_UNIT_BYTES % HIFC_PAGE_BYTES + op->value_offset;
        }
        hifc_span_fill(&op->payload, 0, op->bounce + skip, op->want_bytes);
        op->ns->read_bounce_bytes += op->want_bytes;
    } else if (op->tail) {
        uint32_t rest = op->want_bytes - op->body_bytes;
        hifc_span_fill(&op->payload, op->body_bytes, op->tail, rest);
        op->ns->read_bounce_bytes += rest;
    }
}

static void read_finish(struct ns_op *op)
{
    struct hifc_ns *ns = op->ns;
    if (op->xfer.error != 0 || op->table_xfer.error != 0) {
        op->status = op->xfer.error ? op->xfer.error : op->table_xfer.error;
    } else if (op->packed) {
        op->corrupt =
            !verify_packed(op, op->bounce + op->offset * HIFC_UNIT_BYTES % HIFC_PAGE_BYTES);
    } else {
        op->corrupt = !verify(op);
    }
    if (op->status != 0 || op->corrupt) {
        hifc_span_zero(&op->payload, 0, op->want_bytes);
    } else {
        deliver(op);
    }
    op->next = NULL;
    *ns->done_ops_tail = op;
    ns->done_ops_tail = &op->next;
}

static void read_xfer_done(struct hifc_xfer *xfer)
{
    struct ns_op *op = xfer->owner;
    if (--op->pending == 0) {
        read_finish(op);
    }
}

/* ---- start ---------------------------------------------------------------------------------- */

static bool memory_direct(const struct hifc_ns *ns, const struct ns_op *op)
{
    uint32_t align = ns->device->geometry.buffer_align_bytes;
    if ((uintptr_t)op->payload.base % align != 0) {
        return false;
    }
    return op->payload.piece_bytes == 0 || (op->payload.piece_bytes % HIFC_PAGE_BYTES == 0 &&
                                            op->payload.stride_bytes % align == 0);
}

static bool crcs_room(struct ns_op *op)
{
    if (op->parts <= NS_OP_CRCS_INLINE) {
        memset(op->computed, 0, op->parts * 4ull);
        return true;
    }
    uint32_t *both = calloc(2ull * op->parts, sizeof *both);
    if (!both) {
        return false;
    }
    op->computed = both;
    op->expected = both + op->parts;
    return true;
}

static void xfer_prepare(struct hifc_ns *ns, struct ns_op *op, struct hifc_xfer *xfer,
                         const struct hifc_span *spans, uint32_t span_count, uint32_t from,
                         uint32_t bytes)
{
    *xfer = (struct hifc_xfer){.spans = spans,
                               .span_count = span_count,
                               .op = HIFC_IO_READ,
                               .background = op->fetch != NULL,
                               .offset_bytes = ns_segment_base(ns, op->segment) +
                                               (uint64_t)op->offset * HIFC_UNIT_BYTES + from,
                               .length_bytes = bytes,
                               .done = read_xfer_done,
                               .owner = op};
    op->pending++;
    ns_issue(ns, xfer);
}

static int start_packed(struct hifc_ns *ns, struct ns_op *op)
{
    op->packed = true;
    op->first_part = 0;
    op->parts = op->part_count;
    op->bounce = ns_pages_alloc(&ns->pages, HIFC_PAGE_BYTES);
    op->bounce_bytes = HIFC_PAGE_BYTES;
    if (!op->bounce || !crcs_room(op)) {
        return HIFC_RETRY;
    }
    op->spans[0] = (struct hifc_span){.base = op->bounce, .bytes = HIFC_PAGE_BYTES};
    xfer_prepare(ns, op, &op->xfer, op->spans, 1, 0, HIFC_PAGE_BYTES);
    op->xfer.offset_bytes -= op->xfer.offset_bytes % HIFC_PAGE_BYTES;
    return 0;
}

/* Memory for the parts that cover the range: the caller's, or pages of our own. */
static int place_range(struct hifc_ns *ns, struct ns_op *op, uint32_t *span_count)
{
    bool direct = op->cover_offset == op->value_offset && op->cover_bytes == op->want_bytes &&
                  op->cover_offset % HIFC_PAGE_BYTES == 0 && memory_direct(ns, op);
    *span_count = 0;
    if (!direct) {
        uint32_t start = page_down(op->cover_offset);
        op->bounce_bytes = page_up(op->cover_offset + op->cover_bytes) - start;
        op->bounce = ns_pages_alloc(&ns->pages, op->bounce_bytes);
        op->spans[0] = (struct hifc_span){.base = op->bounce, .bytes = op->bounce_bytes};
        *span_count = 1;
        return op->bounce ? 0 : HIFC_RETRY;
    }
    op->body_bytes = page_down(op->want_bytes);
    if (op->body_bytes > 0) {
        op->spans[0] = op->payload;
        op->spans[0].bytes = op->body_bytes;
        if (op->payload.piece_bytes >= op->body_bytes) {
            op->spans[0].piece_bytes = 0;
        }
        *span_count = 1;
    }
    if (op->body_bytes < op->want_bytes) {
        op->tail_bytes = HIFC_PAGE_BYTES;
        op->tail = ns_pages_alloc(&ns->pages, HIFC_PAGE_BYTES);
        op->spans[*span_count] = (struct hifc_span){.base = op->tail, .bytes = HIFC_PAGE_BYTES};
        *span_count += 1;
        return op->tail ? 0 : HIFC_RETRY;
    }
    return 0;
}

static int start_range(struct hifc_ns *ns, struct ns_op *op, bool want_checksums)
{
    uint32_t size = part_bytes(op);
    uint32_t last = (op->value_offset + op->want_bytes - 1) / size;
    uint32_t span_count;
    op->first_part = op->value_offset / size;
    op->parts = last - op->first_part + 1;
    op->cover_offset = op->first_part * size;
    op->cover_bytes = op->parts * size;
    if (place_range(ns, op, &span_count) != 0 || !crcs_room(op)) {
        return HIFC_RETRY;
    }
    bool table = op->part_count > 1 && (!whole_value(op) || want_checksums);
    if (table) {
        struct ns_value_place value = place_of(ns, op);
        const uint32_t *known = ns_checksum_tables_find(&ns->tables, &value);
        if (known) {
            memcpy(op->expected, known + op->first_part, op->parts * 4ull);
            op->expected_known = true;
            table = false;
        }
    }
    if (table) {
        uint32_t start = page_down((uint32_t)hifc_table_offset(op->length));
        uint32_t end = page_up((uint32_t)hifc_table_offset(op->length) + op->part_count * 4);
        op->table_memory_bytes = end - start;
        op->table_memory = ns_pages_alloc(&ns->pages, end - start);
        if (!op->table_memory) {
            return HIFC_RETRY;
        }
        op->table_span = (struct hifc_span){.base = op->table_memory, .bytes = end - start};
        xfer_prepare(ns, op, &op->table_xfer, &op->table_span, 1, start, end - start);
    }
    uint32_t bytes = op->bounce ? op->bounce_bytes : op->body_bytes + (op->tail ? op->tail_bytes : 0);
    xfer_prepare(ns, op, &op->xfer, op->spans, span_count, page_down(op->cover_offset), bytes);
    if (!want_checksums) {
        op->xfer.chunk = read_chunk;
    }
    return 0;
}

int ns_read_start(struct hifc_ns *ns, struct ns_op *op, const struct hifc_req *req, uint8_t *base)
{
    op->kind = NS_OP_READ;
    op->payload = (struct hifc_span){.base = base,
                                     .bytes = op->want_bytes,
                                     .piece_bytes = req->piece_bytes,
                                     .stride_bytes = req->piece_stride};
    op->table_xfer.error = 0;
    int status = hifc_extent_on_pages(op->length, op->part_count)
                     ? start_range(ns, op, req->flags & HIFC_F_CHECKSUMS)
                     : start_packed(ns, op);
    if (status == 0) {
        ns_segment_pin(ns, op->segment);
    }
    return status;
}

/* ---- completion ----------------------------------------------------------------------------- */

/* The checksums that differ: of the first part where each part was compared, else of the value or
 * of its table. */
static void differing(const struct ns_op *op, struct hifc_error *error)
{
    if (op->expected_known && !op->packed) {
        for (uint32_t i = 0; i < op->parts && !error->checksums; i++) {
            error->expected = op->expected[i];
            error->found = op->computed[i];
            error->checksums = error->expected != error->found;
        }
    } else {
        bool of_value = op->packed || !op->table_memory;
        error->expected = op->checksum;
        error->found = of_value ? bound(op, raw_of_parts(op->computed, op->parts))
                                : table_checksum(op);
        error->checksums = 1;
    }
}

static void quarantine(struct hifc_ns *ns, const struct ns_op *op, struct hifc_error *error)
{
    struct hifc_slot *slot = hifc_index_find(ns->index, &op->key);
    ns->stats.corrupt_count++;
    if (ns_slot_at(slot, op->segment, op->offset) && !(slot->flags & HIFC_SLOT_QUARANTINED)) {
        slot->flags |= HIFC_SLOT_QUARANTINED;
        ns_events_add(&ns->events, &op->key, HIFC_EVENT_QUARANTINED, op->length);
    }
    hifc_error_fill(error, -EBADMSG,
                    "the stored value of %u bytes in segment %u at %u does not match its checksum, "
                    "was quarantined and not returned; delete the key, check the drive (hifc-admin "
                    "smart)",
                    op->length, op->segment, op->offset * HIFC_UNIT_BYTES);
    differing(op, error);
    error->lba_bytes = ns->device->geometry.lba_bytes;
    error->lba = op->xfer.offset_bytes / error->lba_bytes;
    error->nlb = (uint32_t)(op->xfer.length_bytes / error->lba_bytes);
}

static void give_checksums(const struct ns_op *op)
{
    uint32_t first = op->value_offset / part_bytes(op);
    uint32_t count = (op->value_offset + op->want_bytes - 1) / part_bytes(op) - first + 1;
    uint32_t *out = op->checksums_out;
    if (op->packed) {
        memcpy(out, op->computed + first, count * 4ull);
    } else if (op->part_count > 1) {
        memcpy(out, op->expected, count * 4ull);
    } else {
        /* Binding is an exclusive or, so it also unbinds. */
        *out = op->checksum ^ bound(op, 0);
    }
}

void ns_read_completed(struct hifc_ns *ns, struct ns_op *op)
{
    struct hifc_error error;
    const struct hifc_error *first = NULL;
    int status = op->status;

    ns_segment_unpin(ns, op->segment);
    if (op->table_memory && op->expected_known && status == 0) {
        struct ns_value_place value = place_of(ns, op);
        ns_checksum_tables_keep(&ns->tables, &value, (const uint32_t *)table_of(op));
    }
    if (status != 0) {
        struct ns_command failed = ns_failed_command(
            op->xfer.error ? &op->xfer : &op->table_xfer, NS_OPCODE_READ);
        ns_command_error(ns, &failed, &error);
        ns->stats.device_error_count++;
        first = &error;
    } else if (op->corrupt) {
        quarantine(ns, op, &error);
        status = op->cls == HIFC_SWAP ? -EBADMSG : HIFC_MISS;
        first = &error;
    } else if (op->checksums_out) {
        give_checksums(op);
    }
    if (op->read_done) {
        op->read_done(ns, op, status);
        return;
    }
    if (status == HIFC_OK) {
        ns->stats.get_count++;
        ns->stats.get_bytes += op->want_bytes;
    }
    ns_answer(ns, op->ticket, op->req, op->callers_pool, status, op->want_bytes, first);
    ns_op_free(ns, op);
}
