/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_admin.c - admin commands with a bound, and the few of the NVM command set that are no I/O.
 *
 * SPDK's own synchronous ones wait for ever if the controller stops answering. These are sent by
 * the caller, who polls the admin queue beside the watching thread until the answer is there or
 * the time is up; SPDK locks the queue. Any thread.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/command.h"
#include "device/spdk.h"
#include "util/error.h"
#include "util/clock.h"

#define ADMIN_TIMEOUT_MS 5000
#define ADMIN_NAP_NS 20000
#define HEALTH_LOG_BYTES 512u
#define PASSTHRU_ENTRIES 16u /* of the queue pair of one command */

enum { WAITING, DONE, GIVEN_UP };

/* Who gives up leaves it to the completion, which comes at the latest when the controller goes. */
struct admin_command {
    _Atomic int state;
    uint8_t sct, sc;
    void *data; /* the controller writes here */
};

static void free_command(struct admin_command *command)
{
    spdk_dma_free(command->data);
    free(command);
}

static void command_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct admin_command *command = argument;
    command->sct = completion->status.sct;
    command->sc = completion->status.sc;
    if (atomic_exchange(&command->state, DONE) == GIVEN_UP) {
        free_command(command);
    }
}

static struct admin_command *new_command(uint32_t data_bytes)
{
    struct admin_command *command = calloc(1, sizeof(*command));
    if (command && data_bytes) {
        command->data = spdk_dma_zmalloc(data_bytes, 4096, NULL);
        if (!command->data) {
            free(command);
            command = NULL;
        }
    }
    return command;
}

/* 0 when an answer came, be it an error of the command; the command is then the caller's. io_queue:
 * where it was sent, NULL for the admin queue. */
static int wait_command_for(struct spdk_nvme_ctrlr *ctrlr, struct spdk_nvme_qpair *io_queue,
                            struct admin_command *command, uint32_t timeout_ms)
{
    int64_t end_ms = (int64_t)hifc_now_ms() + timeout_ms;
    int rc = 0;
    while (atomic_load(&command->state) == WAITING && rc >= 0 && (int64_t)hifc_now_ms() < end_ms) {
        rc = io_queue ? spdk_nvme_qpair_process_completions(io_queue, 0)
                      : spdk_nvme_ctrlr_process_admin_completions(ctrlr);
        if (rc == 0) {
            nanosleep(&(struct timespec){.tv_nsec = ADMIN_NAP_NS}, NULL);
        }
    }
    if (atomic_exchange(&command->state, GIVEN_UP) != DONE) {
        return rc < 0 ? -ENODEV : -ETIMEDOUT;
    }
    bool aborted = command->sct == HIFC_SCT_GENERIC && (command->sc == HIFC_SC_ABORTED ||
                                                        command->sc == HIFC_SC_ABORTED_SQ_DELETION);
    if (aborted) {
        free_command(command);
        return -ENODEV;
    }
    return 0;
}

static int wait_command(struct spdk_nvme_ctrlr *ctrlr, struct admin_command *command)
{
    return wait_command_for(ctrlr, NULL, command, ADMIN_TIMEOUT_MS);
}

int hifc_spdk_ping(struct hifc_spdk_device *device)
{
    struct admin_command *command = new_command(0);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: out of memory", device->target.where);
    }
    int rc = spdk_nvme_ctrlr_cmd_get_feature(device->ctrlr, SPDK_NVME_FEAT_NUMBER_OF_QUEUES, 0,
                                             NULL, 0, command_done, command);
    if (rc) {
        free_command(command);
        rc = -ENODEV;
    } else {
        rc = wait_command(device->ctrlr, command);
        if (!rc) {
            free_command(command);
        }
    }
    if (rc && !spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        spdk_nvme_ctrlr_fail(device->ctrlr);
    }
    return rc == 0 ? 0
           : rc == -ETIMEDOUT
               ? hifc_fail(rc, "%s: the controller did not answer within %d ms; check that the "
                           "target runs and is not stopped", device->target.where, ADMIN_TIMEOUT_MS)
               : hifc_fail(rc, "%s: the connection to the controller broke; check that the target "
                           "runs, then open it again", device->target.where);
}

int hifc_spdk_health(struct hifc_device *base, uint8_t log[512])
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    const char *where = device->target.where;
    if (hifc_forked_since(base->fork_generation)) {
        return hifc_fail(-EPERM, "%s: it belongs to the parent of this process", where);
    }
    struct admin_command *command = new_command(HEALTH_LOG_BYTES);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: no huge page for its health log", where);
    }
    int rc = spdk_nvme_ctrlr_cmd_get_log_page(device->ctrlr, SPDK_NVME_LOG_HEALTH_INFORMATION,
                                              SPDK_NVME_GLOBAL_NS_TAG, command->data,
                                              HEALTH_LOG_BYTES, 0, command_done, command);
    if (rc) {
        free_command(command);
        return hifc_fail(-ENODEV, "%s: the controller is gone; check the target, then open it "
                         "again", where);
    }
    rc = wait_command(device->ctrlr, command);
    if (rc) {
        return hifc_fail(rc, "%s: the controller did not give its health log within %d ms; check "
                         "that the target runs", where, ADMIN_TIMEOUT_MS);
    }
    if (command->sct || command->sc) {
        rc = hifc_fail(-EIO, "%s: health log: %s (status code type %#x, status code %#x)", where,
                       hifc_nvme_status_text(command->sct, command->sc), command->sct, command->sc);
    } else {
        memcpy(log, command->data, HEALTH_LOG_BYTES);
    }
    free_command(command);
    return rc;
}

/* Sends it and waits; an error of the command is in *command, which is then the caller's. */
static int send_passthru(struct hifc_spdk_device *device, const struct hifc_nvme_passthru *ours,
                         struct spdk_nvme_qpair *io_queue, struct admin_command *command)
{
    const char *where = device->target.where;
    uint32_t timeout_ms = ours->timeout_ms ? ours->timeout_ms : ADMIN_TIMEOUT_MS;
    struct spdk_nvme_cmd raw = {.opc = ours->opcode, .nsid = ours->nsid, .cdw10 = ours->cdw10,
                                .cdw11 = ours->cdw11};
    int rc = io_queue ? spdk_nvme_ctrlr_cmd_io_raw(device->ctrlr, io_queue, &raw, command->data,
                                                   ours->data_bytes, command_done, command)
                      : spdk_nvme_ctrlr_cmd_admin_raw(device->ctrlr, &raw, command->data,
                                                      ours->data_bytes, command_done, command);
    if (rc) {
        free_command(command);
        return hifc_fail(-ENODEV, "%s: the controller is gone; check the drive or target, then "
                         "open it again", where);
    }
    rc = wait_command_for(device->ctrlr, io_queue, command, timeout_ms);
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
    struct admin_command *command = rc ? NULL : new_command(ours->data_bytes);
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
        free_command(command);
    }
    if (io_queue) {
        hifc_spdk_qpair_free(device, io_queue); /* one that was given up completes here */
    }
    return rc;
}
