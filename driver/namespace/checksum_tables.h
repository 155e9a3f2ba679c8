/* SPDX-License-Identifier: Apache-2.0
 *
 * checksum_tables.h - a bounded cache of the tables of part checksums of values that are read in ranges
 * (checksum_tables.c). The owner's mutex guards it.
 */
#ifndef HIFC_NS_CHECKSUM_TABLES_H
#define HIFC_NS_CHECKSUM_TABLES_H

#include <stdbool.h>
#include <stdint.h>

/* Of which value: the generation tells a reused segment from what it was before. */
struct ns_value_place {
    uint64_t generation;
    uint32_t segment, offset;
    uint32_t part_count;
};

struct ns_checksum_table; /* checksum_tables.c */

struct ns_checksum_tables {
    struct ns_checksum_table *slots;
};

/* False: no memory. */
bool ns_checksum_tables_create(struct ns_checksum_tables *tables);
void ns_checksum_tables_destroy(struct ns_checksum_tables *tables);
/* Raw CRC-32C of each part, or NULL when they are not kept. */
const uint32_t *ns_checksum_tables_find(const struct ns_checksum_tables *tables,
                                        const struct ns_value_place *value);
/* Copies them; in place of what shares their slot, and only while there is memory. */
void ns_checksum_tables_keep(struct ns_checksum_tables *tables, const struct ns_value_place *value,
                             const uint32_t *crcs);

#endif
