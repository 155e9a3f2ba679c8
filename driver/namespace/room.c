/* SPDX-License-Identifier: Apache-2.0
 *
 * room.c - the room of free segments on a thin device, such as a sparse file, whose file system may
 * be full when a segment is written for the first time.
 *
 * Invariant: a segment in the free set has room for all of its pages, so neither its batches nor
 * its summary can meet a full disk. Room is asked for in one place, here, by the janitor, which
 * answers a full disk as it answers a full device: by reclaiming a segment. A segment that is
 * freed while few are ready keeps its room; otherwise the room goes back to the file system.
 */
#include "namespace/ns.h"
#include "util/clock.h"

bool ns_room_low(const struct hifc_ns *ns, uint32_t more)
{
    return ns->free_set.count + more <= NS_SEGMENTS_RESERVE + NS_SEGMENTS_LOW;
}

/* The header's page is written by format and never given back. */
static uint64_t body_of(const struct hifc_ns *ns, uint32_t segment, uint64_t *bytes)
{
    *bytes = ns->segment_size - HIFC_PAGE_BYTES;
    return ns_segment_base(ns, segment) + HIFC_PAGE_BYTES;
}

/* Advice only: a device that cannot take it keeps working, and the room stays. */
static bool give_back(struct hifc_ns *ns, uint32_t segment)
{
    uint64_t bytes, at = body_of(ns, segment, &bytes);
    return ns->device->geometry.deallocate && hifc_blockio_deallocate(ns->io, at, bytes) == 0;
}

static int make_room(struct hifc_ns *ns, uint32_t segment)
{
    uint64_t bytes, at = body_of(ns, segment, &bytes);
    int error = hifc_blockio_allocate(ns->io, at, bytes);
    if (error) {
        (void)give_back(ns, segment); /* a part of a segment is of use to nobody */
    }
    return error;
}

bool ns_room_of_freed(struct hifc_ns *ns, uint32_t segment, bool keep)
{
    const struct hifc_geometry *geometry = &ns->device->geometry;
    bool has_room = ns->segments[segment].has_room || !geometry->thin;
    if (geometry->thin && (keep || !geometry->deallocate)) {
        return has_room || make_room(ns, segment) == 0;
    }
    return !give_back(ns, segment) ? has_room : !geometry->thin;
}

void ns_free_add(struct hifc_ns *ns, uint32_t segment, bool has_room)
{
    ns_segment_set_add(has_room ? &ns->free_set : &ns->roomless_set, segment);
}

bool ns_room_one(struct hifc_ns *ns)
{
    ns_lock(ns);
    if (ns->roomless_set.count == 0) {
        ns_unlock(ns);
        return false;
    }
    /* Nobody else takes from this set while the janitor runs. */
    uint32_t segment = ns_segment_set_lowest(&ns->roomless_set);
    ns_unlock(ns);
    int error = make_room(ns, segment);
    ns_lock(ns);
    if (error) {
        ns->room_failed_ns = hifc_now_ns();
        ns_unlock(ns);
        return false;
    }
    ns_segment_set_remove(&ns->roomless_set, segment);
    ns_free_add(ns, segment, true);
    ns->reclaim_exhausted = false;
    pthread_cond_broadcast(&ns->changed);
    ns_unlock(ns);
    return true;
}
