/* SPDX-License-Identifier: Apache-2.0
 *
 * request.c - hifc_submit: one batch of requests comes in, is checked like any outside input, has
 * its checksums computed, and is then dispatched under the mutex in one go.
 *
 * Checksums are computed before the mutex is taken, into a scratch that lives for the call.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"

#define SCRATCH_REQS 64u
#define SCRATCH_CRCS 512u

/* Per request: where its memory is, and its raw part checksums. */
struct item {
    uint8_t *base;
    uint32_t *crcs;
    uint32_t crc_count;
    uint32_t unit_bytes; /* bytes that one checksum covers */
    int status;          /* not 0: refused already */
};

struct scratch {
    struct item *items;
    uint32_t *crcs;
    struct item items_inline[SCRATCH_REQS];
    uint32_t crcs_inline[SCRATCH_CRCS];
};

static void scratch_free(struct scratch *scratch)
{
    if (scratch->items != scratch->items_inline) {
        free(scratch->items);
    }
    if (scratch->crcs != scratch->crcs_inline) {
        free(scratch->crcs);
    }
}

/* ---- checks --------------------------------------------------------------------------------- */

/* The memory of a request for bytes bytes, or NULL. */
static uint8_t *resolve(struct hifc_ns *ns, const struct hifc_req *req, uint64_t bytes)
{
    uint64_t reach = bytes;
    if (req->piece_bytes != 0 && req->piece_bytes < bytes) {
        if (req->piece_stride < req->piece_bytes || req->piece_stride > UINT32_MAX * 16ull) {
            hifc_fail(-EINVAL, "pieces of %u bytes every %llu overlap or lie too far apart",
                      req->piece_bytes, (unsigned long long)req->piece_stride);
            return NULL;
        }
        uint64_t pieces = (bytes + req->piece_bytes - 1) / req->piece_bytes;
        reach = (pieces - 1) * req->piece_stride + (bytes - (pieces - 1) * req->piece_bytes);
    }
    uint8_t *base = hifc_pools_resolve(ns->pools, req->pool, req->buffer_offset, reach);
    if (!base) {
        hifc_fail(-EINVAL, "buffer [%llu, +%llu) does not lie within pool %u",
                  (unsigned long long)req->buffer_offset, (unsigned long long)reach, req->pool);
    }
    return base;
}

static int check_value(struct hifc_ns *ns, const struct hifc_req *req)
{
    uint32_t parts = req->part_count ? req->part_count : 1;
    if (req->length == 0 || req->length > HIFC_VALUE_MAX_BYTES) {
        return hifc_fail(-EINVAL, "a value has 1 to %u bytes, not %u", HIFC_VALUE_MAX_BYTES,
                         req->length);
    }
    if (parts > HIFC_PARTS_MAX || req->length % parts != 0) {
        return hifc_fail(-EINVAL, "%u bytes do not divide into %u equal parts (at most %u)",
                         req->length, parts, HIFC_PARTS_MAX);
    }
    if (req->cls != HIFC_REUSE && req->cls != HIFC_SWAP) {
        return hifc_fail(-EINVAL, "class %u: use HIFC_REUSE or HIFC_SWAP", req->cls);
    }
    /* Header, batch header, packed page, publishing header, summary, footer. */
    uint64_t room = ns->segment_size - 6ull * HIFC_PAGE_BYTES;
    uint64_t extent = hifc_extent_bytes(req->length, parts);
    if (extent > room) {
        return hifc_fail(-EFBIG, "a value of %u bytes takes %llu, more than a segment holds "
                                 "(%llu): format with larger segments or use smaller blocks",
                         req->length, (unsigned long long)extent, (unsigned long long)room);
    }
    return 0;
}

/* Memory that a device reads from directly has to suit it. */
static int check_alignment(struct hifc_ns *ns, const struct hifc_req *req, const uint8_t *base,
                           bool on_pages)
{
    uint32_t align = ns->device->geometry.buffer_align_bytes;
    bool pieces = req->piece_bytes != 0 && req->piece_bytes < req->length;
    if (on_pages && ((uintptr_t)base % align != 0 ||
                     (pieces && (req->piece_bytes % HIFC_PAGE_BYTES != 0 ||
                                 req->piece_stride % align != 0)))) {
        return hifc_fail(-EINVAL, "buffer at %llu: the device wants memory aligned to %u bytes and "
                                  "pieces of whole pages; use hifc_buffer_alloc",
                         (unsigned long long)req->buffer_offset, align);
    }
    return 0;
}

static int check(struct hifc_ns *ns, const struct hifc_req *req, struct item *item)
{
    uint32_t parts = req->part_count ? req->part_count : 1;
    item->base = NULL;
    item->crc_count = 0;
    if (req->op != HIFC_OP_GET && ns->read_only) {
        return hifc_fail(-EROFS, "%s is open read-only", ns->uri);
    }
    switch (req->op) {
    case HIFC_OP_GET:
    case HIFC_OP_DELETE:
    case HIFC_OP_COMMIT:
    case HIFC_OP_ABORT:
        return 0;
    case HIFC_OP_RESERVE:
        return check_value(ns, req);
    case HIFC_OP_PUT: {
        int error = check_value(ns, req);
        if (error) {
            return error;
        }
        item->base = resolve(ns, req, req->length);
        item->crc_count = parts;
        item->unit_bytes = req->length / parts;
        return item->base ? check_alignment(ns, req, item->base,
                                            hifc_extent_on_pages(req->length, parts))
                          : -EINVAL;
    }
    case HIFC_OP_WRITE:
        item->base = req->length ? resolve(ns, req, req->length) : NULL;
        /* unit_bytes was filled in by look_at_reservations */
        item->crc_count = item->unit_bytes ? (req->length + item->unit_bytes - 1) / item->unit_bytes
                                           : 1;
        return item->base ? check_alignment(ns, req, item->base, true)
                          : hifc_fail(-EINVAL, "write of %u bytes: no such memory", req->length);
    default:
        return hifc_fail(-EINVAL, "operation %u is unknown", req->op);
    }
}

/* Part sizes of the reservations that writes go to. */
static void look_at_reservations(struct hifc_ns *ns, const struct hifc_req *reqs, uint32_t count,
                                 struct item *items)
{
    bool locked = false;
    for (uint32_t i = 0; i < count; i++) {
        items[i].unit_bytes = 0;
        if (reqs[i].op != HIFC_OP_WRITE) {
            continue;
        }
        if (!locked) {
            pthread_mutex_lock(&ns->mutex);
            locked = true;
        }
        const struct ns_reservation *r = ns_reservation_find(ns, reqs[i].handle);
        if (r && r->part_count > 1) {
            items[i].unit_bytes = r->unit_bytes;
        }
    }
    if (locked) {
        pthread_mutex_unlock(&ns->mutex);
    }
}

/* ---- checksums ------------------------------------------------------------------------------ */

static int checksums(struct hifc_ns *ns, const struct hifc_req *req, struct item *item)
{
    if (req->flags & HIFC_F_CHECKSUMS) {
        const uint8_t *given = hifc_pools_resolve(ns->pools, req->pool, req->checksum_offset,
                                                  item->crc_count * 4ull);
        if (!given) {
            return hifc_fail(-EINVAL, "checksum_offset %llu does not lie within pool %u",
                             (unsigned long long)req->checksum_offset, req->pool);
        }
        memcpy(item->crcs, given, item->crc_count * 4ull);
        return 0;
    }
    struct hifc_span span = {.base = item->base,
                             .bytes = req->length,
                             .piece_bytes = req->piece_bytes,
                             .stride_bytes = req->piece_stride};
    uint32_t unit = item->unit_bytes ? item->unit_bytes : req->length;
    for (uint32_t i = 0; i < item->crc_count; i++) {
        uint64_t at = (uint64_t)i * unit;
        uint64_t bytes = req->length - at < unit ? req->length - at : unit;
        item->crcs[i] = ns_span_crc(0, &span, at, bytes);
    }
    return 0;
}

/* Everything that needs no mutex: checks and checksums of all requests. */
static int prepare(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count,
                   struct scratch *scratch)
{
    uint64_t crcs = 0;
    scratch->crcs = scratch->crcs_inline;
    scratch->items = count <= SCRATCH_REQS ? scratch->items_inline
                                           : malloc(count * sizeof *scratch->items);
    if (!scratch->items) {
        return hifc_fail(-ENOMEM, "no memory for %u requests", count);
    }
    look_at_reservations(ns, reqs, count, scratch->items);
    for (uint32_t i = 0; i < count; i++) {
        struct item *item = &scratch->items[i];
        item->status = check(ns, &reqs[i], item);
        if (item->status != 0) {
            item->crc_count = 0;
        }
        crcs += item->crc_count;
    }
    if (crcs > SCRATCH_CRCS) {
        scratch->crcs = malloc(crcs * 4);
        if (!scratch->crcs) {
            scratch->crcs = scratch->crcs_inline;
            return hifc_fail(-ENOMEM, "no memory for %llu checksums", (unsigned long long)crcs);
        }
    }
    uint32_t *next = scratch->crcs;
    for (uint32_t i = 0; i < count; i++) {
        struct item *item = &scratch->items[i];
        item->crcs = next;
        next += item->crc_count;
        if (item->crc_count > 0) {
            item->status = checksums(ns, &reqs[i], item);
        }
    }
    return 0;
}

/* ---- dispatch, mutex held: 0..: an answer, HIFC_IN_FLIGHT: it will come, negative errno ------- */

static struct ns_op *op_for(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket)
{
    struct ns_op *op = ns_op_alloc(ns);
    if (op) {
        op->req = req;
        op->ticket = ticket;
        op->key = req->key;
    }
    return op;
}

static int start_get(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket)
{
    struct hifc_slot *slot = hifc_index_find(ns->index, &req->key);
    if (!slot) {
        return HIFC_MISS;
    }
    if (slot->flags & HIFC_SLOT_PENDING) {
        return HIFC_PENDING;
    }
    if (slot->flags & HIFC_SLOT_QUARANTINED) {
        return slot->flags & HIFC_SLOT_SWAP
                   ? hifc_fail(-EBADMSG, "this value failed its checksum before and is "
                                         "quarantined: delete the key")
                   : HIFC_MISS;
    }
    req->value_length = slot->length;
    if (req->length == 0 && req->capacity < slot->length) {
        return hifc_fail(-EMSGSIZE, "a value of %u bytes and a buffer of %llu: set capacity, or "
                                    "length for a range",
                         slot->length, (unsigned long long)req->capacity);
    }
    uint32_t want = req->length ? req->length : slot->length - req->value_offset;
    if (req->value_offset >= slot->length || want > slot->length - req->value_offset) {
        return hifc_fail(-EINVAL, "range [%u, +%u) of a value of %u bytes", req->value_offset,
                         req->length, slot->length);
    }
    uint8_t *base = resolve(ns, req, want);
    if (!base) {
        return -EINVAL;
    }
    struct ns_op *op = op_for(ns, req, ticket);
    if (!op) {
        return HIFC_RETRY;
    }
    slot->heat += slot->heat < UINT8_MAX;
    op->cls = slot->flags & HIFC_SLOT_SWAP ? HIFC_SWAP : HIFC_REUSE;
    op->length = slot->length;
    op->part_count = ns_slot_parts(ns, slot);
    op->checksum = slot->checksum;
    op->segment = slot->segment;
    op->offset = slot->offset;
    op->value_offset = req->value_offset;
    op->want_bytes = want;
    if (req->flags & HIFC_F_CHECKSUMS &&
        !hifc_pools_resolve(ns->pools, req->pool, req->checksum_offset, op->part_count * 4ull)) {
        ns_op_free(ns, op);
        return hifc_fail(-EINVAL, "checksum_offset: room for %u checksums is needed",
                         op->part_count);
    }
    int status = ns_read_start(ns, op, req, base);
    if (status != 0) {
        ns_op_free(ns, op);
        return status;
    }
    return HIFC_IN_FLIGHT;
}

/* Packed values keep their table inside; a relocated one needs it again. */
static bool keep_crcs(struct ns_op *op, const struct item *item)
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

static void forget_crcs(struct ns_op *op, const struct item *item)
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
    if (req->cls == HIFC_REUSE && !ns_admit(ns, &req->key, req->length)) {
        ns->stats.rejected_count++;
        *status = HIFC_REJECTED;
        return NULL;
    }
    if (!slot) {
        slot = hifc_index_insert(ns->index, &req->key);
        if (!slot) {
            *status = HIFC_NO_SPACE;
            ns_admit_undo(ns, req->cls, req->length);
        }
    }
    return slot;
}

static int start_put(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket,
                     struct item *item)
{
    uint32_t parts = req->part_count > 1 ? req->part_count : 1;
    int shape = ns_shape(ns, parts);
    if (shape < 0) {
        return hifc_fail(-EINVAL, "more than %u different part counts: use fewer", NS_SHAPES_MAX);
    }
    struct ns_op *op = op_for(ns, req, ticket);
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
        ns_admit_undo(ns, req->cls, req->length);
        if (!op->has_previous) {
            hifc_index_remove(ns->index, slot);
        }
        ns_op_free(ns, op);
        return status;
    }
    if (op->has_previous) {
        ns->segments[slot->segment].pins++;
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
        ns->entries_swap--;
    } else {
        struct ns_op *op = op_for(ns, req, ticket);
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
                             struct item *item)
{
    if (req->op == HIFC_OP_RESERVE) {
        return ns_reserve(ns, req);
    }
    if (req->op == HIFC_OP_ABORT) {
        return ns_reservation_abort(ns, req->handle);
    }
    struct ns_op *op = op_for(ns, req, ticket);
    if (!op) {
        return HIFC_RETRY;
    }
    int status;
    if (req->op == HIFC_OP_WRITE) {
        op->payload = (struct hifc_span){.base = item->base,
                                         .bytes = req->length,
                                         .piece_bytes = req->piece_bytes,
                                         .stride_bytes = req->piece_stride};
        status = ns_reservation_write(ns, op, req, item->crcs);
    } else {
        status = ns_reservation_commit(ns, op, req->handle);
    }
    if (status != HIFC_IN_FLIGHT) {
        ns_op_free(ns, op);
    }
    return status;
}

static int dispatch(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket,
                    struct item *item)
{
    if (item->status != 0) {
        return item->status;
    }
    switch (req->op) {
    case HIFC_OP_GET:
        return start_get(ns, req, ticket);
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
    ns_answer(ns, ticket, req, status, bytes, status < 0 ? &error : NULL);
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
    struct scratch scratch;
    error = prepare(ns, reqs, count, &scratch);
    if (error) {
        scratch_free(&scratch);
        return error;
    }
    pthread_mutex_lock(&ns->mutex);
    struct hifc_ticket *ticket = ns_ticket_alloc(ns, count, reqs[0].op);
    if (!ticket) {
        pthread_mutex_unlock(&ns->mutex);
        scratch_free(&scratch);
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
    scratch_free(&scratch);
    *out = ticket;
    return 0;
}
