/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.c - the memory that requests name: pool 0 is our own and hands out pages, the others are
 * the caller's.
 *
 * Pool 0 is one region cut into extents, free or taken, that cover it without gap; two neighbours
 * are never both free. Each extent is described at its first page (state, size) and at its last
 * (where it begins), so a free finds its neighbours at once. Free extents stand in lists by the
 * power of two below their size. The descriptions stand outside the region: the
 * device and the caller write the pages.
 *
 * A small extent that stays in the middle halves what fits, however little it takes. So what may be
 * large, the caller's buffers, comes from the front, and the caller's small ones and the library's
 * pages from the back; what the library takes for good is kept at the very end (hifc_pools_keep).
 *
 * The library's own pages come from the same region. A bit a page tells what was lent to the
 * caller, and only that can be named by a request or given back. A share of the region is never
 * lent: without any page of its own the library could not end a request, whose buffer then would
 * never come back.
 *
 * Buffers that are taken back while there is a hold wait in a list: transfers into them may still
 * be under way.
 *
 * Any thread: a mutex guards the extents, resolve takes none.
 */
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "engine/region.h"
#include "util/error.h"
#include "util/invariant.h"

#define PAGE_BYTES HIFC_PAGE_BYTES
#define CLASSES 32u
#define NONE UINT32_MAX
/* Extents of the request's own class that are looked at before a larger one is split. */
#define FIT_PROBES_MAX 16u
/* Extents, free and taken, that are looked at from the back. */
#define BACK_PROBES_MAX 16u
/* A buffer of at most one part in so many of the pool is a small one. */
#define SMALL_SHARE 256u

enum page_state { INTERIOR, FREE, TAKEN, HELD };
enum end { FRONT, BACK }; /* of a free extent, and of the pool */

struct page {
    uint32_t state : 2;  /* enum page_state; of an extent's first page */
    uint32_t count : 30; /* pages of the extent that begins here */
    uint32_t first;      /* where the extent that ends here begins */
    uint32_t next, prev; /* in the list of its class, while free; next: of the held ones */
};

struct caller_pool {
    _Atomic(uint8_t *) base; /* NULL: no pool of this number */
    _Atomic uint64_t size_bytes;
    _Atomic bool retired; /* taken by no request any more */
    bool registered;      /* with the device */
};

struct hifc_pools {
    struct hifc_device *device;
    struct hifc_region region;
    struct caller_pool table[HIFC_POOLS_MAX];
    pthread_mutex_t mutex; /* what follows, and changes of table */
    uint32_t page_count;
    uint32_t lists[CLASSES];
    uint32_t holds;    /* reasons not to hand out again what is taken back */
    uint32_t held;     /* what was taken back meanwhile: a list */
    uint64_t lent_bytes;
    bool ended;
    struct page *pages;
    _Atomic uint64_t *lent; /* a bit a page */
    _Atomic uint64_t used_bytes, peak_bytes; /* without what is kept */
    _Atomic uint64_t kept_bytes;
};

/* ---- extents; the mutex is held -------------------------------------------------------------- */

static unsigned class_of(uint32_t count)
{
    return 31u - (unsigned)__builtin_clz(count);
}

static void describe(struct hifc_pools *pools, uint32_t first, uint32_t count,
                     enum page_state state)
{
    pools->pages[first].state = state;
    pools->pages[first].count = count;
    pools->pages[first + count - 1].first = first;
}

static void list_add(struct hifc_pools *pools, uint32_t first, uint32_t count)
{
    describe(pools, first, count, FREE);
    uint32_t *head = &pools->lists[class_of(count)];
    pools->pages[first].prev = NONE;
    pools->pages[first].next = *head;
    if (*head != NONE) {
        pools->pages[*head].prev = first;
    }
    *head = first;
}

static void list_remove(struct hifc_pools *pools, uint32_t first)
{
    struct page *page = &pools->pages[first];
    if (page->prev == NONE) {
        pools->lists[class_of(page->count)] = page->next;
    } else {
        pools->pages[page->prev].next = page->next;
    }
    if (page->next != NONE) {
        pools->pages[page->next].prev = page->prev;
    }
    page->state = INTERIOR;
}

/* A free extent of at least count pages, or NONE. */
static uint32_t find_fit(struct hifc_pools *pools, uint32_t count)
{
    unsigned own = class_of(count), probes = 0;
    uint32_t first = pools->lists[own];
    for (; first != NONE && probes < FIT_PROBES_MAX; probes++) {
        if (pools->pages[first].count >= count) {
            return first;
        }
        first = pools->pages[first].next;
    }
    for (unsigned class = own + 1; class < CLASSES; class++) {
        if (pools->lists[class] != NONE) {
            return pools->lists[class]; /* all of them are large enough */
        }
    }
    for (; first != NONE; first = pools->pages[first].next) { /* the last resort: the rest */
        if (pools->pages[first].count >= count) {
            return first;
        }
    }
    return NONE;
}

/* The same, as far back as a few looks find one. */
static uint32_t find_back(struct hifc_pools *pools, uint32_t count)
{
    uint32_t end = pools->page_count;
    for (unsigned probes = 0; end > 0 && probes < BACK_PROBES_MAX; probes++) {
        uint32_t first = pools->pages[end - 1].first;
        if (pools->pages[first].state == FREE && pools->pages[first].count >= count) {
            return first;
        }
        end = first;
    }
    return find_fit(pools, count);
}

static uint32_t take(struct hifc_pools *pools, uint32_t count, enum end end)
{
    uint32_t first = end == BACK ? find_back(pools, count) : find_fit(pools, count);
    if (first == NONE) {
        return NONE;
    }
    uint32_t rest = pools->pages[first].count - count;
    list_remove(pools, first);
    if (rest > 0) {
        list_add(pools, end == BACK ? first : first + count, rest);
    }
    first += end == BACK ? rest : 0;
    describe(pools, first, count, TAKEN);
    return first;
}

static void give_back(struct hifc_pools *pools, uint32_t first)
{
    uint32_t count = pools->pages[first].count;
    pools->pages[first].state = INTERIOR;
    uint32_t after = first + count;
    if (after < pools->page_count && pools->pages[after].state == FREE) {
        count += pools->pages[after].count;
        list_remove(pools, after);
    }
    if (first > 0) {
        uint32_t before = pools->pages[first - 1].first;
        if (pools->pages[before].state == FREE) {
            count += pools->pages[before].count;
            list_remove(pools, before);
            first = before;
        }
    }
    list_add(pools, first, count);
}

/* ---- pool 0 ---------------------------------------------------------------------------------- */

int hifc_pools_create(struct hifc_device *device, uint64_t size_bytes, struct hifc_pools **out)
{
    struct hifc_pools *pools = calloc(1, sizeof *pools);
    if (!pools) {
        return hifc_fail(-ENOMEM, "%s: out of memory for the buffer pools", device->uri);
    }
    int rc = hifc_region_create(device, size_bytes, "hifc buffer pool", &pools->region);
    if (rc) {
        free(pools);
        return rc;
    }
    uint64_t page_count = pools->region.size_bytes / PAGE_BYTES;
    if (page_count < 1u << 30) {
        pools->pages = calloc(page_count, sizeof *pools->pages); /* touched where extents begin */
    }
    pools->lent = calloc(page_count / 64 + 1, sizeof *pools->lent);
    if (!pools->pages || !pools->lent) {
        hifc_region_destroy(device, &pools->region);
        free(pools->pages);
        free((void *)pools->lent);
        free(pools);
        return hifc_fail(-ENOMEM, "%s: no memory to describe a buffer pool of %llu bytes; use a "
                         "smaller pool_size_bytes", device->uri, (unsigned long long)size_bytes);
    }
    pools->device = device;
    pools->page_count = (uint32_t)page_count;
    for (unsigned i = 0; i < CLASSES; i++) {
        pools->lists[i] = NONE;
    }
    pools->held = NONE;
    list_add(pools, 0, pools->page_count);
    pthread_mutex_init(&pools->mutex, NULL);
    atomic_store(&pools->table[0].size_bytes, pools->region.size_bytes);
    atomic_store(&pools->table[0].base, pools->region.base);
    *out = pools;
    return 0;
}

void hifc_pools_release(struct hifc_pools *pools)
{
    for (uint32_t pool = 1; pool < HIFC_POOLS_MAX; pool++) {
        if (atomic_load(&pools->table[pool].base)) {
            (void)hifc_pools_unregister(pools, pool);
        }
    }
    hifc_region_release(pools->device, &pools->region);
}

void hifc_pools_destroy(struct hifc_pools *pools)
{
    if (!pools) {
        return;
    }
    hifc_pools_release(pools);
    hifc_region_destroy(pools->device, &pools->region);
    pthread_mutex_destroy(&pools->mutex);
    free(pools->pages);
    free((void *)pools->lent);
    free(pools);
}

/* Mutex held. Where the extent begins, or NONE. */
static uint32_t alloc_pages(struct hifc_pools *pools, uint64_t count, enum end end)
{
    uint32_t first = count <= pools->page_count ? take(pools, (uint32_t)count, end) : NONE;
    if (first != NONE) {
        uint64_t used = pools->used_bytes + count * PAGE_BYTES;
        pools->used_bytes = used;
        pools->peak_bytes = used > pools->peak_bytes ? used : pools->peak_bytes;
    }
    return first;
}

static uint64_t pages_of(uint64_t size_bytes)
{
    return size_bytes / PAGE_BYTES + (size_bytes % PAGE_BYTES != 0);
}

/* False, without an error, where there is no room. size_bytes is not 0. */
static bool alloc_at(struct hifc_pools *pools, uint64_t size_bytes, enum end end, uint64_t *offset)
{
    pthread_mutex_lock(&pools->mutex);
    uint32_t first = alloc_pages(pools, pages_of(size_bytes), end);
    pthread_mutex_unlock(&pools->mutex);
    *offset = (uint64_t)first * PAGE_BYTES;
    return first != NONE;
}

static int alloc_or_fail(struct hifc_pools *pools, uint64_t size_bytes, enum end end,
                         uint64_t *offset)
{
    if (size_bytes == 0) {
        return hifc_fail(-EINVAL, "%s: a buffer of 0 bytes; ask for at least one",
                         pools->device->uri);
    }
    return alloc_at(pools, size_bytes, end, offset)
               ? 0
               : hifc_fail(-ENOMEM, "%s: no %llu contiguous bytes left in the buffer pool (%llu of "
                           "%llu used, %llu kept); free buffers or open with a larger "
                           "pool_size_bytes", pools->device->uri, (unsigned long long)size_bytes,
                           (unsigned long long)pools->used_bytes,
                           (unsigned long long)pools->region.size_bytes,
                           (unsigned long long)pools->kept_bytes);
}

int hifc_pools_alloc(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset)
{
    return alloc_or_fail(pools, size_bytes, FRONT, offset);
}

bool hifc_pools_try(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset)
{
    return alloc_at(pools, size_bytes, BACK, offset);
}

uint64_t hifc_pools_keep(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset)
{
    pthread_mutex_lock(&pools->mutex);
    uint64_t count = pages_of(size_bytes);
    uint32_t first = count > 0 ? take(pools, (uint32_t)count, BACK) : NONE;
    pools->kept_bytes += first == NONE ? 0 : count * PAGE_BYTES;
    pthread_mutex_unlock(&pools->mutex);
    *offset = (uint64_t)first * PAGE_BYTES;
    return first == NONE ? 0 : count * PAGE_BYTES;
}

/* Whether a buffer that was taken begins there. Mutex held. */
static bool starts_buffer(const struct hifc_pools *pools, uint64_t offset)
{
    uint64_t page = offset / PAGE_BYTES;
    return offset % PAGE_BYTES == 0 && page < pools->page_count &&
           pools->pages[page].state == TAKEN;
}

int hifc_pools_free(struct hifc_pools *pools, uint64_t offset)
{
    uint64_t page = offset / PAGE_BYTES;
    bool valid = false;
    pthread_mutex_lock(&pools->mutex);
    if (starts_buffer(pools, offset)) {
        hifc_count_down(pools->used_bytes, (uint64_t)pools->pages[page].count * PAGE_BYTES);
        give_back(pools, (uint32_t)page);
        valid = true;
    }
    pthread_mutex_unlock(&pools->mutex);
    if (!valid) {
        return hifc_fail(-EINVAL, "%s: no buffer begins at offset %llu of the buffer pool (freed "
                         "twice, or never allocated)", pools->device->uri,
                         (unsigned long long)offset);
    }
    return 0;
}

/* The bits of pages [first, last] that stand in one word: the one of page at. */
static uint64_t word_mask(uint64_t at, uint64_t first, uint64_t last)
{
    uint64_t begin = at / 64 * 64, end = begin + 63;
    uint64_t mask = UINT64_MAX;
    mask &= first > begin ? UINT64_MAX << (first - begin) : UINT64_MAX;
    mask &= last < end ? UINT64_MAX >> (end - last) : UINT64_MAX;
    return mask;
}

static void mark_lent(struct hifc_pools *pools, uint64_t first, uint64_t count, bool lent)
{
    for (uint64_t at = first; at < first + count; at = (at / 64 + 1) * 64) {
        uint64_t mask = word_mask(at, first, first + count - 1);
        if (lent) {
            atomic_fetch_or_explicit(&pools->lent[at / 64], mask, memory_order_relaxed);
        } else {
            atomic_fetch_and_explicit(&pools->lent[at / 64], ~mask, memory_order_relaxed);
        }
    }
}

static bool all_lent(struct hifc_pools *pools, uint64_t first, uint64_t last)
{
    for (uint64_t at = first; at <= last; at = (at / 64 + 1) * 64) {
        uint64_t mask = word_mask(at, first, last);
        uint64_t bits = atomic_load_explicit(&pools->lent[at / 64], memory_order_relaxed);
        if ((bits & mask) != mask) {
            return false;
        }
    }
    return true;
}

/* What may be lent in all. */
static uint64_t lendable_bytes(const struct hifc_pools *pools)
{
    uint64_t size_bytes = (uint64_t)pools->page_count * PAGE_BYTES;
    return size_bytes - size_bytes / HIFC_POOL_OWN_SHARE;
}

int hifc_pools_lend(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset)
{
    if (size_bytes == 0) {
        return hifc_fail(-EINVAL, "%s: a buffer of 0 bytes; ask for at least one",
                         pools->device->uri);
    }
    uint64_t count = pages_of(size_bytes), most = lendable_bytes(pools);
    if (count > most / PAGE_BYTES) {
        return hifc_fail(-ENOMEM, "%s: a buffer of %llu bytes is larger than the pool may lend (%llu "
                         "bytes); open with a larger pool_size_bytes", pools->device->uri,
                         (unsigned long long)size_bytes, (unsigned long long)most);
    }
    uint32_t first = NONE;
    pthread_mutex_lock(&pools->mutex);
    uint64_t lent = pools->lent_bytes;
    bool awaited = pools->held != NONE;
    if (!pools->ended && count <= (most - lent) / PAGE_BYTES) {
        bool small = count <= pools->page_count / SMALL_SHARE;
        first = alloc_pages(pools, count, small ? BACK : FRONT);
    }
    if (first != NONE) {
        pools->lent_bytes += count * PAGE_BYTES;
        mark_lent(pools, first, count, true);
    }
    pthread_mutex_unlock(&pools->mutex);
    if (first == NONE) {
        return hifc_fail(awaited ? -EAGAIN : -ENOMEM,
                         "%s: no room for a buffer of %llu bytes: buffers hold %llu of the %llu "
                         "bytes of the pool that may be lent; free some, or open with a larger "
                         "pool_size_bytes", pools->device->uri, (unsigned long long)size_bytes,
                         (unsigned long long)lent, (unsigned long long)most);
    }
    *offset = (uint64_t)first * PAGE_BYTES;
    return 0;
}

/* Mutex held. */
static void unmap_if_unused(struct hifc_pools *pools)
{
    if (pools->ended && pools->lent_bytes == 0) {
        atomic_store(&pools->table[0].base, NULL);
        atomic_store(&pools->table[0].size_bytes, 0);
        hifc_region_destroy(pools->device, &pools->region);
    }
}

/* Mutex held. */
static void end_loan(struct hifc_pools *pools, uint32_t first)
{
    uint64_t bytes = (uint64_t)pools->pages[first].count * PAGE_BYTES;
    hifc_count_down(pools->used_bytes, bytes);
    hifc_count_down(pools->lent_bytes, bytes);
    give_back(pools, first);
}

int hifc_pools_take_back(struct hifc_pools *pools, uint64_t offset)
{
    uint64_t first = offset / PAGE_BYTES;
    pthread_mutex_lock(&pools->mutex);
    bool lent = starts_buffer(pools, offset) && all_lent(pools, first, first);
    if (lent) {
        mark_lent(pools, first, pools->pages[first].count, false);
        if (pools->holds > 0) {
            pools->pages[first].state = HELD;
            pools->pages[first].next = pools->held;
            pools->held = (uint32_t)first;
        } else {
            end_loan(pools, (uint32_t)first);
            unmap_if_unused(pools);
        }
    }
    pthread_mutex_unlock(&pools->mutex);
    return lent ? 0
                : hifc_fail(-EINVAL, "%s: no buffer begins at offset %llu of the buffer pool "
                            "(freed twice, or never allocated)", pools->device->uri,
                            (unsigned long long)offset);
}

void hifc_pools_hold(struct hifc_pools *pools)
{
    pthread_mutex_lock(&pools->mutex);
    pools->holds++;
    pthread_mutex_unlock(&pools->mutex);
}

void hifc_pools_unhold(struct hifc_pools *pools)
{
    pthread_mutex_lock(&pools->mutex);
    assert(pools->holds > 0);
    pools->holds--;
    while (pools->holds == 0 && pools->held != NONE) {
        uint32_t first = pools->held;
        pools->held = pools->pages[first].next;
        end_loan(pools, first);
    }
    unmap_if_unused(pools);
    pthread_mutex_unlock(&pools->mutex);
}

/* Stands in messages for a device that was closed. */
static struct hifc_device closed_device = {.uri = "a closed namespace"};

void hifc_pools_end(struct hifc_pools *pools)
{
    pthread_mutex_lock(&pools->mutex);
    pools->device = &closed_device;
    pools->ended = true;
    unmap_if_unused(pools);
    pthread_mutex_unlock(&pools->mutex);
}

uint8_t *hifc_pools_resolve_lent(struct hifc_pools *pools, uint32_t pool, uint64_t offset,
                                 uint64_t bytes)
{
    uint8_t *memory = hifc_pools_resolve(pools, pool, offset, bytes);
    if (memory && pool == 0 && bytes > 0 &&
        !all_lent(pools, offset / PAGE_BYTES, (offset + bytes - 1) / PAGE_BYTES)) {
        return NULL;
    }
    return memory && atomic_load(&pools->table[pool].retired) ? NULL : memory;
}

void hifc_pools_usage(const struct hifc_pools *pools, uint64_t *used_bytes, uint64_t *peak_bytes,
                      uint64_t *size_bytes)
{
    *used_bytes = atomic_load(&pools->used_bytes);
    *peak_bytes = atomic_load(&pools->peak_bytes);
    *size_bytes = pools->region.size_bytes;
}

uint64_t hifc_pools_lent_bytes(struct hifc_pools *pools)
{
    pthread_mutex_lock(&pools->mutex);
    uint64_t lent_bytes = pools->lent_bytes;
    pthread_mutex_unlock(&pools->mutex);
    return lent_bytes;
}

bool hifc_pools_huge(const struct hifc_pools *pools)
{
    return pools->region.huge;
}

/* ---- pools of the caller --------------------------------------------------------------------- */

static int check_memory(const struct hifc_device *device, const void *base, uint64_t size_bytes)
{
    const struct hifc_geometry *geometry = &device->geometry;
    uint64_t align = geometry->registered_only ? HIFC_HUGE_PAGE_BYTES : PAGE_BYTES;
    if (align < geometry->buffer_align_bytes) {
        align = geometry->buffer_align_bytes;
    }
    uintptr_t end;
    if (!base || size_bytes == 0 ||
        __builtin_add_overflow((uintptr_t)base, (uintptr_t)size_bytes, &end)) {
        return hifc_fail(-EINVAL, "%s: a pool of %llu bytes at %p makes no sense", device->uri,
                         (unsigned long long)size_bytes, base);
    }
    if (((uintptr_t)base | size_bytes) & (align - 1)) {
        return hifc_fail(-EINVAL, "%s: pool memory must begin on and be a multiple of %llu bytes%s"
                         "; got %llu at %p", device->uri, (unsigned long long)align,
                         geometry->registered_only ? " (whole huge pages)" : "",
                         (unsigned long long)size_bytes, base);
    }
    return 0;
}

int hifc_pools_register(struct hifc_pools *pools, void *base, uint64_t size_bytes, uint32_t *pool)
{
    struct hifc_device *device = pools->device;
    int rc = check_memory(device, base, size_bytes);
    if (rc) {
        return rc;
    }
    pthread_mutex_lock(&pools->mutex);
    uint32_t number = 1;
    while (number < HIFC_POOLS_MAX && atomic_load(&pools->table[number].base)) {
        number++;
    }
    if (number == HIFC_POOLS_MAX) {
        rc = hifc_fail(-ENOSPC, "%s: %u pools are registered already; unregister one", device->uri,
                       HIFC_POOLS_MAX);
    } else {
        struct caller_pool *entry = &pools->table[number];
        bool can = (((uintptr_t)base | size_bytes) & (HIFC_HUGE_PAGE_BYTES - 1)) == 0;
        if (device->ops->register_memory && can) {
            rc = device->ops->register_memory(device, base, size_bytes);
        }
        entry->registered = device->ops->register_memory && can && rc == 0;
        rc = device->geometry.registered_only ? rc : 0; /* otherwise it only makes it faster */
        if (!rc) {
            atomic_store(&entry->size_bytes, size_bytes);
            atomic_store(&entry->retired, false);
            atomic_store(&entry->base, base);
            *pool = number;
        }
    }
    pthread_mutex_unlock(&pools->mutex);
    return rc;
}

/* Where a caller's pool begins, or NULL with an error. */
static uint8_t *callers_base(struct hifc_pools *pools, uint32_t pool)
{
    uint8_t *base = pool > 0 && pool < HIFC_POOLS_MAX ? atomic_load(&pools->table[pool].base)
                                                      : NULL;
    if (!base) {
        hifc_fail(-EINVAL, "%s: no pool %u is registered%s", pools->device->uri, pool,
                  pool ? "" : " by a caller (0 is the namespace's own)");
    }
    return base;
}

int hifc_pools_retire(struct hifc_pools *pools, uint32_t pool, bool retired)
{
    pthread_mutex_lock(&pools->mutex);
    uint8_t *base = callers_base(pools, pool);
    if (base) {
        atomic_store(&pools->table[pool].retired, retired);
    }
    pthread_mutex_unlock(&pools->mutex);
    return base ? 0 : -EINVAL;
}

int hifc_pools_unregister(struct hifc_pools *pools, uint32_t pool)
{
    int rc = 0;
    pthread_mutex_lock(&pools->mutex);
    uint8_t *base = callers_base(pools, pool);
    if (!base) {
        rc = -EINVAL;
    } else {
        struct caller_pool *entry = &pools->table[pool];
        uint64_t size_bytes = atomic_load(&entry->size_bytes);
        atomic_store(&entry->base, NULL);
        atomic_store(&entry->size_bytes, 0);
        if (entry->registered && pools->device->ops->unregister_memory) {
            rc = pools->device->ops->unregister_memory(pools->device, base, size_bytes);
        }
    }
    pthread_mutex_unlock(&pools->mutex);
    return rc;
}

uint8_t *hifc_pools_resolve(struct hifc_pools *pools, uint32_t pool, uint64_t offset,
                            uint64_t bytes)
{
    if (pool >= HIFC_POOLS_MAX) {
        return NULL;
    }
    /* base is set last and cleared first: a base seen twice had this size in between. */
    struct caller_pool *entry = &pools->table[pool];
    uint8_t *base = atomic_load_explicit(&entry->base, memory_order_acquire);
    uint64_t size_bytes = atomic_load_explicit(&entry->size_bytes, memory_order_acquire);
    if (!base || base != atomic_load_explicit(&entry->base, memory_order_acquire)) {
        return NULL;
    }
    return bytes <= size_bytes && offset <= size_bytes - bytes ? base + offset : NULL;
}
