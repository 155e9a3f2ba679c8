/* SPDX-License-Identifier: Apache-2.0
 *
 * prepare.h - what is known of each request before the mutex is taken (prepare.c).
 */
#ifndef HIFC_NS_PREPARE_H
#define HIFC_NS_PREPARE_H

#include "namespace/ns.h"

#define NS_SCRATCH_REQS 64u
#define NS_SCRATCH_CRCS 512u

/* Per request: where its memory is, and its raw part checksums. */
struct ns_item {
    uint8_t *base;
    uint32_t *crcs;
    uint32_t crc_count;
    uint32_t unit_bytes; /* bytes that one checksum covers */
    int status;          /* not 0: refused already */
};

struct ns_scratch {
    struct ns_item *items;
    uint32_t *crcs;
    struct ns_item items_inline[NS_SCRATCH_REQS];
    uint32_t crcs_inline[NS_SCRATCH_CRCS];
};

/* Checks all requests and computes their checksums. A request that is refused has its status in its
 * item; a negative errno refuses all. Call ns_scratch_free afterwards in either case. */
int ns_prepare(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count,
               struct ns_scratch *scratch);
void ns_scratch_free(struct ns_scratch *scratch);

#endif
