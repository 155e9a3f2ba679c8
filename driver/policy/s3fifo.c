/* SPDX-License-Identifier: Apache-2.0
 *
 * s3fifo.c - S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth of the cache takes what is
 * new, what is used again there moves to the main queue, the rest leaves early and is remembered
 * in a ghost queue, from where it returns straight to the main one.
 */
#include <stdlib.h>

#include "policy/list.h"

#define USES_MAX 3

enum { OUT, SMALL, MAIN, GHOST, QUEUES };

struct s3fifo {
    struct policy base;
    struct links links;
    struct list queues[QUEUES];
    uint8_t *in;
    uint8_t *uses; /* since it came into its queue, at most USES_MAX */
    uint64_t *queued;
    uint64_t moves;
};

static int s3fifo_open(struct policy *p)
{
    for (int i = 0; i < QUEUES; i++) {
        ((struct s3fifo *)p)->queues[i] = LIST_EMPTY;
    }
    return 0;
}

static void s3fifo_close(struct policy *p)
{
    struct s3fifo *c = (struct s3fifo *)p;
    free(c->links.prev);
    free(c->links.next);
    free(c->in);
    free(c->uses);
    free(c->queued);
}

static int s3fifo_grow(struct policy *p, uint32_t ids)
{
    struct s3fifo *c = (struct s3fifo *)p;
    int rc = links_grow(p, &c->links, ids);
    rc = rc ? rc : POLICY_GROW(p, c->in, ids);
    rc = rc ? rc : POLICY_GROW(p, c->uses, ids);
    return rc ? rc : POLICY_GROW(p, c->queued, ids);
}

static void move(struct s3fifo *c, uint32_t id, uint8_t to)
{
    c->queued[id] = ++c->moves;
    list_move(&c->links, c->queues, c->in, id, to);
}

static void s3fifo_hit(struct policy *p, uint32_t id)
{
    struct s3fifo *c = (struct s3fifo *)p;
    c->uses[id] += c->uses[id] < USES_MAX;
}

static void s3fifo_insert(struct policy *p, uint32_t id)
{
    struct s3fifo *c = (struct s3fifo *)p;
    c->uses[id] = 0;
    move(c, id, c->in[id] == GHOST ? MAIN : SMALL);
}

static void s3fifo_leave(struct policy *p, uint32_t id)
{
    struct s3fifo *c = (struct s3fifo *)p;
    move(c, id, c->in[id] == SMALL ? GHOST : OUT);
    uint32_t small = policy_capacity(p) / 10, ghosts = policy_capacity(p) - small;
    while (c->queues[GHOST].count > ghosts) {
        move(c, c->queues[GHOST].tail, OUT);
    }
}

static void s3fifo_forget(struct policy *p, uint32_t id)
{
    move((struct s3fifo *)p, id, OUT);
}

static bool small_gives(const struct s3fifo *c)
{
    uint32_t share = policy_capacity(&c->base) / 10;
    return c->queues[SMALL].count && (c->queues[SMALL].count > (share ? share : 1) ||
                                      !c->queues[MAIN].count);
}

/* Ends: a pass either moves a block from SMALL to MAIN or takes a use away. */
static uint32_t s3fifo_victim(struct policy *p)
{
    struct s3fifo *c = (struct s3fifo *)p;
    for (;;) {
        if (small_gives(c)) {
            uint32_t id = c->queues[SMALL].tail;
            if (c->uses[id] <= 1) {
                return id;
            }
            c->uses[id] = 0;
            move(c, id, MAIN);
        } else {
            uint32_t id = c->queues[MAIN].tail;
            if (id == POLICY_NONE || c->uses[id] == 0) {
                return id;
            }
            c->uses[id]--;
            move(c, id, MAIN);
        }
    }
}

/* A pass of the queue for each use that is left, the queue that does not give now after it. */
static double s3fifo_score(struct policy *p, uint32_t id)
{
    struct s3fifo *c = (struct s3fifo *)p;
    bool first = c->in[id] == (small_gives(c) ? SMALL : MAIN);
    unsigned passes = c->in[id] == SMALL ? c->uses[id] > 1 : c->uses[id];
    return (double)c->queued[id] + ((first ? 0 : 1) + passes) * (double)c->moves;
}

const struct policy_ops policy_s3fifo = {
    .name = "s3fifo",
    .size = sizeof(struct s3fifo),
    .open = s3fifo_open,
    .close = s3fifo_close,
    .grow = s3fifo_grow,
    .hit = s3fifo_hit,
    .insert = s3fifo_insert,
    .leave = s3fifo_leave,
    .forget = s3fifo_forget,
    .victim = s3fifo_victim,
    .score = s3fifo_score,
};
