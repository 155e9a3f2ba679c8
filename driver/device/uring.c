/* SPDX-License-Identifier: Apache-2.0
 *
 * uring.c - queue pairs of a file or block device through io_uring, one ring each.
 *
 * One thread at a time submits and polls; memory is registered by any thread (the device's mutex).
 * A submit call is one io_uring_enter, whatever its count; a poll that finds completions is none.
 *
 * Invariants:
 *   - every command taken is in exactly one place: a slot (the kernel has it) or the refused list;
 *   - a slot is freed, and io->done called, only after the kernel posted its completion (until then
 *     its memory may still be written to), or after the ring itself was lost or closed;
 *   - a transfer that came back short goes down again for the rest.
 *
 * A command older than the timeout is cancelled. What the kernel has already given to the drive it
 * will not take back; such a command completes whenever the drive answers.
 */
#define _GNU_SOURCE /* fallocate flags */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "device/command.h"
#include "device/file.h"
#include "device/uring.h"
#include "util/error.h"

#define URING_RETRIES_MAX 16u       /* of one command, on EAGAIN, EINTR and short transfers */
#define URING_REAP_MAX 64u          /* completions taken from the ring at once */
#define URING_DRAIN_EVERY 64u       /* empty polls between reads of the eventfd */
#define USER_DATA_CANCEL UINT64_MAX /* completions of cancel requests */

/* ---- submission ------------------------------------------------------------------------------ */
/* The buffer that [base, +size) lies in, or -1. */
static int find_region(struct hifc_uring *ring, uintptr_t base, uint64_t size_bytes)
{
    struct hifc_file_device *device = (struct hifc_file_device *)ring->base.device;
    uint64_t known = atomic_load_explicit(&ring->fixed_slots, memory_order_acquire);
    while (known) {
        int i = __builtin_ctzll(known);
        struct hifc_file_region *region = &device->regions[i];
        uint64_t region_bytes = atomic_load_explicit(&region->size_bytes, memory_order_acquire);
        uint64_t position = base - atomic_load_explicit(&region->base, memory_order_relaxed);
        if (position < region_bytes && size_bytes <= region_bytes - position) {
            return i;
        }
        known &= known - 1;
    }
    return -1;
}

static void prepare_transfer(struct hifc_uring *ring, struct io_uring_sqe *sqe, struct hifc_io *io,
                             const struct iovec *iov, uint32_t iov_count, uint64_t offset)
{
    int fd = ring->fixed_file ? 0 : ((struct hifc_file_device *)ring->base.device)->fd;
    bool read = io->op == HIFC_IO_READ;
    if (iov_count == 1) {
        void *base = iov->iov_base;
        unsigned length = (unsigned)iov->iov_len;
        int region = find_region(ring, (uintptr_t)base, length);
        if (region >= 0) {
            (read ? io_uring_prep_read_fixed(sqe, fd, base, length, offset, region)
                  : io_uring_prep_write_fixed(sqe, fd, base, length, offset, region));
        } else {
            (read ? io_uring_prep_read(sqe, fd, base, length, offset)
                  : io_uring_prep_write(sqe, fd, base, length, offset));
        }
    } else if (read) {
        io_uring_prep_readv(sqe, fd, iov, iov_count, offset);
    } else {
        io_uring_prep_writev(sqe, fd, iov, iov_count, offset);
    }
}

static void prepare(struct hifc_uring *ring, uint32_t index, struct io_uring_sqe *sqe)
{
    struct hifc_file_device *device = (struct hifc_file_device *)ring->base.device;
    struct hifc_uring_slot *slot = &ring->slots[index];
    struct hifc_io *io = slot->io;
    int fd = ring->fixed_file ? 0 : device->fd;
    if (io->op == HIFC_IO_FLUSH && device->read_only) {
        io_uring_prep_nop(sqe);
    } else if (io->op == HIFC_IO_FLUSH) {
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
    } else if (io->op == HIFC_IO_DEALLOCATE || io->op == HIFC_IO_ALLOCATE) {
        io_uring_prep_fallocate(sqe, fd,
                                FALLOC_FL_KEEP_SIZE |
                                    (io->op == HIFC_IO_DEALLOCATE ? FALLOC_FL_PUNCH_HOLE : 0),
                                (off_t)io->offset_bytes, (off_t)io->length_bytes);
    } else if (slot->done_bytes == 0) {
        prepare_transfer(ring, sqe, io, io->iov, io->iov_count, io->offset_bytes);
    } else {
        struct iovec *rest = ring->partial[index];
        uint32_t count = 0;
        uint64_t skip = slot->done_bytes;
        for (uint32_t i = 0; i < io->iov_count; i++) {
            if (skip >= io->iov[i].iov_len) {
                skip -= io->iov[i].iov_len;
                continue;
            }
            rest[count].iov_base = (uint8_t *)io->iov[i].iov_base + skip;
            rest[count++].iov_len = io->iov[i].iov_len - skip;
            skip = 0;
        }
        prepare_transfer(ring, sqe, io, rest, count, io->offset_bytes + slot->done_bytes);
    }
    if (ring->fixed_file && sqe->opcode != IORING_OP_NOP) {
        sqe->flags |= IOSQE_FIXED_FILE;
    }
    io_uring_sqe_set_data64(sqe, index);
}

static bool refuse(struct hifc_uring *ring, struct hifc_io *io)
{
    io->device_private[0] = (uintptr_t)ring->refused;
    ring->refused = io;
    ring->inflight++;
    return true;
}

/* Gives the kernel what stands in the submission ring. What it does not take now, for want of
 * memory, it gets at the next poll. */
static void enter(struct hifc_uring *ring)
{
    int rc = io_uring_submit(&ring->ring);
    ring->unsubmitted = io_uring_sq_ready(&ring->ring) > 0;
    if (rc < 0 && rc != -EAGAIN && rc != -EBUSY && rc != -EINTR) {
        ring->lost = rc;
    }
    if (ring->unsubmitted) {
        eventfd_write(ring->event_fd, 1); /* poll has work */
    }
}

static bool take(struct hifc_uring *ring, struct hifc_io *io, uint32_t start_ms)
{
    struct hifc_file_device *device = (struct hifc_file_device *)ring->base.device;
    if (ring->inflight == ring->depth) {
        return false;
    }
    if (ring->lost) {
        hifc_io_set(io, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH);
        return refuse(ring, io);
    }
    if (!hifc_io_check(&device->base.geometry, io, device->read_only)) {
        return refuse(ring, io);
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->ring);
    if (!sqe) {
        return false;
    }
    uint32_t index = ring->free_slot;
    struct hifc_uring_slot *slot = &ring->slots[index];
    ring->free_slot = slot->next_free;
    slot->io = io;
    slot->done_bytes = 0;
    slot->start_ms = start_ms;
    slot->retries = 0;
    slot->cancelled = false;
    prepare(ring, index, sqe);
    ring->inflight++;
    ring->unsubmitted = true;
    return true;
}

uint32_t hifc_uring_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct hifc_uring *ring = (struct hifc_uring *)base;
    uint32_t start_ms = hifc_uring_now_ms();
    uint32_t taken = 0;
    while (taken < count && take(ring, ios[taken], start_ms)) {
        taken++;
    }
    if (ring->unsubmitted) {
        enter(ring);
    }
    if (ring->refused) {
        eventfd_write(ring->event_fd, 1);
    }
    return taken;
}

/* ---- completion ------------------------------------------------------------------------------ */

static void finish(struct hifc_uring *ring, uint32_t index)
{
    struct hifc_uring_slot *slot = &ring->slots[index];
    struct hifc_io *io = slot->io;
    slot->io = NULL;
    slot->next_free = ring->free_slot;
    ring->free_slot = index;
    ring->inflight--;
    io->done(io);
}

/* False when the command could not go down again: no entry free, or tried too often. */
static bool again(struct hifc_uring *ring, uint32_t index)
{
    struct hifc_uring_slot *slot = &ring->slots[index];
    struct io_uring_sqe *sqe = NULL;
    if (!slot->cancelled && !ring->lost && slot->retries++ < URING_RETRIES_MAX) {
        sqe = io_uring_get_sqe(&ring->ring);
    }
    if (!sqe) {
        return false;
    }
    prepare(ring, index, sqe);
    ring->unsubmitted = true;
    return true;
}

/* Sets the command's outcome; true when it has one, false when it went down again. */
static bool settle(struct hifc_uring *ring, uint32_t index, int result)
{
    struct hifc_uring_slot *slot = &ring->slots[index];
    struct hifc_io *io = slot->io;
    bool transfer = io->op == HIFC_IO_READ || io->op == HIFC_IO_WRITE;
    if (result >= 0 && (!transfer || (uint32_t)result == io->length_bytes - slot->done_bytes)) {
        return true;
    }
    if (result >= 0) {
        uint32_t lba_mask = ring->base.device->geometry.lba_bytes - 1;
        uint32_t whole = (uint32_t)result & ~lba_mask;
        slot->done_bytes += whole;
        if (whole && again(ring, index)) {
            return false;
        }
        /* Nothing more is there: the file became shorter under us. */
        hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_LBA_OUT_OF_RANGE);
    } else if (slot->cancelled) {
        if (result == -ECANCELED || result == -EINTR || result == -EAGAIN) {
            hifc_io_set(io, -ETIMEDOUT, HIFC_SCT_GENERIC, HIFC_SC_ABORTED);
        } else {
            hifc_io_fail_errno(io, -result);
        }
    } else {
        /* ECANCELED though we did not ask: the thread that had submitted it ended. */
        bool passing = result == -EAGAIN || result == -EINTR || result == -ECANCELED;
        if (passing && again(ring, index)) {
            return false;
        }
        hifc_io_fail_errno(io, -result);
    }
    return true;
}

static int reap(struct hifc_uring *ring)
{
    struct io_uring_cqe *cqes[URING_REAP_MAX];
    uint64_t indexes[URING_REAP_MAX];
    int results[URING_REAP_MAX];
    int completed = 0;
    unsigned count = io_uring_peek_batch_cqe(&ring->ring, cqes, URING_REAP_MAX);
    for (unsigned i = 0; i < count; i++) {
        indexes[i] = cqes[i]->user_data;
        results[i] = cqes[i]->res;
    }
    /* Before the callbacks, which may submit and poll. */
    io_uring_cq_advance(&ring->ring, count);
    for (unsigned i = 0; i < count; i++) {
        if (indexes[i] < ring->depth && settle(ring, (uint32_t)indexes[i], results[i])) {
            finish(ring, (uint32_t)indexes[i]);
            completed++;
        }
    }
    return completed;
}

static int complete_refused(struct hifc_uring *ring)
{
    int completed = 0;
    struct hifc_io *io = ring->refused;
    ring->refused = NULL;
    while (io) {
        struct hifc_io *next = (struct hifc_io *)(uintptr_t)io->device_private[0];
        ring->inflight--;
        io->done(io);
        io = next;
        completed++;
    }
    return completed;
}

static void cancel(struct hifc_uring *ring, uint32_t index)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->ring);
    if (!sqe) {
        return; /* at the next check */
    }
    io_uring_prep_cancel64(sqe, index, 0);
    io_uring_sqe_set_data64(sqe, USER_DATA_CANCEL);
    ring->slots[index].cancelled = true;
    ring->unsubmitted = true;
}

static void check_timeouts(struct hifc_uring *ring)
{
    if (!ring->timeout_ms || !ring->inflight) {
        return;
    }
    uint32_t now = hifc_uring_now_ms();
    if (now - ring->last_check_ms < ring->timeout_ms / 8) {
        return;
    }
    ring->last_check_ms = now;
    for (uint32_t i = 0; i < ring->depth; i++) {
        struct hifc_uring_slot *slot = &ring->slots[i];
        if (slot->io && !slot->cancelled && now - slot->start_ms > ring->timeout_ms) {
            cancel(ring, i);
        }
    }
}

int hifc_uring_complete_all(struct hifc_uring *ring, int error, uint8_t sct, uint8_t sc)
{
    int completed = complete_refused(ring);
    for (uint32_t i = 0; i < ring->depth; i++) {
        if (ring->slots[i].io) {
            hifc_io_set(ring->slots[i].io, error, sct, sc);
            finish(ring, i);
            completed++;
        }
    }
    return completed;
}

/* Nothing was found: the quiet moment for what need not be done at every poll. The eventfd is
 * emptied before the ring is looked at again, or a completion in between would be slept over. */
static int idle(struct hifc_uring *ring)
{
    int completed = 0;
    if (ring->empty_polls++ % URING_DRAIN_EVERY == 0) {
        eventfd_t ignored;
        if (eventfd_read(ring->event_fd, &ignored) == 0) {
            completed = reap(ring);
        }
    }
    return completed;
}

int hifc_uring_poll(struct hifc_qpair *base)
{
    struct hifc_uring *ring = (struct hifc_uring *)base;
    int completed = ring->refused ? complete_refused(ring) : 0;
    if (ring->lost) {
        hifc_uring_complete_all(ring, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH);
        return ring->lost;
    }
    completed += reap(ring);
    if (completed) {
        ring->empty_polls = 0;
    } else {
        completed = idle(ring);
    }
    check_timeouts(ring);
    if (ring->unsubmitted && !ring->lost) {
        enter(ring);
    }
    return completed;
}
