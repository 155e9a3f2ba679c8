/* SPDX-License-Identifier: Apache-2.0
 *
 * return_time.c - prefix-aware: keeps what is expected to bring most hits for the time it is held.
 *
 * Blocks of a request that look alike (used as often, back after as long, the last one or not)
 * form a group: they age together and, in a chain, return together. hazard.h learns from all groups
 * when such blocks return; blocks that left are remembered for that, as many as HISTORY caches
 * hold, and go on teaching. A group's key is its index at its age, taken anew as it passes from one
 * age bin to the next. The group with the least key gives its block that is deepest in the chain,
 * so that a tail goes before its head. A request's blocks count at its end: a request whose own
 * blocks have the least key takes nobody's place.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/hazard.h"
#include "policy/heap.h"
#include "policy/list.h"

#define HISTORY 16
#define HISTORY_MIN 4096
#define REFRESH_REQUESTS 20
/* A group of n blocks weighs n to this power less: they are not independent observations. */
#define GROUP_DAMPING 0.2
#define TURN_MAX 100

enum listed { NOWHERE, IN_GROUP, IN_HISTORY };

struct group {
    struct hazard_features features;
    uint16_t bin;
    double used_s;
    uint64_t request;    /* number of the one that made it */
    double weight;       /* of one block as an observation */
    uint32_t known;      /* its blocks, resident or remembered */
    struct list blocks;  /* the resident ones, head first */
};

struct return_time {
    struct policy base;
    struct hazard hazard;
    struct group *groups;
    uint32_t *free_groups;
    uint32_t free_count;
    uint32_t group_count;
    struct heap coldest;    /* groups with resident blocks, by key */
    struct heap crossings;  /* all groups, by the time at which they enter their next bin */
    struct links links;     /* a block is in its group's list or in the history */
    uint8_t *listed;        /* enum listed of each block */
    struct list history;    /* remembered blocks, the newest first */
    uint32_t *group_of;     /* plus 1; 0: unknown */
    uint16_t *uses;
    uint8_t *turns;         /* of its conversation, at its last use */
    uint64_t requests;
    const uint32_t *chain;  /* of the request under way */
    uint32_t chain_count;
};

static int rt_open(struct policy *p)
{
    struct return_time *c = (struct return_time *)p;
    hazard_open(&c->hazard);
    c->history = LIST_EMPTY;
    return 0;
}

static void rt_close(struct policy *p)
{
    struct return_time *c = (struct return_time *)p;
    free(c->groups);
    free(c->free_groups);
    heap_free(&c->coldest);
    heap_free(&c->crossings);
    free(c->links.prev);
    free(c->links.next);
    free(c->listed);
    free(c->group_of);
    free(c->uses);
    free(c->turns);
}

/* No more groups than known blocks. */
static int rt_grow(struct policy *p, uint32_t ids)
{
    struct return_time *c = (struct return_time *)p;
    int rc = POLICY_GROW(p, c->groups, ids);
    rc = rc ? rc : POLICY_GROW(p, c->free_groups, ids);
    rc = rc ? rc : heap_grow(p, &c->coldest, ids);
    rc = rc ? rc : heap_grow(p, &c->crossings, ids);
    rc = rc ? rc : links_grow(p, &c->links, ids);
    rc = rc ? rc : POLICY_GROW(p, c->listed, ids);
    rc = rc ? rc : POLICY_GROW(p, c->group_of, ids);
    rc = rc ? rc : POLICY_GROW(p, c->uses, ids);
    return rc ? rc : POLICY_GROW(p, c->turns, ids);
}

static struct group *group_of(struct return_time *c, uint32_t id)
{
    return c->group_of[id] ? &c->groups[c->group_of[id] - 1] : NULL;
}

static void rekey(struct return_time *c, uint32_t g)
{
    struct group *group = &c->groups[g];
    if (group->blocks.count) {
        double key = hazard_index(&c->hazard, &group->features, group->bin);
        heap_set(&c->coldest, g, key, group->used_s);
    } else {
        heap_remove(&c->coldest, g);
    }
}

static void await_crossing(struct return_time *c, uint32_t g)
{
    const struct group *group = &c->groups[g];
    heap_set(&c->crossings, g, group->used_s + c->hazard.ages[group->bin + 1], 0);
}

/* Groups that have grown old enough enter their next bin; that they came so far is learnt. */
static void cross(struct return_time *c)
{
    uint32_t g;
    while ((g = heap_first(&c->crossings)) != POLICY_NONE &&
           c->crossings.keys[g] <= c->base.now_s) {
        struct group *group = &c->groups[g];
        hazard_learn(&c->hazard, &group->features, group->bin, 1, group->weight * group->known,
                     false);
        if (group->bin + 1 < HAZARD_BINS) {
            group->bin++;
            await_crossing(c, g);
        } else {
            heap_remove(&c->crossings, g);
        }
        rekey(c, g);
    }
}

static void unlist(struct return_time *c, uint32_t id)
{
    uint32_t g = c->group_of[id] - 1;
    if (c->listed[id] == IN_GROUP) {
        list_remove(&c->links, &c->groups[g].blocks, id);
        if (!c->groups[g].blocks.count) {
            heap_remove(&c->coldest, g);
        }
    } else {
        list_remove(&c->links, &c->history, id);
    }
    c->listed[id] = NOWHERE;
}

/* Out of its group, if it has one; a group without blocks ends. */
static void detach(struct return_time *c, uint32_t id)
{
    if (!c->group_of[id]) {
        return;
    }
    uint32_t g = c->group_of[id] - 1;
    unlist(c, id);
    c->group_of[id] = 0;
    if (--c->groups[g].known == 0) {
        heap_remove(&c->crossings, g);
        c->free_groups[c->free_count++] = g;
    }
}

static unsigned log2_bucket(double value, double per_octave, unsigned most)
{
    double bucket = value < 1 ? 0 : 1 + floor(per_octave * log2(value));
    return bucket > most ? most : (unsigned)bucket;
}

/* What is told of a block: how often used, after how long it came back. */
struct past {
    uint8_t uses;
    uint8_t gap;
};

static struct past learn_return(struct return_time *c, uint32_t id)
{
    const struct group *group = group_of(c, id);
    if (!group) {
        return (struct past){0, 0};
    }
    double age = c->base.now_s - group->used_s;
    hazard_learn(&c->hazard, &group->features, group->bin,
                 hazard_share(&c->hazard, group->bin, age), group->weight, true);
    unsigned uses = c->uses[id];
    return (struct past){(uint8_t)(uses <= 4 ? uses : log2_bucket(uses, 2, 15)),
                         (uint8_t)(1 + log2_bucket(age, 1, 14))};
}

/* What is told of a request. */
struct request {
    uint32_t count;
    uint32_t known; /* leading blocks that are resident or remembered */
    unsigned turn;  /* of the conversation, 1 if it is new */
    unsigned gap;   /* since its last turn; 0 if it is new */
    unsigned answer; /* its length */
};

static struct request describe(const struct return_time *c, const uint32_t *chain, uint32_t count)
{
    struct request r = {.count = count, .turn = 1};
    r.answer = log2_bucket(c->base.answer_tokens, 2, HAZARD_VALUES - 1);
    while (r.known < count && c->group_of[chain[r.known]]) {
        r.known++;
    }
    /* One block alone, or a small part, is a prompt that many share. */
    if (r.known > 1 && r.known >= count / 8) {
        uint32_t last = chain[r.known - 1];
        r.turn = c->turns[last] < TURN_MAX ? c->turns[last] + 1u : TURN_MAX;
    }
    if (r.known > 1) {
        double age = c->base.now_s - c->groups[c->group_of[chain[r.known - 1]] - 1].used_s;
        r.gap = 1 + log2_bucket(age, 1, 14);
    }
    return r;
}

static unsigned least(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

static struct hazard_features features(const struct request *r, struct past past, uint32_t place)
{
    bool last = place + 1 == r->count;
    unsigned fresh = r->count - r->known;
    unsigned some = fresh <= 4 ? fresh : least(13, log2_bucket(fresh, 2, 13));
    unsigned behind = log2_bucket(least(r->count - 1 - place, 7), 1, 3);
    /* What is new in a conversation takes after the time since its last turn. */
    unsigned gap = past.uses == 0 && r->gap ? 16 + r->gap : past.gap;
    return (struct hazard_features){{
        (uint8_t)(past.uses * 2 + last),
        (uint8_t)gap,
        (uint8_t)r->answer,
        past.uses,
        (uint8_t)least(r->turn, 15),
        (uint8_t)log2_bucket(r->count, 1, 15),
        (uint8_t)(least(fresh, 3) * 11 + 10 * r->known / r->count),
        (uint8_t)r->gap,
        (uint8_t)(8 * place / r->count * 2 + (past.uses > 0)),
        (uint8_t)(some + (r->turn > 1 ? 16 : r->known > 1 ? 32 : 0)),
        (uint8_t)(behind * 8 + least(7, some / 2)),
    }};
}

static uint32_t new_group(struct return_time *c, const struct hazard_features *f)
{
    uint32_t g = c->free_count ? c->free_groups[--c->free_count] : c->group_count++;
    c->groups[g] = (struct group){.features = *f, .used_s = c->base.now_s,
                                  .request = c->requests, .blocks = LIST_EMPTY};
    return g;
}

static void finish_group(struct return_time *c, uint32_t g)
{
    c->groups[g].weight = pow(c->groups[g].known, -GROUP_DAMPING);
    await_crossing(c, g);
}

/* Every block of the chain moves to a group of this request; end() takes the ones that did not
 * become resident out again. */
static void rt_begin(struct policy *p, const uint32_t *chain, uint32_t count)
{
    struct return_time *c = (struct return_time *)p;
    uint64_t often = 1 + c->requests / 64;
    if (c->requests++ % (often < REFRESH_REQUESTS ? often : REFRESH_REQUESTS) == 0) {
        hazard_refresh(&c->hazard);
    }
    cross(c);
    struct request r = describe(c, chain, count);
    struct past before = {0, 0};
    uint32_t g = POLICY_NONE;
    for (uint32_t i = 0; i < count; i++) {
        const struct group *group = group_of(c, chain[i]);
        if (group && group->request == c->requests) {
            continue; /* twice in one request */
        }
        struct past past = learn_return(c, chain[i]);
        detach(c, chain[i]);
        if (g == POLICY_NONE || past.uses != before.uses || past.gap != before.gap ||
            i + 1 == count) {
            if (g != POLICY_NONE) {
                finish_group(c, g);
            }
            struct hazard_features f = features(&r, past, i);
            g = new_group(c, &f);
            before = past;
        }
        c->group_of[chain[i]] = g + 1;
        c->groups[g].known++;
        c->listed[chain[i]] = IN_GROUP;
        list_push_tail(&c->links, &c->groups[g].blocks, chain[i]);
        c->uses[chain[i]] += c->uses[chain[i]] < UINT16_MAX;
        c->turns[chain[i]] = (uint8_t)r.turn;
    }
    if (g != POLICY_NONE) {
        finish_group(c, g);
    }
    c->chain = chain;
    c->chain_count = count;
}

static void rt_access(struct policy *p, uint32_t id)
{
    (void)p;
    (void)id; /* begin has done it */
}

static void rt_forget(struct policy *p, uint32_t id)
{
    struct return_time *c = (struct return_time *)p;
    detach(c, id);
    c->uses[id] = 0;
    c->turns[id] = 0;
}

static void rt_leave(struct policy *p, uint32_t id)
{
    struct return_time *c = (struct return_time *)p;
    unlist(c, id);
    c->listed[id] = IN_HISTORY;
    list_push_head(&c->links, &c->history, id);
    uint64_t most = (uint64_t)HISTORY * policy_capacity(p);
    while (c->history.count > (most < HISTORY_MIN ? HISTORY_MIN : most)) {
        uint32_t oldest = c->history.tail;
        rt_forget(p, oldest);
        p->states[oldest] = POLICY_UNKNOWN;
    }
}

static void rt_end(struct policy *p)
{
    struct return_time *c = (struct return_time *)p;
    for (uint32_t i = 0; i < c->chain_count; i++) {
        uint32_t id = c->chain[i];
        if (c->listed[id] == IN_GROUP && !policy_is_resident(p, id)) {
            rt_leave(p, id);
        }
    }
    for (uint32_t i = 0; i < c->chain_count; i++) {
        uint32_t id = c->chain[i];
        if (c->listed[id] == IN_GROUP && !heap_has(&c->coldest, c->group_of[id] - 1)) {
            rekey(c, c->group_of[id] - 1);
        }
    }
    c->chain_count = 0;
}

static uint32_t rt_victim(struct policy *p)
{
    struct return_time *c = (struct return_time *)p;
    uint32_t g = heap_first(&c->coldest);
    return g == POLICY_NONE ? POLICY_NONE : c->groups[g].blocks.tail;
}

static double rt_score(struct policy *p, uint32_t id)
{
    struct return_time *c = (struct return_time *)p;
    const struct group *group = group_of(c, id);
    return group ? hazard_index(&c->hazard, &group->features, group->bin) : 0;
}

const struct policy_ops policy_return_time = {
    .name = "return_time",
    .size = sizeof(struct return_time),
    .open = rt_open,
    .close = rt_close,
    .grow = rt_grow,
    .begin = rt_begin,
    .hit = rt_access,
    .insert = rt_access,
    .end = rt_end,
    .leave = rt_leave,
    .forget = rt_forget,
    .victim = rt_victim,
    .score = rt_score,
    .promise = rt_score,
    .whole_requests = true,
};
