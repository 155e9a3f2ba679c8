/* SPDX-License-Identifier: Apache-2.0
 *
 * sanitize_status.c - what a drive says of its NVMe Sanitize: that one runs, has failed, or is over.
 * Offsets are those of the NVM Express Base Specification. Any thread; blocks.
 */
#include <string.h>

#include "admin/drive.h"
#include "admin/sanitize.h"
#include "device/command.h"
#include "util/error.h"

#define OPCODE_GET_LOG_PAGE 0x02
#define NSID_ALL 0xffffffffu
#define LOG_SANITIZE_STATUS 0x81u
#define LOG_BYTES 512u

static uint32_t load(const uint8_t *log, unsigned offset, unsigned bytes)
{
    uint32_t value = 0;
    memcpy(&value, log + offset, bytes); /* little-endian as the page is: layout.h */
    return value;
}

int hifc_sanitize_read(struct hifc_device *device, struct hifc_sanitize_status *out)
{
    /* SSTAT; 4 is a success after which blocks were deallocated though that was not asked for. */
    static const uint8_t states[] = {HIFC_SANITIZE_NONE, HIFC_SANITIZE_DONE, HIFC_SANITIZE_RUNNING,
                                     HIFC_SANITIZE_FAILED, HIFC_SANITIZE_DONE};
    uint8_t log[LOG_BYTES] = {0};
    struct hifc_nvme_passthru command = {.opcode = OPCODE_GET_LOG_PAGE, .nsid = NSID_ALL,
                                         .cdw10 = (LOG_BYTES / 4 - 1) << 16 | LOG_SANITIZE_STATUS,
                                         .timeout_ms = HIFC_DRIVE_TIMEOUT_MS, .data = log,
                                         .data_bytes = LOG_BYTES};
    int error = device->ops->passthru(device, &command);
    if (error) {
        return error;
    }
    uint32_t status = load(log, 2, 2) & 7;
    uint32_t action = load(log, 4, 4) & 7;
    *out = (struct hifc_sanitize_status){
        .state = status < sizeof states ? states[status] : HIFC_SANITIZE_UNKNOWN,
        .action = action,
        .progress = load(log, 0, 2),
        .restricted = status != 0 && !(load(log, 4, 4) & HIFC_SANITIZE_UNRESTRICTED_EXIT),
        .estimate_s = action == HIFC_SANITIZE_BLOCK_ERASE    ? load(log, 12, 4)
                      : action == HIFC_SANITIZE_CRYPTO_ERASE ? load(log, 16, 4)
                      : action == HIFC_SANITIZE_OVERWRITE    ? load(log, 8, 4)
                                                      : UINT32_MAX,
    };
    return 0;
}

int hifc_sanitize_explain(struct hifc_device *device, int error)
{
    struct hifc_error kept;
    struct hifc_sanitize_status now;
    if (error != -EIO || !device || !device->ops->passthru || !device->geometry.nsid) {
        return error;
    }
    hifc_error_copy(&kept);
    if (hifc_sanitize_read(device, &now) == 0 && (now.state == HIFC_SANITIZE_RUNNING ||
                                                  now.state == HIFC_SANITIZE_FAILED)) {
        uint8_t sc = now.state == HIFC_SANITIZE_RUNNING ? HIFC_SC_SANITIZE_IN_PROGRESS
                                                        : HIFC_SC_SANITIZE_FAILED;
        uint8_t opcode = kept.lba_bytes ? kept.opcode : HIFC_OPCODE_SANITIZE;
        return hifc_fail_command(error, HIFC_SCT_GENERIC, sc, opcode, kept.lba, kept.nlb,
                                 kept.lba_bytes, device->uri);
    }
    hifc_error_adopt(&kept);
    return error;
}
