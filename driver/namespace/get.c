/* SPDX-License-Identifier: Apache-2.0
 *
 * get.c - starts a get: looks the key up and checks the range, then hands it to read.c. Mutex held.
 */
#include "namespace/ns.h"

struct ns_op *ns_op_for(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket)
{
    struct ns_op *op = ns_op_alloc(ns);
    if (op) {
        op->req = req;
        op->ticket = ticket;
        op->callers_pool = ns_callers_pool(req);
        op->key = req->key;
    }
    return op;
}

int ns_get(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket, struct ns_op *op)
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
                                         "quarantined; delete the key")
                   : HIFC_MISS;
    }
    req->value_length = slot->length;
    uint32_t want = req->length ? req->length : slot->length - req->value_offset;
    if (req->value_offset >= slot->length || want > slot->length - req->value_offset) {
        return hifc_fail(-EINVAL, "range [%u, +%u) of a value of %u bytes", req->value_offset,
                         req->length, slot->length);
    }
    if (req->length == 0 && req->capacity < want) {
        return hifc_fail(-EMSGSIZE, "%u bytes and a buffer of %llu: set capacity, or length for a "
                                    "range",
                         want, (unsigned long long)req->capacity);
    }
    uint8_t *base = ns_resolve(ns, req, want);
    if (!base) {
        return -EINVAL;
    }
    op = op ? op : ns_op_for(ns, req, ticket);
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
    uint32_t part = slot->length / op->part_count;
    uint32_t covered = (req->value_offset + want - 1) / part - req->value_offset / part + 1;
    if (req->flags & HIFC_F_CHECKSUMS) {
        op->checksums_out = (uint32_t *)ns_checksum_memory(ns, req, covered);
        if (!op->checksums_out) {
            ns_op_free(ns, op);
            return -EINVAL;
        }
    }
    int status = ns_read_start(ns, op, req, base);
    if (status != 0) {
        ns_op_free(ns, op);
        return status;
    }
    return HIFC_IN_FLIGHT;
}
