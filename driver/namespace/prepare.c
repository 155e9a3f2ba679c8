/* SPDX-License-Identifier: Apache-2.0
 *
 * prepare.c - requests are checked like any outside input and have their checksums computed before
 * the mutex is taken, into a scratch that lives for one call.
 */
#include "namespace/prepare.h"

#include <stdlib.h>
#include <string.h>

void ns_scratch_free(struct ns_scratch *scratch)
{
    if (scratch->items != scratch->items_inline) {
        free(scratch->items);
    }
    if (scratch->crcs != scratch->crcs_inline) {
        free(scratch->crcs);
    }
}

/* ---- checks --------------------------------------------------------------------------------- */

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

static int check(struct hifc_ns *ns, const struct hifc_req *req, struct ns_item *item)
{
    uint32_t parts = req->part_count ? req->part_count : 1;
    item->base = NULL;
    item->crc_count = 0;
    if (req->flags & HIFC_F_CHECKSUMS && req->checksum_offset % sizeof(uint32_t) != 0) {
        return hifc_fail(-EINVAL, "checksum_offset %llu: checksums are aligned to 4 bytes",
                         (unsigned long long)req->checksum_offset);
    }
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
        item->base = ns_resolve(ns, req, req->length);
        item->crc_count = parts;
        item->unit_bytes = req->length / parts;
        return item->base ? check_alignment(ns, req, item->base,
                                            hifc_extent_on_pages(req->length, parts))
                          : -EINVAL;
    }
    case HIFC_OP_WRITE:
        item->base = req->length ? ns_resolve(ns, req, req->length) : NULL;
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
                                 struct ns_item *items)
{
    bool locked = false;
    for (uint32_t i = 0; i < count; i++) {
        items[i].unit_bytes = 0;
        if (reqs[i].op != HIFC_OP_WRITE) {
            continue;
        }
        if (!locked) {
            ns_lock(ns);
            locked = true;
        }
        const struct ns_reservation *r = ns_reservation_find(ns, reqs[i].handle);
        if (r && r->part_count > 1) {
            items[i].unit_bytes = r->unit_bytes;
        }
    }
    if (locked) {
        ns_unlock(ns);
    }
}

/* ---- checksums ------------------------------------------------------------------------------ */

static int checksums(struct hifc_ns *ns, const struct hifc_req *req, struct ns_item *item)
{
    if (req->flags & HIFC_F_CHECKSUMS) {
        const uint8_t *given = ns_checksum_memory(ns, req, item->crc_count);
        if (!given) {
            return -EINVAL;
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
        item->crcs[i] = hifc_span_crc(0, &span, at, bytes);
    }
    return 0;
}

int ns_prepare(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count,
                   struct ns_scratch *scratch)
{
    uint64_t crcs = 0;
    scratch->crcs = scratch->crcs_inline;
    scratch->items = count <= NS_SCRATCH_REQS ? scratch->items_inline
                                           : malloc(count * sizeof *scratch->items);
    if (!scratch->items) {
        return hifc_fail(-ENOMEM, "no memory for %u requests", count);
    }
    look_at_reservations(ns, reqs, count, scratch->items);
    for (uint32_t i = 0; i < count; i++) {
        struct ns_item *item = &scratch->items[i];
        item->status = check(ns, &reqs[i], item);
        if (item->status != 0) {
            item->crc_count = 0;
        }
        crcs += item->crc_count;
    }
    if (crcs > NS_SCRATCH_CRCS) {
        scratch->crcs = malloc(crcs * 4);
        if (!scratch->crcs) {
            scratch->crcs = scratch->crcs_inline;
            return hifc_fail(-ENOMEM, "no memory for %llu checksums", (unsigned long long)crcs);
        }
    }
    uint32_t *next = scratch->crcs;
    for (uint32_t i = 0; i < count; i++) {
        struct ns_item *item = &scratch->items[i];
        item->crcs = next;
        next += item->crc_count;
        if (item->crc_count > 0) {
            item->status = checksums(ns, &reqs[i], item);
        }
    }
    return 0;
}
