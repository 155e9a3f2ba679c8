/* SPDX-License-Identifier: Apache-2.0
 *
 * index.c - the table of live keys. See index.h for the contract.
 *
 * One sparse memfd holds, by offset: the shard table, the directory, and a region of slots for
 * every shard. The directory maps the upper `depth` bits of a key's hash to a shard (extendible
 * hashing): a shard grows by a sixteenth when more than 92 % of its capacity is taken, and one that
 * would outgrow CAPACITY_MAX splits in two, so that memory follows the count of entries from the
 * first thousand on and no operation ever moves more than one shard.
 *
 * Invariants of a shard, with home(slot) = the hash bits below the shard's own, scaled to capacity:
 *   - used slots stand in ascending order of hash, each at or behind its home;
 *   - between a used slot and its home every slot is used;
 *   - slots behind `total` were never touched or were punched out; the last of `total` is empty, so
 *     a probe needs no bound. Homes end at `capacity`, the rest of `total` takes the overflow. A
 *     region has room for capacity plus all entries, so that even a hash that maps every key to
 *     the last home could not break it.
 *
 * Resizing works in place: the slots are gathered at the right end, then laid out from the left,
 * which never overtakes what is still to be read.
 *
 * Threads: none of its own; the namespace's mutex guards it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "namespace/index.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/error.h"
#include "util/invariant.h"

#define PAGE_SLOTS (HIFC_PAGE_BYTES / (uint32_t)sizeof(struct hifc_slot))
#define TOTAL_MAX 8192u
#define REGION_SLOTS (2u * TOTAL_MAX)
#define REGION_BYTES ((uint64_t)REGION_SLOTS * sizeof(struct hifc_slot))
#define TAIL_SLOTS 64u
#define CAPACITY_MAX (TOTAL_MAX - TAIL_SLOTS)
#define SHARD_MEAN_MAX 3600u /* entries of a shard at the deepest directory and a full index */
#define CURSOR_TIES 8u /* entries that may share the upper 61 bits of a hash */

struct shard {
    uint32_t count;
    uint32_t capacity; /* homes */
    uint32_t total;    /* slots, a multiple of PAGE_SLOTS */
    uint16_t held;     /* pages of the region that are taken */
    uint16_t depth;    /* hash bits that all its keys share */
};

struct hifc_index {
    uint64_t seeds[4];
    uint8_t *memory;
    struct shard *shards;
    uint32_t *directory;
    struct hifc_slot *regions;
    uint64_t memory_bytes;
    uint64_t count;
    uint64_t max_entries;
    uint64_t held_pages; /* of all regions */
    uint32_t shard_count;
    uint32_t depth; /* of the directory */
    uint32_t depth_max;
    int fd;
};

static uint64_t round_up(uint64_t value, uint64_t step)
{
    return (value + step - 1) / step * step;
}

static uint64_t hash_of(const struct hifc_index *index, const struct hifc_key *key)
{
    uint64_t half[2];
    memcpy(half, key->bytes, sizeof half);
    unsigned __int128 product =
        (unsigned __int128)(half[0] ^ index->seeds[0]) * (half[1] ^ index->seeds[1]);
    product = (unsigned __int128)((uint64_t)product ^ index->seeds[2]) *
              ((uint64_t)(product >> 64) ^ index->seeds[3]);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The upper depth bits; a depth of 0 gives 0. */
static uint64_t upper_bits(uint64_t hash, uint32_t depth)
{
    return hash >> 1 >> (63 - depth);
}

static uint32_t home_of(uint64_t hash, uint32_t depth, uint32_t capacity)
{
    return (uint32_t)(((unsigned __int128)(hash << depth) * capacity) >> 64);
}

static struct shard *shard_of(const struct hifc_index *index, uint64_t hash)
{
    return &index->shards[index->directory[upper_bits(hash, index->depth)]];
}

static struct hifc_slot *slots_of(const struct hifc_index *index, const struct shard *shard)
{
    return index->regions + (uint64_t)(shard - index->shards) * REGION_SLOTS;
}

static bool used(const struct hifc_slot *slot)
{
    return slot->flags & HIFC_SLOT_USED;
}

static bool same_key(const struct hifc_key *a, const struct hifc_key *b)
{
    uint64_t x[2], y[2];
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    return ((x[0] ^ y[0]) | (x[1] ^ y[1])) == 0;
}

/* An entry stands five slots behind its home on average: three lines, fetched at once. */
static void fetch(const struct hifc_slot *home)
{
    __builtin_prefetch(home);
    __builtin_prefetch(home + 2);
    __builtin_prefetch(home + 4);
    __builtin_prefetch(home + 6);
}

static uint32_t limit_of(uint32_t capacity)
{
    return (uint32_t)((uint64_t)capacity * 92 / 100);
}

/* Slots for count entries with room for a sixteenth more, at most TOTAL_MAX. */
static uint32_t total_for(uint32_t count)
{
    uint64_t capacity = (uint64_t)count * 100 * 17 / (92 * 16) + 1;
    uint64_t total = round_up(capacity + TAIL_SLOTS, PAGE_SLOTS);
    return (uint32_t)(total < TOTAL_MAX ? total : TOTAL_MAX);
}

static void account(struct hifc_index *index, struct shard *shard, uint32_t total)
{
    uint32_t pages = total / PAGE_SLOTS;
    if (pages > shard->held) {
        index->held_pages += pages - shard->held;
        shard->held = (uint16_t)pages;
    }
}

/* Gives the pages behind shard->total back. Where the kernel refuses they stay ours, and zero. */
static void trim(struct hifc_index *index, struct shard *shard)
{
    uint32_t pages = shard->total / PAGE_SLOTS;
    if (pages >= shard->held) {
        return;
    }
    uint8_t *start = (uint8_t *)(slots_of(index, shard) + shard->total);
    if (madvise(start, (size_t)(shard->held - pages) * HIFC_PAGE_BYTES, MADV_REMOVE) == 0) {
        index->held_pages -= shard->held - pages;
        shard->held = (uint16_t)pages;
    }
}

/* Lays the slots out for a new depth and new_total slots. */
static void resize(struct hifc_index *index, struct shard *shard, uint32_t depth,
                   uint32_t new_total)
{
    struct hifc_slot *slots = slots_of(index, shard);
    uint32_t capacity = new_total - TAIL_SLOTS;
    uint32_t end = new_total > shard->total ? new_total : shard->total;
    account(index, shard, end);

    uint32_t read = end;
    for (uint32_t i = shard->total; i-- > 0;) {
        if (used(&slots[i]) && --read != i) {
            slots[read] = slots[i];
            memset(&slots[i], 0, sizeof slots[i]);
        }
    }
    uint32_t next = 0;
    for (; read < end; read++) {
        uint32_t place = home_of(hash_of(index, &slots[read].key), depth, capacity);
        place = place > next ? place : next;
        while (place > read) { /* the tail is too short for what ends there */
            account(index, shard, end + PAGE_SLOTS);
            memmove(&slots[read + PAGE_SLOTS], &slots[read], (end - read) * sizeof *slots);
            memset(&slots[read], 0, PAGE_SLOTS * sizeof *slots);
            read += PAGE_SLOTS;
            end += PAGE_SLOTS;
        }
        if (place != read) {
            slots[place] = slots[read];
            memset(&slots[read], 0, sizeof slots[read]);
        }
        next = place + 1;
    }
    uint32_t needed = (uint32_t)round_up(next + 1, PAGE_SLOTS);
    shard->total = needed > new_total ? needed : new_total;
    shard->capacity = capacity;
    shard->depth = (uint16_t)depth;
    account(index, shard, shard->total);
    trim(index, shard);
}

static void double_directory(struct hifc_index *index)
{
    for (uint64_t i = 1ull << index->depth; i-- > 0;) {
        uint32_t shard = index->directory[i];
        index->directory[2 * i] = shard;
        index->directory[2 * i + 1] = shard;
    }
    index->depth++;
}

/* Moves the upper half of the hashes of hash's shard into a new one. */
static bool split(struct hifc_index *index, uint64_t hash)
{
    struct shard *shard = shard_of(index, hash);
    if (shard->depth == index->depth_max) {
        return false;
    }
    if (shard->depth == index->depth) {
        double_directory(index);
    }
    uint32_t depth = shard->depth + 1u;
    uint32_t span_log2 = index->depth - depth;
    uint64_t first = (upper_bits(hash, shard->depth) << 1 | 1) << span_log2;
    uint32_t id = index->shard_count++;
    for (uint64_t i = 0; i < 1ull << span_log2; i++) {
        index->directory[first + i] = id;
    }

    struct hifc_slot *slots = slots_of(index, shard);
    uint32_t border = 0, upper = 0;
    for (uint32_t i = shard->total; i-- > 0;) {
        if (used(&slots[i])) {
            if ((hash_of(index, &slots[i].key) << shard->depth) >> 63 == 0) {
                border = i + 1;
                break;
            }
            upper++;
        }
    }
    struct shard *fresh = &index->shards[id];
    struct hifc_slot *to = slots_of(index, fresh);
    *fresh = (struct shard){.count = upper, .total = (uint32_t)round_up(upper + 1, PAGE_SLOTS)};
    for (uint32_t i = border, n = 0; i < shard->total; i++) {
        if (used(&slots[i])) {
            to[n++] = slots[i];
        }
    }
    memset(&slots[border], 0, (shard->total - border) * sizeof *slots);
    shard->count -= upper;
    resize(index, fresh, depth, total_for(fresh->count));
    resize(index, shard, depth, total_for(shard->count));
    return true;
}

/* Makes room for one more entry in hash's shard. */
static bool grow(struct hifc_index *index, uint64_t hash)
{
    struct shard *shard = shard_of(index, hash);
    if (shard->capacity < CAPACITY_MAX) {
        uint32_t total = total_for(shard->count);
        uint32_t least = shard->capacity + TAIL_SLOTS + PAGE_SLOTS;
        resize(index, shard, shard->depth, total > least ? total : least);
        return true;
    }
    while (shard->count >= limit_of(shard->capacity)) {
        if (!split(index, hash)) {
            return false;
        }
        shard = shard_of(index, hash);
    }
    return true;
}

int hifc_index_create(uint64_t max_entries, uint64_t seed, struct hifc_index **out)
{
    *out = NULL;
    if (max_entries == 0 || max_entries > HIFC_INDEX_ENTRIES_MAX) {
        return hifc_fail(-EINVAL, "an index of %llu entries: give 1 to %llu",
                         (unsigned long long)max_entries, HIFC_INDEX_ENTRIES_MAX);
    }
    struct hifc_index *index = calloc(1, sizeof *index);
    if (!index) {
        return hifc_fail(-ENOMEM, "no memory for the index");
    }
    index->max_entries = max_entries;
    while (max_entries >> index->depth_max > SHARD_MEAN_MAX) {
        index->depth_max++;
    }
    uint64_t state = seed;
    for (unsigned i = 0; i < 4; i++) { /* splitmix64 */
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        index->seeds[i] = z ^ z >> 31;
    }
    uint64_t shards_max = 1ull << index->depth_max;
    uint64_t directory_at = round_up(shards_max * sizeof(struct shard), HIFC_PAGE_BYTES);
    uint64_t regions_at = directory_at + round_up(shards_max * sizeof(uint32_t), HIFC_PAGE_BYTES);
    index->memory_bytes = regions_at + shards_max * REGION_BYTES;

    index->fd = memfd_create("hifc-index", MFD_CLOEXEC);
    if (index->fd < 0 || ftruncate(index->fd, (off_t)index->memory_bytes) != 0) {
        int code = -errno;
        if (index->fd >= 0) {
            close(index->fd);
        }
        free(index);
        return hifc_fail(code, "memfd of %llu bytes (sparse) for the index: %s",
                         (unsigned long long)regions_at, strerror(-code));
    }
    index->memory = mmap(NULL, index->memory_bytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_NORESERVE, index->fd, 0);
    if (index->memory == MAP_FAILED) {
        int code = -errno;
        close(index->fd);
        free(index);
        return hifc_fail(code, "mapping the index: %s; lower index_entries_max", strerror(-code));
    }
    index->shards = (struct shard *)index->memory;
    index->directory = (uint32_t *)(index->memory + directory_at);
    index->regions = (struct hifc_slot *)(index->memory + regions_at);
    index->shard_count = 1;
    index->shards[0].total = PAGE_SLOTS;
    resize(index, &index->shards[0], 0, PAGE_SLOTS);
    *out = index;
    return 0;
}

void hifc_index_destroy(struct hifc_index *index)
{
    if (index) {
        munmap(index->memory, index->memory_bytes);
        close(index->fd);
        free(index);
    }
}

struct hifc_slot *hifc_index_find(struct hifc_index *index, const struct hifc_key *key)
{
    uint64_t hash = hash_of(index, key);
    const struct shard *shard = shard_of(index, hash);
    struct hifc_slot *slot = slots_of(index, shard) + home_of(hash, shard->depth, shard->capacity);
    fetch(slot);
    for (; used(slot); slot++) {
        if (same_key(&slot->key, key)) {
            return slot;
        }
        if (hash_of(index, &slot->key) > hash) {
            break;
        }
    }
    return NULL;
}

struct hifc_slot *hifc_index_insert(struct hifc_index *index, const struct hifc_key *key)
{
    uint64_t hash = hash_of(index, key);
    struct shard *shard = shard_of(index, hash);
    if (index->count >= index->max_entries) {
        return NULL;
    }
    if (shard->count >= limit_of(shard->capacity)) {
        if (!grow(index, hash)) {
            return NULL;
        }
        shard = shard_of(index, hash);
    }
    struct hifc_slot *slots = slots_of(index, shard);
    struct hifc_slot *slot = slots + home_of(hash, shard->depth, shard->capacity);
    while (used(slot) && hash_of(index, &slot->key) <= hash) {
        slot++;
    }
    struct hifc_slot *empty = slot;
    while (used(empty)) {
        empty++;
    }
    if (empty + 1 == slots + shard->total) {
        shard->total += PAGE_SLOTS;
        account(index, shard, shard->total);
    }
    memmove(slot + 1, slot, (size_t)(empty - slot) * sizeof *slot);
    memset(slot, 0, sizeof *slot);
    slot->key = *key;
    slot->flags = HIFC_SLOT_USED;
    shard->count++;
    index->count++;
    return slot;
}

void hifc_index_remove(struct hifc_index *index, struct hifc_slot *slot)
{
    struct shard *shard = &index->shards[(uint64_t)(slot - index->regions) / REGION_SLOTS];
    struct hifc_slot *slots = slots_of(index, shard);
    struct hifc_slot *end = slot + 1;
    while (used(end) && slots + home_of(hash_of(index, &end->key), shard->depth,
                                        shard->capacity) < end) {
        end++;
    }
    memmove(slot, slot + 1, (size_t)(end - slot - 1) * sizeof *slot);
    memset(end - 1, 0, sizeof *slot);
    hifc_count_down(shard->count, 1u);
    hifc_count_down(index->count, 1u);
    if (shard->count < shard->capacity / 2 && total_for(shard->count) < shard->total) {
        resize(index, shard, shard->depth, total_for(shard->count));
    }
}

uint64_t hifc_index_count(const struct hifc_index *index)
{
    return index->count;
}

uint64_t hifc_index_bytes(const struct hifc_index *index)
{
    uint64_t table = round_up(index->shard_count * sizeof(struct shard), HIFC_PAGE_BYTES);
    uint64_t directory = round_up(sizeof(uint32_t) << index->depth, HIFC_PAGE_BYTES);
    uint64_t self = round_up(sizeof *index, HIFC_PAGE_BYTES);
    return self + table + directory + index->held_pages * HIFC_PAGE_BYTES;
}

void hifc_index_prefetch(const struct hifc_index *index, const struct hifc_key *key)
{
    uint64_t hash = hash_of(index, key);
    const struct shard *shard = shard_of(index, hash);
    const struct hifc_slot *slot =
        slots_of(index, shard) + home_of(hash, shard->depth, shard->capacity);
    fetch(slot);
}

/* A cursor is a place in the order of hashes, which resizing does not move: the upper 61 bits of
 * the hash last given out and how many of these bits' entries were given out. So an entry that
 * stays while others come and go is seen exactly once. */
struct hifc_slot *hifc_index_next(struct hifc_index *index, uint64_t *cursor)
{
    uint64_t group = *cursor / CURSOR_TIES, skip = *cursor % CURSOR_TIES;
    uint64_t hash = *cursor - skip;
    if (*cursor == UINT64_MAX) {
        return NULL;
    }
    for (;;) {
        const struct shard *shard = shard_of(index, hash);
        struct hifc_slot *slot = slots_of(index, shard), *end = slot + shard->total;
        slot += home_of(hash, shard->depth, shard->capacity);
        for (; slot < end; slot++) {
            uint64_t found = used(slot) ? hash_of(index, &slot->key) : 0;
            if (!used(slot) || found < hash) {
                continue;
            }
            if (found / CURSOR_TIES == group && skip > 0) {
                skip--;
                continue;
            }
            *cursor = (found / CURSOR_TIES == group ? *cursor : found - found % CURSOR_TIES) + 1;
            return slot;
        }
        uint64_t prefix = upper_bits(hash, shard->depth) + 1;
        if (prefix >> shard->depth) {
            *cursor = UINT64_MAX;
            return NULL;
        }
        hash = prefix << (64 - shard->depth);
    }
}
