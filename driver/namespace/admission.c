/* SPDX-License-Identifier: Apache-2.0
 *
 * admission.c - whether a reuse put is worth the wear of writing it. Mutex held.
 *
 * Second use: see second_use.h. Budget: bytes flow into a bucket of one day's write budget.
 */
#include "namespace/ns.h"
#include "policy/second_use.h"
#include "util/clock.h"

#define DAY_NS (86400ull * 1000000000ull)

int ns_admission_create(struct hifc_ns *ns)
{
    ns->budget_bytes = (int64_t)ns->opts.write_budget_bytes_per_day;
    ns->budget_time_ns = hifc_now_ns();
    if (ns->opts.admission != HIFC_ADMIT_SECOND_USE) {
        return 0;
    }
    ns->ghost = second_use_create(ns->sb.size_bytes / HIFC_PAGE_BYTES);
    return ns->ghost ? 0 : -ENOMEM;
}

void ns_admission_destroy(struct hifc_ns *ns)
{
    second_use_destroy(ns->ghost);
    ns->ghost = NULL;
}

static void earn(struct hifc_ns *ns)
{
    uint64_t now = hifc_now_ns();
    double earned = (double)ns->opts.write_budget_bytes_per_day *
                    (double)(now - ns->budget_time_ns) / (double)DAY_NS;
    if (earned >= 1) {
        ns->budget_bytes += (int64_t)earned;
        ns->budget_time_ns = now;
        if (ns->budget_bytes > (int64_t)ns->opts.write_budget_bytes_per_day) {
            ns->budget_bytes = (int64_t)ns->opts.write_budget_bytes_per_day;
        }
    }
}

uint64_t ns_budget_left(struct hifc_ns *ns)
{
    earn(ns);
    return ns->budget_bytes > 0 ? (uint64_t)ns->budget_bytes : 0;
}

static bool within_budget(struct hifc_ns *ns, uint64_t bytes)
{
    earn(ns);
    if (ns->budget_bytes < (int64_t)bytes) {
        return false;
    }
    ns->budget_bytes -= (int64_t)bytes;
    return true;
}

void ns_admit_undo(struct hifc_ns *ns, uint8_t cls, uint64_t bytes)
{
    if (cls == HIFC_REUSE && ns->opts.admission == HIFC_ADMIT_BUDGET) {
        ns->budget_bytes += (int64_t)bytes;
    }
}

bool ns_admit(struct hifc_ns *ns, const struct hifc_key *key, uint64_t bytes)
{
    switch (ns->opts.admission) {
    case HIFC_ADMIT_SECOND_USE:
        return second_use_offer(ns->ghost, key);
    case HIFC_ADMIT_BUDGET:
        return within_budget(ns, bytes);
    default:
        return true;
    }
}
