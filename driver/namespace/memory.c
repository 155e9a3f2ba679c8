/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - what a namespace allocates once and hands around: operations and batches.
 *
 * They come from arrays of fixed size, so that nothing is allocated while requests flow and every
 * queue has its bound. Mutex held.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
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
    ns_pages_create(&ns->pages, ns->pools);
    ns_part_counts_create(&ns->part_counts);
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
        ns_pages_free(&ns->pages, op->tail, op->tail_bytes);
    }
    if (op->bounce) {
        ns_pages_free(&ns->pages, op->bounce, op->bounce_bytes);
    }
    if (op->table_memory) {
        ns_pages_free(&ns->pages, op->table_memory, op->table_memory_bytes);
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
    uint8_t *header = ns_pages_alloc(&ns->pages, HIFC_PAGE_BYTES);
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
    ns_pages_free(&ns->pages, (uint8_t *)batch->header, HIFC_PAGE_BYTES);
    for (uint32_t i = 0; i < batch->page_count; i++) {
        ns_pages_free(&ns->pages, batch->pages[i], HIFC_PAGE_BYTES);
    }
    batch->next = ns->free_batches;
    ns->free_batches = batch;
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
