/* SPDX-License-Identifier: Apache-2.0
 *
 * namespace_pools.c - memory of the caller comes and goes while requests are under way: who takes
 * one pool back waits for its requests, and for no others.
 */
#include "submit.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "util/error.h"
#include "namespace/ns.h"

#define NAME "namespace-pools"
#define PLAIN "ram://" NAME "?size=16MiB"
#define VALUE 16384u

static struct hifc_ns *ns;

static void start(const char *uri, uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 4u << 20};
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open(uri, &opts, &ns), 0);
}

static uint32_t add(uint8_t **memory)
{
    uint32_t pool;
    *memory = aligned_alloc(4096, VALUE);
    CHECK(*memory);
    memset(*memory, 7, VALUE);
    CHECK_EQ(hifc_pool_register(ns, *memory, VALUE, &pool), 0);
    return pool;
}

static struct hifc_req request(uint8_t op, uint32_t pool, uint8_t key)
{
    return (struct hifc_req){.op = op, .pool = pool, .key = {{key}}, .length = VALUE};
}

TEST(a_pool_waits_for_its_own_requests_alone)
{
    start("faulty+" PLAIN "&fault_delay=20", HIFC_INLINE); /* nothing ends unless somebody polls */
    uint8_t *one, *other;
    uint32_t first = add(&one), second = add(&other);
    struct hifc_req req = request(HIFC_OP_PUT, first, 1);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    memset(one, 0, VALUE);
    struct hifc_ticket *ticket;
    req = request(HIFC_OP_GET, first, 1);
    CHECK_EQ(hifc_submit(ns, &req, 1, &ticket), 0);
    CHECK_EQ(req.status, HIFC_IN_FLIGHT);
    CHECK_EQ(hifc_pool_unregister(ns, second), 0);
    CHECK_EQ(req.status, HIFC_IN_FLIGHT);
    CHECK_EQ(hifc_pool_unregister(ns, first), 0);
    CHECK_EQ(req.status, HIFC_OK);
    CHECK_EQ(one[VALUE - 1], 7);
    hifc_ticket_free(ticket);
    req = request(HIFC_OP_GET, first, 1);
    CHECK_EQ(submit_and_wait(ns, &req, 1), -EINVAL);
    CHECK_EQ(hifc_pool_unregister(ns, first), -EINVAL);
    /* Its number is free again, and counts from nothing. */
    CHECK_EQ(hifc_pool_register(ns, other, VALUE, &second), 0);
    CHECK_EQ(second, first);
    req = request(HIFC_OP_GET, second, 1);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    CHECK_EQ(hifc_pool_unregister(ns, second), 0);
    CHECK_EQ(hifc_close(ns), 0);
    free(one);
    free(other);
}

TEST(what_was_refused_is_not_waited_for)
{
    start(PLAIN, HIFC_INLINE);
    uint8_t *memory;
    uint32_t pool = add(&memory);
    struct hifc_req req = request(HIFC_OP_GET, pool, 9);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_MISS);
    req.length = VALUE + 1;
    req.op = HIFC_OP_PUT;
    CHECK_EQ(submit_and_wait(ns, &req, 1), -EINVAL);
    req.op = 99;
    CHECK_EQ(submit_and_wait(ns, &req, 1), -EINVAL);
    req = request(HIFC_OP_GET, UINT32_MAX, 9);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_MISS);
    CHECK_EQ(hifc_pool_unregister(ns, pool), 0);
    CHECK_EQ(hifc_close(ns), 0);
    free(memory);
}

/* ---- both at once ---------------------------------------------------------------------------- */

static _Atomic bool stop;
static _Atomic uint32_t known; /* a pool's number, or 0 */
static _Atomic uint32_t reads;

/* Uses whatever pool there is at the moment, or was. */
static void *use(void *argument)
{
    (void)argument;
    while (!atomic_load(&stop)) {
        struct hifc_req req = request(HIFC_OP_GET, atomic_load(&known), 1);
        if (req.pool) {
            int status = submit_and_wait(ns, &req, 1);
            CHECK(status == HIFC_OK || status == -EINVAL);
            atomic_fetch_add(&reads, status == HIFC_OK);
        }
    }
    return NULL;
}

/* The address sanitizer sees a read that arrives in memory which has been taken back. */
TEST(memory_is_nobodys_once_it_was_taken_back)
{
    start("faulty+" PLAIN "&fault_delay=5", HIFC_REACTOR);
    pthread_t threads[2];
    uint8_t *memory;
    uint32_t pool = add(&memory);
    struct hifc_req req = request(HIFC_OP_PUT, pool, 1);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    atomic_store(&known, pool);
    for (unsigned i = 0; i < 2; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, use, NULL), 0);
    }
    for (unsigned round = 0; round < 100; round++) {
        for (uint32_t before = atomic_load(&reads); atomic_load(&reads) == before;) {
            sched_yield(); /* until they do use it */
        }
        CHECK_EQ(hifc_pool_unregister(ns, pool), 0);
        free(memory);
        pool = add(&memory);
        atomic_store(&known, pool);
    }
    atomic_store(&stop, true);
    for (unsigned i = 0; i < 2; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(hifc_pool_unregister(ns, pool), 0);
    CHECK_EQ(hifc_close(ns), 0);
    free(memory);
}

TEST(a_buffer_fits_after_a_smaller_one_whatever_was_written_in_between)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 322ull << 20};
    uint64_t large, small;
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open(PLAIN, &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 250ull << 20, &large), 0);
    for (uint32_t n = 0; n < 40; n++) {
        struct hifc_req req = {.op = HIFC_OP_PUT, .cls = HIFC_SWAP, .key = {{(uint8_t)n, 7}},
                               .buffer_offset = large, .length = 5000};
        CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    }
    CHECK_EQ(hifc_buffer_alloc(ns, 65536, &small), 0);
    CHECK_EQ(hifc_buffer_free(ns, large), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 255ull << 20, &large), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

#define FUZZ_BUFFERS 24u
#define FUZZ_KEYS 60u

static uint32_t random_below(uint64_t *state, uint32_t bound)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((*state >> 33) % bound);
}

/* Buffers come and go while values of all sizes are written, read in part, reserved and reclaimed.
 * Whenever no buffer is held and nothing is in flight, all of the pool but its reserve is there. */
static void fuzz(uint64_t pool_bytes, uint64_t seed)
{
    uint64_t buffers[FUZZ_BUFFERS] = {0}, whole, state = seed;
    bool held[FUZZ_BUFFERS] = {false};
    for (uint32_t step = 0; step < 400; step++) {
        uint32_t at = random_below(&state, FUZZ_BUFFERS), n = random_below(&state, FUZZ_KEYS);
        uint32_t bytes = 1u << random_below(&state, 17);
        bytes += random_below(&state, bytes);
        if (held[at]) {
            CHECK_EQ(hifc_buffer_free(ns, buffers[at]), 0);
            held[at] = false;
        } else {
            held[at] = hifc_buffer_alloc(ns, bytes, &buffers[at]) == 0;
        }
        struct hifc_req req = {.op = HIFC_OP_PUT, .cls = (uint8_t)(n % 2), .key = {{(uint8_t)n, 9}},
                               .buffer_offset = buffers[at], .length = bytes};
        uint32_t dice = random_below(&state, 6);
        if (dice == 0) {
            req.op = HIFC_OP_RESERVE;
        } else if (dice < 3) { /* a range that is not on pages is read aside */
            req.op = HIFC_OP_GET;
            req.length = bytes < 100 ? bytes : 100;
        }
        if (held[at] || req.op == HIFC_OP_RESERVE) {
            (void)submit_and_wait(ns, &req, 1);
        }
        if (req.op == HIFC_OP_RESERVE && req.status == HIFC_OK) {
            struct hifc_req abort_it = {.op = HIFC_OP_ABORT, .handle = req.handle};
            CHECK_EQ(submit_and_wait(ns, &abort_it, 1), HIFC_OK);
        } else if (step % 5 == 0) {
            struct hifc_req delete = {.op = HIFC_OP_DELETE, .key = req.key};
            (void)submit_and_wait(ns, &delete, 1);
        }
    }
    for (uint32_t i = 0; i < FUZZ_BUFFERS; i++) {
        CHECK(!held[i] || hifc_buffer_free(ns, buffers[i]) == 0);
    }
    CHECK_EQ(hifc_sync(ns), 0); /* no batch is on its way any more */
    CHECK_EQ(hifc_buffer_alloc(ns, pool_bytes - pool_bytes / 16, &whole), 0);
    CHECK_EQ(hifc_buffer_free(ns, whole), 0);
}

TEST(no_page_of_the_library_stays_in_the_way_of_a_large_buffer)
{
    static const uint64_t pools[] = {2ull << 20, 4ull << 20, 8ull << 20};
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    for (uint64_t seed = 1; seed <= 30; seed++) {
        struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = pools[seed % 3]};
            CHECK_EQ(hifc_format(PLAIN, &format), 0);
        CHECK_EQ(hifc_open(PLAIN, &opts, &ns), 0);
        for (unsigned round = 0; round < 10; round++) {
            fuzz(pools[seed % 3], seed * 100 + round);
        }
        struct hifc_stats stats;
        CHECK_EQ(hifc_stats(ns, &stats), 0);
        CHECK(stats.put_count > 100 && stats.get_count > 100 && stats.reclaimed_segments > 0);
        CHECK_EQ(hifc_close(ns), 0);
    }
}

TEST(a_full_pool_is_answered_without_an_error)
{
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 2u << 20};
    uint64_t at, rest;
    CHECK_EQ(hifc_open(PLAIN, &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    while (hifc_buffer_alloc(ns, 4096, &rest) == 0) {
    }
    while (hifc_pools_alloc(ns->pools, 4096, &rest) == 0) { /* what is never lent */
    }
    hifc_fail(-EPERM, "before");
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = {{1}}, .buffer_offset = at,
                           .length = 5000};
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_RETRY);
    CHECK(last_error_says("before"));
    CHECK_EQ(hifc_close(ns), 0);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
