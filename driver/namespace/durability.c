/* SPDX-License-Identifier: Apache-2.0
 *
 * durability.c - what makes acknowledged values durable and answered: flush, settle, sync, drain. Blocks;
 * no mutex held on entry.
 */
#include "namespace/ns.h"
#include "util/clock.h"

int ns_flush(struct hifc_ns *ns)
{
    ns_lock(ns);
    uint64_t covered = ns->completed_sequence;
    ns_unlock(ns);
    int error = hifc_blockio_flush(ns->io);
    ns_lock(ns);
    ns->stats.flush_count++;
    if (!error && covered > ns->flushed_sequence) {
        ns->flushed_sequence = covered;
    }
    ns_unlock(ns);
    return error;
}

int ns_settle(struct hifc_ns *ns, int64_t timeout_us)
{
    uint64_t deadline = hifc_deadline_ns(timeout_us);
    ns_lock(ns);
    ns_close_forming(ns, true);
    uint64_t target = ns->sequence;
    ns_unlock_and_issue(ns);
    ns_lock(ns);
    while (ns->completed_sequence < target && ns->global_head && hifc_now_ns() < deadline) {
        ns_wait_changed(ns);
    }
    bool settled = ns->completed_sequence >= target || !ns->global_head;
    ns_unlock(ns);
    return settled ? 0 : hifc_fail(-ETIMEDOUT, "batches on %s did not complete in time", ns->uri);
}

int ns_sync(struct hifc_ns *ns)
{
    int error = ns_settle(ns, 2000ll * ns->opts.command_timeout_ms);
    return error ? error : ns_flush(ns);
}

HIFC_API int hifc_sync(struct hifc_ns *ns)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    return error || ns->read_only ? error : ns_sync(ns);
}

int ns_drain(struct hifc_ns *ns, int64_t timeout_us)
{
    uint64_t deadline = hifc_deadline_ns(timeout_us);
    ns_lock(ns);
    ns_close_forming(ns, true);
    ns_unlock_and_issue(ns);
    ns_lock(ns);
    while (ns->requests_inflight > 0 && hifc_now_ns() < deadline) {
        ns_wait_changed(ns);
    }
    uint32_t left = ns->requests_inflight;
    ns_unlock(ns);
    return left == 0 ? 0
                     : hifc_fail(-ETIMEDOUT, "%u requests on %s are still in flight", left,
                                 ns->uri);
}

HIFC_API int hifc_drain(struct hifc_ns *ns, int64_t timeout_us)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    return error ? error : ns_drain(ns, timeout_us);
}
