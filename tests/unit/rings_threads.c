/* SPDX-License-Identifier: Apache-2.0
 *
 * rings_threads.c - threads produce into one ring, cancel and wait, while others put, delete and
 * reclaim what is read, and open and close rings beside it; what has arrived is never wrong. Meant
 * for the thread sanitizer as well.
 */
#include "submit.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#define NAME "ram://rings-threads?size=16MiB"
#define PRODUCERS 3u
#define EACH 12u /* descriptors at a time of each producer */
#define KEYS 40u
#define PARTS 3u
#define PART 8192u
#define VALUE (PARTS * PART)
#define ROUNDS 250u

static struct hifc_ns *ns;
static struct hifc_ring *ring;
static int32_t *statuses;
static uint8_t *pool;
static uint64_t arena;
static _Atomic bool stop;
static _Atomic uint32_t arrived;

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    key.bytes[9] = 77;
    return key;
}

static uint8_t byte_of(uint32_t n, uint32_t i)
{
    return (uint8_t)(n * 41 + i * 3 + (i >> 8) + 1);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

static int submit_one(struct hifc_req req)
{
    return submit_and_wait(ns, &req, 1);
}

static void put(uint32_t n, uint64_t at)
{
    for (uint32_t i = 0; i < VALUE; i++) {
        pool[at + i] = byte_of(n, i);
    }
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = key_of(n), .buffer_offset = at,
                           .length = VALUE, .part_count = PARTS};
    (void)submit_until_taken(ns, &req); /* a janitor that is late takes no key away */
}

static void check_arrived(const struct hifc_descriptor *d, uint32_t n)
{
    const uint8_t *data = pool + arena + d->place * 4096ull;
    uint32_t bytes = d->part_count ? d->part_count * PART : VALUE;
    for (uint32_t i = 0; i < bytes; i += 61) {
        CHECK_EQ(data[i], byte_of(n, d->first_part * PART + i));
    }
    atomic_fetch_add(&arrived, 1);
}

static void *produce(void *argument)
{
    uint32_t thread = (uint32_t)(uintptr_t)argument, random = thread + 17;
    struct hifc_descriptor some[EACH], cancel[2];
    uint32_t indices[EACH], keys[EACH];
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < EACH; i++) {
            uint32_t parts = next_random(&random) % (PARTS + 1);
            uint32_t slot = thread * EACH + i;
            keys[i] = next_random(&random) % KEYS;
            indices[i] = slot;
            some[i] = (struct hifc_descriptor){
                .place = slot * (VALUE / 4096),
                .first_part = parts ? (uint16_t)(next_random(&random) % (PARTS - parts + 1)) : 0,
                .part_count = (uint16_t)parts,
                .control = HIFC_RING_CONTROL(HIFC_RING_OP_READ, slot)};
            struct hifc_key key = key_of(keys[i]);
            memcpy(some[i].key, key.bytes, sizeof key.bytes);
        }
        uint32_t taken = (uint32_t)hifc_ring_submit(ring, some, EACH);
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t slot = thread * EACH + next_random(&random) % EACH;
            cancel[i] = (struct hifc_descriptor){
                .control = HIFC_RING_CONTROL(HIFC_RING_OP_CANCEL, slot)};
        }
        (void)hifc_ring_submit(ring, cancel, 2);
        CHECK(taken <= EACH);
        CHECK_EQ(hifc_ring_wait(ring, indices, taken, CHECK_HANG_US), 1);
        for (uint32_t i = 0; i < taken; i++) {
            int32_t status = __atomic_load_n(&statuses[indices[i]], __ATOMIC_ACQUIRE);
            CHECK(status == HIFC_OK || status == HIFC_MISS || status == HIFC_PENDING ||
                  status == HIFC_RETRY || status == HIFC_RING_CANCELLED ||
                  status == HIFC_RING_DUPLICATE);
            if (status == HIFC_OK) {
                check_arrived(&some[i], keys[i]);
            }
        }
    }
    return NULL;
}

static void *change(void *argument)
{
    uint64_t at = *(uint64_t *)argument;
    uint32_t random = 5;
    while (!atomic_load(&stop)) {
        uint32_t n = next_random(&random) % KEYS;
        (void)submit_one((struct hifc_req){.op = HIFC_OP_DELETE, .key = key_of(n)});
        put(n, at);
        (void)submit_one((struct hifc_req){.op = HIFC_OP_GET, .key = key_of(n),
                                           .buffer_offset = at, .length = VALUE});
    }
    return NULL;
}

static void *open_and_close(void *argument)
{
    struct hifc_ring_opts opts = {.slots = 16, .arena_offset = *(uint64_t *)argument,
                                  .arena_bytes = VALUE, .read_max_bytes = VALUE};
    while (!atomic_load(&stop)) {
        struct hifc_ring *other;
        struct hifc_stats stats;
        struct hifc_descriptor d = {.control = HIFC_RING_CONTROL(HIFC_RING_OP_READ, 0)};
        struct hifc_key key = key_of(1);
        memcpy(d.key, key.bytes, sizeof key.bytes);
        CHECK_EQ(hifc_ring_open(ns, &opts, &other), 0);
        CHECK_EQ(hifc_ring_submit(other, &d, 1), 1);
        CHECK_EQ(hifc_stats(ns, &stats), 0);
        CHECK_EQ(hifc_ring_close(other), 0); /* with its read in flight, or not yet started */
    }
    return NULL;
}

static void run(uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 8u << 20,
                                  .prefetch_inflight = 8};
    pthread_t producers[PRODUCERS], changer, opener;
    uint64_t at, other, bytes;
    CHECK_EQ(hifc_format(NAME, &format), 0);
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    CHECK_EQ(hifc_buffer_alloc(ns, PRODUCERS * EACH * VALUE, &arena), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, VALUE, &at), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, VALUE, &other), 0);
    for (uint32_t n = 0; n < KEYS; n++) {
        put(n, at);
    }
    struct hifc_ring_opts ring_opts = {.slots = 32, .statuses = PRODUCERS * EACH,
                                       .arena_offset = arena,
                                       .arena_bytes = PRODUCERS * EACH * VALUE,
                                       .read_max_bytes = VALUE};
    CHECK_EQ(hifc_ring_open(ns, &ring_opts, &ring), 0);
    struct hifc_ring_header *header = hifc_ring_base(ring, &bytes);
    statuses = (int32_t *)((uint8_t *)header + header->statuses_offset);
    atomic_store(&stop, false);
    atomic_store(&arrived, 0);
    CHECK_EQ(pthread_create(&changer, NULL, change, &at), 0);
    CHECK_EQ(pthread_create(&opener, NULL, open_and_close, &other), 0);
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        CHECK_EQ(pthread_create(&producers[i], NULL, produce, (void *)(uintptr_t)i), 0);
    }
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        CHECK_EQ(pthread_join(producers[i], NULL), 0);
    }
    atomic_store(&stop, true);
    CHECK_EQ(pthread_join(changer, NULL), 0);
    CHECK_EQ(pthread_join(opener, NULL), 0);
    CHECK(atomic_load(&arrived) > PRODUCERS * ROUNDS);
    CHECK_EQ(hifc_ring_close(ring), 0);
    struct hifc_check_result result;
    struct hifc_stats s;
    CHECK_EQ(hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &result), 0);
    CHECK_EQ(result.problems, 0);
    CHECK_EQ(hifc_stats(ns, &s), 0);
    CHECK_EQ(s.prefetch_bad, 0);
    CHECK_EQ(s.prefetch_submitted, s.prefetch_completed + s.prefetch_failed +
                                       s.prefetch_duplicates + s.prefetch_cancelled);
    CHECK_EQ(hifc_close(ns), 0);
}

static void *wait_for_ever(void *word)
{
    int answer = hifc_ring_wait(ring, word, 1, -1);
    return (void *)(intptr_t)answer;
}

/* Waits for a word that no descriptor will answer, while the namespace goes. */
static void close_under_a_wait(uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 4u << 20};
    struct hifc_ring_opts ring_opts = {.slots = 16, .arena_bytes = 4096, .read_max_bytes = 4096};
    uint64_t bytes;
    uint32_t word = 3;
    pthread_t waiter;
    void *answer;
    CHECK_EQ(hifc_format(NAME, &format), 0);
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 4096, &ring_opts.arena_offset), 0);
    CHECK_EQ(hifc_ring_open(ns, &ring_opts, &ring), 0);
    struct hifc_ring_header *header = hifc_ring_base(ring, &bytes);
    statuses = (int32_t *)((uint8_t *)header + header->statuses_offset);
    __atomic_store_n(&statuses[word], HIFC_RING_WAITING, __ATOMIC_RELAXED);
    CHECK_EQ(pthread_create(&waiter, NULL, wait_for_ever, &word), 0);
    usleep(20000); /* the better test where it waits by then, and right where it does not */
    CHECK_EQ(hifc_close(ns), 0);
    CHECK_EQ(pthread_join(waiter, &answer), 0);
    CHECK_EQ((intptr_t)answer, 1);
    CHECK_EQ(__atomic_load_n(&statuses[word], __ATOMIC_RELAXED), -ESHUTDOWN);
    CHECK_EQ(hifc_ring_close(ring), 0);
}

TEST(a_wait_ends_when_the_reactors_namespace_is_closed)
{
    close_under_a_wait(HIFC_REACTOR);
}

TEST(a_wait_ends_when_an_inline_namespace_is_closed)
{
    close_under_a_wait(HIFC_INLINE);
}

TEST(threads_share_a_ring_of_the_reactor)
{
    run(HIFC_REACTOR);
}

TEST(threads_share_a_ring_inline)
{
    run(HIFC_INLINE);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
