/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_qpair.c - queue pairs of SPDK.
 *
 * One thread at a time submits and polls. A command goes down as one of SPDK's, or as several:
 * NVMe/TCP carries one element each, no command may cross the boundary that the namespace names,
 * and SPDK is never left to cut what it would cut badly (it leaks requests over elements that
 * are not whole blocks, and spins for ever over empty ones). PCIe takes a whole list at once.
 * `pieces` counts SPDK's commands, so that none waits inside SPDK.
 *
 * Invariants:
 *   - every command taken is in exactly one list: running, oldest first, or ready, which the
 *     next poll hands out: what was refused, and what SPDK completed from within submit;
 *   - io->done is called when the last piece came back, from within poll or close;
 *   - once lost, a queue pair of SPDK is disconnected, which stops every transfer, before its
 *     commands complete with an error.
 *
 * A command that outlives the timeout loses the queue pair: the transport has no other way to get
 * the buffer back. The engine above opens another one.
 *
 * device_private of a command: [0] pieces and age, [1] and [2] its list, [3] its queue pair.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <spdk/likely.h>

#include "device/command.h"
#include "device/spdk.h"
#include "error.h"

#define DEPTH_MAX 4096u
/* Polls between looks at the clock: some microseconds each, and one at most every nap when idle. */
#define CLOCK_EVERY_POLLS 64u

struct list {
    struct hifc_io *head, *tail;
};

struct hifc_spdk_qpair {
    struct hifc_qpair base;
    struct spdk_nvme_qpair *qpair; /* NULL: lost */
    struct spdk_nvme_ns *ns;
    struct list running, ready;
    uint32_t entries;
    uint32_t depth;       /* commands taken at most ... */
    uint32_t pieces_max;  /* ... and of SPDK's commands */
    uint32_t inflight, pieces;
    uint32_t completed;   /* in this poll */
    uint32_t polls;
    uint32_t timeout_ms, now_ms;
    uint32_t lba_shift;
    uint32_t boundary_bytes;
    uint32_t region; /* that memory was in last */
    int lost;             /* negative errno */
    bool submitting, closing, vectored, read_only;
    struct { /* where SPDK is in the list of the command that it takes */
        uint32_t index;
        uint64_t skip;
    } walk;
};

/* device_private[0] */
struct progress {
    uint32_t pieces; /* that SPDK has */
    uint32_t start_ms;
};
_Static_assert(sizeof(struct progress) == 8, "fits into one word");

static struct progress *progress_of(struct hifc_io *io)
{
    return (struct progress *)&io->device_private[0];
}

static struct hifc_spdk_qpair *qpair_of(const struct hifc_io *io)
{
    return (struct hifc_spdk_qpair *)(uintptr_t)io->device_private[3];
}

static uint32_t clock_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000);
}

/* ---- lists ----------------------------------------------------------------------------------- */

static struct hifc_io *link_get(const struct hifc_io *io, unsigned which)
{
    return (struct hifc_io *)(uintptr_t)io->device_private[which];
}

static void list_push(struct list *list, struct hifc_io *io)
{
    io->device_private[1] = 0;
    io->device_private[2] = (uintptr_t)list->tail;
    if (list->tail) {
        list->tail->device_private[1] = (uintptr_t)io;
    } else {
        list->head = io;
    }
    list->tail = io;
}

static void list_remove(struct list *list, struct hifc_io *io)
{
    struct hifc_io *next = link_get(io, 1), *before = link_get(io, 2);
    if (next) {
        next->device_private[2] = (uintptr_t)before;
    } else {
        list->tail = before;
    }
    if (before) {
        before->device_private[1] = (uintptr_t)next;
    } else {
        list->head = next;
    }
}

/* ---- completion ------------------------------------------------------------------------------ */

static int error_of(uint8_t sct, uint8_t sc)
{
    if (sct == HIFC_SCT_GENERIC) {
        switch (sc) {
        case 0:
            return 0;
        case HIFC_SC_INVALID_FIELD:
        case HIFC_SC_LBA_OUT_OF_RANGE:
            return -EINVAL;
        case HIFC_SC_CAPACITY:
            return -ENOSPC;
        case 0x20: /* write protected */
            return -EROFS;
        default:
            return -EIO;
        }
    }
    if (sct == HIFC_SCT_COMMAND && sc == HIFC_SC_READ_ONLY_RANGE) {
        return -EROFS;
    }
    return -EIO;
}

static void finish(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    qpair->inflight--;
    qpair->completed++;
    io->done(io);
}

/* The last piece came back, or there was none. */
static void settle(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    list_remove(&qpair->running, io);
    if (qpair->submitting) {
        list_push(&qpair->ready, io);
    } else {
        finish(qpair, io);
    }
}

static void piece_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct hifc_io *io = argument;
    struct hifc_spdk_qpair *qpair = qpair_of(io);
    uint8_t sct = (uint8_t)completion->status.sct, sc = (uint8_t)completion->status.sc;
    qpair->pieces--;
    if (spdk_unlikely((sct | sc) && !io->error)) {
        bool aborted = sct == HIFC_SCT_GENERIC && (sc == HIFC_SC_ABORTED ||
                                                   sc == HIFC_SC_ABORTED_SQ_DELETION);
        hifc_io_set(io, aborted && qpair->closing ? -ECANCELED : error_of(sct, sc), sct, sc);
    }
    if (--progress_of(io)->pieces == 0) {
        settle(qpair, io);
    }
}

static int deliver(struct hifc_spdk_qpair *qpair)
{
    struct hifc_io *io;
    int count = 0;
    struct list ready = qpair->ready;
    qpair->ready = (struct list){NULL, NULL};
    while ((io = ready.head)) {
        list_remove(&ready, io);
        finish(qpair, io);
        count++;
    }
    return count;
}

/* ---- submission ------------------------------------------------------------------------------ */

static void walk_reset(void *argument, uint32_t offset)
{
    struct hifc_io *io = argument;
    struct hifc_spdk_qpair *qpair = qpair_of(io);
    qpair->walk.index = 0;
    qpair->walk.skip = offset;
    while (qpair->walk.skip >= io->iov[qpair->walk.index].iov_len) {
        qpair->walk.skip -= io->iov[qpair->walk.index++].iov_len;
    }
}

static int walk_next(void *argument, void **address, uint32_t *length)
{
    struct hifc_io *io = argument;
    struct hifc_spdk_qpair *qpair = qpair_of(io);
    struct iovec *iov = &io->iov[qpair->walk.index++];
    *address = (uint8_t *)iov->iov_base + qpair->walk.skip;
    *length = (uint32_t)(iov->iov_len - qpair->walk.skip);
    qpair->walk.skip = 0;
    return 0;
}

/* Bytes from offset to the next boundary. */
static uint64_t to_boundary(const struct hifc_spdk_qpair *qpair, uint64_t offset)
{
    uint64_t boundary = qpair->boundary_bytes;
    return boundary ? boundary - (offset & (boundary - 1)) : UINT64_MAX;
}

/* How many of SPDK's commands it will be, so many that they surely fit. */
static uint32_t count_pieces(const struct hifc_spdk_qpair *qpair, const struct hifc_io *io)
{
    uint32_t pieces = qpair->vectored || io->iov_count == 0 ? 1 : io->iov_count;
    if (qpair->boundary_bytes && io->op <= HIFC_IO_WRITE) {
        uint64_t first = io->offset_bytes / qpair->boundary_bytes;
        pieces += (uint32_t)((io->offset_bytes + io->length_bytes - 1) / qpair->boundary_bytes -
                             first);
    }
    return pieces;
}

/* Registered memory, no element empty: what SPDK would choke on, or TCP take and PCIe refuse. */
static bool memory_is_fit(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    for (uint32_t i = 0; i < io->iov_count; i++) {
        struct iovec *iov = &io->iov[i];
        if (!iov->iov_len ||
            !hifc_spdk_is_registered(iov->iov_base, iov->iov_len, &qpair->region)) {
            return false;
        }
    }
    return true;
}

static int submit_piece(struct hifc_spdk_qpair *qpair, struct hifc_io *io, void *memory,
                        uint64_t offset, uint64_t length)
{
    uint64_t lba = offset >> qpair->lba_shift;
    uint32_t count = (uint32_t)(length >> qpair->lba_shift);
    progress_of(io)->pieces++;
    qpair->pieces++;
    int rc = io->op == HIFC_IO_READ
                 ? spdk_nvme_ns_cmd_read(qpair->ns, qpair->qpair, memory, lba, count, piece_done,
                                         io, 0)
                 : spdk_nvme_ns_cmd_write(qpair->ns, qpair->qpair, memory, lba, count, piece_done,
                                          io, 0);
    if (rc) {
        progress_of(io)->pieces--;
        qpair->pieces--;
    }
    return rc;
}

static int submit_transfer(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    uint64_t offset = io->offset_bytes;
    for (uint32_t i = 0; i < io->iov_count; i++) {
        uint8_t *at = io->iov[i].iov_base;
        uint64_t left = io->iov[i].iov_len;
        while (left) {
            uint64_t room = to_boundary(qpair, offset), length = left < room ? left : room;
            int rc = submit_piece(qpair, io, at, offset, length);
            if (spdk_unlikely(rc)) {
                return rc;
            }
            at += length;
            offset += length;
            left -= length;
        }
    }
    return 0;
}

/* Those that are one command of SPDK's whatever their list. */
static int submit_whole(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    uint64_t lba = io->offset_bytes >> qpair->lba_shift;
    uint32_t count = io->length_bytes >> qpair->lba_shift;
    int rc;
    progress_of(io)->pieces = 1;
    qpair->pieces++;
    switch (io->op) {
    case HIFC_IO_READ:
        rc = spdk_nvme_ns_cmd_readv(qpair->ns, qpair->qpair, lba, count, piece_done, io, 0,
                                    walk_reset, walk_next);
        break;
    case HIFC_IO_WRITE:
        rc = spdk_nvme_ns_cmd_writev(qpair->ns, qpair->qpair, lba, count, piece_done, io, 0,
                                     walk_reset, walk_next);
        break;
    case HIFC_IO_DEALLOCATE: {
        struct spdk_nvme_dsm_range range = {.length = count, .starting_lba = lba};
        rc = spdk_nvme_ns_cmd_dataset_management(qpair->ns, qpair->qpair,
                                                 SPDK_NVME_DSM_ATTR_DEALLOCATE, &range, 1,
                                                 piece_done, io);
        break;
    }
    default:
        rc = spdk_nvme_ns_cmd_flush(qpair->ns, qpair->qpair, piece_done, io);
        break;
    }
    if (rc) {
        progress_of(io)->pieces = 0;
        qpair->pieces--;
    }
    return rc;
}

/* The command stands in the running list. What goes wrong is its outcome, at the next poll. */
static void send_down(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    bool transfer = io->op <= HIFC_IO_WRITE;
    /* While pieces go down, one is counted for ourselves: the first may complete before the last
     * is down, and must not complete the command. */
    bool whole = !transfer || (qpair->vectored && io->iov_count > 1);
    int rc;
    if (whole) {
        rc = submit_whole(qpair, io);
        if (!rc) {
            return;
        }
    } else {
        progress_of(io)->pieces = 1;
        rc = submit_transfer(qpair, io);
        progress_of(io)->pieces--;
    }
    if (spdk_unlikely(rc)) {
        if (rc == -ENXIO) {
            qpair->lost = -ENODEV;
        }
        hifc_io_set(io, -EIO, rc == -ENXIO ? HIFC_SCT_PATH : HIFC_SCT_GENERIC,
                    rc == -ENXIO ? HIFC_SC_HOST_PATH : HIFC_SC_INTERNAL);
    }
    if (spdk_unlikely(progress_of(io)->pieces == 0)) {
        settle(qpair, io);
    }
}

static bool take(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    if (qpair->inflight == qpair->depth) {
        return false;
    }
    bool fit = hifc_io_check(&qpair->base.device->geometry, io, qpair->read_only);
    if (fit && !memory_is_fit(qpair, io)) {
        fit = hifc_io_refuse(io, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
    }
    if (fit && qpair->pieces && qpair->pieces + count_pieces(qpair, io) > qpair->pieces_max) {
        return false;
    }
    io->device_private[0] = 0;
    io->device_private[3] = (uintptr_t)qpair;
    qpair->inflight++;
    if (fit && qpair->lost) {
        fit = hifc_io_refuse(io, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH);
    }
    if (!fit || (io->op == HIFC_IO_FLUSH && qpair->read_only)) {
        list_push(&qpair->ready, io);
        return true;
    }
    progress_of(io)->start_ms = qpair->now_ms;
    list_push(&qpair->running, io);
    send_down(qpair, io);
    return true;
}

uint32_t hifc_spdk_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct hifc_spdk_qpair *qpair = (struct hifc_spdk_qpair *)base;
    uint32_t taken = 0;
    bool outer = qpair->submitting;
    qpair->submitting = true;
    qpair->now_ms = clock_ms();
    /* SPDK would hold commands back for when the queue pair is connected again. */
    if (!qpair->lost &&
        spdk_nvme_qpair_get_failure_reason(qpair->qpair) != SPDK_NVME_QPAIR_FAILURE_NONE) {
        qpair->lost = -ENODEV;
    }
    while (taken < count && take(qpair, ios[taken])) {
        taken++;
    }
    qpair->submitting = outer;
    return taken;
}

/* ---- poll ------------------------------------------------------------------------------------ */

/* Whatever SPDK still has completes. */
static void release(struct hifc_spdk_qpair *qpair)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)qpair->base.device;
    struct spdk_nvme_qpair *spdk_qpair = qpair->qpair;
    qpair->qpair = NULL;
    hifc_spdk_qpair_free(device, spdk_qpair);
    /* None should be left; one that SPDK forgot is not to be waited for in vain. */
    while (qpair->running.head) {
        struct hifc_io *io = qpair->running.head;
        hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
        settle(qpair, io);
    }
}

static int lose(struct hifc_spdk_qpair *qpair, int code)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)qpair->base.device;
    qpair->lost = code;
    if (qpair->qpair) {
        bool stopped = hifc_spdk_qpair_disconnect(device, qpair->qpair);
        if (stopped && qpair->pieces == 0 &&
            hifc_spdk_qpair_keep(device, qpair->qpair, qpair->entries)) {
            qpair->qpair = NULL;
        } else {
            release(qpair);
        }
    }
    deliver(qpair);
    return code;
}

/* Marks what is too old; true if there is any. */
static bool find_overdue(struct hifc_spdk_qpair *qpair)
{
    struct hifc_io *io = qpair->running.head;
    qpair->now_ms = clock_ms();
    if (!io || qpair->now_ms - progress_of(io)->start_ms <= qpair->timeout_ms) {
        return false;
    }
    for (; io && qpair->now_ms - progress_of(io)->start_ms > qpair->timeout_ms;
         io = link_get(io, 1)) {
        hifc_io_set(io, -ETIMEDOUT, HIFC_SCT_GENERIC, HIFC_SC_ABORTED);
    }
    return true;
}

int hifc_spdk_poll(struct hifc_qpair *base)
{
    struct hifc_spdk_qpair *qpair = (struct hifc_spdk_qpair *)base;
    qpair->completed = 0;
    if (spdk_unlikely(qpair->ready.head != NULL)) {
        deliver(qpair);
    }
    if (spdk_unlikely(qpair->lost)) {
        return lose(qpair, qpair->lost);
    }
    int rc = spdk_nvme_qpair_process_completions(qpair->qpair, 0);
    if (spdk_unlikely(rc < 0)) {
        return lose(qpair, -ENODEV);
    }
    if (qpair->polls++ % CLOCK_EVERY_POLLS == 0 && qpair->timeout_ms && find_overdue(qpair)) {
        return lose(qpair, -ETIMEDOUT);
    }
    return (int)qpair->completed;
}

/* ---- open and close -------------------------------------------------------------------------- */

/* The namespace again, which may have changed while the controller was away. */
static int check_namespace(struct hifc_spdk_device *device, struct spdk_nvme_ns **out)
{
    const struct hifc_geometry *geometry = &device->base.geometry;
    struct spdk_nvme_ns *ns = spdk_nvme_ctrlr_get_ns(device->ctrlr, device->target.nsid);
    if (!ns || !spdk_nvme_ns_is_active(ns) ||
        spdk_nvme_ns_get_sector_size(ns) != geometry->lba_bytes ||
        spdk_nvme_ns_get_num_sectors(ns) * geometry->lba_bytes < geometry->size_bytes) {
        return hifc_fail(-ENODEV, "%s: namespace %u is not what it was when it was opened; open it "
                         "again", device->target.where, device->target.nsid);
    }
    *out = ns;
    return 0;
}

int hifc_spdk_qpair_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                         struct hifc_qpair **out)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    if (depth == 0 || depth > DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         DEPTH_MAX);
    }
    struct hifc_spdk_qpair *qpair = calloc(1, sizeof(*qpair));
    if (!qpair) {
        return hifc_fail(-ENOMEM, "%s: out of memory for a queue pair", base->uri);
    }
    /* Room for commands that become several; one entry of a PCIe queue always stays empty. */
    int rc = hifc_spdk_qpair_alloc(device, 2 * depth + 1, &qpair->qpair, &qpair->entries);
    rc = rc ? rc : check_namespace(device, &qpair->ns);
    if (rc) {
        if (qpair->qpair) {
            hifc_spdk_qpair_free(device, qpair->qpair);
        }
        free(qpair);
        return rc;
    }
    qpair->base.device = base;
    qpair->depth = depth;
    qpair->pieces_max = device->target.pcie ? qpair->entries - 1 : qpair->entries;
    qpair->timeout_ms = command_timeout_ms;
    qpair->lba_shift = (uint32_t)__builtin_ctz(base->geometry.lba_bytes);
    qpair->boundary_bytes = base->geometry.boundary_bytes;
    qpair->vectored = device->target.pcie;
    qpair->read_only = device->read_only;
    *out = &qpair->base;
    return 0;
}

void hifc_spdk_qpair_close(struct hifc_qpair *base)
{
    struct hifc_spdk_qpair *qpair = (struct hifc_spdk_qpair *)base;
    if (hifc_forked_since(base->device->fork_generation)) {
        return;
    }
    qpair->closing = true;
    deliver(qpair);
    if (qpair->qpair) {
        release(qpair);
    }
    deliver(qpair);
    free(qpair);
}

int hifc_spdk_event_fd(struct hifc_qpair *qpair)
{
    (void)qpair;
    return -1; /* SPDK polls */
}
