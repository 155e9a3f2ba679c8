/* SPDX-License-Identifier: Apache-2.0
 *
 * visit.c - who is inside: calls of the public interface are counted while they are under way, so
 * that closing waits for them; and how one of them waits for something to change.
 */
#include <sched.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/invariant.h"

#define WAIT_CHANGED_NS 5000000ull

int ns_enter(struct hifc_ns *ns, struct hifc_ns **visit)
{
    if (!ns) {
        return hifc_fail(-EINVAL, "no namespace: open one first");
    }
    if (hifc_forked_since(ns->fork_generation)) {
        return hifc_fail(-ECHILD, "this namespace belongs to the parent process: open it after "
                                     "fork(), or attach to its owner");
    }
    /* Increment visits before testing closed; shut_down sets closed before testing visits. One of
     * the two always sees the other. */
    atomic_fetch_add(&ns->visits, 1);
    if (atomic_load(&ns->closed)) {
        atomic_fetch_sub(&ns->visits, 1);
        return hifc_fail(-ESHUTDOWN, "the namespace on %s is closed or was detached: open it again",
                         ns->uri);
    }
    *visit = ns;
    return 0;
}

void ns_leave(struct hifc_ns **visit)
{
    if (*visit) {
        atomic_fetch_sub_explicit(&(*visit)->visits, 1, memory_order_release);
    }
}

void ns_wait_changed(struct hifc_ns *ns)
{
    if (ns->reactor) {
        struct timespec until = hifc_after_ns(WAIT_CHANGED_NS);
        ns_sleep(ns, &until);
        return;
    }
    ns_unlock(ns);
    if (hifc_engine_poll(ns->engine) == -EBUSY) {
        sched_yield();
    }
    ns_lock(ns);
}

/* ---- the mutex ------------------------------------------------------------------------------- */

static _Thread_local char here; /* whose address tells this thread from the others */

void ns_lock(struct hifc_ns *ns)
{
    pthread_mutex_lock(&ns->mutex);
    ns->holder = &here;
}

void ns_unlock(struct hifc_ns *ns)
{
    ns_assert_locked(ns);
    ns->holder = NULL;
    pthread_mutex_unlock(&ns->mutex);
}

void ns_sleep(struct hifc_ns *ns, const struct timespec *until)
{
    ns_assert_locked(ns);
    ns->holder = NULL;
    pthread_cond_timedwait(&ns->changed, &ns->mutex, until);
    ns->holder = &here;
}

void ns_assert_locked(const struct hifc_ns *ns)
{
    hifc_assert(ns->holder == &here || ns->opening);
}
