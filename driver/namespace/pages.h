/* SPDX-License-Identifier: Apache-2.0
 *
 * pages.h - pages that the device reaches, for headers, packed values and tails (pages.c). The owner's
 * mutex guards them.
 */
#ifndef HIFC_NS_PAGES_H
#define HIFC_NS_PAGES_H

#include <stdint.h>

#include "engine/engine.h"

#define NS_PAGES_SHARE 32u   /* one part in so many of the pool is internal pages */
#define NS_PAGES_LASTING 16u /* of these, for what lasts: headers of open segments */

struct ns_pages {
    struct hifc_pools *pools;
    uint8_t *own;        /* internal pages of pool 0, of which those from next on are new */
    uint8_t *next, *end;
    void *free;          /* internal pages that were used before and are free */
    uint32_t free_count; /* all that are free, new ones included */
};

void ns_pages_create(struct ns_pages *pages, struct hifc_pools *pools);
/* bytes: pages, for as long as something is in flight. One page is an internal one while there are
 * any, all else comes from the pool. NULL, without an error: the pool is full. */
uint8_t *ns_pages_alloc(struct ns_pages *pages, uint32_t bytes);
/* A page for longer, which does not come to stand in the way of large buffers. */
uint8_t *ns_pages_alloc_lasting(struct ns_pages *pages);
void ns_pages_free(struct ns_pages *pages, uint8_t *memory, uint32_t bytes);
/* Internal pages that were ever used, in bytes. */
uint64_t ns_pages_used_bytes(const struct ns_pages *pages);

#endif
