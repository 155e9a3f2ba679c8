/* SPDX-License-Identifier: Apache-2.0
 *
 * segment_set.h - a set of segments, a bit each. The owner's mutex guards it.
 */
#ifndef HIFC_NS_SEGMENT_SET_H
#define HIFC_NS_SEGMENT_SET_H

#include <stdbool.h>
#include <stdint.h>

struct ns_segment_set {
    uint64_t *map;
    uint32_t from; /* no word of map before this one has a bit */
    uint32_t count;
};

/* For segments 0 to segment_count - 1, empty. False: no memory. */
bool ns_segment_set_create(struct ns_segment_set *set, uint32_t segment_count);
void ns_segment_set_destroy(struct ns_segment_set *set);
/* It is not in the set. */
void ns_segment_set_add(struct ns_segment_set *set, uint32_t segment);
/* It is in the set. */
void ns_segment_set_remove(struct ns_segment_set *set, uint32_t segment);
bool ns_segment_set_has(const struct ns_segment_set *set, uint32_t segment);
/* The lowest one, which stays. The set is not empty. */
uint32_t ns_segment_set_lowest(struct ns_segment_set *set);

#endif
