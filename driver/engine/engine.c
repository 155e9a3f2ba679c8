/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.c - intake, the order of reads and writes, and calling back.
 *
 * Submitting threads push whole chains on a stack without a lock; the driving thread takes it all
 * and reverses it, so what one thread submits is issued in its order. Transfers that end are
 * collected and called back once the poll is over, never from within submit or the device.
 *
 * Inline, submit also issues if nobody drives at the moment. It must not call back there (its
 * caller may hold the lock that callbacks take), so a transfer that ends while it is issued, with
 * a queue pair lost, waits for the next poll.
 */
#include "engine/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/clock.h"
#include "util/error.h"

#define TICK_MS_DEFAULT 100u
/* Callbacks that answer -ECANCELED by submitting again are given up on after this many rounds. */
#define CANCEL_ROUNDS_MAX 1000u

/* ---- the driving thread ---------------------------------------------------------------------- */

void hifc_engine_end(struct hifc_engine *engine, struct hifc_xfer *xfer)
{
    xfer->next = NULL;
    if (engine->ended_tail) {
        engine->ended_tail->next = xfer;
    } else {
        engine->ended_head = xfer;
    }
    engine->ended_tail = xfer;
}

static void take_intake(struct hifc_engine *engine)
{
    if (!atomic_load_explicit(&engine->intake, memory_order_relaxed)) {
        return;
    }
    struct hifc_xfer *stack = atomic_exchange_explicit(&engine->intake, NULL,
                                                       memory_order_acquire);
    struct hifc_xfer *oldest = NULL;
    while (stack) {
        struct hifc_xfer *next = stack->next;
        stack->next = oldest;
        oldest = stack;
        stack = next;
    }
    while (oldest) {
        struct hifc_xfer *next = oldest->next;
        hifc_queue_add(oldest->op == HIFC_IO_READ ? &engine->reads : &engine->writes, oldest);
        oldest = next;
    }
}

/* How many write commands may go before reads are looked at again. */
static uint32_t write_allowance(const struct hifc_engine *engine)
{
    if (!hifc_queue_busy(&engine->reads)) {
        return HIFC_SUBMIT_BATCH;
    }
    return engine->writes.inflight_bytes < HIFC_WRITE_BESIDE_READS_BYTES ? 1 : 0;
}

static void issue(struct hifc_engine *engine)
{
    do {
        take_intake(engine);
        hifc_queue_issue(&engine->reads, UINT32_MAX);
    } while (hifc_queue_issue(&engine->writes, write_allowance(engine)));
}

static void call_back(struct hifc_engine *engine)
{
    struct hifc_xfer *xfer = engine->ended_head;
    if (!xfer) {
        return;
    }
    engine->ended_head = engine->ended_tail = NULL;
    while (xfer) {
        struct hifc_xfer *next = xfer->next;
        xfer->next = NULL; /* done may free it, or submit it: a chain of one */
        xfer->done(xfer);
        xfer = next;
    }
    if (engine->opts.batch_end) {
        engine->opts.batch_end(engine->opts.owner);
    }
}

static void tick(struct hifc_engine *engine)
{
    uint64_t now_ms = hifc_now_ms_coarse();
    if (now_ms >= engine->next_tick_ms) {
        engine->next_tick_ms = now_ms + engine->opts.tick_ms;
        engine->opts.tick(engine->opts.owner);
    }
}

uint32_t hifc_engine_round(struct hifc_engine *engine)
{
    uint32_t gathered = engine->opts.gather ? engine->opts.gather(engine->opts.owner) : 0;
    issue(engine);
    bool polled = engine->reads.inflight || engine->writes.inflight;
    uint32_t completed = hifc_queue_poll(&engine->reads);
    completed += hifc_queue_poll(&engine->writes);
    if (polled) {
        hifc_count(&engine->counters.poll_count, 1);
        hifc_count(&engine->counters.poll_empty_count, completed == 0);
    }
    call_back(engine);
    if (completed) {
        issue(engine);
    }
    if (engine->opts.tick) {
        tick(engine);
    }
    return completed + gathered;
}

/* ---- any thread ------------------------------------------------------------------------------ */

/* Issues what was submitted unless somebody drives, who then sees it: either this exchange fails
 * before the other's release, after which it looks at the intake, or it succeeds. */
static void issue_if_free(struct hifc_engine *engine)
{
    while (atomic_load(&engine->intake) && !atomic_exchange(&engine->driving, true)) {
        issue(engine);
        atomic_store(&engine->driving, false);
    }
}

void hifc_engine_submit(struct hifc_engine *engine, struct hifc_xfer *chain)
{
    struct hifc_xfer *oldest = chain, *newest = NULL;
    while (chain) {
        struct hifc_xfer *next = chain->next;
        chain->next = newest;
        chain->sct = chain->sc = chain->error_opcode = 0;
        chain->error = 0;
        chain->error_offset_bytes = 0;
        chain->error_length_bytes = 0;
        chain->issued_bytes = 0;
        chain->span_index = 0;
        chain->inflight = 0;
        chain->span_position = 0;
        newest = chain;
        chain = next;
    }
    if (!newest) {
        return;
    }
    struct hifc_xfer *top = atomic_load_explicit(&engine->intake, memory_order_relaxed);
    do {
        oldest->next = top;
    } while (!atomic_compare_exchange_weak(&engine->intake, &top, newest));
    if (engine->opts.reactor) {
        hifc_reactor_wake(engine);
    } else {
        issue_if_free(engine);
    }
}

int hifc_engine_poll(struct hifc_engine *engine)
{
    if (engine->opts.reactor) {
        return 0;
    }
    if (atomic_exchange(&engine->driving, true)) {
        return -EBUSY;
    }
    uint32_t completed = hifc_engine_round(engine);
    atomic_store(&engine->driving, false);
    issue_if_free(engine);
    return (int)completed;
}

void hifc_engine_wake(struct hifc_engine *engine)
{
    if (engine->opts.reactor) {
        hifc_reactor_wake(engine);
    }
}

bool hifc_engine_is_reactor(const struct hifc_engine *engine)
{
    return engine->opts.reactor;
}

void hifc_engine_stats_get(const struct hifc_engine *engine, struct hifc_engine_stats *out)
{
    const struct hifc_engine_counters *from = &engine->counters;
#define TAKE(field) out->field = atomic_load_explicit(&from->field, memory_order_relaxed)
    TAKE(read_bytes);
    TAKE(write_bytes);
    TAKE(read_commands);
    TAKE(write_commands);
    TAKE(flush_commands);
    TAKE(deallocate_commands);
    TAKE(error_count);
    TAKE(poll_count);
    TAKE(poll_empty_count);
#undef TAKE
}

/* ---- create and destroy ---------------------------------------------------------------------- */

static void cancel_all(struct hifc_engine *engine)
{
    hifc_queue_close(&engine->reads, -ECANCELED);
    hifc_queue_close(&engine->writes, -ECANCELED);
    for (unsigned i = 0; i < CANCEL_ROUNDS_MAX; i++) {
        issue(engine); /* ends what is in the intake: both queues are lost */
        if (!engine->ended_head) {
            break;
        }
        call_back(engine);
    }
}

void hifc_engine_destroy(struct hifc_engine *engine)
{
    if (!engine) {
        return;
    }
    if (engine->opts.reactor) {
        hifc_reactor_stop(engine);
    }
    atomic_store(&engine->driving, true); /* submit from a callback only pushes */
    cancel_all(engine);
    free(engine->reads.commands);
    free(engine->writes.commands);
    free(engine);
}

int hifc_engine_create(struct hifc_device *device, const struct hifc_engine_opts *opts,
                       struct hifc_engine **out)
{
    const struct hifc_geometry *geometry = &device->geometry;
    if (opts->queue_depth == 0 || opts->queue_depth > HIFC_QUEUE_DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%s: queue_depth %u; it must be 1 to %u", device->uri,
                         opts->queue_depth, HIFC_QUEUE_DEPTH_MAX);
    }
    struct hifc_engine *engine = aligned_alloc(64, sizeof *engine);
    if (!engine) {
        return hifc_fail(-ENOMEM, "%s: out of memory for the engine", device->uri);
    }
    memset(engine, 0, sizeof *engine);
    engine->device = device;
    engine->opts = *opts;
    engine->opts.reactor = false; /* until it runs */
    engine->opts.tick_ms = opts->tick_ms ? opts->tick_ms : TICK_MS_DEFAULT;
    engine->wake_fd = -1;
    engine->chunk_bytes = geometry->max_transfer_bytes < HIFC_CHUNK_MAX_BYTES
                              ? geometry->max_transfer_bytes
                              : HIFC_CHUNK_MAX_BYTES;
    engine->chunk_bytes &= ~(geometry->lba_bytes - 1);
    int rc = hifc_queue_open(engine, &engine->reads);
    rc = rc ? rc : hifc_queue_open(engine, &engine->writes);
    rc = rc || !opts->reactor ? rc : hifc_reactor_start(engine);
    if (rc) {
        hifc_engine_destroy(engine);
        return rc;
    }
    *out = engine;
    return 0;
}
