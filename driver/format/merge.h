/* SPDX-License-Identifier: Apache-2.0
 *
 * merge.h - summaries, and their entries in the order of batch sequences over many segments.
 *
 * Holds only the summaries of segments whose ranges of sequences overlap: as many as were open at
 * one time, whatever the size of the device. One thread; blocking.
 */
#ifndef HIFC_MERGE_H
#define HIFC_MERGE_H

#include "format/recover.h"

struct hifc_merge_input {
    uint64_t first_sequence; /* no entry has a lower one */
    uint64_t generation;
    uint32_t segment;
    uint32_t entry_count;
    uint32_t summary_offset;   /* used where entries is NULL */
    uint32_t summary_checksum;
    const struct hifc_summary_entry *entries;
};

/* Reads a segment's summary into *out, to be freed. -EBADMSG: it is not what its footer says, or
 * its sequences do not ascend from first_sequence; other errors are the device's. */
int hifc_summary_load(struct hifc_blockio *io, const struct hifc_superblock *sb,
                      const struct hifc_merge_input *input, struct hifc_summary_entry **out);
/* Sorts inputs and applies their entries; *applied counts them. */
int hifc_merge(struct hifc_blockio *io, const struct hifc_superblock *sb,
               struct hifc_merge_input *inputs, uint32_t count,
               const struct hifc_recover_callbacks *callbacks, uint64_t *applied);

#endif
