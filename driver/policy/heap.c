/* SPDX-License-Identifier: Apache-2.0
 *
 * heap.c - see heap.h.
 */
#include <stdlib.h>

#include "policy/heap.h"

int heap_grow(struct policy *p, struct heap *heap, uint32_t ids)
{
    int rc = POLICY_GROW(p, heap->items, ids);
    rc = rc ? rc : POLICY_GROW(p, heap->places, ids);
    rc = rc ? rc : POLICY_GROW(p, heap->keys, ids);
    return rc ? rc : POLICY_GROW(p, heap->ties, ids);
}

void heap_free(struct heap *heap)
{
    free(heap->items);
    free(heap->places);
    free(heap->keys);
    free(heap->ties);
}

static bool before(const struct heap *heap, uint32_t a, uint32_t b)
{
    if (heap->keys[a] != heap->keys[b]) {
        return heap->keys[a] < heap->keys[b];
    }
    return heap->ties[a] < heap->ties[b];
}

static void place(struct heap *heap, uint32_t at, uint32_t id)
{
    heap->items[at] = id;
    heap->places[id] = at + 1;
}

static void sift_up(struct heap *heap, uint32_t at, uint32_t id)
{
    while (at > 0 && before(heap, id, heap->items[(at - 1) / 2])) {
        place(heap, at, heap->items[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    place(heap, at, id);
}

static void sift_down(struct heap *heap, uint32_t at, uint32_t id)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= heap->count) {
            break;
        }
        if (child + 1 < heap->count && before(heap, heap->items[child + 1], heap->items[child])) {
            child++;
        }
        if (!before(heap, heap->items[child], id)) {
            break;
        }
        place(heap, at, heap->items[child]);
        at = child;
    }
    place(heap, at, id);
}

void heap_set(struct heap *heap, uint32_t id, double key, double tie)
{
    heap->keys[id] = key;
    heap->ties[id] = tie;
    uint32_t at = heap->places[id];
    if (!at) {
        heap->count++;
        sift_up(heap, heap->count - 1, id);
        return;
    }
    at--;
    if (at > 0 && before(heap, id, heap->items[(at - 1) / 2])) {
        sift_up(heap, at, id);
    } else {
        sift_down(heap, at, id);
    }
}

void heap_remove(struct heap *heap, uint32_t id)
{
    uint32_t at = heap->places[id];
    if (!at) {
        return;
    }
    heap->places[id] = 0;
    uint32_t last = heap->items[--heap->count];
    if (last != id) {
        heap->places[last] = at;
        heap_set(heap, last, heap->keys[last], heap->ties[last]);
    }
}
