/* SPDX-License-Identifier: Apache-2.0
 *
 * abandon.c - callers that stop waiting: tickets, buffers, reservations and namespaces that are given
 * up in any state leave nothing behind, and what is still in flight touches nobody else's memory.
 */
#include "submit.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "namespace/ns.h"
#include "util/clock.h"

#define NAME "abandon-test"
#define PLAIN "ram://" NAME "?size=64MiB"
#define LATE "faulty+ram://" NAME "?size=64MiB&fault_delay=20"
#define VALUE_BYTES 65536u
#define POOL_BYTES (4u << 20)

static struct hifc_ns *ns;
static uint8_t *base;

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    return key;
}

/* Inline, nothing goes on unless somebody polls: what is in flight stays so. */
static void start(const char *uri, uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = 4u << 20, .force = 1};
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = POOL_BYTES,
                                  .no_owner_socket = 1};
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open(uri, &opts, &ns), 0);
    base = hifc_pool_base(ns, 0, NULL);
}

static struct hifc_stats stats_now(void)
{
    struct hifc_stats stats;
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    return stats;
}

static uint64_t buffer(uint32_t bytes)
{
    uint64_t offset = HIFC_NO_BUFFER;
    CHECK_EQ(hifc_buffer_alloc(ns, bytes, &offset), 0);
    return offset;
}

static void put(uint32_t number)
{
    uint64_t at = buffer(VALUE_BYTES);
    memset(base + at, (int)number, VALUE_BYTES);
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = key_of(number), .buffer_offset = at,
                           .length = VALUE_BYTES};
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
}

static bool holds(uint64_t at, uint8_t byte, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++) {
        if (base[at + i] != byte) {
            return false;
        }
    }
    return true;
}

/* A read that nobody waits for: its request and its buffer are given back while it is in flight. */
TEST(an_abandoned_read_touches_neither_its_request_nor_memory_of_others)
{
    start(LATE, HIFC_INLINE);
    put(1);
    uint64_t at = buffer(VALUE_BYTES), freed = at;
    struct hifc_req *req = calloc(1, sizeof *req);
    *req = (struct hifc_req){.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = at,
                             .capacity = VALUE_BYTES};
    struct hifc_ticket *ticket = NULL;
    CHECK_EQ(hifc_submit(ns, req, 1, &ticket), 0);
    CHECK_EQ(req->status, HIFC_IN_FLIGHT);
    hifc_ticket_drop(&ticket, 0);
    CHECK(!ticket);
    hifc_ticket_drop(&ticket, 0);
    free(req); /* the address sanitizer watches it from now on */
    hifc_buffer_drop(ns, &freed);
    CHECK_EQ(freed, HIFC_NO_BUFFER);
    hifc_buffer_drop(ns, &freed);
    CHECK_EQ(stats_now().requests_inflight, 1);
    CHECK_EQ(stats_now().buffer_used_bytes >= VALUE_BYTES, 1);
    /* All that is left of the pool: none of it is the buffer that is read into. */
    uint64_t others[64];
    uint32_t count = 0;
    for (uint64_t other; count < 64 && hifc_buffer_alloc(ns, VALUE_BYTES, &other) == 0;) {
        CHECK(other != at);
        memset(base + other, 0xee, VALUE_BYTES);
        others[count++] = other;
    }
    CHECK(count > 20 && count < 64);
    CHECK_EQ(hifc_drain(ns, CHECK_HANG_US), 0);
    CHECK_EQ(stats_now().requests_inflight, 0);
    CHECK(holds(at, 1, VALUE_BYTES)); /* it did go on */
    for (uint32_t i = 0; i < count; i++) {
        CHECK(holds(others[i], 0xee, VALUE_BYTES));
        CHECK_EQ(hifc_buffer_free(ns, others[i]), 0);
    }
    uint64_t again = buffer(VALUE_BYTES);
    CHECK_EQ(hifc_buffer_free(ns, again), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(an_abandoned_put_stores_its_value)
{
    start(LATE, HIFC_INLINE);
    uint64_t at = buffer(VALUE_BYTES);
    memset(base + at, 5, VALUE_BYTES);
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = key_of(5), .buffer_offset = at,
                           .length = VALUE_BYTES};
    struct hifc_ticket *ticket = NULL;
    CHECK_EQ(hifc_submit(ns, &req, 1, &ticket), 0);
    hifc_ticket_drop(&ticket, 0);
    memset(&req, 0xff, sizeof req);
    hifc_buffer_drop(ns, &at);
    CHECK_EQ(hifc_drain(ns, CHECK_HANG_US), 0);
    CHECK_EQ(req.status, -1); /* as it was overwritten */
    uint64_t to = buffer(VALUE_BYTES);
    struct hifc_req get = {.op = HIFC_OP_GET, .key = key_of(5), .buffer_offset = to,
                           .capacity = VALUE_BYTES};
    CHECK_EQ(submit_and_wait(ns, &get, 1), HIFC_OK);
    CHECK(holds(to, 5, VALUE_BYTES));
    CHECK_EQ(hifc_buffer_free(ns, to), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(abandoned_tickets_come_back)
{
    start(PLAIN, HIFC_INLINE);
    put(1);
    uint64_t at = buffer(VALUE_BYTES);
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = at,
                           .capacity = VALUE_BYTES};
    for (uint32_t i = 0; i < 3 * ns->tickets_count; i++) {
        struct hifc_ticket *ticket = NULL;
        CHECK_EQ(hifc_submit(ns, &req, 1, &ticket), 0);
        hifc_ticket_drop(&ticket, 0);
        if (i % 64 == 63) {
            CHECK_EQ(hifc_drain(ns, CHECK_HANG_US), 0);
        }
    }
    uint32_t free_count = 0;
    for (struct hifc_ticket *t = ns->free_tickets; t; t = t->next_free) {
        free_count++;
    }
    CHECK_EQ(free_count, ns->tickets_count);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_ticket_that_was_dropped_with_time_to_end_is_done)
{
    start(LATE, HIFC_INLINE);
    put(1);
    uint64_t at = buffer(VALUE_BYTES);
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = at,
                           .capacity = VALUE_BYTES};
    struct hifc_ticket *ticket = NULL;
    struct hifc_ticket_info info;
    CHECK_EQ(hifc_execute(ns, &req, 0, &ticket, &info), 0);
    CHECK(ticket);
    hifc_ticket_drop(&ticket, CHECK_HANG_US);
    CHECK(!ticket);
    CHECK_EQ(req.status, HIFC_OK);
    CHECK(holds(at, 1, VALUE_BYTES));
    CHECK_EQ(hifc_execute(ns, &req, -1, &ticket, &info), 1);
    CHECK(!ticket);
    CHECK_EQ(info.completed, 1);
    CHECK_EQ(info.bytes, VALUE_BYTES);
    CHECK_EQ(hifc_ticket_finish(&ticket, 0, &info), -EINVAL);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_dropped_reservation_is_aborted_once_its_writes_have_ended)
{
    start(LATE, HIFC_INLINE);
    uint64_t at = buffer(VALUE_BYTES);
    struct hifc_req req = {.op = HIFC_OP_RESERVE, .key = key_of(9), .length = 2 * VALUE_BYTES};
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    struct hifc_req write = {.op = HIFC_OP_WRITE, .handle = req.handle, .buffer_offset = at,
                             .length = VALUE_BYTES};
    struct hifc_ticket *ticket = NULL;
    CHECK_EQ(hifc_submit(ns, &write, 1, &ticket), 0);
    hifc_reservation_drop(ns, req.handle);
    CHECK_EQ(stats_now().reservations, 1);
    hifc_ticket_free(ticket);
    ns_lock(ns);
    ns_reservations_expire(ns, hifc_now_ns());
    ns_unlock(ns);
    CHECK_EQ(stats_now().reservations, 0);
    hifc_reservation_drop(ns, req.handle);
    hifc_reservation_drop(ns, 0);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK); /* the key is free again */
    hifc_reservation_drop(ns, req.handle);
    CHECK_EQ(stats_now().reservations, 0);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_namespace_that_was_shut_down_takes_back_what_it_gave)
{
    start(LATE, HIFC_REACTOR);
    put(1);
    uint64_t at = buffer(VALUE_BYTES), kept = buffer(VALUE_BYTES);
    memset(base + kept, 3, VALUE_BYTES);
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = at,
                           .capacity = VALUE_BYTES};
    struct hifc_ticket *ticket = NULL;
    struct hifc_ticket_info info;
    CHECK_EQ(hifc_submit(ns, &req, 1, &ticket), 0);
    CHECK_EQ(hifc_shutdown(ns), 0);
    CHECK_EQ(hifc_shutdown(ns), 0);
    CHECK_EQ(hifc_sync(ns), -ESHUTDOWN);
    CHECK_EQ(hifc_ticket_finish(&ticket, 0, &info), 1);
    CHECK_EQ(req.status, HIFC_OK);
    CHECK(holds(at, 1, VALUE_BYTES));
    hifc_buffer_drop(ns, &at);
    CHECK(holds(kept, 3, VALUE_BYTES));
    hifc_buffer_drop(ns, &kept);
    struct hifc_ns *second; /* the device is free */
    struct hifc_open_opts opts = {.pool_size_bytes = POOL_BYTES, .no_owner_socket = 1};
    CHECK_EQ(hifc_open(PLAIN, &opts, &second), 0);
    hifc_drop(&second);
    CHECK(!second);
    hifc_drop(&ns);
    CHECK(!ns);
    hifc_drop(&ns);
}

/* ---- under threads ---------------------------------------------------------------------------- */

enum { THREADS = 3, ROUNDS = 1500, KEYS = 24 };

static atomic_uint wrong, abandoned, waited;

/* Reads values into fresh buffers and gives half of the reads up, with all that belongs to them. */
static void *reader(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t at = HIFC_NO_BUFFER;
        if (hifc_buffer_alloc(ns, VALUE_BYTES, &at) != 0) {
            sched_yield();
            continue;
        }
        memset(base + at, 0xdd, VALUE_BYTES);
        uint32_t number = (uint32_t)rand_r(&seed) % KEYS;
        struct hifc_req *req = calloc(1, sizeof *req);
        *req = (struct hifc_req){.op = HIFC_OP_GET, .key = key_of(number), .buffer_offset = at,
                                 .capacity = VALUE_BYTES};
        struct hifc_ticket *ticket = NULL;
        CHECK_EQ(hifc_submit(ns, req, 1, &ticket), 0);
        if (rand_r(&seed) % 2) {
            hifc_ticket_drop(&ticket, 0);
            atomic_fetch_add(&abandoned, 1);
        } else {
            while (hifc_ticket_finish(&ticket, 1000, NULL) != 1) {
            }
            bool right = req->status == HIFC_OK && holds(at, (uint8_t)number, VALUE_BYTES);
            atomic_fetch_add(&wrong, !right);
            atomic_fetch_add(&waited, 1);
        }
        free(req);
        hifc_buffer_drop(ns, &at);
    }
    return NULL;
}

TEST(threads_that_give_up_do_not_disturb_those_that_wait)
{
    start(PLAIN, HIFC_REACTOR);
    for (uint32_t i = 0; i < KEYS; i++) {
        put(i);
    }
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, reader, (void *)(i + 1)), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_EQ(hifc_drain(ns, CHECK_HANG_US), 0);
    CHECK_EQ(atomic_load(&wrong), 0);
    CHECK(atomic_load(&abandoned) > 100 && atomic_load(&waited) > 100);
    struct hifc_stats stats = stats_now();
    CHECK_EQ(stats.requests_inflight, 0);
    uint64_t most = HIFC_NO_BUFFER; /* every buffer came back */
    CHECK_EQ(hifc_buffer_alloc(ns, POOL_BYTES / 2, &most), 0);
    hifc_buffer_drop(ns, &most);
    CHECK_EQ(hifc_close(ns), 0);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
