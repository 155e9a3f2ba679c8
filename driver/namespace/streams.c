/* SPDX-License-Identifier: Apache-2.0
 *
 * streams.c - the open segment of each stream: opening one, and rolling over to the next when it is
 * full. Mutex held, except in the callback; nothing here blocks.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/clock.h"

static void header_done(struct hifc_xfer *xfer)
{
    struct ns_open *open = xfer->owner;
    open->next_done = open->ns->done_headers;
    open->ns->done_headers = open;
}

static struct ns_open *segment_open(struct hifc_ns *ns, unsigned stream)
{
    struct ns_open *open = calloc(1, sizeof *open);
    uint8_t *page = open ? ns_pages_alloc_lasting(&ns->pages) : NULL;
    if (!page) {
        free(open);
        return NULL;
    }
    uint32_t index = ns_take_free(ns);
    struct ns_segment *segment = &ns->segments[index];
    uint8_t cls = stream == NS_STREAM_SWAP || stream == NS_STREAM_SWAP_MOVED ? HIFC_SWAP
                                                                             : HIFC_REUSE;
    ns_segment_enter(ns, index, NS_OPEN);
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
    ns_assert_locked(ns);
    /* Worst case: a header page and a page for packed values besides the extent. */
    uint64_t bytes = extent_bytes + 2 * HIFC_PAGE_BYTES;
    uint32_t entries = reserve ? 0 : 1;
    if (open && !open->failed && ns_open_fits(ns, open, bytes, entries, reserve)) {
        return open;
    }
    uint32_t keep = reserve_for(stream, extent_bytes == 0);
    if (ns->free_set.count <= keep + NS_SEGMENTS_LOW) {
        ns_want_janitor(ns);
    }
    if (ns->free_set.count <= keep) {
        ns->segment_wanted = true;
        bool stale = ns->roomless_set.count > 0 && hifc_now_ns() - ns->room_failed_ns > NS_ROOM_STALE_NS;
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
