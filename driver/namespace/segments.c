/* SPDX-License-Identifier: Apache-2.0
 *
 * segments.c - which segment is what: opening one for a stream, rolling over to the next,
 * live bytes. Mutex held throughout; nothing here blocks.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/clock.h"

uint64_t ns_segment_base(const struct hifc_ns *ns, uint32_t segment)
{
    return hifc_segment_offset(ns->segment_size, segment);
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

void ns_map_add(uint64_t *map, uint32_t *from, uint32_t segment)
{
    map[segment / 64] |= 1ull << segment % 64;
    *from = segment / 64 < *from ? segment / 64 : *from;
}

uint32_t ns_map_lowest(const uint64_t *map, uint32_t *from)
{
    while (map[*from] == 0) {
        ++*from;
    }
    return *from * 64 + (uint32_t)__builtin_ctzll(map[*from]);
}

void ns_map_remove(uint64_t *map, uint32_t segment)
{
    map[segment / 64] &= ~(1ull << segment % 64);
}

/* The lowest free segment; there is one. Data then stands at the front of the device as far as it
 * goes, also after reclaim: what was never needed is never written, so a drive has it as spare area
 * and a sparse file does not grow. Wear is even in any case, since a drive spreads it below its
 * logical blocks. */
static uint32_t take_free(struct hifc_ns *ns)
{
    uint32_t segment = ns_map_lowest(ns->free_map, &ns->free_from);
    ns_map_remove(ns->free_map, segment);
    ns->free_count--;
    return segment;
}

static void header_done(struct hifc_xfer *xfer)
{
    struct ns_open *open = xfer->owner;
    open->next_done = open->ns->done_headers;
    open->ns->done_headers = open;
}

static struct ns_open *segment_open(struct hifc_ns *ns, unsigned stream)
{
    struct ns_open *open = calloc(1, sizeof *open);
    uint8_t *page = open ? ns_page_alloc_lasting(ns) : NULL;
    if (!page) {
        free(open);
        return NULL;
    }
    uint32_t index = take_free(ns);
    struct ns_segment *segment = &ns->segments[index];
    uint8_t cls = stream == NS_STREAM_SWAP || stream == NS_STREAM_SWAP_MOVED ? HIFC_SWAP
                                                                             : HIFC_REUSE;
    *segment = (struct ns_segment){.generation = segment->generation,
                                   .open_sequence = ns->sequence + 1,
                                   .used_bytes = HIFC_PAGE_BYTES,
                                   .metadata_bytes = HIFC_PAGE_BYTES,
                                   .state = NS_OPEN,
                                   .cls = cls,
                                   .has_room = true,
                                   .open = open};
    open->ns = ns;
    open->segment = index;
    open->stream = (uint8_t)stream;
    open->tail = &open->head;
    open->header = (struct hifc_segment_header *)page;
    memset(page, 0, HIFC_PAGE_BYTES);
    open->header->generation = segment->generation;
    open->header->epoch = ns->sb.open_epoch;
    open->header->open_sequence = segment->open_sequence;
    open->header->segment = index;
    open->header->state = HIFC_DISK_OPEN;
    open->header->cls = cls;
    hifc_page_seal(page, HIFC_MAGIC_SEGMENT, ns->sb.uuid, ns_segment_base(ns, index), 0);
    open->chain = open->acknowledged_chain = open->header->head.checksum;
    open->acknowledged_bytes = HIFC_PAGE_BYTES;
    open->header_span = (struct hifc_span){.base = page, .bytes = HIFC_PAGE_BYTES};
    open->header_xfer = (struct hifc_xfer){.spans = &open->header_span,
                                           .span_count = 1,
                                           .op = HIFC_IO_WRITE,
                                           .offset_bytes = ns_segment_base(ns, index),
                                           .length_bytes = HIFC_PAGE_BYTES,
                                           .done = header_done,
                                           .owner = open};
    ns_issue(ns, &open->header_xfer);
    open->next = ns->open_list;
    ns->open_list = open;
    ns->streams[stream] = open;
    return open;
}

void ns_open_close(struct hifc_ns *ns, struct ns_open *open)
{
    struct ns_segment *segment = &ns->segments[open->segment];
    if (segment->state != NS_OPEN) {
        return;
    }
    segment->state = NS_CLOSING;
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
    ns_pages_free(ns, (uint8_t *)open->header, HIFC_PAGE_BYTES);
    free(open->entries);
    free(open);
}

/* How many free segments a stream must leave: what frees space may use the reserve. */
static uint32_t reserve_for(unsigned stream, bool frees_space)
{
    if (stream == NS_STREAM_REUSE_MOVED || stream == NS_STREAM_SWAP_MOVED) {
        return 0;
    }
    return frees_space ? 1 : NS_SEGMENTS_RESERVE;
}

struct ns_open *ns_stream_open(struct hifc_ns *ns, unsigned stream, uint64_t extent_bytes,
                               bool reserve, int *status)
{
    struct ns_open *open = ns->streams[stream];
    /* Worst case: a header page and a page for packed values besides the extent. */
    uint64_t bytes = extent_bytes + 2 * HIFC_PAGE_BYTES;
    uint32_t entries = reserve ? 0 : 1;
    if (open && !open->failed && ns_open_fits(ns, open, bytes, entries, reserve)) {
        return open;
    }
    uint32_t keep = reserve_for(stream, extent_bytes == 0);
    if (ns->free_count <= keep + NS_SEGMENTS_LOW) {
        ns_want_janitor(ns);
    }
    if (ns->free_count <= keep) {
        ns->segment_wanted = true;
        bool stale = ns->roomless_count > 0 && hifc_now_ns() - ns->room_failed_ns > NS_ROOM_STALE_NS;
        *status = ns->reclaim_exhausted && !stale ? HIFC_NO_SPACE : HIFC_RETRY;
        return NULL;
    }
    if (ns->closing_count >= NS_CLOSING_MAX + NS_STREAMS) {
        ns_want_janitor(ns);
        *status = HIFC_RETRY;
        return NULL;
    }
    if (open) {
        /* What stands in it comes first: a later batch of the next segment may replace it. */
        if (open->forming && !open->failed) {
            ns_batch_close(ns, open->forming);
        }
        ns_open_close(ns, open);
    }
    open = segment_open(ns, stream);
    if (!open) {
        *status = HIFC_RETRY;
    }
    return open;
}

/* ---- accounting ----------------------------------------------------------------------------- */

/* Of an extent: its part count is in use, for some slot names it or is about to. */
static uint64_t *shape_extents(struct hifc_ns *ns, uint32_t part_count)
{
    return &ns->shape_extents[ns_shape(ns, part_count > 1 ? part_count : 1)];
}

void ns_segment_live(struct hifc_ns *ns, uint32_t segment, uint32_t length, uint32_t part_count)
{
    ++*shape_extents(ns, part_count);
    ns->segments[segment].live_bytes += hifc_extent_bytes(length, part_count);
    ns->segments[segment].live_entries++;
}

void ns_segment_dead(struct hifc_ns *ns, uint32_t segment, uint32_t length, uint32_t part_count)
{
    --*shape_extents(ns, part_count);
    ns->segments[segment].live_bytes -= hifc_extent_bytes(length, part_count);
    ns->segments[segment].live_entries--;
    ns->reclaim_exhausted = false;
    if (ns->segments[segment].live_entries == 0 && ns->segments[segment].state == NS_SEALED) {
        ns_want_janitor(ns);
    }
}

uint32_t ns_slot_parts(const struct hifc_ns *ns, const struct hifc_slot *slot)
{
    return ns->shapes[hifc_slot_shape(slot)];
}

void ns_slot_dead(struct hifc_ns *ns, const struct hifc_slot *slot)
{
    ns_segment_dead(ns, slot->segment, slot->length, ns_slot_parts(ns, slot));
}
