/* SPDX-License-Identifier: Apache-2.0
 *
 * part_counts.h - the part counts of live values, so that an index slot needs a byte for its own. The
 * owner's mutex guards it.
 */
#ifndef HIFC_NS_PART_COUNTS_H
#define HIFC_NS_PART_COUNTS_H

#include <stdint.h>

#define NS_PART_COUNTS_MAX 128u /* different ones at a time */

struct ns_part_counts {
    uint32_t counts[NS_PART_COUNTS_MAX];  /* [0] is 1 */
    uint64_t extents[NS_PART_COUNTS_MAX]; /* live ones of each; none: it makes room for another */
    uint32_t used; /* of these that were ever used */
};

void ns_part_counts_create(struct ns_part_counts *table);
/* The index of a part count, or -1 when that many others are in use. It stays until the mutex is
 * released, and from then on while an extent of it is live. */
int ns_part_counts_index(struct ns_part_counts *table, uint32_t part_count);
/* The live extents of a part count that is in use. */
uint64_t *ns_part_counts_extents(struct ns_part_counts *table, uint32_t part_count);

#endif
