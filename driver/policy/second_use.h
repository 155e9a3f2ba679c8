/* SPDX-License-Identifier: Apache-2.0
 *
 * second_use.h - remembers which keys were offered lately, so that only those offered again are
 * written: a table of key fingerprints, one a slot. For the namespace and the replay of traces.
 */
#ifndef HIFC_NAMESPACE_SECOND_USE_H
#define HIFC_NAMESPACE_SECOND_USE_H

#include <stdbool.h>
#include <stdint.h>

#include "hifc.h"

struct second_use;

/* For about so many keys, within bounds. NULL: no memory, and the error is set. */
struct second_use *second_use_create(uint64_t keys);
void second_use_destroy(struct second_use *table);
/* Whether the key is remembered; from now on it is. */
bool second_use_offer(struct second_use *table, const struct hifc_key *key);

#endif
