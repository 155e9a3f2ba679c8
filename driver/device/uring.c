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
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "device/command.h"
#include "device/file.h"
#include "error.h"

#define URING_DEPTH_MAX 4096u
#define URING_RETRIES_MAX 16u       /* of one command, on EAGAIN, EINTR and short transfers */
#define URING_REAP_MAX 64u          /* completions taken from the ring at once */
#define URING_DRAIN_EVERY 64u       /* empty polls between reads of the eventfd */
#define URING_CLOSE_EXTRA_MS 5000u  /* close waits this much longer than the command timeout */
#define USER_DATA_CANCEL UINT64_MAX /* completions of cancel requests */

struct slot {
    struct hifc_io *io; /* NULL: free */
    uint32_t next_free;
    uint32_t done_bytes;
    uint32_t start_ms;
    uint8_t retries;
    bool cancelled;
};

struct hifc_uring {
    struct hifc_qpair base;
    struct hifc_uring *next; /* of the device's rings */
    struct io_uring ring;
    int event_fd;
    int lost;                /* negative errno: the ring does not work any more */
    uint32_t depth;
    uint32_t inflight;       /* slots in use and refused commands */
    uint32_t free_slot;      /* depth: none */
    uint32_t empty_polls;
    uint32_t timeout_ms;
    uint32_t last_check_ms;
    bool unsubmitted;        /* the submission ring holds entries that the kernel has not seen */
    bool fixed_file;
    _Atomic uint64_t fixed_slots; /* regions that this ring knows */
    struct hifc_io *refused;      /* linked through device_private[0] */
    struct iovec (*partial)[HIFC_IO_IOV_MAX]; /* by slot: what is left of a short transfer */
    struct slot slots[];
};

static uint32_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000);
}

/* ---- registered memory ----------------------------------------------------------------------- */

/* The caller holds the device's mutex. A ring that the kernel refuses to pin memory for (an old
 * kernel, RLIMIT_MEMLOCK) works with unpinned memory, a little slower. */
static void ring_learn(struct hifc_uring *ring, uint32_t index, uintptr_t base, uint64_t size_bytes)
{
    struct iovec iov = {(void *)base, size_bytes};
    __u64 tag = 0;
    if (io_uring_register_buffers_update_tag(&ring->ring, index, &iov, &tag, 1) == 1 && size_bytes) {
        atomic_fetch_or_explicit(&ring->fixed_slots, 1ull << index, memory_order_release);
    }
}

static void ring_forget(struct hifc_uring *ring, uint32_t index)
{
    uint64_t bit = 1ull << index;
    if (atomic_fetch_and(&ring->fixed_slots, ~bit) & bit) {
        ring_learn(ring, index, 0, 0);
    }
}

static void add_region(struct hifc_file_device *device, uintptr_t base, uint64_t size_bytes)
{
    for (uint32_t i = 0; i < HIFC_FILE_REGIONS_MAX; i++) {
        struct hifc_file_region *region = &device->regions[i];
        if (atomic_load(&region->size_bytes)) {
            continue;
        }
        for (struct hifc_uring *ring = device->rings; ring; ring = ring->next) {
            ring_learn(ring, i, base, size_bytes);
        }
        atomic_store(&region->base, base);
        atomic_store_explicit(&region->size_bytes, size_bytes, memory_order_release);
        if (i >= atomic_load(&device->region_count)) {
            atomic_store(&device->region_count, i + 1);
        }
        return;
    }
    /* No slot left: commands there go as unregistered memory. */
}

int hifc_uring_register(struct hifc_device *base_device, void *base, uint64_t size_bytes)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base_device;
    pthread_mutex_lock(&device->mutex);
    for (uint64_t at = 0; at < size_bytes; at += HIFC_FILE_REGION_MAX_BYTES) {
        uint64_t rest = size_bytes - at;
        add_region(device, (uintptr_t)base + at,
                   rest < HIFC_FILE_REGION_MAX_BYTES ? rest : HIFC_FILE_REGION_MAX_BYTES);
    }
    pthread_mutex_unlock(&device->mutex);
    return 0;
}

int hifc_uring_unregister(struct hifc_device *base_device, void *base, uint64_t size_bytes)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base_device;
    pthread_mutex_lock(&device->mutex);
    for (uint32_t i = 0; i < HIFC_FILE_REGIONS_MAX; i++) {
        struct hifc_file_region *region = &device->regions[i];
        uintptr_t at = atomic_load(&region->base);
        if (!atomic_load(&region->size_bytes) || at < (uintptr_t)base ||
            at - (uintptr_t)base >= size_bytes) {
            continue;
        }
        atomic_store(&region->size_bytes, 0);
        for (struct hifc_uring *ring = device->rings; ring; ring = ring->next) {
            ring_forget(ring, i);
        }
    }
    pthread_mutex_unlock(&device->mutex);
    return 0;
}

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

/* ---- opening and closing --------------------------------------------------------------------- */

static int refuse_ring(struct hifc_device *device, int error)
{
    if (error == -EPERM || error == -EACCES) {
        return hifc_fail(-EPERM, "%.200s: io_uring is not permitted; allow it (sysctl "
                         "kernel.io_uring_disabled=0, in a container a seccomp profile with "
                         "io_uring_setup, io_uring_enter and io_uring_register), or add io=sync to "
                         "the URI, which is slower", device->uri);
    }
    if (error == -ENOSYS) {
        return hifc_fail(-ENOTSUP, "%.200s: this kernel has no io_uring (5.6 or newer has), or a "
                         "seccomp profile hides it; allow it, or add io=sync to the URI, which is "
                         "slower", device->uri);
    }
    if (error == -ENOMEM) {
        return hifc_fail(-ENOMEM, "%.200s: no memory that may be locked for a ring; raise ulimit -l "
                         "(LimitMEMLOCK), or add io=sync to the URI", device->uri);
    }
    return hifc_fail(error, "%.200s: io_uring_setup failed: %s; add io=sync to the URI to do "
                     "without", device->uri, strerror(-error));
}

static void learn_regions(struct hifc_uring *ring, struct hifc_file_device *device)
{
    if (io_uring_register_buffers_sparse(&ring->ring, HIFC_FILE_REGIONS_MAX) != 0) {
        return;
    }
    for (uint32_t i = 0; i < HIFC_FILE_REGIONS_MAX; i++) {
        uint64_t size_bytes = atomic_load(&device->regions[i].size_bytes);
        if (size_bytes) {
            ring_learn(ring, i, atomic_load(&device->regions[i].base), size_bytes);
        }
    }
}

static struct hifc_uring *allocate(struct hifc_device *device, uint32_t depth)
{
    struct hifc_uring *ring = calloc(1, sizeof(*ring) + depth * sizeof(ring->slots[0]));
    if (!ring) {
        return NULL;
    }
    ring->partial = calloc(depth, sizeof(ring->partial[0]));
    if (!ring->partial) {
        free(ring);
        return NULL;
    }
    ring->base.device = device;
    ring->depth = depth;
    ring->event_fd = -1;
    for (uint32_t i = 0; i < depth; i++) {
        ring->slots[i].next_free = i + 1;
    }
    return ring;
}

static void release(struct hifc_uring *ring)
{
    if (ring->event_fd >= 0) {
        close(ring->event_fd);
    }
    free(ring->partial);
    free(ring);
}

int hifc_uring_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                    struct hifc_qpair **out)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base;
    if (depth == 0 || depth > URING_DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%.200s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         URING_DEPTH_MAX);
    }
    struct hifc_uring *ring = allocate(base, depth);
    if (!ring) {
        return hifc_fail(-ENOMEM, "%.200s: out of memory for a queue pair", base->uri);
    }
    ring->timeout_ms = command_timeout_ms;
    ring->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = ring->event_fd < 0 ? -errno : io_uring_queue_init(depth, &ring->ring, 0);
    if (rc) {
        release(ring);
        return refuse_ring(base, rc);
    }
    rc = io_uring_register_eventfd(&ring->ring, ring->event_fd);
    if (rc) {
        io_uring_queue_exit(&ring->ring);
        release(ring);
        return refuse_ring(base, rc);
    }
    io_uring_ring_dontfork(&ring->ring);
    ring->fixed_file = io_uring_register_files(&ring->ring, &device->fd, 1) == 0;
    pthread_mutex_lock(&device->mutex);
    learn_regions(ring, device);
    ring->next = device->rings;
    device->rings = ring;
    pthread_mutex_unlock(&device->mutex);
    *out = &ring->base;
    return 0;
}

void hifc_uring_abandon(struct hifc_file_device *device)
{
    for (struct hifc_uring *ring = device->rings; ring; ring = ring->next) {
        close(ring->ring.ring_fd);
        close(ring->event_fd);
    }
}

/* ---- submission ------------------------------------------------------------------------------ */

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
    struct slot *slot = &ring->slots[index];
    struct hifc_io *io = slot->io;
    int fd = ring->fixed_file ? 0 : device->fd;
    if (io->op == HIFC_IO_FLUSH && device->read_only) {
        io_uring_prep_nop(sqe);
    } else if (io->op == HIFC_IO_FLUSH) {
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
    } else if (io->op == HIFC_IO_DEALLOCATE) {
        io_uring_prep_fallocate(sqe, fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
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
    struct slot *slot = &ring->slots[index];
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
    uint32_t start_ms = now_ms();
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
    struct slot *slot = &ring->slots[index];
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
    struct slot *slot = &ring->slots[index];
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
    struct slot *slot = &ring->slots[index];
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
    uint32_t now = now_ms();
    if (now - ring->last_check_ms < ring->timeout_ms / 8) {
        return;
    }
    ring->last_check_ms = now;
    for (uint32_t i = 0; i < ring->depth; i++) {
        struct slot *slot = &ring->slots[i];
        if (slot->io && !slot->cancelled && now - slot->start_ms > ring->timeout_ms) {
            cancel(ring, i);
        }
    }
}

static int complete_all(struct hifc_uring *ring, int error, uint8_t sct, uint8_t sc)
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
 * emptied before the ring is looked at once more, or a completion in between would be slept over. */
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
        complete_all(ring, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH);
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

void hifc_uring_close(struct hifc_qpair *base)
{
    struct hifc_uring *ring = (struct hifc_uring *)base;
    struct hifc_file_device *device = (struct hifc_file_device *)base->device;
    if (hifc_forked_since(device->fork_generation)) {
        return;
    }
    pthread_mutex_lock(&device->mutex);
    struct hifc_uring **link = &device->rings;
    while (*link != ring) {
        link = &(*link)->next;
    }
    *link = ring->next;
    pthread_mutex_unlock(&device->mutex);
    uint32_t start_ms = now_ms();
    uint32_t bound_ms = ring->timeout_ms + URING_CLOSE_EXTRA_MS;
    while (ring->inflight && !ring->lost && now_ms() - start_ms < bound_ms) {
        hifc_uring_poll(base);
        struct __kernel_timespec pause = {.tv_nsec = 1000000};
        struct io_uring_cqe *cqe;
        if (ring->inflight && !ring->refused && !ring->lost) {
            io_uring_wait_cqe_timeout(&ring->ring, &cqe, &pause);
        }
    }
    device->stranded |= ring->inflight > 0;
    io_uring_queue_exit(&ring->ring);
    complete_all(ring, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
    release(ring);
}

int hifc_uring_event_fd(struct hifc_qpair *base)
{
    return ((struct hifc_uring *)base)->event_fd;
}
