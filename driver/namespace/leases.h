/* SPDX-License-Identifier: Apache-2.0
 *
 * leases.h - promises that segments are not emptied for a while (leases.c). The owner's mutex guards
 * them.
 */
#ifndef HIFC_NS_LEASES_H
#define HIFC_NS_LEASES_H

#include <stdint.h>

struct ns_lease {
    uint64_t id; /* 0: unused */
    uint64_t deadline_ns;
    uint32_t *segments;
    uint32_t count;
};

struct ns_leases {
    struct ns_lease *slots;
    uint32_t size, count;
    uint64_t last_id;
};

struct hifc_ns;

int ns_leases_create(struct hifc_ns *ns);
void ns_leases_destroy(struct hifc_ns *ns);
/* Ends those whose time is over. Mutex held. */
void ns_leases_expire(struct hifc_ns *ns, uint64_t now_ns);

#endif
