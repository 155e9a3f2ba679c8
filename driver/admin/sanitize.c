/* SPDX-License-Identifier: Apache-2.0
 *
 * sanitize.c - NVMe Sanitize: starting it and waiting for it.
 *
 * It is the drive's, not a command's: the command ends at once, and the drive goes on through resets
 * and losses of power, failing every read and write until it has ended. So a killed process leaves a
 * drive that the next one finds busy, and may wait for. A failed one keeps the drive closed until
 * another succeeds; it is started so that nvme sanitize --sanact=exit-failure may open the drive
 * again with what was not erased (AUSE). Offsets are those of the NVM Express Base Specification.
 * Any thread; blocks.
 */
#define _GNU_SOURCE
#include <time.h>

#include "admin/drive.h"
#include "admin/sanitize.h"
#include "device/command.h"
#include "util/clock.h"
#include "util/error.h"

#define START_TIMEOUT_MS 60000u

/* ---- starting -------------------------------------------------------------------------------- */

static int start(struct hifc_device *device, const struct hifc_device_info *info, uint32_t *action)
{
    bool blocks = info->flags & HIFC_INFO_SANITIZE_BLOCK;
    if (!blocks && !(info->flags & HIFC_INFO_SANITIZE_CRYPTO)) {
        return hifc_fail(-ENOTSUP, "%s: the drive has no NVMe Sanitize with block or cryptographic "
                         "erase", device->uri);
    }
    if (info->sanitize.state == HIFC_SANITIZE_UNKNOWN) {
        return hifc_fail(-EPERM, "%s: sanitize is refused: the drive does not tell whether one runs "
                         "(Sanitize Status log page)", device->uri);
    }
    const char *beyond = hifc_drive_reaches(info, true);
    if (beyond) {
        return hifc_fail(-EPERM, "%s: sanitize is refused: %s", device->uri, beyond);
    }
    *action = blocks ? HIFC_SANITIZE_BLOCK_ERASE : HIFC_SANITIZE_CRYPTO_ERASE;
    /* After a restricted one that failed, the drive takes only another restricted one. */
    bool restricted = info->sanitize.state == HIFC_SANITIZE_FAILED && info->sanitize.restricted;
    struct hifc_nvme_passthru command = {.opcode = HIFC_OPCODE_SANITIZE,
                                         .cdw10 = *action |
                                                  (restricted ? 0 : HIFC_SANITIZE_UNRESTRICTED_EXIT),
                                         .timeout_ms = START_TIMEOUT_MS};
    return device->ops->passthru(device, &command);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static int wait_until_over(struct hifc_device *device, struct hifc_sanitize_status *status,
                           hifc_sanitize_watch watch, void *argument, uint32_t poll_ms,
                           uint64_t wait_ms)
{
    uint64_t end_ms = hifc_now_ms() + wait_ms;
    int error = hifc_sanitize_read(device, status);
    while (!error && status->state == HIFC_SANITIZE_RUNNING) {
        unsigned percent = status->progress * 100 / 65536;
        if (watch && watch(status, argument) != 0) {
            return hifc_fail(-ECANCELED, "%s: no longer waited for, while the drive goes on with its "
                             "sanitize (%u %% done)", device->uri, percent);
        }
        if (hifc_now_ms() >= end_ms) {
            return hifc_fail(-ETIMEDOUT, "%s: the sanitize still runs after %llu s (%u %% done), and "
                             "goes on; sanitize it again to wait longer", device->uri,
                             (unsigned long long)wait_ms / 1000, percent);
        }
        struct timespec nap = {.tv_sec = poll_ms / 1000, .tv_nsec = poll_ms % 1000 * 1000000l};
        nanosleep(&nap, NULL); /* a signal shortens it, and watch may act on it */
        error = hifc_sanitize_read(device, status);
    }
    return error;
}

int hifc_sanitize_device(struct hifc_device *device, hifc_sanitize_watch watch, void *argument,
                         uint32_t poll_ms, uint64_t wait_ms)
{
    struct hifc_device_info info = {0};
    struct hifc_sanitize_status status = {0};
    int error = hifc_drive_describe(device, &info);
    uint32_t action = info.sanitize.action;
    if (!error && info.sanitize.state != HIFC_SANITIZE_RUNNING) {
        error = start(device, &info, &action);
    }
    error = error ? error
                  : wait_until_over(device, &status, watch, argument, poll_ms, wait_ms);
    if (error) {
        return error;
    }
    if (status.state == HIFC_SANITIZE_FAILED) {
        return hifc_fail_command(-EIO, HIFC_SCT_GENERIC, HIFC_SC_SANITIZE_FAILED, HIFC_OPCODE_SANITIZE, 0, 0,
                                 0, device->uri);
    }
    if (status.state != HIFC_SANITIZE_DONE || status.action != action) {
        return hifc_fail(-EIO, "%s: the sanitize was started, and the drive does not say that it "
                         "succeeded (state %u, action %u)", device->uri, status.state,
                         status.action);
    }
    return 0;
}
