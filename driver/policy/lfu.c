/* SPDX-License-Identifier: Apache-2.0
 *
 * lfu.c - least frequently used since it came in; among equals, the one used longest ago.
 */
#include <stdlib.h>

#include "policy/heap.h"

struct lfu {
    struct policy base;
    struct heap heap; /* by uses, then by the last access */
    uint32_t *uses;
    uint64_t accesses;
};

static void lfu_close(struct policy *p)
{
    struct lfu *c = (struct lfu *)p;
    heap_free(&c->heap);
    free(c->uses);
}

static int lfu_grow(struct policy *p, uint32_t ids)
{
    struct lfu *c = (struct lfu *)p;
    int rc = heap_grow(p, &c->heap, ids);
    return rc ? rc : POLICY_GROW(p, c->uses, ids);
}

static void lfu_hit(struct policy *p, uint32_t id)
{
    struct lfu *c = (struct lfu *)p;
    c->uses[id]++;
    heap_set(&c->heap, id, c->uses[id], (double)++c->accesses);
}

static void lfu_insert(struct policy *p, uint32_t id)
{
    ((struct lfu *)p)->uses[id] = 0;
    lfu_hit(p, id);
}

static void lfu_leave(struct policy *p, uint32_t id)
{
    heap_remove(&((struct lfu *)p)->heap, id);
}

static uint32_t lfu_victim(struct policy *p)
{
    return heap_first(&((struct lfu *)p)->heap);
}

static double lfu_score(struct policy *p, uint32_t id)
{
    struct lfu *c = (struct lfu *)p;
    return c->uses[id] + c->heap.ties[id] / ((double)c->accesses + 1);
}

const struct policy_ops policy_lfu = {
    .name = "lfu",
    .size = sizeof(struct lfu),
    .close = lfu_close,
    .grow = lfu_grow,
    .hit = lfu_hit,
    .insert = lfu_insert,
    .leave = lfu_leave,
    .forget = lfu_leave,
    .victim = lfu_victim,
    .score = lfu_score,
};
