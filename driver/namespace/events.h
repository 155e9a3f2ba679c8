/* SPDX-License-Identifier: Apache-2.0
 *
 * events.h - the last keys that were stored, evicted or quarantined (events.c). The owner's mutex guards
 * them.
 */
#ifndef HIFC_NS_EVENTS_H
#define HIFC_NS_EVENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "hifc.h"

/* A ring: the oldest is lost, and counted, where nobody asks in time. */
struct ns_events {
    struct hifc_event *ring;
    uint32_t size;
    uint64_t head, tail, dropped;
};

/* False: no memory. */
bool ns_events_create(struct ns_events *events, uint32_t size);
void ns_events_destroy(struct ns_events *events);
void ns_events_add(struct ns_events *events, const struct hifc_key *key, uint32_t kind,
                   uint32_t length);
/* Takes up to count of the oldest; *dropped, if not NULL: how many were lost since it was asked. */
uint32_t ns_events_take(struct ns_events *events, struct hifc_event *out, uint32_t count,
                        uint64_t *dropped);

#endif
