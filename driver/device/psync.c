/* SPDX-License-Identifier: Apache-2.0
 *
 * psync.c - queue pairs that carry a command out by preadv and pwritev when they are polled.
 *
 * For tmpfs, where every read and write is a copy by the CPU anyway, and for hosts that forbid
 * io_uring (file://...?io=sync). One thread at a time; a command blocks the thread that polls, and
 * poll stops after PSYNC_POLL_BYTES.
 */
#define _GNU_SOURCE /* fallocate */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "device/command.h"
#include "device/file.h"
#include "util/error.h"

#define PSYNC_POLL_BYTES (2u << 20)
#define PSYNC_DEPTH_MAX 65536u
#define PSYNC_RETRIES_MAX 16u

struct psync {
    struct hifc_qpair base;
    int fd;
    bool read_only;
    uint32_t depth;
    uint32_t mask;
    uint32_t head, tail; /* of the ring; free-running */
    struct hifc_io *ring[];
};

int hifc_psync_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                    struct hifc_qpair **out)
{
    (void)command_timeout_ms; /* a blocking call cannot be taken back */
    struct hifc_file_device *device = (struct hifc_file_device *)base;
    if (depth == 0 || depth > PSYNC_DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%.200s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         PSYNC_DEPTH_MAX);
    }
    uint32_t slots = 1;
    while (slots < depth) {
        slots *= 2;
    }
    struct psync *qpair = calloc(1, sizeof(*qpair) + slots * sizeof(qpair->ring[0]));
    if (!qpair) {
        return hifc_fail(-ENOMEM, "%.200s: out of memory for a queue pair", base->uri);
    }
    qpair->base.device = base;
    qpair->fd = device->fd;
    qpair->read_only = device->read_only;
    qpair->depth = depth;
    qpair->mask = slots - 1;
    *out = &qpair->base;
    return 0;
}

uint32_t hifc_psync_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct psync *qpair = (struct psync *)base;
    uint32_t room = qpair->depth - (qpair->tail - qpair->head);
    uint32_t taken = count < room ? count : room;
    for (uint32_t i = 0; i < taken; i++) {
        hifc_io_check(&base->device->geometry, ios[i], qpair->read_only);
        qpair->ring[qpair->tail++ & qpair->mask] = ios[i];
    }
    return taken;
}

static ssize_t move_some(int fd, const struct hifc_io *io, uint64_t done)
{
    struct iovec rest[HIFC_IO_IOV_MAX];
    uint32_t count = 0;
    uint64_t skip = done;
    for (uint32_t i = 0; i < io->iov_count; i++) {
        if (skip >= io->iov[i].iov_len) {
            skip -= io->iov[i].iov_len;
            continue;
        }
        rest[count].iov_base = (uint8_t *)io->iov[i].iov_base + skip;
        rest[count++].iov_len = io->iov[i].iov_len - skip;
        skip = 0;
    }
    off_t at = (off_t)(io->offset_bytes + done);
    return io->op == HIFC_IO_READ ? preadv(fd, rest, (int)count, at)
                                  : pwritev(fd, rest, (int)count, at);
}

static void move(int fd, struct hifc_io *io)
{
    uint32_t retries = 0;
    for (uint64_t done = 0; done < io->length_bytes;) {
        ssize_t moved = move_some(fd, io, done);
        if (moved > 0) {
            done += (uint64_t)moved;
        } else if (moved == 0) {
            hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_LBA_OUT_OF_RANGE);
            return;
        } else if ((errno != EINTR && errno != EAGAIN) || ++retries > PSYNC_RETRIES_MAX) {
            hifc_io_fail_errno(io, errno);
            return;
        }
    }
}

static void carry_out(struct psync *qpair, struct hifc_io *io)
{
    int rc = 0;
    switch (io->op) {
    case HIFC_IO_READ:
    case HIFC_IO_WRITE:
        move(qpair->fd, io);
        return;
    case HIFC_IO_FLUSH:
        rc = qpair->read_only ? 0 : fdatasync(qpair->fd);
        break;
    default:
        rc = fallocate(qpair->fd,
                       FALLOC_FL_KEEP_SIZE |
                           (io->op == HIFC_IO_DEALLOCATE ? FALLOC_FL_PUNCH_HOLE : 0),
                       (off_t)io->offset_bytes, (off_t)io->length_bytes);
        break;
    }
    if (rc != 0) {
        hifc_io_fail_errno(io, errno);
    }
}

int hifc_psync_poll(struct hifc_qpair *base)
{
    struct psync *qpair = (struct psync *)base;
    uint32_t end = qpair->tail; /* completions may submit more: those wait for the next poll */
    uint64_t moved = 0;
    int completed = 0;
    while (qpair->head != end && moved < PSYNC_POLL_BYTES) {
        struct hifc_io *io = qpair->ring[qpair->head++ & qpair->mask];
        if (!io->error) {
            carry_out(qpair, io);
            moved += io->op <= HIFC_IO_WRITE ? io->length_bytes : 0;
        }
        io->done(io);
        completed++;
    }
    return completed;
}

void hifc_psync_close(struct hifc_qpair *base)
{
    struct psync *qpair = (struct psync *)base;
    while (qpair->head != qpair->tail) {
        struct hifc_io *io = qpair->ring[qpair->head++ & qpair->mask];
        if (!io->error) {
            hifc_io_set(io, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
        }
        io->done(io);
    }
    free(qpair);
}

int hifc_psync_event_fd(struct hifc_qpair *qpair)
{
    (void)qpair;
    return -1;
}
