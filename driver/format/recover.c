/* SPDX-License-Identifier: Apache-2.0
 *
 * recover.c - see recover.h. Five steps: the header of every segment; the footer of every open one;
 * summaries; the batches of what has none; then, with the flushed marks known, what counts. The
 * segments are handed out after that, and last their entries, merged by sequence.
 *
 * Nothing is written, and nothing that could not be read is taken for empty: a page that the medium
 * lost is damage, any other failure of the device ends recovery with its error.
 *
 * One thread, before anything else uses the namespace; blocking.
 */
#include "format/recover.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "format/merge.h"
#include "format/scan.h"
#include "util/error.h"

#define PAGES_AT_ONCE 1024u /* single pages read by one call */

/* What recovery knows of a segment beside what it hands out. */
struct found {
    struct hifc_scan *scan; /* NULL: has a summary, or nothing in it counts */
    uint64_t summary_sequence; /* lower bound of its entries' */
    uint32_t header_checksum;
    uint32_t summary_offset, summary_checksum;
    uint32_t footer_used_bytes, footer_batch_count, footer_chain;
    bool open;   /* its header says so */
    bool vouched; /* its footer is valid: all that it counts was flushed */
};

/* The highest mark in headers of one open epoch. It says nothing of batches of other epochs: what
 * an earlier recovery did not accept stays unaccepted, however high marks rise later. */
struct mark {
    uint64_t epoch, sequence;
};

struct recovery {
    struct hifc_blockio *io;
    const struct hifc_superblock *sb;
    const struct hifc_recover_opts *opts;
    struct hifc_recover_result *out;
    struct hifc_recovered_segment *segments;
    struct found *found;
    struct mark *marks;
    uint32_t mark_count;
    uint64_t sequence_highest;
    bool headers_lost;
    struct hifc_scan_source source;
    uint8_t *pages;
    uint64_t *offsets;
    uint32_t *indices;
    bool *lost;
};

static void sequence_seen(struct recovery *recovery, uint64_t sequence)
{
    if (sequence > recovery->sequence_highest) {
        recovery->sequence_highest = sequence;
    }
}

/* Reads the pages at offsets[0..count); lost[i]: the medium lost it. */
static int read_single_pages(struct recovery *recovery, uint32_t count)
{
    int error = hifc_blockio_read_many(recovery->io, recovery->offsets, count, recovery->pages,
                                       HIFC_PAGE_BYTES);
    memset(recovery->lost, 0, count * sizeof *recovery->lost);
    if (!hifc_recover_unreadable(error)) {
        return error;
    }
    error = 0;
    for (uint32_t i = 0; i < count && error == 0; i++) {
        error = hifc_blockio_read(recovery->io, recovery->offsets[i],
                                  recovery->pages + (uint64_t)i * HIFC_PAGE_BYTES,
                                  HIFC_PAGE_BYTES);
        if (hifc_recover_unreadable(error)) {
            recovery->lost[i] = true;
            error = 0;
        }
    }
    return error;
}

/* ---- segment headers ------------------------------------------------------------------------ */

static void take_header(struct recovery *recovery, uint32_t index, const void *page, bool lost)
{
    struct hifc_recovered_segment *segment = &recovery->segments[index];
    struct found *found = &recovery->found[index];
    const struct hifc_segment_header *header = page;
    uint64_t at = hifc_segment_offset(recovery->sb->segment_size_bytes, index);
    segment->segment = index;
    if (lost || !hifc_page_valid(page, HIFC_MAGIC_SEGMENT, recovery->sb->uuid, at, 0) ||
        header->segment != index || header->generation == 0 || header->cls > HIFC_SWAP ||
        (header->state != HIFC_DISK_FREE && header->state != HIFC_DISK_OPEN)) {
        segment->state = HIFC_RECOVERED_DAMAGED;
        recovery->headers_lost = true;
        hifc_recover_damage(recovery->out, "segment %" PRIu32 ": its header at %" PRIu64 " is %s",
                            index, at, lost ? "unreadable" : "not valid");
        return;
    }
    segment->generation = header->generation;
    segment->epoch = header->epoch;
    segment->cls = header->cls;
    found->header_checksum = header->head.checksum;
    if (header->state == HIFC_DISK_FREE) {
        segment->state = HIFC_RECOVERED_FREE;
        return;
    }
    found->open = true;
    segment->state = header->cls == HIFC_SWAP ? HIFC_RECOVERED_SWAP_DEAD
                                              : HIFC_RECOVERED_SCANNED;
    segment->open_sequence = header->open_sequence;
    sequence_seen(recovery, header->open_sequence);
}

static int read_headers(struct recovery *recovery)
{
    uint32_t total = recovery->sb->segment_count;
    for (uint32_t first = 0; first < total; first += PAGES_AT_ONCE) {
        uint32_t count = total - first < PAGES_AT_ONCE ? total - first : PAGES_AT_ONCE;
        for (uint32_t i = 0; i < count; i++) {
            recovery->offsets[i] =
                hifc_segment_offset(recovery->sb->segment_size_bytes, first + i);
        }
        int error = read_single_pages(recovery, count);
        if (error) {
            return error;
        }
        for (uint32_t i = 0; i < count; i++) {
            take_header(recovery, first + i, recovery->pages + (uint64_t)i * HIFC_PAGE_BYTES,
                        recovery->lost[i]);
        }
    }
    return 0;
}

/* ---- footers and summaries ------------------------------------------------------------------ */

static bool footer_sane(const struct recovery *recovery, const struct hifc_footer *footer,
                        const struct hifc_recovered_segment *segment)
{
    uint64_t end = recovery->sb->segment_size_bytes - HIFC_PAGE_BYTES;
    uint64_t bytes = (uint64_t)footer->entry_count * sizeof(struct hifc_summary_entry);
    uint64_t pages = hifc_whole_pages(bytes);
    return footer->segment == segment->segment && footer->generation == segment->generation &&
           footer->epoch == segment->epoch && footer->cls == segment->cls && pages <= end &&
           footer->summary_offset == end - pages && footer->used_bytes >= HIFC_PAGE_BYTES &&
           footer->used_bytes % HIFC_PAGE_BYTES == 0 &&
           footer->used_bytes <= footer->summary_offset;
}

static void take_footer(struct recovery *recovery, uint32_t index, const void *page, bool lost)
{
    struct hifc_recovered_segment *segment = &recovery->segments[index];
    struct found *found = &recovery->found[index];
    const struct hifc_footer *footer = page;
    uint64_t size = recovery->sb->segment_size_bytes;
    uint64_t at = hifc_segment_offset(size, index) + size - HIFC_PAGE_BYTES;
    if (lost || !hifc_page_valid(page, HIFC_MAGIC_FOOTER, recovery->sb->uuid, at,
                                 segment->generation)) {
        return; /* never sealed, or no longer known to be: its batches tell */
    }
    sequence_seen(recovery, footer->last_sequence);
    if (!footer_sane(recovery, footer, segment)) {
        hifc_recover_damage(recovery->out, "segment %" PRIu32 ": its footer makes no sense", index);
        return;
    }
    found->vouched = true;
    found->summary_sequence = footer->first_sequence;
    found->summary_offset = footer->summary_offset;
    found->summary_checksum = footer->summary_checksum;
    found->footer_used_bytes = footer->used_bytes;
    found->footer_batch_count = footer->batch_count;
    found->footer_chain = footer->chain;
    segment->first_sequence = footer->first_sequence;
    segment->last_sequence = footer->last_sequence;
    segment->used_bytes = footer->used_bytes;
    segment->batch_count = footer->batch_count;
    segment->chain = footer->chain;
    segment->entry_count = footer->entry_count;
    if (segment->cls == HIFC_REUSE) {
        segment->state = HIFC_RECOVERED_SEALED;
    }
}

static int read_footers(struct recovery *recovery)
{
    uint64_t size = recovery->sb->segment_size_bytes;
    for (uint32_t next = 0; next < recovery->sb->segment_count;) {
        uint32_t count = 0;
        for (; next < recovery->sb->segment_count && count < PAGES_AT_ONCE; next++) {
            if (recovery->found[next].open) {
                recovery->indices[count] = next;
                recovery->offsets[count++] =
                    hifc_segment_offset(size, next) + size - HIFC_PAGE_BYTES;
            }
        }
        int error = count ? read_single_pages(recovery, count) : 0;
        if (error) {
            return error;
        }
        for (uint32_t i = 0; i < count; i++) {
            take_footer(recovery, recovery->indices[i],
                        recovery->pages + (uint64_t)i * HIFC_PAGE_BYTES, recovery->lost[i]);
        }
    }
    return 0;
}

static struct hifc_merge_input input_of(const struct recovery *recovery, uint32_t index)
{
    const struct hifc_recovered_segment *segment = &recovery->segments[index];
    const struct found *found = &recovery->found[index];
    bool scanned = segment->entries != NULL;
    return (struct hifc_merge_input){
        .first_sequence = scanned ? segment->first_sequence : found->summary_sequence,
        .generation = segment->generation,
        .segment = index,
        .entry_count = segment->entry_count,
        .summary_offset = found->summary_offset,
        .summary_checksum = found->summary_checksum,
        .entries = segment->entries};
}

/* Verifies the summary of a sealed segment; one that is bad sends the segment to be scanned. That
 * alone is no damage: a cut between the pages of the last write leaves it, too. */
static int check_summary(struct recovery *recovery, uint32_t index,
                         struct hifc_summary_entry **entries)
{
    struct hifc_recovered_segment *segment = &recovery->segments[index];
    struct hifc_merge_input input = input_of(recovery, index);
    int error = hifc_summary_load(recovery->io, recovery->sb, &input, entries);
    if (hifc_recover_unreadable(error)) {
        hifc_recover_damage(recovery->out, "segment %" PRIu32 ": its summary at offset %" PRIu32
                            " is unreadable, its %" PRIu32 " batches are read instead",
                            index, input.summary_offset, segment->batch_count);
        error = -EBADMSG;
    }
    if (error == -EBADMSG) {
        segment->state = HIFC_RECOVERED_SCANNED;
        error = 0;
    }
    return error;
}

/* ---- batches -------------------------------------------------------------------------------- */

static int mark_seen(struct recovery *recovery, uint64_t epoch, uint64_t sequence)
{
    if (sequence > recovery->out->flushed_sequence) {
        recovery->out->flushed_sequence = sequence;
    }
    for (uint32_t i = 0; i < recovery->mark_count; i++) {
        if (recovery->marks[i].epoch == epoch) {
            if (sequence > recovery->marks[i].sequence) {
                recovery->marks[i].sequence = sequence;
            }
            return 0;
        }
    }
    void *moved = realloc(recovery->marks,
                          (recovery->mark_count + 1) * sizeof *recovery->marks);
    if (!moved) {
        return hifc_fail(-ENOMEM, "no memory for the flushed marks");
    }
    recovery->marks = moved;
    recovery->marks[recovery->mark_count++] =
        (struct mark){.epoch = epoch, .sequence = sequence};
    return 0;
}

static uint64_t mark_of(const struct recovery *recovery, uint64_t epoch)
{
    for (uint32_t i = 0; i < recovery->mark_count; i++) {
        if (recovery->marks[i].epoch == epoch) {
            return recovery->marks[i].sequence;
        }
    }
    return 0;
}

static int walk(struct recovery *recovery, uint32_t index)
{
    struct hifc_recovered_segment *segment = &recovery->segments[index];
    struct found *found = &recovery->found[index];
    uint64_t end = found->vouched ? found->footer_used_bytes
                                  : recovery->sb->segment_size_bytes - HIFC_PAGE_BYTES;
    /* Of dead swap nothing counts, but its headers, as far as they go, tell what was flushed. */
    bool past = segment->state != HIFC_RECOVERED_SWAP_DEAD;
    found->scan = calloc(1, sizeof *found->scan);
    if (!found->scan) {
        return hifc_fail(-ENOMEM, "no memory to scan segment %" PRIu32, index);
    }
    int error = hifc_scan_walk(&recovery->source, segment, found->header_checksum, (uint32_t)end,
                               past, found->scan);
    sequence_seen(recovery, found->scan->sequence_highest);
    if (error == 0 && !found->vouched) {
        error = mark_seen(recovery, segment->epoch, found->scan->flushed_sequence);
    }
    if (!past) {
        hifc_scan_free(found->scan);
        free(found->scan);
        found->scan = NULL;
    }
    return error;
}

/* What counts of a segment whose footer is valid: everything up to where the footer says. */
static int accept_vouched(struct recovery *recovery, uint32_t index)
{
    struct hifc_recovered_segment *segment = &recovery->segments[index];
    const struct found *found = &recovery->found[index];
    int error = hifc_scan_accept(&recovery->source, found->scan, UINT64_MAX, segment,
                                 recovery->out);
    if (error == 0 && (segment->used_bytes != found->footer_used_bytes ||
                       segment->batch_count != found->footer_batch_count ||
                       segment->chain != found->footer_chain)) {
        hifc_recover_damage(recovery->out,
                            "segment %" PRIu32 ": %" PRIu32 " batches in %" PRIu32
                            " bytes, its footer says %" PRIu32 " in %" PRIu32,
                            index, segment->batch_count, segment->used_bytes,
                            found->footer_batch_count, found->footer_used_bytes);
    }
    return error;
}

/* scan_all: the headers of a sealed segment against its summary, which is what counts. */
static int compare(struct recovery *recovery, uint32_t index,
                   const struct hifc_summary_entry *entries)
{
    struct hifc_recovered_segment *segment = &recovery->segments[index];
    const struct hifc_recovered_segment sealed = *segment;
    struct found *found = &recovery->found[index];
    uint64_t damaged = recovery->out->damaged;
    int error = walk(recovery, index);
    if (error == 0) {
        error = accept_vouched(recovery, index);
    }
    if (error == 0 && recovery->out->damaged == damaged &&
        (segment->entry_count != sealed.entry_count ||
         (sealed.entry_count > 0 &&
          memcmp(found->scan->entries, entries, sealed.entry_count * sizeof *entries) != 0))) {
        hifc_recover_damage(recovery->out,
                            "segment %" PRIu32 ": its summary of %" PRIu32
                            " entries differs from the %" PRIu32 " in its headers",
                            index, sealed.entry_count, segment->entry_count);
    }
    *segment = sealed;
    if (found->scan) {
        hifc_scan_free(found->scan);
        free(found->scan);
        found->scan = NULL;
    }
    return error;
}

static int read_contents(struct recovery *recovery)
{
    int error = 0;
    for (uint32_t i = 0; i < recovery->sb->segment_count && error == 0; i++) {
        struct hifc_recovered_segment *segment = &recovery->segments[i];
        struct hifc_summary_entry *entries = NULL;
        if (segment->state == HIFC_RECOVERED_SEALED) {
            error = check_summary(recovery, i, &entries);
            if (error == 0 && segment->state == HIFC_RECOVERED_SEALED &&
                recovery->opts->scan_all) {
                error = compare(recovery, i, entries);
            }
            free(entries);
        }
        bool unsealed_swap = segment->state == HIFC_RECOVERED_SWAP_DEAD &&
                             !recovery->found[i].vouched;
        if (error == 0 && (segment->state == HIFC_RECOVERED_SCANNED || unsealed_swap)) {
            error = walk(recovery, i);
        }
    }
    return error;
}

static int accept_scanned(struct recovery *recovery)
{
    int error = 0;
    for (uint32_t i = 0; i < recovery->sb->segment_count && error == 0; i++) {
        struct hifc_recovered_segment *segment = &recovery->segments[i];
        struct found *found = &recovery->found[i];
        if (segment->state != HIFC_RECOVERED_SCANNED) {
            continue;
        }
        error = found->vouched
                    ? accept_vouched(recovery, i)
                    : hifc_scan_accept(&recovery->source, found->scan,
                                       mark_of(recovery, segment->epoch), segment, recovery->out);
    }
    return error;
}

/* ---- handing out ---------------------------------------------------------------------------- */

static int hand_out_segments(struct recovery *recovery,
                             const struct hifc_recover_callbacks *callbacks)
{
    int error = 0;
    for (uint32_t i = 0; i < recovery->sb->segment_count && error == 0; i++) {
        error = callbacks->segment(callbacks->ctx, &recovery->segments[i]);
    }
    return error;
}

static int hand_out_entries(struct recovery *recovery,
                            const struct hifc_recover_callbacks *callbacks)
{
    uint32_t count = 0;
    struct hifc_merge_input *inputs = calloc(recovery->sb->segment_count, sizeof *inputs);
    if (!inputs) {
        return hifc_fail(-ENOMEM, "no memory to merge the summaries");
    }
    for (uint32_t i = 0; i < recovery->sb->segment_count; i++) {
        const struct hifc_recovered_segment *segment = &recovery->segments[i];
        if ((segment->state == HIFC_RECOVERED_SEALED ||
             segment->state == HIFC_RECOVERED_SCANNED) &&
            segment->entry_count > 0) {
            inputs[count++] = input_of(recovery, i);
        }
    }
    int error = hifc_merge(recovery->io, recovery->sb, inputs, count, callbacks,
                           &recovery->out->accepted);
    free(inputs);
    return error;
}

static int recovery_init(struct recovery *recovery)
{
    uint32_t count = recovery->sb->segment_count;
    recovery->segments = calloc(count, sizeof *recovery->segments);
    recovery->found = calloc(count, sizeof *recovery->found);
    recovery->pages = aligned_alloc(HIFC_PAGE_BYTES, PAGES_AT_ONCE * HIFC_PAGE_BYTES);
    recovery->offsets = calloc(PAGES_AT_ONCE, sizeof *recovery->offsets);
    recovery->indices = calloc(PAGES_AT_ONCE, sizeof *recovery->indices);
    recovery->lost = calloc(PAGES_AT_ONCE, sizeof *recovery->lost);
    if (!recovery->segments || !recovery->found || !recovery->pages || !recovery->offsets ||
        !recovery->indices || !recovery->lost) {
        return hifc_fail(-ENOMEM, "no memory to recover %" PRIu32 " segments", count);
    }
    return hifc_scan_source_init(&recovery->source, recovery->io, recovery->sb);
}

static void recovery_free(struct recovery *recovery)
{
    for (uint32_t i = 0; recovery->found && i < recovery->sb->segment_count; i++) {
        if (recovery->found[i].scan) {
            hifc_scan_free(recovery->found[i].scan);
            free(recovery->found[i].scan);
        }
    }
    hifc_scan_source_free(&recovery->source);
    free(recovery->segments);
    free(recovery->found);
    free(recovery->marks);
    free(recovery->pages);
    free(recovery->offsets);
    free(recovery->indices);
    free(recovery->lost);
}

int hifc_recover(struct hifc_blockio *io, const struct hifc_superblock *sb,
                 const struct hifc_recover_opts *opts,
                 const struct hifc_recover_callbacks *callbacks, struct hifc_recover_result *out)
{
    struct recovery recovery = {.io = io, .sb = sb, .opts = opts, .out = out};
    memset(out, 0, sizeof *out);
    int error = recovery_init(&recovery);
    if (error == 0) {
        error = read_headers(&recovery);
    }
    if (error == 0) {
        error = read_footers(&recovery);
    }
    if (error == 0) {
        error = read_contents(&recovery);
    }
    if (error == 0) {
        error = accept_scanned(&recovery);
    }
    out->next_sequence = recovery.sequence_highest + 1;
    if (recovery.headers_lost) {
        /* Should such a segment become readable again, its sequences must not be ours by then. */
        out->next_sequence += sb->segment_count * (sb->segment_size_bytes / HIFC_PAGE_BYTES);
    }
    if (error == 0) {
        error = hand_out_segments(&recovery, callbacks);
    }
    if (error == 0) {
        error = hand_out_entries(&recovery, callbacks);
    }
    recovery_free(&recovery);
    return error;
}
