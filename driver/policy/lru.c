/* SPDX-License-Identifier: Apache-2.0
 *
 * lru.c - least recently used: one list, the newest at its head.
 */
#include <stdlib.h>

#include "policy/list.h"

struct lru {
    struct policy base;
    struct links links;
    struct list list;
    uint64_t *used; /* number of the last access */
    uint64_t accesses;
};

static int lru_open(struct policy *p)
{
    ((struct lru *)p)->list = LIST_EMPTY;
    return 0;
}

static void lru_close(struct policy *p)
{
    struct lru *c = (struct lru *)p;
    free(c->links.prev);
    free(c->links.next);
    free(c->used);
}

static int lru_grow(struct policy *p, uint32_t ids)
{
    struct lru *c = (struct lru *)p;
    int rc = links_grow(p, &c->links, ids);
    return rc ? rc : POLICY_GROW(p, c->used, ids);
}

static void lru_insert(struct policy *p, uint32_t id)
{
    struct lru *c = (struct lru *)p;
    list_push_head(&c->links, &c->list, id);
    c->used[id] = ++c->accesses;
}

static void lru_leave(struct policy *p, uint32_t id)
{
    struct lru *c = (struct lru *)p;
    list_remove(&c->links, &c->list, id);
}

static void lru_hit(struct policy *p, uint32_t id)
{
    lru_leave(p, id);
    lru_insert(p, id);
}

static void lru_forget(struct policy *p, uint32_t id)
{
    if (policy_is_resident(p, id)) {
        lru_leave(p, id);
    }
}

static uint32_t lru_victim(struct policy *p)
{
    return ((struct lru *)p)->list.tail;
}

static double lru_score(struct policy *p, uint32_t id)
{
    return (double)((struct lru *)p)->used[id];
}

const struct policy_ops policy_lru = {
    .name = "lru",
    .size = sizeof(struct lru),
    .open = lru_open,
    .close = lru_close,
    .grow = lru_grow,
    .hit = lru_hit,
    .insert = lru_insert,
    .leave = lru_leave,
    .forget = lru_forget,
    .victim = lru_victim,
    .score = lru_score,
};
