/* SPDX-License-Identifier: Apache-2.0
 *
 * ticket.c - tickets: how a caller learns that its batch of requests has been answered.
 *
 * `remaining` is a futex word. It is decremented under the namespace's mutex; waiters sleep on it
 * without. A ticket's memory lives as long as the namespace, so that waking one which its owner
 * has just freed is harmless.
 *
 * A ticket that is abandoned before it is done has no owner any more: the last answer frees it. From
 * the moment it is abandoned none of its requests is written to, and buffers that the caller frees
 * are handed out again only once no abandoned ticket is left (hifc_pools_hold), since transfers into
 * them may still be under way.
 */
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "util/cpu.h"
#include "namespace/ns.h"
#include "util/clock.h"

#define TICKET_CLOSING_NAP_US 1000u
#define TICKET_SPIN_ROUNDS 200u /* looks before it sleeps: a completion is often microseconds away */

int ns_tickets_create(struct hifc_ns *ns)
{
    ns->tickets_count = ns->opts.requests_max;
    ns->tickets = calloc(ns->tickets_count, sizeof *ns->tickets);
    if (!ns->tickets) {
        return hifc_fail(-ENOMEM, "no memory for %u tickets: lower requests_max",
                         ns->tickets_count);
    }
    for (uint32_t i = ns->tickets_count; i-- > 0;) {
        ns->tickets[i].ns = ns;
        ns->tickets[i].fd = -1;
        ns->tickets[i].next_free = ns->free_tickets;
        ns->free_tickets = &ns->tickets[i];
    }
    return 0;
}

void ns_tickets_destroy(struct hifc_ns *ns)
{
    for (uint32_t i = 0; ns->tickets && i < ns->tickets_count; i++) {
        if (ns->tickets[i].fd >= 0) {
            close(ns->tickets[i].fd);
        }
    }
    free(ns->tickets);
    ns->tickets = NULL;
}

struct hifc_ticket *ns_ticket_alloc(struct hifc_ns *ns, uint32_t requests, uint8_t first_op)
{
    struct hifc_ticket *ticket = ns->free_tickets;
    if (!ticket) {
        return NULL;
    }
    ns->free_tickets = ticket->next_free;
    ticket->first_op = first_op;
    ticket->abandoned = false;
    ticket->info.requests = requests;
    ticket->info.completed = ticket->info.failed = ticket->info.other = 0;
    ticket->info.bytes = ticket->info.elapsed_ns = 0;
    ticket->info.first_error.code = 0;
    ticket->info.first_error.message[0] = '\0';
    ticket->start_ns = hifc_now_ns();
    atomic_store_explicit(&ticket->waiters, 0, memory_order_relaxed);
    atomic_store_explicit(&ticket->remaining, requests, memory_order_release);
    return ticket;
}

/* Which bucket of a histogram of latency counts it. */
static unsigned latency_bucket(uint64_t elapsed_ns)
{
    unsigned bucket = elapsed_ns < 2048 ? 0 : 63u - (unsigned)__builtin_clzll(elapsed_ns) - 10u;
    return bucket < HIFC_LATENCY_BUCKETS ? bucket : HIFC_LATENCY_BUCKETS - 1;
}

static void count_latency(struct hifc_ticket *ticket)
{
    struct hifc_stats *stats = &ticket->ns->stats;
    uint64_t elapsed_ns = ticket->info.elapsed_ns;
    if (ticket->info.bytes == 0) {
        return; /* answered from the index: that says nothing about the device */
    }
    switch (ticket->first_op) {
    case HIFC_OP_GET:
        stats->get_latency[latency_bucket(elapsed_ns)]++;
        stats->get_elapsed_ns += elapsed_ns;
        break;
    case HIFC_OP_PUT:
    case HIFC_OP_WRITE:
    case HIFC_OP_COMMIT:
        stats->put_latency[latency_bucket(elapsed_ns)]++;
        stats->put_elapsed_ns += elapsed_ns;
        break;
    default:
        break;
    }
}

/* Mutex held. */
static void recycle(struct hifc_ticket *ticket)
{
    struct hifc_ns *ns = ticket->ns;
    if (ticket->fd >= 0) {
        close(ticket->fd);
        ticket->fd = -1;
    }
    ticket->next_free = ns->free_tickets;
    ns->free_tickets = ticket;
}

static void ticket_done(struct hifc_ticket *ticket)
{
    ticket->info.elapsed_ns = hifc_now_ns() - ticket->start_ns;
    count_latency(ticket);
    atomic_store(&ticket->remaining, 0);
    if (ticket->fd >= 0) { /* after it, so that who is woken finds it done; free waits for us */
        eventfd_write(ticket->fd, 1);
    }
    if (atomic_load(&ticket->waiters) != 0) {
        syscall(SYS_futex, &ticket->remaining, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
    if (ticket->abandoned) {
        recycle(ticket);
        hifc_pools_unhold(ticket->ns->pools);
    }
}

void ns_answer(struct hifc_ns *ns, struct hifc_ticket *ticket, struct hifc_req *req,
               uint32_t callers_pool, int status, uint64_t bytes, const struct hifc_error *error)
{
    struct hifc_ticket_info *info = &ticket->info;
    if (callers_pool) {
        atomic_fetch_sub(&ns->pool_requests[callers_pool], 1);
    }
    if (!ticket->abandoned) {
        __atomic_store_n(&req->status, status, __ATOMIC_RELEASE);
    }
    if (status < 0) {
        info->failed++;
        if (info->first_error.code == 0) {
            if (error) {
                info->first_error = *error;
            } else {
                info->first_error.code = status;
            }
        }
    } else if (status == HIFC_OK) {
        info->bytes += bytes;
    } else {
        info->other++;
    }
    info->completed++;
    ns->requests_inflight--;
    uint32_t left = atomic_load_explicit(&ticket->remaining, memory_order_relaxed) - 1;
    if (left == 0) {
        ticket_done(ticket);
    } else {
        atomic_store_explicit(&ticket->remaining, left, memory_order_release);
    }
}

static bool ticket_is_done(struct hifc_ticket *ticket)
{
    return atomic_load_explicit(&ticket->remaining, memory_order_acquire) == 0;
}

/* Inline: the waiter polls, or the thread that holds the queue pairs does its work for it. */
static int ticket_wait_inline(struct hifc_ticket *ticket, int64_t timeout_us)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    if (ns_enter(ticket->ns, &visit) != 0) {
        /* Closing: who closes polls until every request has been answered. */
        usleep(TICKET_CLOSING_NAP_US);
        return ticket_is_done(ticket);
    }
    /* Who asks for no wait asks often: the clock is not read for that. */
    uint64_t deadline = timeout_us > 0 ? hifc_now_ns() + (uint64_t)timeout_us * 1000 : UINT64_MAX;
    for (;;) {
        int completed = hifc_engine_poll(ticket->ns->engine);
        if (ticket_is_done(ticket)) {
            return 1;
        }
        if (completed == 0 && ticket->ns->janitor_wanted) {
            ns_janitor_inline(ticket->ns);
        }
        if (timeout_us == 0 || (timeout_us > 0 && hifc_now_ns() >= deadline)) {
            return ticket_is_done(ticket);
        }
        if (completed == -EBUSY) {
            sched_yield();
        }
    }
}

static int ticket_wait_reactor(struct hifc_ticket *ticket, int64_t timeout_us)
{
    for (unsigned i = 0; i < TICKET_SPIN_ROUNDS; i++) {
        if (ticket_is_done(ticket)) {
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
    if (ticket_is_done(ticket)) {
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
    pthread_mutex_lock(&ticket->ns->mutex);
    *out = ticket->info;
    if (!ticket_is_done(ticket)) {
        out->elapsed_ns = hifc_now_ns() - ticket->start_ns;
    }
    pthread_mutex_unlock(&ticket->ns->mutex);
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
    pthread_mutex_lock(&ns->mutex);
    if (ticket->fd < 0) {
        ticket->fd = eventfd(ticket_is_done(ticket) ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    }
    int fd = ticket->fd, error = errno;
    pthread_mutex_unlock(&ns->mutex);
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
    pthread_mutex_lock(&ns->mutex);
    recycle(ticket);
    pthread_mutex_unlock(&ns->mutex);
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
    pthread_mutex_lock(&done->ns->mutex);
    if (info) {
        *info = done->info;
    }
    recycle(done);
    pthread_mutex_unlock(&done->ns->mutex);
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
    pthread_mutex_lock(&ns->mutex);
    if (ticket_is_done(dropped)) {
        recycle(dropped);
    } else {
        hifc_pools_hold(ns->pools);
        dropped->abandoned = true;
    }
    pthread_mutex_unlock(&ns->mutex);
    *ticket = NULL;
}
