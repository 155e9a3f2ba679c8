/* SPDX-License-Identifier: Apache-2.0
 *
 * names.c - the policies that a caller can name.
 */
#include <errno.h>
#include <string.h>

#include "policy/policy.h"
#include "util/error.h"

static const struct policy_ops *const policies[] = {
    &policy_default, &policy_return_time, &policy_frequency, &policy_lru,
    &policy_lfu,     &policy_arc,         &policy_s3fifo,
};

struct policy *policy_open(const char *name, uint32_t capacity, double decay_lambda)
{
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        if (strcmp(policies[i]->name, name) == 0) {
            return policy_create(policies[i], capacity, decay_lambda);
        }
    }
    hifc_fail(-EINVAL, "no policy is called %s", name);
    return NULL;
}
