/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h - what engine.c (intake and rounds), queue.c (transfers to commands and back),
 * reactor.c (the thread) and blockio.c share.
 *
 * "The driving thread" is the reactor, or inline whoever holds `driving`. Everything without
 * _Atomic belongs to it.
 */
#ifndef HIFC_ENGINE_INTERNAL_H
#define HIFC_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/engine.h"

#define HIFC_SUBMIT_BATCH 32u
/* A chunk is at most this, so that it is still in cache when its checksum is computed, and a read
 * never waits for more than this of a write. */
#define HIFC_CHUNK_MAX_BYTES (1u << 20)
#define HIFC_DEALLOCATE_MAX_BYTES (1u << 30)
/* While reads wait or are in flight, writes may only have about this much in flight: enough to
 * keep flash busy, too little to stand in a read's way for long. */
#define HIFC_WRITE_BESIDE_READS_BYTES (1u << 20)
/* Background reads in flight: alone on the queue pair enough to keep flash busy, beside other reads
 * about one command, and none is issued while another read waits. They are cut smaller and leave
 * half of the commands free, so that a read that comes finds room and waits for little. */
#define HIFC_BACKGROUND_BYTES (1u << 20)
#define HIFC_BACKGROUND_BESIDE_READS_BYTES (256u << 10)
#define HIFC_BACKGROUND_CHUNK_BYTES (256u << 10)
/* Losses of a queue pair without one command that succeeded in between, after which it is not
 * opened again. */
#define HIFC_QPAIR_REOPENS_MAX 4u

struct hifc_command {
    struct hifc_io io; /* first: the device hands this back */
    struct hifc_queue *queue;
};

struct hifc_waiting {
    struct hifc_xfer *head, *tail;
};

/* A queue pair and what waits for it. A transfer stands in its list until its last chunk is
 * staged; only the one at the head of a list can be partly issued. */
struct hifc_queue {
    struct hifc_engine *engine;
    struct hifc_qpair *qpair; /* NULL: lost for good, or closed */
    int lost;                 /* then: what every transfer ends with */
    uint32_t losses;          /* since a command last succeeded */
    struct hifc_waiting waiting[2]; /* [1]: background */
    uint32_t taken[2];              /* commands staged or in flight, likewise */
    uint64_t background_bytes;      /* of taken[1] */
    struct hifc_io *free;
    uint32_t inflight; /* commands that the device has */
    uint64_t inflight_bytes;
    uint32_t staged_count; /* built; the device had no room for them yet */
    struct hifc_io *staged[HIFC_SUBMIT_BATCH];
    struct hifc_command *commands; /* as many as the queue is deep */
};

struct hifc_engine_counters {
    _Atomic uint64_t read_bytes, write_bytes, read_commands, write_commands, flush_commands;
    _Atomic uint64_t deallocate_commands, error_count, poll_count, poll_empty_count;
};

struct hifc_engine {
    struct hifc_device *device;
    struct hifc_engine_opts opts;
    uint32_t chunk_bytes;
    struct hifc_queue reads, writes; /* flush and deallocate go with the writes */
    struct hifc_xfer *ended_head, *ended_tail; /* done, and not called back yet */
    uint64_t next_tick_ms;
    struct hifc_engine_counters counters; /* written by the driving thread alone */
    /* reactor.c */
    pthread_t thread;
    int wake_fd;
    /* What submitting threads write, on a line of its own. */
    _Alignas(64) _Atomic(struct hifc_xfer *) intake; /* newest first */
    _Atomic bool driving;  /* inline: the try-lock */
    _Atomic bool sleeping; /* reactor: must be woken */
    _Atomic bool stopping;
};

static inline void hifc_count(_Atomic uint64_t *counter, uint64_t by)
{
    /* One writer: no need for a locked addition. */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + by,
                          memory_order_relaxed);
}

/* ---- queue.c ---- */
int hifc_queue_open(struct hifc_engine *engine, struct hifc_queue *queue);
/* Ends everything with error: what waits at once, what is in flight as the queue pair closes. */
void hifc_queue_close(struct hifc_queue *queue, int error);
void hifc_queue_add(struct hifc_queue *queue, struct hifc_xfer *xfer);
/* Hands up to limit commands to the device; returns how many it took. Calls nobody back. */
uint32_t hifc_queue_issue(struct hifc_queue *queue, uint32_t limit);
/* Returns how many commands completed; more than none where the queue pair was lost. */
uint32_t hifc_queue_poll(struct hifc_queue *queue);

static inline bool hifc_queue_busy(const struct hifc_queue *queue)
{
    return queue->inflight || queue->waiting[0].head || queue->waiting[1].head ||
           queue->staged_count;
}

/* ---- engine.c ---- */
/* The driving thread's work once: gather, issue, poll, call back, issue what that brought, tick. */
uint32_t hifc_engine_round(struct hifc_engine *engine);
void hifc_engine_end(struct hifc_engine *engine, struct hifc_xfer *xfer);

/* ---- reactor.c ---- */
int hifc_reactor_start(struct hifc_engine *engine);
void hifc_reactor_stop(struct hifc_engine *engine);
void hifc_reactor_wake(struct hifc_engine *engine);

#endif
