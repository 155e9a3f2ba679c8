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
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/invariant.h"

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
    ns_assert_locked(ns);
    hifc_assert(ticket->state == NS_TICKET_FREE && requests > 0);
    ticket->state = NS_TICKET_OWNED;
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
void ns_ticket_recycle(struct hifc_ticket *ticket)
{
    struct hifc_ns *ns = ticket->ns;
    if (ticket->fd >= 0) {
        close(ticket->fd);
        ticket->fd = -1;
    }
    hifc_assert(ticket->state != NS_TICKET_FREE && ns_ticket_is_done(ticket));
    ticket->state = NS_TICKET_FREE;
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
    if (ticket->state == NS_TICKET_ABANDONED) {
        ns_ticket_recycle(ticket);
        hifc_pools_unhold(ticket->ns->pools);
    }
}

void ns_answer(struct hifc_ns *ns, struct hifc_ticket *ticket, struct hifc_req *req,
               uint32_t callers_pool, int status, uint64_t bytes, const struct hifc_error *error)
{
    struct hifc_ticket_info *info = &ticket->info;
    ns_assert_locked(ns);
    hifc_assert(ticket->state != NS_TICKET_FREE && info->completed < info->requests);
    if (callers_pool) {
        uint32_t before = atomic_fetch_sub(&ns->pool_requests[callers_pool], 1);
        hifc_assert(before > 0);
    }
    if (ticket->state == NS_TICKET_OWNED) {
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
    hifc_count_down(ns->requests_inflight, 1u);
    uint32_t left = atomic_load_explicit(&ticket->remaining, memory_order_relaxed) - 1;
    if (left == 0) {
        ticket_done(ticket);
    } else {
        atomic_store_explicit(&ticket->remaining, left, memory_order_release);
    }
}
