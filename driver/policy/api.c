/* SPDX-License-Identifier: Apache-2.0
 *
 * api.c - the policies as hifc.h shows them: checks what comes in, and hands it on.
 */
#include <errno.h>
#include <math.h>

#include "policy/policy.h"
#include "util/error.h"

#define ID_MAX (1u << 30)

static struct policy *inner(struct hifc_policy *policy)
{
    return (struct policy *)policy;
}

HIFC_API int hifc_policy_open(const char *name, uint32_t capacity_blocks, double decay_lambda,
                              struct hifc_policy **out)
{
    if (!name || !out || !isfinite(decay_lambda) || decay_lambda < 0) {
        return hifc_fail(-EINVAL, "a policy wants a name, and a lambda from 0 up");
    }
    *out = (struct hifc_policy *)policy_open(name, capacity_blocks, decay_lambda);
    return *out ? 0 : hifc_last_error(NULL);
}

HIFC_API void hifc_policy_close(struct hifc_policy *policy)
{
    policy_close(inner(policy));
}

static int check(struct policy *p, const uint32_t *ids, uint32_t count)
{
    uint32_t most = 0;
    if (!p || (!ids && count)) {
        return hifc_fail(-EINVAL, "no policy, or no ids: open one with hifc_policy_open");
    }
    for (uint32_t i = 0; i < count; i++) {
        most = ids[i] > most ? ids[i] : most;
    }
    if (most >= ID_MAX) {
        return hifc_fail(-EINVAL, "block id %u: ids are dense, below %u", most, ID_MAX);
    }
    return count ? policy_reserve(p, most + 1) : 0;
}

static int set_time(struct policy *p, double now_s)
{
    if (!isfinite(now_s)) {
        return hifc_fail(-EINVAL, "a time that is no number of seconds");
    }
    p->now_s = now_s > p->now_s ? now_s : p->now_s;
    return 0;
}

HIFC_API int hifc_policy_use(struct hifc_policy *policy, double now_s, const uint32_t *ids,
                             uint32_t count)
{
    struct policy *p = inner(policy);
    int rc = check(p, ids, count);
    rc = rc ? rc : set_time(p, now_s);
    if (rc) {
        return rc;
    }
    policy_begin(p, ids, count);
    for (uint32_t i = 0; i < count; i++) {
        policy_access(p, ids[i]);
    }
    policy_end(p);
    return 0;
}

HIFC_API int hifc_policy_leave(struct hifc_policy *policy, const uint32_t *ids, uint32_t count)
{
    struct policy *p = inner(policy);
    int rc = check(p, ids, count);
    for (uint32_t i = 0; i < count && !rc; i++) {
        policy_leave(p, ids[i]);
    }
    return rc;
}

HIFC_API int hifc_policy_forget(struct hifc_policy *policy, const uint32_t *ids, uint32_t count)
{
    struct policy *p = inner(policy);
    int rc = check(p, ids, count);
    for (uint32_t i = 0; i < count && !rc; i++) {
        policy_forget(p, ids[i]);
    }
    return rc;
}

HIFC_API int hifc_policy_scores(struct hifc_policy *policy, double now_s, const uint32_t *ids,
                                uint32_t count, double *scores)
{
    struct policy *p = inner(policy);
    int rc = check(p, ids, count);
    rc = rc ? rc : set_time(p, now_s);
    if (!rc && count && !scores) {
        return hifc_fail(-EINVAL, "no room for %u scores", count);
    }
    for (uint32_t i = 0; i < count && !rc; i++) {
        scores[i] = p->ops->score(p, ids[i]);
    }
    return rc;
}
