/* SPDX-License-Identifier: Apache-2.0
 *
 * repair.c - setting damaged segments free.
 *
 * A segment is damaged if its header page is no header: what stood in it is out of reach, and its
 * room is unused. A new header "free" gives the room back. Its generation must be above that of
 * any page that still stands there, or such a page could count again in the segment's next life;
 * so the whole segment is read for it, and it is above that of every other segment as well, since a
 * page that was deallocated may come back.
 *
 * Blocks, with the janitor standing still. A crash leaves each segment damaged or free.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"

#define REPAIR_READ_BYTES (1u << 20)

static uint64_t page_generation(const struct hifc_ns *ns, const uint8_t *page, uint64_t place)
{
    const struct hifc_batch_header *batch = (const void *)page;
    const struct hifc_footer *footer = (const void *)page;
    if (hifc_page_valid(page, HIFC_MAGIC_BATCH, ns->sb.uuid, place, batch->generation)) {
        return batch->generation;
    }
    if (hifc_page_valid(page, HIFC_MAGIC_FOOTER, ns->sb.uuid, place, footer->generation)) {
        return footer->generation;
    }
    return 0;
}

/* The highest generation of any page in the segment. What cannot be read is passed over: it will not
 * be read as a page of that generation later either. */
static uint64_t highest_in(struct hifc_ns *ns, uint32_t segment, uint8_t *memory)
{
    uint64_t highest = 0, base = ns_segment_base(ns, segment);
    for (uint32_t at = 0; at < ns->segment_size; at += REPAIR_READ_BYTES) {
        uint32_t bytes = ns->segment_size - at < REPAIR_READ_BYTES ? ns->segment_size - at
                                                                    : REPAIR_READ_BYTES;
        bool whole = hifc_blockio_read(ns->io, base + at, memory, bytes) == 0;
        for (uint32_t page = 0; page < bytes; page += HIFC_PAGE_BYTES) {
            uint64_t place = base + at + page;
            if (whole || hifc_blockio_read(ns->io, place, memory + page, HIFC_PAGE_BYTES) == 0) {
                uint64_t found = page_generation(ns, memory + page, place);
                highest = found > highest ? found : highest;
            }
        }
    }
    return highest;
}

static uint64_t highest_of_all(const struct hifc_ns *ns)
{
    uint64_t highest = 0;
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        highest = ns->segments[i].generation > highest ? ns->segments[i].generation : highest;
    }
    return highest;
}

static int free_damaged(struct hifc_ns *ns, uint32_t segment, uint8_t *memory)
{
    uint64_t here = highest_in(ns, segment, memory), all = highest_of_all(ns);
    uint64_t generation = here > all ? here : all;
    ns->segments[segment].generation = generation;
    int error = ns_write_free_header(ns, segment);
    error = error ? error : hifc_blockio_flush(ns->io);
    if (error) {
        return error;
    }
    bool has_room = ns_room_of_freed(ns, segment, false);
    ns_lock(ns);
    ns_segment_reset(ns, segment, generation + 1);
    ns_free_add(ns, segment, has_room);
    ns->reclaim_exhausted = false;
    pthread_cond_broadcast(&ns->changed);
    ns_unlock(ns);
    return 0;
}

static int repair(struct hifc_ns *ns, struct hifc_repair_result *out)
{
    uint8_t *memory = aligned_alloc(HIFC_PAGE_BYTES, REPAIR_READ_BYTES);
    if (!memory) {
        return hifc_fail(-ENOMEM, "no memory to read damaged segments");
    }
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        if (ns->segments[i].state != NS_DAMAGED) {
            continue;
        }
        out->segments_damaged++;
        if (free_damaged(ns, i, memory) == 0) {
            out->segments_freed++;
        } else if (!out->first_problem[0]) {
            struct hifc_error why;
            hifc_error_copy(&why);
            snprintf(out->first_problem, sizeof out->first_problem, "segment %u: %.200s", i,
                     why.message);
        }
    }
    free(memory);
    return 0;
}

HIFC_API int hifc_repair(struct hifc_ns *ns, struct hifc_repair_result *out)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    memset(out, 0, sizeof *out);
    if (ns->read_only) {
        return hifc_fail(-EROFS, "%s is open read-only: open it writable to repair it", ns->uri);
    }
    ns_janitor_pause(ns);
    error = repair(ns, out);
    ns_janitor_resume(ns);
    return error;
}
