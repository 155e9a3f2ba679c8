/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_admin.h - one NVMe command that is waited for with a bound (spdk_admin.c). Any thread.
 */
#ifndef HIFC_DEVICE_SPDK_ADMIN_H
#define HIFC_DEVICE_SPDK_ADMIN_H

#include "device/spdk.h"

#define HIFC_SPDK_ADMIN_TIMEOUT_MS 5000

/* Who gives up leaves it to the completion, which comes at the latest when the controller goes. */
struct hifc_spdk_command {
    _Atomic int state;
    uint8_t sct, sc;
    void *data; /* the controller writes here */
};

/* With data_bytes of memory for the controller; NULL when there is none. */
struct hifc_spdk_command *hifc_spdk_command_new(uint32_t data_bytes);
void hifc_spdk_command_free(struct hifc_spdk_command *command);
/* The callback to send it with, and the command as its argument. */
void hifc_spdk_command_done(void *argument, const struct spdk_nvme_cpl *completion);
/* 0 when an answer came, be it an error of the command; the command is then the caller's. io_queue:
 * where it was sent, NULL for the admin queue. */
int hifc_spdk_command_wait(struct spdk_nvme_ctrlr *ctrlr, struct spdk_nvme_qpair *io_queue,
                           struct hifc_spdk_command *command, uint32_t timeout_ms);

#endif
