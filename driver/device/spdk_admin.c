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
#include "device/spdk_admin.h"
#include "util/clock.h"
#include "util/error.h"

#define ADMIN_NAP_NS 20000

enum { WAITING, DONE, GIVEN_UP };

void hifc_spdk_command_free(struct hifc_spdk_command *command)
{
    spdk_dma_free(command->data);
    free(command);
}

void hifc_spdk_command_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct hifc_spdk_command *command = argument;
    command->sct = completion->status.sct;
    command->sc = completion->status.sc;
    if (atomic_exchange(&command->state, DONE) == GIVEN_UP) {
        hifc_spdk_command_free(command);
    }
}

struct hifc_spdk_command *hifc_spdk_command_new(uint32_t data_bytes)
{
    struct hifc_spdk_command *command = calloc(1, sizeof(*command));
    if (command && data_bytes) {
        command->data = spdk_dma_zmalloc(data_bytes, 4096, NULL);
        if (!command->data) {
            free(command);
            command = NULL;
        }
    }
    return command;
}

int hifc_spdk_command_wait(struct spdk_nvme_ctrlr *ctrlr, struct spdk_nvme_qpair *io_queue,
                            struct hifc_spdk_command *command, uint32_t timeout_ms)
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
        hifc_spdk_command_free(command);
        return -ENODEV;
    }
    return 0;
}

int hifc_spdk_ping(struct hifc_spdk_device *device)
{
    struct hifc_spdk_command *command = hifc_spdk_command_new(0);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: out of memory", device->target.where);
    }
    int rc = spdk_nvme_ctrlr_cmd_get_feature(device->ctrlr, SPDK_NVME_FEAT_NUMBER_OF_QUEUES, 0,
                                             NULL, 0, hifc_spdk_command_done, command);
    if (rc) {
        hifc_spdk_command_free(command);
        rc = -ENODEV;
    } else {
        rc = hifc_spdk_command_wait(device->ctrlr, NULL, command, HIFC_SPDK_ADMIN_TIMEOUT_MS);
        if (!rc) {
            hifc_spdk_command_free(command);
        }
    }
    if (rc && !spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        spdk_nvme_ctrlr_fail(device->ctrlr);
    }
    return rc == 0 ? 0
           : rc == -ETIMEDOUT
               ? hifc_fail(rc, "%s: the controller did not answer within %d ms; check that the "
                           "target runs and is not stopped", device->target.where, HIFC_SPDK_ADMIN_TIMEOUT_MS)
               : hifc_fail(rc, "%s: the connection to the controller broke; check that the target "
                           "runs, then open it again", device->target.where);
}
