/* SPDX-License-Identifier: Apache-2.0
 *
 * command.h - what every device asks of a command before it takes it, and the NVMe status of a
 * refusal, so that all devices refuse the same things in the same words.
 */
#ifndef HIFC_DEVICE_COMMAND_H
#define HIFC_DEVICE_COMMAND_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

enum {
    HIFC_SCT_GENERIC = 0,
    HIFC_SC_INVALID_FIELD = 0x02,
    HIFC_SC_DATA_TRANSFER = 0x04,
    HIFC_SC_INTERNAL = 0x06,
    HIFC_SC_ABORTED = 0x07,
    HIFC_SC_ABORTED_SQ_DELETION = 0x08,
    HIFC_SC_LBA_OUT_OF_RANGE = 0x80,
    HIFC_SC_CAPACITY = 0x81,
    HIFC_SCT_COMMAND = 1,
    HIFC_SC_READ_ONLY_RANGE = 0x82,
    HIFC_SCT_MEDIA = 2,
    HIFC_SC_WRITE_FAULT = 0x80,
    HIFC_SC_UNRECOVERED_READ = 0x81,
    HIFC_SC_GUARD_CHECK = 0x82,
    HIFC_SCT_PATH = 3,
    HIFC_SC_INTERNAL_PATH = 0x00,
    HIFC_SC_HOST_PATH = 0x70,
};

static inline void hifc_io_set(struct hifc_io *io, int error, uint8_t sct, uint8_t sc)
{
    io->error = error;
    io->sct = sct;
    io->sc = sc;
}

static inline bool hifc_io_refuse(struct hifc_io *io, int error, uint8_t sct, uint8_t sc)
{
    hifc_io_set(io, error, sct, sc);
    return false;
}

/* Whether the command makes sense on this geometry; if not, its error and status are set and the
 * device completes it with them. lba_bytes and buffer_align_bytes are powers of two. */
static inline bool hifc_io_check(const struct hifc_geometry *geometry, struct hifc_io *io,
                                 bool read_only)
{
    hifc_io_set(io, 0, 0, 0);
    if (io->op > HIFC_IO_ALLOCATE) {
        return hifc_io_refuse(io, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    if (read_only && io->op != HIFC_IO_READ) {
        /* A flush of a device that nothing was written to has nothing to do. */
        return io->op == HIFC_IO_FLUSH ||
               hifc_io_refuse(io, -EROFS, HIFC_SCT_COMMAND, HIFC_SC_READ_ONLY_RANGE);
    }
    if (io->op == HIFC_IO_FLUSH) {
        return true;
    }
    if ((io->offset_bytes | io->length_bytes) & (geometry->lba_bytes - 1) || !io->length_bytes) {
        return hifc_io_refuse(io, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    if (io->offset_bytes > geometry->size_bytes ||
        io->length_bytes > geometry->size_bytes - io->offset_bytes) {
        return hifc_io_refuse(io, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_LBA_OUT_OF_RANGE);
    }
    if (io->op == HIFC_IO_DEALLOCATE) {
        return geometry->deallocate ||
               hifc_io_refuse(io, -ENOTSUP, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    if (io->op == HIFC_IO_ALLOCATE) {
        return geometry->thin ||
               hifc_io_refuse(io, -ENOTSUP, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    if (io->length_bytes > geometry->max_transfer_bytes || io->iov_count > geometry->max_iov) {
        return hifc_io_refuse(io, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    uint64_t sum = 0;
    uintptr_t bits = 0;
    for (uint32_t i = 0; i < io->iov_count; i++) {
        sum += io->iov[i].iov_len;
        bits |= (uintptr_t)io->iov[i].iov_base | io->iov[i].iov_len;
    }
    if (sum != io->length_bytes || bits & (geometry->buffer_align_bytes - 1)) {
        return hifc_io_refuse(io, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    return true;
}

/* Sets error and status of a command that the kernel answered with a positive errno. */
void hifc_io_fail_errno(struct hifc_io *io, int positive_errno);

#endif
