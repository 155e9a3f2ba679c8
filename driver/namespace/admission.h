/* SPDX-License-Identifier: Apache-2.0
 *
 * admission.h - whether a reuse put is worth the wear of writing it (admission.c). The owner's mutex
 * guards it.
 */
#ifndef HIFC_NS_ADMISSION_H
#define HIFC_NS_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

#include "hifc.h"

struct second_use;

struct ns_admission {
    uint32_t rule;            /* enum hifc_admission */
    struct second_use *ghost; /* keys that were offered once */
    uint64_t bytes_per_day;   /* the write budget */
    int64_t budget_bytes;     /* of it, what may be written now */
    uint64_t earned_ns;       /* when budget_bytes was last added to */
};

/* key_count: how many keys the second-use rule is to remember. 0 or -ENOMEM. */
int ns_admission_create(struct ns_admission *admission, uint32_t rule, uint64_t bytes_per_day,
                        uint64_t key_count);
void ns_admission_destroy(struct ns_admission *admission);
bool ns_admit(struct ns_admission *admission, const struct hifc_key *key, uint64_t bytes);
/* What was admitted was not taken after all (Retry, No space): its bytes are not spent. */
void ns_admit_undo(struct ns_admission *admission, uint8_t cls, uint64_t bytes);
/* Bytes that the write budget has left now. */
uint64_t ns_admission_left_bytes(struct ns_admission *admission);

#endif
