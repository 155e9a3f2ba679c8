/* SPDX-License-Identifier: Apache-2.0
 *
 * device_rig.h - an open device with one queue pair, and commands that wait, for the tests of
 * devices. Patterns tell generation and place, so that a block in the wrong place is seen.
 */
#ifndef HIFC_DEVICE_RIG_H
#define HIFC_DEVICE_RIG_H

#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "device/device.h"
#include "util/error.h"

#define RIG_TIMEOUT_MS (CHECK_HANG_S * 1000u)

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

/* Huge pages for devices that want registered memory; rig_memory takes from here once it is set up,
 * and is empty again when all of it was freed. */
#define RIG_ARENA_BYTES (32ull << 20)

static struct {
    uint8_t *base;
    _Atomic size_t used, live;
} rig_arena;

static inline void rig_arena_open(void)
{
    void *base = mmap(NULL, RIG_ARENA_BYTES, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    CHECK(base != MAP_FAILED);
    rig_arena.base = base;
}

static inline struct rig rig_open(const char *uri, unsigned flags, uint32_t depth)
{
    struct rig rig;
    CHECK_EQ(hifc_device_open(uri, flags, &rig.device), 0);
    CHECK_EQ(hifc_device_keep(rig.device), 0);
    if (rig.device->geometry.registered_only) {
        CHECK_EQ(rig.device->ops->register_memory(rig.device, rig_arena.base, RIG_ARENA_BYTES), 0);
    }
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, depth, RIG_TIMEOUT_MS, &rig.qpair), 0);
    rig.lba = rig.device->geometry.lba_bytes;
    return rig;
}

static inline void rig_close_device(struct rig *rig)
{
    if (rig->device->geometry.registered_only) {
        CHECK_EQ(rig->device->ops->unregister_memory(rig->device, rig_arena.base,
                                                     RIG_ARENA_BYTES), 0);
    }
    hifc_device_close(rig->device);
}

static inline void rig_close(struct rig *rig)
{
    rig->device->ops->qpair_close(rig->qpair);
    rig_close_device(rig);
}

static inline int rig_poll(struct rig *rig)
{
    return rig->device->ops->poll(rig->qpair);
}

static inline void rig_wait(struct rig *rig, struct hifc_io *io)
{
    double end = rig_now() + CHECK_HANG_S;
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
    void *memory;
    size = (size + 4095) / 4096 * 4096;
    if (rig_arena.base) {
        atomic_fetch_add(&rig_arena.live, 1);
        size_t at = atomic_fetch_add(&rig_arena.used, size);
        CHECK(at + size <= RIG_ARENA_BYTES);
        memory = rig_arena.base + at;
    } else {
        memory = aligned_alloc(4096, size);
    }
    CHECK(memory != NULL);
    memset(memory, 0xee, size);
    return memory;
}

static inline void rig_free(void *memory)
{
    if (!rig_arena.base) {
        free(memory);
    } else if (atomic_fetch_sub(&rig_arena.live, 1) == 1) {
        atomic_store(&rig_arena.used, 0);
    }
}

/* The least that a device moves. */
static inline uint32_t rig_unit(const struct rig *rig)
{
    uint32_t align = rig->device->geometry.buffer_align_bytes;
    return rig->lba > align ? rig->lba : align;
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
