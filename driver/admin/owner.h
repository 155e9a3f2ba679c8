/* SPDX-License-Identifier: Apache-2.0
 *
 * owner.h - the Unix socket on which the process that owns a device answers questions (owner.c).
 */
#ifndef HIFC_OWNER_H
#define HIFC_OWNER_H

#include "hifc.h"

struct hifc_owner;

/* What the owner can be asked. Called on the owner's thread, one at a time, never after
 * hifc_owner_stop has returned. 0 or a negative errno with the thread's last error set; NULL where
 * it cannot be asked. */
struct hifc_owner_ops {
    int (*stats)(void *context, struct hifc_stats *out);
    int (*health)(void *context, uint8_t log[512]);
    int (*detach)(void *context);
    /* The JSON object that goes with the statistics, or "". NULL: there is none. */
    void (*published)(void *context, char *json, size_t size);
};

/* Listens in folder (NULL: the one of run_folder.h), which is made if it is missing. */
int hifc_owner_start(const char *folder, const char *uri, const struct hifc_owner_ops *ops,
                     void *context, struct hifc_owner **out);
/* The path of the socket. */
const char *hifc_owner_path(const struct hifc_owner *owner);
/* Not from within an operation. NULL is fine. */
void hifc_owner_stop(struct hifc_owner *owner);

#endif
