/* SPDX-License-Identifier: Apache-2.0
 *
 * part_counts.c - the part counts of live values: see part_counts.h.
 */
#include "namespace/part_counts.h"

#include "util/invariant.h"

void ns_part_counts_create(struct ns_part_counts *table)
{
    *table = (struct ns_part_counts){.counts = {1}, .used = 1};
}

int ns_part_counts_index(struct ns_part_counts *table, uint32_t part_count)
{
    for (uint32_t i = 0; i < table->used; i++) {
        if (table->counts[i] == part_count) {
            return (int)i;
        }
    }
    uint32_t i = table->used;
    if (i == NS_PART_COUNTS_MAX) {
        for (i = 1; i < NS_PART_COUNTS_MAX && table->extents[i] > 0; i++) {
        }
    } else {
        table->used++;
    }
    if (i == NS_PART_COUNTS_MAX) {
        return -1;
    }
    table->counts[i] = part_count;
    return (int)i;
}

uint64_t *ns_part_counts_extents(struct ns_part_counts *table, uint32_t part_count)
{
    int index = ns_part_counts_index(table, part_count > 1 ? part_count : 1);
    hifc_assert(index >= 0);
    return &table->extents[index];
}
