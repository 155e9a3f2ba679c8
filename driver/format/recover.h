/* SPDX-License-Identifier: Apache-2.0
 *
 * recover.h - what open learns from the device: which segment is what, and every entry that counts.
 *
 * Two passes. The first looks at every segment: free, sealed (a valid footer and summary), open
 * when the last owner stopped (its chain of batches is followed and everything above the flushed
 * mark verified by payload), a swap segment of an earlier epoch (dead as a whole), or damaged. The
 * second applies entries of all reuse segments in the order of their batch sequence, so that the
 * newest of a key wins, holding only segments that overlap in sequence. Changes nothing on the
 * device.
 *
 * docs/format.md, "Recovery", says what is accepted and why.
 */
#ifndef HIFC_RECOVER_H
#define HIFC_RECOVER_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"
#include "format/layout.h"

enum hifc_recovered_state {
    HIFC_RECOVERED_FREE,
    HIFC_RECOVERED_SEALED,    /* by its footer and summary */
    HIFC_RECOVERED_SCANNED,   /* by its chain of batches: the caller seals it, if it may write */
    HIFC_RECOVERED_SWAP_DEAD, /* swap of an earlier epoch: nothing in it is live */
    HIFC_RECOVERED_DAMAGED    /* its header is unreadable */
};

struct hifc_recovered_segment {
    uint32_t segment;
    uint8_t state; /* enum hifc_recovered_state */
    uint8_t cls;
    uint64_t generation;
    uint64_t epoch;
    uint64_t open_sequence;
    uint64_t first_sequence, last_sequence; /* accepted batches; 0, 0 when there are none */
    uint32_t used_bytes;   /* end of the last accepted batch */
    uint32_t batch_count;  /* accepted */
    uint32_t chain;        /* checksum of the last accepted header; none: of the segment header */
    uint32_t entry_count;
    const struct hifc_summary_entry *entries; /* SCANNED: for its summary; during the call only */
};

struct hifc_recover_callbacks {
    void *ctx;
    /* Every segment once, in order of index. Nonzero stops. */
    int (*segment)(void *ctx, const struct hifc_recovered_segment *segment);
    /* Every accepted entry of reuse segments (kind VALUE or TOMBSTONE), in sequence order, after
     * all segments. Nonzero stops. */
    int (*apply)(void *ctx, uint32_t segment, const struct hifc_summary_entry *entry);
    /* May be NULL: an entry that apply will see soon, so that what it needs can be fetched. */
    void (*ahead)(void *ctx, const struct hifc_summary_entry *entry);
};

struct hifc_recover_opts {
    bool scan_all; /* follow the chain also where a valid summary is there: fsck, tests */
};

struct hifc_recover_result {
    uint64_t next_sequence;    /* above every batch sequence in any valid header or footer */
    uint64_t flushed_sequence; /* the highest mark seen */
    uint64_t accepted;         /* entries applied */
    uint64_t dropped;          /* entries of batches not accepted: never acknowledged in order */
    uint64_t damaged;          /* entries or headers at or below the mark that are bad */
    char first_damage[240];    /* segment, offset and kind of the first; empty if none */
};

int hifc_recover(struct hifc_blockio *io, const struct hifc_superblock *sb,
                 const struct hifc_recover_opts *opts,
                 const struct hifc_recover_callbacks *callbacks, struct hifc_recover_result *out);

#endif
