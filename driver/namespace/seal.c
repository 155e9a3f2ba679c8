/* SPDX-License-Identifier: Apache-2.0
 *
 * seal.c - the end of a segment: its summary and footer, which vouch for everything in it. Blocks; no
 * mutex held on entry.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/invariant.h"

int ns_seal_write(struct hifc_ns *ns, uint32_t segment, struct hifc_footer *footer,
                  const struct hifc_summary_entry *entries, uint32_t entry_count)
{
    uint64_t bytes = (uint64_t)entry_count * sizeof *entries;
    uint64_t pages = hifc_summary_bytes(entry_count);
    uint64_t generation = ns->segments[segment].generation;
    uint8_t *memory = aligned_alloc(HIFC_PAGE_BYTES, pages + HIFC_PAGE_BYTES);
    if (!memory) {
        return hifc_fail(-ENOMEM, "no memory for a summary of %u entries", entry_count);
    }
    memset(memory, 0, pages + HIFC_PAGE_BYTES);
    if (bytes > 0) {
        memcpy(memory, entries, bytes);
    }
    uint32_t offset = ns->segment_size - HIFC_PAGE_BYTES - (uint32_t)pages;
    uint64_t at = ns_segment_base(ns, segment) + offset;
    footer->generation = generation;
    footer->segment = segment;
    footer->entry_count = entry_count;
    footer->summary_offset = offset;
    footer->summary_checksum =
        hifc_summary_checksum(entries, entry_count, ns->sb.uuid, at, generation);
    struct hifc_footer *last = (struct hifc_footer *)(memory + pages);
    *last = *footer;
    hifc_page_seal(last, HIFC_MAGIC_FOOTER, ns->sb.uuid, at + pages, generation);
    int error = hifc_blockio_write(ns->io, at, memory, pages + HIFC_PAGE_BYTES);
    free(memory);
    return error;
}

int ns_seal(struct hifc_ns *ns, struct ns_open *open, int error)
{
    struct ns_segment *segment = &ns->segments[open->segment];
    struct hifc_footer footer = {.epoch = ns->sb.open_epoch,
                                 .first_sequence = open->first_sequence,
                                 .last_sequence = open->last_sequence,
                                 .batch_count = open->acknowledged_batches,
                                 .chain = open->acknowledged_chain,
                                 .used_bytes = open->acknowledged_bytes,
                                 .cls = segment->cls};
    if (!error) {
        error = ns_seal_write(ns, open->segment, &footer, open->entries, open->entry_count);
    }
    ns_lock(ns);
    ns_segment_enter(ns, open->segment, NS_SEALED);
    segment->used_bytes = open->acknowledged_bytes;
    hifc_count_down(ns->closing_count, 1u);
    if (error) {
        segment->entries = open->entries;
        segment->entry_count = open->entry_count;
        open->entries = NULL;
    } else {
        segment->metadata_bytes +=
            (uint32_t)hifc_summary_bytes(open->entry_count) + HIFC_PAGE_BYTES;
    }
    ns_open_destroy(ns, open);
    if (segment->live_entries == 0) {
        ns->janitor_wanted = true;
    }
    pthread_cond_broadcast(&ns->changed);
    ns_unlock(ns);
    return error;
}
