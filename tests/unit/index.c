/* SPDX-License-Identifier: Apache-2.0
 *
 * The index against a plain array that remembers which keys are there. The source is included
 * under other names, so that the tests can look at the invariants inside and set the seeds.
 */
#define hifc_index_create index_create
#define hifc_index_destroy index_destroy
#define hifc_index_find index_find
#define hifc_index_insert index_insert
#define hifc_index_remove index_remove
#define hifc_index_count index_count
#define hifc_index_bytes index_bytes
#define hifc_index_prefetch index_prefetch
#define hifc_index_next index_next
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#include "namespace/index.c"

#include "check.h"

static uint64_t random_state;

static uint64_t random_next(void)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    uint64_t x = random_state ^ random_state >> 33;
    x *= 0xff51afd7ed558ccdull;
    return x ^ x >> 29;
}

enum key_kind { RANDOM, SEQUENTIAL, SEQUENTIAL_HIGH, EQUAL_HALVES, STRIDED, KEY_KINDS };

static struct hifc_key key_at(enum key_kind kind, uint64_t i)
{
    uint64_t half[2] = {0, 0};
    switch (kind) {
    case RANDOM:
        half[0] = (i + 1) * 0x9e3779b97f4a7c15ull;
        half[1] = (i + 7) * 0xc2b2ae3d27d4eb4full;
        half[0] ^= half[1] >> 31;
        break;
    case SEQUENTIAL:
        half[0] = i;
        break;
    case SEQUENTIAL_HIGH:
        half[1] = i;
        break;
    case EQUAL_HALVES:
        half[0] = half[1] = i;
        break;
    default:
        half[0] = i << 40;
        half[1] = i << 52 | i >> 12;
        break;
    }
    struct hifc_key key;
    memcpy(&key, half, sizeof key);
    return key;
}

static void check_invariants(struct hifc_index *index)
{
    uint64_t count = 0, held = 0;
    for (uint32_t s = 0; s < index->shard_count; s++) {
        struct shard *shard = &index->shards[s];
        struct hifc_slot *slots = slots_of(index, shard);
        uint32_t here = 0;
        uint64_t last = 0;
        CHECK(shard->total <= REGION_SLOTS && shard->total % PAGE_SLOTS == 0);
        CHECK(shard->held >= shard->total / PAGE_SLOTS);
        CHECK(!used(&slots[shard->total - 1]));
        for (uint32_t i = 0; i < shard->total; i++) {
            if (!used(&slots[i])) {
                struct hifc_slot zero = {0};
                CHECK(memcmp(&slots[i], &zero, sizeof zero) == 0);
                continue;
            }
            uint64_t hash = hash_of(index, &slots[i].key);
            uint32_t home = home_of(hash, shard->depth, shard->capacity);
            CHECK(shard_of(index, hash) == shard);
            CHECK(hash >= last);
            CHECK(home <= i);
            CHECK(home == i || used(&slots[i - 1]));
            last = hash;
            here++;
        }
        CHECK_EQ(shard->count, here);
        count += here;
        held += shard->held;
    }
    CHECK_EQ(index->count, count);
    CHECK_EQ(index->held_pages, held);
}

/* Every universe key is present or not as the model says, and iteration sees exactly those. */
static void check_against(struct hifc_index *index, enum key_kind kind, const uint32_t *model,
                          uint32_t universe)
{
    uint64_t present = 0, seen = 0, cursor = 0;
    for (uint32_t i = 0; i < universe; i++) {
        struct hifc_key key = key_at(kind, i);
        struct hifc_slot *slot = index_find(index, &key);
        CHECK_EQ(slot != NULL, model[i] != 0);
        CHECK(!slot || slot->checksum == model[i]);
        present += model[i] != 0;
    }
    CHECK_EQ(index_count(index), present);
    uint64_t sum = 0, expected = 0;
    for (struct hifc_slot *slot; (slot = index_next(index, &cursor)); seen++) {
        sum += slot->checksum;
    }
    for (uint32_t i = 0; i < universe; i++) {
        expected += model[i];
    }
    CHECK_EQ(seen, present);
    CHECK_EQ(sum, expected);
    check_invariants(index);
}

/* Random inserts, removals and look-ups; the share of keys that are there sweeps up and down, so
 * that shards grow, split and shrink. */
static void random_operations(enum key_kind kind, uint32_t universe, uint32_t operations)
{
    struct hifc_index *index;
    uint32_t *model = calloc(universe, sizeof *model);
    CHECK_EQ(index_create(universe, random_next(), &index), 0);
    for (uint32_t n = 1; n <= operations; n++) {
        uint32_t i = (uint32_t)(random_next() % universe);
        uint32_t phase = (uint32_t)((uint64_t)n * 8 / operations) % 2;
        struct hifc_key key = key_at(kind, i);
        struct hifc_slot *slot = index_find(index, &key);
        CHECK_EQ(slot != NULL, model[i] != 0);
        bool want = random_next() % 100 < (phase ? 5 : 95);
        if (slot) {
            CHECK_EQ(slot->checksum, model[i]);
            CHECK(same_key(&slot->key, &key));
            if (!want) {
                index_remove(index, slot);
                model[i] = 0;
            }
        } else if (want) {
            slot = index_insert(index, &key);
            CHECK(slot != NULL);
            struct hifc_slot fresh = {.key = key, .flags = HIFC_SLOT_USED};
            CHECK(memcmp(slot, &fresh, sizeof fresh) == 0);
            slot->checksum = model[i] = n;
        }
        if (n % (operations / 4) == 0) {
            check_against(index, kind, model, universe);
        }
    }
    index_destroy(index);
    free(model);
}

TEST(agrees_with_a_model_for_every_kind_of_key)
{
    for (enum key_kind kind = 0; kind < KEY_KINDS; kind++) {
        random_state = 1000 + kind;
        random_operations(kind, 60000, 400000);
        random_operations(kind, 500, 20000);
    }
}

TEST(agrees_with_a_model_over_millions_of_operations)
{
    random_state = 7;
    random_operations(RANDOM, 300000, 3000000);
}

TEST(stays_within_forty_bytes_an_entry)
{
    for (enum key_kind kind = 0; kind < KEY_KINDS; kind++) {
        struct hifc_index *index;
        CHECK_EQ(index_create(10u << 20, 5 + kind, &index), 0);
        for (uint64_t i = 0; i < 400000; i++) {
            struct hifc_key key = key_at(kind, i);
            CHECK(index_insert(index, &key) != NULL);
            if (i >= 6000) {
                CHECK(index_bytes(index) <= (i + 1) * 40);
            }
        }
        check_invariants(index);
        index_destroy(index);
    }
}

TEST(gives_memory_back)
{
    struct hifc_index *index;
    CHECK_EQ(index_create(1u << 20, 3, &index), 0);
    uint64_t empty = index_bytes(index);
    for (uint64_t i = 0; i < 100000; i++) {
        struct hifc_key key = key_at(SEQUENTIAL, i);
        CHECK(index_insert(index, &key) != NULL);
    }
    uint64_t cursor = 0, removed = 0;
    for (struct hifc_slot *slot; (slot = index_next(index, &cursor)); removed++) {
        index_remove(index, slot);
    }
    CHECK_EQ(removed, 100000); /* removing while iterating misses nothing */
    CHECK_EQ(index_count(index), 0);
    CHECK(index_bytes(index) <= empty + index->shard_count * HIFC_PAGE_BYTES);
    check_invariants(index);
    index_destroy(index);
}

TEST(iteration_sees_every_entry_that_stays_while_others_come_and_go)
{
    struct hifc_index *index;
    enum { STAY = 20000, COME = 60000 };
    CHECK_EQ(index_create(STAY + COME, 11, &index), 0);
    for (uint64_t i = 0; i < STAY; i++) {
        struct hifc_key key = key_at(EQUAL_HALVES, i);
        index_insert(index, &key)->checksum = 1;
    }
    uint64_t cursor = 0, seen = 0, come = STAY;
    for (struct hifc_slot *slot; (slot = index_next(index, &cursor));) {
        seen += slot->checksum;
        for (unsigned n = 0; n < 3 && come < STAY + COME; n++) {
            struct hifc_key key = key_at(EQUAL_HALVES, come++);
            CHECK(index_insert(index, &key) != NULL); /* splits and grows under the cursor */
        }
    }
    CHECK_EQ(seen, STAY);
    CHECK(index->shard_count > 1);
    CHECK(index_next(index, &cursor) == NULL);
    index_destroy(index);
}

TEST(full_answers_null_and_stays_usable)
{
    struct hifc_index *index;
    CHECK_EQ(index_create(1000, 1, &index), 0);
    for (uint64_t i = 0; i < 1000; i++) {
        struct hifc_key key = key_at(SEQUENTIAL, i);
        CHECK(index_insert(index, &key) != NULL);
    }
    struct hifc_key more = key_at(SEQUENTIAL, 1000);
    CHECK(index_insert(index, &more) == NULL);
    struct hifc_key key = key_at(SEQUENTIAL, 17);
    index_remove(index, index_find(index, &key));
    CHECK(index_insert(index, &more) != NULL);
    CHECK(index_find(index, &more) != NULL);
    check_invariants(index);
    index_destroy(index);
    CHECK_EQ(index_create(0, 1, &index), -EINVAL);
    CHECK_EQ(index_create(UINT64_MAX, 1, &index), -EINVAL);
}

/* With this seed every such key has the same hash: the worst that could happen. */
TEST(a_hash_that_collides_always_fills_one_shard_and_breaks_nothing)
{
    struct hifc_index *index;
    CHECK_EQ(index_create(100000, 1, &index), 0);
    index->seeds[0] = 42;
    uint64_t inserted = 0;
    struct hifc_key key = {{0}};
    uint64_t half[2] = {42, 0};
    for (;; inserted++) {
        half[1] = inserted;
        memcpy(&key, half, sizeof key);
        if (!index_insert(index, &key)) {
            break;
        }
    }
    CHECK(inserted > CAPACITY_MAX * 9 / 10);
    check_invariants(index);
    for (half[1] = 0; half[1] < inserted; half[1] += 37) {
        memcpy(&key, half, sizeof key);
        struct hifc_slot *slot = index_find(index, &key);
        CHECK(slot != NULL);
        index_remove(index, slot);
        CHECK(index_find(index, &key) == NULL);
    }
    check_invariants(index);
    index_destroy(index);
}

TEST(prefetch_of_an_absent_key_is_harmless)
{
    struct hifc_index *index;
    CHECK_EQ(index_create(100, 9, &index), 0);
    struct hifc_key key = key_at(RANDOM, 1);
    index_prefetch(index, &key);
    CHECK(index_find(index, &key) == NULL);
    index_destroy(index);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
