/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine driven inline: splitting, order, errors, lost queue pairs, and that every transfer
 * ends exactly once.
 *
 *   unit_engine cost    prints ns a command on a device that does nothing
 */
#include "engine/engine.h"

#include <pthread.h>

#include "engine/internal.h"
#include "scripted_device.h"

enum { DEVICE_BYTES = 4 << 20, PAGE = 4096 };

/* A transfer with its own record of what happened to it. */
struct job {
    struct hifc_xfer xfer;
    struct hifc_span spans[6];
    uint8_t *memory;
    uint32_t ended;
    uint64_t chunk_bytes;
    struct hifc_engine *engine;
    struct scripted_device *device;
    uint64_t again; /* times that done submits it again */
};

static uint32_t batch_ends, rounds_with_ends, ticks;

static void job_done(struct hifc_xfer *xfer)
{
    struct job *job = xfer->owner;
    CHECK_EQ(xfer->inflight, 0);
    job->ended++;
    if (job->again) {
        job->again--;
        hifc_engine_submit(job->engine, xfer);
    }
}

static void job_chunk(struct hifc_xfer *xfer, uint64_t position, const struct iovec *iov,
                      uint32_t iov_count)
{
    struct job *job = xfer->owner;
    CHECK_EQ(xfer->error, 0);
    for (uint32_t i = 0; i < iov_count; i++) {
        CHECK_EQ(memcmp(iov[i].iov_base, job->device->bytes + xfer->offset_bytes + position,
                        iov[i].iov_len), 0);
        position += iov[i].iov_len;
        job->chunk_bytes += iov[i].iov_len;
    }
}

static void count_batch_end(void *owner)
{
    (void)owner;
    batch_ends++;
}

static void count_tick(void *owner)
{
    (void)owner;
    ticks++;
}

static struct hifc_engine *engine_on(struct scripted_device *device, uint32_t depth)
{
    struct hifc_engine *engine;
    struct hifc_engine_opts opts = {.queue_depth = depth, .batch_end = count_batch_end,
                                    .tick = count_tick, .tick_ms = 10};
    batch_ends = rounds_with_ends = ticks = 0;
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), 0);
    return engine;
}

static struct job *job_new(struct hifc_engine *engine, struct scripted_device *device,
                           enum hifc_io_op op, uint64_t offset_bytes, uint64_t length_bytes)
{
    struct job *job = calloc(1, sizeof *job);
    CHECK(job);
    job->engine = engine;
    job->device = device;
    job->memory = aligned_alloc(PAGE, (length_bytes + PAGE) & ~(uint64_t)(PAGE - 1));
    CHECK(job->memory);
    memset(job->memory, 0xA5, length_bytes);
    job->spans[0] = (struct hifc_span){.base = job->memory, .bytes = length_bytes};
    job->xfer = (struct hifc_xfer){.spans = job->spans, .span_count = 1, .op = (uint8_t)op,
                                   .offset_bytes = offset_bytes, .length_bytes = length_bytes,
                                   .done = job_done, .owner = job};
    if (op == HIFC_IO_READ) {
        job->xfer.chunk = job_chunk;
    }
    return job;
}

static void job_free(struct job *job)
{
    free(job->memory);
    free(job);
}

static void drive(struct hifc_engine *engine, struct job *job)
{
    for (unsigned i = 0; !job->ended; i++) {
        CHECK(i < 100000);
        CHECK(hifc_engine_poll(engine) >= 0);
    }
    CHECK_EQ(job->ended, 1);
}

static int run_job(struct job *job)
{
    hifc_engine_submit(job->engine, &job->xfer);
    drive(job->engine, job);
    return job->xfer.error;
}

/* ---- splitting ------------------------------------------------------------------------------- */

/* Cuts length_bytes into spans, some of them pieces with gaps; returns the memory they need. */
static uint64_t cut_spans(struct job *job, uint64_t length_bytes, unsigned *seed)
{
    uint64_t at = 0, left = length_bytes;
    uint32_t count = 0;
    while (left) {
        uint64_t bytes = count == 5 ? left : 4 * (1 + (uint64_t)rand_r(seed) % (left / 4));
        struct hifc_span *span = &job->spans[count++];
        *span = (struct hifc_span){.base = (uint8_t *)at, .bytes = bytes};
        if (rand_r(seed) % 2) {
            span->piece_bytes = 1024 * (1 + (uint64_t)rand_r(seed) % 8);
            span->stride_bytes = span->piece_bytes + (rand_r(seed) % 3 ? 512u : 0);
            at += (bytes / span->piece_bytes + 1) * span->stride_bytes;
        } else {
            at += bytes + (rand_r(seed) % 2 ? 64u : 0);
        }
        left -= bytes;
    }
    job->xfer.span_count = count;
    return at;
}

/* Copies between a flat image of the transfer and its spans, in the plainest way. */
static void flat_copy(struct job *job, uint8_t *flat, bool to_spans)
{
    for (uint32_t i = 0; i < job->xfer.span_count; i++) {
        const struct hifc_span *span = &job->spans[i];
        for (uint64_t k = 0; k < span->bytes; k++, flat++) {
            uint8_t *at = span->piece_bytes ? span->base + k / span->piece_bytes *
                                              span->stride_bytes + k % span->piece_bytes
                                            : span->base + k;
            *(to_spans ? at : flat) = *(to_spans ? flat : at);
        }
    }
}

TEST(any_scatter_list_moves_every_byte)
{
    static uint8_t flat[256 << 10], model[DEVICE_BYTES];
    unsigned seed = 11;
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->shuffle_seed = 5;
    device->per_poll = 3;
    device->room = 3;
    device->base.geometry.lba_bytes = 4096;
    device->base.geometry.max_iov = 9; /* pieces of 1 KiB: a block still fits an unaligned list */
    struct hifc_engine *engine = engine_on(device, 8);
    memcpy(model, device->bytes, DEVICE_BYTES);
    for (unsigned step = 0; step < 400; step++) {
        uint64_t length = PAGE * (1 + (uint64_t)rand_r(&seed) % 60);
        uint64_t offset = PAGE * ((uint64_t)rand_r(&seed) % ((DEVICE_BYTES - length) / PAGE + 1));
        bool write = rand_r(&seed) % 2;
        struct job *job = job_new(engine, device, write ? HIFC_IO_WRITE : HIFC_IO_READ, offset, 8);
        uint64_t needs = cut_spans(job, length, &seed);
        free(job->memory);
        job->memory = malloc(needs + 8192);
        CHECK(job->memory);
        for (uint32_t i = 0; i < job->xfer.span_count; i++) {
            job->spans[i].base = job->memory + (uintptr_t)job->spans[i].base;
        }
        job->xfer.length_bytes = length;
        for (uint64_t i = 0; i < length; i++) {
            flat[i] = write ? (uint8_t)rand_r(&seed) : 0;
        }
        flat_copy(job, flat, true);
        int rc = run_job(job);
        if (write) {
            memcpy(model + offset, flat, length);
        }
        CHECK_EQ(rc, 0);
        flat_copy(job, flat, false);
        CHECK_EQ(memcmp(flat, model + offset, length), 0);
        CHECK_EQ(memcmp(device->bytes, model, DEVICE_BYTES), 0);
        CHECK_EQ(job->chunk_bytes, write ? 0 : length);
        job_free(job);
    }
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(a_chunk_ends_on_a_block_where_the_scatter_list_is_full)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->base.geometry.lba_bytes = 4096;
    device->base.geometry.max_iov = 5; /* of 1 KiB: one block and a bit */
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 64 << 10);
    job->spans[0].bytes = job->xfer.length_bytes = 32 << 10;
    job->spans[0].piece_bytes = 1024;
    job->spans[0].stride_bytes = 2048;
    CHECK_EQ(run_job(job), 0);
    CHECK_EQ(device->log_count, 8);
    CHECK_EQ(device->log[1].length_bytes, 4096);
    job_free(job);
    hifc_engine_destroy(engine);

    device->base.geometry.max_iov = 3; /* no block fits: an error, not a hang */
    engine = engine_on(device, 8);
    job = job_new(engine, device, HIFC_IO_READ, 0, 64 << 10);
    job->spans[0].bytes = job->xfer.length_bytes = 32 << 10;
    job->spans[0].piece_bytes = 1024;
    job->spans[0].stride_bytes = 2048;
    CHECK_EQ(run_job(job), -EINVAL);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(a_chunk_ends_at_a_boundary_of_the_device)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->base.geometry.max_transfer_bytes = 64 << 10;
    device->base.geometry.boundary_bytes = 64 << 10;
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_READ, 5 * PAGE, 160 << 10);
    CHECK_EQ(run_job(job), 0);
    CHECK_EQ(device->log_count, 3); /* cut from its start on, it would be five below */
    CHECK_EQ(device->log[0].length_bytes, 11 * PAGE);
    CHECK_EQ(device->log[1].offset_bytes, 16 * PAGE);
    CHECK_EQ(device->log[1].length_bytes, 16 * PAGE);
    CHECK_EQ(device->log[2].length_bytes, 13 * PAGE);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(neighbours_in_memory_become_one_element)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->base.geometry.max_iov = 1;
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 16384);
    job->spans[0] = (struct hifc_span){job->memory, 8192, 512, 512};
    job->spans[1] = (struct hifc_span){job->memory + 8192, 0, 0, 0};
    job->spans[2] = (struct hifc_span){job->memory + 8192, 8192, 0, 0};
    job->xfer.span_count = 3;
    CHECK_EQ(run_job(job), 0);
    CHECK_EQ(device->log_count, 1);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(senseless_transfers_end_with_an_error)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_WRITE, 0, 40960);
    job->spans[0].bytes = 40448; /* shorter than the transfer */
    CHECK_EQ(run_job(job), -EINVAL);
    job_free(job);
    job = job_new(engine, device, HIFC_IO_READ, 0, 4096);
    job->spans[0].base += 2; /* not as the device wants it */
    CHECK_EQ(run_job(job), -EINVAL);
    job_free(job);
    job = job_new(engine, device, HIFC_IO_READ, 0, 0);
    CHECK_EQ(run_job(job), 0);
    job_free(job);
    CHECK_EQ(batch_ends, 3);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(flush_and_deallocate_are_single_commands)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 8);
    struct hifc_engine_stats stats;
    struct job *flush = job_new(engine, device, HIFC_IO_FLUSH, 0, 0);
    struct job *deallocate = job_new(engine, device, HIFC_IO_DEALLOCATE, 8192, 0);
    deallocate->xfer.length_bytes = 2 << 20;
    flush->xfer.next = &deallocate->xfer;
    hifc_engine_submit(engine, &flush->xfer);
    drive(engine, flush);
    drive(engine, deallocate);
    CHECK_EQ(device->log_count, 2);
    CHECK_EQ(device->log[0].op, HIFC_IO_FLUSH);
    CHECK_EQ(device->log[1].offset_bytes, 8192);
    CHECK_EQ(device->log[1].length_bytes, 2 << 20);
    hifc_engine_stats_get(engine, &stats);
    CHECK_EQ(stats.flush_commands, 1);
    CHECK_EQ(stats.deallocate_commands, 1);
    CHECK_EQ(stats.write_bytes, 0);
    job_free(flush);
    job_free(deallocate);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

/* ---- order ----------------------------------------------------------------------------------- */

TEST(what_a_thread_submits_is_issued_in_its_order)
{
    enum { COUNT = 60 };
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 4);
    struct job *jobs[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        jobs[i] = job_new(engine, device, HIFC_IO_READ, i * 512, 512);
    }
    for (unsigned i = 0; i < COUNT; i += 3) { /* chains of three */
        jobs[i]->xfer.next = &jobs[i + 1]->xfer;
        jobs[i + 1]->xfer.next = &jobs[i + 2]->xfer;
        jobs[i + 2]->xfer.next = NULL;
        hifc_engine_submit(engine, &jobs[i]->xfer);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        drive(engine, jobs[i]);
        CHECK_EQ(device->log[i].offset_bytes, i * 512);
        job_free(jobs[i]);
    }
    CHECK_EQ(device->inflight_max, 4);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(io_starts_without_a_poll)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 512);
    hifc_engine_submit(engine, &job->xfer);
    CHECK_EQ(device->log_count, 1);
    CHECK_EQ(job->ended, 0);
    CHECK_EQ(hifc_engine_poll(engine), 1);
    CHECK_EQ(job->ended, 1);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(writes_alone_fill_the_queue)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 128);
    struct job *job = job_new(engine, device, HIFC_IO_WRITE, 0, 3 << 20);
    hifc_engine_submit(engine, &job->xfer);
    CHECK_EQ(device->inflight_max, 128);
    drive(engine, job);
    CHECK_EQ(device->log_count, (3 << 20) / 16384);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(reads_go_first_and_writes_beside_them_are_few)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->per_poll = 1;
    struct hifc_engine *engine = engine_on(device, 128);
    struct job *write = job_new(engine, device, HIFC_IO_WRITE, 0, 3 << 20);
    struct job *read = job_new(engine, device, HIFC_IO_READ, 3 << 20, 1 << 20);
    write->xfer.next = &read->xfer; /* submitted before the read */
    hifc_engine_submit(engine, &write->xfer);
    for (unsigned i = 0; i < (1 << 20) / 16384; i++) {
        CHECK_EQ(device->log[i].op, HIFC_IO_READ);
    }
    drive(engine, read);
    CHECK(device->write_beside_read_max_bytes <= HIFC_WRITE_BESIDE_READS_BYTES);
    CHECK(device->write_beside_read_max_bytes > 0); /* not starved either */
    drive(engine, write);
    job_free(read);
    job_free(write);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

/* ---- callbacks ------------------------------------------------------------------------------- */

TEST(callbacks_may_submit_without_recursion)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 512);
    job->again = 200000;
    hifc_engine_submit(engine, &job->xfer);
    while (job->again) {
        CHECK(hifc_engine_poll(engine) <= 1);
    }
    hifc_engine_poll(engine);
    CHECK_EQ(job->ended, 200001);
    CHECK_EQ(batch_ends, 200001);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

static void poll_in_callback(struct hifc_xfer *xfer)
{
    struct job *job = xfer->owner;
    CHECK_EQ(hifc_engine_poll(job->engine), -EBUSY);
    job->ended++;
}

TEST(one_thread_polls_at_a_time)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 512);
    job->xfer.done = poll_in_callback;
    CHECK_EQ(run_job(job), 0);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(batch_end_once_a_round_and_ticks_from_polls)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 8);
    struct job *one = job_new(engine, device, HIFC_IO_READ, 0, 512);
    struct job *two = job_new(engine, device, HIFC_IO_WRITE, 512, 512);
    one->xfer.next = &two->xfer;
    hifc_engine_submit(engine, &one->xfer);
    CHECK_EQ(hifc_engine_poll(engine), 2);
    CHECK_EQ(batch_ends, 1);
    CHECK_EQ(hifc_engine_poll(engine), 0);
    CHECK_EQ(batch_ends, 1);
    /* One each 10 ms of polling; a busy machine makes them later, never earlier. */
    uint32_t before = ticks;
    uint64_t start = scripted_now_ns(), elapsed_ns = 0;
    while (ticks - before < 6 && elapsed_ns < CHECK_HANG_US * 1000u) {
        hifc_engine_poll(engine);
        elapsed_ns = scripted_now_ns() - start;
    }
    CHECK_EQ(ticks - before, 6);
    CHECK(elapsed_ns >= 50000000u);
    job_free(one);
    job_free(two);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(a_failed_command_ends_its_transfer_alone)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->fail_offset = 20000;
    device->per_poll = 1;
    struct hifc_engine *engine = engine_on(device, 4);
    struct job *bad = job_new(engine, device, HIFC_IO_READ, 0, 1 << 20);
    struct job *good = job_new(engine, device, HIFC_IO_READ, 2 << 20, 1 << 20);
    bad->xfer.next = &good->xfer;
    hifc_engine_submit(engine, &bad->xfer);
    drive(engine, bad);
    CHECK_EQ(bad->xfer.error, -EIO);
    CHECK_EQ(bad->xfer.sct, HIFC_SCT_MEDIA);
    CHECK_EQ(bad->xfer.sc, HIFC_SC_UNRECOVERED_READ);
    CHECK_EQ(bad->xfer.error_opcode, HIFC_IO_READ);
    CHECK_EQ(bad->xfer.error_offset_bytes, 16384);
    CHECK_EQ(bad->xfer.error_length_bytes, 16384);
    CHECK_EQ(bad->chunk_bytes, 16384); /* none after the failure */
    drive(engine, good);
    CHECK_EQ(good->xfer.error, 0);
    CHECK_EQ(good->chunk_bytes, 1 << 20);
    uint32_t commands_of_bad = device->log_count - (1 << 20) / 16384;
    CHECK(commands_of_bad <= 6); /* the other 58 chunks were dropped */
    struct hifc_engine_stats stats;
    hifc_engine_stats_get(engine, &stats);
    CHECK_EQ(stats.error_count, 1);
    CHECK_EQ(stats.read_commands, device->log_count);
    job_free(bad);
    job_free(good);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(failures_in_any_order_with_a_full_device_end_everything_once)
{
    unsigned seed = 3;
    for (unsigned round = 0; round < 200; round++) {
        struct scripted_device *device = scripted_create(1 << 20);
        device->shuffle_seed = round + 1;
        device->per_poll = 1 + round % 5;
        device->room = 1 + round % 7;
        device->fail_offset = (unsigned)rand_r(&seed) % (1 << 20);
        struct hifc_engine *engine = engine_on(device, 8);
        struct job *jobs[12];
        for (unsigned i = 0; i < 12; i++) {
            uint64_t length = 512 * (1 + (uint64_t)rand_r(&seed) % 300);
            uint64_t offset = 512 * ((uint64_t)rand_r(&seed) % ((1 << 20) / 512 - 300));
            jobs[i] = job_new(engine, device, rand_r(&seed) % 2 ? HIFC_IO_READ : HIFC_IO_WRITE,
                              offset, length);
            jobs[i]->xfer.chunk = NULL;
            hifc_engine_submit(engine, &jobs[i]->xfer);
        }
        for (unsigned i = 0; i < 12; i++) {
            const struct hifc_xfer *xfer = &jobs[i]->xfer;
            drive(engine, jobs[i]);
            bool covers = device->fail_offset >= xfer->offset_bytes &&
                          device->fail_offset - xfer->offset_bytes < xfer->length_bytes;
            CHECK_EQ(xfer->error, covers ? -EIO : 0);
            if (covers) {
                CHECK(device->fail_offset - xfer->error_offset_bytes < xfer->error_length_bytes);
            }
            job_free(jobs[i]);
        }
        hifc_engine_destroy(engine);
        scripted_free(device);
    }
}

TEST(destroy_ends_everything_once_with_canceled)
{
    for (unsigned variant = 0; variant < 3; variant++) {
        struct scripted_device *device = scripted_create(DEVICE_BYTES);
        device->frozen = true;
        device->room = variant == 1 ? 2 : 0;
        struct hifc_engine *engine = engine_on(device, 4);
        struct job *jobs[6];
        for (unsigned i = 0; i < 6; i++) {
            jobs[i] = job_new(engine, device, i % 2 ? HIFC_IO_WRITE : HIFC_IO_READ, 0, 256 << 10);
            jobs[i]->again = variant == 2 ? 3 : 0; /* submits from within destroy */
            hifc_engine_submit(engine, &jobs[i]->xfer);
        }
        hifc_engine_poll(engine);
        hifc_engine_destroy(engine);
        for (unsigned i = 0; i < 6; i++) {
            CHECK_EQ(jobs[i]->ended, variant == 2 ? 4 : 1);
            CHECK_EQ(jobs[i]->xfer.error, -ECANCELED);
            job_free(jobs[i]);
        }
        scripted_free(device);
    }
    hifc_engine_destroy(NULL);
}

TEST(a_lost_queue_pair_is_opened_again)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 4);
    for (unsigned round = 0; round < 3 * HIFC_QPAIR_REOPENS_MAX; round++) {
        struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 256 << 10);
        struct job *waiting = job_new(engine, device, HIFC_IO_READ, 0, 4096);
        job->xfer.next = &waiting->xfer;
        device->lose_polls = 1;
        CHECK_EQ(run_job(job), -EIO);
        drive(engine, waiting);
        CHECK_EQ(waiting->xfer.error, 0);
        job_free(job);
        job_free(waiting);
    }
    CHECK_EQ(device->opens, 2 + 3 * HIFC_QPAIR_REOPENS_MAX);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(losses_without_success_end_in_no_device)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = engine_on(device, 4);
    device->lose_polls = 1000;
    struct job *job = job_new(engine, device, HIFC_IO_READ, 0, 4096);
    int rc = 0;
    unsigned lost = 0;
    while (rc != -ENODEV) {
        job->ended = 0;
        rc = run_job(job);
        CHECK(rc == -ENODEV || rc == -EIO);
        CHECK(lost++ <= HIFC_QPAIR_REOPENS_MAX + 1);
    }
    CHECK_EQ(device->opens, 2 + HIFC_QPAIR_REOPENS_MAX);
    device->lose_polls = 0; /* the other queue pair lives on */
    struct job *write = job_new(engine, device, HIFC_IO_WRITE, 0, 4096);
    CHECK_EQ(run_job(write), 0);
    job_free(write);
    job_free(job);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(without_a_device_everything_ends_quickly_and_submit_calls_nobody_back)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->room = 2;
    struct hifc_engine *engine = engine_on(device, 4);
    struct job *first = job_new(engine, device, HIFC_IO_WRITE, 0, 1 << 20);
    struct job *queued = job_new(engine, device, HIFC_IO_FLUSH, 0, 0);
    first->xfer.next = &queued->xfer;
    hifc_engine_submit(engine, &first->xfer);
    device->open_rc = -ENXIO;
    device->lose_polls = 1;
    drive(engine, first);
    drive(engine, queued);
    CHECK_EQ(first->xfer.error, -EIO);
    CHECK_EQ(queued->xfer.error, -ENODEV);
    struct job *late = job_new(engine, device, HIFC_IO_WRITE, 0, 1 << 20);
    hifc_engine_submit(engine, &late->xfer);
    CHECK_EQ(late->ended, 0);
    hifc_engine_poll(engine);
    CHECK_EQ(late->ended, 1);
    CHECK_EQ(late->xfer.error, -ENODEV);
    job_free(first);
    job_free(queued);
    job_free(late);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(a_device_that_opens_no_queue_pair_is_an_error)
{
    struct scripted_device *device = scripted_create(1 << 20);
    struct hifc_engine *engine;
    struct hifc_engine_opts opts = {.queue_depth = 4};
    device->open_rc = -ENXIO;
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), -ENXIO);
    opts.queue_depth = 0;
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), -EINVAL);
    opts.queue_depth = HIFC_QUEUE_DEPTH_MAX + 1;
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), -EINVAL);
    scripted_free(device);
}

/* ---- several threads, inline ----------------------------------------------------------------- */

struct shared_engine {
    struct hifc_engine *engine;
    struct scripted_device *device;
};

struct flagged {
    struct hifc_xfer xfer;
    struct hifc_span span;
    _Atomic bool ended;
    _Alignas(512) uint8_t memory[2048];
};

static void flagged_done(struct hifc_xfer *xfer)
{
    atomic_store(&((struct flagged *)xfer)->ended, true);
}

static void *submit_and_poll(void *argument)
{
    struct shared_engine *shared = argument;
    struct flagged *flagged = aligned_alloc(512, sizeof *flagged);
    CHECK(flagged);
    memset(flagged, 0, sizeof *flagged);
    for (unsigned i = 0; i < 3000; i++) {
        flagged->span = (struct hifc_span){.base = flagged->memory, .bytes = 2048};
        flagged->xfer = (struct hifc_xfer){.spans = &flagged->span, .span_count = 1,
                                           .op = HIFC_IO_READ, .offset_bytes = i % 64 * 2048,
                                           .length_bytes = 2048, .done = flagged_done};
        atomic_store(&flagged->ended, false);
        hifc_engine_submit(shared->engine, &flagged->xfer);
        while (!atomic_load(&flagged->ended)) {
            hifc_engine_poll(shared->engine);
        }
        CHECK_EQ(flagged->xfer.error, 0);
        CHECK_EQ(memcmp(flagged->memory, shared->device->bytes + i % 64 * 2048, 2048), 0);
    }
    free(flagged);
    return NULL;
}

TEST(threads_share_an_inline_engine)
{
    struct shared_engine shared = {.device = scripted_create(1 << 20)};
    pthread_t threads[4];
    shared.device->room = 2;
    shared.engine = engine_on(shared.device, 4);
    for (unsigned i = 0; i < 4; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, submit_and_poll, &shared), 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    hifc_engine_destroy(shared.engine);
    scripted_free(shared.device);
}

/* ---- cost ------------------------------------------------------------------------------------ */

enum { NULL_DEPTH = 256 };

struct null_qpair {
    struct hifc_qpair base;
    uint32_t count;
    struct hifc_io *ios[NULL_DEPTH];
};

static int null_open(struct hifc_device *device, uint32_t depth, uint32_t timeout_ms,
                     struct hifc_qpair **out)
{
    struct null_qpair *qpair = calloc(1, sizeof *qpair);
    (void)timeout_ms;
    CHECK(qpair && depth <= NULL_DEPTH);
    qpair->base.device = device;
    *out = &qpair->base;
    return 0;
}

static void null_close(struct hifc_qpair *qpair)
{
    free(qpair);
}

static uint32_t null_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct null_qpair *qpair = (struct null_qpair *)base;
    for (uint32_t i = 0; i < count; i++) {
        qpair->ios[qpair->count++] = ios[i];
    }
    return count;
}

static int null_poll(struct hifc_qpair *base)
{
    struct null_qpair *qpair = (struct null_qpair *)base;
    uint32_t count = qpair->count;
    qpair->count = 0;
    for (uint32_t i = 0; i < count; i++) {
        qpair->ios[i]->done(qpair->ios[i]);
    }
    return (int)count;
}

static const struct hifc_device_ops null_ops = {.qpair_open = null_open, .qpair_close = null_close,
                                                .submit = null_submit, .poll = null_poll};
static uint64_t cost_ended;

static void cost_done(struct hifc_xfer *xfer)
{
    (void)xfer;
    cost_ended++;
}

static void print_cost(void)
{
    struct hifc_device device = {.ops = &null_ops, .geometry = {
        .size_bytes = 1ull << 30, .lba_bytes = 4096, .max_transfer_bytes = 131072, .max_iov = 34,
        .buffer_align_bytes = 4}};
    static _Alignas(4096) uint8_t memory[4096];
    static struct hifc_xfer xfers[128];
    struct hifc_span span = {.base = memory, .bytes = 4096};
    const uint32_t batches[] = {1, 8, 32, 128};
    for (unsigned b = 0; b < 4; b++) {
        struct hifc_engine *engine;
        struct hifc_engine_opts opts = {.queue_depth = 128, .batch_end = count_batch_end,
                                        .tick = count_tick, .tick_ms = 100};
        CHECK_EQ(hifc_engine_create(&device, &opts, &engine), 0);
        uint32_t batch = batches[b], repeats = 1000000 / batch;
        double best = 1e9;
        for (int round = 0; round < 5; round++) {
            uint64_t start = scripted_now_ns();
            for (uint32_t r = 0; r < repeats; r++) {
                for (uint32_t i = 0; i < batch; i++) {
                    xfers[i] = (struct hifc_xfer){.spans = &span, .span_count = 1,
                                                  .op = HIFC_IO_READ, .length_bytes = 4096,
                                                  .done = cost_done};
                    xfers[i].next = i + 1 < batch ? &xfers[i + 1] : NULL;
                }
                cost_ended = 0;
                hifc_engine_submit(engine, xfers);
                while (cost_ended < batch) {
                    hifc_engine_poll(engine);
                }
            }
            double ns = (double)(scripted_now_ns() - start) / (repeats * (double)batch);
            best = ns < best ? ns : best;
        }
        printf("batches of %u: %.0f ns a transfer of one command\n", batch, best);
        hifc_engine_destroy(engine);
    }
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "cost") == 0) {
        print_cost();
        return 0;
    }
    return check_main(argc, argv);
}
