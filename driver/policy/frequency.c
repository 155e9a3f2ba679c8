/* SPDX-License-Identifier: Apache-2.0
 *
 * frequency.c - decayed frequency: weight = sum over accesses of exp(-lambda * age).
 *
 * All weights decay alike, so the order by weight is the order by log(weight) + lambda * time of
 * the last access, which only an access changes: that is the heap's key. A block that left is
 * remembered: when it comes back, its earlier accesses still count.
 */
#include <math.h>
#include <stdlib.h>

#include "policy/heap.h"

struct frequency {
    struct policy base;
    struct heap heap;
    double *weights; /* as of the last access; 0: none yet */
    double *used_s;  /* the last access */
    uint64_t accesses;
};

static void frequency_close(struct policy *p)
{
    struct frequency *c = (struct frequency *)p;
    heap_free(&c->heap);
    free(c->weights);
    free(c->used_s);
}

static int frequency_grow(struct policy *p, uint32_t ids)
{
    struct frequency *c = (struct frequency *)p;
    int rc = heap_grow(p, &c->heap, ids);
    rc = rc ? rc : POLICY_GROW(p, c->weights, ids);
    return rc ? rc : POLICY_GROW(p, c->used_s, ids);
}

static double decayed(const struct frequency *c, uint32_t id)
{
    return c->weights[id] * exp(-c->base.decay_lambda * (c->base.now_s - c->used_s[id]));
}

static void frequency_access(struct policy *p, uint32_t id)
{
    struct frequency *c = (struct frequency *)p;
    c->weights[id] = decayed(c, id) + 1;
    c->used_s[id] = p->now_s;
    heap_set(&c->heap, id, log(c->weights[id]) + p->decay_lambda * p->now_s,
             (double)++c->accesses);
}

static void frequency_leave(struct policy *p, uint32_t id)
{
    heap_remove(&((struct frequency *)p)->heap, id);
}

static void frequency_forget(struct policy *p, uint32_t id)
{
    frequency_leave(p, id);
    ((struct frequency *)p)->weights[id] = 0;
}

static uint32_t frequency_victim(struct policy *p)
{
    return heap_first(&((struct frequency *)p)->heap);
}

static double frequency_score(struct policy *p, uint32_t id)
{
    return decayed((struct frequency *)p, id);
}

const struct policy_ops policy_frequency = {
    .name = "frequency",
    .size = sizeof(struct frequency),
    .close = frequency_close,
    .grow = frequency_grow,
    .hit = frequency_access,
    .insert = frequency_access,
    .leave = frequency_leave,
    .forget = frequency_forget,
    .victim = frequency_victim,
    .score = frequency_score,
};
