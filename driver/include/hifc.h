/* SPDX-License-Identifier: Apache-2.0
 *
 * hifc.h - the public interface of libhifc: a flat key-value namespace for the KV cache of a large
 * language model, on an NVMe device that this process drives itself.
 *
 * What ctypes, C and C++ programs link. Everything crosses this border in batches: an array of
 * `struct hifc_req` goes down in one call, a ticket counts what came back.
 *
 * Return values. A function returns 0 (or a count) or a negative errno; `hifc_last_error()` then
 * tells the calling thread what failed, where, and what to do. The `status` of a request is an
 * answer (`enum hifc_answer`, >= 0) or a negative errno:
 *   -EIO       the device failed a command (sct and sc in the ticket's first error)
 *   -EBADMSG   the stored bytes do not match their checksum; the buffer was zeroed
 *   -ESHUTDOWN the namespace was shut down or detached, -EINVAL the request makes no sense
 *
 * Threads. Every function may be called from any thread, except that closing must not race with
 * other calls on the same handle. After fork() every call in the child answers -ECHILD.
 *
 * Memory. A request names memory as (pool, offset), never by pointer. `hifc_buffer_alloc` hands
 * out pool 0: memory that the device reads and writes without a copy. Whatever else is in pool 0 is
 * the library's, and a request that names it is refused.
 */
#ifndef HIFC_H
#define HIFC_H

#include <stddef.h>
#include <stdint.h>

#include "hifc_ring.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HIFC_ABI_VERSION 2
#define HIFC_API __attribute__((visibility("default")))

#define HIFC_PAGE_BYTES 4096u
#define HIFC_VALUE_MAX_BYTES ((1u << 29) - 1)
#define HIFC_PARTS_MAX 65535u

struct hifc_ns;     /* an open namespace */
struct hifc_ticket; /* counts the completions of one submitted batch */

struct hifc_key {
    uint8_t bytes[16];
};

enum hifc_answer {
    HIFC_OK = 0,
    HIFC_MISS = 1,     /* no such key, or its bytes were quarantined (reuse) */
    HIFC_EXISTS = 2,   /* put of a reuse key that is there: nothing was written */
    HIFC_PENDING = 3,  /* the key's batch is in flight, or it is reserved and not committed */
    HIFC_REJECTED = 4, /* admission declined to write it */
    HIFC_RETRY = 5,    /* a bounded queue is full: try again after completions */
    HIFC_NO_SPACE = 6, /* nothing that may be evicted is left */
    HIFC_IN_FLIGHT = 7 /* not completed yet */
};

enum hifc_class {
    HIFC_REUSE = 0, /* evictable, survives a restart */
    HIFC_SWAP = 1   /* pinned until deleted, ends with the process that wrote it */
};

enum hifc_op {
    HIFC_OP_GET = 1, /* the range [value_offset, +length), or with length 0 the whole value */
    HIFC_OP_PUT = 2,
    HIFC_OP_DELETE = 3,
    HIFC_OP_RESERVE = 4, /* phase one of a two-phase put: key, cls, length, part_count -> handle */
    HIFC_OP_WRITE = 5,   /* the range [value_offset, +length) of a reservation, in any order */
    HIFC_OP_COMMIT = 6,  /* phase two: visible when it completes */
    HIFC_OP_ABORT = 7
};

/* hifc_req.flags */
#define HIFC_F_CHECKSUMS 0x1u /* put, write: raw part checksums are given at checksum_offset;      \
                                 get: they are not verified here, the expected ones are put there \
                                 (one uint32_t a part covered by the range) */

/* One request. 96 bytes, the same in every language. */
struct hifc_req {
    uint8_t op;               /* enum hifc_op */
    uint8_t cls;              /* enum hifc_class: put, reserve */
    uint16_t flags;           /* HIFC_F_* */
    int32_t status;           /* out: enum hifc_answer or negative errno */
    struct hifc_key key;      /* every op; write, commit and abort go by handle and ignore it */
    uint32_t pool;            /* memory of get, put, write */
    uint32_t part_count;      /* put, reserve: equal parts of the value, each verified alone; 0 = 1 */
    uint64_t buffer_offset;   /* first byte within the pool */
    uint32_t length;          /* bytes; get: 0 means the whole value, up to capacity */
    uint32_t value_offset;    /* get, write: first byte within the value */
    uint32_t piece_bytes;     /* the buffer is pieces of this many bytes ...; 0 = contiguous */
    uint32_t value_length;    /* out: length of the stored value, in bytes */
    uint64_t piece_stride;    /* ... each this many bytes after the start of the one before */
    uint64_t checksum_offset; /* HIFC_F_CHECKSUMS: offset of uint32_t[] in the pool, aligned */
    uint64_t handle;          /* reservation: out of reserve; in of write, commit, abort */
    uint64_t user;            /* the caller's, never touched */
    uint64_t capacity;        /* get with length 0: bytes that the buffer holds; a longer value
                                 answers -EMSGSIZE, with value_length set */
};

#define HIFC_ERROR_HOLDERS_MAX 8
struct hifc_error {
    int32_t code;      /* negative errno */
    uint8_t sct;       /* NVMe status code type, where a command failed */
    uint8_t sc;        /* NVMe status code */
    uint8_t opcode;    /* NVMe opcode of that command, or of its nearest relative */
    uint8_t checksums; /* 1: expected and found are known (-EBADMSG) */
    uint64_t lba;      /* first logical block of that command */
    uint32_t nlb;      /* its count of logical blocks */
    uint32_t lba_bytes;
    uint32_t expected; /* CRC-32C that was stored, of the value or its first part that differs */
    uint32_t found;    /* and that of the bytes that were read */
    uint32_t fix_at;   /* where in message it begins to say what to do; 0: it does not */
    uint32_t holder_count; /* processes that own the device (-EBUSY), as far as known */
    int32_t holders[HIFC_ERROR_HOLDERS_MAX]; /* their process ids */
    char message[480]; /* what failed, where, and what to do; NUL-terminated */
};

/* ---- the library ---------------------------------------------------------------------------- */

/* HIFC_ABI_VERSION of the library that was loaded, for bindings to compare with theirs. */
HIFC_API uint32_t hifc_abi_version(void);
/* Sizes of the structs above and below, for bindings to compare at load: by name, 0 if unknown. */
HIFC_API size_t hifc_sizeof(const char *struct_name);
/* Space-separated URI schemes that this build can open, e.g. "ram file spdk spdk+tcp". */
HIFC_API const char *hifc_schemes(void);
/* The calling thread's last error. Returns its code, 0 when there was none. */
HIFC_API int hifc_last_error(struct hifc_error *out);
/* Raw CRC-32C (initial value 0, no final inversion), the checksum that parts carry. */
HIFC_API uint32_t hifc_crc32c_raw(const void *data, size_t size_bytes);

/* ---- format, open, close -------------------------------------------------------------------- */

struct hifc_format_opts {
    uint64_t segment_size_bytes; /* power of two, 256 KiB to 256 MiB; 0 = chosen by device size */
    uint32_t force;              /* 1: overwrite a foreign signature or an existing namespace */
    uint32_t check_only;         /* 1: make every check and change nothing; the file must exist */
    char label[32];
};

/* Lays an empty namespace on the device. -EEXIST: something is there (named), and no force.
 * -EINVAL: the device is too small, too; -EFBIG: too large, for the namespace or for the file
 * system; -ENOSPC: the file system has no room. A format that fails leaves no file that was not
 * there before. */
HIFC_API int hifc_format(const char *uri, const struct hifc_format_opts *opts);

/* All that is known of a device ends within this far of its first or its last byte. */
#define HIFC_EDGE_BYTES (1u << 20)

/* Names what is on a device of size_bytes that this library has not opened, one a line into out:
 * file systems, partition tables, volume managers, RAID, encryption, swap, HiFC. head holds its
 * first edge_bytes, tail the last ones of its whole pages; edge_bytes is HIFC_EDGE_BYTES, or all
 * whole pages of a smaller device. Returns how many, 0 for none. -ENOSPC: out is too small. It is
 * what format asks before it writes. */
HIFC_API int hifc_signatures(const void *head, const void *tail, uint64_t edge_bytes,
                             uint64_t size_bytes, char *out, size_t out_bytes);

enum hifc_drive { HIFC_REACTOR = 0, HIFC_INLINE = 1 };
enum hifc_admission { HIFC_ADMIT_ALWAYS = 0, HIFC_ADMIT_SECOND_USE = 1, HIFC_ADMIT_BUDGET = 2 };

/* Zero means the default of every field. */
struct hifc_open_opts {
    uint32_t read_only;             /* changes nothing on the device */
    uint32_t drive;                 /* enum hifc_drive */
    uint64_t pool_size_bytes;       /* buffer pool; default 64 MiB, rounded up to 2 MiB */
    uint32_t queue_depth;           /* commands in flight of a queue pair, to 4096; default 128 */
    uint32_t requests_max;          /* requests in flight; above it the answer is Retry; 8192 */
    uint32_t batch_inflight;        /* batches in flight a stream before it coalesces more; 4 */
    uint32_t batch_size_max_bytes;  /* default 8 MiB */
    uint32_t reservations_max;      /* default 4096 */
    uint32_t reservation_timeout_ms; /* an older one is aborted; default 600000 */
    uint32_t leases_max;            /* default 4096 */
    uint32_t events_max;            /* ring of stored and evicted keys; default 65536 */
    uint64_t index_entries_max;     /* to 2^34; default: capacity / 4096, at least 2^20; full:
                                     evicts */
    uint32_t admission;             /* enum hifc_admission */
    uint32_t reinsert_percent_plus1; /* write budget of reinsertion, % of accepted bytes, plus 1; 6 */
    uint64_t write_budget_bytes_per_day; /* HIFC_ADMIT_BUDGET */
    uint32_t command_timeout_ms;    /* default 30000 */
    uint32_t spin_us;               /* reactor: polls this long without work before it sleeps; 50 */
    uint32_t no_owner_socket;       /* 1: do not listen for statistics, health and detach */
    uint32_t prefetch_inflight;     /* reads in flight for request rings; default 32 */
};

/* Opens the namespace on a device; opts may be NULL. *out is then the handle for everything below.
 * -ENOMEDIUM: there is no namespace on it. -EBUSY: another process owns it (see holders of the last
 * error). -EINVAL: the URI or an option makes no sense. -EUCLEAN: its superblocks are damaged. */
HIFC_API int hifc_open(const char *uri, const struct hifc_open_opts *opts, struct hifc_ns **out);
/* Seals what is open, marks the namespace clean and releases the device. Requests in flight complete
 * first. The handle stays: every later call answers -ESHUTDOWN, but for those that give something
 * back (tickets, buffers, rings), and buffers of pool 0 stay mapped until the last one is freed.
 * -EBUSY: a call of another thread did not return in time; nothing was sealed or released, and
 * shutdown is to be called again. Another nonzero result tells that something could not be written,
 * also where that happened when the owner's socket detached it before, and is given again. */
HIFC_API int hifc_shutdown(struct hifc_ns *ns);
/* Shuts down if that was not done, and frees the handle and all its memory, buffers of pool 0 as
 * well. -EBUSY as above, and nothing was freed: close again. No other call may be under way. */
HIFC_API int hifc_close(struct hifc_ns *ns);

/* ---- the device below ------------------------------------------------------------------------ */

#include "hifc_device.h"

/* ---- memory --------------------------------------------------------------------------------- */

/* One part in so many of pool 0 is never given out: without a page of its own the library could not
 * end a request, whose buffer then would never come back. */
#define HIFC_POOL_OWN_SHARE 16u

/* size_bytes rounded up to pages, page-aligned. -ENOMEM: the pool is full (pool_size_bytes; a part of
 * it is the library's). -EAGAIN: it is, and buffers of abandoned requests will come back. */
HIFC_API int hifc_buffer_alloc(struct hifc_ns *ns, uint64_t size_bytes, uint64_t *offset);
HIFC_API int hifc_buffer_free(struct hifc_ns *ns, uint64_t offset);
/* Bytes of pool 0 that buffers hold. */
HIFC_API uint64_t hifc_pool_lent(struct hifc_ns *ns);
HIFC_API void *hifc_pool_base(struct hifc_ns *ns, uint32_t pool, uint64_t *size_bytes);
/* Makes memory of the caller a pool. The device must be able to reach it: spdk devices want whole
 * 2 MiB, of huge pages or, on PCIe, of another device's BAR; others page alignment. Unregister waits
 * for requests that use it. -EBUSY: a request ring reads into it, close that first. */
HIFC_API int hifc_pool_register(struct hifc_ns *ns, void *base, uint64_t size_bytes,
                                uint32_t *pool);
HIFC_API int hifc_pool_unregister(struct hifc_ns *ns, uint32_t pool);

/* ---- requests ------------------------------------------------------------------------------- */

/* Submits count requests. The array belongs to the library until the ticket is done; each status
 * is HIFC_IN_FLIGHT until then. *out may be done already. Returns 0 also where single requests
 * failed; a negative errno means that none was taken. */
HIFC_API int hifc_submit(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count,
                         struct hifc_ticket **out);

struct hifc_ticket_info {
    uint32_t requests;
    uint32_t completed;
    uint32_t failed; /* status < 0 */
    uint32_t other;  /* answers other than HIFC_OK */
    uint64_t bytes;  /* moved for requests that ended HIFC_OK */
    uint64_t elapsed_ns; /* from submission to the last completion so far */
    struct hifc_error first_error;
};

/* 1 when done, 0 when not yet (timeout), negative errno. timeout_us < 0 waits without bound other
 * than the command timeout; 0 polls. */
HIFC_API int hifc_ticket_wait(struct hifc_ticket *ticket, int64_t timeout_us);
HIFC_API int hifc_ticket_info(struct hifc_ticket *ticket, struct hifc_ticket_info *out);
/* An eventfd, owned by the ticket, that becomes readable when it is done. Reactor only (-ENOTSUP
 * with HIFC_INLINE: nobody would poll). */
HIFC_API int hifc_ticket_fd(struct hifc_ticket *ticket);
/* Waits for the ticket if it is not done, then frees it. */
HIFC_API void hifc_ticket_free(struct hifc_ticket *ticket);
/* Waits as hifc_ticket_wait does. Once the ticket is done (1): *info, if not NULL, says how, the
 * ticket is freed and *ticket is NULL. 0 and a negative errno leave it as it was. */
HIFC_API int hifc_ticket_finish(struct hifc_ticket **ticket, int64_t timeout_us,
                                struct hifc_ticket_info *info);
/* hifc_submit of one request, then hifc_ticket_finish. 0: it is in flight, and finish goes on. */
HIFC_API int hifc_execute(struct hifc_ns *ns, struct hifc_req *req, int64_t timeout_us,
                          struct hifc_ticket **ticket, struct hifc_ticket_info *info);

/* ---- giving up ------------------------------------------------------------------------------- */

/* For callers that stop waiting: an exception, a signal handler, a garbage collector. Each call gives
 * one thing back and takes the variable that held it, which is NULL (or HIFC_NO_BUFFER) afterwards:
 * repeated, it does nothing. None of them does anything in a child of fork(). */

struct hifc_ring;

#define HIFC_NO_BUFFER UINT64_MAX

/* Gives a ticket up: waits for it at most timeout_us, and frees it once it is done, which the library
 * does by itself where that is later. After the call the library does not touch the requests any
 * more. What they ask for goes on: a put may still store its value. Buffers that they name may be
 * freed at once; they are handed out again when nothing is transferred into them any more. */
HIFC_API void hifc_ticket_drop(struct hifc_ticket **ticket, int64_t timeout_us);
HIFC_API void hifc_buffer_drop(struct hifc_ns *ns, uint64_t *offset);
/* Aborts a reservation, if it is still open, as soon as its writes have ended. */
HIFC_API void hifc_reservation_drop(struct hifc_ns *ns, uint64_t handle);
/* hifc_ring_close: -ETIMEDOUT, and *ring is what it was, where that answers so. */
HIFC_API int hifc_ring_drop(struct hifc_ring **ring);
/* hifc_close: -EBUSY, and *ns is what it was, where that answers so. */
HIFC_API int hifc_drop(struct hifc_ns **ns);

/* ---- request rings: reads that nobody waits for ---------------------------------------------- */

/* hifc_ring.h tells the layout, how to produce into it, and what the answers mean. The reactor looks
 * at its rings as it goes and turns descriptors into reads, verified like every other; a namespace
 * driven inline does so while somebody waits for a ticket or a ring. Other reads go first: reads for
 * rings have their own bound (prefetch_inflight), and what they have of the device is cut short. */
struct hifc_ring;

/* The arena is what descriptors may place reads in: whole pages of a pool. In pool 0 it lies in a
 * buffer of hifc_buffer_alloc, which is not freed before the ring is closed. */
struct hifc_ring_opts {
    uint32_t slots;          /* a power of two, 16 to 65536; 0: 1024 */
    uint32_t statuses;       /* status words, up to 2^24; 0: as many as slots */
    uint32_t pool;           /* of the arena */
    uint32_t read_max_bytes; /* no read writes more than this from its place on */
    uint64_t arena_offset;   /* of its first byte within the pool */
    uint64_t arena_bytes;
    uint32_t poll_us;        /* for producers that cannot call hifc_ring_kick: how often the reactor */
    uint32_t reserved;       /* looks while it has nothing else to do; 0: 1000, at most 1000000 */
};

/* Opens a request ring over memory that hifc_buffer_alloc gave. It is the caller's until
 * hifc_ring_close, also after the namespace was closed. -EINVAL: an option or the arena makes no
 * sense. -ENOSPC: too many rings are open. */
HIFC_API int hifc_ring_open(struct hifc_ns *ns, const struct hifc_ring_opts *opts,
                            struct hifc_ring **out);
/* The region, which begins with struct hifc_ring_header; mapped until the ring is closed. */
HIFC_API void *hifc_ring_base(struct hifc_ring *ring, uint64_t *size_bytes);
/* Its memfd, for mappings that outlive the ring or are another process's. The ring closes it. */
HIFC_API int hifc_ring_fd(struct hifc_ring *ring);
/* Produces for the caller: publishes the first of the descriptors, as many as there is room for, and
 * returns how many; the others have overflowed and are counted. Sequences are filled in. Several
 * threads may call it at once. -EINVAL: one names a status word that is not there; none was taken. */
HIFC_API int hifc_ring_submit(struct hifc_ring *ring, const struct hifc_descriptor *descriptors,
                              uint32_t count);
/* Tells that something was produced, else it is seen within poll_us. Inline: polls once. */
HIFC_API int hifc_ring_kick(struct hifc_ring *ring);
/* 1 when none of the status words is HIFC_RING_WAITING any more, 0 when not yet. timeout_us < 0
 * waits without bound other than the command timeout; 0 polls. */
HIFC_API int hifc_ring_wait(struct hifc_ring *ring, const uint32_t *indices, uint32_t count,
                            int64_t timeout_us);
/* Nothing is taken any more, what was not started is answered -ESHUTDOWN; waits for reads in flight,
 * at most twice the command timeout (-ETIMEDOUT: call it again). The ring stays, and every later call
 * on it answers -ESHUTDOWN; a wait that has begun ends. A ring outlives its namespace, which does the
 * same when it is shut down. */
HIFC_API int hifc_ring_shutdown(struct hifc_ring *ring);
/* Shuts the ring down if that was not done, and unmaps its region; -ETIMEDOUT: nothing was freed. No
 * other call on the ring may be under way, and none on any ring may begin while its namespace is being
 * freed (hifc_close). */
HIFC_API int hifc_ring_close(struct hifc_ring *ring);

/* ---- the index: these never block and do no I/O --------------------------------------------- */

/* answers[i]: HIFC_OK, HIFC_MISS or HIFC_PENDING; lengths may be NULL. */
HIFC_API int hifc_lookup(struct hifc_ns *ns, const struct hifc_key *keys, uint32_t count,
                         int32_t *answers, uint32_t *lengths);
/* Whether the value of a key is these bytes, by its length and checksum: HIFC_OK, HIFC_MISS (it is
 * another one, or none) or HIFC_PENDING. */
HIFC_API int hifc_compare(struct hifc_ns *ns, const struct hifc_key *key, const void *data,
                          uint64_t size_bytes);
/* Count of leading keys that are there. */
HIFC_API int64_t hifc_longest_prefix(struct hifc_ns *ns, const struct hifc_key *keys,
                                     uint32_t count);
/* Keeps every key that is there from being evicted until release or until ttl_ms passed (0 = one
 * minute). answers as of lookup, may be NULL. */
HIFC_API int hifc_lease(struct hifc_ns *ns, const struct hifc_key *keys, uint32_t count,
                        uint32_t ttl_ms, int32_t *answers, uint64_t *lease);
HIFC_API int hifc_lease_release(struct hifc_ns *ns, uint64_t lease);
/* Counts an access of each key, which makes reclaim keep it longer. */
HIFC_API int hifc_touch(struct hifc_ns *ns, const struct hifc_key *keys, uint32_t count);

struct hifc_entry {
    struct hifc_key key;
    uint32_t length;
    uint32_t part_count;
    uint8_t cls;
    uint8_t heat; /* accesses since it was written, saturating, halved on reinsertion */
    uint8_t reserved[6];
};

/* Lists entries. *cursor starts at 0; returns how many were put into out, 0 at the end. Entries
 * that change while listing may be missed or seen twice. */
HIFC_API int hifc_list(struct hifc_ns *ns, uint64_t *cursor, struct hifc_entry *out,
                       uint32_t count);

enum hifc_event_kind { HIFC_EVENT_STORED = 1, HIFC_EVENT_EVICTED = 2, HIFC_EVENT_QUARANTINED = 3 };

struct hifc_event {
    struct hifc_key key;
    uint32_t kind;
    uint32_t length;
};

/* Takes up to count events of reuse keys, oldest first. *dropped: lost since the last call because
 * the ring was full. */
HIFC_API int hifc_events(struct hifc_ns *ns, struct hifc_event *out, uint32_t count,
                         uint64_t *dropped);

/* ---- durability and state ------------------------------------------------------------------- */

/* Everything acknowledged before the call survives a crash once it returns 0. */
HIFC_API int hifc_sync(struct hifc_ns *ns);
/* Waits until no request is in flight; 0, or -ETIMEDOUT. */
HIFC_API int hifc_drain(struct hifc_ns *ns, int64_t timeout_us);

#define HIFC_LATENCY_BUCKETS 24u

struct hifc_stats {
    uint8_t uuid[16];
    char label[32];
    uint64_t capacity_bytes; /* live + dead + free + metadata */
    uint64_t live_bytes;
    uint64_t dead_bytes;
    uint64_t free_bytes;
    uint64_t metadata_bytes;
    uint64_t segment_size_bytes;
    uint32_t segments;
    uint32_t segments_free;
    uint32_t segments_damaged;
    uint32_t direct; /* 1: no page cache between the device and us */
    uint64_t open_epoch;
    uint64_t entries;
    uint64_t entries_swap;
    uint64_t index_bytes;
    uint64_t put_count, put_bytes;       /* accepted */
    uint64_t get_count, get_bytes;       /* answered HIFC_OK */
    uint64_t miss_count, exists_count, rejected_count, retry_count, no_space_count;
    uint64_t delete_count;
    uint64_t device_write_bytes, device_read_bytes; /* all that reached the device */
    uint64_t device_write_commands, device_read_commands;
    uint64_t flush_count;
    uint64_t bounce_bytes;  /* copied between buffers by the CPU */
    uint64_t corrupt_count; /* checksum mismatches seen */
    uint64_t device_error_count;
    uint64_t reinserted_bytes;
    uint64_t evicted_count, evicted_bytes;
    uint64_t reclaimed_segments;
    uint64_t batches, batch_entries;
    uint64_t poll_count, poll_empty_count;
    uint64_t recovery_ns;            /* time that open spent reading the device */
    uint64_t recovered_entries;
    uint64_t recovery_dropped;       /* entries not accepted: torn or damaged */
    uint64_t recovery_damaged;       /* of these below the flushed mark: real damage */
    uint64_t requests_inflight;
    uint64_t buffer_used_bytes, buffer_peak_bytes, buffer_size_bytes;
    uint64_t reservations, leases;
    uint64_t write_budget_bytes, write_budget_left_bytes; /* a day; 0: none (HIFC_ADMIT_BUDGET) */
    /* Tickets by the time from submission to last completion, those that moved bytes: get where the
     * first request is a get, put where it is a put, write or commit. Their sum, and how many:
     * bucket 0 counts those below 2 us, bucket i those of [2^i, 2^(i+1)) us, the last all above as
     * well. (us: 1024 ns) */
    uint64_t get_elapsed_ns, put_elapsed_ns;
    uint64_t get_latency[HIFC_LATENCY_BUCKETS], put_latency[HIFC_LATENCY_BUCKETS];
    /* Reads of request rings: descriptors taken = completed (verified and there) + failed (missed,
     * pending, device errors, closed) + duplicates + cancelled + bad + those under way. Overflowed
     * were never taken. Reads and their bytes: neighbours are one. */
    uint64_t prefetch_submitted, prefetch_completed, prefetch_failed, prefetch_duplicates;
    uint64_t prefetch_cancelled, prefetch_bad, prefetch_overflowed, prefetch_reads, prefetch_bytes;
};

/* Counters since the namespace was opened, and sizes as of now. */
HIFC_API int hifc_stats(struct hifc_ns *ns, struct hifc_stats *out);
/* What the program above wants others to see with the statistics, on the owner's socket: a JSON
 * object of at most HIFC_PUBLISH_MAX_BYTES, kept until the next one. NULL: nothing any more. */
#define HIFC_PUBLISH_MAX_BYTES 8192u
HIFC_API int hifc_publish(struct hifc_ns *ns, const char *json);
/* The NVMe SMART / health log page (512 bytes). -ENOTSUP: the device has none. */
HIFC_API int hifc_health(struct hifc_ns *ns, uint8_t log[512]);

enum hifc_check_kind { HIFC_CHECK_INDEX = 1, HIFC_CHECK_PAYLOAD = 2 };

struct hifc_check_result {
    uint64_t entries_checked;
    uint64_t problems;
    char first_problem[240];
};

/* Verifies the invariants of docs/format.md on a namespace at rest (nothing in flight);
 * HIFC_CHECK_PAYLOAD also reads and verifies every value. */
HIFC_API int hifc_check(struct hifc_ns *ns, uint32_t kind, struct hifc_check_result *out);

struct hifc_repair_result {
    uint32_t segments_damaged; /* found */
    uint32_t segments_freed;   /* of these */
    char first_problem[240];   /* why one was not freed */
};

/* Sets damaged segments free. Whatever stood in them was lost when their headers were, and is now
 * given up for good. Not on a read-only namespace (-EROFS). */
HIFC_API int hifc_repair(struct hifc_ns *ns, struct hifc_repair_result *out);

/* ---- what stays: replacement policies -----------------------------------------------------------
 * A policy orders blocks, which are ids that the caller chooses: small and dense, since state lies in
 * arrays. Not thread-safe. Times are seconds, and one before the last counts as the last. */

struct hifc_policy;

/* name: default, return_time, frequency, lru, lfu, arc or s3fifo. capacity_blocks: of a replay; 0: the
 * caller decides when something leaves. decay_lambda: of decayed frequency, a second. */
HIFC_API int hifc_policy_open(const char *name, uint32_t capacity_blocks, double decay_lambda,
                              struct hifc_policy **out);
HIFC_API void hifc_policy_close(struct hifc_policy *policy);
/* A request used these blocks, a chain with its head first; they are in the cache from now on. */
HIFC_API int hifc_policy_use(struct hifc_policy *policy, double now_s, const uint32_t *ids,
                             uint32_t count);
/* They left the cache; what is known of them stays. */
HIFC_API int hifc_policy_leave(struct hifc_policy *policy, const uint32_t *ids, uint32_t count);
/* They are gone, their ids free for other blocks. */
HIFC_API int hifc_policy_forget(struct hifc_policy *policy, const uint32_t *ids, uint32_t count);
/* The block with the least score leaves first. For blocks that were used and not forgotten. */
HIFC_API int hifc_policy_scores(struct hifc_policy *policy, double now_s, const uint32_t *ids,
                                uint32_t count, double *scores);

/* Requests for chains of blocks: request i at times_s[i] for ids[offsets[i]] up to offsets[i + 1]. */
struct hifc_trace {
    const double *times_s;
    const uint64_t *offsets;
    const uint32_t *ids; /* below id_count */
    /* Tokens of each request's answer, 0 where not known; or NULL. A server lets go of a request's
     * blocks when the answer is complete, so its length is known when they are first judged. */
    const uint32_t *answers;
    uint32_t request_count;
    uint32_t id_count;
};

/* Only blocks that the policy keeps beyond the request that brings them, and of which it expects a
 * return: beside enum hifc_admission, of a replay alone. */
#define HIFC_ADMIT_EXPECTED 3u

struct hifc_replay {
    uint32_t admission;      /* enum hifc_admission, or HIFC_ADMIT_EXPECTED */
    uint32_t reserved;
    double budget_blocks;    /* a day, HIFC_ADMIT_BUDGET */
    uint64_t access_count;   /* out, as what follows */
    uint64_t hit_count;      /* blocks that were in the cache when they were asked for */
    uint64_t written_count;  /* blocks */
};

/* Replays a trace through a policy that was opened with a capacity and not used since. */
HIFC_API int hifc_policy_replay(struct hifc_policy *policy, const struct hifc_trace *trace,
                                struct hifc_replay *inout);
/* The same with Belady's algorithm, which knows the future: no policy has more hits. */
HIFC_API int hifc_belady_replay(uint32_t capacity_blocks, const struct hifc_trace *trace,
                                struct hifc_replay *out);

#ifdef __cplusplus
}
#endif
#endif
