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

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
