/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocking I/O, inline and by the reactor: any memory, any size, errors with their place, and an
 * end also where a device breaks its word.
 */
#include <pthread.h>

#include "engine/internal.h"
#include "scripted_device.h"

enum { PAGE = 4096, DEVICE_BYTES = 8 << 20 };

struct rig {
    struct scripted_device *device;
    struct hifc_engine *engine;
    struct hifc_blockio *io;
};

static struct rig rig_on(struct scripted_device *device, bool reactor, uint32_t timeout_ms)
{
    struct rig rig = {.device = device};
    struct hifc_engine_opts opts = {.reactor = reactor, .queue_depth = 32, .spin_us = 20,
                                    .command_timeout_ms = timeout_ms};
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &rig.engine), 0);
    CHECK_EQ(hifc_blockio_create(&device->base, rig.engine, &rig.io), 0);
    CHECK(hifc_blockio_device(rig.io) == &device->base);
    return rig;
}

static void rig_off(struct rig *rig)
{
    hifc_blockio_destroy(rig->io);
    hifc_engine_destroy(rig->engine);
}

static void move_about(struct rig *rig)
{
    static uint8_t model[DEVICE_BYTES];
    static _Alignas(PAGE) uint8_t memory[(3 << 20) + 2 * PAGE];
    unsigned seed = 5;
    memcpy(model, rig->device->bytes, DEVICE_BYTES);
    for (unsigned step = 0; step < 60; step++) {
        uint64_t size = PAGE * (1 + (uint64_t)rand_r(&seed) % (step % 4 ? 20 : 768));
        uint64_t offset = PAGE * ((uint64_t)rand_r(&seed) % ((DEVICE_BYTES - size) / PAGE + 1));
        uint8_t *at = memory + (step % 2 ? (unsigned)rand_r(&seed) % PAGE : 0);
        uint8_t after = at[size];
        if (step % 3) {
            memset(at, 0, size);
            CHECK_EQ(hifc_blockio_read(rig->io, offset, at, size), 0);
        } else {
            for (uint64_t i = 0; i < size; i++) {
                at[i] = model[offset + i] = (uint8_t)(step + i * 7);
            }
            CHECK_EQ(hifc_blockio_write(rig->io, offset, at, size), 0);
        }
        CHECK_EQ(memcmp(at, model + offset, size), 0);
        CHECK_EQ(at[size], after);
    }
    CHECK_EQ(memcmp(rig->device->bytes, model, DEVICE_BYTES), 0);
    enum { PIECES = 100 };
    for (unsigned pages = 1; pages <= 3; pages++) {
        uint64_t offsets[PIECES], bytes = pages * PAGE;
        for (unsigned i = 0; i < PIECES; i++) {
            offsets[i] = PAGE * ((uint64_t)rand_r(&seed) % (DEVICE_BYTES / PAGE - pages + 1));
        }
        CHECK_EQ(hifc_blockio_read_many(rig->io, offsets, PIECES, memory, (uint32_t)bytes), 0);
        for (unsigned i = 0; i < PIECES; i++) {
            CHECK_EQ(memcmp(memory + i * bytes, model + offsets[i], bytes), 0);
        }
        offsets[7]++;
        int odd = hifc_blockio_read_many(rig->io, offsets, PIECES, memory, (uint32_t)bytes);
        CHECK_EQ(odd, -EINVAL);
        CHECK_EQ(hifc_blockio_read_many(rig->io, offsets, 0, memory, (uint32_t)bytes), 0);
    }
    CHECK_EQ(hifc_blockio_flush(rig->io), 0);
    CHECK_EQ(hifc_blockio_deallocate(rig->io, PAGE, 1 << 20), 0);
    CHECK_EQ(hifc_blockio_read(rig->io, 0, memory, 0), 0);
    CHECK_EQ(hifc_blockio_read(rig->io, 512, memory, PAGE), -EINVAL);
    CHECK_EQ(hifc_blockio_write(rig->io, 0, memory, 100), -EINVAL);
}

TEST(any_memory_in_both_driving_modes)
{
    for (unsigned reactor = 0; reactor < 2; reactor++) {
        struct scripted_device *device = scripted_create(DEVICE_BYTES);
        device->shuffle_seed = 9;
        device->per_poll = 5;
        struct rig rig = rig_on(device, reactor, CHECK_HANG_S * 1000);
        move_about(&rig);
        rig_off(&rig);
        scripted_free(device);
    }
}

TEST(a_large_read_keeps_a_bounded_number_of_pieces_in_flight)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->base.geometry.max_transfer_bytes = 1 << 20;
    struct rig rig = rig_on(device, false, CHECK_HANG_S * 1000);
    uint8_t *memory = aligned_alloc(PAGE, DEVICE_BYTES);
    CHECK(memory);
    CHECK_EQ(hifc_blockio_read(rig.io, 0, memory, DEVICE_BYTES), 0);
    CHECK_EQ(memcmp(memory, device->bytes, DEVICE_BYTES), 0);
    CHECK(device->inflight_max >= 4 && device->inflight_max <= 8);
    free(memory);
    rig_off(&rig);
    scripted_free(device);
}

TEST(over_the_real_devices)
{
    char uri[2][128] = {"ram://?size=8MiB"};
    const char *folder = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    snprintf(uri[1], sizeof uri[1], "file://%s/hifc-blockio-%d?size=8MiB", folder, (int)getpid());
    uint8_t *memory = aligned_alloc(PAGE, 2 * DEVICE_BYTES);
    CHECK(memory);
    for (unsigned variant = 0; variant < 4; variant++) {
        struct hifc_device *device;
        struct hifc_engine *engine;
        struct hifc_blockio *io;
        struct hifc_engine_opts opts = {.reactor = variant % 2, .queue_depth = 64, .spin_us = 50,
                                        .command_timeout_ms = CHECK_HANG_S * 1000};
        CHECK_EQ(hifc_device_open(uri[variant / 2], HIFC_DEVICE_CREATE, &device), 0);
        CHECK_EQ(hifc_device_keep(device), 0);
        CHECK_EQ(hifc_engine_create(device, &opts, &engine), 0);
        CHECK_EQ(hifc_blockio_create(device, engine, &io), 0);
        for (uint64_t i = 0; i < DEVICE_BYTES; i++) {
            memory[i] = (uint8_t)(i * 2654435761u >> (13 + variant));
        }
        uint64_t start_ns = scripted_now_ns();
        CHECK_EQ(hifc_blockio_write(io, 0, memory, DEVICE_BYTES), 0);
        CHECK_EQ(hifc_blockio_flush(io), 0);
        CHECK_EQ(hifc_blockio_read(io, 0, memory + DEVICE_BYTES, DEVICE_BYTES), 0);
        printf("%s, %s: %.0f ms\n", device->uri, variant % 2 ? "reactor" : "inline",
               (double)(scripted_now_ns() - start_ns) * 1e-6);
        CHECK_EQ(memcmp(memory, memory + DEVICE_BYTES, DEVICE_BYTES), 0);
        hifc_blockio_destroy(io);
        hifc_engine_destroy(engine);
        hifc_device_close(device);
    }
    free(memory);
    *strchr(uri[1], '?') = 0;
    CHECK_EQ(unlink(uri[1] + strlen("file://")), 0);
}

static int accept_memory(struct hifc_device *device, void *base, uint64_t size_bytes)
{
    (void)device, (void)base, (void)size_bytes;
    return 0;
}

TEST(registered_memory_is_used_where_the_device_wants_it)
{
    static struct hifc_device_ops ops;
    ops = scripted_ops;
    ops.register_memory = accept_memory;
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->base.ops = &ops;
    device->base.geometry.registered_only = true;
    struct hifc_engine *engine;
    struct hifc_blockio *io;
    struct hifc_engine_opts opts = {.queue_depth = 8};
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), 0);
    if (hifc_blockio_create(&device->base, engine, &io) == -ENOMEM) {
        printf("skipped: no huge page is free\n");
    } else {
        struct rig rig = {device, engine, io};
        move_about(&rig);
        hifc_blockio_destroy(io);
    }
    hifc_engine_destroy(engine);
    scripted_free(device);
}

TEST(an_error_names_command_and_place)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    static uint8_t memory[4 << 20];
    struct hifc_error error;
    device->fail_offset = (1 << 20) + 5 * PAGE;
    for (unsigned reactor = 0; reactor < 2; reactor++) {
        struct rig rig = rig_on(device, reactor, CHECK_HANG_S * 1000);
        CHECK_EQ(hifc_blockio_read(rig.io, 0, memory, 4 << 20), -EIO);
        CHECK_EQ(hifc_last_error(&error), -EIO);
        CHECK_EQ(error.sct, HIFC_SCT_MEDIA);
        CHECK_EQ(error.sc, HIFC_SC_UNRECOVERED_READ);
        CHECK_EQ(error.opcode, 0x02);
        CHECK_EQ(error.lba, ((1 << 20) + 4 * PAGE) / 512);
        CHECK_EQ(error.nlb, 16384 / 512);
        CHECK_EQ(hifc_blockio_write(rig.io, 1 << 20, memory, 1 << 20), -EIO);
        CHECK_EQ(hifc_last_error(&error), -EIO);
        CHECK_EQ(error.opcode, 0x01);
        CHECK_EQ(hifc_blockio_read(rig.io, 2 << 20, memory, 1 << 20), 0); /* and goes on */
        rig_off(&rig);
    }
    scripted_free(device);
}

TEST(a_command_that_never_comes_back_is_an_error)
{
    for (unsigned reactor = 0; reactor < 2; reactor++) {
        struct scripted_device *device = scripted_create(DEVICE_BYTES);
        static uint8_t memory[2][1 << 20];
        static struct hifc_blockio *leaked[2]; /* on purpose: the device might still write to it */
        device->frozen = true;
        struct rig rig = rig_on(device, reactor, 1);
        leaked[reactor] = rig.io;
        CHECK_EQ(hifc_blockio_read(rig.io, 0, memory[reactor], 1 << 20), -ETIMEDOUT);
        CHECK_EQ(hifc_blockio_read(rig.io, 0, memory[reactor], PAGE), -EIO);
        rig_off(&rig);
        CHECK(leaked[reactor]);
        scripted_free(device);
    }
}

struct user {
    struct rig *rig;
    uint64_t offset_bytes;
};

static void *read_often(void *argument)
{
    struct user *user = argument;
    uint8_t *memory = malloc(64 << 10);
    CHECK(memory);
    for (unsigned i = 0; i < 100; i++) {
        CHECK_EQ(hifc_blockio_read(user->rig->io, user->offset_bytes, memory, 64 << 10), 0);
        CHECK_EQ(memcmp(memory, user->rig->device->bytes + user->offset_bytes, 64 << 10), 0);
    }
    free(memory);
    return NULL;
}

TEST(threads_take_turns)
{
    for (unsigned reactor = 0; reactor < 2; reactor++) {
        struct scripted_device *device = scripted_create(DEVICE_BYTES);
        struct rig rig = rig_on(device, reactor, CHECK_HANG_S * 1000);
        struct user users[3];
        pthread_t threads[3];
        for (unsigned i = 0; i < 3; i++) {
            users[i] = (struct user){&rig, i << 20};
            CHECK_EQ(pthread_create(&threads[i], NULL, read_often, &users[i]), 0);
        }
        for (unsigned i = 0; i < 3; i++) {
            pthread_join(threads[i], NULL);
        }
        rig_off(&rig);
        scripted_free(device);
    }
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
