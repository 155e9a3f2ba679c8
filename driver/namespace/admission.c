/* SPDX-License-Identifier: Apache-2.0
 *
 * admission.c - whether a reuse put is worth the wear of writing it. Mutex held.
 *
 * Second use: a table of key fingerprints, one a slot, remembers what was offered lately; a key
 * that is remembered is written. Budget: bytes flow into a bucket of one day's write budget.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"

#define GHOST_SLOTS_MIN (1u << 16)
#define GHOST_SLOTS_MAX (1u << 22)
#define DAY_NS (86400ull * 1000000000ull)

struct ns_ghost {
    uint64_t mask;
    uint32_t fingerprints[];
};

int ns_admission_create(struct hifc_ns *ns)
{
    ns->budget_bytes = (int64_t)ns->opts.write_budget_bytes_per_day;
    ns->budget_time_ns = ns_now();
    if (ns->opts.admission != HIFC_ADMIT_SECOND_USE) {
        return 0;
    }
    uint64_t slots = GHOST_SLOTS_MIN;
    while (slots < GHOST_SLOTS_MAX && slots < ns->sb.size_bytes / HIFC_PAGE_BYTES) {
        slots *= 2;
    }
    ns->ghost = calloc(1, sizeof *ns->ghost + slots * sizeof ns->ghost->fingerprints[0]);
    if (!ns->ghost) {
        return hifc_fail(-ENOMEM, "no memory to remember %llu keys for admission",
                         (unsigned long long)slots);
    }
    ns->ghost->mask = slots - 1;
    return 0;
}

void ns_admission_destroy(struct hifc_ns *ns)
{
    free(ns->ghost);
    ns->ghost = NULL;
}

static bool second_use(struct ns_ghost *ghost, const struct hifc_key *key)
{
    uint64_t half[2];
    memcpy(half, key, sizeof half);
    uint64_t hash = (half[0] ^ half[1] >> 29) * 0x9e3779b97f4a7c15ull;
    uint32_t fingerprint = (uint32_t)(half[1] ^ half[0] >> 32) | 1u;
    uint32_t *slot = &ghost->fingerprints[hash >> 20 & ghost->mask];
    bool seen = *slot == fingerprint;
    *slot = fingerprint;
    return seen;
}

static void earn(struct hifc_ns *ns)
{
    uint64_t now = ns_now();
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
        return second_use(ns->ghost, key);
    case HIFC_ADMIT_BUDGET:
        return within_budget(ns, bytes);
    default:
        return true;
    }
}
