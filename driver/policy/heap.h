/* SPDX-License-Identifier: Apache-2.0
 *
 * heap.h - a binary heap of ids, the least (key, tie) first, with an id's place known, so that any
 * id can change its key or leave.
 */
#ifndef HIFC_POLICY_HEAP_H
#define HIFC_POLICY_HEAP_H

#include "policy/policy.h"

struct heap {
    uint32_t *items;
    uint32_t *places; /* of each id, plus 1; 0: not in the heap */
    double *keys;
    double *ties;
    uint32_t count;
};

int heap_grow(struct policy *p, struct heap *heap, uint32_t ids);
void heap_free(struct heap *heap);
/* Puts an id in, or changes its key. */
void heap_set(struct heap *heap, uint32_t id, double key, double tie);
/* An id that is not in it is no error. */
void heap_remove(struct heap *heap, uint32_t id);

static inline uint32_t heap_first(const struct heap *heap)
{
    return heap->count ? heap->items[0] : POLICY_NONE;
}

static inline bool heap_has(const struct heap *heap, uint32_t id)
{
    return heap->places[id] != 0;
}

#endif
