/* SPDX-License-Identifier: Apache-2.0
 *
 * policy.h - the small interface that every replacement policy stands behind. Internal.
 *
 * A block is an id below `ids`, chosen by the caller and dense, so that state lies in arrays. A
 * block is resident, remembered (it left, its history is kept) or unknown. Whoever drives a policy
 * - the replay, the engine, or another policy - decides when something leaves; `victim` only names
 * it. Time comes from the driver, in seconds, and never goes back. Not thread-safe.
 */
#ifndef HIFC_POLICY_H
#define HIFC_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define POLICY_NONE UINT32_MAX

struct policy;

struct policy_ops {
    const char *name;
    size_t size; /* of the policy's own struct, which begins with a struct policy */
    int (*open)(struct policy *p);
    void (*close)(struct policy *p);
    /* Arrays get room for ids below `ids`; what is new is zero. 0 or -ENOMEM, nothing lost. */
    int (*grow)(struct policy *p, uint32_t ids);
    /* A request for the chain `chain`, head first, before its blocks are accessed; may be NULL. */
    void (*begin)(struct policy *p, const uint32_t *chain, uint32_t count);
    void (*hit)(struct policy *p, uint32_t id);    /* an access, resident */
    void (*insert)(struct policy *p, uint32_t id); /* an access, and it becomes resident */
    void (*end)(struct policy *p);                 /* the request is done; may be NULL */
    void (*leave)(struct policy *p, uint32_t id);  /* resident, becomes remembered */
    void (*forget)(struct policy *p, uint32_t id); /* becomes unknown */
    uint32_t (*victim)(struct policy *p);          /* which resident block leaves next */
    double (*score)(struct policy *p, uint32_t id); /* of a resident block: higher leaves later */
    /* Returns expected a second of holding; NULL where a policy expects nothing. */
    double (*promise)(struct policy *p, uint32_t id);
    bool whole_requests; /* room is made after a request, not block by block */
};

enum policy_state { POLICY_UNKNOWN, POLICY_RESIDENT, POLICY_REMEMBERED };

struct policy {
    const struct policy_ops *ops;
    double now_s;
    double decay_lambda;     /* of decayed frequency, a second */
    uint32_t answer_tokens;  /* of the request under way; 0: not known */
    uint32_t capacity;       /* blocks; 0: the driver's business, what is resident counts */
    uint32_t resident_count;
    uint32_t ids;
    uint8_t *states; /* enum policy_state of each id */
    /* Called after a block left; for who drives this one. */
    void (*left)(struct policy *p, uint32_t id);
    void *owner;
};

extern const struct policy_ops policy_lru, policy_lfu, policy_frequency, policy_arc, policy_s3fifo,
    policy_return_time, policy_default;

/* NULL and hifc_last_error() if memory is short. */
struct policy *policy_create(const struct policy_ops *ops, uint32_t capacity, double decay_lambda);
/* The same by name (names.c), also if no policy has that name. */
struct policy *policy_open(const char *name, uint32_t capacity, double decay_lambda);
void policy_close(struct policy *p);
int policy_reserve(struct policy *p, uint32_t ids);

/* The transitions; they keep states and counts. Ids are below p->ids. */
void policy_begin(struct policy *p, const uint32_t *chain, uint32_t count);
void policy_access(struct policy *p, uint32_t id);
void policy_place(struct policy *p, uint32_t id); /* an access, room made for it first */
void policy_end(struct policy *p);
void policy_leave(struct policy *p, uint32_t id);
void policy_forget(struct policy *p, uint32_t id);
void policy_make_room(struct policy *p);
/* A whole request, room made within p->capacity; returns how many were hits. */
uint32_t policy_request(struct policy *p, double now_s, const uint32_t *chain, uint32_t count);

static inline bool policy_is_resident(const struct policy *p, uint32_t id)
{
    return p->states[id] == POLICY_RESIDENT;
}

static inline uint32_t policy_capacity(const struct policy *p)
{
    uint32_t capacity = p->capacity ? p->capacity : p->resident_count;
    return capacity ? capacity : 1;
}

/* Zeroes what is new. */
int policy_grow_array(void **array, size_t old_count, size_t new_count, size_t item_bytes);
#define POLICY_GROW(p, array, count) \
    policy_grow_array((void **)&(array), (p)->ids, count, sizeof *(array))

#endif
