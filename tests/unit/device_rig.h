/* SPDX-License-Identifier: Apache-2.0
 *
 * device_rig.h - an open device with one queue pair, and commands that wait, for the tests of
 * devices. Patterns tell generation and place, so that a block in the wrong place is seen.
 */
#ifndef HIFC_DEVICE_RIG_H
#define HIFC_DEVICE_RIG_H

#include <poll.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "device/device.h"
#include "error.h"

#define RIG_TIMEOUT_MS 10000u

struct rig {
    struct hifc_device *device;
    struct hifc_qpair *qpair;
    uint32_t lba;
};

static _Atomic uint32_t rig_completed;

static inline void rig_done(struct hifc_io *io)
{
    io->owner = io;
    rig_completed++;
}

static inline double rig_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static inline struct rig rig_open(const char *uri, unsigned flags, uint32_t depth)
{
    struct rig rig;
    CHECK_EQ(hifc_device_open(uri, flags, &rig.device), 0);
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, depth, RIG_TIMEOUT_MS, &rig.qpair), 0);
    rig.lba = rig.device->geometry.lba_bytes;
    return rig;
}

static inline void rig_close(struct rig *rig)
{
    rig->device->ops->qpair_close(rig->qpair);
    hifc_device_close(rig->device);
}

static inline int rig_poll(struct rig *rig)
{
    return rig->device->ops->poll(rig->qpair);
}

static inline void rig_wait(struct rig *rig, struct hifc_io *io)
{
    double end = rig_now() + 30;
    while (!io->owner) {
        CHECK(rig_poll(rig) >= 0);
        CHECK(rig_now() < end);
    }
}

/* Submits one and waits; its error. */
static inline int rig_run(struct rig *rig, struct hifc_io *io)
{
    io->done = rig_done;
    io->owner = NULL;
    io->error = 12345;
    CHECK_EQ(rig->device->ops->submit(rig->qpair, &io, 1), 1);
    CHECK(!io->owner);
    rig_wait(rig, io);
    return io->error;
}

static inline struct hifc_io rig_io(uint8_t op, uint64_t offset, void *memory, uint32_t length)
{
    struct hifc_io io = {.op = op, .offset_bytes = offset, .length_bytes = length,
                         .done = rig_done, .iov_count = memory ? 1 : 0,
                         .iov = {{memory, memory ? length : 0}}};
    return io;
}

static inline int rig_read(struct rig *rig, uint64_t offset, void *memory, uint32_t length)
{
    struct hifc_io io = rig_io(HIFC_IO_READ, offset, memory, length);
    return rig_run(rig, &io);
}

static inline int rig_write(struct rig *rig, uint64_t offset, void *memory, uint32_t length)
{
    struct hifc_io io = rig_io(HIFC_IO_WRITE, offset, memory, length);
    return rig_run(rig, &io);
}

static inline int rig_flush(struct rig *rig)
{
    struct hifc_io io = rig_io(HIFC_IO_FLUSH, 0, NULL, 0);
    return rig_run(rig, &io);
}

static inline int rig_deallocate(struct rig *rig, uint64_t offset, uint32_t length)
{
    struct hifc_io io = rig_io(HIFC_IO_DEALLOCATE, offset, NULL, length);
    return rig_run(rig, &io);
}

static inline void *rig_memory(size_t size)
{
    void *memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    CHECK(memory != NULL);
    memset(memory, 0xee, size);
    return memory;
}

/* Bytes that depend on a version and on their place on the device. */
static inline void rig_fill(uint8_t *memory, uint64_t offset, size_t length, uint64_t version)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = (offset + i) * 0x9e3779b97f4a7c15ull + version * 0x100000001b3ull;
        memcpy(memory + i, &word, 8);
    }
}

static inline bool rig_holds(const uint8_t *memory, uint64_t offset, size_t length,
                             uint64_t version)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = (offset + i) * 0x9e3779b97f4a7c15ull + version * 0x100000001b3ull;
        if (memcmp(memory + i, &word, 8) != 0) {
            return false;
        }
    }
    return true;
}

#endif
