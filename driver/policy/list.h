/* SPDX-License-Identifier: Apache-2.0
 *
 * list.h - doubly linked lists over ids. A policy has one `links`, each id is in one list at most.
 */
#ifndef HIFC_POLICY_LIST_H
#define HIFC_POLICY_LIST_H

#include "policy/policy.h"

struct links {
    uint32_t *prev;
    uint32_t *next;
};

struct list {
    uint32_t head;
    uint32_t tail;
    uint32_t count;
};

#define LIST_EMPTY ((struct list){POLICY_NONE, POLICY_NONE, 0})

static inline int links_grow(struct policy *p, struct links *l, uint32_t ids)
{
    int rc = POLICY_GROW(p, l->prev, ids);
    return rc ? rc : POLICY_GROW(p, l->next, ids);
}

static inline void list_push_head(struct links *l, struct list *list, uint32_t id)
{
    l->prev[id] = POLICY_NONE;
    l->next[id] = list->head;
    if (list->head != POLICY_NONE) {
        l->prev[list->head] = id;
    } else {
        list->tail = id;
    }
    list->head = id;
    list->count++;
}

static inline void list_push_tail(struct links *l, struct list *list, uint32_t id)
{
    l->next[id] = POLICY_NONE;
    l->prev[id] = list->tail;
    if (list->tail != POLICY_NONE) {
        l->next[list->tail] = id;
    } else {
        list->head = id;
    }
    list->tail = id;
    list->count++;
}

static inline void list_remove(struct links *l, struct list *list, uint32_t id)
{
    if (l->prev[id] != POLICY_NONE) {
        l->next[l->prev[id]] = l->next[id];
    } else {
        list->head = l->next[id];
    }
    if (l->next[id] != POLICY_NONE) {
        l->prev[l->next[id]] = l->prev[id];
    } else {
        list->tail = l->prev[id];
    }
    list->count--;
}

/* Between numbered lists, to the head of `to`: in[id] is the one that id is in, 0 for none. */
static inline void list_move(struct links *l, struct list *lists, uint8_t *in, uint32_t id,
                             uint8_t to)
{
    if (in[id]) {
        list_remove(l, &lists[in[id]], id);
    }
    in[id] = to;
    if (to) {
        list_push_head(l, &lists[to], id);
    }
}

#endif
