/* SPDX-License-Identifier: Apache-2.0
 *
 * admission.c - whether a reuse put is worth the wear of writing it. Mutex held.
 *
 * Second use: see second_use.h. Budget: bytes flow into a bucket of one day's write budget.
 */
#include "namespace/admission.h"

#include <errno.h>

#include "policy/second_use.h"
#include "util/clock.h"

#define DAY_NS (86400ull * 1000000000ull)

int ns_admission_create(struct ns_admission *admission, uint32_t rule, uint64_t bytes_per_day,
                        uint64_t key_count)
{
    *admission = (struct ns_admission){.rule = rule,
                                       .bytes_per_day = bytes_per_day,
                                       .budget_bytes = (int64_t)bytes_per_day,
                                       .earned_ns = hifc_now_ns()};
    if (rule == HIFC_ADMIT_SECOND_USE) {
        admission->ghost = second_use_create(key_count);
    }
    return rule != HIFC_ADMIT_SECOND_USE || admission->ghost ? 0 : -ENOMEM;
}

void ns_admission_destroy(struct ns_admission *admission)
{
    second_use_destroy(admission->ghost);
    admission->ghost = NULL;
}

static void earn(struct ns_admission *admission)
{
    uint64_t now = hifc_now_ns();
    double earned = (double)admission->bytes_per_day *
                    (double)(now - admission->earned_ns) / (double)DAY_NS;
    if (earned >= 1) {
        admission->budget_bytes += (int64_t)earned;
        admission->earned_ns = now;
        if (admission->budget_bytes > (int64_t)admission->bytes_per_day) {
            admission->budget_bytes = (int64_t)admission->bytes_per_day;
        }
    }
}

uint64_t ns_admission_left_bytes(struct ns_admission *admission)
{
    earn(admission);
    return admission->budget_bytes > 0 ? (uint64_t)admission->budget_bytes : 0;
}

static bool within_budget(struct ns_admission *admission, uint64_t bytes)
{
    earn(admission);
    if (admission->budget_bytes < (int64_t)bytes) {
        return false;
    }
    admission->budget_bytes -= (int64_t)bytes;
    return true;
}

void ns_admit_undo(struct ns_admission *admission, uint8_t cls, uint64_t bytes)
{
    if (cls == HIFC_REUSE && admission->rule == HIFC_ADMIT_BUDGET) {
        admission->budget_bytes += (int64_t)bytes;
    }
}

bool ns_admit(struct ns_admission *admission, const struct hifc_key *key, uint64_t bytes)
{
    switch (admission->rule) {
    case HIFC_ADMIT_SECOND_USE:
        return second_use_offer(admission->ghost, key);
    case HIFC_ADMIT_BUDGET:
        return within_budget(admission, bytes);
    default:
        return true;
    }
}
