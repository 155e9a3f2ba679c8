/* SPDX-License-Identifier: Apache-2.0
 *
 * faulty_queue.c - the commands of a faulty device: how each is carried out on overlay and device
 * below, what a cut does to them, and when they complete. faulty.c has the overall picture.
 *
 * Everything happens under the device's mutex but the completion callbacks, which come after it.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/command.h"
#include "faulty/faulty_state.h"
#include "util/clock.h"
#include "util/error.h"

#define FAULTY_DEPTH_MAX 4096u
#define NEVER UINT64_MAX

/* ---- the device below, one command at a time ------------------------------------------------- */

static void inner_completed(struct hifc_io *io)
{
    ((struct hifc_faulty_device *)io->owner)->inner_done = true;
}

static int inner_run(struct hifc_faulty_device *device, uint8_t op, uint64_t offset_bytes,
                     uint32_t length_bytes)
{
    struct hifc_io *io = &device->inner_io;
    io->done = inner_completed;
    io->owner = device;
    io->op = op;
    io->offset_bytes = offset_bytes;
    io->length_bytes = length_bytes;
    device->inner_done = false;
    device->inner->ops->submit(device->inner_qpair, &io, 1);
    while (!device->inner_done) { /* bounded by the inner queue pair's command timeout */
        device->inner->ops->poll(device->inner_qpair);
    }
    return io->error;
}

static int write_down(void *owner, uint64_t lba, uint8_t *data, uint32_t count)
{
    struct hifc_faulty_device *device = owner;
    uint32_t lba_bytes = device->base.geometry.lba_bytes;
    uint32_t most = device->base.geometry.max_transfer_bytes / lba_bytes;
    int rc = 0;
    while (count && !rc) {
        uint32_t blocks = count < most ? count : most;
        device->inner_io.iov[0] = (struct iovec){data, (size_t)blocks * lba_bytes};
        device->inner_io.iov_count = 1;
        rc = inner_run(device, HIFC_IO_WRITE, lba * lba_bytes, blocks * lba_bytes);
        data += (size_t)blocks * lba_bytes;
        lba += blocks;
        count -= blocks;
    }
    return rc;
}

int hifc_faulty_drain(struct hifc_faulty_device *device, uint32_t drop_percent)
{
    int rc = hifc_overlay_drain(&device->overlay, drop_percent, &device->random, write_down,
                                device);
    if (!rc && device->inner->geometry.volatile_write_cache) {
        rc = inner_run(device, HIFC_IO_FLUSH, 0, 0);
    }
    return rc;
}

/* ---- carrying out a command ------------------------------------------------------------------ */

/* Where a copy stands within a scatter list; blocks may straddle its elements. */
struct cursor {
    const struct iovec *iov;
    size_t position;
};

static void move(struct cursor *cursor, uint8_t *block, size_t length, bool to_list)
{
    while (length) {
        size_t rest = cursor->iov->iov_len - cursor->position;
        size_t part = rest < length ? rest : length;
        uint8_t *at = (uint8_t *)cursor->iov->iov_base + cursor->position;
        if (block) {
            memcpy(to_list ? at : block, to_list ? block : at, part);
            block += part;
        }
        length -= part;
        cursor->position += part;
        if (cursor->position == cursor->iov->iov_len) {
            cursor->iov++;
            cursor->position = 0;
        }
    }
}

/* A full cache writes back; that is no flush, only a draw that nothing loses. */
static uint8_t *overlay_block(struct hifc_faulty_device *device, uint64_t lba)
{
    uint8_t *block = hifc_overlay_put(&device->overlay, lba);
    if (!block && hifc_overlay_drain(&device->overlay, 0, NULL, write_down, device) == 0) {
        block = hifc_overlay_put(&device->overlay, lba);
    }
    return block;
}

/* Every block, or a drawn half of them, into the overlay. */
static void write_blocks(struct hifc_faulty_device *device, struct hifc_io *io, bool half)
{
    uint32_t lba_bytes = device->base.geometry.lba_bytes;
    struct cursor cursor = {io->iov, 0};
    for (uint32_t done = 0; done < io->length_bytes; done += lba_bytes) {
        uint8_t *block = NULL;
        if (!half || hifc_random(&device->random) & 1) {
            block = overlay_block(device, (io->offset_bytes + done) / lba_bytes);
            if (!block) {
                hifc_io_set(io, -ENOMEM, HIFC_SCT_GENERIC, HIFC_SC_INTERNAL);
                return;
            }
        }
        move(&cursor, block, lba_bytes, false);
    }
}

/* The specification leaves open what a deallocated block reads as: zeroes, ones, its old bytes. */
static void deallocate_blocks(struct hifc_faulty_device *device, struct hifc_io *io)
{
    uint32_t lba_bytes = device->base.geometry.lba_bytes;
    for (uint32_t done = 0; done < io->length_bytes; done += lba_bytes) {
        uint64_t draw = hifc_random(&device->random) % 3;
        if (draw == 2) {
            continue;
        }
        uint8_t *block = overlay_block(device, (io->offset_bytes + done) / lba_bytes);
        if (!block) {
            hifc_io_set(io, -ENOMEM, HIFC_SCT_GENERIC, HIFC_SC_INTERNAL);
            return;
        }
        memset(block, draw ? 0xff : 0, lba_bytes);
    }
}

/* Room for the blocks of a write or allocate, as far as there is any: how many of them have it. */
static uint32_t take_room(struct hifc_faulty_device *device, const struct hifc_io *io)
{
    struct hifc_faulty_room *room = device->room;
    uint32_t lba_bytes = device->base.geometry.lba_bytes;
    uint64_t first = io->offset_bytes / lba_bytes;
    uint32_t blocks = io->length_bytes / lba_bytes, fit = 0;
    if (room->full_at && ++room->count >= room->full_at) {
        room->left = 0;
    }
    if (device->copy_on_write && io->op == HIFC_IO_WRITE && room->left == 0) {
        return 0;
    }
    for (; fit < blocks && (room->has[first + fit] || room->left > 0); fit++) {
        room->left -= !room->has[first + fit];
        room->has[first + fit] = 1;
    }
    return fit;
}

static void give_room_back(struct hifc_faulty_device *device, const struct hifc_io *io)
{
    uint32_t lba_bytes = device->base.geometry.lba_bytes;
    uint64_t first = io->offset_bytes / lba_bytes;
    for (uint32_t i = 0; i < io->length_bytes / lba_bytes; i++) {
        device->room->left += device->room->has[first + i];
        device->room->has[first + i] = 0;
    }
}

/* True when the command ends here, for want of room. What finds room is written, as a kernel does
 * that comes to the end of a disk. */
static bool ends_for_room(struct hifc_faulty_device *device, struct hifc_io *io)
{
    if (!device->room || io->op == HIFC_IO_READ || io->op == HIFC_IO_FLUSH) {
        return false;
    }
    if (io->op == HIFC_IO_DEALLOCATE) {
        give_room_back(device, io);
        return false;
    }
    if (io->op == HIFC_IO_ALLOCATE && device->no_allocate) {
        hifc_io_set(io, -ENOTSUP, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD);
        return true;
    }
    uint32_t fit = take_room(device, io);
    if (fit == io->length_bytes / device->base.geometry.lba_bytes) {
        return io->op == HIFC_IO_ALLOCATE;
    }
    if (io->op == HIFC_IO_WRITE) {
        uint32_t length_bytes = io->length_bytes;
        io->length_bytes = fit * device->base.geometry.lba_bytes;
        write_blocks(device, io, false);
        io->length_bytes = length_bytes;
    }
    hifc_io_set(io, -ENOSPC, HIFC_SCT_GENERIC, HIFC_SC_CAPACITY);
    return true;
}

static bool touches(const struct hifc_fault_range *ranges, uint32_t count, uint64_t first,
                    uint64_t last)
{
    for (uint32_t i = 0; i < count; i++) {
        if (first <= ranges[i].last && ranges[i].first <= last) {
            return true;
        }
    }
    return false;
}

/* The bit depends on the block alone, so that reading again does not help. */
static void flip_bit(struct cursor cursor, uint64_t lba, uint32_t lba_bytes)
{
    uint64_t state = lba;
    uint32_t bit = (uint32_t)(hifc_random(&state) % (lba_bytes * 8));
    uint8_t byte;
    move(&cursor, NULL, bit / 8, true);
    struct cursor again = cursor;
    move(&cursor, &byte, 1, false);
    byte ^= (uint8_t)(1u << (bit % 8));
    move(&again, &byte, 1, true);
}

static void read_blocks(struct hifc_faulty_device *device, struct hifc_io *io)
{
    uint32_t lba_bytes = device->base.geometry.lba_bytes;
    uint64_t first = io->offset_bytes / lba_bytes;
    uint64_t last = first + io->length_bytes / lba_bytes - 1;
    if (touches(device->errors, device->error_count, first, last)) {
        hifc_io_set(io, -EIO, HIFC_SCT_MEDIA, HIFC_SC_UNRECOVERED_READ);
        return;
    }
    memcpy(device->inner_io.iov, io->iov, io->iov_count * sizeof(io->iov[0]));
    device->inner_io.iov_count = io->iov_count;
    if (inner_run(device, HIFC_IO_READ, io->offset_bytes, io->length_bytes) != 0) {
        hifc_io_set(io, device->inner_io.error, device->inner_io.sct, device->inner_io.sc);
        return;
    }
    struct cursor cursor = {io->iov, 0};
    for (uint64_t lba = first; lba <= last; lba++) {
        struct cursor start = cursor;
        const uint8_t *block = hifc_overlay_get(&device->overlay, lba);
        move(&cursor, (uint8_t *)(uintptr_t)block, lba_bytes, true);
        if (device->flip_count && touches(device->flips, device->flip_count, lba, lba)) {
            flip_bit(start, lba, lba_bytes);
        }
    }
}

/* The power goes: whatever any queue pair has in flight joins the draw. */
void hifc_faulty_cut_power(struct hifc_faulty_device *device, struct hifc_io *current)
{
    if (device->cut) {
        return;
    }
    device->cut = true;
    if (current && current->op == HIFC_IO_WRITE) {
        write_blocks(device, current, false);
    }
    for (struct hifc_faulty_qpair *qpair = device->qpairs; qpair; qpair = qpair->next) {
        for (uint32_t i = 0; i < qpair->pending_count; i++) {
            struct hifc_io *io = qpair->pending[i].io;
            if (io->op == HIFC_IO_WRITE && !io->error) {
                write_blocks(device, io, false);
            }
        }
        for (uint32_t i = qpair->ready_done; i < qpair->ready_count; i++) {
            struct hifc_io *io = qpair->ready[i];
            if (io->op == HIFC_IO_WRITE && !io->error && io != current) {
                write_blocks(device, io, false);
            }
        }
    }
    hifc_faulty_drain(device, device->drop_percent);
}

static void carry_out(struct hifc_faulty_device *device, struct hifc_io *io)
{
    bool counted = io->op == HIFC_IO_WRITE || io->op == HIFC_IO_FLUSH;
    if (!device->cut && counted && ++device->count == device->cut_at) {
        hifc_faulty_cut_power(device, io);
    }
    if (device->cut) {
        hifc_io_set(io, -EIO, HIFC_SCT_PATH, HIFC_SC_INTERNAL_PATH);
        return;
    }
    if (counted && device->count == device->write_error_at) {
        if (io->op == HIFC_IO_WRITE) {
            write_blocks(device, io, true);
            hifc_io_set(io, -EIO, HIFC_SCT_MEDIA, HIFC_SC_WRITE_FAULT);
        } else {
            hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_INTERNAL);
        }
        return;
    }
    if (ends_for_room(device, io)) {
        return;
    }
    switch (io->op) {
    case HIFC_IO_READ:
        read_blocks(device, io);
        break;
    case HIFC_IO_WRITE:
        write_blocks(device, io, false);
        break;
    case HIFC_IO_DEALLOCATE:
        deallocate_blocks(device, io);
        break;
    default:
        if (hifc_faulty_drain(device, 0) != 0) {
            hifc_io_set(io, device->inner_io.error, device->inner_io.sct, device->inner_io.sc);
        }
        break;
    }
}

/* ---- the queue pair -------------------------------------------------------------------------- */

int hifc_faulty_qpair_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                             struct hifc_qpair **out)
{
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base;
    if (depth == 0 || depth > FAULTY_DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%.200s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         FAULTY_DEPTH_MAX);
    }
    struct hifc_faulty_qpair *qpair = calloc(1, sizeof(*qpair) + depth * sizeof(qpair->pending[0]));
    struct hifc_io **ready = calloc(depth, sizeof(ready[0]));
    if (!qpair || !ready) {
        free(qpair);
        free(ready);
        return hifc_fail(-ENOMEM, "%.200s: out of memory for a queue pair", base->uri);
    }
    qpair->base.device = base;
    qpair->ready = ready;
    qpair->depth = depth;
    qpair->timeout_ms = command_timeout_ms;
    pthread_mutex_lock(&device->mutex);
    qpair->next = device->qpairs;
    device->qpairs = qpair;
    pthread_mutex_unlock(&device->mutex);
    *out = &qpair->base;
    return 0;
}

uint32_t hifc_faulty_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct hifc_faulty_qpair *qpair = (struct hifc_faulty_qpair *)base;
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base->device;
    pthread_mutex_lock(&device->mutex);
    uint32_t room = qpair->depth - qpair->inflight;
    uint32_t taken = count < room ? count : room;
    for (uint32_t i = 0; i < taken; i++) {
        struct hifc_faulty_pending *pending = &qpair->pending[qpair->pending_count++];
        hifc_io_check(&device->base.geometry, ios[i], device->read_only);
        *pending = (struct hifc_faulty_pending){.io = ios[i], .due = qpair->poll_number};
        if (device->delay_polls) {
            pending->due += hifc_random(&device->random) % (device->delay_polls + 1);
        }
        if (++qpair->taken == device->hang_at) {
            pending->due = NEVER;
            pending->start_ms = hifc_now_ms();
        }
    }
    qpair->inflight += taken;
    pthread_mutex_unlock(&device->mutex);
    return taken;
}

/* Moves what is due from pending to ready, in order or, with reorder, in a drawn one. */
static void take_due(struct hifc_faulty_device *device, struct hifc_faulty_qpair *qpair)
{
    uint32_t due = 0, kept = 0;
    for (uint32_t i = 0; i < qpair->pending_count; i++) {
        struct hifc_faulty_pending *pending = &qpair->pending[i];
        if (pending->due == NEVER && qpair->timeout_ms &&
            hifc_now_ms() - pending->start_ms > qpair->timeout_ms) {
            hifc_io_set(pending->io, -ETIMEDOUT, HIFC_SCT_GENERIC, HIFC_SC_ABORTED);
            pending->due = 0;
        }
        if (device->cut || pending->due <= qpair->poll_number) {
            qpair->ready[due++] = pending->io;
        } else {
            qpair->pending[kept++] = *pending;
        }
    }
    qpair->pending_count = kept;
    qpair->ready_count = due;
    qpair->ready_done = 0;
    for (uint32_t i = due; device->reorder && i > 1; i--) {
        uint32_t other = (uint32_t)(hifc_random(&device->random) % i);
        struct hifc_io *swapped = qpair->ready[i - 1];
        qpair->ready[i - 1] = qpair->ready[other];
        qpair->ready[other] = swapped;
    }
}

int hifc_faulty_poll(struct hifc_qpair *base)
{
    struct hifc_faulty_qpair *qpair = (struct hifc_faulty_qpair *)base;
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base->device;
    pthread_mutex_lock(&device->mutex);
    take_due(device, qpair);
    qpair->poll_number++;
    uint32_t due = qpair->ready_count;
    for (; qpair->ready_done < due; qpair->ready_done++) {
        if (!qpair->ready[qpair->ready_done]->error) {
            carry_out(device, qpair->ready[qpair->ready_done]);
        }
    }
    qpair->ready_count = 0; /* carried out: no part of a cut any more */
    pthread_mutex_unlock(&device->mutex);
    for (uint32_t i = 0; i < due; i++) {
        struct hifc_io *io = qpair->ready[i];
        qpair->inflight--;
        io->done(io);
    }
    return (int)due;
}

void hifc_faulty_qpair_close(struct hifc_qpair *base)
{
    struct hifc_faulty_qpair *qpair = (struct hifc_faulty_qpair *)base;
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base->device;
    if (hifc_forked_since(base->device->fork_generation)) {
        return;
    }
    pthread_mutex_lock(&device->mutex);
    struct hifc_faulty_qpair **link = &device->qpairs;
    while (*link != qpair) {
        link = &(*link)->next;
    }
    *link = qpair->next;
    pthread_mutex_unlock(&device->mutex);
    for (uint32_t i = 0; i < qpair->pending_count; i++) {
        struct hifc_io *io = qpair->pending[i].io;
        if (!io->error) {
            hifc_io_set(io, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
        }
        io->done(io);
    }
    free(qpair->ready);
    free(qpair);
}

int hifc_faulty_event_fd(struct hifc_qpair *qpair)
{
    (void)qpair;
    return -1;
}
