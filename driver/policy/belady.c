/* SPDX-License-Identifier: Apache-2.0
 *
 * belady.c - the ceiling: what leaves is the block whose next use is furthest away (Belady, 1966).
 * A miss always comes in, as with every other policy.
 */
#include <errno.h>
#include <stdlib.h>

#include "policy/heap.h"
#include "policy/trace.h"
#include "util/error.h"

struct belady {
    struct policy base;   /* for the heap's memory alone */
    struct heap furthest; /* resident blocks by minus their next use */
    uint64_t *next_use;   /* of each access, in accesses */
    uint64_t *first_after; /* of each id, while next_use is made */
};

static int prepare(struct belady *b, const struct hifc_trace *trace)
{
    uint64_t first = trace->offsets[0], count = trace->offsets[trace->request_count] - first;
    b->next_use = malloc((count ? count : 1) * sizeof *b->next_use);
    b->first_after = malloc(trace->id_count * sizeof *b->first_after);
    if (!b->next_use || !b->first_after || heap_grow(&b->base, &b->furthest, trace->id_count)) {
        return hifc_fail(-ENOMEM, "no memory for a trace of %llu accesses",
                         (unsigned long long)count);
    }
    for (uint32_t id = 0; id < trace->id_count; id++) {
        b->first_after[id] = UINT64_MAX;
    }
    for (uint64_t i = count; i-- > 0;) {
        uint32_t id = trace->ids[first + i];
        b->next_use[i] = b->first_after[id];
        b->first_after[id] = i;
    }
    return 0;
}

HIFC_API int hifc_belady_replay(uint32_t capacity_blocks, const struct hifc_trace *trace,
                                struct hifc_replay *out)
{
    int rc = replay_check(trace);
    if (rc) {
        return rc;
    }
    if (!capacity_blocks || !out) {
        return hifc_fail(-EINVAL, "a replay wants a capacity, and room for what it counts");
    }
    struct belady b = {0};
    rc = prepare(&b, trace);
    *out = (struct hifc_replay){0};
    if (!rc) {
        out->access_count = trace->offsets[trace->request_count] - trace->offsets[0];
    }
    for (uint64_t i = 0; i < out->access_count; i++) {
        uint32_t id = trace->ids[trace->offsets[0] + i];
        if (heap_has(&b.furthest, id)) {
            out->hit_count++;
        } else {
            out->written_count++;
            if (b.furthest.count == capacity_blocks) {
                heap_remove(&b.furthest, heap_first(&b.furthest));
            }
        }
        /* of those that are never used again, the oldest */
        heap_set(&b.furthest, id, -(double)b.next_use[i], 0);
    }
    heap_free(&b.furthest);
    free(b.next_use);
    free(b.first_after);
    return rc;
}
