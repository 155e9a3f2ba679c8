/* SPDX-License-Identifier: Apache-2.0
 *
 * prefetch.h - request rings of a namespace: descriptors become reads.
 *
 * A descriptor that was taken is a want until it is answered. Wants stand in their ring's queue,
 * and at most prefetch_inflight reads (fetches) are in flight for all rings together, with
 * operations of their own, as background transfers: they take from other reads neither an
 * operation nor a command nor a turn.
 *
 * Threads. Wants, fetches and everything else that is not marked belong to the driving thread,
 * which holds the mutex as well while it changes them, since it also needs the index. It has a
 * list of its own of the rings (`driven`), so that it looks at them without the mutex; who closes
 * a ring waits until the driving thread has dropped it (`detached`), and frees it only then.
 */
#ifndef HIFC_PREFETCH_H
#define HIFC_PREFETCH_H

#include "engine/ring.h"
#include "namespace/ns.h"

#define NS_RINGS_MAX 16u
#define NS_PREFETCH_INFLIGHT_MAX 4096u
/* Descriptors taken of a ring, and wants started, in one go: others get the mutex in between. */
#define NS_RING_STEP_MAX 256u
#define NS_NO_WANT UINT32_MAX

struct ns_want {
    struct hifc_descriptor what;
    uint32_t next, prev;  /* in the queue; next: also in its fetch, or in the list of free ones */
    uint32_t bucket_next; /* in the list of the same bucket */
    bool started;
};

struct hifc_ring {
    struct hifc_ring_memory memory;
    uint64_t fork_generation;
    uint32_t pool; /* these four do not change */
    uint32_t read_max_bytes;
    uint64_t arena_offset, arena_bytes;
    uint64_t poll_ns;
    _Atomic(struct hifc_ns *) ns; /* NULL: the namespace is gone */
    _Atomic uint32_t waiters;     /* asleep on memory.header->answers */
    _Atomic bool closing;
    _Atomic bool detached; /* the driving thread does not know it any more */
    struct ns_want *wants; /* as many as slots */
    uint32_t want_free;
    uint32_t queue_head, queue_tail;
    uint32_t started;  /* wants whose fetch is in flight */
    uint32_t *buckets; /* first want by hash of key and parts, as many as slots */
    uint32_t *owners;  /* the want that a status word belongs to */
    uint64_t seed;
    bool answered; /* since waiters were last woken */
};

/* A read in flight for one want, or for neighbours. */
struct ns_fetch {
    struct ns_op op;
    struct hifc_req req;
    struct hifc_ring *ring;
    uint32_t first; /* want */
    struct ns_fetch *next_free;
};

struct ns_prefetch {
    _Atomic bool changed; /* rings were opened, are closing, could be dropped, or have wants left */
    struct hifc_ring *driven[NS_RINGS_MAX];
    uint32_t driven_count;
    uint32_t turn; /* whose want is started next */
    struct ns_fetch *fetches, *free_fetches;
    struct hifc_ring *rings[NS_RINGS_MAX]; /* mutex: until they are closed */
    uint32_t ring_count;
};

/* ---- prefetch.c: the driving thread ---------------------------------------------------------- */
/* Takes what stands in the rings and starts reads: the engine's gather. */
uint32_t ns_rings_gather(void *ns);
uint64_t ns_rings_sleep_max_ns(void *ns);
/* Starts wants while there are fetches left. Mutex held. */
void ns_fetch_more(struct hifc_ns *ns);
/* Wakes who waits for answers given since the last call. */
void ns_rings_wake(struct hifc_ns *ns);
/* Answers what waits with -ESHUTDOWN; nothing is taken any more. Mutex held. */
void ns_ring_end(struct hifc_ns *ns, struct hifc_ring *ring);
/* With nothing in flight: its last words. Mutex held. */
void ns_ring_detach(struct hifc_ns *ns, struct hifc_ring *ring);

/* ---- rings.c --------------------------------------------------------------------------------- */
int ns_prefetch_create(struct hifc_ns *ns);
void ns_prefetch_destroy(struct hifc_ns *ns);
/* Closes all rings for new descriptors and waits until those in flight are answered. */
int ns_rings_stop(struct hifc_ns *ns, int64_t timeout_us);
/* The engine is gone, and with it the driving thread and everything in flight. */
void ns_rings_release(struct hifc_ns *ns);
/* Mutex held. */
bool ns_rings_use_pool(const struct hifc_ns *ns, uint32_t pool);
uint64_t ns_rings_overflowed(const struct hifc_ns *ns);

#endif
