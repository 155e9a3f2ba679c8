/* SPDX-License-Identifier: Apache-2.0
 *
 * events.c - the last keys that were stored, evicted or quarantined: see events.h.
 */
#include "namespace/events.h"

#include <stdlib.h>

bool ns_events_create(struct ns_events *events, uint32_t size)
{
    *events = (struct ns_events){.ring = calloc(size, sizeof *events->ring), .size = size};
    return events->ring != NULL;
}

void ns_events_destroy(struct ns_events *events)
{
    free(events->ring);
    *events = (struct ns_events){0};
}

void ns_events_add(struct ns_events *events, const struct hifc_key *key, uint32_t kind,
                   uint32_t length)
{
    if (events->head - events->tail == events->size) {
        events->tail++;
        events->dropped++;
    }
    events->ring[events->head++ % events->size] =
        (struct hifc_event){.key = *key, .kind = kind, .length = length};
}

uint32_t ns_events_take(struct ns_events *events, struct hifc_event *out, uint32_t count,
                        uint64_t *dropped)
{
    uint32_t taken = 0;
    while (taken < count && events->tail < events->head) {
        out[taken++] = events->ring[events->tail++ % events->size];
    }
    if (dropped) {
        *dropped = events->dropped;
        events->dropped = 0;
    }
    return taken;
}
