/* SPDX-License-Identifier: Apache-2.0
 *
 * wait.c - tickets as a caller sees them: waiting for one, describing it, giving it back.
 *
 * `remaining` is a futex word, which waiters sleep on without the mutex. A ticket's memory lives as
 * long as the namespace, so that waking one which its owner has just freed is harmless.
 */
#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/cpu.h"
#include "util/invariant.h"

#define TICKET_CLOSING_NAP_US 1000u
#define TICKET_SPIN_ROUNDS 200u /* looks before it sleeps: a completion is often microseconds away */

/* Inline: the waiter polls, or the thread that holds the queue pairs does its work for it. */
static int ticket_wait_inline(struct hifc_ticket *ticket, int64_t timeout_us)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    if (ns_enter(ticket->ns, &visit) != 0) {
        /* Closing: who closes polls until every request has been answered. */
        usleep(TICKET_CLOSING_NAP_US);
        return ns_ticket_is_done(ticket);
    }
    /* Who asks for no wait asks often: the clock is not read for that. */
    uint64_t deadline = timeout_us > 0 ? hifc_now_ns() + (uint64_t)timeout_us * 1000 : UINT64_MAX;
    for (;;) {
        int completed = hifc_engine_poll(ticket->ns->engine);
        if (ns_ticket_is_done(ticket)) {
            return 1;
        }
        if (completed == 0 && ticket->ns->janitor_wanted) {
            ns_janitor_inline(ticket->ns);
        }
        if (timeout_us == 0 || (timeout_us > 0 && hifc_now_ns() >= deadline)) {
            return ns_ticket_is_done(ticket);
        }
        if (completed == -EBUSY) {
            sched_yield();
        }
    }
}

static int ticket_wait_reactor(struct hifc_ticket *ticket, int64_t timeout_us)
{
    for (unsigned i = 0; i < TICKET_SPIN_ROUNDS; i++) {
        if (ns_ticket_is_done(ticket)) {
            return 1;
        }
        hifc_cpu_relax();
    }
    uint64_t deadline = hifc_deadline_ns(timeout_us);
    int done = 0;
    atomic_fetch_add(&ticket->waiters, 1);
    for (;;) {
        uint32_t seen = atomic_load(&ticket->remaining);
        uint64_t now = hifc_now_ns();
        if (seen == 0 || now >= deadline) {
            done = seen == 0;
            break;
        }
        /* Only the last answer wakes, so the wait is cut into naps: `remaining` moves before. */
        uint64_t left = deadline - now < 1000000000ull ? deadline - now : 1000000000ull;
        struct timespec nap = {.tv_sec = (time_t)(left / 1000000000ull),
                               .tv_nsec = (long)(left % 1000000000ull)};
        syscall(SYS_futex, &ticket->remaining, FUTEX_WAIT_PRIVATE, seen, &nap, NULL, 0);
    }
    atomic_fetch_sub(&ticket->waiters, 1);
    return done;
}

HIFC_API int hifc_ticket_wait(struct hifc_ticket *ticket, int64_t timeout_us)
{
    if (hifc_forked_since(ticket->ns->fork_generation)) {
        return hifc_fail(-ECHILD, "a ticket of the parent process: open the namespace after fork()");
    }
    if (ns_ticket_is_done(ticket)) {
        return 1;
    }
    if (ticket->ns->reactor) {
        return timeout_us == 0 ? 0 : ticket_wait_reactor(ticket, timeout_us);
    }
    return ticket_wait_inline(ticket, timeout_us);
}

HIFC_API int hifc_ticket_info(struct hifc_ticket *ticket, struct hifc_ticket_info *out)
{
    if (hifc_forked_since(ticket->ns->fork_generation)) {
        return hifc_fail(-ECHILD, "a ticket of the parent process");
    }
    ns_lock(ticket->ns);
    *out = ticket->info;
    if (!ns_ticket_is_done(ticket)) {
        out->elapsed_ns = hifc_now_ns() - ticket->start_ns;
    }
    ns_unlock(ticket->ns);
    return 0;
}

HIFC_API int hifc_ticket_fd(struct hifc_ticket *ticket)
{
    struct hifc_ns *ns = ticket->ns;
    if (hifc_forked_since(ns->fork_generation)) {
        return hifc_fail(-ECHILD, "a ticket of the parent process");
    }
    if (!ns->reactor) {
        return hifc_fail(-ENOTSUP, "a namespace driven inline has nobody to signal an eventfd: "
                                   "open it with drive = reactor");
    }
    ns_lock(ns);
    if (ticket->fd < 0) {
        ticket->fd = eventfd(ns_ticket_is_done(ticket) ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    }
    int fd = ticket->fd, error = errno;
    ns_unlock(ns);
    return fd >= 0 ? fd : hifc_fail_eventfd(error, "a ticket to wait for by its descriptor");
}

HIFC_API void hifc_ticket_free(struct hifc_ticket *ticket)
{
    if (!ticket || hifc_forked_since(ticket->ns->fork_generation)) {
        return;
    }
    struct hifc_ns *ns = ticket->ns;
    while (hifc_ticket_wait(ticket, -1) == 0) {
    }
    ns_lock(ns);
    ns_ticket_recycle(ticket);
    ns_unlock(ns);
}

HIFC_API int hifc_ticket_finish(struct hifc_ticket **ticket, int64_t timeout_us,
                                struct hifc_ticket_info *info)
{
    struct hifc_ticket *done = ticket ? *ticket : NULL;
    if (!done) {
        return hifc_fail(-EINVAL, "no ticket to finish: it was finished or dropped before");
    }
    int status = hifc_ticket_wait(done, timeout_us);
    if (status != 1) {
        return status;
    }
    ns_lock(done->ns);
    if (info) {
        *info = done->info;
    }
    ns_ticket_recycle(done);
    ns_unlock(done->ns);
    *ticket = NULL;
    return 1;
}

HIFC_API void hifc_ticket_drop(struct hifc_ticket **ticket, int64_t timeout_us)
{
    struct hifc_ticket *dropped = ticket ? *ticket : NULL;
    if (!dropped || hifc_forked_since(dropped->ns->fork_generation)) {
        return;
    }
    if (timeout_us > 0) {
        (void)hifc_ticket_wait(dropped, timeout_us);
    }
    struct hifc_ns *ns = dropped->ns;
    ns_lock(ns);
    if (ns_ticket_is_done(dropped)) {
        ns_ticket_recycle(dropped);
    } else {
        hifc_pools_hold(ns->pools);
        hifc_assert(dropped->state == NS_TICKET_OWNED);
        dropped->state = NS_TICKET_ABANDONED;
    }
    ns_unlock(ns);
    *ticket = NULL;
}

HIFC_API int hifc_execute(struct hifc_ns *ns, struct hifc_req *req, int64_t timeout_us,
                          struct hifc_ticket **ticket, struct hifc_ticket_info *info)
{
    int error = hifc_submit(ns, req, 1, ticket);
    return error ? error : hifc_ticket_finish(ticket, timeout_us, info);
}
