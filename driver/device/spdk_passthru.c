/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_passthru.c - single NVMe commands for the tool: the health log, and any command as it is given.
 * Any thread; blocks with a bound.
 */
#define _GNU_SOURCE
#include <string.h>

#include "device/spdk.h"
#include "device/spdk_admin.h"
#include "util/error.h"

#define HEALTH_LOG_BYTES 512u
#define PASSTHRU_ENTRIES 16u /* of the queue pair of one command */

int hifc_spdk_health(struct hifc_device *base, uint8_t log[512])
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    const char *where = device->target.where;
    if (hifc_forked_since(base->fork_generation)) {
        return hifc_fail(-EPERM, "%s: it belongs to the parent of this process", where);
    }
    struct hifc_spdk_command *command = hifc_spdk_command_new(HEALTH_LOG_BYTES);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: no huge page for its health log", where);
    }
    int rc = spdk_nvme_ctrlr_cmd_get_log_page(device->ctrlr, SPDK_NVME_LOG_HEALTH_INFORMATION,
                                              SPDK_NVME_GLOBAL_NS_TAG, command->data,
                                              HEALTH_LOG_BYTES, 0, hifc_spdk_command_done, command);
    if (rc) {
        hifc_spdk_command_free(command);
        return hifc_fail(-ENODEV, "%s: the controller is gone; check the target, then open it "
                         "again", where);
    }
    rc = hifc_spdk_command_wait(device->ctrlr, NULL, command, HIFC_SPDK_ADMIN_TIMEOUT_MS);
    if (rc) {
        return hifc_fail(rc, "%s: the controller did not give its health log within %d ms; check "
                         "that the target runs", where, HIFC_SPDK_ADMIN_TIMEOUT_MS);
    }
    if (command->sct || command->sc) {
        rc = hifc_fail(-EIO, "%s: health log: %s (status code type %#x, status code %#x)", where,
                       hifc_nvme_status_text(command->sct, command->sc), command->sct, command->sc);
    } else {
        memcpy(log, command->data, HEALTH_LOG_BYTES);
    }
    hifc_spdk_command_free(command);
    return rc;
}

/* Sends it and waits; an error of the command is in *command, which is then the caller's. */
static int send_passthru(struct hifc_spdk_device *device, const struct hifc_nvme_passthru *ours,
                         struct spdk_nvme_qpair *io_queue, struct hifc_spdk_command *command)
{
    const char *where = device->target.where;
    uint32_t timeout_ms = ours->timeout_ms ? ours->timeout_ms : HIFC_SPDK_ADMIN_TIMEOUT_MS;
    struct spdk_nvme_cmd raw = {.opc = ours->opcode, .nsid = ours->nsid, .cdw10 = ours->cdw10,
                                .cdw11 = ours->cdw11};
    int rc = io_queue ? spdk_nvme_ctrlr_cmd_io_raw(device->ctrlr, io_queue, &raw, command->data,
                                                   ours->data_bytes, hifc_spdk_command_done, command)
                      : spdk_nvme_ctrlr_cmd_admin_raw(device->ctrlr, &raw, command->data,
                                                      ours->data_bytes, hifc_spdk_command_done, command);
    if (rc) {
        hifc_spdk_command_free(command);
        return hifc_fail(-ENODEV, "%s: the controller is gone; check the drive or target, then "
                         "open it again", where);
    }
    rc = hifc_spdk_command_wait(device->ctrlr, io_queue, command, timeout_ms);
    return rc == 0 ? 0
                   : hifc_fail(rc, "%s: no answer to NVMe command %#x within %u ms", where,
                               ours->opcode, timeout_ms);
}

int hifc_spdk_passthru(struct hifc_device *base, struct hifc_nvme_passthru *ours)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    const char *where = device->target.where;
    struct spdk_nvme_qpair *io_queue = NULL;
    uint32_t entries;
    if (hifc_forked_since(base->fork_generation)) {
        return hifc_fail(-EPERM, "%s: it belongs to the parent of this process", where);
    }
    int rc = ours->io_queue ? hifc_spdk_qpair_alloc(device, PASSTHRU_ENTRIES, &io_queue, &entries)
                            : 0;
    struct hifc_spdk_command *command = rc ? NULL : hifc_spdk_command_new(ours->data_bytes);
    if (!rc && !command) {
        rc = hifc_fail(-ENOMEM, "%s: no huge page for an NVMe command", where);
    }
    rc = rc ? rc : send_passthru(device, ours, io_queue, command);
    if (!rc) {
        ours->sct = command->sct;
        ours->sc = command->sc;
        if (ours->sct || ours->sc) {
            rc = hifc_fail(-EIO, "%s: NVMe command %#x: %s (status code type %#x, status code %#x)",
                           where, ours->opcode, hifc_nvme_status_text(ours->sct, ours->sc),
                           ours->sct, ours->sc);
        } else if (ours->data_bytes) {
            memcpy(ours->data, command->data, ours->data_bytes);
        }
        hifc_spdk_command_free(command);
    }
    if (io_queue) {
        hifc_spdk_qpair_free(device, io_queue); /* one that was given up completes here */
    }
    return rc;
}
