/* SPDX-License-Identifier: Apache-2.0
 *
 * adaptive.c - the default: follows whichever of the policies does best on what is asked now.
 *
 * Every candidate is a policy of this folder that manages a cache of its own of the same capacity,
 * in which there are ids and no bytes. Their hits are counted with slow forgetting; the leader is
 * the one with most, and changes only for a clear lead. A block that is resident and that the
 * leader does not hold leaves first, the one used longest ago before others; with the same leader
 * for a while, the cache is the leader's.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "policy/list.h"

/* How many accesses back hits count, in capacities, and at least. */
#define MEMORY_CACHES 16.0
#define MEMORY_MIN 50000.0
/* A new leader's hit ratio is this much higher than the old one's over what is remembered, and its
 * lead this many hits: chains return together, so that less is chance. */
#define LEAD_RATIO 0.01
#define LEAD_HITS 500.0

/* The first is the one that expects something. */
static const struct policy_ops *const candidates[] = {&policy_return_time, &policy_lru,
                                                      &policy_arc,         &policy_s3fifo,
                                                      &policy_lfu,         &policy_frequency};
#define CANDIDATES (sizeof candidates / sizeof candidates[0])

struct adaptive {
    struct policy base;
    struct policy *experts[CANDIDATES];
    double hits[CANDIDATES];
    double remembered; /* accesses that hits are counted over */
    uint32_t leader;
    struct links links;
    struct list strays; /* resident, and not in the leader's cache; next to leave at the tail */
    struct list kept;   /* resident, and in the leader's */
    uint8_t *stray;     /* of a resident block: which list */
    uint64_t *used;     /* number of its last access */
    uint64_t accesses;
};

static void unlist(struct adaptive *c, uint32_t id)
{
    list_remove(&c->links, c->stray[id] ? &c->strays : &c->kept, id);
}

static void enlist(struct adaptive *c, uint32_t id)
{
    c->stray[id] = !policy_is_resident(c->experts[c->leader], id);
    list_push_head(&c->links, c->stray[id] ? &c->strays : &c->kept, id);
}

/* The leader gave a block up. */
static void left(struct policy *expert, uint32_t id)
{
    struct adaptive *c = expert->owner;
    if (policy_is_resident(&c->base, id) && !c->stray[id]) {
        unlist(c, id);
        c->stray[id] = true;
        list_push_head(&c->links, &c->strays, id);
    }
}

static void follow(struct adaptive *c, unsigned leader)
{
    c->experts[c->leader]->left = NULL;
    c->leader = leader;
    c->experts[leader]->left = left;
    c->experts[leader]->owner = c;
    struct list before[] = {c->strays, c->kept};
    c->strays = LIST_EMPTY;
    c->kept = LIST_EMPTY;
    for (unsigned i = 0; i < 2; i++) {
        for (uint32_t id = before[i].tail, next; id != POLICY_NONE; id = next) {
            next = c->links.prev[id];
            enlist(c, id);
        }
    }
}

static int ad_open(struct policy *p)
{
    struct adaptive *c = (struct adaptive *)p;
    c->strays = LIST_EMPTY;
    c->kept = LIST_EMPTY;
    for (unsigned i = 0; i < CANDIDATES; i++) {
        c->experts[i] = policy_create(candidates[i], p->capacity, p->decay_lambda);
        if (!c->experts[i]) {
            return -ENOMEM;
        }
    }
    follow(c, 0);
    return 0;
}

static void ad_close(struct policy *p)
{
    struct adaptive *c = (struct adaptive *)p;
    for (unsigned i = 0; i < CANDIDATES; i++) {
        policy_close(c->experts[i]);
    }
    free(c->links.prev);
    free(c->links.next);
    free(c->stray);
    free(c->used);
}

static int ad_grow(struct policy *p, uint32_t ids)
{
    struct adaptive *c = (struct adaptive *)p;
    int rc = links_grow(p, &c->links, ids);
    rc = rc ? rc : POLICY_GROW(p, c->stray, ids);
    rc = rc ? rc : POLICY_GROW(p, c->used, ids);
    for (unsigned i = 0; i < CANDIDATES && !rc; i++) {
        rc = policy_reserve(c->experts[i], ids);
    }
    return rc;
}

static void judge(struct adaptive *c, uint32_t count)
{
    double memory = MEMORY_CACHES * policy_capacity(&c->base);
    double keep = exp(-(double)count / (memory < MEMORY_MIN ? MEMORY_MIN : memory));
    unsigned best = c->leader;
    for (unsigned i = 0; i < CANDIDATES; i++) {
        c->hits[i] *= keep;
        best = c->hits[i] > c->hits[best] ? i : best;
    }
    c->remembered = c->remembered * keep + count;
    if (c->hits[best] - c->hits[c->leader] > LEAD_RATIO * c->remembered + LEAD_HITS) {
        follow(c, best);
    }
}

static void ad_begin(struct policy *p, const uint32_t *chain, uint32_t count)
{
    struct adaptive *c = (struct adaptive *)p;
    judge(c, count);
    for (unsigned i = 0; i < CANDIDATES; i++) {
        c->experts[i]->capacity = policy_capacity(p);
        c->experts[i]->answer_tokens = p->answer_tokens;
        c->hits[i] += policy_request(c->experts[i], p->now_s, chain, count);
    }
}

static void ad_insert(struct policy *p, uint32_t id)
{
    struct adaptive *c = (struct adaptive *)p;
    c->used[id] = ++c->accesses;
    enlist(c, id);
}

static void ad_hit(struct policy *p, uint32_t id)
{
    unlist((struct adaptive *)p, id);
    ad_insert(p, id);
}

static void ad_leave(struct policy *p, uint32_t id)
{
    unlist((struct adaptive *)p, id);
}

static void ad_forget(struct policy *p, uint32_t id)
{
    struct adaptive *c = (struct adaptive *)p;
    if (policy_is_resident(p, id)) {
        unlist(c, id);
    }
    /* Still resident for left(), which must not find it: it is in no list any more. */
    c->stray[id] = true;
    for (unsigned i = 0; i < CANDIDATES; i++) {
        policy_forget(c->experts[i], id);
    }
}

static uint32_t ad_victim(struct policy *p)
{
    struct adaptive *c = (struct adaptive *)p;
    if (c->strays.count) {
        return c->strays.tail;
    }
    struct policy *leader = c->experts[c->leader];
    uint32_t id = leader->ops->victim(leader);
    return id != POLICY_NONE && policy_is_resident(p, id) ? id : c->kept.tail;
}

/* Strays are below 0, the leader's scores are not. */
static double ad_score(struct policy *p, uint32_t id)
{
    struct adaptive *c = (struct adaptive *)p;
    if (c->stray[id]) {
        return (double)c->used[id] / ((double)c->accesses + 1) - 1;
    }
    struct policy *leader = c->experts[c->leader];
    return leader->ops->score(leader, id);
}

static double ad_promise(struct policy *p, uint32_t id)
{
    struct policy *expert = ((struct adaptive *)p)->experts[0];
    return expert->ops->promise(expert, id);
}

const struct policy_ops policy_default = {
    .name = "default",
    .size = sizeof(struct adaptive),
    .open = ad_open,
    .close = ad_close,
    .grow = ad_grow,
    .begin = ad_begin,
    .hit = ad_hit,
    .insert = ad_insert,
    .leave = ad_leave,
    .forget = ad_forget,
    .victim = ad_victim,
    .score = ad_score,
    .promise = ad_promise,
    .whole_requests = true,
};
