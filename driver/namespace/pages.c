/* SPDX-License-Identifier: Apache-2.0
 *
 * pages.c - pages that the device reaches. They come from pool 0: single ones from its end, which is
 * kept for them, so that none of them stands between the caller's buffers.
 */
#include "namespace/pages.h"

#include "format/layout.h"
#include "util/invariant.h"

void ns_pages_create(struct ns_pages *pages, struct hifc_pools *pools)
{
    uint64_t used, peak, pool_bytes, offset;
    *pages = (struct ns_pages){.pools = pools};
    hifc_pools_usage(pools, &used, &peak, &pool_bytes);
    uint64_t kept = hifc_pools_keep(pools, pool_bytes / NS_PAGES_SHARE, &offset);
    if (kept > 0) {
        pages->own = pages->next = hifc_pools_resolve(pools, 0, offset, kept);
        pages->end = pages->own + kept;
        pages->free_count = (uint32_t)(kept / HIFC_PAGE_BYTES);
    }
}

/* One of the internal pages, unless fewer than leave stay behind. */
static uint8_t *own_page(struct ns_pages *pages, uint32_t leave)
{
    if (pages->free_count <= leave) {
        return NULL;
    }
    hifc_count_down(pages->free_count, 1u);
    void **page = pages->free;
    if (page) {
        pages->free = *page; /* a free page holds the pointer to the next one */
    } else {
        page = (void **)pages->next;
        pages->next += HIFC_PAGE_BYTES;
    }
    return (uint8_t *)page;
}

static uint8_t *pool_pages(struct ns_pages *pages, uint32_t bytes)
{
    uint64_t offset;
    return hifc_pools_try(pages->pools, bytes, &offset)
               ? hifc_pools_resolve(pages->pools, 0, offset, bytes)
               : NULL;
}

uint8_t *ns_pages_alloc(struct ns_pages *pages, uint32_t bytes)
{
    uint8_t *page = bytes == HIFC_PAGE_BYTES ? own_page(pages, NS_PAGES_LASTING) : NULL;
    return page ? page : pool_pages(pages, bytes);
}

uint8_t *ns_pages_alloc_lasting(struct ns_pages *pages)
{
    uint8_t *page = own_page(pages, 0);
    return page ? page : pool_pages(pages, HIFC_PAGE_BYTES);
}

void ns_pages_free(struct ns_pages *pages, uint8_t *memory, uint32_t bytes)
{
    if (bytes > HIFC_PAGE_BYTES || memory < pages->own || memory >= pages->end) {
        uint8_t *base = hifc_pools_resolve(pages->pools, 0, 0, 0);
        (void)hifc_pools_free(pages->pools, (uint64_t)(memory - base));
        return;
    }
    void **page = (void **)memory;
    *page = pages->free;
    pages->free = page;
    pages->free_count++;
}

uint64_t ns_pages_used_bytes(const struct ns_pages *pages)
{
    return (uint64_t)(pages->next - pages->own);
}
