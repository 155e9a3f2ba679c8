/* SPDX-License-Identifier: Apache-2.0
 *
 * What is done to a device as a whole: its own account of itself, erasing it, repairing the namespace
 * on it; and the histograms of latency.
 */
#include "submit.h"

#include <errno.h>
#include <unistd.h>

#include "device/ram.h"
#include "engine/engine.h"
#include "format/layout.h"

#define NAME "ram://medium-test?size=16MiB"
#define SEGMENT (512u << 10)

static void format_ns(void)
{
    struct hifc_format_opts format = {.segment_size_bytes = SEGMENT, .force = 1};
    CHECK_EQ(hifc_format(NAME, &format), 0);
}

static struct hifc_ns *open_ns(uint32_t read_only)
{
    struct hifc_open_opts opts = {.pool_size_bytes = 8u << 20, .read_only = read_only};
    struct hifc_ns *ns;
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    return ns;
}

static int put(struct hifc_ns *ns, uint8_t n, uint32_t length)
{
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = {{n, 1}}, .length = length};
    uint64_t size;
    CHECK_EQ(hifc_buffer_alloc(ns, length, &req.buffer_offset), 0);
    memset((uint8_t *)hifc_pool_base(ns, 0, &size) + req.buffer_offset, n, length);
    int status = submit_and_wait(ns, &req, 1);
    CHECK_EQ(hifc_buffer_free(ns, req.buffer_offset), 0);
    return status;
}

static int get(struct hifc_ns *ns, uint8_t n)
{
    struct hifc_req req = {.op = HIFC_OP_GET, .key = {{n, 1}}, .capacity = 1u << 20};
    CHECK_EQ(hifc_buffer_alloc(ns, req.capacity, &req.buffer_offset), 0);
    int status = submit_and_wait(ns, &req, 1);
    CHECK_EQ(hifc_buffer_free(ns, req.buffer_offset), 0);
    return status;
}

/* Writes over the device below a closed namespace. */
static void scribble(uint64_t offset, const void *data, uint32_t bytes)
{
    struct hifc_device *device;
    struct hifc_engine *engine;
    struct hifc_blockio *io;
    struct hifc_engine_opts opts = {.queue_depth = 4, .command_timeout_ms = CHECK_HANG_S * 1000};
    CHECK_EQ(hifc_device_open(NAME, 0, &device), 0);
    CHECK_EQ(hifc_engine_create(device, &opts, &engine), 0);
    CHECK_EQ(hifc_blockio_create(device, engine, &io), 0);
    CHECK_EQ(hifc_blockio_write(io, offset, data, bytes), 0);
    CHECK_EQ(hifc_blockio_flush(io), 0);
    hifc_engine_destroy(engine);
    hifc_blockio_destroy(io);
    hifc_device_close(device);
}

/* The header page of the segment that holds the first value becomes noise. */
static void damage_first(void)
{
    static uint8_t noise[HIFC_PAGE_BYTES] __attribute__((aligned(4096)));
    memset(noise, 0x5a, sizeof noise);
    scribble(hifc_segment_offset(SEGMENT, 0), noise, sizeof noise);
}

TEST(a_device_tells_what_stands_on_it)
{
    struct hifc_device_info info;
    CHECK_EQ(hifc_erase(NAME, HIFC_ERASE_OVERWRITE), 0);
    CHECK_EQ(hifc_device_info(NAME, &info), 0);
    CHECK_EQ(info.size_bytes, 16u << 20);
    CHECK_EQ(info.signature[0], 0);
    CHECK_EQ(info.nsid, 0);
    CHECK(!(info.flags & (HIFC_INFO_NVME | HIFC_INFO_HEALTH | HIFC_INFO_UNREADABLE)));
    CHECK(info.health_problem[0] != '\0');
    format_ns();
    CHECK_EQ(hifc_device_info(NAME, &info), 0);
    CHECK(strstr(info.signature, "HiFC") != NULL);
}

TEST(a_check_refuses_as_format_does_and_changes_nothing)
{
    struct hifc_format_opts check = {.segment_size_bytes = SEGMENT, .check_only = 1};
    struct hifc_format_opts large = {.segment_size_bytes = 8u << 20, .force = 1, .check_only = 1};
    format_ns();
    struct hifc_ns *ns = open_ns(0);
    CHECK_EQ(put(ns, 1, 5000), HIFC_OK);
    CHECK_EQ(hifc_format(NAME, &check), -EBUSY);
    CHECK_EQ(hifc_close(ns), 0);
    CHECK_EQ(hifc_format(NAME, &check), -EEXIST);
    CHECK_EQ(hifc_format(NAME, &large), -EINVAL);
    check.force = 1;
    CHECK_EQ(hifc_format(NAME, &check), 0);
    ns = open_ns(1);
    CHECK_EQ(get(ns, 1), HIFC_OK);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(an_erased_device_holds_no_namespace)
{
    struct hifc_ns *ns;
    for (uint32_t method = HIFC_ERASE_DEALLOCATE; method <= HIFC_ERASE_OVERWRITE; method++) {
        format_ns();
        CHECK_EQ(hifc_erase(NAME, method), 0);
        CHECK_EQ(hifc_open(NAME, NULL, &ns), -ENOMEDIUM);
    }
}

TEST(erase_refuses_what_the_device_has_not)
{
    struct hifc_ns *ns;
    format_ns();
    CHECK_EQ(hifc_erase(NAME, HIFC_ERASE_CRYPTO), -ENOTSUP);
    CHECK_EQ(hifc_erase(NAME, HIFC_ERASE_FORMAT), -ENOTSUP);
    CHECK_EQ(hifc_erase(NAME, 0), -EINVAL);
    CHECK_EQ(hifc_open(NAME, NULL, &ns), 0); /* still there */
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_damaged_segment_is_set_free_and_used_again)
{
    struct hifc_stats stats;
    struct hifc_repair_result result;
    format_ns();
    struct hifc_ns *ns = open_ns(0);
    CHECK_EQ(put(ns, 1, 100000), HIFC_OK);
    CHECK_EQ(hifc_close(ns), 0);
    damage_first();

    ns = open_ns(1);
    CHECK_EQ(hifc_repair(ns, &result), -EROFS);
    CHECK_EQ(hifc_close(ns), 0);

    ns = open_ns(0);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.segments_damaged, 1);
    CHECK_EQ(get(ns, 1), HIFC_MISS);
    CHECK_EQ(hifc_repair(ns, &result), 0);
    CHECK_EQ(result.segments_damaged, 1);
    CHECK_EQ(result.segments_freed, 1);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.segments_damaged, 0);
    CHECK_EQ(stats.segments_free, stats.segments);
    CHECK_EQ(hifc_close(ns), 0);

    /* What stood there before does not come back, and what is put there now does. */
    ns = open_ns(0);
    CHECK_EQ(get(ns, 1), HIFC_MISS);
    CHECK_EQ(put(ns, 2, 4096), HIFC_OK);
    CHECK_EQ(hifc_close(ns), 0);
    ns = open_ns(1);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.segments_damaged, 0);
    CHECK_EQ(stats.entries, 1);
    CHECK_EQ(get(ns, 2), HIFC_OK);
    struct hifc_check_result check;
    CHECK_EQ(hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &check), 0);
    CHECK_EQ(check.problems, 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(the_new_header_is_above_every_page_of_the_old_life)
{
    struct hifc_repair_result result;
    struct hifc_stats stats;
    format_ns();
    struct hifc_ns *ns = open_ns(0);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(hifc_close(ns), 0);
    /* A batch of generation 7, as of a life that only it remembers. */
    struct hifc_batch_header *batch = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    uint64_t place = hifc_segment_offset(SEGMENT, 0) + 5 * HIFC_PAGE_BYTES;
    memset(batch, 0, sizeof *batch);
    batch->generation = 7;
    hifc_page_seal(batch, HIFC_MAGIC_BATCH, stats.uuid, place, 7);
    scribble(place, batch, sizeof *batch);
    free(batch);
    damage_first();
    ns = open_ns(0);
    CHECK_EQ(hifc_repair(ns, &result), 0);
    CHECK_EQ(result.segments_freed, 1);
    CHECK_EQ(hifc_close(ns), 0);

    struct hifc_device *device;
    struct hifc_engine *engine;
    struct hifc_blockio *io;
    struct hifc_engine_opts opts = {.queue_depth = 4, .command_timeout_ms = CHECK_HANG_S * 1000};
    struct hifc_segment_header *header = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    CHECK_EQ(hifc_device_open(NAME, 0, &device), 0);
    CHECK_EQ(hifc_engine_create(device, &opts, &engine), 0);
    CHECK_EQ(hifc_blockio_create(device, engine, &io), 0);
    CHECK_EQ(hifc_blockio_read(io, hifc_segment_offset(SEGMENT, 0), header, sizeof *header), 0);
    CHECK_EQ(header->generation, 8);
    CHECK_EQ(header->state, HIFC_DISK_FREE);
    free(header);
    hifc_engine_destroy(engine);
    hifc_blockio_destroy(io);
    hifc_device_close(device);
}

static uint64_t sum(const uint64_t *buckets)
{
    uint64_t total = 0;
    for (unsigned i = 0; i < HIFC_LATENCY_BUCKETS; i++) {
        total += buckets[i];
    }
    return total;
}

TEST(tickets_that_moved_bytes_are_counted_by_their_time)
{
    struct hifc_stats stats;
    format_ns();
    struct hifc_ns *ns = open_ns(0);
    CHECK_EQ(put(ns, 1, 8192), HIFC_OK);
    CHECK_EQ(put(ns, 1, 8192), HIFC_EXISTS);
    CHECK_EQ(get(ns, 1), HIFC_OK);
    CHECK_EQ(get(ns, 1), HIFC_OK);
    CHECK_EQ(get(ns, 9), HIFC_MISS);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(sum(stats.get_latency), 2);
    CHECK_EQ(sum(stats.put_latency), 1);
    CHECK(stats.get_elapsed_ns > 0 && stats.put_elapsed_ns > 0);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_write_budget_is_told)
{
    struct hifc_stats stats;
    format_ns();
    struct hifc_open_opts opts = {.pool_size_bytes = 8u << 20, .admission = HIFC_ADMIT_BUDGET,
                                  .write_budget_bytes_per_day = 1u << 20};
    struct hifc_ns *ns;
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    CHECK_EQ(put(ns, 1, 400000), HIFC_OK);
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK_EQ(stats.write_budget_bytes, 1u << 20);
    CHECK(stats.write_budget_left_bytes < 700000);
    CHECK(stats.write_budget_left_bytes > 600000);
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(only_an_object_on_one_line_is_published)
{
    static char large[HIFC_PUBLISH_MAX_BYTES + 2];
    format_ns();
    struct hifc_ns *ns = open_ns(0);
    memset(large, ' ', sizeof large - 1);
    large[0] = '{';
    large[HIFC_PUBLISH_MAX_BYTES] = '}';
    CHECK_EQ(hifc_publish(ns, large), -EINVAL);
    CHECK_EQ(hifc_publish(ns, large + 1), -EINVAL);
    CHECK_EQ(hifc_publish(ns, "{\n}"), -EINVAL);
    large[HIFC_PUBLISH_MAX_BYTES] = '\0';
    large[HIFC_PUBLISH_MAX_BYTES - 1] = '}';
    CHECK_EQ(hifc_publish(ns, large), 0);
    CHECK_EQ(hifc_publish(ns, NULL), 0);
    CHECK_EQ(hifc_publish(ns, "{\"hit\": 1}"), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
