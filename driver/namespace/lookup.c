/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c - what is answered from memory alone: look-ups, leases, touch, list, events, and the
 * bounded cache of checksum tables.
 */
#include <stdlib.h>
#include <string.h>

#include "namespace/ns.h"
#include "util/clock.h"
#include "util/crc32c.h"
#include "util/invariant.h"

#define LEASE_TTL_DEFAULT_MS 60000u

int ns_lookup_create(struct hifc_ns *ns)
{
    ns->leases = calloc(ns->opts.leases_max, sizeof *ns->leases);
    ns->events = calloc(ns->opts.events_max, sizeof *ns->events);
    ns->tables = calloc(NS_TABLES_MAX, sizeof *ns->tables);
    if (!ns->leases || !ns->events || !ns->tables) {
        return hifc_fail(-ENOMEM, "no memory for %u leases and %u events", ns->opts.leases_max,
                         ns->opts.events_max);
    }
    return 0;
}

void ns_lookup_destroy(struct hifc_ns *ns)
{
    for (uint32_t i = 0; ns->leases && i < ns->opts.leases_max; i++) {
        free(ns->leases[i].segments);
    }
    for (uint32_t i = 0; ns->tables && i < NS_TABLES_MAX; i++) {
        free(ns->tables[i].crcs);
    }
    free(ns->leases);
    free(ns->events);
    free(ns->tables);
    ns->leases = NULL;
    ns->events = NULL;
    ns->tables = NULL;
}

/* ---- look-ups ------------------------------------------------------------------------------- */

static int slot_answer(const struct hifc_slot *slot)
{
    if (!slot || slot->flags & HIFC_SLOT_QUARANTINED) {
        return HIFC_MISS;
    }
    return slot->flags & HIFC_SLOT_PENDING ? HIFC_PENDING : HIFC_OK;
}

HIFC_API int hifc_lookup(struct hifc_ns *ns, const struct hifc_key *keys, uint32_t count,
                         int32_t *answers, uint32_t *lengths)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    ns_lock(ns);
    for (uint32_t i = 0; i < count; i++) {
        hifc_index_prefetch(ns->index, &keys[i]);
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct hifc_slot *slot = hifc_index_find(ns->index, &keys[i]);
        answers[i] = slot_answer(slot);
        if (lengths) {
            lengths[i] = answers[i] == HIFC_OK ? slot->length : 0;
        }
    }
    ns_unlock(ns);
    return 0;
}

/* Computed beside the mutex: a value may be long. */
HIFC_API int hifc_compare(struct hifc_ns *ns, const struct hifc_key *key, const void *data,
                          uint64_t size_bytes)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    struct hifc_slot value = {.length = 0};
    uint32_t parts = 1;
    ns_lock(ns);
    const struct hifc_slot *slot = hifc_index_find(ns->index, key);
    int answer = slot_answer(slot);
    if (answer == HIFC_OK) {
        value = *slot;
        parts = ns_slot_parts(ns, slot);
    }
    ns_unlock(ns);
    if (answer != HIFC_OK || value.length != size_bytes) {
        return answer == HIFC_OK ? HIFC_MISS : answer;
    }
    const uint32_t part_bytes = value.length / parts;
    uint32_t raw = hifc_crc32c_update(0, data, part_bytes);
    uint32_t of_parts = hifc_crc32c_update(0, &raw, sizeof raw);
    for (uint32_t i = 1; i < parts; i++) {
        raw = hifc_crc32c_update(0, (const uint8_t *)data + (size_t)i * part_bytes, part_bytes);
        of_parts = hifc_crc32c_update(of_parts, &raw, sizeof raw);
    }
    uint32_t found = hifc_bind_checksum(parts > 1 ? of_parts : raw, key, value.length, parts);
    return found == value.checksum ? HIFC_OK : HIFC_MISS;
}

HIFC_API int64_t hifc_longest_prefix(struct hifc_ns *ns, const struct hifc_key *keys,
                                     uint32_t count)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    ns_lock(ns);
    uint32_t found = 0;
    while (found < count && slot_answer(hifc_index_find(ns->index, &keys[found])) == HIFC_OK) {
        found++;
    }
    ns_unlock(ns);
    return found;
}

HIFC_API int hifc_touch(struct hifc_ns *ns, const struct hifc_key *keys, uint32_t count)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    ns_lock(ns);
    for (uint32_t i = 0; i < count; i++) {
        struct hifc_slot *slot = hifc_index_find(ns->index, &keys[i]);
        if (slot && slot->heat < UINT8_MAX) {
            slot->heat++;
        }
    }
    ns_unlock(ns);
    return 0;
}

HIFC_API int hifc_list(struct hifc_ns *ns, uint64_t *cursor, struct hifc_entry *out, uint32_t count)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    uint32_t taken = 0;
    ns_lock(ns);
    while (taken < count) {
        const struct hifc_slot *slot = hifc_index_next(ns->index, cursor);
        if (!slot) {
            break;
        }
        if (slot_answer(slot) != HIFC_OK) {
            continue;
        }
        out[taken++] = (struct hifc_entry){
            .key = slot->key,
            .length = slot->length,
            .part_count = ns_slot_parts(ns, slot),
            .cls = slot->flags & HIFC_SLOT_SWAP ? HIFC_SWAP : HIFC_REUSE,
            .heat = slot->heat,
        };
    }
    ns_unlock(ns);
    return (int)taken;
}

/* ---- leases --------------------------------------------------------------------------------- */

static struct ns_lease *lease_unused(struct hifc_ns *ns)
{
    if (ns->lease_count == ns->opts.leases_max) {
        return NULL;
    }
    uint64_t start = ns->lease_next % ns->opts.leases_max;
    for (uint32_t i = 0; i < ns->opts.leases_max; i++) {
        struct ns_lease *lease = &ns->leases[(start + i) % ns->opts.leases_max];
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
    hifc_count_down(ns->lease_count, 1u);
    ns->reclaim_exhausted = false;
}

void ns_leases_expire(struct hifc_ns *ns, uint64_t now_ns)
{
    for (uint32_t i = 0; ns->lease_count > 0 && i < ns->opts.leases_max; i++) {
        if (ns->leases[i].id != 0 && now_ns >= ns->leases[i].deadline_ns) {
            lease_end(ns, &ns->leases[i]);
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
                         ns->opts.leases_max);
    }
    uint32_t held = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct hifc_slot *slot = hifc_index_find(ns->index, &keys[i]);
        int answer = slot_answer(slot);
        if (answers) {
            answers[i] = answer;
        }
        if (answer == HIFC_OK) {
            ns->segments[slot->segment].leases++;
            segments[held++] = slot->segment;
        }
    }
    lease->id = ++ns->lease_next;
    lease->deadline_ns = hifc_now_ns() + (ttl_ms ? ttl_ms : LEASE_TTL_DEFAULT_MS) * 1000000ull;
    lease->segments = segments;
    lease->count = held;
    ns->lease_count++;
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
    for (uint32_t i = 0; id != 0 && i < ns->opts.leases_max; i++) {
        if (ns->leases[i].id == id) {
            lease_end(ns, &ns->leases[i]);
            error = 0;
            break;
        }
    }
    ns_unlock(ns);
    return error ? hifc_fail(error, "lease %llu expired or was released before",
                             (unsigned long long)id)
                 : 0;
}

/* ---- events --------------------------------------------------------------------------------- */

void ns_event(struct hifc_ns *ns, const struct hifc_key *key, uint32_t kind, uint32_t length)
{
    if (ns->event_head - ns->event_tail == ns->opts.events_max) {
        ns->event_tail++;
        ns->event_dropped++;
    }
    ns->events[ns->event_head++ % ns->opts.events_max] =
        (struct hifc_event){.key = *key, .kind = kind, .length = length};
}

HIFC_API int hifc_events(struct hifc_ns *ns, struct hifc_event *out, uint32_t count,
                         uint64_t *dropped)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    uint32_t taken = 0;
    ns_lock(ns);
    while (taken < count && ns->event_tail < ns->event_head) {
        out[taken++] = ns->events[ns->event_tail++ % ns->opts.events_max];
    }
    if (dropped) {
        *dropped = ns->event_dropped;
        ns->event_dropped = 0;
    }
    ns_unlock(ns);
    return (int)taken;
}

/* ---- checksum tables ------------------------------------------------------------------------ */

static struct ns_table *table_slot(struct hifc_ns *ns, uint32_t segment, uint32_t offset)
{
    uint64_t hash = ((uint64_t)segment << 32 | offset) * 0x9e3779b97f4a7c15ull;
    return &ns->tables[hash >> 40 & (NS_TABLES_MAX - 1)];
}

const uint32_t *ns_table_find(struct hifc_ns *ns, uint32_t segment, uint32_t offset,
                              uint32_t part_count)
{
    const struct ns_table *table = table_slot(ns, segment, offset);
    bool same = table->crcs && table->segment == segment && table->offset == offset &&
                table->part_count == part_count &&
                table->generation == ns->segments[segment].generation;
    return same ? table->crcs : NULL;
}

void ns_table_keep(struct hifc_ns *ns, uint32_t segment, uint32_t offset, uint32_t part_count,
                   const uint32_t *crcs)
{
    if (part_count > NS_TABLE_PARTS_CACHED_MAX || ns_table_find(ns, segment, offset, part_count)) {
        return;
    }
    uint32_t *copy = malloc(part_count * 4ull);
    if (!copy) {
        return; /* only a cache: the next range read fetches the table again */
    }
    memcpy(copy, crcs, part_count * 4ull);
    struct ns_table *table = table_slot(ns, segment, offset);
    free(table->crcs);
    *table = (struct ns_table){.generation = ns->segments[segment].generation,
                               .segment = segment,
                               .offset = offset,
                               .part_count = part_count,
                               .crcs = copy};
}
