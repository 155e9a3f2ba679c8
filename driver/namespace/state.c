/* SPDX-License-Identifier: Apache-2.0
 *
 * state.c - what a caller asks of an open namespace beside its values: memory, health, statistics;
 * and what the library says of itself.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "namespace/prefetch.h"
#include "util/clock.h"

/* ---- memory --------------------------------------------------------------------------------- */

HIFC_API void *hifc_pool_base(struct hifc_ns *ns, uint32_t pool, uint64_t *size_bytes)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    if (ns_enter(ns, &visit) != 0) {
        return NULL;
    }
    uint64_t used, peak;
    if (size_bytes && pool == 0) {
        hifc_pools_usage(ns->pools, &used, &peak, size_bytes);
    }
    return hifc_pools_resolve(ns->pools, pool, 0, 0);
}

HIFC_API int hifc_buffer_alloc(struct hifc_ns *ns, uint64_t size_bytes, uint64_t *offset)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    return error ? error : hifc_pools_lend(ns->pools, size_bytes, offset);
}

HIFC_API uint64_t hifc_pool_lent(struct hifc_ns *ns)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    return ns_enter(ns, &visit) == 0 ? hifc_pools_lent_bytes(ns->pools) : 0;
}

/* Also once the namespace was shut down: its pool is there as long as a buffer is lent. */
HIFC_API int hifc_buffer_free(struct hifc_ns *ns, uint64_t offset)
{
    if (!ns || hifc_forked_since(ns->fork_generation)) {
        return hifc_fail(ns ? -ECHILD : -EINVAL, "no namespace, or one of the parent process");
    }
    return hifc_pools_take_back(ns->pools, offset);
}

HIFC_API void hifc_buffer_drop(struct hifc_ns *ns, uint64_t *offset)
{
    if (*offset != HIFC_NO_BUFFER && hifc_buffer_free(ns, *offset) == 0) {
        *offset = HIFC_NO_BUFFER;
    }
}

HIFC_API int hifc_pool_register(struct hifc_ns *ns, void *base, uint64_t size_bytes, uint32_t *pool)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    return error ? error : hifc_pools_register(ns->pools, base, size_bytes, pool);
}

/* Until no request names a retired pool any more; others go on. */
static int wait_unused(struct hifc_ns *ns, uint32_t pool)
{
    uint64_t deadline = hifc_deadline_ns(2000ll * ns->opts.command_timeout_ms);
    ns_lock(ns);
    bool ring = ns_rings_use_pool(ns, pool);
    if (!ring && atomic_load(&ns->pool_requests[pool]) > 0) {
        ns_close_forming(ns, true);
        ns_unlock_and_issue(ns);
        ns_lock(ns);
    }
    uint32_t left;
    /* Not asked again after the loop: who submits is counted for a moment before it is refused. */
    while ((left = atomic_load(&ns->pool_requests[pool])) > 0 && !ring && hifc_now_ns() < deadline) {
        ns_wait_changed(ns);
    }
    ns_unlock(ns);
    return ring ? hifc_fail(-EBUSY, "a request ring reads into pool %u: close the ring first", pool)
           : left ? hifc_fail(-ETIMEDOUT, "%u requests on %s still use pool %u: unregister it again "
                                          "once they are done", left, ns->uri, pool)
                  : 0;
}

HIFC_API int hifc_pool_unregister(struct hifc_ns *ns, uint32_t pool)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    error = hifc_pools_retire(ns->pools, pool, true);
    error = error ? error : wait_unused(ns, pool);
    if (error) {
        (void)hifc_pools_retire(ns->pools, pool, false);
        return error;
    }
    return hifc_pools_unregister(ns->pools, pool);
}

/* ---- state ----------------------------------------------------------------------------------- */

HIFC_API int hifc_health(struct hifc_ns *ns, uint8_t log[512])
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    return error ? error : hifc_device_health(ns->device, log);
}

static void space(struct hifc_ns *ns, struct hifc_stats *out)
{
    out->capacity_bytes = (uint64_t)ns->segment_count * ns->segment_size;
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        const struct ns_segment *s = &ns->segments[i];
        out->live_bytes += s->live_bytes;
        out->metadata_bytes += s->metadata_bytes;
        out->segments_damaged += s->state == NS_DAMAGED;
        if (s->state == NS_FREE) {
            out->free_bytes += ns->segment_size;
        } else if (s->state == NS_OPEN) {
            out->free_bytes += ns->segment_size - s->used_bytes;
        }
    }
    out->dead_bytes =
        out->capacity_bytes - out->live_bytes - out->metadata_bytes - out->free_bytes;
}

HIFC_API int hifc_stats(struct hifc_ns *ns, struct hifc_stats *out)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    struct hifc_engine_stats io;
    hifc_engine_stats_get(ns->engine, &io);
    ns_lock(ns);
    *out = ns->stats;
    memcpy(out->uuid, ns->sb.uuid, sizeof out->uuid);
    memcpy(out->label, ns->sb.label, sizeof out->label);
    space(ns, out);
    out->segment_size_bytes = ns->segment_size;
    out->segments = ns->segment_count;
    out->segments_free = ns->free_set.count + ns->roomless_set.count;
    out->direct = ns->device->geometry.direct;
    out->open_epoch = ns->sb.open_epoch;
    out->entries = hifc_index_count(ns->index);
    out->entries_swap = ns->entries_swap;
    out->index_bytes = hifc_index_bytes(ns->index);
    out->requests_inflight = ns->requests_inflight;
    out->reservations = ns->reservation_count;
    out->leases = ns->leases.count;
    out->prefetch_overflowed += ns_rings_overflowed(ns);
    uint64_t internal_bytes = ns_pages_used_bytes(&ns->pages);
    if (ns->opts.admission == HIFC_ADMIT_BUDGET) {
        out->write_budget_bytes = ns->opts.write_budget_bytes_per_day;
        out->write_budget_left_bytes = ns_admission_left_bytes(&ns->admission);
    }
    ns_unlock(ns);
    out->device_read_bytes = io.read_bytes;
    out->device_write_bytes = io.write_bytes;
    out->device_read_commands = io.read_commands;
    out->device_write_commands = io.write_commands;
    out->poll_count = io.poll_count;
    out->poll_empty_count = io.poll_empty_count;
    hifc_pools_usage(ns->pools, &out->buffer_used_bytes, &out->buffer_peak_bytes,
                     &out->buffer_size_bytes);
    out->buffer_used_bytes += internal_bytes;
    out->buffer_peak_bytes += internal_bytes;
    return 0;
}

HIFC_API int hifc_publish(struct hifc_ns *ns, const char *json)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    size_t length = error || !json ? 0 : strlen(json);
    if (error) {
        return error;
    }
    if (json && (length < 2 || length > HIFC_PUBLISH_MAX_BYTES || json[0] != '{' ||
                 json[length - 1] != '}' || strchr(json, '\n'))) {
        return hifc_fail(-EINVAL, "publish wants one JSON object on one line, of at most %u bytes",
                         HIFC_PUBLISH_MAX_BYTES);
    }
    char *copy = json ? strdup(json) : NULL;
    if (json && !copy) {
        return hifc_fail(-ENOMEM, "no memory to publish %zu bytes", length);
    }
    ns_lock(ns);
    char *before = ns->published;
    ns->published = copy;
    ns_unlock(ns);
    free(before);
    return 0;
}

/* ---- the library ---------------------------------------------------------------------------- */

HIFC_API uint32_t hifc_abi_version(void)
{
    return HIFC_ABI_VERSION;
}

HIFC_API size_t hifc_sizeof(const char *name)
{
#define SIZE_OF(type) {#type, sizeof(struct hifc_##type)}
    static const struct {
        const char *name;
        size_t size;
    } sizes[] = {SIZE_OF(key),         SIZE_OF(req),   SIZE_OF(error),       SIZE_OF(format_opts),
                 SIZE_OF(open_opts),   SIZE_OF(entry), SIZE_OF(ticket_info), SIZE_OF(event),
                 SIZE_OF(stats),       SIZE_OF(check_result),
                 SIZE_OF(repair_result), SIZE_OF(sanitize_status), SIZE_OF(device_info),
                 SIZE_OF(descriptor),  SIZE_OF(ring_header), SIZE_OF(ring_opts),
                 SIZE_OF(trace),       SIZE_OF(replay)};
#undef SIZE_OF
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (strncmp(name, "hifc_", 5) == 0 ? strcmp(name + 5, sizes[i].name) == 0
                                           : strcmp(name, sizes[i].name) == 0) {
            return sizes[i].size;
        }
    }
    return 0;
}
