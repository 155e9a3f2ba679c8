/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c - what is answered from memory alone: look-ups, comparisons, touch, list, events.
 */

#include "namespace/ns.h"
#include "util/crc32c.h"

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
        answers[i] = ns_slot_answer(slot);
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
    int answer = ns_slot_answer(slot);
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
    while (found < count && ns_slot_answer(hifc_index_find(ns->index, &keys[found])) == HIFC_OK) {
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
        if (ns_slot_answer(slot) != HIFC_OK) {
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

HIFC_API int hifc_events(struct hifc_ns *ns, struct hifc_event *out, uint32_t count,
                         uint64_t *dropped)
{
    struct hifc_ns *visit NS_VISIT = NULL;
    int error = ns_enter(ns, &visit);
    if (error) {
        return error;
    }
    ns_lock(ns);
    uint32_t taken = ns_events_take(&ns->events, out, count, dropped);
    ns_unlock(ns);
    return (int)taken;
}
