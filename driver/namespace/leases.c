/* SPDX-License-Identifier: Apache-2.0
 *
 * leases.c - promises that segments are not emptied for a while: see leases.h. Mutex held, except where a
 * function takes it.
 */
#include <stdlib.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/invariant.h"

#define LEASE_TTL_DEFAULT_MS 60000u

int ns_leases_create(struct hifc_ns *ns)
{
    ns->leases.size = ns->opts.leases_max;
    ns->leases.slots = calloc(ns->leases.size, sizeof *ns->leases.slots);
    return ns->leases.slots ? 0
                            : hifc_fail(-ENOMEM, "no memory for %u leases; lower leases_max",
                                        ns->leases.size);
}

void ns_leases_destroy(struct hifc_ns *ns)
{
    for (uint32_t i = 0; ns->leases.slots && i < ns->leases.size; i++) {
        free(ns->leases.slots[i].segments);
    }
    free(ns->leases.slots);
    ns->leases = (struct ns_leases){0};
}

static struct ns_lease *lease_unused(struct hifc_ns *ns)
{
    if (ns->leases.count == ns->leases.size) {
        return NULL;
    }
    uint64_t start = ns->leases.last_id % ns->leases.size;
    for (uint32_t i = 0; i < ns->leases.size; i++) {
        struct ns_lease *lease = &ns->leases.slots[(start + i) % ns->leases.size];
        if (lease->id == 0) {
            return lease;
        }
    }
    return NULL;
}

static void lease_end(struct hifc_ns *ns, struct ns_lease *lease)
{
    ns_assert_locked(ns);
    hifc_assert(lease->id != 0);
    for (uint32_t i = 0; i < lease->count; i++) {
        struct ns_segment *segment = &ns->segments[lease->segments[i]];
        hifc_count_down(segment->leases, 1u);
        if (segment->leases == 0 && segment->live_entries == 0) {
            ns_want_janitor(ns);
        }
    }
    free(lease->segments);
    *lease = (struct ns_lease){0};
    hifc_count_down(ns->leases.count, 1u);
    ns->reclaim_exhausted = false;
}

void ns_leases_expire(struct hifc_ns *ns, uint64_t now_ns)
{
    for (uint32_t i = 0; ns->leases.count > 0 && i < ns->leases.size; i++) {
        if (ns->leases.slots[i].id != 0 && now_ns >= ns->leases.slots[i].deadline_ns) {
            lease_end(ns, &ns->leases.slots[i]);
        }
    }
}

HIFC_API int hifc_lease(struct hifc_ns *ns, const struct hifc_key *keys, uint32_t count,
                        uint32_t ttl_ms, int32_t *answers, uint64_t *out)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    uint32_t *segments = malloc((count ? count : 1) * sizeof *segments);
    if (!segments) {
        return hifc_fail(-ENOMEM, "no memory for a lease of %u keys", count);
    }
    ns_lock(ns);
    ns_leases_expire(ns, hifc_now_ns());
    struct ns_lease *lease = lease_unused(ns);
    if (!lease) {
        ns_unlock(ns);
        free(segments);
        return hifc_fail(-EAGAIN, "%u leases are held: release some or raise leases_max",
                         ns->leases.size);
    }
    uint32_t held = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct hifc_slot *slot = hifc_index_find(ns->index, &keys[i]);
        int answer = ns_slot_answer(slot);
        if (answers) {
            answers[i] = answer;
        }
        if (answer == HIFC_OK) {
            ns->segments[slot->segment].leases++;
            segments[held++] = slot->segment;
        }
    }
    lease->id = ++ns->leases.last_id;
    lease->deadline_ns = hifc_now_ns() + (ttl_ms ? ttl_ms : LEASE_TTL_DEFAULT_MS) * 1000000ull;
    lease->segments = segments;
    lease->count = held;
    ns->leases.count++;
    *out = lease->id;
    ns_unlock(ns);
    return 0;
}

HIFC_API int hifc_lease_release(struct hifc_ns *ns, uint64_t id)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    error = -ENOENT;
    ns_lock(ns);
    for (uint32_t i = 0; id != 0 && i < ns->leases.size; i++) {
        if (ns->leases.slots[i].id == id) {
            lease_end(ns, &ns->leases.slots[i]);
            error = 0;
            break;
        }
    }
    ns_unlock(ns);
    return error ? hifc_fail(error, "lease %llu expired or was released before",
                             (unsigned long long)id)
                 : 0;
}
