/* SPDX-License-Identifier: Apache-2.0
 *
 * scan.h - reading one segment by its batch headers, for recovery.
 *
 * Two steps, because what may be accepted depends on the flushed mark, and the mark is the highest
 * that stands in any header of any segment: `walk` lists every valid batch header of a segment's
 * present life, `accept` then decides where its history ends. Nothing here writes.
 *
 * One thread; blocking.
 */
#ifndef HIFC_SCAN_H
#define HIFC_SCAN_H

#include "format/recover.h"

/* The bytes of one segment at a time, read when they are looked at. */
struct hifc_scan_source {
    struct hifc_blockio *io;
    const struct hifc_superblock *sb;
    uint32_t segment; /* whose bytes memory holds */
    uint8_t *memory;  /* of a whole segment */
    uint8_t *pages;   /* of each page: enum page_state */
};

struct hifc_scan_batch {
    uint64_t sequence;
    uint32_t offset; /* within the segment, bytes */
    uint32_t bytes;
    uint32_t checksum;
    uint32_t entry_first, entry_count; /* in hifc_scan.entries */
    bool linked; /* follows the one before (the first: the segment header) with no gap */
};

/* What walk found, in order of place and of sequence. */
struct hifc_scan {
    struct hifc_scan_batch *batches;
    struct hifc_summary_entry *entries;
    uint32_t batch_count, batch_capacity;
    uint32_t entry_count, entry_capacity;
    uint32_t header_checksum;  /* of the segment header */
    uint32_t end;              /* where walk stopped looking */
    uint64_t sequence_highest; /* in any valid header there, also of a life that never counted */
    uint64_t flushed_sequence; /* the highest mark in headers of this epoch */
};

int hifc_scan_source_init(struct hifc_scan_source *source, struct hifc_blockio *io,
                          const struct hifc_superblock *sb);
void hifc_scan_source_free(struct hifc_scan_source *source);

/* Lists the batches below end. past: does not stop at the first page that should be a header and is
 * none, but looks at every page behind it. segment: generation and epoch are known. */
int hifc_scan_walk(struct hifc_scan_source *source, const struct hifc_recovered_segment *segment,
                   uint32_t header_checksum, uint32_t end, bool past, struct hifc_scan *out);
/* Fills segment's used_bytes, batch_count, chain, sequences and entries with what counts: batches
 * up to mark as they are, later ones in unbroken order if their payload is what it should be. */
int hifc_scan_accept(struct hifc_scan_source *source, const struct hifc_scan *scan, uint64_t mark,
                     struct hifc_recovered_segment *segment, struct hifc_recover_result *result);
void hifc_scan_free(struct hifc_scan *scan);

/* Counts damage; the first is described. */
void hifc_recover_damage(struct hifc_recover_result *result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* True if the last error says that the medium lost what was to be read there; any other error means
 * that nothing is known about the place. */
bool hifc_recover_unreadable(int error);

#endif
