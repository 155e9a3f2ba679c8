/* SPDX-License-Identifier: Apache-2.0
 *
 * namespace_faults.c - what a namespace makes of a device that fails: a failed write ends its
 * segment and is repeated elsewhere, flipped bytes are never returned, errors keep their status.
 */
#include "check.h"

#include <errno.h>

#include "faulty/faulty.h"

#define NAME "namespace-faults"
#define PLAIN "ram://" NAME "?size=8MiB"
#define SEGMENT_BYTES (512u << 10)

static struct hifc_ns *ns;
static struct hifc_device *device;
static uint8_t *pool;
static uint64_t at;

static void start(uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = SEGMENT_BYTES, .force = 1};
    struct hifc_open_opts opts = {
        .drive = drive, .pool_size_bytes = 4u << 20};
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open("faulty+" PLAIN, &opts, &ns), 0);
    device = hifc_faulty_find(NAME);
    CHECK(device != NULL);
    pool = hifc_pool_base(ns, 0, NULL);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
}

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    return key;
}

static struct hifc_error error_seen;

static int run(struct hifc_req *req)
{
    struct hifc_ticket *ticket;
    struct hifc_ticket_info info;
    CHECK_EQ(hifc_submit(ns, req, 1, &ticket), 0);
    CHECK_EQ(hifc_ticket_wait(ticket, CHECK_HANG_US), 1);
    CHECK_EQ(hifc_ticket_info(ticket, &info), 0);
    error_seen = info.first_error;
    hifc_ticket_free(ticket);
    return req->status;
}

static int put(uint32_t n, uint32_t length, uint32_t parts, uint8_t cls)
{
    memset(pool + at, (int)n + 1, length);
    struct hifc_req req = {.op = HIFC_OP_PUT, .cls = cls, .key = key_of(n), .buffer_offset = at,
                           .length = length, .part_count = parts};
    return run(&req);
}

/* The value's bytes must be n + 1 where the answer is OK, and zero where it is not. */
static int get(uint32_t n, uint32_t value_offset, uint32_t length)
{
    memset(pool + at, 0xee, length);
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(n), .buffer_offset = at,
                           .value_offset = value_offset, .length = length};
    int status = run(&req);
    for (uint32_t i = 0; i < length && (status == HIFC_OK || status < 0); i++) {
        CHECK_EQ(pool[at + i], status == HIFC_OK ? n + 1 : 0);
    }
    return status;
}

static void finish(void)
{
    struct hifc_check_result result;
    hifc_faulty_clear(device);
    CHECK_EQ(hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &result), 0);
    if (result.problems) {
        fprintf(stderr, "%s\n", result.first_problem);
    }
    CHECK_EQ(result.problems, 0);
    CHECK_EQ(hifc_close(ns), 0);
}

static void every_write_fails_once(uint32_t drive)
{
    for (uint64_t nth = 1; nth <= 8; nth++) {
        start(drive);
        hifc_faulty_write_error(device, hifc_faulty_count(device) + nth);
        for (uint32_t i = 0; i < 6; i++) {
            CHECK_EQ(put(i, 20000 + i, 1, i % 2 ? HIFC_SWAP : HIFC_REUSE), HIFC_OK);
        }
        for (uint32_t i = 0; i < 6; i++) {
            CHECK_EQ(get(i, 0, 20000 + i), HIFC_OK);
        }
        finish();
    }
}

TEST(a_failed_write_is_repeated_in_another_segment_inline)
{
    every_write_fails_once(HIFC_INLINE);
}

TEST(a_failed_write_is_repeated_in_another_segment_reactor)
{
    every_write_fails_once(HIFC_REACTOR);
}

/* Flips bits of all segments but leaves metadata alone as far as this test reads it. */
static void flip_everything(void)
{
    CHECK_EQ(hifc_faulty_flip(device, (1u << 20) / 4096 + 2, (8u << 20) / 4096 - 40), 0);
}

TEST(flipped_reuse_bytes_are_a_miss_and_can_be_put_again)
{
    start(HIFC_INLINE);
    CHECK_EQ(put(1, 30000, 1, HIFC_REUSE), HIFC_OK);
    flip_everything();
    CHECK_EQ(get(1, 0, 30000), HIFC_MISS);
    hifc_faulty_clear(device);
    CHECK_EQ(get(1, 0, 30000), HIFC_MISS);
    struct hifc_event event;
    uint64_t dropped;
    CHECK_EQ(hifc_events(ns, &event, 1, &dropped), 1);
    CHECK_EQ(event.kind, HIFC_EVENT_STORED);
    CHECK_EQ(hifc_events(ns, &event, 1, &dropped), 1);
    CHECK_EQ(event.kind, HIFC_EVENT_QUARANTINED);
    CHECK_EQ(put(1, 30000, 1, HIFC_REUSE), HIFC_OK);
    CHECK_EQ(get(1, 0, 30000), HIFC_OK);
    finish();
}

TEST(a_quarantined_key_that_changes_its_class_is_counted_in_it)
{
    struct hifc_stats stats;
    struct hifc_req req = {.op = HIFC_OP_DELETE, .key = key_of(1)};
    start(HIFC_INLINE);
    CHECK_EQ(put(1, 30000, 1, HIFC_REUSE), HIFC_OK);
    flip_everything();
    CHECK_EQ(get(1, 0, 30000), HIFC_MISS);
    hifc_faulty_clear(device);
    CHECK_EQ(put(1, 30000, 1, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.entries_swap, 1);
    CHECK_EQ(run(&req), HIFC_OK);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.entries_swap, 0);
    finish();
}

TEST(a_key_whose_value_was_lost_can_be_reserved_again)
{
    start(HIFC_INLINE);
    CHECK_EQ(put(1, 30000, 1, HIFC_REUSE), HIFC_OK);
    flip_everything();
    CHECK_EQ(get(1, 0, 30000), HIFC_MISS);
    hifc_faulty_clear(device);
    for (unsigned round = 0; round < 2; round++) {
        struct hifc_req reserve = {.op = HIFC_OP_RESERVE, .key = key_of(1), .length = 30000};
        CHECK_EQ(run(&reserve), HIFC_OK);
        struct hifc_req end = {.op = HIFC_OP_ABORT, .handle = reserve.handle};
        if (round == 1) {
            memset(pool + at, 2, 30000);
            struct hifc_req write = {.op = HIFC_OP_WRITE, .handle = reserve.handle,
                                     .buffer_offset = at, .length = 30000};
            CHECK_EQ(run(&write), HIFC_OK);
            end.op = HIFC_OP_COMMIT;
        }
        CHECK_EQ(run(&end), HIFC_OK);
        CHECK_EQ(get(1, 0, 30000), round == 1 ? HIFC_OK : HIFC_MISS);
    }
    finish();
}

TEST(a_corrupt_value_names_the_checksums_that_differ)
{
    start(HIFC_INLINE);
    CHECK_EQ(put(1, 30000, 1, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(put(2, 4000, 1, HIFC_SWAP), HIFC_OK); /* packed */
    CHECK_EQ(put(3, 40960, 10, HIFC_SWAP), HIFC_OK);
    flip_everything();
    const uint32_t offsets[] = {0, 0, 4096}; /* of a range, the table of parts is read as well */
    const uint32_t lengths[] = {30000, 4000, 8192};
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(get(i + 1, offsets[i], lengths[i]), -EBADMSG);
        CHECK_EQ(error_seen.checksums, 1);
        CHECK(error_seen.expected != error_seen.found);
        CHECK(strncmp(error_seen.message + error_seen.fix_at, "delete the key", 14) == 0);
    }
    hifc_faulty_clear(device);
    CHECK_EQ(put(1, 30000, 1, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(flipped_swap_bytes_are_an_error_until_deleted)
{
    start(HIFC_INLINE);
    CHECK_EQ(put(1, 30000, 3, HIFC_SWAP), HIFC_OK);
    flip_everything();
    CHECK_EQ(get(1, 10000, 10000), -EBADMSG);
    CHECK_EQ(error_seen.code, -EBADMSG);
    hifc_faulty_clear(device);
    struct hifc_req again = {.op = HIFC_OP_GET, .key = key_of(1), .buffer_offset = at,
                             .capacity = 30000};
    CHECK_EQ(run(&again), -EBADMSG);
    struct hifc_req req = {.op = HIFC_OP_DELETE, .key = key_of(1)};
    CHECK_EQ(run(&req), HIFC_OK);
    CHECK_EQ(put(1, 30000, 3, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(get(1, 10000, 10000), HIFC_OK);
    struct hifc_stats stats;
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.corrupt_count, 1);
    finish();
}

TEST(a_read_error_keeps_its_nvme_status_and_passes)
{
    start(HIFC_INLINE);
    CHECK_EQ(put(1, 30000, 1, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(hifc_faulty_read_error(device, 256, 300), 0);
    CHECK_EQ(get(1, 0, 30000), -EIO);
    CHECK_EQ(error_seen.code, -EIO);
    CHECK_EQ(error_seen.sct, 2); /* media and data integrity errors */
    CHECK(error_seen.lba >= 256 && error_seen.nlb > 0);
    hifc_faulty_clear(device);
    CHECK_EQ(get(1, 0, 30000), HIFC_OK);
    finish();
}

TEST(a_reservation_whose_write_failed_cannot_be_committed)
{
    start(HIFC_INLINE);
    struct hifc_req reserve = {.op = HIFC_OP_RESERVE, .cls = HIFC_SWAP, .key = key_of(4),
                               .length = 40960, .part_count = 10};
    CHECK_EQ(run(&reserve), HIFC_OK);
    CHECK_EQ(put(7, 5000, 1, HIFC_SWAP), HIFC_OK);
    memset(pool + at, 5, 40960);
    struct hifc_req write = {.op = HIFC_OP_WRITE, .handle = reserve.handle, .buffer_offset = at,
                             .length = 40960};
    hifc_faulty_write_error(device, hifc_faulty_count(device) + 1);
    CHECK_EQ(run(&write), -EIO);
    struct hifc_req commit = {.op = HIFC_OP_COMMIT, .handle = reserve.handle};
    CHECK_EQ(run(&commit), -EIO);
    CHECK_EQ(get(4, 0, 40960), HIFC_MISS);
    CHECK_EQ(run(&commit), -EINVAL);
    CHECK_EQ(put(4, 40960, 10, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(get(4, 4096, 8192), HIFC_OK);
    finish();
}

TEST(a_dead_device_answers_with_errors_and_closes)
{
    for (uint32_t drive = HIFC_REACTOR; drive <= HIFC_INLINE; drive++) {
        start(drive);
        CHECK_EQ(put(1, 30000, 1, HIFC_SWAP), HIFC_OK);
        hifc_faulty_cut(device);
        CHECK_EQ(put(2, 30000, 1, HIFC_SWAP), -EIO);
        CHECK_EQ(get(1, 0, 30000), -EIO);
        CHECK(hifc_sync(ns) < 0);
        CHECK(hifc_close(ns) < 0);
    }
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
