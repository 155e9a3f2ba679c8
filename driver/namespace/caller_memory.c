/* SPDX-License-Identifier: Apache-2.0
 *
 * caller_memory.c - the memory that a request names, checked like any outside input. No mutex.
 */
#include "namespace/ns.h"

uint8_t *ns_resolve(struct hifc_ns *ns, const struct hifc_req *req, uint64_t bytes)
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
    uint8_t *base = hifc_pools_resolve_lent(ns->pools, req->pool, req->buffer_offset, reach);
    if (!base) {
        hifc_fail(-EINVAL, "buffer [%llu, +%llu) does not lie within memory of pool %u that was "
                           "handed out",
                  (unsigned long long)req->buffer_offset, (unsigned long long)reach, req->pool);
    }
    return base;
}

uint8_t *ns_checksum_memory(struct hifc_ns *ns, const struct hifc_req *req, uint32_t count)
{
    uint8_t *memory = NULL;
    if (req->checksum_offset % sizeof(uint32_t) == 0) {
        memory = hifc_pools_resolve_lent(ns->pools, req->pool, req->checksum_offset, count * 4ull);
    }
    if (!memory) {
        hifc_fail(-EINVAL, "checksum_offset %llu: room for %u checksums of 4 bytes, aligned to 4, "
                           "is needed in memory of pool %u that was handed out",
                  (unsigned long long)req->checksum_offset, count, req->pool);
    }
    return memory;
}
