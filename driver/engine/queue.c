/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.c - one queue pair: transfers become commands, completions become transfers again.
 *
 * Commands live in an array as deep as the queue, so there is no allocation on the way and never
 * more in flight than that. A transfer ends when nothing of it is in flight and nothing is left to
 * issue; after a command failed, what was not issued is dropped and what is in flight awaited, so
 * memory is never given back while the device may still write to it.
 *
 * A flush is not a barrier. Submit it only after the writes that it must cover have completed.
 *
 * A queue pair that is lost is opened again, at once and at most HIFC_QPAIR_REOPENS_MAX times
 * without success in between; the commands that it took down have failed. Past that every transfer
 * ends with -ENODEV.
 *
 * Driving thread only.
 */
#include "engine/internal.h"

#include <errno.h>
#include <stdlib.h>

#include "util/error.h"
#include "util/invariant.h"

/* ---- ends ----------------------------------------------------------------------------------- */

static struct hifc_waiting *list_of(struct hifc_queue *queue, const struct hifc_xfer *xfer)
{
    return &queue->waiting[xfer->background];
}

static void pop_head(struct hifc_waiting *list)
{
    list->head = list->head->next;
    if (!list->head) {
        list->tail = NULL;
    }
}

static void end_if_idle(struct hifc_queue *queue, struct hifc_xfer *xfer)
{
    if (!xfer->inflight && list_of(queue, xfer)->head != xfer) {
        hifc_engine_end(queue->engine, xfer);
    }
}

/* Keeps the first error; nothing more of the transfer is issued. */
static void fail_xfer(struct hifc_queue *queue, struct hifc_xfer *xfer, int error)
{
    if (!xfer->error) {
        xfer->error = error;
        xfer->error_opcode = xfer->op;
        xfer->error_offset_bytes = xfer->offset_bytes;
        xfer->error_length_bytes = xfer->length_bytes < UINT32_MAX ? (uint32_t)xfer->length_bytes
                                                                   : UINT32_MAX;
    }
    if (list_of(queue, xfer)->head == xfer) {
        pop_head(list_of(queue, xfer));
    }
}

static void fail_command(struct hifc_queue *queue, struct hifc_xfer *xfer,
                         const struct hifc_io *io)
{
    hifc_count(&queue->engine->counters.error_count, 1);
    if (!xfer->error) {
        xfer->sct = io->sct;
        xfer->sc = io->sc;
        xfer->error = io->error;
        xfer->error_opcode = io->op;
        xfer->error_offset_bytes = io->offset_bytes;
        xfer->error_length_bytes = io->length_bytes;
    }
    fail_xfer(queue, xfer, io->error);
}

static void free_command(struct hifc_queue *queue, struct hifc_io *io)
{
    io->next = queue->free;
    queue->free = io;
}

/* A command of the transfer is over, or was taken back. */
static void end_command(struct hifc_queue *queue, struct hifc_xfer *xfer, struct hifc_io *io)
{
    queue->taken[xfer->background]--;
    queue->background_bytes -= xfer->background ? io->length_bytes : 0;
    free_command(queue, io);
    end_if_idle(queue, xfer);
}

/* From within the device's poll or qpair_close. */
static void command_done(struct hifc_io *io)
{
    struct hifc_queue *queue = ((struct hifc_command *)io)->queue;
    struct hifc_xfer *xfer = io->owner;
    hifc_count_down(queue->inflight, 1u);
    hifc_count_down(queue->inflight_bytes, io->length_bytes);
    hifc_count_down(xfer->inflight, 1u);
    if (io->error) {
        fail_command(queue, xfer, io);
    } else {
        queue->losses = 0;
        if (xfer->chunk && !xfer->error && io->op == HIFC_IO_READ) {
            xfer->chunk(xfer, io->offset_bytes - xfer->offset_bytes, io->iov, io->iov_count);
        }
    }
    end_command(queue, xfer, io);
}

/* A staged command is taken back. */
static void drop_command(struct hifc_queue *queue, struct hifc_io *io)
{
    struct hifc_xfer *xfer = io->owner;
    hifc_count_down(xfer->inflight, 1u);
    end_command(queue, xfer, io);
}

/* Ends what waits, with error. */
static void fail_waiting(struct hifc_queue *queue, int error)
{
    for (uint32_t i = 0; i < queue->staged_count; i++) {
        fail_xfer(queue, queue->staged[i]->owner, error);
    }
    for (uint32_t i = 0; i < queue->staged_count; i++) {
        drop_command(queue, queue->staged[i]);
    }
    queue->staged_count = 0;
    for (unsigned i = 0; i < 2; i++) {
        while (queue->waiting[i].head) {
            struct hifc_xfer *xfer = queue->waiting[i].head;
            fail_xfer(queue, xfer, error);
            end_if_idle(queue, xfer);
        }
    }
}

/* ---- chunks --------------------------------------------------------------------------------- */

/* Where the transfer's memory goes on, and for how many bytes without a gap. */
static uint8_t *next_run(const struct hifc_xfer *xfer, uint64_t *run_bytes)
{
    return hifc_span_at(&xfer->spans[xfer->span_index], xfer->span_position, run_bytes);
}

static void advance(struct hifc_xfer *xfer, uint64_t bytes)
{
    xfer->span_position += bytes;
    if (xfer->span_position == xfer->spans[xfer->span_index].bytes) {
        xfer->span_index++;
        xfer->span_position = 0;
    }
}

/* Takes bytes back from the end of io and of what was gathered. */
static void rewind_by(struct hifc_xfer *xfer, struct hifc_io *io, uint64_t bytes)
{
    for (uint64_t left = bytes; left;) {
        struct iovec *last = &io->iov[io->iov_count - 1];
        uint64_t part = left < last->iov_len ? left : last->iov_len;
        last->iov_len -= part;
        io->iov_count -= last->iov_len == 0;
        left -= part;
    }
    while (bytes) {
        if (xfer->span_position == 0) {
            xfer->span_position = xfer->spans[--xfer->span_index].bytes;
        }
        uint64_t part = bytes < xfer->span_position ? bytes : xfer->span_position;
        xfer->span_position -= part;
        bytes -= part;
    }
}

/* Fills the scatter list with at most want bytes; runs that touch become one element. Where each
 * element costs a command, it ends with the first that is whole blocks. */
static uint64_t gather(struct hifc_xfer *xfer, struct hifc_io *io, uint64_t want,
                       const struct hifc_geometry *geometry)
{
    uint64_t block_mask = geometry->one_element ? geometry->lba_bytes - 1 : UINT64_MAX;
    uint64_t got = 0;
    io->iov_count = 0;
    while (got < want && xfer->span_index < xfer->span_count) {
        uint64_t run_bytes;
        uint8_t *run = next_run(xfer, &run_bytes);
        run_bytes = run_bytes < want - got ? run_bytes : want - got;
        struct iovec *last = io->iov_count ? &io->iov[io->iov_count - 1] : NULL;
        if (last && (uint8_t *)last->iov_base + last->iov_len == run) {
            last->iov_len += run_bytes;
        } else if (io->iov_count == geometry->max_iov || (last && (got & block_mask) == 0)) {
            break;
        } else if (run_bytes) {
            io->iov[io->iov_count++] = (struct iovec){.iov_base = run, .iov_len = run_bytes};
        }
        got += run_bytes;
        advance(xfer, run_bytes);
    }
    return got;
}

/* The next chunk of a read or write. False: its memory does not fit the transfer or the device. */
static bool build_chunk(struct hifc_engine *engine, struct hifc_xfer *xfer, struct hifc_io *io)
{
    const struct hifc_geometry *geometry = &engine->device->geometry;
    uint64_t left = xfer->length_bytes - xfer->issued_bytes;
    uint64_t want = left < engine->chunk_bytes ? left : engine->chunk_bytes;
    if (xfer->background && want > HIFC_BACKGROUND_CHUNK_BYTES) {
        want = HIFC_BACKGROUND_CHUNK_BYTES;
    }
    if (geometry->boundary_bytes) {
        uint64_t past = io->offset_bytes & (geometry->boundary_bytes - 1);
        uint64_t room = geometry->boundary_bytes - past;
        want = want < room ? want : room;
    }
    uint64_t got = gather(xfer, io, want, geometry);
    if (got < want) {
        if (xfer->span_index == xfer->span_count) {
            return false; /* the spans are shorter than the transfer */
        }
        uint64_t excess = got & (geometry->lba_bytes - 1);
        rewind_by(xfer, io, excess);
        got -= excess;
    }
    uintptr_t bits = 0;
    for (uint32_t i = 0; i < io->iov_count; i++) {
        bits |= (uintptr_t)io->iov[i].iov_base | io->iov[i].iov_len;
    }
    io->length_bytes = (uint32_t)got;
    return got && !(bits & (geometry->buffer_align_bytes - 1));
}

/* Builds the next command of the transfer at the head, which leaves the list with its last one. */
static bool build(struct hifc_queue *queue, struct hifc_xfer *xfer, struct hifc_io *io)
{
    io->op = xfer->op;
    io->owner = xfer;
    io->error = 0;
    io->sct = io->sc = 0;
    io->offset_bytes = xfer->offset_bytes + xfer->issued_bytes;
    switch (xfer->op) {
    case HIFC_IO_READ:
    case HIFC_IO_WRITE:
        if (!build_chunk(queue->engine, xfer, io)) {
            return false;
        }
        break;
    case HIFC_IO_DEALLOCATE:
    case HIFC_IO_ALLOCATE: {
        uint64_t left = xfer->length_bytes - xfer->issued_bytes;
        io->iov_count = 0;
        io->length_bytes = left < HIFC_DEALLOCATE_MAX_BYTES ? (uint32_t)left
                                                            : HIFC_DEALLOCATE_MAX_BYTES;
        break;
    }
    default: /* flush has no range */
        io->iov_count = 0;
        io->offset_bytes = 0;
        io->length_bytes = 0;
        xfer->issued_bytes = xfer->length_bytes;
        break;
    }
    xfer->issued_bytes += io->length_bytes;
    xfer->inflight++;
    queue->taken[xfer->background]++;
    queue->background_bytes += xfer->background ? io->length_bytes : 0;
    if (xfer->issued_bytes == xfer->length_bytes) {
        pop_head(list_of(queue, xfer));
    }
    return true;
}

/* ---- issue and poll ------------------------------------------------------------------------- */

/* What goes next: background only where nothing else waits, and within its bounds. */
static struct hifc_xfer *next_xfer(const struct hifc_queue *queue)
{
    struct hifc_xfer *background = queue->waiting[1].head;
    if (queue->waiting[0].head || !background) {
        return queue->waiting[0].head;
    }
    uint64_t most_bytes = queue->taken[0] ? HIFC_BACKGROUND_BESIDE_READS_BYTES
                                          : HIFC_BACKGROUND_BYTES;
    uint32_t most = (queue->engine->opts.queue_depth + 1) / 2;
    return queue->background_bytes < most_bytes && queue->taken[1] < most ? background : NULL;
}

static void stage(struct hifc_queue *queue, uint32_t limit)
{
    struct hifc_xfer *xfer;
    while (queue->staged_count < limit && queue->free && (xfer = next_xfer(queue))) {
        struct hifc_io *io = queue->free;
        if (xfer->length_bytes == 0 && xfer->op != HIFC_IO_FLUSH) {
            pop_head(list_of(queue, xfer)); /* nothing to do */
            end_if_idle(queue, xfer);
        } else if (build(queue, xfer, io)) {
            queue->free = io->next;
            queue->staged[queue->staged_count++] = io;
        } else {
            fail_xfer(queue, xfer, -EINVAL);
            end_if_idle(queue, xfer);
        }
    }
}

/* Staged commands whose transfer has failed meanwhile are not worth sending. */
static void drop_failed(struct hifc_queue *queue)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < queue->staged_count; i++) {
        struct hifc_io *io = queue->staged[i];
        if (((struct hifc_xfer *)io->owner)->error) {
            drop_command(queue, io);
        } else {
            queue->staged[kept++] = io;
        }
    }
    queue->staged_count = kept;
}

static void count_command(struct hifc_queue *queue, const struct hifc_io *io)
{
    struct hifc_engine_counters *counters = &queue->engine->counters;
    queue->inflight++;
    queue->inflight_bytes += io->length_bytes;
    switch (io->op) {
    case HIFC_IO_READ:
        hifc_count(&counters->read_commands, 1);
        hifc_count(&counters->read_bytes, io->length_bytes);
        break;
    case HIFC_IO_WRITE:
        hifc_count(&counters->write_commands, 1);
        hifc_count(&counters->write_bytes, io->length_bytes);
        break;
    case HIFC_IO_FLUSH:
        hifc_count(&counters->flush_commands, 1);
        break;
    case HIFC_IO_DEALLOCATE:
        hifc_count(&counters->deallocate_commands, 1);
        break;
    default: /* allocate moves nothing */
        break;
    }
}

/* Returns how many the device took. */
static uint32_t submit_staged(struct hifc_queue *queue)
{
    struct hifc_engine *engine = queue->engine;
    uint32_t taken = engine->device->ops->submit(queue->qpair, queue->staged,
                                                 queue->staged_count);
    for (uint32_t i = 0; i < taken; i++) {
        count_command(queue, queue->staged[i]);
    }
    hifc_count_down(queue->staged_count, taken);
    for (uint32_t i = 0; i < queue->staged_count; i++) {
        queue->staged[i] = queue->staged[taken + i];
    }
    return taken;
}

uint32_t hifc_queue_issue(struct hifc_queue *queue, uint32_t limit)
{
    if (queue->lost) {
        fail_waiting(queue, queue->lost);
        return 0;
    }
    uint32_t issued = 0;
    if (queue->staged_count) {
        drop_failed(queue);
    }
    while (issued < limit) {
        uint32_t room = limit - issued;
        stage(queue, room < HIFC_SUBMIT_BATCH ? room : HIFC_SUBMIT_BATCH);
        if (!queue->staged_count) {
            break;
        }
        issued += submit_staged(queue);
        if (queue->staged_count) {
            break; /* the device is full */
        }
    }
    return issued;
}

void hifc_queue_add(struct hifc_queue *queue, struct hifc_xfer *xfer)
{
    struct hifc_waiting *list = list_of(queue, xfer);
    xfer->next = NULL;
    if (list->tail) {
        list->tail->next = xfer;
    } else {
        list->head = xfer;
    }
    list->tail = xfer;
}

/* ---- the queue pair ------------------------------------------------------------------------- */

static int open_qpair(struct hifc_queue *queue)
{
    struct hifc_engine *engine = queue->engine;
    return engine->device->ops->qpair_open(engine->device, engine->opts.queue_depth,
                                           engine->opts.command_timeout_ms, &queue->qpair);
}

static void close_qpair(struct hifc_queue *queue)
{
    if (queue->qpair) {
        queue->engine->device->ops->qpair_close(queue->qpair);
        queue->qpair = NULL;
    }
}

static void reopen(struct hifc_queue *queue)
{
    close_qpair(queue);
    if (queue->losses++ == HIFC_QPAIR_REOPENS_MAX || open_qpair(queue) != 0) {
        queue->qpair = NULL;
        queue->lost = -ENODEV;
    }
}

uint32_t hifc_queue_poll(struct hifc_queue *queue)
{
    if (!queue->inflight) {
        return 0;
    }
    int completed = queue->engine->device->ops->poll(queue->qpair);
    if (completed < 0) {
        reopen(queue);
        return 1;
    }
    return (uint32_t)completed;
}

int hifc_queue_open(struct hifc_engine *engine, struct hifc_queue *queue)
{
    uint32_t depth = engine->opts.queue_depth;
    queue->engine = engine;
    queue->commands = aligned_alloc(64, (depth * sizeof *queue->commands + 63) & ~(size_t)63);
    if (!queue->commands) {
        return hifc_fail(-ENOMEM, "%s: out of memory for %u commands", engine->device->uri, depth);
    }
    for (uint32_t i = depth; i-- > 0;) {
        struct hifc_command *command = &queue->commands[i];
        command->io = (struct hifc_io){.done = command_done};
        command->queue = queue;
        free_command(queue, &command->io);
    }
    return open_qpair(queue);
}

void hifc_queue_close(struct hifc_queue *queue, int error)
{
    queue->lost = error;
    if (!queue->engine) {
        return; /* never opened */
    }
    fail_waiting(queue, error);
    close_qpair(queue);
}
