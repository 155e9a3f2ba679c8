/* SPDX-License-Identifier: Apache-2.0
 *
 * ns.h - the insides of an open namespace, shared by the files of this folder only.
 *
 * Invariants
 *   - an index slot that is neither PENDING nor QUARANTINED names bytes that a batch header of the
 *     same segment and generation carries under the same key;
 *   - batches of a segment become visible and are acknowledged in the order of their headers;
 *   - a segment is freed only when no slot names it, nobody reads it (pins), no lease holds it, and
 *     what replaced its entries has been flushed;
 *   - whatever is added to an open segment leaves room for its summary and footer.
 *
 * Threads. `mutex` guards everything below it. It is taken once per submitted and once per completed
 * batch, and never held across I/O. Engine callbacks (chunk, done) run on the driving thread
 * without it; they touch their own operation or batch and the two `done` lists, which belong to
 * the driving thread, and ns_batch_end then takes it once for all of them. The janitor (a thread
 * with the reactor, else whoever submits or waits) does what blocks: sealing, reclaim, expiry.
 */
#ifndef HIFC_NS_H
#define HIFC_NS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"
#include "format/layout.h"
#include "hifc.h"
#include "namespace/admission.h"
#include "namespace/checksum_tables.h"
#include "namespace/events.h"
#include "namespace/index.h"
#include "namespace/leases.h"
#include "namespace/pages.h"
#include "namespace/part_counts.h"
#include "namespace/segment_set.h"
#include "util/error.h"

/* NVMe opcodes, for error messages */
#define NS_OPCODE_WRITE 0x01u
#define NS_OPCODE_READ 0x02u

/* ---- bounds --------------------------------------------------------------------------------- */

#define NS_BATCHES_MAX 128u           /* forming or in flight */
#define NS_BATCH_SPANS_MAX (1u + 2u * HIFC_BATCH_ENTRIES_MAX)
#define NS_SEGMENTS_RESERVE 3u        /* kept back from puts: reclaim and delete always have room */
#define NS_SEGMENTS_LOW 2u            /* reclaim starts when so few are left above the reserve */
#define NS_CLOSING_MAX 8u             /* full segments that wait for their reservations or seal */
#define NS_APPEND_ATTEMPTS_MAX 2u     /* a put is written to this many segments before it fails */
#define NS_OP_CRCS_INLINE 16u
#define NS_TICK_MS 100u
#define NS_ROOM_STALE_NS 100000000ull /* then somebody may have freed room on the disk */
#define NS_RECLAIM_DEAD_MAX 64

enum ns_state {
    NS_FREE,
    NS_OPEN,       /* appended to */
    NS_CLOSING,    /* full; waits for batches in flight, reservations, then its seal */
    NS_SEALED,
    NS_RECLAIMING, /* its entries are being moved or evicted */
    NS_DAMAGED     /* its header is unreadable: not used, counted, left as it is */
};

enum ns_stream { NS_STREAM_REUSE, NS_STREAM_SWAP, NS_STREAM_REUSE_MOVED, NS_STREAM_SWAP_MOVED,
                 NS_STREAMS };

struct ns_open;

struct ns_segment {
    uint64_t generation;
    uint64_t open_sequence;
    uint64_t live_bytes; /* extents that slots name, pending ones included */
    uint32_t live_entries;
    uint32_t used_bytes; /* where the next batch begins */
    uint32_t payload_bytes; /* extents placed in it, live or dead */
    uint32_t metadata_bytes;
    uint32_t tombstones; /* in its summary */
    uint32_t pins;    /* reads in flight, replaced values whose successor is in flight */
    uint32_t leases;
    uint8_t state; /* enum ns_state, changed by ns_segment_enter only */
    uint8_t cls;   /* enum hifc_class */
    bool has_room; /* for all of its pages, known since it was opened for appending: room.c */
    bool stuck;    /* reclaim failed on it for good: left alone until the next open */
    struct ns_open *open; /* OPEN and CLOSING only */
    /* SEALED, but its summary could not be written: kept here. */
    struct hifc_summary_entry *entries;
    uint32_t entry_count;
};

struct ns_batch;

/* The writing side of a segment. */
struct ns_open {
    struct hifc_ns *ns;
    struct ns_open *next;      /* ns->open_list */
    struct ns_open *next_done; /* driving thread's */
    uint32_t segment;
    uint8_t stream;
    bool header_done;
    bool failed;
    uint32_t chain;        /* checksum of the last closed header */
    uint32_t batch_count;  /* closed */
    uint32_t entry_count_max; /* entries it may end with: written, forming, reserved */
    uint32_t reservations; /* outstanding */
    uint32_t inflight;     /* batches closed and not yet completed */
    struct ns_batch *forming;
    struct ns_batch *head, **tail; /* closed and not acknowledged, in order */
    struct hifc_summary_entry *entries;
    uint32_t entry_count, entry_capacity;
    uint64_t first_sequence, last_sequence;
    /* what is acknowledged: what the footer will say */
    uint32_t acknowledged_chain, acknowledged_batches, acknowledged_bytes;
    struct hifc_segment_header *header;
    struct hifc_xfer header_xfer;
    struct hifc_span header_span;
};

enum ns_op_kind { NS_OP_PUT, NS_OP_MOVE, NS_OP_TOMBSTONE, NS_OP_PUBLISH, NS_OP_READ, NS_OP_WRITE };

struct ns_reservation;
struct ns_fetch; /* prefetch.h */

/* One request in flight, one entry being moved by the janitor, or one read for a request ring. */
struct ns_op {
    struct hifc_ns *ns;
    struct ns_op *next;
    struct hifc_req *req;       /* NULL: a move; read at dispatch alone, written by ns_answer */
    struct hifc_ticket *ticket; /* NULL: a move, or for a ring */
    struct ns_fetch *fetch;     /* whose part it is, for a ring; else NULL */
    void (*read_done)(struct hifc_ns *ns, struct ns_op *op, int status); /* NULL: ns_answer */
    uint32_t callers_pool;      /* whose memory it names, or 0: see ns_callers_pool */
    uint32_t *checksums_out;    /* a read that is not verified here: where the expected ones go */
    struct hifc_key key;
    uint8_t kind;
    uint8_t cls;
    uint8_t attempts;
    bool has_previous;
    int32_t status;
    uint32_t length;
    uint32_t part_count;
    uint32_t checksum; /* bound */
    uint32_t segment;
    uint32_t offset; /* units of 16 bytes within the segment */
    struct hifc_slot previous; /* what a put replaces, what a move moves */
    struct ns_reservation *reservation;
    /* memory */
    struct hifc_span payload;
    uint8_t *tail; /* value's last partial page, checksum table */
    uint32_t tail_bytes;
    uint32_t body_bytes; /* of the value, moved without a copy */
    struct hifc_span spans[2];
    struct hifc_xfer xfer;
    /* reads */
    struct hifc_xfer table_xfer;
    struct hifc_span table_span;
    uint8_t *table_memory; /* pages that hold the table */
    uint32_t table_memory_bytes;
    uint32_t pending;      /* transfers */
    uint32_t value_offset; /* asked for */
    uint32_t want_bytes;
    uint32_t cover_offset; /* read: whole parts */
    uint32_t cover_bytes;
    uint32_t first_part, parts;
    uint8_t *bounce;
    uint32_t bounce_bytes;
    bool packed, expected_known, corrupt;
    uint32_t *computed; /* raw CRC of each covered part */
    uint32_t *expected;
    uint32_t crcs_inline[2 * NS_OP_CRCS_INLINE];
};

/* A command that the device failed: what an error message is made of. */
struct ns_command {
    uint8_t sct, sc, opcode; /* NVMe opcode */
    int32_t error;
    uint64_t offset_bytes;
    uint32_t length_bytes;
};

struct ns_batch {
    struct ns_batch *next;        /* within its segment */
    struct ns_batch *next_global; /* by sequence */
    struct ns_batch *next_done;   /* driving thread's */
    struct ns_open *open;
    struct ns_op *ops, **ops_tail; /* in entry order */
    uint64_t sequence;
    uint32_t offset;      /* within the segment */
    uint32_t bytes;       /* header, payloads, reserved room */
    uint32_t write_bytes; /* without the reserved room, which stands last */
    uint32_t entry_count;
    uint32_t span_count;
    uint32_t pending; /* transfers */
    uint32_t holders; /* its segment, and from its close on the list by sequence */
    bool completed;
    int32_t error;
    struct ns_command failed; /* its first failed command */
    struct hifc_batch_header *header;
    uint8_t *packed; /* page that small values are packed into, and how much of it is taken */
    uint32_t packed_offset, packed_used;
    uint32_t page_count;
    void *pages[HIFC_BATCH_ENTRIES_MAX];
    struct hifc_xfer xfer;
    struct hifc_span spans[NS_BATCH_SPANS_MAX];
};

enum ns_reservation_state { NS_RESERVATION_UNUSED, NS_RESERVATION_OPEN, NS_RESERVATION_COMMITTING };

struct ns_reservation {
    uint8_t state;
    bool failed;
    uint8_t cls;
    uint32_t lap; /* handle = lap << 32 | index + 1 */
    uint32_t index;
    struct hifc_key key;
    uint32_t segment;
    uint32_t offset;
    uint32_t length;
    uint32_t part_count;
    uint32_t unit_bytes; /* of `written`: a part, or a page where there is one part */
    uint32_t units, units_written;
    uint32_t writes_inflight;
    uint64_t deadline_ns;
    uint8_t *written; /* a byte a unit */
    uint32_t *crcs;   /* raw, a part */
    uint8_t *tail;
    uint32_t tail_bytes, body_bytes;
    struct ns_op *commit; /* waits for writes in flight */
    uint32_t next_free;
};

enum ns_ticket_state {
    NS_TICKET_FREE,
    NS_TICKET_OWNED,    /* by whoever submitted, who gives it back */
    NS_TICKET_ABANDONED /* nobody waits: the last answer frees it, no request is written to */
};

struct hifc_ticket {
    struct hifc_ns *ns;
    struct hifc_ticket *next_free;
    _Atomic uint32_t remaining; /* futex */
    _Atomic uint32_t waiters;
    int fd;
    uint8_t state;    /* enum ns_ticket_state */
    uint8_t first_op; /* enum hifc_op of its first request */
    struct hifc_ticket_info info;
    uint64_t start_ns;
};

struct ns_prefetch; /* prefetch.h */

struct hifc_ns {
    struct hifc_device *device;
    struct hifc_engine *engine;
    struct hifc_pools *pools;
    struct hifc_blockio *io;         /* the janitor's, and open's and close's */
    struct hifc_owner *owner;
    struct hifc_superblock sb;
    struct hifc_open_opts opts;
    uint64_t fork_generation;
    uint32_t segment_size;
    bool read_only;
    bool reactor;
    _Atomic bool closed;      /* no new visits */
    _Atomic uint32_t visits;  /* calls of the public interface under way */
    /* Of the one thread that shuts down: the owner's until close has stopped it, then close's. */
    bool ended;               /* sealed as far as it goes, and the device released */
    struct hifc_error end;    /* then: the result of that, code 0 where all went well */
    int64_t close_timeout_us; /* how long shutting down waits for each of calls, requests, rings */
    /* Requests that name a caller's pool, from before it is resolved to the answer. */
    _Atomic uint32_t pool_requests[HIFC_POOLS_MAX];
    char uri[1024];

    /* the driving thread's, without the mutex */
    struct ns_op *done_ops, **done_ops_tail;
    struct ns_batch *done_batches, **done_batches_tail;
    struct ns_open *done_headers;
    uint64_t read_bounce_bytes;

    pthread_mutex_t mutex; /* by ns_lock and ns_unlock only */
    const void *holder;    /* whoever holds it: an address that belongs to one thread */
    bool opening;          /* one thread knows of the namespace: no mutex is needed */
    pthread_cond_t changed; /* completions, segments freed; waited for by sync, drain, janitor */
    struct hifc_index *index;
    struct ns_segment *segments;
    uint32_t segment_count;
    struct ns_segment_set free_set;
    struct ns_segment_set roomless_set; /* free as well, but without room on a thin device: room.c */
    uint64_t room_failed_ns; /* when room for one was last asked for in vain */
    struct ns_open *streams[NS_STREAMS]; /* the open segment of each, or NULL */
    struct ns_open *open_list;
    uint32_t closing_count;
    uint64_t sequence;           /* of the last closed batch */
    uint64_t completed_sequence; /* all up to it have completed */
    uint64_t flushed_sequence;   /* all up to it are on stable media */
    struct ns_batch *global_head, **global_tail;
    struct hifc_xfer *issue, **issue_tail; /* gathered under the mutex, submitted after it */

    struct ns_op *ops, *free_ops;
    struct ns_batch *batches, *free_batches;
    struct hifc_ticket *tickets, *free_tickets;
    uint32_t tickets_count;
    uint32_t requests_inflight;
    struct ns_pages pages;
    struct ns_part_counts part_counts;
    struct ns_checksum_tables tables;
    struct ns_reservation *reservations;
    uint32_t reservation_free, reservation_used;
    uint32_t reservation_count;
    struct ns_leases leases;
    struct ns_events events;
    uint64_t expired_ns; /* inline: when expiry was last looked at */
    struct ns_admission admission;
    int64_t reinsert_credit_bytes;
    uint64_t entries_swap;
    struct hifc_stats stats; /* counters; hifc_stats fills in the rest */
    struct hifc_error last_device_error;
    char *published; /* JSON, or NULL */

    /* janitor */
    pthread_t janitor;
    bool janitor_thread;
    bool janitor_stop;
    _Atomic bool janitor_wanted; /* also looked at without the mutex */
    bool janitor_running;
    bool segment_wanted;    /* a stream found no free segment: what may be evicted must go */
    bool index_full;        /* a put found no slot: reclaim, whatever space is left */
    bool reclaim_exhausted; /* the last pass found nothing that may go; cleared when that changes */

    /* request rings: prefetch.h tells whose what is */
    struct ns_prefetch *prefetch;
};

/* ---- visit.c: who is inside, and who holds the mutex ---------------------------------------- */
void ns_lock(struct hifc_ns *ns);
void ns_unlock(struct hifc_ns *ns);
/* Sleeps on `changed` until then at most. Mutex held before and after. */
void ns_sleep(struct hifc_ns *ns, const struct timespec *until);
/* What "mutex held" in a comment says, as code: at the entry of what changes shared state. */
void ns_assert_locked(const struct hifc_ns *ns);
/* A call of the public interface: 0, -ESHUTDOWN with the reason (closed, detached), or -ECHILD (in a
 * child of fork()). Device and engine stay until the visit ends, with the scope of the variable:
 *     struct hifc_ns *visit NS_VISIT = NULL;
 *     int error = ns_enter(ns, &visit);
 */
#define NS_VISIT __attribute__((cleanup(ns_leave)))
int ns_enter(struct hifc_ns *ns, struct hifc_ns **visit);
void ns_leave(struct hifc_ns **visit);
/* Waits a little for something to change: polls when inline, else sleeps on `changed`. Mutex held. */
void ns_wait_changed(struct hifc_ns *ns);

/* ---- caller_memory.c ------------------------------------------------------------------------ */
/* The memory of a request for bytes bytes, or NULL with the error set. */
uint8_t *ns_resolve(struct hifc_ns *ns, const struct hifc_req *req, uint64_t bytes);
/* The same for count checksums, given or wanted. */
uint8_t *ns_checksum_memory(struct hifc_ns *ns, const struct hifc_req *req, uint32_t count);

/* ---- durability.c --------------------------------------------------------------------------- */
int ns_sync(struct hifc_ns *ns);
int ns_drain(struct hifc_ns *ns, int64_t timeout_us);
/* Flushes the device and moves the flushed mark to what had completed before. */
int ns_flush(struct hifc_ns *ns);
/* Closes forming batches and waits until every batch closed so far has completed. */
int ns_settle(struct hifc_ns *ns, int64_t timeout_us);

/* ---- memory.c: operations, batches, pages; mutex held --------------------------------------- */
int ns_memory_create(struct hifc_ns *ns);
void ns_memory_destroy(struct hifc_ns *ns);
struct ns_op *ns_op_alloc(struct hifc_ns *ns);
void ns_op_init(struct ns_op *op);
void ns_op_free(struct hifc_ns *ns, struct ns_op *op); /* and its tail, bounce, tables */
struct ns_batch *ns_batch_alloc(struct hifc_ns *ns);
/* Frees it when its last holder lets go. */
void ns_batch_release(struct hifc_ns *ns, struct ns_batch *batch);
void ns_issue(struct hifc_ns *ns, struct hifc_xfer *xfer);
/* The failed command of a transfer, and its error in words. */
struct ns_command ns_failed_command(const struct hifc_xfer *xfer, uint8_t opcode);
void ns_command_error(struct hifc_ns *ns, const struct ns_command *command,
                      struct hifc_error *out);
/* Submits what was gathered; call with the mutex held, returns with it released. */
void ns_unlock_and_issue(struct hifc_ns *ns);

/* The caller's pool whose memory a request names, or 0. */
static inline uint32_t ns_callers_pool(const struct hifc_req *req)
{
    bool names = req->op == HIFC_OP_GET || req->op == HIFC_OP_PUT || req->op == HIFC_OP_WRITE;
    return names && req->pool < HIFC_POOLS_MAX ? req->pool : 0;
}

/* ---- ticket.c ------------------------------------------------------------------------------- */
int ns_tickets_create(struct hifc_ns *ns);
void ns_tickets_destroy(struct hifc_ns *ns);
/* Mutex held. first_op: enum hifc_op of the first of them, for the histograms of latency. */
struct hifc_ticket *ns_ticket_alloc(struct hifc_ns *ns, uint32_t requests, uint8_t first_op);
/* Answers a request: mutex held. Wakes who waits when it was the ticket's last. callers_pool: the
 * pool that the request was counted for. The request is written to unless its ticket was
 * abandoned, and never read. */
void ns_answer(struct hifc_ns *ns, struct hifc_ticket *ticket, struct hifc_req *req,
               uint32_t callers_pool, int status, uint64_t bytes, const struct hifc_error *error);

static inline bool ns_ticket_is_done(const struct hifc_ticket *ticket)
{
    return atomic_load_explicit(&ticket->remaining, memory_order_acquire) == 0;
}
/* Gives a ticket back that is done. Mutex held. */
void ns_ticket_recycle(struct hifc_ticket *ticket);

/* ---- room.c: room of free segments on a thin device; the janitor's thread, blocks ----------- */
/* So few are ready, with this many more, that the janitor has work. Mutex held. */
bool ns_room_low(const struct hifc_ns *ns, uint32_t more);
/* What becomes of the room of a segment whose header says free: kept, or given back. True: it may
 * go on the free list. */
bool ns_room_of_freed(struct hifc_ns *ns, uint32_t segment, bool keep);
/* A segment that is free now. Mutex held. */
void ns_free_add(struct hifc_ns *ns, uint32_t segment, bool has_room);
/* Makes room for one more free segment: false when there is none to make it for, or no room. */
bool ns_room_one(struct hifc_ns *ns);

/* ---- segments.c: mutex held ----------------------------------------------------------------- */
uint64_t ns_segment_base(const struct hifc_ns *ns, uint32_t segment);
/* The one place where a segment changes its state; asserts that it may, and may from where it is. */
void ns_segment_enter(struct hifc_ns *ns, uint32_t segment, enum ns_state to);
/* Nothing of it is left but the generation: a segment whose header says free. */
void ns_segment_reset(struct hifc_ns *ns, uint32_t segment, uint64_t generation);
/* A read, or a value whose successor is in flight, keeps a segment from being freed. */
void ns_segment_pin(struct hifc_ns *ns, uint32_t segment);
void ns_segment_unpin(struct hifc_ns *ns, uint32_t segment);
/* Takes the lowest free segment; there is one. */
uint32_t ns_take_free(struct hifc_ns *ns);
/* Room in the segment's list of entries for one more than it may have to take: false if there is no
 * memory. */
bool ns_open_reserve_entry(struct ns_open *open);
bool ns_open_fits(const struct hifc_ns *ns, const struct ns_open *open, uint64_t bytes,
                  uint32_t entries, uint32_t reservations);
void ns_open_close(struct hifc_ns *ns, struct ns_open *open); /* OPEN -> CLOSING */
void ns_open_destroy(struct hifc_ns *ns, struct ns_open *open);
void ns_segment_live(struct hifc_ns *ns, uint32_t segment, uint32_t length, uint32_t part_count);
void ns_segment_dead(struct hifc_ns *ns, uint32_t segment, uint32_t length, uint32_t part_count);
void ns_slot_dead(struct hifc_ns *ns, const struct hifc_slot *slot);
/* Whether a slot (or NULL) names the value at that place, and no successor of it is in flight. */
static inline bool ns_slot_at(const struct hifc_slot *slot, uint32_t segment, uint32_t offset)
{
    return slot && slot->segment == segment && slot->offset == offset &&
           !(slot->flags & HIFC_SLOT_PENDING);
}
/* HIFC_OK, HIFC_MISS or HIFC_PENDING, of a slot or NULL. */
int ns_slot_answer(const struct hifc_slot *slot);
uint32_t ns_slot_parts(const struct hifc_ns *ns, const struct hifc_slot *slot);
void ns_want_janitor(struct hifc_ns *ns);
/* No slot was left for a key. The answer: Retry, or NoSpace where nothing may be evicted. */
int ns_index_full(struct hifc_ns *ns);

/* ---- batch.c: mutex held, except where it says otherwise ------------------------------------ */
/* The forming batch of a segment, a new one if there is none. NULL: too many are in flight. */
struct ns_batch *ns_batch_forming(struct hifc_ns *ns, struct ns_open *open);
/* Whether the next extent goes to another batch. */
bool ns_batch_full(const struct hifc_ns *ns, const struct ns_batch *batch, uint64_t extent);
void ns_batch_grow(struct hifc_ns *ns, struct ns_batch *batch, uint32_t bytes, bool written);
struct hifc_disk_entry *ns_batch_entry(struct ns_batch *batch, const struct hifc_key *key,
                                       enum hifc_entry_kind kind);
/* A small value into a page that it shares. Returns its offset, 0 when there is no memory. */
uint32_t ns_batch_pack(struct hifc_ns *ns, struct ns_batch *batch, struct ns_op *op,
                       uint32_t extent);
/* A value on pages of its own. Returns its offset. */
uint32_t ns_batch_place(struct hifc_ns *ns, struct ns_batch *batch, struct ns_op *op,
                        uint32_t extent);
/* Gives a forming batch its sequence and sends it out. */
void ns_batch_close(struct hifc_ns *ns, struct ns_batch *batch);
/* Closes forming batches that may go out: all when force, else those under batch_inflight. */
void ns_close_forming(struct hifc_ns *ns, bool force);
/* Callback of a batch's transfers: driving thread, no mutex. */
void ns_batch_xfer_done(struct hifc_xfer *xfer);

/* ---- streams.c: mutex held ------------------------------------------------------------------ */
/* The stream's segment with room for one more entry of extent bytes in batch-forming order, opening
 * or rolling over as needed. status: HIFC_RETRY or HIFC_NO_SPACE where NULL. */
struct ns_open *ns_stream_open(struct hifc_ns *ns, unsigned stream, uint64_t extent_bytes,
                               bool reserve, int *status);

/* ---- append.c ------------------------------------------------------------------------------- */
/* Adds op (put, move, tombstone) to its stream: 0, or HIFC_RETRY, HIFC_NO_SPACE. Mutex held. */
int ns_append(struct hifc_ns *ns, struct ns_op *op, unsigned stream);
/* Adds a publish entry to the segment of op->reservation. Mutex held. */
int ns_append_publish(struct hifc_ns *ns, struct ns_op *op);
/* Takes room for a reservation. Mutex held. */
int ns_append_reserved(struct hifc_ns *ns, struct ns_reservation *reservation, unsigned stream);

/* ---- acknowledge.c -------------------------------------------------------------------------- */
void ns_batches_completed(struct hifc_ns *ns, struct ns_batch *list);
void ns_headers_completed(struct hifc_ns *ns, struct ns_open *list);

/* ---- get.c: mutex held ---------------------------------------------------------------------- */
/* An operation for a request, or NULL when all are in use. */
struct ns_op *ns_op_for(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket);
/* Starts a get, for a ticket or with op for a ring: HIFC_IN_FLIGHT, or its answer. */
int ns_get(struct hifc_ns *ns, struct hifc_req *req, struct hifc_ticket *ticket, struct ns_op *op);

/* ---- read.c --------------------------------------------------------------------------------- */
/* Starts a get: 0 when in flight, else its answer. Mutex held. */
int ns_read_start(struct hifc_ns *ns, struct ns_op *op, const struct hifc_req *req, uint8_t *base);
void ns_read_completed(struct hifc_ns *ns, struct ns_op *op); /* mutex held */

/* ---- reserve.c: mutex held ------------------------------------------------------------------ */
int ns_reservations_create(struct hifc_ns *ns);
void ns_reservations_destroy(struct hifc_ns *ns);
int ns_reserve(struct hifc_ns *ns, struct hifc_req *req);
/* crcs: raw CRC of each unit of the range (parts, or the whole range where there is one part). */
int ns_reservation_write(struct hifc_ns *ns, struct ns_op *op, const struct hifc_req *req,
                         const uint32_t *crcs, uint32_t crc_count);
int ns_reservation_commit(struct hifc_ns *ns, struct ns_op *op, uint64_t handle);
int ns_reservation_abort(struct hifc_ns *ns, uint64_t handle);
struct ns_reservation *ns_reservation_find(struct hifc_ns *ns, uint64_t handle);
void ns_reservation_write_completed(struct hifc_ns *ns, struct ns_op *op);
/* The segment of these reservations cannot be written any more. */
void ns_reservations_fail(struct hifc_ns *ns, uint32_t segment);
void ns_reservations_expire(struct hifc_ns *ns, uint64_t now_ns);
void ns_reservation_release(struct hifc_ns *ns, struct ns_reservation *reservation);

/* ---- seal.c --------------------------------------------------------------------------------- */
/* Seals a CLOSING segment at rest, whose payloads have been flushed (error: of that flush); blocks.
 * No mutex held. */
int ns_seal(struct hifc_ns *ns, struct ns_open *open, int error);
/* Writes summary and footer of a segment: what seal and recovery share. Blocks. */
int ns_seal_write(struct hifc_ns *ns, uint32_t segment, struct hifc_footer *footer,
                  const struct hifc_summary_entry *entries, uint32_t entry_count);

/* ---- janitor.c, reclaim.c ------------------------------------------------------------------- */
int ns_janitor_start(struct hifc_ns *ns);
void ns_janitor_stop(struct hifc_ns *ns);
/* Inline: does what waits to be done. No mutex held. */
void ns_janitor_inline(struct hifc_ns *ns);
/* In between, the janitor stands still and its place is the caller's. Not nested. */
void ns_janitor_pause(struct hifc_ns *ns);
void ns_janitor_resume(struct hifc_ns *ns);
/* Frees up to NS_RECLAIM_DEAD_MAX segments in which nothing is live; blocks. The count freed, or
 * negative errno. */
int ns_reclaim_dead(struct hifc_ns *ns);
/* Overwrites the segment's header as free, with the next generation; not flushed. Blocks. */
int ns_write_free_header(struct hifc_ns *ns, uint32_t segment);
/* Empties one segment and frees it; blocks. 1: progress, 0: nothing may go,
 * -EAGAIN: not now, another negative errno: never. */
int ns_reclaim_one(struct hifc_ns *ns);
/* Reads the summary of a sealed segment; *entries is the caller's to free. */
int ns_summary_read(struct hifc_ns *ns, uint32_t segment, struct hifc_summary_entry **entries,
                    uint32_t *entry_count);

/* ---- open.c --------------------------------------------------------------------------------- */
int ns_recover(struct hifc_ns *ns);

#endif
