/* SPDX-License-Identifier: Apache-2.0
 *
 * arc.c - adaptive replacement cache (Megiddo and Modha, FAST 2003): blocks seen once (T1) and
 * more often (T2), each with a list of what left it lately (B1, B2); a return from one of those
 * moves the share that T1 is meant to have.
 */
#include <stdlib.h>

#include "policy/list.h"

enum { OUT, T1, T2, B1, B2, LISTS };

struct arc {
    struct policy base;
    struct links links;
    struct list lists[LISTS];
    uint8_t *in;
    uint64_t *used;
    uint64_t accesses;
    double target; /* size of T1 */
};

static int arc_open(struct policy *p)
{
    for (int i = 0; i < LISTS; i++) {
        ((struct arc *)p)->lists[i] = LIST_EMPTY;
    }
    return 0;
}

static void arc_close(struct policy *p)
{
    struct arc *c = (struct arc *)p;
    free(c->links.prev);
    free(c->links.next);
    free(c->in);
    free(c->used);
}

static int arc_grow(struct policy *p, uint32_t ids)
{
    struct arc *c = (struct arc *)p;
    int rc = links_grow(p, &c->links, ids);
    rc = rc ? rc : POLICY_GROW(p, c->in, ids);
    return rc ? rc : POLICY_GROW(p, c->used, ids);
}

static void move(struct arc *c, uint32_t id, uint8_t to)
{
    list_move(&c->links, c->lists, c->in, id, to);
}

static void arc_hit(struct policy *p, uint32_t id)
{
    struct arc *c = (struct arc *)p;
    c->used[id] = ++c->accesses;
    move(c, id, T2);
}

static void adapt(struct arc *c, uint8_t ghost)
{
    double b1 = c->lists[B1].count, b2 = c->lists[B2].count, capacity = policy_capacity(&c->base);
    if (ghost == B1) {
        c->target += b2 > b1 ? b2 / b1 : 1;
    } else {
        c->target -= b1 > b2 ? b1 / b2 : 1;
    }
    c->target = c->target > capacity ? capacity : c->target < 0 ? 0 : c->target;
}

static void arc_insert(struct policy *p, uint32_t id)
{
    struct arc *c = (struct arc *)p;
    uint8_t from = c->in[id];
    c->used[id] = ++c->accesses;
    if (from == B1 || from == B2) {
        adapt(c, from);
        move(c, id, T2);
        return;
    }
    move(c, id, T1);
    uint32_t capacity = policy_capacity(p);
    while (c->lists[B1].count && c->lists[T1].count + c->lists[B1].count > capacity) {
        move(c, c->lists[B1].tail, OUT);
    }
    while (c->lists[B2].count && c->lists[B1].count + c->lists[B2].count > capacity) {
        move(c, c->lists[B2].tail, OUT);
    }
}

static void arc_leave(struct policy *p, uint32_t id)
{
    struct arc *c = (struct arc *)p;
    move(c, id, c->in[id] == T1 ? B1 : B2);
}

static void arc_forget(struct policy *p, uint32_t id)
{
    move((struct arc *)p, id, OUT);
}

static bool first_list_gives(const struct arc *c)
{
    return c->lists[T1].count && (c->lists[T1].count > c->target || !c->lists[T2].count);
}

static uint32_t arc_victim(struct policy *p)
{
    struct arc *c = (struct arc *)p;
    return c->lists[first_list_gives(c) ? T1 : T2].tail;
}

static double arc_score(struct policy *p, uint32_t id)
{
    struct arc *c = (struct arc *)p;
    bool first = c->in[id] == (first_list_gives(c) ? T1 : T2);
    return (double)c->used[id] + (first ? 0 : (double)c->accesses);
}

const struct policy_ops policy_arc = {
    .name = "arc",
    .size = sizeof(struct arc),
    .open = arc_open,
    .close = arc_close,
    .grow = arc_grow,
    .hit = arc_hit,
    .insert = arc_insert,
    .leave = arc_leave,
    .forget = arc_forget,
    .victim = arc_victim,
    .score = arc_score,
};
