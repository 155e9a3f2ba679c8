/* SPDX-License-Identifier: Apache-2.0
 *
 * namespace_threads.c - several threads put, get and delete at once while the janitor reclaims;
 * what is there is never wrong. Meant for the thread sanitizer as well.
 */
#include "check.h"

#include <pthread.h>

#define NAME "ram://namespace-threads?size=16MiB"
#define THREADS 3u
#define KEYS 40u /* of each thread */
#define VALUE_MAX 40000u
#define BATCH 8u

static struct hifc_ns *ns;
static uint8_t *pool;
static uint32_t steps = 400;

static struct hifc_key key_of(uint32_t thread, uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    key.bytes[12] = (uint8_t)(thread + 1);
    return key;
}

static uint32_t length_of(uint32_t n)
{
    static const uint32_t lengths[] = {60, 3000, 4096, 12288, 33333};
    return lengths[n % 5];
}

static uint8_t byte_of(uint32_t thread, uint32_t n, uint32_t i)
{
    return (uint8_t)(thread * 31 + n * 7 + i * 13 + (i >> 8));
}

static void check_bytes(uint32_t thread, uint32_t n, const uint8_t *data)
{
    for (uint32_t i = 0; i < length_of(n); i++) {
        if (data[i] != byte_of(thread, n, i)) {
            fprintf(stderr, "thread %u key %u byte %u is wrong\n", thread, n, i);
            abort();
        }
    }
}

static void *worker(void *argument)
{
    uint32_t thread = (uint32_t)(uintptr_t)argument, random = thread * 7919 + 1;
    uint64_t at;
    CHECK_EQ(hifc_buffer_alloc(ns, BATCH * 40960, &at), 0);
    for (uint32_t step = 0; step < steps; step++) {
        struct hifc_req reqs[BATCH];
        memset(reqs, 0, sizeof reqs);
        for (uint32_t i = 0; i < BATCH; i++) {
            random = random * 1664525 + 1013904223;
            uint32_t n = (random >> 10) % KEYS, dice = (random >> 20) % 10;
            reqs[i].key = key_of(thread, n);
            reqs[i].user = n;
            reqs[i].buffer_offset = at + i * 40960;
            reqs[i].op = dice < 5 ? HIFC_OP_PUT : dice < 9 ? HIFC_OP_GET : HIFC_OP_DELETE;
            reqs[i].capacity = 40960;
            reqs[i].cls = n % 2 ? HIFC_SWAP : HIFC_REUSE;
            if (reqs[i].op == HIFC_OP_PUT) {
                reqs[i].length = length_of(n);
                for (uint32_t b = 0; b < reqs[i].length; b++) {
                    pool[reqs[i].buffer_offset + b] = byte_of(thread, n, b);
                }
            }
        }
        struct hifc_ticket *ticket;
        CHECK_EQ(hifc_submit(ns, reqs, BATCH, &ticket), 0);
        CHECK_EQ(hifc_ticket_wait(ticket, CHECK_HANG_US), 1);
        hifc_ticket_free(ticket);
        for (uint32_t i = 0; i < BATCH; i++) {
            CHECK(reqs[i].status >= 0 && reqs[i].status != HIFC_IN_FLIGHT);
            if (reqs[i].op == HIFC_OP_GET && reqs[i].status == HIFC_OK) {
                check_bytes(thread, (uint32_t)reqs[i].user, pool + reqs[i].buffer_offset);
            }
        }
        if (step % 64 == 0) {
            struct hifc_stats stats;
            CHECK_EQ(hifc_sync(ns), 0);
            CHECK_EQ(hifc_stats(ns, &stats), 0);
        }
    }
    return NULL;
}

static void run(uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 8u << 20};
    pthread_t threads[THREADS];
    CHECK_EQ(hifc_format(NAME, &format), 0);
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, worker, (void *)i), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    struct hifc_stats stats;
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK(stats.reclaimed_segments > 0);
    CHECK_EQ(stats.corrupt_count, 0);
    CHECK_EQ(stats.requests_inflight, 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(threads_over_the_reactor)
{
    run(HIFC_REACTOR);
}

TEST(threads_inline)
{
    run(HIFC_INLINE);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
