/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.c - runs a trace through a policy. Blocks are asked for one after the other, head first;
 * a hit is a block that is in the cache at its turn. A miss is written to the cache where admission
 * takes it, and something leaves for it.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "policy/second_use.h"
#include "policy/policy.h"
#include "policy/trace.h"
#include "util/error.h"

#define DAY_S 86400.0
/* HIFC_ADMIT_EXPECTED: of what is missed, at most this share is written, the most promising. */
#define WRITTEN_SHARE_MAX 0.45
#define THRESHOLD_STEP 0.005
/* In logarithms: the threshold is at most so far below the mean promise, to be back soon. */
#define THRESHOLD_BELOW 3.0
#define MEAN_STEP 0.001
#define PROMISE_MIN 1e-12

struct replay {
    struct policy *policy;
    struct hifc_replay *counts;
    struct second_use *offered; /* HIFC_ADMIT_SECOND_USE */
    double budget_blocks;       /* what is left, HIFC_ADMIT_BUDGET */
    double budget_time_s;
    double threshold_log; /* of a promise, HIFC_ADMIT_EXPECTED */
    double mean_log;
    bool *fresh; /* of each id: came with the request under way */
};

int replay_check(const struct hifc_trace *trace)
{
    if (!trace || !trace->times_s || !trace->offsets || !trace->ids || !trace->request_count) {
        return hifc_fail(-EINVAL, "a trace without requests");
    }
    double before = -INFINITY;
    for (uint32_t i = 0; i < trace->request_count; i++) {
        if (!isfinite(trace->times_s[i]) || trace->times_s[i] < before) {
            return hifc_fail(-EINVAL, "request %u: its time is before that of the one before", i);
        }
        before = trace->times_s[i];
        if (trace->offsets[i + 1] < trace->offsets[i] ||
            trace->offsets[i + 1] - trace->offsets[i] > UINT32_MAX) {
            return hifc_fail(-EINVAL, "request %u: its offsets are out of order", i);
        }
    }
    for (uint64_t i = trace->offsets[0]; i < trace->offsets[trace->request_count]; i++) {
        if (trace->ids[i] >= trace->id_count) {
            return hifc_fail(-EINVAL, "block id %u is not below %u", trace->ids[i],
                             trace->id_count);
        }
    }
    return 0;
}

/* Ids are dense, the keys of a namespace are digests. */
static struct hifc_key key_of(uint32_t id)
{
    struct hifc_key key;
    uint64_t state = id;
    for (unsigned i = 0; i < sizeof key.bytes; i++) {
        state = (state ^ state >> 27) * 0x94d049bb133111ebull + 0x9e3779b97f4a7c15ull;
        key.bytes[i] = (uint8_t)(state >> 56);
    }
    return key;
}

static bool admitted(struct replay *r, uint32_t id)
{
    switch (r->counts->admission) {
    case HIFC_ADMIT_SECOND_USE: {
        struct hifc_key key = key_of(id);
        return second_use_offer(r->offered, &key);
    }
    case HIFC_ADMIT_BUDGET:
        if (r->budget_blocks < 1) {
            return false;
        }
        r->budget_blocks--;
        return true;
    default:
        return true;
    }
}

static void earn(struct replay *r, double now_s)
{
    double most = r->counts->budget_blocks;
    r->budget_blocks += most * (now_s - r->budget_time_s) / DAY_S;
    r->budget_blocks = r->budget_blocks > most ? most : r->budget_blocks;
    r->budget_time_s = now_s;
}

/* What came with the request and promises too little goes, unwritten. */
static void refuse(struct replay *r, const uint32_t *chain, uint32_t count)
{
    struct policy *p = r->policy;
    for (uint32_t i = 0; i < count; i++) {
        if (r->fresh[chain[i]] && policy_is_resident(p, chain[i])) {
            double promise_log = log(p->ops->promise(p, chain[i]) + PROMISE_MIN);
            r->mean_log += (r->mean_log ? MEAN_STEP : 1) * (promise_log - r->mean_log);
            r->threshold_log = fmax(r->threshold_log, r->mean_log - THRESHOLD_BELOW);
            if (promise_log < r->threshold_log) {
                policy_leave(p, chain[i]);
            }
        }
    }
}

/* What is still there is written; the threshold follows, so that its share stays in bounds. */
static void count_written(struct replay *r, const uint32_t *chain, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (r->fresh[chain[i]]) {
            bool written = policy_is_resident(r->policy, chain[i]);
            r->counts->written_count += written;
            r->threshold_log += THRESHOLD_STEP * (written - WRITTEN_SHARE_MAX);
            r->fresh[chain[i]] = false;
        }
    }
}

static void request(struct replay *r, double now_s, const uint32_t *chain, uint32_t count)
{
    struct policy *p = r->policy;
    bool expected = r->counts->admission == HIFC_ADMIT_EXPECTED;
    p->now_s = now_s > p->now_s ? now_s : p->now_s;
    earn(r, now_s);
    policy_begin(p, chain, count);
    for (uint32_t i = 0; i < count; i++) {
        bool hit = policy_is_resident(p, chain[i]);
        if (hit || admitted(r, chain[i])) {
            policy_place(p, chain[i]);
            r->counts->hit_count += hit;
            r->counts->written_count += !hit && !expected;
            r->fresh[chain[i]] = r->fresh[chain[i]] || !hit;
        }
    }
    policy_end(p);
    if (expected) {
        refuse(r, chain, count);
    }
    policy_make_room(p);
    if (expected) {
        count_written(r, chain, count);
    }
    for (uint32_t i = 0; i < count; i++) {
        r->fresh[chain[i]] = false;
    }
    r->counts->access_count += count;
}

static int run(struct policy *p, const struct hifc_trace *trace, struct hifc_replay *counts)
{
    struct replay r = {.policy = p, .counts = counts, .budget_blocks = counts->budget_blocks,
                       .budget_time_s = trace->times_s[0],
                       .threshold_log = -INFINITY};
    int rc = policy_reserve(p, trace->id_count);
    r.fresh = calloc(trace->id_count, sizeof *r.fresh);
    if (!r.fresh) {
        rc = hifc_fail(-ENOMEM, "no memory for a trace of %u blocks", trace->id_count);
    }
    if (!rc && counts->admission == HIFC_ADMIT_SECOND_USE) {
        r.offered = second_use_create(trace->id_count);
        rc = r.offered ? 0 : -ENOMEM;
    }
    for (uint32_t i = 0; i < trace->request_count && !rc; i++) {
        p->answer_tokens = trace->answers ? trace->answers[i] : 0;
        request(&r, trace->times_s[i], trace->ids + trace->offsets[i],
                (uint32_t)(trace->offsets[i + 1] - trace->offsets[i]));
    }
    second_use_destroy(r.offered);
    free(r.fresh);
    return rc;
}

HIFC_API int hifc_policy_replay(struct hifc_policy *policy, const struct hifc_trace *trace,
                                struct hifc_replay *inout)
{
    struct policy *p = (struct policy *)policy;
    if (!p || !inout) {
        return hifc_fail(-EINVAL, "a replay wants a policy, and room for what it counts");
    }
    int rc = replay_check(trace);
    if (rc) {
        return rc;
    }
    if (!p->capacity || p->resident_count) {
        return hifc_fail(-EINVAL, "a replay wants a policy with a capacity, and unused");
    }
    if (inout->admission > HIFC_ADMIT_EXPECTED ||
        (inout->admission == HIFC_ADMIT_BUDGET && !(inout->budget_blocks > 0))) {
        return hifc_fail(-EINVAL, "admission %u: none, or a budget of no blocks",
                         inout->admission);
    }
    if (inout->admission == HIFC_ADMIT_EXPECTED && !p->ops->promise) {
        return hifc_fail(-EINVAL, "admission by what is expected wants the policy default or "
                                  "return_time: %s expects nothing", p->ops->name);
    }
    inout->access_count = inout->hit_count = inout->written_count = 0;
    return run(p, trace, inout);
}
