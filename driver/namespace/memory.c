/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - what a namespace allocates once and hands around: operations, batches, pages.
 *
 * Operations and batches come from arrays of fixed size, so that nothing is allocated while
 * requests flow and every queue has its bound. Internal pages (batch headers, packed values, tails)
 * come from pool 0, since the device must reach them: single ones from its end, which is kept for
 * them, so that none of them stands between the caller's buffers. Mutex held, except for the span
 * functions.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/crc32c.h"
#include "util/invariant.h"

int ns_memory_create(struct hifc_ns *ns)
{
    ns->ops = calloc(ns->opts.requests_max, sizeof *ns->ops);
    ns->batches = calloc(NS_BATCHES_MAX, sizeof *ns->batches);
    if (!ns->ops || !ns->batches) {
        return hifc_fail(-ENOMEM, "no memory for %u requests in flight: lower requests_max",
                         ns->opts.requests_max);
    }
    for (uint32_t i = ns->opts.requests_max; i-- > 0;) {
        ns->ops[i].ns = ns;
        ns->ops[i].next = ns->free_ops;
        ns->free_ops = &ns->ops[i];
    }
    for (uint32_t i = NS_BATCHES_MAX; i-- > 0;) {
        ns->batches[i].next = ns->free_batches;
        ns->free_batches = &ns->batches[i];
    }
    uint64_t used, peak, pool_bytes, offset;
    hifc_pools_usage(ns->pools, &used, &peak, &pool_bytes);
    uint64_t kept = hifc_pools_keep(ns->pools, pool_bytes / NS_PAGES_SHARE, &offset);
    if (kept > 0) {
        ns->own_pages = ns->own_next = hifc_pools_resolve(ns->pools, 0, offset, kept);
        ns->own_end = ns->own_pages + kept;
        ns->free_page_count = (uint32_t)(kept / HIFC_PAGE_BYTES);
    }
    ns->shapes[0] = 1;
    ns->shape_count = 1;
    ns->issue_tail = &ns->issue;
    ns->global_tail = &ns->global_head;
    ns->done_ops_tail = &ns->done_ops;
    ns->done_batches_tail = &ns->done_batches;
    return 0;
}

void ns_memory_destroy(struct hifc_ns *ns)
{
    free(ns->ops);
    free(ns->batches);
    ns->ops = NULL;
    ns->batches = NULL;
}

struct ns_op *ns_op_alloc(struct hifc_ns *ns)
{
    struct ns_op *op = ns->free_ops;
    if (!op) {
        return NULL;
    }
    ns->free_ops = op->next;
    ns_op_init(op);
    return op;
}

void ns_op_init(struct ns_op *op)
{
    op->next = NULL;
    op->req = NULL;
    op->ticket = NULL;
    op->fetch = NULL;
    op->read_done = NULL;
    op->callers_pool = 0;
    op->checksums_out = NULL;
    op->attempts = 0;
    op->has_previous = false;
    op->status = 0;
    op->checksum = 0;
    op->reservation = NULL;
    op->tail = NULL;
    op->table_memory = NULL;
    op->bounce = NULL;
    op->packed = op->expected_known = op->corrupt = false;
    op->computed = op->crcs_inline;
    op->expected = op->crcs_inline + NS_OP_CRCS_INLINE;
    op->pending = 0;
}

void ns_op_free(struct hifc_ns *ns, struct ns_op *op)
{
    if (op->tail) {
        ns_pages_free(ns, op->tail, op->tail_bytes);
    }
    if (op->bounce) {
        ns_pages_free(ns, op->bounce, op->bounce_bytes);
    }
    if (op->table_memory) {
        ns_pages_free(ns, op->table_memory, op->table_memory_bytes);
    }
    if (op->computed != op->crcs_inline) {
        free(op->computed);
    }
    if (!op->fetch) {
        op->next = ns->free_ops;
        ns->free_ops = op;
    }
}

struct ns_batch *ns_batch_alloc(struct hifc_ns *ns)
{
    struct ns_batch *batch = ns->free_batches;
    if (!batch) {
        return NULL;
    }
    uint8_t *header = ns_pages_alloc(ns, HIFC_PAGE_BYTES);
    if (!header) {
        return NULL;
    }
    ns->free_batches = batch->next;
    /* All but the spans, which are written before they are read. */
    memset(batch, 0, offsetof(struct ns_batch, spans));
    batch->holders = 1;
    batch->ops_tail = &batch->ops;
    batch->header = (struct hifc_batch_header *)header;
    batch->spans[0] = (struct hifc_span){.base = header, .bytes = HIFC_PAGE_BYTES};
    batch->span_count = 1;
    return batch;
}

void ns_batch_release(struct hifc_ns *ns, struct ns_batch *batch)
{
    ns_assert_locked(ns);
    hifc_count_down(batch->holders, 1u);
    if (batch->holders > 0) {
        return;
    }
    ns_pages_free(ns, (uint8_t *)batch->header, HIFC_PAGE_BYTES);
    for (uint32_t i = 0; i < batch->page_count; i++) {
        ns_pages_free(ns, batch->pages[i], HIFC_PAGE_BYTES);
    }
    batch->next = ns->free_batches;
    ns->free_batches = batch;
}

/* One of the internal pages, unless fewer than leave stay behind. */
static uint8_t *own_page(struct hifc_ns *ns, uint32_t leave)
{
    if (ns->free_page_count <= leave) {
        return NULL;
    }
    hifc_count_down(ns->free_page_count, 1u);
    void **page = ns->free_pages;
    if (page) {
        ns->free_pages = *page; /* a free page holds the pointer to the next one */
    } else {
        page = (void **)ns->own_next;
        ns->own_next += HIFC_PAGE_BYTES;
    }
    return (uint8_t *)page;
}

static uint8_t *pool_pages(struct hifc_ns *ns, uint32_t bytes)
{
    uint64_t offset;
    return hifc_pools_try(ns->pools, bytes, &offset)
               ? hifc_pools_resolve(ns->pools, 0, offset, bytes)
               : NULL;
}

uint8_t *ns_pages_alloc(struct hifc_ns *ns, uint32_t bytes)
{
    uint8_t *page = bytes == HIFC_PAGE_BYTES ? own_page(ns, NS_PAGES_LASTING) : NULL;
    return page ? page : pool_pages(ns, bytes);
}

uint8_t *ns_page_alloc_lasting(struct hifc_ns *ns)
{
    uint8_t *page = own_page(ns, 0);
    return page ? page : pool_pages(ns, HIFC_PAGE_BYTES);
}

void ns_pages_free(struct hifc_ns *ns, uint8_t *memory, uint32_t bytes)
{
    if (bytes > HIFC_PAGE_BYTES || memory < ns->own_pages || memory >= ns->own_end) {
        uint8_t *base = hifc_pools_resolve(ns->pools, 0, 0, 0);
        (void)hifc_pools_free(ns->pools, (uint64_t)(memory - base));
        return;
    }
    void **page = (void **)memory;
    *page = ns->free_pages;
    ns->free_pages = page;
    ns->free_page_count++;
}

void ns_issue(struct hifc_ns *ns, struct hifc_xfer *xfer)
{
    xfer->next = NULL;
    *ns->issue_tail = xfer;
    ns->issue_tail = &xfer->next;
}

struct ns_command ns_failed_command(const struct hifc_xfer *xfer, uint8_t opcode)
{
    return (struct ns_command){.sct = xfer->sct,
                               .sc = xfer->sc,
                               .opcode = opcode,
                               .error = xfer->error,
                               .offset_bytes = xfer->error_offset_bytes,
                               .length_bytes = xfer->error_length_bytes};
}

void ns_command_error(struct hifc_ns *ns, const struct ns_command *command, struct hifc_error *out)
{
    uint32_t lba_bytes = ns->device->geometry.lba_bytes;
    hifc_error_fill_command(out, command->error, command->sct, command->sc, command->opcode,
                            command->offset_bytes / lba_bytes, command->length_bytes / lba_bytes,
                            lba_bytes, ns->uri);
}

void ns_unlock_and_issue(struct hifc_ns *ns)
{
    struct hifc_xfer *chain = ns->issue;
    ns->issue = NULL;
    ns->issue_tail = &ns->issue;
    ns_unlock(ns);
    if (chain) {
        hifc_engine_submit(ns->engine, chain);
    }
}

int ns_shape(struct hifc_ns *ns, uint32_t part_count)
{
    for (uint32_t i = 0; i < ns->shape_count; i++) {
        if (ns->shapes[i] == part_count) {
            return (int)i;
        }
    }
    uint32_t i = ns->shape_count;
    if (i == NS_SHAPES_MAX) {
        for (i = 1; i < NS_SHAPES_MAX && ns->shape_extents[i] > 0; i++) {
        }
    } else {
        ns->shape_count++;
    }
    if (i == NS_SHAPES_MAX) {
        return -1;
    }
    ns->shapes[i] = part_count;
    return (int)i;
}

/* ---- spans ---------------------------------------------------------------------------------- */

/* The address of position, and in *run how many bytes follow it without a gap. */
static uint8_t *span_at(const struct hifc_span *span, uint64_t position, uint64_t *run)
{
    if (span->piece_bytes == 0 || span->piece_bytes == span->bytes) {
        *run = span->bytes - position;
        return span->base + position;
    }
    uint64_t piece = position / span->piece_bytes;
    uint64_t within = position % span->piece_bytes;
    *run = span->piece_bytes - within;
    return span->base + piece * span->stride_bytes + within;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

void ns_span_copy(uint8_t *out, const struct hifc_span *span, uint64_t position, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        const uint8_t *from = span_at(span, position, &run);
        run = min_u64(run, bytes);
        memcpy(out, from, run);
        out += run;
        position += run;
        bytes -= run;
    }
}

void ns_span_fill(const struct hifc_span *span, uint64_t position, const uint8_t *from,
                  uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        uint8_t *to = span_at(span, position, &run);
        run = min_u64(run, bytes);
        memcpy(to, from, run);
        from += run;
        position += run;
        bytes -= run;
    }
}

void ns_span_zero(const struct hifc_span *span, uint64_t position, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        uint8_t *to = span_at(span, position, &run);
        run = min_u64(run, bytes);
        memset(to, 0, run);
        position += run;
        bytes -= run;
    }
}

uint32_t ns_span_crc(uint32_t crc, const struct hifc_span *span, uint64_t position, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        const uint8_t *from = span_at(span, position, &run);
        run = min_u64(run, bytes);
        crc = hifc_crc32c_update(crc, from, run);
        position += run;
        bytes -= run;
    }
    return crc;
}
