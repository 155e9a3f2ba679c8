/* SPDX-License-Identifier: Apache-2.0
 *
 * blockio.c - reads and writes that wait, for open, format, recovery and reclaim.
 *
 * A call is cut into pieces of SLOT_BYTES, of which SLOTS are in flight: enough for any device's
 * bandwidth, little enough that the reads of requests are not held up behind a whole segment. A
 * piece moves directly where the device takes the caller's memory (page-aligned, registration not
 * demanded), otherwise by way of its slot's share of one bounce region.
 *
 * A call returns only when none of its pieces is in flight, so the caller's memory is its own
 * again. The device bounds every command; should one never come back all the same, the call ends
 * with -ETIMEDOUT and every later one with -EIO, and destroy leaks what the device may still touch.
 *
 * Any thread but the driving one; a mutex lets one call at a time in.
 */
#define _GNU_SOURCE /* sem_clockwait */
#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/internal.h"
#include "engine/region.h"
#include "util/clock.h"
#include "util/error.h"

#define SLOTS 8u
#define SLOT_BYTES HIFC_BLOCKIO_PIECE_MAX_BYTES
#define COMMAND_TIMEOUT_MS_DEFAULT 30000u
/* Inline: empty polls with yields in between before it naps instead. */
#define YIELDS_MAX 200u
#define NAP_NS 20000l

_Static_assert(SLOTS * SLOT_BYTES == HIFC_HUGE_PAGE_BYTES, "the bounce memory is one huge page");

struct slot {
    struct hifc_xfer xfer; /* owner: the blockio */
    struct hifc_span span;
    uint8_t *bounce_to; /* where a read's bytes go; NULL: they are there */
    bool busy;
    _Atomic bool done;
};

struct hifc_blockio {
    struct hifc_device *device;
    struct hifc_engine *engine;
    pthread_mutex_t mutex; /* one call at a time */
    sem_t ended;           /* one post for each transfer that ended */
    struct hifc_region bounce;
    bool broken; /* a transfer never came back */
    struct slot slots[SLOTS];
};

/* ---- waiting --------------------------------------------------------------------------------- */

/* How long nothing at all may come back. */
static uint64_t wait_max_ms(const struct hifc_blockio *io)
{
    uint64_t timeout_ms = io->engine->opts.command_timeout_ms;
    uint64_t chunks = SLOTS * (SLOT_BYTES / io->engine->chunk_bytes + 1);
    return (timeout_ms ? timeout_ms : COMMAND_TIMEOUT_MS_DEFAULT) * (chunks + 1);
}

static int wait_reactor(struct hifc_blockio *io)
{
    struct timespec until = hifc_after_ns((wait_max_ms(io) + 1000) * 1000000);
    while (sem_clockwait(&io->ended, CLOCK_MONOTONIC, &until) != 0) {
        if (errno != EINTR) {
            return -ETIMEDOUT;
        }
    }
    return 0;
}

static int wait_inline(struct hifc_blockio *io)
{
    uint64_t until_ms = hifc_now_ms() + wait_max_ms(io);
    unsigned empty = 0;
    while (sem_trywait(&io->ended) != 0) {
        if (hifc_engine_poll(io->engine) > 0) {
            empty = 0;
        } else if (empty++ < YIELDS_MAX) {
            sched_yield();
        } else if (hifc_now_ms() > until_ms) {
            return -ETIMEDOUT;
        } else {
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        }
    }
    return 0;
}

/* The next slot that ended. Exactly one post is taken for each, so that none is under way when the
 * semaphore goes. NULL: nothing comes back any more. */
static struct slot *wait_slot(struct hifc_blockio *io)
{
    int rc = io->engine->opts.reactor ? wait_reactor(io) : wait_inline(io);
    for (unsigned i = 0; rc == 0 && i < SLOTS; i++) {
        if (io->slots[i].busy && atomic_load(&io->slots[i].done)) {
            return &io->slots[i];
        }
    }
    return NULL;
}

/* On the driving thread. */
static void slot_done(struct hifc_xfer *xfer)
{
    struct slot *slot = (struct slot *)xfer;
    struct hifc_blockio *io = xfer->owner;
    atomic_store(&slot->done, true);
    sem_post(&io->ended);
}

/* ---- one call; the mutex is held ------------------------------------------------------------- */

struct call {
    enum hifc_io_op op;
    uint64_t offset_bytes;
    const uint64_t *offsets_bytes; /* not NULL: of pieces of each_bytes, in place of offset_bytes */
    uint32_t each_bytes;
    uint8_t *memory;
    uint64_t size_bytes;
    uint64_t started_bytes;
    uint32_t inflight;
    bool bounce;
    struct hifc_xfer failed; /* the first that did; error 0: none */
};

static void start_slot(struct hifc_blockio *io, struct slot *slot, struct call *call)
{
    uint64_t left = call->size_bytes - call->started_bytes;
    uint64_t bytes = !call->memory || left < SLOT_BYTES ? left : SLOT_BYTES;
    uint64_t place = call->offset_bytes + call->started_bytes;
    if (call->offsets_bytes) {
        bytes = call->each_bytes;
        place = call->offsets_bytes[call->started_bytes / bytes];
    }
    uint8_t *memory = call->memory ? call->memory + call->started_bytes : NULL;
    slot->bounce_to = NULL;
    if (call->bounce) {
        uint8_t *bounce = io->bounce.base + (slot - io->slots) * SLOT_BYTES;
        if (call->op == HIFC_IO_WRITE) {
            memcpy(bounce, memory, bytes);
        } else {
            slot->bounce_to = memory;
        }
        memory = bounce;
    }
    slot->span = (struct hifc_span){.base = memory, .bytes = memory ? bytes : 0};
    slot->xfer = (struct hifc_xfer){.spans = &slot->span, .span_count = 1, .op = call->op,
                                    .offset_bytes = place, .length_bytes = bytes,
                                    .done = slot_done, .owner = io};
    slot->busy = true;
    atomic_store(&slot->done, false);
    call->started_bytes += bytes;
    call->inflight++;
    hifc_engine_submit(io->engine, &slot->xfer);
}

static void end_slot(struct slot *slot, struct call *call)
{
    if (slot->xfer.error && !call->failed.error) {
        call->failed = slot->xfer;
    } else if (!slot->xfer.error && slot->bounce_to) {
        memcpy(slot->bounce_to, slot->span.base, slot->span.bytes);
    }
    slot->busy = false;
    call->inflight--;
}

static int fail_call(struct hifc_blockio *io, const struct hifc_xfer *failed)
{
    static const uint8_t opcodes[] = {[HIFC_IO_READ] = 0x02, [HIFC_IO_WRITE] = 0x01,
                                      [HIFC_IO_FLUSH] = 0x00, [HIFC_IO_DEALLOCATE] = 0x09,
                                      [HIFC_IO_ALLOCATE] = 0x08}; /* write zeroes */
    uint32_t lba_bytes = io->device->geometry.lba_bytes;
    return hifc_fail_command(failed->error, failed->sct, failed->sc,
                             opcodes[failed->error_opcode], failed->error_offset_bytes / lba_bytes,
                             failed->error_length_bytes / lba_bytes, lba_bytes, io->device->uri);
}

static int run(struct hifc_blockio *io, struct call *call)
{
    if (io->broken) {
        return hifc_fail(-EIO, "%s: a command never came back earlier; close and open again",
                         io->device->uri);
    }
    bool more = true; /* a flush has no bytes */
    while (more || call->inflight) {
        for (unsigned i = 0; more && i < SLOTS; i++) {
            if (!io->slots[i].busy) {
                start_slot(io, &io->slots[i], call);
                more = call->started_bytes < call->size_bytes;
            }
        }
        struct slot *slot = wait_slot(io);
        if (!slot) {
            io->broken = true;
            return hifc_fail(-ETIMEDOUT, "%s: no command came back for %llu ms; the device broke "
                             "its own command timeout", io->device->uri,
                             (unsigned long long)wait_max_ms(io));
        }
        end_slot(slot, call);
        more = more && !call->failed.error;
    }
    return call->failed.error ? fail_call(io, &call->failed) : 0;
}

static int transfer(struct hifc_blockio *io, struct call *call)
{
    const struct hifc_geometry *geometry = &io->device->geometry;
    if ((call->offset_bytes | call->size_bytes) % HIFC_PAGE_BYTES) {
        return hifc_fail(-EINVAL, "%s: %llu bytes at %llu are not whole pages", io->device->uri,
                         (unsigned long long)call->size_bytes,
                         (unsigned long long)call->offset_bytes);
    }
    if (call->size_bytes == 0) {
        return 0;
    }
    uint32_t align = geometry->buffer_align_bytes > HIFC_PAGE_BYTES ? geometry->buffer_align_bytes
                                                                    : HIFC_PAGE_BYTES;
    call->bounce = geometry->registered_only || (uintptr_t)call->memory % align;
    pthread_mutex_lock(&io->mutex);
    int rc = 0;
    if (call->bounce && !io->bounce.base) {
        rc = hifc_region_create(io->device, HIFC_HUGE_PAGE_BYTES, "hifc bounce memory",
                                &io->bounce);
    }
    rc = rc ? rc : run(io, call);
    pthread_mutex_unlock(&io->mutex);
    return rc;
}

/* ---- the functions --------------------------------------------------------------------------- */

int hifc_blockio_read(struct hifc_blockio *io, uint64_t offset_bytes, void *memory,
                      uint64_t size_bytes)
{
    struct call call = {.op = HIFC_IO_READ, .offset_bytes = offset_bytes, .memory = memory,
                        .size_bytes = size_bytes};
    return transfer(io, &call);
}

int hifc_blockio_read_many(struct hifc_blockio *io, const uint64_t *offsets_bytes, uint32_t count,
                           void *memory, uint32_t each_bytes)
{
    struct call call = {.op = HIFC_IO_READ, .offsets_bytes = offsets_bytes, .memory = memory,
                        .each_bytes = each_bytes, .size_bytes = (uint64_t)count * each_bytes};
    uint64_t odd = each_bytes == 0 || each_bytes > SLOT_BYTES ? 1 : each_bytes;
    for (uint32_t i = 0; i < count; i++) {
        odd |= offsets_bytes[i];
    }
    if (odd % HIFC_PAGE_BYTES) {
        return hifc_fail(-EINVAL, "%s: %u pieces of %u bytes are not each whole pages, at most %u "
                         "bytes", io->device->uri, count, each_bytes, SLOT_BYTES);
    }
    return transfer(io, &call);
}

int hifc_blockio_write(struct hifc_blockio *io, uint64_t offset_bytes, const void *memory,
                       uint64_t size_bytes)
{
    struct call call = {.op = HIFC_IO_WRITE, .offset_bytes = offset_bytes,
                        .memory = (uint8_t *)memory, .size_bytes = size_bytes};
    return transfer(io, &call);
}

static int without_memory(struct hifc_blockio *io, struct call *call)
{
    pthread_mutex_lock(&io->mutex);
    int rc = run(io, call);
    pthread_mutex_unlock(&io->mutex);
    return rc;
}

int hifc_blockio_flush(struct hifc_blockio *io)
{
    struct call call = {.op = HIFC_IO_FLUSH};
    return without_memory(io, &call);
}

int hifc_blockio_deallocate(struct hifc_blockio *io, uint64_t offset_bytes, uint64_t size_bytes)
{
    struct call call = {.op = HIFC_IO_DEALLOCATE, .offset_bytes = offset_bytes,
                        .size_bytes = size_bytes};
    return without_memory(io, &call);
}

/* The file system has no command for it: what is written has room, once it is flushed. */
static int write_zeros(struct hifc_blockio *io, uint64_t offset_bytes, uint64_t size_bytes)
{
    uint8_t *zeros = aligned_alloc(HIFC_PAGE_BYTES, SLOT_BYTES);
    if (!zeros) {
        return hifc_fail(-ENOMEM, "%s: no memory to write zeros", io->device->uri);
    }
    memset(zeros, 0, SLOT_BYTES);
    int rc = 0;
    for (uint64_t done = 0; done < size_bytes && !rc; done += SLOT_BYTES) {
        uint64_t left = size_bytes - done;
        rc = hifc_blockio_write(io, offset_bytes + done, zeros,
                                left < SLOT_BYTES ? left : SLOT_BYTES);
    }
    free(zeros);
    return rc ? rc : hifc_blockio_flush(io);
}

int hifc_blockio_allocate(struct hifc_blockio *io, uint64_t offset_bytes, uint64_t size_bytes)
{
    if (!io->device->geometry.thin) {
        return 0;
    }
    struct call call = {.op = HIFC_IO_ALLOCATE, .offset_bytes = offset_bytes,
                        .size_bytes = size_bytes};
    int rc = without_memory(io, &call);
    return rc == -ENOTSUP ? write_zeros(io, offset_bytes, size_bytes) : rc;
}

struct hifc_device *hifc_blockio_device(struct hifc_blockio *io)
{
    return io->device;
}

int hifc_blockio_create(struct hifc_device *device, struct hifc_engine *engine,
                        struct hifc_blockio **out)
{
    struct hifc_blockio *io = calloc(1, sizeof *io);
    if (!io) {
        return hifc_fail(-ENOMEM, "%s: out of memory for blocking I/O", device->uri);
    }
    io->device = device;
    io->engine = engine;
    if (device->geometry.registered_only) {
        int rc = hifc_region_create(device, HIFC_HUGE_PAGE_BYTES, "hifc bounce memory",
                                    &io->bounce);
        if (rc) {
            free(io);
            return rc;
        }
    }
    pthread_mutex_init(&io->mutex, NULL);
    sem_init(&io->ended, 0, 0);
    *out = io;
    return 0;
}

void hifc_blockio_destroy(struct hifc_blockio *io)
{
    if (!io || io->broken) {
        return; /* leaked: the device may still write to it */
    }
    hifc_region_destroy(io->device, &io->bounce);
    sem_destroy(&io->ended);
    pthread_mutex_destroy(&io->mutex);
    free(io);
}
