/* SPDX-License-Identifier: Apache-2.0
 *
 * second_use.c - see second_use.h.
 */
#include "policy/second_use.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/error.h"

#define SLOTS_MIN (1u << 16)
#define SLOTS_MAX (1u << 22)

struct second_use {
    uint64_t mask;
    uint32_t fingerprints[];
};

struct second_use *second_use_create(uint64_t keys)
{
    uint64_t slots = SLOTS_MIN;
    while (slots < SLOTS_MAX && slots < keys) {
        slots *= 2;
    }
    struct second_use *table = calloc(1, sizeof *table + slots * sizeof table->fingerprints[0]);
    if (!table) {
        hifc_fail(-ENOMEM, "no memory to remember %llu keys for admission",
                  (unsigned long long)slots);
        return NULL;
    }
    table->mask = slots - 1;
    return table;
}

void second_use_destroy(struct second_use *table)
{
    free(table);
}

bool second_use_offer(struct second_use *table, const struct hifc_key *key)
{
    uint64_t half[2];
    memcpy(half, key, sizeof half);
    uint64_t hash = (half[0] ^ half[1] >> 29) * 0x9e3779b97f4a7c15ull;
    uint32_t fingerprint = (uint32_t)(half[1] ^ half[0] >> 32) | 1u;
    uint32_t *slot = &table->fingerprints[hash >> 20 & table->mask];
    bool seen = *slot == fingerprint;
    *slot = fingerprint;
    return seen;
}
