/* SPDX-License-Identifier: Apache-2.0
 *
 * reserve.c - two-phase puts: room is taken at once, parts are written in any order, commit
 * publishes by an entry in a later header of the same segment, abort gives the room up.
 *
 * The key answers Pending from reserve to commit. An outstanding reservation keeps its segment from
 * being sealed, so it has a deadline, and there is a bound on how many there are. After a crash
 * nothing names the room and it is dead. Mutex held, except in the callback.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/crc32c.h"
#include "util/invariant.h"

int ns_reservations_create(struct hifc_ns *ns)
{
    uint32_t count = ns->opts.reservations_max;
    ns->reservations = calloc(count, sizeof *ns->reservations);
    if (!ns->reservations) {
        return hifc_fail(-ENOMEM, "no memory for %u reservations: lower reservations_max", count);
    }
    ns->reservation_free = UINT32_MAX;
    for (uint32_t i = count; i-- > 0;) {
        ns->reservations[i].index = i;
        ns->reservations[i].next_free = ns->reservation_free;
        ns->reservation_free = i;
    }
    return 0;
}

/* The one place where a reservation changes its state. A commit that finds no room goes back. */
static void reservation_enter(struct ns_reservation *r, enum ns_reservation_state to)
{
    static const uint8_t from[] = {
        [NS_RESERVATION_UNUSED] = 1 << NS_RESERVATION_UNUSED | 1 << NS_RESERVATION_OPEN |
                                  1 << NS_RESERVATION_COMMITTING,
        [NS_RESERVATION_OPEN] = 1 << NS_RESERVATION_UNUSED | 1 << NS_RESERVATION_OPEN |
                                1 << NS_RESERVATION_COMMITTING,
        [NS_RESERVATION_COMMITTING] = 1 << NS_RESERVATION_OPEN | 1 << NS_RESERVATION_COMMITTING,
    };
    hifc_assert(from[to] & 1 << r->state);
    r->state = (uint8_t)to;
}

void ns_reservation_release(struct hifc_ns *ns, struct ns_reservation *reservation)
{
    free(reservation->written);
    free(reservation->crcs);
    if (reservation->tail) {
        ns_pages_free(&ns->pages, reservation->tail, reservation->tail_bytes);
    }
    reservation->written = NULL;
    reservation->crcs = NULL;
    reservation->tail = NULL;
    reservation->commit = NULL;
    hifc_assert(reservation->writes_inflight == 0);
    reservation_enter(reservation, NS_RESERVATION_UNUSED);
    reservation->lap++;
    reservation->next_free = ns->reservation_free;
    ns->reservation_free = reservation->index;
    hifc_count_down(ns->reservation_count, 1u);
}

void ns_reservations_destroy(struct hifc_ns *ns)
{
    for (uint32_t i = 0; ns->reservations && i < ns->opts.reservations_max; i++) {
        if (ns->reservations[i].state != NS_RESERVATION_UNUSED) {
            ns->reservations[i].writes_inflight = 0; /* the engine is gone, and they with it */
            ns_reservation_release(ns, &ns->reservations[i]);
        }
    }
    free(ns->reservations);
    ns->reservations = NULL;
}

struct ns_reservation *ns_reservation_find(struct hifc_ns *ns, uint64_t handle)
{
    uint64_t index = (handle & UINT32_MAX) - 1;
    if (index >= ns->opts.reservations_max) {
        return NULL;
    }
    struct ns_reservation *reservation = &ns->reservations[index];
    bool same = reservation->lap == handle >> 32 && reservation->state != NS_RESERVATION_UNUSED;
    return same ? reservation : NULL;
}

static struct ns_reservation *reservation_take(struct hifc_ns *ns, const struct hifc_req *req)
{
    if (ns->reservation_free == UINT32_MAX) {
        ns_reservations_expire(ns, hifc_now_ns()); /* inline, nobody may have looked for long */
    }
    if (ns->reservation_free == UINT32_MAX) {
        return NULL;
    }
    struct ns_reservation *r = &ns->reservations[ns->reservation_free];
    uint32_t parts = req->part_count > 1 ? req->part_count : 1;
    r->key = req->key;
    r->cls = req->cls;
    r->length = req->length;
    r->part_count = parts;
    r->failed = false;
    r->writes_inflight = r->units_written = 0;
    r->unit_bytes = parts > 1 ? req->length / parts : HIFC_PAGE_BYTES;
    r->units = (req->length + r->unit_bytes - 1) / r->unit_bytes;
    r->body_bytes = req->length / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    uint64_t extent = hifc_whole_pages(hifc_extent_bytes(req->length, parts));
    r->tail_bytes = (uint32_t)(extent - r->body_bytes);
    r->written = calloc(r->units, 1);
    r->crcs = calloc(parts, sizeof *r->crcs);
    r->tail = r->tail_bytes ? ns_pages_alloc(&ns->pages, r->tail_bytes) : NULL;
    ns->reservation_free = r->next_free;
    ns->reservation_count++;
    if (!r->written || !r->crcs || (r->tail_bytes && !r->tail)) {
        ns_reservation_release(ns, r);
        return NULL;
    }
    if (r->tail) {
        memset(r->tail, 0, r->tail_bytes);
    }
    r->deadline_ns = hifc_now_ns() + (uint64_t)ns->opts.reservation_timeout_ms * 1000000ull;
    reservation_enter(r, NS_RESERVATION_OPEN);
    return r;
}

int ns_reserve(struct hifc_ns *ns, struct hifc_req *req)
{
    struct hifc_slot *slot = hifc_index_find(ns->index, &req->key);
    bool lost = slot && slot->flags & HIFC_SLOT_QUARANTINED && !(slot->flags & HIFC_SLOT_SWAP);
    if (slot && !lost) {
        return slot->flags & HIFC_SLOT_PENDING ? HIFC_PENDING : HIFC_EXISTS;
    }
    int shape = ns_part_counts_index(&ns->part_counts, req->part_count > 1 ? req->part_count : 1);
    if (shape < 0) {
        return hifc_fail(-EINVAL, "more than %u different part counts: use fewer",
                         NS_PART_COUNTS_MAX);
    }
    if (req->cls == HIFC_REUSE && !ns_admit(&ns->admission, &req->key, req->length)) {
        return HIFC_REJECTED;
    }
    struct ns_reservation *r = reservation_take(ns, req);
    if (!r) {
        ns_admit_undo(&ns->admission, req->cls, req->length);
        return HIFC_RETRY;
    }
    if (lost) { /* a miss to everybody: it makes room for its successor */
        ns_slot_dead(ns, slot);
        hifc_index_remove(ns->index, slot);
    }
    slot = hifc_index_insert(ns->index, &req->key);
    int status = slot ? ns_append_reserved(
                            ns, r, req->cls == HIFC_SWAP ? NS_STREAM_SWAP : NS_STREAM_REUSE)
                      : ns_index_full(ns);
    if (status != 0) {
        if (slot) {
            hifc_index_remove(ns->index, slot);
        }
        ns_reservation_release(ns, r);
        ns_admit_undo(&ns->admission, req->cls, req->length);
        return status;
    }
    slot->segment = r->segment;
    slot->offset = r->offset;
    slot->length = r->length;
    slot->flags |= HIFC_SLOT_PENDING | (req->cls == HIFC_SWAP ? HIFC_SLOT_SWAP : 0);
    hifc_slot_set_shape(slot, (unsigned)shape);
    req->handle = (uint64_t)r->lap << 32 | (r->index + 1);
    return HIFC_OK;
}

/* ---- write ---------------------------------------------------------------------------------- */

static void write_done(struct hifc_xfer *xfer)
{
    struct ns_op *op = xfer->owner;
    op->status = xfer->error;
    op->next = NULL;
    *op->ns->done_ops_tail = op;
    op->ns->done_ops_tail = &op->next;
}

static int write_check(const struct ns_reservation *r, const struct hifc_req *req)
{
    uint64_t end = (uint64_t)req->value_offset + req->length;
    if (req->length == 0 || end > r->length) {
        return hifc_fail(-EINVAL, "write of [%u, +%u) of a reservation of %u bytes",
                         req->value_offset, req->length, r->length);
    }
    bool starts = req->value_offset % HIFC_PAGE_BYTES == 0 &&
                  req->value_offset % r->unit_bytes == 0;
    bool ends = end == r->length ||
                (end % HIFC_PAGE_BYTES == 0 && end % r->unit_bytes == 0);
    if (!starts || !ends) {
        return hifc_fail(-EINVAL,
                         "write of [%u, +%u): both ends must lie on pages of %u and on parts of %u "
                         "bytes (or at the value's end)",
                         req->value_offset, req->length, HIFC_PAGE_BYTES, r->unit_bytes);
    }
    uint32_t first = req->value_offset / r->unit_bytes;
    uint32_t last = (uint32_t)((end - 1) / r->unit_bytes);
    for (uint32_t i = first; i <= last; i++) {
        if (r->written[i]) {
            return hifc_fail(-EINVAL, "part %u of the reservation was written before", i);
        }
    }
    return 0;
}

static void write_account(struct ns_reservation *r, const struct hifc_req *req,
                          const uint32_t *crcs)
{
    uint32_t end = req->value_offset + req->length;
    uint32_t first = req->value_offset / r->unit_bytes;
    uint32_t count = (end - 1) / r->unit_bytes - first + 1;
    memset(r->written + first, 1, count);
    r->units_written += count;
    if (r->part_count > 1) {
        memcpy(r->crcs + first, crcs, count * 4ull);
    } else {
        r->crcs[0] ^= hifc_crc32c_shift(crcs[0], r->length - end);
    }
}

int ns_reservation_write(struct hifc_ns *ns, struct ns_op *op, const struct hifc_req *req,
                         const uint32_t *crcs, uint32_t crc_count)
{
    struct ns_reservation *r = ns_reservation_find(ns, req->handle);
    if (!r || r->state != NS_RESERVATION_OPEN) {
        return hifc_fail(-EINVAL, "no such open reservation: it was committed, aborted or expired");
    }
    if (r->failed) {
        return hifc_fail(-EIO, "the segment of this reservation failed: abort and reserve again");
    }
    int error = write_check(r, req);
    if (error) {
        return error;
    }
    /* The checksums were computed before the mutex was taken: for this very reservation? */
    if (crc_count != (r->part_count > 1 ? (req->length + r->unit_bytes - 1) / r->unit_bytes : 1)) {
        return hifc_fail(-EINVAL, "the reservation changed while it was written to");
    }
    uint32_t end = req->value_offset + req->length;
    uint32_t body_end = end < r->body_bytes ? end : r->body_bytes;
    uint32_t direct = body_end > req->value_offset ? body_end - req->value_offset : 0;
    if (direct < req->length) {
        uint32_t at = req->value_offset + direct;
        hifc_span_copy(r->tail + (at - r->body_bytes), &op->payload, direct, req->length - direct);
        ns->stats.bounce_bytes += req->length - direct;
    }
    write_account(r, req, crcs);
    if (direct == 0) {
        return HIFC_OK;
    }
    op->kind = NS_OP_WRITE;
    op->reservation = r;
    op->want_bytes = req->length;
    op->segment = r->segment;
    op->spans[0] = op->payload;
    op->spans[0].bytes = direct;
    if (op->payload.piece_bytes >= direct) {
        op->spans[0].piece_bytes = 0;
    }
    op->xfer = (struct hifc_xfer){.spans = op->spans,
                                  .span_count = 1,
                                  .op = HIFC_IO_WRITE,
                                  .offset_bytes = ns_segment_base(ns, r->segment) +
                                                  (uint64_t)r->offset * HIFC_UNIT_BYTES +
                                                  req->value_offset,
                                  .length_bytes = direct,
                                  .done = write_done,
                                  .owner = op};
    r->writes_inflight++;
    ns_segment_pin(ns, r->segment);
    ns_issue(ns, &op->xfer);
    return HIFC_IN_FLIGHT;
}

/* ---- commit and abort ----------------------------------------------------------------------- */

/* Takes the room and the key back; the reservation itself stays until its owner ends it. */
static void reservation_give_up(struct hifc_ns *ns, struct ns_reservation *r)
{
    hifc_index_remove(ns->index, hifc_index_find(ns->index, &r->key));
    ns_segment_dead(ns, r->segment, r->length, r->part_count);
    hifc_count_down(ns->segments[r->segment].open->reservations, 1u);
    if (ns->segments[r->segment].state == NS_CLOSING) {
        ns_want_janitor(ns);
    }
    r->failed = true;
}

static void reservation_drop(struct hifc_ns *ns, struct ns_reservation *r)
{
    if (!r->failed) {
        reservation_give_up(ns, r);
    }
    ns_reservation_release(ns, r);
}

/* All parts are on the device: publishes. HIFC_IN_FLIGHT, or an answer and the state before. */
static int commit_now(struct hifc_ns *ns, struct ns_reservation *r, struct ns_op *op)
{
    uint32_t raw = r->part_count > 1 ? hifc_crc32c_update(0, r->crcs, r->part_count * 4ull)
                                     : r->crcs[0];
    op->kind = NS_OP_PUBLISH;
    op->key = r->key;
    op->cls = r->cls;
    op->length = r->length;
    op->part_count = r->part_count;
    op->checksum = hifc_bind_checksum(raw, &r->key, r->length, r->part_count);
    op->reservation = r;
    op->body_bytes = r->body_bytes;
    op->tail = r->tail;
    op->tail_bytes = r->tail_bytes;
    if (r->part_count > 1) {
        memcpy(r->tail + hifc_table_offset(r->length) - r->body_bytes, r->crcs,
               r->part_count * 4ull);
    }
    int status = ns_append_publish(ns, op);
    if (status != 0) {
        op->tail = NULL;
        op->reservation = NULL;
        reservation_enter(r, NS_RESERVATION_OPEN);
        r->commit = NULL;
        return status;
    }
    r->tail = NULL; /* the operation's now */
    reservation_enter(r, NS_RESERVATION_COMMITTING);
    hifc_index_find(ns->index, &r->key)->checksum = op->checksum;
    return HIFC_IN_FLIGHT;
}

int ns_reservation_commit(struct hifc_ns *ns, struct ns_op *op, uint64_t handle)
{
    struct ns_reservation *r = ns_reservation_find(ns, handle);
    if (!r || r->state != NS_RESERVATION_OPEN) {
        return hifc_fail(-EINVAL, "no such open reservation: it was committed, aborted or expired");
    }
    if (r->units_written < r->units && !r->failed) {
        return hifc_fail(-EINVAL, "commit with %u of %u parts not written: write them or abort",
                         r->units - r->units_written, r->units);
    }
    if (r->writes_inflight > 0) {
        r->commit = op;
        reservation_enter(r, NS_RESERVATION_COMMITTING);
        return HIFC_IN_FLIGHT;
    }
    if (r->failed) {
        reservation_drop(ns, r);
        return hifc_fail(-EIO, "a write of this reservation failed: put the value again");
    }
    return commit_now(ns, r, op);
}

int ns_reservation_abort(struct hifc_ns *ns, uint64_t handle)
{
    struct ns_reservation *r = ns_reservation_find(ns, handle);
    if (!r || r->state != NS_RESERVATION_OPEN) {
        return hifc_fail(-EINVAL, "no such open reservation: it was committed, aborted or expired");
    }
    if (r->writes_inflight > 0) {
        return HIFC_RETRY;
    }
    reservation_drop(ns, r);
    return HIFC_OK;
}

/* A write that waited for came in last: the commit that waited for it goes on. */
static void commit_continue(struct hifc_ns *ns, struct ns_reservation *r)
{
    struct ns_op *op = r->commit;
    int status;
    r->commit = NULL;
    if (r->failed) {
        reservation_drop(ns, r);
        status = -EIO;
    } else {
        status = commit_now(ns, r, op);
    }
    if (status != HIFC_IN_FLIGHT) {
        ns_answer(ns, op->ticket, op->req, op->callers_pool, status, 0,
                  status < 0 ? &ns->last_device_error : NULL);
        ns_op_free(ns, op);
    }
}

void ns_reservation_write_completed(struct hifc_ns *ns, struct ns_op *op)
{
    struct ns_reservation *r = op->reservation;
    ns_segment_unpin(ns, op->segment);
    hifc_count_down(r->writes_inflight, 1u);
    struct hifc_error error;
    if (op->status != 0) {
        struct ns_command failed = ns_failed_command(&op->xfer, NS_OPCODE_WRITE);
        ns_command_error(ns, &failed, &error);
        ns->last_device_error = error;
        ns->stats.device_error_count++;
        if (!r->failed) {
            reservation_give_up(ns, r);
        }
    }
    ns_answer(ns, op->ticket, op->req, op->callers_pool, op->status, op->want_bytes,
              op->status != 0 ? &error : NULL);
    op->reservation = NULL;
    ns_op_free(ns, op);
    if (r->commit && r->writes_inflight == 0) {
        commit_continue(ns, r);
    }
}

void ns_reservations_fail(struct hifc_ns *ns, uint32_t segment)
{
    for (uint32_t i = 0; i < ns->opts.reservations_max; i++) {
        struct ns_reservation *r = &ns->reservations[i];
        bool published = r->state == NS_RESERVATION_COMMITTING && !r->commit;
        if (r->state == NS_RESERVATION_UNUSED || published || r->failed ||
            r->segment != segment) {
            continue;
        }
        reservation_give_up(ns, r);
    }
}

HIFC_API void hifc_reservation_drop(struct hifc_ns *ns, uint64_t handle)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    if (ns_enter(ns, &visit) != 0) {
        return; /* closing aborts it */
    }
    ns_lock(ns);
    struct ns_reservation *r = ns_reservation_find(ns, handle);
    if (r && r->state == NS_RESERVATION_OPEN) {
        if (r->writes_inflight == 0) {
            reservation_drop(ns, r);
        } else {
            r->deadline_ns = 0; /* expires once they have ended */
        }
    }
    ns_unlock_and_issue(ns);
}

void ns_reservations_expire(struct hifc_ns *ns, uint64_t now_ns)
{
    for (uint32_t i = 0; ns->reservation_count > 0 && i < ns->opts.reservations_max; i++) {
        struct ns_reservation *r = &ns->reservations[i];
        if (r->state == NS_RESERVATION_OPEN && r->writes_inflight == 0 &&
            now_ns >= r->deadline_ns) {
            reservation_drop(ns, r);
        }
    }
}
