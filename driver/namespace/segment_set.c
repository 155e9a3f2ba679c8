/* SPDX-License-Identifier: Apache-2.0
 *
 * segment_set.c - a set of segments: see segment_set.h.
 */
#include "namespace/segment_set.h"

#include <stdlib.h>

#include "util/invariant.h"

#define BITS 64u

bool ns_segment_set_create(struct ns_segment_set *set, uint32_t segment_count)
{
    *set = (struct ns_segment_set){.map = calloc(segment_count / BITS + 1, sizeof *set->map)};
    return set->map != NULL;
}

void ns_segment_set_destroy(struct ns_segment_set *set)
{
    free(set->map);
    *set = (struct ns_segment_set){0};
}

bool ns_segment_set_has(const struct ns_segment_set *set, uint32_t segment)
{
    return set->map[segment / BITS] >> segment % BITS & 1;
}

void ns_segment_set_add(struct ns_segment_set *set, uint32_t segment)
{
    hifc_assert(!ns_segment_set_has(set, segment));
    set->map[segment / BITS] |= 1ull << segment % BITS;
    set->from = segment / BITS < set->from ? segment / BITS : set->from;
    set->count++;
}

void ns_segment_set_remove(struct ns_segment_set *set, uint32_t segment)
{
    hifc_assert(ns_segment_set_has(set, segment));
    set->map[segment / BITS] &= ~(1ull << segment % BITS);
    hifc_count_down(set->count, 1u);
}

uint32_t ns_segment_set_lowest(struct ns_segment_set *set)
{
    hifc_assert(set->count > 0);
    while (set->map[set->from] == 0) {
        set->from++;
    }
    return set->from * BITS + (uint32_t)__builtin_ctzll(set->map[set->from]);
}
