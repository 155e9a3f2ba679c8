/* SPDX-License-Identifier: Apache-2.0
 *
 * namespace.c - the namespace through its public functions, on the ram device.
 */
#include "submit.h"

#include <errno.h>
#include <stdbool.h>

#include "device/ram.h"

#define NAME "ram://namespace-test?size=16MiB"

static struct hifc_ns *ns;
static uint8_t *pool;

static void open_ns(uint32_t drive)
{
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 8u << 20};
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    uint64_t size;
    pool = hifc_pool_base(ns, 0, &size);
    CHECK(pool != NULL);
}

static void format_ns(void)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    CHECK_EQ(hifc_format(NAME, &format), 0);
}

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    key.bytes[15] = 1;
    return key;
}

static void fill(uint8_t *data, uint32_t seed, uint32_t bytes)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
    for (uint32_t i = 0; i < bytes; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        data[i] = (uint8_t)(state >> 56);
    }
}

static int put(uint32_t n, uint64_t offset, uint32_t length, uint32_t parts, uint8_t cls)
{
    fill(pool + offset, n, length);
    struct hifc_req req = {.op = HIFC_OP_PUT, .cls = cls, .key = key_of(n),
                           .buffer_offset = offset, .length = length, .part_count = parts};
    return submit_and_wait(ns, &req, 1);
}

static int put_until_taken(uint32_t n, uint64_t offset, uint32_t length, uint32_t parts,
                           uint8_t cls)
{
    fill(pool + offset, n, length);
    struct hifc_req req = {.op = HIFC_OP_PUT, .cls = cls, .key = key_of(n),
                           .buffer_offset = offset, .length = length, .part_count = parts};
    return submit_until_taken(ns, &req);
}

static int get(uint32_t n, uint64_t offset, uint32_t value_offset, uint32_t length)
{
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(n), .buffer_offset = offset,
                           .value_offset = value_offset, .length = length,
                           .capacity = 1u << 20};
    return submit_and_wait(ns, &req, 1);
}

static int delete(uint32_t n)
{
    struct hifc_req req = {.op = HIFC_OP_DELETE, .key = key_of(n)};
    return submit_and_wait(ns, &req, 1);
}

static void check_value(uint32_t n, uint64_t offset, uint32_t value_offset, uint32_t length)
{
    uint8_t *expected = malloc(value_offset + length);
    fill(expected, n, value_offset + length);
    CHECK(memcmp(pool + offset, expected + value_offset, length) == 0);
    free(expected);
}

static const uint32_t lengths[] = {1, 15, 100, 4095, 4096, 4097, 8192, 12288 + 17, 65536, 100000};

static void every_length(uint32_t drive)
{
    uint64_t at;
    format_ns();
    open_ns(drive);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(put(i, at, lengths[i], 1, HIFC_REUSE), HIFC_OK);
        CHECK_EQ(put(i, at, lengths[i], 1, HIFC_REUSE), HIFC_EXISTS);
        CHECK_EQ(put(100 + i, at, lengths[i] * 4, 4, HIFC_SWAP), HIFC_OK);
    }
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(get(i, at, 0, 0), HIFC_OK);
        check_value(i, at, 0, lengths[i]);
        memset(pool + at, 0, lengths[i] * 4);
        CHECK_EQ(get(100 + i, at, 0, 0), HIFC_OK);
        check_value(100 + i, at, 0, lengths[i] * 4);
        /* one part, then an odd range */
        CHECK_EQ(get(100 + i, at, lengths[i], lengths[i]), HIFC_OK);
        check_value(100 + i, at, lengths[i], lengths[i]);
        CHECK_EQ(get(100 + i, at, lengths[i] / 2, lengths[i] + 1), HIFC_OK);
        check_value(100 + i, at, lengths[i] / 2, lengths[i] + 1);
    }
    CHECK_EQ(get(77, at, 0, 0), HIFC_MISS);
    CHECK_EQ(delete(3), HIFC_OK);
    CHECK_EQ(get(3, at, 0, 0), HIFC_MISS);
    CHECK_EQ(hifc_sync(ns), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(every_length_inline)
{
    every_length(HIFC_INLINE);
}

TEST(every_length_reactor)
{
    every_length(HIFC_REACTOR);
}

TEST(reuse_survives_a_restart_and_swap_does_not)
{
    uint64_t at;
    every_length(HIFC_INLINE);
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(get(i, at, 0, 0), i == 3 ? HIFC_MISS : HIFC_OK);
        if (i != 3) {
            check_value(i, at, 0, lengths[i]);
        }
        CHECK_EQ(get(100 + i, at, 0, 0), HIFC_MISS);
    }
    CHECK_EQ(hifc_close(ns), 0);
}

/* The tombstone forms in one segment, the value put after it opens the next: were the second to
 * close first, its sequence would be the lower one and the next open would delete it. */
TEST(a_key_deleted_and_put_again_across_two_segments_survives_a_restart)
{
    uint64_t at;
    format_ns();
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    CHECK_EQ(put(1, at, 300000, 1, HIFC_REUSE), HIFC_OK);
    struct hifc_req reqs[] = {
        {.op = HIFC_OP_DELETE, .key = key_of(1)},
        {.op = HIFC_OP_PUT, .key = key_of(1), .buffer_offset = at, .length = 300000},
    };
    CHECK_EQ(submit_and_wait(ns, reqs, 2), HIFC_OK);
    CHECK_EQ(reqs[1].status, HIFC_OK);
    CHECK_EQ(hifc_sync(ns), 0);
    CHECK_EQ(hifc_close(ns), 0);
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    CHECK_EQ(get(1, at, 0, 0), HIFC_OK);
    check_value(1, at, 0, 300000);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(the_write_budget_pays_only_for_what_was_taken)
{
    uint64_t at;
    struct hifc_stats stats;
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 8u << 20,
                                  .admission = HIFC_ADMIT_BUDGET, .reservations_max = 1,
                                  .write_budget_bytes_per_day = 100000};
    struct hifc_req reqs[2] = {
        {.op = HIFC_OP_RESERVE, .key = key_of(1), .length = 30000},
        {.op = HIFC_OP_RESERVE, .key = key_of(2), .length = 30000},
    };
    format_ns();
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    CHECK_EQ(submit_and_wait(ns, reqs, 2), HIFC_OK);
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQ(submit_and_wait(ns, &reqs[1], 1), HIFC_RETRY);
    }
    CHECK_EQ(put(3, at, 60000, 1, HIFC_REUSE), HIFC_OK);
    CHECK_EQ(put(4, at, 60000, 1, HIFC_REUSE), HIFC_REJECTED);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK(stats.write_budget_left_bytes >= 10000 && stats.write_budget_left_bytes < 11000);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(two_phase_put)
{
    uint64_t at;
    format_ns();
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    fill(pool + at, 5, 4 * 8192);
    struct hifc_req reserve = {.op = HIFC_OP_RESERVE, .cls = HIFC_SWAP, .key = key_of(5),
                               .length = 4 * 8192, .part_count = 4};
    CHECK_EQ(submit_and_wait(ns, &reserve, 1), HIFC_OK);
    CHECK_EQ(get(5, at + 65536, 0, 0), HIFC_PENDING);
    CHECK_EQ(put(6, at + 65536, 5000, 1, HIFC_SWAP), HIFC_OK);
    struct hifc_req reqs[5];
    memset(reqs, 0, sizeof reqs);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t part = 3 - i;
        reqs[i] = (struct hifc_req){.op = HIFC_OP_WRITE, .handle = reserve.handle,
                                    .value_offset = part * 8192, .length = 8192,
                                    .buffer_offset = at + part * 8192};
    }
    reqs[4] = (struct hifc_req){.op = HIFC_OP_COMMIT, .handle = reserve.handle};
    submit_and_wait(ns, reqs, 5);
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQ(reqs[i].status, HIFC_OK);
    }
    memset(pool + at, 0, 4 * 8192);
    CHECK_EQ(get(5, at, 0, 0), HIFC_OK);
    check_value(5, at, 0, 4 * 8192);
    struct hifc_req abort_req = {.op = HIFC_OP_RESERVE, .cls = HIFC_SWAP, .key = key_of(9),
                                 .length = 100000};
    CHECK_EQ(submit_and_wait(ns, &abort_req, 1), HIFC_OK);
    abort_req.op = HIFC_OP_COMMIT;
    CHECK_EQ(submit_and_wait(ns, &abort_req, 1), -EINVAL);
    abort_req.op = HIFC_OP_ABORT;
    CHECK_EQ(submit_and_wait(ns, &abort_req, 1), HIFC_OK);
    CHECK_EQ(get(9, at, 0, 0), HIFC_MISS);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(reclaim_evicts_the_oldest_reuse_and_keeps_swap)
{
    uint64_t at;
    format_ns();
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(put(10000 + i, at, 100000, 1, HIFC_SWAP), HIFC_OK);
    }
    for (uint32_t i = 0; i < 1000; i++) {
        int status;
        for (unsigned attempt = 0; attempt < 10; attempt++) {
            status = put(i, at, 60000, 1, HIFC_REUSE);
            if (status != HIFC_RETRY) {
                break;
            }
        }
        CHECK_EQ(status, HIFC_OK);
        CHECK_EQ(get(i, at, 0, 0), HIFC_OK);
        check_value(i, at, 0, 60000);
    }
    CHECK_EQ(get(0, at, 0, 0), HIFC_MISS);
    CHECK_EQ(get(999, at, 0, 0), HIFC_OK);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(get(10000 + i, at, 0, 0), HIFC_OK);
        check_value(10000 + i, at, 0, 100000);
    }
    struct hifc_stats stats;
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK(stats.evicted_count > 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_full_swap_class_answers_no_space_and_takes_more_after_deletes)
{
    uint64_t at;
    format_ns();
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
    uint32_t stored = 0;
    for (;;) {
        int status = put(stored, at, 100000, 1, HIFC_SWAP);
        for (unsigned attempt = 0; attempt < 10 && status == HIFC_RETRY; attempt++) {
            status = put(stored, at, 100000, 1, HIFC_SWAP);
        }
        if (status != HIFC_OK) {
            CHECK_EQ(status, HIFC_NO_SPACE);
            break;
        }
        stored++;
    }
    CHECK(stored > 80);
    for (uint32_t i = 0; i < stored; i += 2) {
        CHECK_EQ(delete(i), HIFC_OK);
    }
    uint32_t more = 0;
    for (; more < stored / 4; more++) {
        int status = HIFC_RETRY;
        for (unsigned attempt = 0; attempt < 20 && status == HIFC_RETRY; attempt++) {
            status = put(5000 + more, at, 100000, 1, HIFC_SWAP);
        }
        CHECK_EQ(status, HIFC_OK);
    }
    for (uint32_t i = 1; i < stored; i += 2) {
        CHECK_EQ(get(i, at, 0, 0), HIFC_OK);
        check_value(i, at, 0, 100000);
    }
    CHECK_EQ(hifc_close(ns), 0);
}

static void more_keys_than_the_index_holds(uint32_t drive)
{
    struct hifc_open_opts opts = {
        .drive = drive, .pool_size_bytes = 8u << 20, .index_entries_max = 300};
    uint64_t at;
    format_ns();
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    CHECK_EQ(hifc_buffer_alloc(ns, 4096, &at), 0);
    for (uint32_t i = 0; i < 2000; i++) {
        CHECK_EQ(put_until_taken(i, at, 64, 1, HIFC_REUSE), HIFC_OK);
    }
    CHECK_EQ(get(1999, at, 0, 0), HIFC_OK);
    check_value(1999, at, 0, 64);
    CHECK_EQ(get(0, at, 0, 0), HIFC_MISS);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_full_index_evicts_the_oldest_inline)
{
    more_keys_than_the_index_holds(HIFC_INLINE);
}

TEST(a_full_index_evicts_the_oldest_reactor)
{
    more_keys_than_the_index_holds(HIFC_REACTOR);
}

TEST(an_index_full_of_swap_answers_no_space)
{
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .index_entries_max = 50};
    uint64_t at;
    format_ns();
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    CHECK_EQ(hifc_buffer_alloc(ns, 4096, &at), 0);
    for (uint32_t i = 0; i < 50; i++) {
        CHECK_EQ(put(i, at, 64, 1, HIFC_SWAP), HIFC_OK);
    }
    int status = HIFC_RETRY;
    for (unsigned attempt = 0; attempt < 20 && status == HIFC_RETRY; attempt++) {
        status = put(50, at, 64, 1, HIFC_SWAP);
    }
    CHECK_EQ(status, HIFC_NO_SPACE);
    CHECK_EQ(delete(7), HIFC_OK);
    CHECK_EQ(put(50, at, 64, 1, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(hifc_close(ns), 0);
}

/* The pool also holds pages of the library: no request may name them, nobody may free them. */
TEST(only_memory_that_was_handed_out_can_be_named)
{
    uint64_t at, size;
    format_ns();
    open_ns(HIFC_INLINE);
    CHECK_EQ(hifc_buffer_alloc(ns, 70 * 4096, &at), 0);
    CHECK_EQ(put(1, at, 5000, 1, HIFC_REUSE), HIFC_OK);
    CHECK(hifc_pool_base(ns, 0, &size) != NULL);
    for (uint64_t offset = 0; offset < size; offset += 4096) {
        bool mine = offset >= at && offset < at + 70 * 4096;
        struct hifc_req put_req = {.op = HIFC_OP_PUT, .key = key_of(2), .buffer_offset = offset,
                                   .length = 100};
        struct hifc_req get_req = {.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = offset,
                                   .capacity = 5000};
        bool fits = mine && offset + 8192 <= at + 70 * 4096;
        CHECK_EQ(submit_and_wait(ns, &get_req, 1), fits ? HIFC_OK : -EINVAL);
        CHECK_EQ(submit_and_wait(ns, &put_req, 1), mine ? HIFC_OK : -EINVAL);
        CHECK_EQ(delete(2), mine ? HIFC_OK : HIFC_MISS);
        CHECK_EQ(offset == at ? 0 : hifc_buffer_free(ns, offset), offset == at ? 0 : -EINVAL);
    }
    struct hifc_req crc_req = {.op = HIFC_OP_PUT, .key = key_of(3), .buffer_offset = at,
                               .length = 100, .flags = HIFC_F_CHECKSUMS, .checksum_offset = at + 2};
    CHECK_EQ(submit_and_wait(ns, &crc_req, 1), -EINVAL);
    crc_req.checksum_offset = at + 70 * 4096;
    CHECK_EQ(submit_and_wait(ns, &crc_req, 1), -EINVAL);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
    CHECK_EQ(hifc_buffer_free(ns, at), -EINVAL);
    struct hifc_req gone = {.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = at,
                            .capacity = 5000};
    CHECK_EQ(submit_and_wait(ns, &gone, 1), -EINVAL);
    CHECK_EQ(hifc_close(ns), 0);
}

/* What hifc-admin does: asks the owner, by its socket, to let the device go. */
static void ask_owner(const char *word)
{
    char command[512];
    snprintf(command, sizeof command,
             "python3 -c \"import socket,glob,os;"
             "f='/run/hifc' if os.getuid()==0 else '/run/user/%%d/hifc'%%os.getuid();"
             "s=socket.socket(socket.AF_UNIX);"
             "s.connect(glob.glob(f+'/%d-*.sock')[0]);s.sendall(b'%s\\n');"
             "r=s.recv(65536);assert b'\\\"ok\\\": true' in r or b'\\\"ok\\\":true' in r, r\"",
             (int)getpid(), word);
    CHECK_EQ(system(command), 0);
}

TEST(a_detached_namespace_lets_its_device_go_and_answers_so)
{
    for (uint32_t drive = HIFC_REACTOR; drive <= HIFC_INLINE; drive++) {
        struct hifc_ticket *ticket;
        struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(1)};
        uint64_t at;
        format_ns();
        open_ns(drive);
        CHECK_EQ(hifc_buffer_alloc(ns, 65536, &at), 0);
        CHECK_EQ(put(1, at, 5000, 1, HIFC_REUSE), HIFC_OK);
        ask_owner("stats");
        ask_owner("detach");
        CHECK_EQ(hifc_submit(ns, &req, 1, &ticket), -ESHUTDOWN);
        CHECK_EQ(hifc_sync(ns), -ESHUTDOWN);
        pool[at] = 7; /* memory that was handed out stays until close */
        struct hifc_ns *detached = ns;
        open_ns(drive);
        CHECK_EQ(hifc_close(ns), 0);
        CHECK_EQ(hifc_close(detached), 0);
    }
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
