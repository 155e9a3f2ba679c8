/* SPDX-License-Identifier: Apache-2.0
 *
 * ns.c - a namespace as a whole: open and close, and what the driving thread hands over after each
 * poll.
 */
#include "namespace/ns.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "admin/drive.h"
#include "admin/owner.h"
#include "namespace/prefetch.h"
#include "util/clock.h"

#define DRAIN_AT_CLOSE_US 120000000ll
#define LEAVE_NAP_US 200u

/* ---- the driving thread hands over ---------------------------------------------------------- */

static void batch_end(void *owner)
{
    struct hifc_ns *ns = owner;
    struct ns_op *ops = ns->done_ops;
    struct ns_batch *batches = ns->done_batches;
    struct ns_open *headers = ns->done_headers;
    if (!ops && !batches && !headers) {
        return;
    }
    ns->done_ops = NULL;
    ns->done_ops_tail = &ns->done_ops;
    ns->done_batches = NULL;
    ns->done_batches_tail = &ns->done_batches;
    ns->done_headers = NULL;

    ns_lock(ns);
    ns->stats.bounce_bytes += ns->read_bounce_bytes;
    ns->read_bounce_bytes = 0;
    for (struct ns_op *op = ops, *next; op; op = next) {
        next = op->next;
        if (op->kind == NS_OP_WRITE) {
            ns_reservation_write_completed(ns, op);
        } else {
            ns_read_completed(ns, op);
        }
    }
    ns_headers_completed(ns, headers);
    ns_batches_completed(ns, batches);
    ns_fetch_more(ns);
    ns_rings_wake(ns);
    pthread_cond_broadcast(&ns->changed);
    ns_unlock_and_issue(ns);
}

/* ---- the owner's socket --------------------------------------------------------------------- */

static int owner_stats(void *context, struct hifc_stats *out)
{
    return hifc_stats(context, out);
}

static int owner_health(void *context, uint8_t log[512])
{
    return hifc_health(context, log);
}

static int owner_detach(void *context);

static void owner_published(void *context, char *json, size_t size)
{
    struct hifc_ns *ns = context;
    ns_lock(ns);
    const char *text = ns->published ? ns->published : "";
    size_t length = strlen(text); /* hifc_publish took no more than fits */
    memcpy(json, text, length < size ? length + 1 : 0);
    ns_unlock(ns);
}

static int open_owner(struct hifc_ns *ns)
{
    static const struct hifc_owner_ops ops = {
        .stats = owner_stats, .health = owner_health, .detach = owner_detach,
        .published = owner_published};
    if (ns->read_only || ns->opts.no_owner_socket) {
        return 0;
    }
    return hifc_owner_start(NULL, ns->uri, &ops, ns, &ns->owner);
}

/* ---- open ----------------------------------------------------------------------------------- */

#define DEFAULT(field, value)  \
    do {                       \
        if (opts->field == 0) { \
            opts->field = value; \
        }                      \
    } while (0)

static int set_defaults(struct hifc_open_opts *opts)
{
    DEFAULT(pool_size_bytes, 64u << 20);
    DEFAULT(queue_depth, 128);
    DEFAULT(requests_max, 8192);
    DEFAULT(batch_inflight, 4);
    DEFAULT(batch_size_max_bytes, 8u << 20);
    DEFAULT(reservations_max, 4096);
    DEFAULT(reservation_timeout_ms, 600000);
    DEFAULT(leases_max, 4096);
    DEFAULT(events_max, 65536);
    DEFAULT(reinsert_percent_plus1, 6);
    DEFAULT(command_timeout_ms, 30000);
    DEFAULT(spin_us, 50);
    DEFAULT(prefetch_inflight, 32);
    if (opts->drive > HIFC_INLINE || opts->admission > HIFC_ADMIT_BUDGET ||
        opts->reinsert_percent_plus1 > 101 || opts->batch_inflight > NS_BATCHES_MAX / 4 ||
        opts->queue_depth > HIFC_QUEUE_DEPTH_MAX || opts->requests_max > 1u << 20 ||
        opts->prefetch_inflight > NS_PREFETCH_INFLIGHT_MAX) {
        return hifc_fail(-EINVAL, "an open option is out of range: drive 0-1, admission 0-2, "
                                  "reinsertion 0-100 %%, batch_inflight 1-%u, queue_depth 1-%u, "
                                  "requests_max 1-1048576, prefetch_inflight 1-%u",
                         NS_BATCHES_MAX / 4, HIFC_QUEUE_DEPTH_MAX, NS_PREFETCH_INFLIGHT_MAX);
    }
    if (opts->admission == HIFC_ADMIT_BUDGET && opts->write_budget_bytes_per_day == 0) {
        return hifc_fail(-EINVAL, "admission by budget wants write_budget_bytes_per_day");
    }
    return 0;
}

static int open_engine(struct hifc_ns *ns)
{
    struct hifc_engine_opts opts = {.reactor = ns->opts.drive == HIFC_REACTOR,
                                    .queue_depth = ns->opts.queue_depth,
                                    .command_timeout_ms = ns->opts.command_timeout_ms,
                                    .spin_us = ns->opts.spin_us,
                                    .batch_end = batch_end,
                                    .gather = ns_rings_gather,
                                    .sleep_max_ns = ns_rings_sleep_max_ns,
                                    .owner = ns};
    int error = ns_prefetch_create(ns);
    error = error ? error : hifc_pools_create(ns->device, ns->opts.pool_size_bytes, &ns->pools);
    error = error ? error : hifc_engine_create(ns->device, &opts, &ns->engine);
    return error ? error : hifc_blockio_create(ns->device, ns->engine, &ns->io);
}

static int open_tables(struct hifc_ns *ns)
{
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed) {
        return hifc_fail(-EIO, "no random seed for the index: %m");
    }
    uint64_t entries = ns->opts.index_entries_max;
    if (entries == 0) {
        entries = ns->sb.size_bytes / HIFC_PAGE_BYTES;
        entries = entries < 1u << 20 ? 1u << 20 : entries;
        entries = entries < HIFC_INDEX_ENTRIES_MAX ? entries : HIFC_INDEX_ENTRIES_MAX;
    }
    ns->segment_count = ns->sb.segment_count;
    ns->segment_size = (uint32_t)ns->sb.segment_size_bytes;
    ns->segments = calloc(ns->segment_count, sizeof *ns->segments);
    if (!ns->segments || !ns_segment_set_create(&ns->free_set, ns->segment_count) ||
        !ns_segment_set_create(&ns->roomless_set, ns->segment_count)) {
        return hifc_fail(-ENOMEM, "no memory for %u segments", ns->segment_count);
    }
    if (ns->opts.batch_size_max_bytes > ns->segment_size / 2) {
        ns->opts.batch_size_max_bytes = ns->segment_size / 2;
    }
    int error = hifc_index_create(entries, seed, &ns->index);
    error = error ? error : ns_memory_create(ns);
    error = error ? error : ns_tickets_create(ns);
    error = error ? error : ns_reservations_create(ns);
    error = error ? error : ns_leases_create(ns);
    if (!error && (!ns_events_create(&ns->events, ns->opts.events_max) ||
                   !ns_checksum_tables_create(&ns->tables))) {
        error = hifc_fail(-ENOMEM, "no memory for %u events; lower events_max",
                          ns->opts.events_max);
    }
    return error ? error
                 : ns_admission_create(&ns->admission, ns->opts.admission,
                                       ns->opts.write_budget_bytes_per_day,
                                       ns->sb.size_bytes / HIFC_PAGE_BYTES);
}

/* The new epoch is on stable media before anything is appended in it. */
static int open_epoch(struct hifc_ns *ns, uint64_t highest)
{
    if (ns->read_only) {
        return 0;
    }
    ns->sb.sequence = highest + 1;
    ns->sb.open_epoch++;
    ns->sb.clean = 0;
    return hifc_superblock_write(ns->io, &ns->sb);
}

/* Nothing is in flight and nobody visits: the device is free for others afterwards. */
static void release_device(struct hifc_ns *ns)
{
    if (ns->engine) {
        hifc_engine_destroy(ns->engine);
        ns->engine = NULL;
    }
    ns_rings_release(ns);
    if (ns->io) {
        hifc_blockio_destroy(ns->io);
        ns->io = NULL;
    }
    if (ns->device) {
        if (ns->pools) {
            hifc_pools_release(ns->pools);
        }
        hifc_device_close(ns->device);
        ns->device = NULL;
    }
}

/* All but what a call finds that comes after the end: tickets, which their owners still give back,
 * and lent memory of the pool. */
static void release_tables(struct hifc_ns *ns)
{
    while (ns->open_list) {
        ns_open_destroy(ns, ns->open_list);
    }
    ns_reservations_destroy(ns);
    ns_leases_destroy(ns);
    ns_events_destroy(&ns->events);
    ns_checksum_tables_destroy(&ns->tables);
    ns_admission_destroy(&ns->admission);
    ns_memory_destroy(ns);
    ns_lock(ns); /* a ring that is being closed looks whether it is still ours */
    ns_prefetch_destroy(ns);
    ns_unlock(ns);
    if (ns->index) {
        hifc_index_destroy(ns->index);
        ns->index = NULL;
    }
    for (uint32_t i = 0; ns->segments && i < ns->segment_count; i++) {
        free(ns->segments[i].entries);
    }
    free(ns->segments);
    ns_segment_set_destroy(&ns->free_set);
    ns_segment_set_destroy(&ns->roomless_set);
    ns->segments = NULL;
    if (ns->pools) {
        hifc_pools_end(ns->pools);
    }
}

static void destroy(struct hifc_ns *ns)
{
    release_device(ns);
    release_tables(ns);
    ns_tickets_destroy(ns);
    if (ns->pools) {
        hifc_pools_destroy(ns->pools);
    }
    free(ns->published);
    pthread_cond_destroy(&ns->changed);
    pthread_mutex_destroy(&ns->mutex);
    free(ns);
}

static struct hifc_ns *create(const char *uri, const struct hifc_open_opts *opts)
{
    struct hifc_ns *ns = calloc(1, sizeof *ns);
    if (!ns) {
        return NULL;
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&ns->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&ns->mutex, NULL);
    if (opts) {
        ns->opts = *opts;
    }
    ns->read_only = ns->opts.read_only;
    ns->reactor = ns->opts.drive == HIFC_REACTOR;
    ns->fork_generation = hifc_fork_generation();
    ns->close_timeout_us = DRAIN_AT_CLOSE_US;
    ns->opening = true;
    strncpy(ns->uri, uri, sizeof ns->uri - 1);
    return ns;
}

HIFC_API int hifc_open(const char *uri, const struct hifc_open_opts *opts, struct hifc_ns **out)
{
    if (!uri || !out || strlen(uri) >= sizeof((struct hifc_ns *)0)->uri) {
        return hifc_fail(-EINVAL, "open wants a device URI of less than 1024 bytes");
    }
    struct hifc_ns *ns = create(uri, opts);
    if (!ns) {
        return hifc_fail(-ENOMEM, "no memory for a namespace");
    }
    uint64_t highest = 0;
    int error = set_defaults(&ns->opts);
    error = error ? error
                  : hifc_device_open(uri, ns->read_only ? HIFC_DEVICE_READ_ONLY : 0, &ns->device);
    error = error ? error : open_engine(ns);
    error = error ? error : hifc_superblock_read(ns->io, &ns->sb, &highest);
    error = error ? error : open_tables(ns);
    error = error ? error : open_epoch(ns, highest);
    error = error ? error : ns_recover(ns);
    ns->opening = false;
    error = error ? error : ns_janitor_start(ns);
    error = error ? error : open_owner(ns);
    if (error) {
        struct hifc_error kept;
        error = hifc_sanitize_explain(ns->device, error);
        hifc_error_copy(&kept);
        ns_janitor_stop(ns);
        destroy(ns);
        hifc_error_adopt(&kept);
        return error;
    }
    *out = ns;
    return 0;
}

/* ---- close ---------------------------------------------------------------------------------- */

static void abort_reservations(struct hifc_ns *ns)
{
    ns_lock(ns);
    ns_reservations_expire(ns, UINT64_MAX);
    for (struct ns_open *open = ns->open_list; open; open = open->next) {
        ns_open_close(ns, open);
    }
    ns_unlock(ns);
}

/* complete: every segment has its summary. A full disk alone is not an error: what was flushed is
 * found again by a scan. */
static int seal_all(struct hifc_ns *ns, bool *complete)
{
    int flushed = ns_flush(ns), error = flushed;
    for (struct ns_open *open = ns->open_list, *next; open; open = next) {
        next = open->next;
        bool at_rest = open->reservations == 0 && open->inflight == 0 && !open->forming &&
                       !open->head;
        int sealed = at_rest ? ns_seal(ns, open, flushed)
                             : hifc_fail(-ETIMEDOUT, "%s: writes to segment %u have not ended; it "
                                                     "is scanned at the next open",
                                         ns->uri, open->segment);
        *complete = *complete && !sealed;
        if (!error && (flushed || sealed != -ENOSPC)) {
            error = sealed;
        }
    }
    return error;
}

/* Everything that was acknowledged is on stable media and sealed, if the device lets it. A disk
 * below that is full is not an error: nothing of that is lost. */
static int finish_writing(struct hifc_ns *ns)
{
    abort_reservations(ns);
    int error = ns_settle(ns, ns->close_timeout_us);
    bool complete = true;
    error = error ? error : seal_all(ns, &complete);
    error = error ? error : ns_flush(ns);
    if (!error && complete) {
        ns->sb.sequence++;
        ns->sb.clean = 1;
        error = hifc_superblock_write(ns->io, &ns->sb);
        error = error == -ENOSPC ? 0 : error;
    }
    return error;
}

static int answer_all(struct hifc_ns *ns)
{
    int error = ns_rings_stop(ns, ns->close_timeout_us);
    int drained = ns_drain(ns, ns->close_timeout_us);
    return error ? error : drained;
}

/* Waits until no call is inside. Later ones are counted for a moment and refused. */
static bool wait_left(struct hifc_ns *ns)
{
    uint64_t deadline = hifc_deadline_ns(ns->close_timeout_us);
    while (atomic_load(&ns->visits) > 0) {
        if (hifc_now_ns() >= deadline) {
            return false;
        }
        usleep(LEAVE_NAP_US);
    }
    return true;
}

/* Ends all activity, seals and releases the device; what shutdown and detach have in common. It runs to
 * its end once: afterwards ns->ended is set and the result of that run is given again. -EBUSY, and
 * ns->ended is not set: a call would not end, nothing was sealed or released, and it may be called
 * again. */
static int shut_down(struct hifc_ns *ns)
{
    if (ns->ended) {
        hifc_error_adopt(&ns->end);
        return ns->end.code;
    }
    atomic_store(&ns->closed, true);
    (void)answer_all(ns); /* what waits for an answer may be inside */
    ns_janitor_stop(ns);
    if (!wait_left(ns)) {
        return hifc_fail(-EBUSY, "calls on %s have not returned: end them and close it again",
                         ns->uri);
    }
    /* Whoever was inside may have submitted after the first time. */
    int error = answer_all(ns);
    if (!ns->read_only) {
        int finished = finish_writing(ns);
        error = error ? error : finished;
    }
    if (error) {
        hifc_error_copy(&ns->end);
        ns->end.code = error == -EBUSY ? -EIO : error; /* -EBUSY means that it has not ended */
    }
    release_device(ns);
    release_tables(ns);
    ns->ended = true;
    hifc_error_adopt(&ns->end);
    return ns->end.code;
}

/* The handle stays and answers -ESHUTDOWN from then on. */
static int owner_detach(void *context)
{
    return shut_down(context);
}

HIFC_API int hifc_shutdown(struct hifc_ns *ns)
{
    if (!ns) {
        return hifc_fail(-EINVAL, "no namespace to shut down");
    }
    if (hifc_forked_since(ns->fork_generation)) {
        return hifc_fail(-ECHILD, "this namespace belongs to the parent process, which closes it");
    }
    /* Its thread may be in a detach: from here on only this thread shuts down. */
    hifc_owner_stop(ns->owner);
    ns->owner = NULL;
    return shut_down(ns);
}

HIFC_API int hifc_close(struct hifc_ns *ns)
{
    int error = ns ? hifc_shutdown(ns) : 0;
    if (!ns || hifc_forked_since(ns->fork_generation) || !ns->ended) {
        return error;
    }
    struct hifc_error kept = ns->end;
    destroy(ns);
    if (error) {
        hifc_error_adopt(&kept);
    }
    return error;
}

HIFC_API int hifc_drop(struct hifc_ns **ns)
{
    if (!*ns || hifc_forked_since((*ns)->fork_generation)) {
        return 0;
    }
    int error = hifc_close(*ns);
    if (error == -EBUSY) {
        return error;
    }
    *ns = NULL;
    return 0;
}
