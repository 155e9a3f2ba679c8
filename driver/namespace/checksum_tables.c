/* SPDX-License-Identifier: Apache-2.0
 *
 * checksum_tables.c - a bounded cache of tables of part checksums: see checksum_tables.h.
 */
#include "namespace/checksum_tables.h"

#include <stdlib.h>
#include <string.h>

#define TABLES_MAX 4096u
#define TABLE_PARTS_MAX 4096u

struct ns_checksum_table {
    struct ns_value_place value;
    uint32_t *crcs; /* NULL: unused */
};

bool ns_checksum_tables_create(struct ns_checksum_tables *tables)
{
    tables->slots = calloc(TABLES_MAX, sizeof *tables->slots);
    return tables->slots != NULL;
}

void ns_checksum_tables_destroy(struct ns_checksum_tables *tables)
{
    for (uint32_t i = 0; tables->slots && i < TABLES_MAX; i++) {
        free(tables->slots[i].crcs);
    }
    free(tables->slots);
    tables->slots = NULL;
}

static struct ns_checksum_table *slot_of(const struct ns_checksum_tables *tables,
                                         const struct ns_value_place *value)
{
    uint64_t hash = ((uint64_t)value->segment << 32 | value->offset) * 0x9e3779b97f4a7c15ull;
    return &tables->slots[hash >> 40 & (TABLES_MAX - 1)];
}

const uint32_t *ns_checksum_tables_find(const struct ns_checksum_tables *tables,
                                        const struct ns_value_place *value)
{
    const struct ns_checksum_table *table = slot_of(tables, value);
    bool same = table->crcs && table->value.segment == value->segment &&
                table->value.offset == value->offset &&
                table->value.part_count == value->part_count &&
                table->value.generation == value->generation;
    return same ? table->crcs : NULL;
}

void ns_checksum_tables_keep(struct ns_checksum_tables *tables, const struct ns_value_place *value,
                             const uint32_t *crcs)
{
    if (value->part_count > TABLE_PARTS_MAX || ns_checksum_tables_find(tables, value)) {
        return;
    }
    uint32_t *copy = malloc(value->part_count * 4ull);
    if (!copy) {
        return; /* only a cache: the next range read fetches the table again */
    }
    memcpy(copy, crcs, value->part_count * 4ull);
    struct ns_checksum_table *table = slot_of(tables, value);
    free(table->crcs);
    *table = (struct ns_checksum_table){.value = *value, .crcs = copy};
}
