/* SPDX-License-Identifier: Apache-2.0
 *
 * segments.c - which segment is what: free or open, what is live in it, what it still has room for.
 * Mutex held throughout; nothing here blocks.
 */
#include <stdlib.h>

#include "namespace/ns.h"
#include "util/invariant.h"

uint64_t ns_segment_base(const struct hifc_ns *ns, uint32_t segment)
{
    return hifc_segment_offset(ns->segment_size, segment);
}

void ns_segment_enter(struct hifc_ns *ns, uint32_t segment, enum ns_state to)
{
    /* Recovery finds a segment as its header says, so that any state may be its first. */
    static const uint8_t from[] = {
        [NS_FREE] = 1 << NS_RECLAIMING | 1 << NS_DAMAGED,
        [NS_OPEN] = 1 << NS_FREE,
        [NS_CLOSING] = 1 << NS_OPEN,
        [NS_SEALED] = 1 << NS_CLOSING | 1 << NS_RECLAIMING,
        [NS_RECLAIMING] = 1 << NS_SEALED,
        [NS_DAMAGED] = 0,
    };
    struct ns_segment *s = &ns->segments[segment];
    ns_assert_locked(ns);
    hifc_assert(segment < ns->segment_count);
    hifc_assert(from[to] & 1 << s->state || (ns->opening && s->state == NS_FREE));
    if (to == NS_FREE || to == NS_OPEN) {
        hifc_assert(s->live_entries == 0 && s->live_bytes == 0);
        hifc_assert(s->pins == 0 && s->leases == 0 && !s->open);
    }
    if (to == NS_SEALED && s->open) {
        hifc_assert(s->open->reservations == 0 && s->open->inflight == 0);
        hifc_assert(!s->open->forming && !s->open->head);
    }
    s->state = (uint8_t)to;
}

void ns_segment_reset(struct hifc_ns *ns, uint32_t segment, uint64_t generation)
{
    hifc_assert(generation > ns->segments[segment].generation);
    ns_segment_enter(ns, segment, NS_FREE);
    free(ns->segments[segment].entries);
    ns->segments[segment] = (struct ns_segment){.generation = generation, .state = NS_FREE};
}

void ns_segment_pin(struct hifc_ns *ns, uint32_t segment)
{
    ns_assert_locked(ns);
    hifc_assert(ns->segments[segment].state != NS_FREE);
    ns->segments[segment].pins++;
}

void ns_segment_unpin(struct hifc_ns *ns, uint32_t segment)
{
    ns_assert_locked(ns);
    hifc_count_down(ns->segments[segment].pins, 1u);
}

int ns_index_full(struct hifc_ns *ns)
{
    ns->index_full = true;
    ns_want_janitor(ns);
    return ns->reclaim_exhausted ? HIFC_NO_SPACE : HIFC_RETRY;
}

void ns_want_janitor(struct hifc_ns *ns)
{
    if (!ns->janitor_wanted) {
        ns->janitor_wanted = true;
        pthread_cond_broadcast(&ns->changed);
    }
}

bool ns_open_fits(const struct hifc_ns *ns, const struct ns_open *open, uint64_t bytes,
                  uint32_t entries, uint32_t reservations)
{
    /* Each reservation may need a header page of its own to be published. */
    uint64_t need = ns->segments[open->segment].used_bytes + bytes;
    need += (uint64_t)(open->reservations + reservations) * HIFC_PAGE_BYTES;
    need += hifc_summary_bytes(open->entry_count_max + entries + reservations);
    need += HIFC_PAGE_BYTES; /* the footer */
    return need <= ns->segment_size;
}

/* The lowest free segment; there is one. Data then stands at the front of the device as far as it
 * goes, also after reclaim: what was never needed is never written, so a drive has it as spare area
 * and a sparse file does not grow. Wear is even in any case, since a drive spreads it below its
 * logical blocks. */
uint32_t ns_take_free(struct hifc_ns *ns)
{
    uint32_t segment = ns_segment_set_lowest(&ns->free_set);
    ns_segment_set_remove(&ns->free_set, segment);
    return segment;
}

void ns_open_close(struct hifc_ns *ns, struct ns_open *open)
{
    struct ns_segment *segment = &ns->segments[open->segment];
    if (segment->state != NS_OPEN) {
        return;
    }
    ns_segment_enter(ns, open->segment, NS_CLOSING);
    ns->closing_count++;
    if (ns->streams[open->stream] == open) {
        ns->streams[open->stream] = NULL;
    }
    ns_want_janitor(ns);
}

void ns_open_destroy(struct hifc_ns *ns, struct ns_open *open)
{
    struct ns_open **link = &ns->open_list;
    while (*link != open) {
        link = &(*link)->next;
    }
    *link = open->next;
    ns->segments[open->segment].open = NULL;
    ns_pages_free(&ns->pages, (uint8_t *)open->header, HIFC_PAGE_BYTES);
    free(open->entries);
    free(open);
}

/* ---- accounting ----------------------------------------------------------------------------- */

void ns_segment_live(struct hifc_ns *ns, uint32_t segment, uint32_t length, uint32_t part_count)
{
    ns_assert_locked(ns);
    hifc_assert(ns->segments[segment].state != NS_FREE && ns->segments[segment].state != NS_DAMAGED);
    ++*ns_part_counts_extents(&ns->part_counts, part_count);
    ns->segments[segment].live_bytes += hifc_extent_bytes(length, part_count);
    ns->segments[segment].live_entries++;
}

void ns_segment_dead(struct hifc_ns *ns, uint32_t segment, uint32_t length, uint32_t part_count)
{
    ns_assert_locked(ns);
    hifc_count_down(*ns_part_counts_extents(&ns->part_counts, part_count), 1u);
    hifc_count_down(ns->segments[segment].live_bytes, hifc_extent_bytes(length, part_count));
    hifc_count_down(ns->segments[segment].live_entries, 1u);
    ns->reclaim_exhausted = false;
    if (ns->segments[segment].live_entries == 0 && ns->segments[segment].state == NS_SEALED) {
        ns_want_janitor(ns);
    }
}

uint32_t ns_slot_parts(const struct hifc_ns *ns, const struct hifc_slot *slot)
{
    return ns->part_counts.counts[hifc_slot_shape(slot)];
}

int ns_slot_answer(const struct hifc_slot *slot)
{
    if (!slot || slot->flags & HIFC_SLOT_QUARANTINED) {
        return HIFC_MISS;
    }
    return slot->flags & HIFC_SLOT_PENDING ? HIFC_PENDING : HIFC_OK;
}

void ns_slot_dead(struct hifc_ns *ns, const struct hifc_slot *slot)
{
    ns_segment_dead(ns, slot->segment, slot->length, ns_slot_parts(ns, slot));
}

bool ns_open_reserve_entry(struct ns_open *open)
{
    if (open->entry_count_max + open->reservations < open->entry_capacity) {
        return true;
    }
    uint32_t capacity = open->entry_capacity ? open->entry_capacity * 2 : 64;
    void *grown = realloc(open->entries, capacity * sizeof *open->entries);
    if (grown) {
        open->entries = grown;
        open->entry_capacity = capacity;
    }
    return grown != NULL;
}
