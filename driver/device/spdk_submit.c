/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_submit.c - commands on their way down to SPDK and back.
 *
 * A command goes down as one of SPDK's, or as several: NVMe/TCP carries one element each, no
 * command may cross the boundary that the namespace names, and SPDK is never left to cut what it
 * would cut badly (it leaks requests over elements that are not whole blocks, and spins for ever
 * over empty ones). PCIe takes a whole list at once. `pieces` counts SPDK's commands, so that none
 * waits inside SPDK. What SPDK completes from within submit waits for the next poll. The thread
 * that drives the queue pair.
 */
#define _GNU_SOURCE
#include <spdk/likely.h>

#include "device/command.h"
#include "device/spdk_qpair.h"

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

static void piece_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct hifc_io *io = argument;
    struct hifc_spdk_qpair *qpair = hifc_spdk_qpair_of(io);
    uint8_t sct = (uint8_t)completion->status.sct, sc = (uint8_t)completion->status.sc;
    qpair->pieces--;
    if (spdk_unlikely((sct | sc) && !io->error)) {
        bool aborted = sct == HIFC_SCT_GENERIC && (sc == HIFC_SC_ABORTED ||
                                                   sc == HIFC_SC_ABORTED_SQ_DELETION);
        hifc_io_set(io, aborted && qpair->closing ? -ECANCELED : error_of(sct, sc), sct, sc);
    }
    if (hifc_spdk_piece_remove(io)) {
        hifc_spdk_settle(qpair, io);
    }
}

/* ---- submission ------------------------------------------------------------------------------ */

static void walk_reset(void *argument, uint32_t offset)
{
    struct hifc_io *io = argument;
    struct hifc_spdk_qpair *qpair = hifc_spdk_qpair_of(io);
    qpair->walk.index = 0;
    qpair->walk.skip = offset;
    while (qpair->walk.skip >= io->iov[qpair->walk.index].iov_len) {
        qpair->walk.skip -= io->iov[qpair->walk.index++].iov_len;
    }
}

static int walk_next(void *argument, void **address, uint32_t *length)
{
    struct hifc_io *io = argument;
    struct hifc_spdk_qpair *qpair = hifc_spdk_qpair_of(io);
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
    hifc_spdk_piece_add(io);
    qpair->pieces++;
    int rc = io->op == HIFC_IO_READ
                 ? spdk_nvme_ns_cmd_read(qpair->ns, qpair->qpair, memory, lba, count, piece_done,
                                         io, 0)
                 : spdk_nvme_ns_cmd_write(qpair->ns, qpair->qpair, memory, lba, count, piece_done,
                                          io, 0);
    if (rc) {
        (void)hifc_spdk_piece_remove(io); /* never the last: see send_down */
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
    hifc_spdk_piece_add(io);
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
        (void)hifc_spdk_piece_remove(io);
        qpair->pieces--;
    }
    return rc;
}

/* The command stands in the running list. What goes wrong is its outcome, at the next poll. */
static void send_down(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    bool transfer = io->op <= HIFC_IO_WRITE;
    bool whole = !transfer || (qpair->vectored && io->iov_count > 1);
    /* While pieces go down, one is counted for ourselves: the first may complete before the last
     * is down, and must not complete the command. */
    hifc_spdk_piece_add(io);
    int rc = whole ? submit_whole(qpair, io) : submit_transfer(qpair, io);
    if (spdk_unlikely(rc)) {
        bool lost = rc == -ENXIO;
        qpair->lost = lost ? -ENODEV : qpair->lost;
        hifc_io_set(io, -EIO, lost ? HIFC_SCT_PATH : HIFC_SCT_GENERIC,
                    lost ? HIFC_SC_HOST_PATH : HIFC_SC_INTERNAL);
    }
    if (spdk_unlikely(hifc_spdk_piece_remove(io))) {
        hifc_spdk_settle(qpair, io);
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
    io->device_private[3] = (uintptr_t)qpair;
    qpair->inflight++;
    if (fit && qpair->lost) {
        fit = hifc_io_refuse(io, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH);
    }
    if (!fit || (io->op == HIFC_IO_FLUSH && qpair->read_only)) {
        hifc_spdk_list_push(&qpair->ready, io);
        return true;
    }
    hifc_spdk_start(io, qpair->now_ms);
    hifc_spdk_list_push(&qpair->running, io);
    send_down(qpair, io);
    return true;
}

uint32_t hifc_spdk_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct hifc_spdk_qpair *qpair = (struct hifc_spdk_qpair *)base;
    uint32_t taken = 0;
    bool outer = qpair->submitting;
    qpair->submitting = true;
    qpair->now_ms = hifc_spdk_clock_ms();
    /* SPDK would hold commands back for when the queue pair is connected again. */
    if (!qpair->lost &&
        (hifc_spdk_is_leaving((const struct hifc_spdk_device *)base->device) ||
         spdk_nvme_qpair_get_failure_reason(qpair->qpair) != SPDK_NVME_QPAIR_FAILURE_NONE)) {
        qpair->lost = -ENODEV;
    }
    while (taken < count && take(qpair, ios[taken])) {
        taken++;
    }
    qpair->submitting = outer;
    return taken;
}
