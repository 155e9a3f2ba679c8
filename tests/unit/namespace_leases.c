/* SPDX-License-Identifier: Apache-2.0
 *
 * namespace_leases.c - leases that come and go while reclaim moves what they hold: none is lost, and
 * no segment stays held by a lease that has ended.
 */
#include "submit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "namespace/ns.h"

#define NAME "ram://namespace-leases?size=8MiB"
#define VALUE_BYTES 60000u
#define KEYS 54u
#define ROUNDS 1500u

static struct hifc_ns *ns;
static _Atomic bool stop;

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    return key;
}

static int put(uint32_t n, uint64_t at)
{
    struct hifc_req req = {.op = HIFC_OP_PUT, .cls = HIFC_SWAP, .key = key_of(n),
                           .buffer_offset = at, .length = VALUE_BYTES};
    return submit_until_taken(ns, &req);
}

static void *lease_and_release(void *argument)
{
    uint32_t n = 0;
    (void)argument;
    while (!stop) {
        struct hifc_key key = key_of(n++ % KEYS);
        uint64_t lease;
        int32_t answer;
        CHECK_EQ(hifc_lease(ns, &key, 1, 0, &answer, &lease), 0);
        usleep(answer == HIFC_OK ? 100 : 0);
        CHECK_EQ(hifc_lease_release(ns, lease), 0);
        usleep(n % 50);
    }
    return NULL;
}

/* Compaction copies a swap entry while a lease on it is taken. Freed all the same, its segment would
 * forget the lease and count below zero when it ends. */
TEST(a_lease_taken_while_its_value_moves_is_counted_down_where_it_was_counted)
{
    struct hifc_format_opts format = {.segment_size_bytes = 256u << 10, .force = 1};
    struct hifc_open_opts opts = {.pool_size_bytes = 4u << 20};
    struct hifc_stats stats;
    pthread_t thread;
    uint64_t at;
    CHECK_EQ(hifc_format(NAME, &format), 0);
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 16, &at), 0);
    CHECK_EQ(pthread_create(&thread, NULL, lease_and_release, NULL), 0);
    for (uint32_t i = 0, n = 1; i < ROUNDS; i++) {
        n = n * 1664525u + 1013904223u; /* in no order, so that segments end up partly dead */
        CHECK_EQ(put((n >> 16) % KEYS, at), HIFC_OK);
    }
    stop = true;
    pthread_join(thread, NULL);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK(stats.reinserted_bytes > 0);
    CHECK_EQ(stats.leases, 0);
    ns_lock(ns); /* the janitor goes on */
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        CHECK_EQ(ns->segments[i].leases, 0);
    }
    ns_unlock(ns);
    CHECK_EQ(hifc_close(ns), 0);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
