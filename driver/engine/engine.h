/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.h - between a namespace and its device: transfers of any length become commands.
 *
 * A transfer is one contiguous range of the device and a list of spans of memory. The engine
 * splits it at max_transfer_bytes, keeps reads and writes on queue pairs of their own, feeds reads
 * first and writes a chunk at a time, and calls back as each chunk and at last the transfer ends.
 * Background reads, which nobody waits for, go when no other read waits, and few of them at a time.
 *
 * Transfers in flight are unordered. To read back or flush a write, wait for its done callback first.
 * done is called exactly once, also when the queue pair is lost (-EIO, -ENODEV) or the engine is
 * destroyed (-ECANCELED), and never from within submit; it may submit the transfer again.
 *
 * It is driven either by the reactor, a thread that spins for spin_us without work and then
 * sleeps, or inline by whoever waits, one at a time under a try-lock. Callbacks run on the driving
 * thread with no lock held. hifc_engine_submit may be called from any thread and from callbacks; it
 * never blocks and never fails (who submits bounds how many transfers exist).
 */
#ifndef HIFC_ENGINE_H
#define HIFC_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "util/span.h"

struct hifc_engine;

struct hifc_xfer {
    struct hifc_xfer *next;      /* links a chain given to submit; the engine's afterwards */
    const struct hifc_span *spans; /* owner keeps them until done */
    uint32_t span_count;
    uint8_t op;                  /* enum hifc_io_op */
    bool background;             /* read only: it never goes before one that is not */
    uint8_t sct, sc;             /* out: of the first command that failed */
    uint8_t error_opcode;        /* out: enum hifc_io_op of it */
    int32_t error;               /* out: 0 or negative errno */
    uint64_t error_offset_bytes; /* out: its place on the device */
    uint32_t error_length_bytes;
    uint64_t offset_bytes;       /* on the device */
    uint64_t length_bytes;       /* equal to the sum of the spans; multiple of lba_bytes */
    /* Read only, may be NULL: [position, +bytes) of the transfer has arrived in iov, still in
     * cache. Chunks come in any order, and not after one failed. */
    void (*chunk)(struct hifc_xfer *xfer, uint64_t position, const struct iovec *iov,
                  uint32_t iov_count);
    void (*done)(struct hifc_xfer *xfer);
    void *owner;
    /* the engine's own */
    uint64_t issued_bytes;
    uint32_t span_index;
    uint32_t inflight;
    uint64_t span_position;
};

/* Whatever the device: no queue pair of any takes more. */
#define HIFC_QUEUE_DEPTH_MAX 4096u

struct hifc_engine_opts {
    bool reactor;
    uint32_t queue_depth;
    uint32_t command_timeout_ms;
    uint32_t spin_us;
    /* Called by the driving thread after a poll in which transfers ended: one lock for all. */
    void (*batch_end)(void *owner);
    /* Called by the driving thread before each round, unless NULL: looks where work comes in that
     * nobody submits, and returns how much of it was found. */
    uint32_t (*gather)(void *owner);
    /* Called by the reactor as it goes to sleep, with gather: for how many ns it may, 0 where there
     * is something to gather already. */
    uint64_t (*sleep_max_ns)(void *owner);
    /* Called by the driving thread about every tick_ms, also when idle under the reactor. */
    void (*tick)(void *owner);
    uint32_t tick_ms;
    void *owner;
};

struct hifc_engine_stats {
    uint64_t read_bytes, write_bytes, read_commands, write_commands, flush_commands;
    uint64_t deallocate_commands, error_count, poll_count, poll_empty_count;
};

/* The engine uses, and does not own, the device. */
int hifc_engine_create(struct hifc_device *device, const struct hifc_engine_opts *opts,
                       struct hifc_engine **out);
/* Nothing may be in flight, or it is failed with -ECANCELED first. Stops the reactor. */
void hifc_engine_destroy(struct hifc_engine *engine);
void hifc_engine_submit(struct hifc_engine *engine, struct hifc_xfer *chain);
/* Inline: polls once under the try-lock, -EBUSY if another thread is polling (then it does the
 * caller's work, too). Reactor: 0. Returns the count of commands completed and of what was
 * gathered. */
int hifc_engine_poll(struct hifc_engine *engine);
/* There is something to gather: wakes the reactor if it sleeps. Inline: nothing. */
void hifc_engine_wake(struct hifc_engine *engine);
bool hifc_engine_is_reactor(const struct hifc_engine *engine);
void hifc_engine_stats_get(const struct hifc_engine *engine, struct hifc_engine_stats *out);

/* ---- blocking I/O for open, format, recovery and reclaim (blockio.c) ------------------------- */

/* Reads and writes whole pages through an engine and waits, with its own bounce memory where the
 * device wants registered memory. Any thread but the driving one. */
struct hifc_blockio;

int hifc_blockio_create(struct hifc_device *device, struct hifc_engine *engine,
                        struct hifc_blockio **out);
void hifc_blockio_destroy(struct hifc_blockio *io);
/* offset and size: multiples of a page. memory: any. Large reads keep several commands in flight. */
int hifc_blockio_read(struct hifc_blockio *io, uint64_t offset_bytes, void *memory,
                      uint64_t size_bytes);
/* count pieces of each_bytes (a page to HIFC_BLOCKIO_PIECE_MAX_BYTES) at their own offsets, one behind
 * the other in memory, several in flight. Fails as a whole. */
#define HIFC_BLOCKIO_PIECE_MAX_BYTES (256u << 10)
int hifc_blockio_read_many(struct hifc_blockio *io, const uint64_t *offsets_bytes, uint32_t count,
                           void *memory, uint32_t each_bytes);
int hifc_blockio_write(struct hifc_blockio *io, uint64_t offset_bytes, const void *memory,
                       uint64_t size_bytes);
int hifc_blockio_flush(struct hifc_blockio *io);
int hifc_blockio_deallocate(struct hifc_blockio *io, uint64_t offset_bytes, uint64_t size_bytes);
/* Makes sure that the range has room on a thin device; its contents, which nobody may need any
 * more, may be zeroed. -ENOSPC: there is none. Does nothing on a device that is not thin. */
int hifc_blockio_allocate(struct hifc_blockio *io, uint64_t offset_bytes, uint64_t size_bytes);
struct hifc_device *hifc_blockio_device(struct hifc_blockio *io);

/* ---- buffer pool (pool.c) -------------------------------------------------------------------- */

#define HIFC_POOLS_MAX 64u

/* Pools by number: 0 is the namespace's own (memfd of huge pages where there are some, registered
 * with the device), others are the caller's memory. Thread-safe. */
struct hifc_pools;

int hifc_pools_create(struct hifc_device *device, uint64_t size_bytes, struct hifc_pools **out);
void hifc_pools_destroy(struct hifc_pools *pools);
/* Takes all memory back from the device, which may then be closed; the memory of pool 0 stays
 * mapped. Only end, take_back, unhold and destroy may follow. */
void hifc_pools_release(struct hifc_pools *pools);
int hifc_pools_alloc(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset);
int hifc_pools_free(struct hifc_pools *pools, uint64_t offset);
/* The same for the library's own use, and false without an error where there is no room. */
bool hifc_pools_try(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset);
/* Takes memory at the end of pool 0 for good, which then does not count as used: call it before
 * anything else is taken. Returns how many bytes, 0 where there are not that many. */
uint64_t hifc_pools_keep(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset);
/* The same for the caller's buffers: what requests may name, and all that take_back takes. */
int hifc_pools_lend(struct hifc_pools *pools, uint64_t size_bytes, uint64_t *offset);
int hifc_pools_take_back(struct hifc_pools *pools, uint64_t offset);
/* As long as there is a hold, buffers that were taken back are not handed out again. */
void hifc_pools_hold(struct hifc_pools *pools);
void hifc_pools_unhold(struct hifc_pools *pools);
/* After release: nothing is lent any more, and pool 0 is unmapped as soon as no buffer is lent. */
void hifc_pools_end(struct hifc_pools *pools);
int hifc_pools_register(struct hifc_pools *pools, void *base, uint64_t size_bytes, uint32_t *pool);
/* A retired pool is no outside input's any more (resolve_lent), but still there for what names it
 * already. */
int hifc_pools_retire(struct hifc_pools *pools, uint32_t pool, bool retired);
/* The caller has made sure that no request uses it. */
int hifc_pools_unregister(struct hifc_pools *pools, uint32_t pool);
/* NULL if [offset, +bytes) does not lie within the pool. Lock-free. */
uint8_t *hifc_pools_resolve(struct hifc_pools *pools, uint32_t pool, uint64_t offset,
                            uint64_t bytes);
/* For outside input: NULL also where pages of pool 0 are not lent, or the pool is retired. */
uint8_t *hifc_pools_resolve_lent(struct hifc_pools *pools, uint32_t pool, uint64_t offset,
                                 uint64_t bytes);
void hifc_pools_usage(const struct hifc_pools *pools, uint64_t *used_bytes, uint64_t *peak_bytes,
                      uint64_t *size_bytes);
/* What the caller's buffers hold. */
uint64_t hifc_pools_lent_bytes(struct hifc_pools *pools);
/* True where pool 0 is of huge pages, false where it fell back to ordinary ones. */
bool hifc_pools_huge(const struct hifc_pools *pools);

#endif
