/* SPDX-License-Identifier: Apache-2.0
 *
 * janitor.c - what a namespace does beside its requests, and what blocks: sealing full segments,
 * freeing and reclaiming, ending what has expired.
 *
 * With the reactor it is a thread; inline, whoever submits or waits does it in between. One at a
 * time either way (janitor_running).
 */

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/thread.h"

#define JANITOR_PASSES_MAX 64u /* segments handled in one go before others get a turn */

static bool sealable(const struct hifc_ns *ns, const struct ns_open *open)
{
    return ns->segments[open->segment].state == NS_CLOSING && open->header_done && !open->head &&
           !open->forming && open->inflight == 0 && open->reservations == 0;
}

/* Seals what is full and at rest, under one flush: a valid footer vouches for every payload of its
 * segment. A summary that cannot be written is kept in memory; recovery scans the segment. Mutex
 * held on entry and exit, not in between. */
static void seal_ready(struct hifc_ns *ns)
{
    struct ns_open *ready[NS_CLOSING_MAX + NS_STREAMS];
    uint32_t count = 0;
    for (struct ns_open *open = ns->open_list; open && count < sizeof ready / sizeof ready[0];
         open = open->next) {
        if (sealable(ns, open)) {
            ready[count++] = open;
        }
    }
    if (count == 0) {
        return;
    }
    ns_unlock(ns);
    int error = ns_flush(ns);
    for (uint32_t i = 0; i < count; i++) {
        (void)ns_seal(ns, ready[i], error);
    }
    ns_lock(ns);
}

/* ---- the work ------------------------------------------------------------------------------- */

static bool space_is_low(const struct hifc_ns *ns)
{
    return ns_room_low(ns, 0) || ns->index_full;
}

/* A full index may be full of what stands in a segment that is still open, and so may a disk that
 * has room for a few segments only. */
static void close_what_may_be_evicted(struct hifc_ns *ns, bool disk_full)
{
    static const unsigned streams[] = {NS_STREAM_REUSE, NS_STREAM_REUSE_MOVED};
    for (unsigned i = 0; i < 2; i++) {
        struct ns_open *open = ns->streams[streams[i]];
        if (open && (ns->segments[open->segment].live_entries > 0 ||
                     (disk_full && ns->segments[open->segment].payload_bytes > 0))) {
            ns_open_close(ns, open);
        }
    }
}

/* Mutex held on entry and exit, not in between. */
static void work(struct hifc_ns *ns)
{
    seal_ready(ns);
    ns_unlock(ns);
    while (ns_reclaim_dead(ns) == NS_RECLAIM_DEAD_MAX) {
    }
    ns_lock(ns);
    for (unsigned pass = 0; pass < JANITOR_PASSES_MAX && space_is_low(ns) &&
                            (!ns->reclaim_exhausted || ns->roomless_set.count > 0) &&
                            !ns->janitor_stop;
         pass++) {
        bool room_low = ns_room_low(ns, 0), reclaim = !ns->reclaim_exhausted;
        ns_unlock(ns);
        bool found_room = room_low && ns_room_one(ns);
        int progress = found_room ? 1 : reclaim ? ns_reclaim_one(ns) : 0;
        ns_lock(ns);
        if (progress > 0) {
            ns->segment_wanted = false;
            /* What finds the index full again says so. */
            ns->index_full = ns->index_full && found_room;
        } else {
            bool disk_full = ns->segment_wanted && ns->roomless_set.count > 0;
            if (progress == 0 && reclaim && (ns->index_full || disk_full)) {
                close_what_may_be_evicted(ns, disk_full);
            }
            /* Segments that are still being written may yet turn into something to reclaim. */
            ns->reclaim_exhausted = progress == 0 && ns->closing_count == 0;
            break;
        }
        seal_ready(ns);
    }
    pthread_cond_broadcast(&ns->changed);
}

static void expire(struct hifc_ns *ns)
{
    uint64_t now = hifc_now_ns();
    ns_leases_expire(ns, now);
    ns_reservations_expire(ns, now);
}

void ns_janitor_inline(struct hifc_ns *ns)
{
    ns_lock(ns);
    if (!ns->janitor_running && ns->janitor_wanted && !ns->janitor_stop) {
        ns->janitor_running = true;
        ns->janitor_wanted = false;
        expire(ns);
        work(ns);
        ns->janitor_running = false;
    }
    ns_unlock(ns);
}

static void *janitor_main(void *argument)
{
    struct hifc_ns *ns = argument;
    ns_lock(ns);
    while (!ns->janitor_stop) {
        if (ns->janitor_wanted && !ns->janitor_running) {
            ns->janitor_running = true;
            ns->janitor_wanted = false;
            work(ns);
            ns->janitor_running = false;
            continue;
        }
        struct timespec until = hifc_after_ns(NS_TICK_MS * 1000000ull);
        ns_sleep(ns, &until);
        expire(ns);
    }
    ns_unlock(ns);
    return NULL;
}

void ns_janitor_pause(struct hifc_ns *ns)
{
    ns_lock(ns);
    while (ns->janitor_running) {
        ns_wait_changed(ns);
    }
    ns->janitor_running = true;
    ns_unlock(ns);
}

void ns_janitor_resume(struct hifc_ns *ns)
{
    ns_lock(ns);
    ns->janitor_running = false;
    pthread_cond_broadcast(&ns->changed);
    ns_unlock(ns);
}

int ns_janitor_start(struct hifc_ns *ns)
{
    if (ns->read_only || !ns->reactor) {
        return 0;
    }
    int error = hifc_thread_start(&ns->janitor, "hifc-janitor", janitor_main, ns, ns->uri);
    ns->janitor_thread = error == 0;
    return error;
}

void ns_janitor_stop(struct hifc_ns *ns)
{
    ns_lock(ns);
    ns->janitor_stop = true;
    pthread_cond_broadcast(&ns->changed);
    ns_unlock(ns);
    if (ns->janitor_thread) {
        pthread_join(ns->janitor, NULL);
        ns->janitor_thread = false;
    }
}
