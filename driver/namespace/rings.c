/* SPDX-License-Identifier: Apache-2.0
 *
 * rings.c - request rings as a caller sees them: open, produce, wait, close; and what closing a
 * namespace does to them. Any thread.
 *
 * A ring is its opener's: it lives until hifc_ring_close, also when the namespace is closed or
 * detached before, which answers everything in it first.
 */
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "namespace/prefetch.h"
#include "util/clock.h"

#define SLOTS_DEFAULT 1024u
#define POLL_DEFAULT_US 1000u /* 200 took 7 % of a core, idle */
#define POLL_MAX_US 1000000u
#define WAIT_NAP_NS 100000000ull /* a waiter looks again at least so often */
#define CLOSE_NAP_US 200u

/* ---- of a namespace -------------------------------------------------------------------------- */

int ns_prefetch_create(struct hifc_ns *ns)
{
    struct ns_prefetch *prefetch = calloc(1, sizeof *prefetch);
    uint32_t count = ns->opts.prefetch_inflight;
    ns->prefetch = prefetch;
    if (prefetch) {
        prefetch->fetches = calloc(count, sizeof *prefetch->fetches);
    }
    if (!prefetch || !prefetch->fetches) {
        return hifc_fail(-ENOMEM, "no memory for %u reads of rings: lower prefetch_inflight",
                         count);
    }
    for (uint32_t i = count; i-- > 0;) {
        prefetch->fetches[i].op.ns = ns;
        prefetch->fetches[i].next_free = prefetch->free_fetches;
        prefetch->free_fetches = &prefetch->fetches[i];
    }
    return 0;
}

void ns_prefetch_destroy(struct hifc_ns *ns)
{
    struct ns_prefetch *prefetch = ns->prefetch;
    for (uint32_t i = 0; prefetch && i < prefetch->ring_count; i++) {
        atomic_store(&prefetch->rings[i]->ns, NULL);
    }
    free(prefetch ? prefetch->fetches : NULL);
    free(prefetch);
    ns->prefetch = NULL;
}

/* Mutex held. */
static void want_close(struct hifc_ns *ns, struct hifc_ring *ring)
{
    atomic_store(&ring->closing, true);
    atomic_store(&ns->prefetch->changed, true);
}

static uint32_t attached(const struct hifc_ns *ns)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < ns->prefetch->ring_count; i++) {
        count += !atomic_load(&ns->prefetch->rings[i]->detached);
    }
    return count;
}

int ns_rings_stop(struct hifc_ns *ns, int64_t timeout_us)
{
    uint64_t deadline = hifc_deadline_ns(timeout_us);
    ns_lock(ns);
    for (uint32_t i = 0; i < ns->prefetch->ring_count; i++) {
        want_close(ns, ns->prefetch->rings[i]);
    }
    ns_unlock(ns);
    hifc_engine_wake(ns->engine);
    ns_lock(ns);
    while (attached(ns) > 0 && hifc_now_ns() < deadline) {
        ns_wait_changed(ns);
    }
    uint32_t left = attached(ns);
    ns_unlock(ns);
    return left == 0 ? 0
                     : hifc_fail(-ETIMEDOUT, "reads of %u request rings on %s are still in flight",
                                 left, ns->uri);
}

void ns_rings_release(struct hifc_ns *ns)
{
    struct ns_prefetch *prefetch = ns->prefetch;
    ns_lock(ns);
    for (uint32_t i = 0; prefetch && i < prefetch->ring_count; i++) {
        if (!atomic_load(&prefetch->rings[i]->detached)) {
            ns_ring_end(ns, prefetch->rings[i]);
            ns_ring_detach(ns, prefetch->rings[i]);
        }
    }
    ns_unlock(ns);
}

bool ns_rings_use_pool(const struct hifc_ns *ns, uint32_t pool)
{
    bool used = false;
    for (uint32_t i = 0; i < ns->prefetch->ring_count; i++) {
        used |= ns->prefetch->rings[i]->pool == pool;
    }
    return used;
}

static uint64_t overflowed(const struct hifc_ring *ring)
{
    return __atomic_load_n(&ring->memory.header->overflowed, __ATOMIC_RELAXED);
}

uint64_t ns_rings_overflowed(const struct hifc_ns *ns)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < ns->prefetch->ring_count; i++) {
        sum += overflowed(ns->prefetch->rings[i]);
    }
    return sum;
}

/* ---- open ------------------------------------------------------------------------------------ */

static int check_arena(struct hifc_ns *ns, const struct hifc_ring_opts *opts)
{
    if (!hifc_pools_resolve_lent(ns->pools, opts->pool, opts->arena_offset, opts->arena_bytes)) {
        return hifc_fail(-EINVAL, "arena [%llu, +%llu) does not lie within memory of pool %u that "
                                  "was handed out: allocate it with hifc_buffer_alloc",
                         (unsigned long long)opts->arena_offset,
                         (unsigned long long)opts->arena_bytes, opts->pool);
    }
    return 0;
}

static int check_opts(struct hifc_ns *ns, const struct hifc_ring_opts *opts)
{
    if ((opts->slots & (opts->slots - 1)) != 0 || opts->slots < HIFC_RING_SLOTS_MIN ||
        opts->slots > HIFC_RING_SLOTS_MAX || opts->statuses > HIFC_RING_STATUSES_MAX ||
        opts->poll_us > POLL_MAX_US) {
        return hifc_fail(-EINVAL, "a ring of %u slots, %u status words, looked at every %u us: "
                                  "slots are a power of two from %u to %u, status words at most "
                                  "%u, poll_us at most %u",
                         opts->slots, opts->statuses, opts->poll_us, HIFC_RING_SLOTS_MIN,
                         HIFC_RING_SLOTS_MAX, HIFC_RING_STATUSES_MAX, POLL_MAX_US);
    }
    if (opts->arena_bytes == 0 || opts->read_max_bytes == 0 ||
        opts->read_max_bytes > opts->arena_bytes ||
        (opts->arena_offset | opts->arena_bytes) % HIFC_RING_PAGE_BYTES != 0) {
        return hifc_fail(-EINVAL, "arena [%llu, +%llu) for reads of up to %u bytes: an arena is "
                                  "whole pages of %u bytes and holds at least one read",
                         (unsigned long long)opts->arena_offset,
                         (unsigned long long)opts->arena_bytes, opts->read_max_bytes,
                         HIFC_RING_PAGE_BYTES);
    }
    return check_arena(ns, opts);
}

static void ring_free(struct hifc_ring *ring)
{
    hifc_ring_memory_destroy(&ring->memory);
    free(ring->wants);
    free(ring->buckets);
    free(ring->owners);
    free(ring);
}

static bool tables_create(struct hifc_ring *ring, uint32_t slots, uint32_t statuses)
{
    ring->wants = calloc(slots, sizeof *ring->wants);
    ring->buckets = malloc(slots * sizeof *ring->buckets);
    ring->owners = malloc(statuses * sizeof *ring->owners);
    if (!ring->wants || !ring->buckets || !ring->owners ||
        getrandom(&ring->seed, sizeof ring->seed, 0) != sizeof ring->seed) {
        return false;
    }
    for (uint32_t i = 0; i < slots; i++) {
        ring->wants[i].next = i + 1 < slots ? i + 1 : NS_NO_WANT;
        ring->buckets[i] = NS_NO_WANT;
    }
    for (uint32_t i = 0; i < statuses; i++) {
        ring->owners[i] = NS_NO_WANT;
    }
    ring->queue_head = ring->queue_tail = NS_NO_WANT;
    return true;
}

static int ring_create(struct hifc_ns *ns, const struct hifc_ring_opts *opts,
                       struct hifc_ring **out)
{
    struct hifc_ring *ring = calloc(1, sizeof *ring);
    if (!ring || !tables_create(ring, opts->slots, opts->statuses)) {
        if (ring) {
            ring->memory.fd = -1;
            ring_free(ring);
        }
        return hifc_fail(-ENOMEM, "no memory for a ring of %u slots and %u status words",
                         opts->slots, opts->statuses);
    }
    int error = hifc_ring_memory_create(opts->slots, opts->statuses, opts->arena_bytes,
                                        opts->read_max_bytes, &ring->memory);
    if (error) {
        ring_free(ring);
        return error;
    }
    ring->fork_generation = ns->fork_generation;
    ring->pool = opts->pool;
    ring->read_max_bytes = opts->read_max_bytes;
    ring->arena_offset = opts->arena_offset;
    ring->arena_bytes = opts->arena_bytes;
    ring->poll_ns = opts->poll_us * 1000ull;
    atomic_store(&ring->ns, ns);
    *out = ring;
    return 0;
}

HIFC_API int hifc_ring_open(struct hifc_ns *ns, const struct hifc_ring_opts *given,
                            struct hifc_ring **out)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    if (!given || !out) {
        return hifc_fail(-EINVAL, "ring_open wants options and room for the ring");
    }
    struct hifc_ring_opts opts = *given;
    struct hifc_ring *ring = NULL;
    opts.slots = opts.slots ? opts.slots : SLOTS_DEFAULT;
    opts.statuses = opts.statuses ? opts.statuses : opts.slots;
    opts.poll_us = opts.poll_us ? opts.poll_us : POLL_DEFAULT_US;
    error = check_opts(ns, &opts);
    error = error ? error : ring_create(ns, &opts, &ring);
    if (error) {
        return error;
    }
    struct ns_prefetch *prefetch = ns->prefetch;
    ns_lock(ns);
    bool room = prefetch->ring_count < NS_RINGS_MAX;
    /* Again: who unregisters a pool retires it before it looks for rings. */
    error = check_arena(ns, &opts);
    if (room && !error) {
        prefetch->rings[prefetch->ring_count++] = ring;
        atomic_store(&prefetch->changed, true);
    }
    ns_unlock(ns);
    if (!room || error) {
        ring_free(ring);
        return error ? error
                     : hifc_fail(-ENOSPC, "%u rings are open on %s: close one", NS_RINGS_MAX,
                                 ns->uri);
    }
    hifc_engine_wake(ns->engine);
    *out = ring;
    return 0;
}

/* ---- use ------------------------------------------------------------------------------------- */

/* A call on a ring that needs its namespace. */
static int enter(struct hifc_ring *ring, struct hifc_ns **visit)
{
    if (!ring || hifc_forked_since(ring->fork_generation)) {
        return hifc_fail(ring ? -ECHILD : -EINVAL, "no ring, or one of the parent process: open "
                                                   "one after fork()");
    }
    struct hifc_ns *ns = atomic_load(&ring->ns);
    return ns ? ns_enter(ns, visit)
              : hifc_fail(-ESHUTDOWN, "this ring, or its namespace, is closed: open another "
                                     "(ns.ring, hifc_ring_open)");
}

HIFC_API void *hifc_ring_base(struct hifc_ring *ring, uint64_t *size_bytes)
{
    *size_bytes = ring->memory.region_bytes;
    return ring->memory.header;
}

HIFC_API int hifc_ring_fd(struct hifc_ring *ring)
{
    return ring->memory.fd;
}

HIFC_API int hifc_ring_submit(struct hifc_ring *ring, const struct hifc_descriptor *descriptors,
                              uint32_t count)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = enter(ring, &visit);
    if (error) {
        return error;
    }
    if (!descriptors || count > INT32_MAX) {
        return hifc_fail(-EINVAL, "ring_submit wants an array of at most 2^31 - 1 descriptors");
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = descriptors[i].control & HIFC_RING_INDEX_MASK;
        if (index >= ring->memory.status_count) {
            return hifc_fail(-EINVAL, "descriptor %u names status word %u of %u", i, index,
                             ring->memory.status_count);
        }
    }
    uint32_t taken = hifc_ring_produce(&ring->memory, descriptors, count);
    if (taken) {
        hifc_engine_wake(visit->engine);
    }
    return (int)taken;
}

HIFC_API int hifc_ring_kick(struct hifc_ring *ring)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = enter(ring, &visit);
    if (!error) {
        hifc_engine_wake(visit->engine);
        (void)hifc_engine_poll(visit->engine); /* inline; who else polls sees it, too */
    }
    return error;
}

/* From *at on: whether none of the words waits. */
static bool all_answered(const struct hifc_ring *ring, const uint32_t *indices, uint32_t count,
                         uint32_t *at)
{
    while (*at < count && __atomic_load_n(&ring->memory.statuses[indices[*at]],
                                          __ATOMIC_ACQUIRE) != HIFC_RING_WAITING) {
        ++*at;
    }
    return *at == count;
}

static void wait_once(struct hifc_ring *ring, const struct hifc_ns *ns, uint32_t seen,
                      uint64_t nap_ns)
{
    if (!ns->reactor) {
        if (hifc_engine_poll(ns->engine) == -EBUSY) {
            sched_yield();
        }
        return;
    }
    struct timespec nap = {.tv_nsec = (long)(nap_ns < WAIT_NAP_NS ? nap_ns : WAIT_NAP_NS)};
    syscall(SYS_futex, &ring->memory.header->answers, FUTEX_WAIT, seen, &nap, NULL, 0);
}

HIFC_API int hifc_ring_wait(struct hifc_ring *ring, const uint32_t *indices, uint32_t count,
                            int64_t timeout_us)
{
    uint32_t at = 0;
    if (!ring || (!indices && count) || hifc_forked_since(ring->fork_generation)) {
        return hifc_fail(ring ? -ECHILD : -EINVAL, "no ring or no status words to wait for, or "
                                                   "a ring of the parent process");
    }
    for (uint32_t i = 0; i < count; i++) {
        if (indices[i] >= ring->memory.status_count) {
            return hifc_fail(-EINVAL, "status word %u of %u", indices[i],
                             ring->memory.status_count);
        }
    }
    uint64_t deadline = hifc_deadline_ns(timeout_us);
    int answered = 0; /* or a negative errno */
    /* One visit for all looks: who closes answers or detaches first and waits for visits then, so
     * the namespace is there as long as it is looked at. */
    struct hifc_ns *visit NS_VISIT = NULL;
    bool driven = enter(ring, &visit) == 0;
    atomic_fetch_add(&ring->waiters, 1);
    for (uint32_t looks = 0; !answered; looks++) {
        /* Loaded first: an answer after it changes it, and the sleep does not begin. */
        uint32_t seen = __atomic_load_n(&ring->memory.header->answers, __ATOMIC_SEQ_CST);
        bool closed = atomic_load(&ring->detached);
        uint64_t now = hifc_now_ns();
        if (all_answered(ring, indices, count, &at)) {
            answered = 1;
        } else if (closed) {
            answered = hifc_fail(-ESHUTDOWN, "status word %u waits for a descriptor that came "
                                             "after the ring was closed", indices[at]);
        } else if (now >= deadline && looks > 0) {
            break; /* inline, also who does not wait polls once */
        } else if (driven) {
            wait_once(ring, visit, seen, now < deadline ? deadline - now : 0);
        } else {
            usleep(CLOSE_NAP_US); /* who closes answers everything */
        }
    }
    atomic_fetch_sub(&ring->waiters, 1);
    return answered;
}

/* ---- close ----------------------------------------------------------------------------------- */

/* Until the driving thread has dropped the ring, or whoever closes the namespace has. */
static void wait_detached(struct hifc_ring *ring, struct hifc_ns *ns)
{
    uint64_t deadline = hifc_now_ns() + 2000000ull * ns->opts.command_timeout_ms;
    while (!atomic_load(&ring->detached) && hifc_now_ns() < deadline) {
        struct hifc_ns *visit NS_VISIT = NULL;
        if (ns_enter(ns, &visit) != 0) {
            usleep(CLOSE_NAP_US);
            continue;
        }
        ns_lock(ns);
        if (!atomic_load(&ring->detached)) {
            ns_wait_changed(ns);
        }
        ns_unlock(ns);
    }
}

/* Mutex held. */
static void forget(struct hifc_ns *ns, const struct hifc_ring *ring)
{
    struct ns_prefetch *prefetch = ns->prefetch;
    uint32_t i = 0;
    while (prefetch->rings[i] != ring) {
        i++;
    }
    prefetch->rings[i] = prefetch->rings[--prefetch->ring_count];
    ns->stats.prefetch_overflowed += overflowed(ring);
}

HIFC_API int hifc_ring_shutdown(struct hifc_ring *ring)
{
    if (!ring) {
        return hifc_fail(-EINVAL, "no ring to shut down");
    }
    if (hifc_forked_since(ring->fork_generation)) {
        return hifc_fail(-ECHILD, "this ring belongs to the parent process, which closes it");
    }
    struct hifc_ns *ns = atomic_load(&ring->ns);
    if (ns) {
        ns_lock(ns);
        if (atomic_load(&ring->ns)) {
            want_close(ns, ring);
        }
        ns_unlock(ns);
        struct hifc_ns *visit NS_VISIT = NULL;
        if (ns_enter(ns, &visit) == 0) {
            hifc_engine_wake(ns->engine);
        }
        wait_detached(ring, ns);
        if (!atomic_load(&ring->detached)) {
            return hifc_fail(-ETIMEDOUT, "reads of this ring on %s are still in flight: close it "
                                         "again", ns->uri);
        }
        ns_lock(ns);
        if (atomic_load(&ring->ns)) {
            forget(ns, ring);
            atomic_store(&ring->ns, NULL);
        }
        ns_unlock(ns);
    }
    return 0;
}

HIFC_API int hifc_ring_close(struct hifc_ring *ring)
{
    int error = ring ? hifc_ring_shutdown(ring) : 0;
    if (ring && !error) {
        ring_free(ring);
    }
    return error;
}

HIFC_API int hifc_ring_drop(struct hifc_ring **ring)
{
    int error = hifc_ring_close(*ring);
    if (!error) {
        *ring = NULL;
    }
    return error;
}
