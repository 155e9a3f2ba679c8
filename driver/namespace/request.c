/* SPDX-License-Identifier: Apache-2.0
 *
 * request.c - hifc_submit: one batch of requests comes in, is prepared (prepare.c) and then
 * dispatched under the mutex in one go.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "namespace/prepare.h"
#include "util/clock.h"
#include "util/invariant.h"

/* ---- dispatch, mutex held: 0..: an answer, HIFC_IN_FLIGHT: it will come, negative errno ------- */

/* Packed values keep their table inside; a relocated one needs it again. */
static bool keep_crcs(struct ns_op *op, const struct ns_item *item)
{
    if (op->part_count <= 1 || hifc_extent_on_pages(op->length, op->part_count)) {
        op->computed = item->crcs;
        return true;
    }
    if (op->part_count > 2 * NS_OP_CRCS_INLINE) {
        op->computed = malloc(op->part_count * 4ull);
    }
    if (op->computed) {
        memcpy(op->computed, item->crcs, op->part_count * 4ull);
    }
    return op->computed != NULL;
}

static void forget_crcs(struct ns_op *op, const struct ns_item *item)
{
    if (op->computed == item->crcs || !op->computed) {
        op->computed = op->crcs_inline;
    }
}

/* The slot that a put fills: NULL with an answer in *status when it may not. */
static struct hifc_slot *put_slot(struct hifc_ns *ns, const struct hifc_req *req, int *status)
{
    struct hifc_slot *slot = hifc_index_find(ns->index, &req->key);
    if (slot && slot->flags & HIFC_SLOT_PENDING) {
        *status = HIFC_PENDING;
        return NULL;
    }
    bool swap = slot && slot->flags & HIFC_SLOT_SWAP;
    if (slot && !(slot->flags & HIFC_SLOT_QUARANTINED) && !(swap && req->cls == HIFC_SWAP)) {
        ns->stats.exists_count++;
        *status = HIFC_EXISTS;
        return NULL;
    }
    if (req->cls == HIFC_REUSE && !ns_admit(&ns->admission, &req->key, req->length)) {
        ns->stats.rejected_count++;
        *status = HIFC_REJECTED;
        return NULL;
    }
    if (!slot) {
        slot = hifc_index_insert(ns->index, &req->key);
        if (!slot) {
            *status = ns_index_full(ns);
            ns_admit_undo(&ns->admission, req->cls, req->length);
        }
    }
    return slot;
}

static int start_put(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket,
                     struct ns_item *item)
{
    uint32_t parts = req->part_count > 1 ? req->part_count : 1;
    int shape = ns_part_counts_index(&ns->part_counts, parts);
    if (shape < 0) {
        return hifc_fail(-EINVAL, "more than %u different part counts: use fewer", NS_PART_COUNTS_MAX);
    }
    struct ns_op *op = ns_op_for(ns, req, ticket);
    if (!op) {
        return HIFC_RETRY;
    }
    int status = 0;
    struct hifc_slot *slot = put_slot(ns, req, &status);
    if (!slot) {
        ns_op_free(ns, op);
        return status;
    }
    op->kind = NS_OP_PUT;
    op->cls = req->cls;
    op->length = req->length;
    op->part_count = parts;
    op->payload = (struct hifc_span){.base = item->base,
                                     .bytes = req->length,
                                     .piece_bytes = req->piece_bytes,
                                     .stride_bytes = req->piece_stride};
    uint32_t raw = parts > 1 ? hifc_crc32c_raw(item->crcs, parts * 4ull) : item->crcs[0];
    op->checksum = hifc_bind_checksum(raw, &req->key, req->length, parts);
    op->has_previous = slot->length != 0;
    op->previous = *slot;
    status = keep_crcs(op, item)
                 ? ns_append(ns, op, req->cls == HIFC_SWAP ? NS_STREAM_SWAP : NS_STREAM_REUSE)
                 : HIFC_RETRY;
    forget_crcs(op, item);
    if (status != 0) {
        ns_admit_undo(&ns->admission, req->cls, req->length);
        if (!op->has_previous) {
            hifc_index_remove(ns->index, slot);
        }
        ns_op_free(ns, op);
        return status;
    }
    if (op->has_previous) {
        ns_segment_pin(ns, slot->segment);
    }
    slot->checksum = op->checksum;
    slot->segment = op->segment;
    slot->offset = op->offset;
    slot->length = req->length;
    slot->heat = 0;
    slot->flags = (uint8_t)(HIFC_SLOT_USED | HIFC_SLOT_PENDING |
                            (req->cls == HIFC_SWAP ? HIFC_SLOT_SWAP : 0));
    hifc_slot_set_shape(slot, (unsigned)shape);
    return HIFC_IN_FLIGHT;
}

static int start_delete(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket)
{
    struct hifc_slot *slot = hifc_index_find(ns->index, &req->key);
    if (!slot) {
        return HIFC_MISS;
    }
    if (slot->flags & HIFC_SLOT_PENDING) {
        return HIFC_PENDING;
    }
    int status = HIFC_OK;
    if (slot->flags & HIFC_SLOT_SWAP) {
        hifc_count_down(ns->entries_swap, 1u);
    } else {
        struct ns_op *op = ns_op_for(ns, req, ticket);
        if (!op) {
            return HIFC_RETRY;
        }
        op->kind = NS_OP_TOMBSTONE;
        op->cls = HIFC_REUSE;
        op->length = 0;
        op->part_count = 1;
        status = ns_append(ns, op, NS_STREAM_REUSE);
        if (status != 0) {
            ns_op_free(ns, op);
            return status;
        }
        status = HIFC_IN_FLIGHT;
    }
    ns_slot_dead(ns, slot);
    hifc_index_remove(ns->index, slot);
    ns->stats.delete_count++;
    return status;
}

static int start_reservation(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket,
                             struct ns_item *item)
{
    if (req->op == HIFC_OP_RESERVE) {
        return ns_reserve(ns, req);
    }
    if (req->op == HIFC_OP_ABORT) {
        return ns_reservation_abort(ns, req->handle);
    }
    struct ns_op *op = ns_op_for(ns, req, ticket);
    if (!op) {
        return HIFC_RETRY;
    }
    int status;
    if (req->op == HIFC_OP_WRITE) {
        op->payload = (struct hifc_span){.base = item->base,
                                         .bytes = req->length,
                                         .piece_bytes = req->piece_bytes,
                                         .stride_bytes = req->piece_stride};
        status = ns_reservation_write(ns, op, req, item->crcs, item->crc_count);
    } else {
        status = ns_reservation_commit(ns, op, req->handle);
    }
    if (status != HIFC_IN_FLIGHT) {
        ns_op_free(ns, op);
    }
    return status;
}

static int dispatch(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket,
                    struct ns_item *item)
{
    if (item->status != 0) {
        return item->status;
    }
    switch (req->op) {
    case HIFC_OP_GET:
        return ns_get(ns, req, ticket, NULL);
    case HIFC_OP_PUT:
        return start_put(ns, req, ticket, item);
    case HIFC_OP_DELETE:
        return start_delete(ns, req, ticket);
    default:
        return start_reservation(ns, req, ticket, item);
    }
}

static void answer_now(struct hifc_ns *ns, struct hifc_ticket *ticket, struct hifc_req *req,
                       int status)
{
    struct hifc_error error;
    ns->stats.miss_count += status == HIFC_MISS;
    ns->stats.retry_count += status == HIFC_RETRY;
    ns->stats.no_space_count += status == HIFC_NO_SPACE;
    if (status < 0) {
        hifc_error_copy(&error);
    }
    uint64_t bytes = req->op == HIFC_OP_WRITE ? req->length : 0;
    ns_answer(ns, ticket, req, ns_callers_pool(req), status, bytes, status < 0 ? &error : NULL);
}

/* With the reactor the janitor's thread looks at the time; inline, requests do. Mutex held. */
static void expire_inline(struct hifc_ns *ns)
{
    if (ns->reactor || (ns->reservation_count == 0 && ns->leases.count == 0)) {
        return;
    }
    uint64_t now = hifc_now_ns();
    if (now - ns->expired_ns >= NS_TICK_MS * 1000000ull) {
        ns->expired_ns = now;
        ns_leases_expire(ns, now);
        ns_reservations_expire(ns, now);
    }
}

/* Who unregisters a pool first retires it and then looks at the count: it is counted before it is
 * resolved. */
static void count_pools(struct hifc_ns *ns, const struct hifc_req *reqs, uint32_t count, int by)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t pool = ns_callers_pool(&reqs[i]);
        if (pool) {
            atomic_fetch_add(&ns->pool_requests[pool], (uint32_t)by);
        }
    }
}

HIFC_API int hifc_submit(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count,
                         struct hifc_ticket **out)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    if (count == 0 || !reqs || !out) {
        return hifc_fail(-EINVAL, "submit wants at least one request and room for the ticket");
    }
    if (!ns->reactor && ns->janitor_wanted) {
        ns_janitor_inline(ns);
    }
    struct ns_scratch scratch;
    count_pools(ns, reqs, count, 1);
    error = ns_prepare(ns, reqs, count, &scratch);
    if (error) {
        count_pools(ns, reqs, count, -1);
        ns_scratch_free(&scratch);
        return error;
    }
    ns_lock(ns);
    expire_inline(ns);
    struct hifc_ticket *ticket = ns_ticket_alloc(ns, count, reqs[0].op);
    if (!ticket) {
        ns_unlock(ns);
        count_pools(ns, reqs, count, -1);
        ns_scratch_free(&scratch);
        return hifc_fail(-EAGAIN, "%u tickets are in use: free tickets that are done",
                         ns->tickets_count);
    }
    ns->requests_inflight += count;
    for (uint32_t i = 0; i < count; i++) {
        hifc_index_prefetch(ns->index, &reqs[i].key);
        reqs[i].status = HIFC_IN_FLIGHT;
    }
    for (uint32_t i = 0; i < count; i++) {
        int status = dispatch(ns, &reqs[i], ticket, &scratch.items[i]);
        if (status != HIFC_IN_FLIGHT) {
            answer_now(ns, ticket, &reqs[i], status);
        }
    }
    ns_close_forming(ns, false);
    ns_unlock_and_issue(ns);
    ns_scratch_free(&scratch);
    *out = ticket;
    return 0;
}
