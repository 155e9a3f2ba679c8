/* SPDX-License-Identifier: Apache-2.0
 *
 * policy.c - makes a policy and moves blocks between its states. See policy.h.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "policy/policy.h"
#include "util/error.h"

#define IDS_MIN 1024u

int policy_grow_array(void **array, size_t old_count, size_t new_count, size_t item_bytes)
{
    void *grown = realloc(*array, new_count * item_bytes);
    if (!grown) {
        return hifc_fail(-ENOMEM, "no memory for a policy over %zu blocks", new_count);
    }
    memset((char *)grown + old_count * item_bytes, 0, (new_count - old_count) * item_bytes);
    *array = grown;
    return 0;
}

struct policy *policy_create(const struct policy_ops *ops, uint32_t capacity, double decay_lambda)
{
    struct policy *p = calloc(1, ops->size);
    if (!p) {
        hifc_fail(-ENOMEM, "no memory for a policy");
        return NULL;
    }
    p->ops = ops;
    p->capacity = capacity;
    p->decay_lambda = decay_lambda;
    if ((ops->open && ops->open(p)) || policy_reserve(p, IDS_MIN)) {
        policy_close(p);
        return NULL;
    }
    return p;
}

void policy_close(struct policy *p)
{
    if (p) {
        p->ops->close(p);
        free(p->states);
        free(p);
    }
}

int policy_reserve(struct policy *p, uint32_t ids)
{
    if (ids <= p->ids) {
        return 0;
    }
    uint32_t grown = ids < IDS_MIN ? IDS_MIN : ids;
    if (grown < p->ids + p->ids / 2) {
        grown = p->ids + p->ids / 2;
    }
    int rc = p->ops->grow(p, grown);
    rc = rc ? rc : POLICY_GROW(p, p->states, grown);
    if (!rc) {
        p->ids = grown;
    }
    return rc;
}

void policy_begin(struct policy *p, const uint32_t *chain, uint32_t count)
{
    if (p->ops->begin) {
        p->ops->begin(p, chain, count);
    }
}

void policy_access(struct policy *p, uint32_t id)
{
    if (policy_is_resident(p, id)) {
        p->ops->hit(p, id);
        return;
    }
    p->ops->insert(p, id);
    p->states[id] = POLICY_RESIDENT;
    p->resident_count++;
}

void policy_end(struct policy *p)
{
    if (p->ops->end) {
        p->ops->end(p);
    }
}

void policy_leave(struct policy *p, uint32_t id)
{
    if (policy_is_resident(p, id)) {
        p->ops->leave(p, id);
        p->states[id] = POLICY_REMEMBERED;
        p->resident_count--;
        if (p->left) {
            p->left(p, id);
        }
    }
}

void policy_forget(struct policy *p, uint32_t id)
{
    p->ops->forget(p, id);
    p->resident_count -= policy_is_resident(p, id);
    p->states[id] = POLICY_UNKNOWN;
}

void policy_place(struct policy *p, uint32_t id)
{
    /* Room first, so that the incoming block is not its own victim. */
    if (!policy_is_resident(p, id) && !p->ops->whole_requests &&
        p->resident_count >= p->capacity) {
        policy_leave(p, p->ops->victim(p));
    }
    policy_access(p, id);
}

void policy_make_room(struct policy *p)
{
    while (p->resident_count > p->capacity) {
        policy_leave(p, p->ops->victim(p));
    }
}

uint32_t policy_request(struct policy *p, double now_s, const uint32_t *chain, uint32_t count)
{
    uint32_t hits = 0;
    p->now_s = now_s > p->now_s ? now_s : p->now_s;
    policy_begin(p, chain, count);
    for (uint32_t i = 0; i < count; i++) {
        hits += policy_is_resident(p, chain[i]);
        policy_place(p, chain[i]);
    }
    policy_end(p);
    policy_make_room(p);
    return hits;
}
