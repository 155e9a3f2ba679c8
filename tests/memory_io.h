/* SPDX-License-Identifier: Apache-2.0
 *
 * memory_io.h - a struct hifc_blockio that is memory with a fault map beside it, for tests that
 * include sources of driver/namespace under their own names.
 *
 * Include it first, then the sources. What is written stays volatile until flush: `media` is what
 * a crash would leave if no unflushed write had landed, `memory` what a reader sees. A log of the
 * unflushed writes lets a test land any subset of them, sector by sector.
 */
#ifndef HIFC_MEMORY_IO_H
#define HIFC_MEMORY_IO_H

#define hifc_blockio_create memory_io_create_
#define hifc_blockio_destroy memory_io_destroy_
#define hifc_blockio_read memory_io_read
#define hifc_blockio_write memory_io_write
#define hifc_blockio_flush memory_io_flush
#define hifc_blockio_deallocate memory_io_deallocate
#define hifc_blockio_device memory_io_device
#define hifc_superblock_read tested_superblock_read
#define hifc_superblock_write tested_superblock_write
#define hifc_signature tested_signature
#define hifc_signatures tested_signatures
#define hifc_format_device tested_format_device
#define hifc_blockio_read_many memory_io_read_many
#define hifc_recover tested_recover
#define hifc_recover_damage tested_recover_damage
#define hifc_recover_unreadable tested_recover_unreadable
#define hifc_scan_source_init tested_scan_source_init
#define hifc_scan_source_free tested_scan_source_free
#define hifc_scan_walk tested_scan_walk
#define hifc_scan_accept tested_scan_accept
#define hifc_scan_free tested_scan_free
#define hifc_summary_load tested_summary_load
#define hifc_merge tested_merge

#include "engine/engine.h"
#include "util/error.h"
#include "check.h"

#define MEMORY_IO_LOG_MAX 65536u
#define MEMORY_IO_SECTOR_BYTES 512u

struct hifc_blockio {
    struct hifc_device device;
    uint8_t *memory;
    uint8_t *media;
    uint64_t bad_from, bad_bytes; /* reads of this range fail, */
    bool gone;                    /* as on a lost path rather than bad media */
    uint32_t cut;                 /* writes and flushes until power is lost; 0 = never */
    uint32_t operations;          /* writes and flushes so far */
    uint32_t reads;
    uint32_t log_count;
    struct {
        uint64_t offset;
        uint64_t size;
    } log[MEMORY_IO_LOG_MAX];
};

static inline struct hifc_blockio *memory_io_new(uint64_t size_bytes, uint32_t lba_bytes)
{
    struct hifc_blockio *io = calloc(1, sizeof *io);
    CHECK(io != NULL);
    io->memory = calloc(1, size_bytes);
    io->media = calloc(1, size_bytes);
    CHECK(io->memory && io->media);
    io->device.geometry.size_bytes = size_bytes;
    io->device.geometry.lba_bytes = lba_bytes;
    strcpy(io->device.uri, "memory://test");
    return io;
}

static inline void memory_io_free(struct hifc_blockio *io)
{
    free(io->memory);
    free(io->media);
    free(io);
}

struct hifc_device *hifc_blockio_device(struct hifc_blockio *io)
{
    return &io->device;
}

int hifc_blockio_read(struct hifc_blockio *io, uint64_t offset_bytes, void *memory,
                      uint64_t size_bytes)
{
    CHECK(offset_bytes % HIFC_PAGE_BYTES == 0 && size_bytes % HIFC_PAGE_BYTES == 0);
    CHECK(offset_bytes + size_bytes <= io->device.geometry.size_bytes && size_bytes > 0);
    io->reads++;
    if (offset_bytes < io->bad_from + io->bad_bytes && io->bad_from < offset_bytes + size_bytes) {
        return hifc_fail_command(-EIO, io->gone ? 3 : 2, io->gone ? 0x70 : 0x81, 2,
                                 io->bad_from / io->device.geometry.lba_bytes, 1,
                                 io->device.geometry.lba_bytes, io->device.uri);
    }
    memcpy(memory, io->memory + offset_bytes, size_bytes);
    return 0;
}

int hifc_blockio_read_many(struct hifc_blockio *io, const uint64_t *offsets_bytes, uint32_t count,
                           void *memory, uint32_t each_bytes)
{
    int rc = 0;
    for (uint32_t i = 0; i < count && rc == 0; i++) {
        rc = hifc_blockio_read(io, offsets_bytes[i], (uint8_t *)memory + (uint64_t)i * each_bytes,
                               each_bytes);
    }
    return rc;
}

static inline int memory_io_step(struct hifc_blockio *io)
{
    if (io->cut && io->operations + 1 >= io->cut) {
        return hifc_fail(-EIO, "memory://test: power was cut");
    }
    io->operations++;
    return 0;
}

int hifc_blockio_write(struct hifc_blockio *io, uint64_t offset_bytes, const void *memory,
                       uint64_t size_bytes)
{
    CHECK(offset_bytes % HIFC_PAGE_BYTES == 0 && size_bytes % HIFC_PAGE_BYTES == 0);
    CHECK(offset_bytes + size_bytes <= io->device.geometry.size_bytes && size_bytes > 0);
    int rc = memory_io_step(io);
    CHECK(io->log_count < MEMORY_IO_LOG_MAX);
    io->log[io->log_count].offset = offset_bytes; /* also of the write that the cut hits */
    io->log[io->log_count++].size = size_bytes;
    memcpy(io->memory + offset_bytes, memory, size_bytes);
    return rc;
}

int hifc_blockio_flush(struct hifc_blockio *io)
{
    int rc = memory_io_step(io);
    if (rc == 0) {
        for (uint32_t i = 0; i < io->log_count; i++) {
            memcpy(io->media + io->log[i].offset, io->memory + io->log[i].offset, io->log[i].size);
        }
        io->log_count = 0;
    }
    return rc;
}

int hifc_blockio_deallocate(struct hifc_blockio *io, uint64_t offset_bytes, uint64_t size_bytes)
{
    return hifc_fail(-ENOTSUP, "memory://test: deallocate of %" PRIu64 " at %" PRIu64 " (%d)",
                     size_bytes, offset_bytes, io->log_count);
}

/* Power comes back: of every unflushed sector, the new or the old content by a coin. */
static inline void memory_io_crash(struct hifc_blockio *io, uint64_t seed)
{
    for (uint32_t i = 0; i < io->log_count; i++) {
        for (uint64_t at = 0; at < io->log[i].size; at += MEMORY_IO_SECTOR_BYTES) {
            uint64_t place = io->log[i].offset + at;
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            if (seed >> 63) {
                memcpy(io->media + place, io->memory + place, MEMORY_IO_SECTOR_BYTES);
            }
        }
    }
    memcpy(io->memory, io->media, io->device.geometry.size_bytes);
    io->log_count = 0;
    io->cut = 0;
    io->operations = 0;
}

#endif
