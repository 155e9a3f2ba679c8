/* SPDX-License-Identifier: Apache-2.0
 *
 * background.c - background reads of the engine never delay another read: they go when none waits,
 * within their bounds, and leave room for one that comes.
 */
#include "scripted_device.h"

#include "engine/engine.h"
#include "engine/internal.h"

#define PAGE 4096u
#define COMMAND 16384u /* what the scripted device moves at a time */

struct read {
    struct hifc_xfer xfer;
    struct hifc_span span;
    bool ended;
    int ended_as; /* how many had ended before */
};

static int ended;

static void read_done(struct hifc_xfer *xfer)
{
    struct read *read = xfer->owner;
    CHECK_EQ(xfer->error, 0);
    CHECK(!read->ended);
    read->ended = true;
    read->ended_as = ended++;
}

static struct read *submit(struct hifc_engine *engine, uint64_t offset_bytes, uint64_t bytes,
                           bool background)
{
    struct read *read = calloc(1, sizeof *read);
    CHECK(read);
    read->span = (struct hifc_span){.base = aligned_alloc(PAGE, bytes), .bytes = bytes};
    read->xfer = (struct hifc_xfer){.spans = &read->span, .span_count = 1, .op = HIFC_IO_READ,
                                    .background = background, .offset_bytes = offset_bytes,
                                    .length_bytes = bytes, .done = read_done, .owner = read};
    hifc_engine_submit(engine, &read->xfer);
    return read;
}

static void finish(struct hifc_engine *engine, struct scripted_device *device, struct read **reads,
                   uint32_t count)
{
    device->frozen = false;
    device->per_poll = 0;
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t polls = 0; !reads[i]->ended; polls++) {
            CHECK(polls < 100000);
            CHECK(hifc_engine_poll(engine) >= 0);
        }
        CHECK(memcmp(reads[i]->span.base, device->bytes + reads[i]->xfer.offset_bytes,
                     reads[i]->span.bytes) == 0);
        free(reads[i]->span.base);
        free(reads[i]);
    }
    hifc_engine_destroy(engine);
    scripted_free(device);
}

static struct scripted_device *device_and_engine(uint32_t depth, struct hifc_engine **engine)
{
    struct scripted_device *device = scripted_create(16u << 20);
    struct hifc_engine_opts opts = {.queue_depth = depth};
    CHECK_EQ(hifc_engine_create(&device->base, &opts, engine), 0);
    device->frozen = true;
    ended = 0;
    return device;
}

TEST(alone_they_fill_their_bound_and_no_more)
{
    struct hifc_engine *engine;
    struct scripted_device *device = device_and_engine(256, &engine);
    struct read *reads[8];
    for (uint32_t i = 0; i < 8; i++) {
        reads[i] = submit(engine, i * (512u << 10), 512u << 10, true);
    }
    CHECK_EQ(hifc_engine_poll(engine), 0);
    CHECK_EQ(device->inflight_bytes[0], HIFC_BACKGROUND_BYTES);
    finish(engine, device, reads, 8);
}

TEST(half_of_the_commands_stay_free)
{
    struct hifc_engine *engine;
    struct scripted_device *device = device_and_engine(8, &engine);
    struct read *reads[2] = {submit(engine, 0, 512u << 10, true)};
    CHECK_EQ(hifc_engine_poll(engine), 0);
    CHECK_EQ(device->inflight_max, 4);
    reads[1] = submit(engine, 1u << 20, 64u << 10, false);
    CHECK_EQ(hifc_engine_poll(engine), 0);
    CHECK_EQ(device->inflight_max, 8); /* all four at once */
    finish(engine, device, reads, 2);
}

TEST(a_read_that_comes_later_goes_first)
{
    struct hifc_engine *engine;
    struct scripted_device *device = device_and_engine(256, &engine);
    struct read *reads[9];
    for (uint32_t i = 0; i < 8; i++) {
        reads[i] = submit(engine, i * (512u << 10), 512u << 10, true);
    }
    CHECK_EQ(hifc_engine_poll(engine), 0);
    uint32_t issued = device->log_count;
    reads[8] = submit(engine, 12u << 20, 64u << 10, false);
    CHECK_EQ(hifc_engine_poll(engine), 0);
    CHECK_EQ(device->log_count, issued + 4);
    for (uint32_t i = issued; i < issued + 4; i++) {
        CHECK(device->log[i].offset_bytes >= 12u << 20);
    }
    device->frozen = false;
    device->per_poll = 1;
    for (uint32_t polls = 0; !reads[8]->ended; polls++) {
        uint32_t before = device->log_count;
        CHECK(polls < 1000);
        CHECK(hifc_engine_poll(engine) >= 0);
        if (device->log_count > before && !reads[8]->ended) { /* beside it */
            CHECK(device->inflight_bytes[0] <=
                  HIFC_BACKGROUND_BESIDE_READS_BYTES + (64u << 10) + COMMAND);
        }
    }
    CHECK(reads[8]->ended_as <= 2); /* with those alone that were in flight */
    finish(engine, device, reads, 9);
}

TEST(none_goes_while_another_read_waits)
{
    struct hifc_engine *engine;
    struct scripted_device *device = device_and_engine(4, &engine);
    struct read *reads[3] = {submit(engine, 0, 8 * COMMAND, false),
                             submit(engine, 1u << 20, 8 * COMMAND, true),
                             submit(engine, 2u << 20, 8 * COMMAND, false)};
    device->frozen = false;
    device->per_poll = 1;
    for (uint32_t polls = 0; device->log_count < 16; polls++) {
        CHECK(polls < 1000);
        CHECK(hifc_engine_poll(engine) >= 0);
    }
    for (uint32_t i = 0; i < 16; i++) {
        CHECK(device->log[i].offset_bytes < 1u << 20 || device->log[i].offset_bytes >= 2u << 20);
    }
    finish(engine, device, reads, 3);
    CHECK_EQ(ended, 3);
}

static int error_seen;

static void lost_done(struct hifc_xfer *xfer)
{
    error_seen = xfer->error;
    ended++;
}

TEST(a_lost_queue_pair_ends_them_as_well)
{
    struct hifc_engine *engine;
    struct scripted_device *device = device_and_engine(8, &engine);
    struct hifc_span span = {.base = aligned_alloc(PAGE, 1u << 20), .bytes = 1u << 20};
    struct hifc_xfer xfer = {.spans = &span, .span_count = 1, .op = HIFC_IO_READ,
                             .background = true, .length_bytes = 1u << 20, .done = lost_done};
    hifc_engine_submit(engine, &xfer);
    CHECK_EQ(hifc_engine_poll(engine), 0);
    device->lose_polls = 1;
    CHECK(hifc_engine_poll(engine) >= 0);
    CHECK_EQ(ended, 1);
    CHECK_EQ(error_seen, -EIO);
    hifc_engine_submit(engine, &xfer); /* and its share of the queue is free again */
    CHECK(hifc_engine_poll(engine) >= 0);
    CHECK_EQ(device->inflight_bytes[0], 4 * COMMAND);
    hifc_engine_destroy(engine); /* ends it */
    CHECK_EQ(ended, 2);
    CHECK_EQ(error_seen, -ECANCELED);
    free(span.base);
    scripted_free(device);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
