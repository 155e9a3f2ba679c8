/* SPDX-License-Identifier: Apache-2.0
 *
 * drive.c - what an NVMe drive says of itself, and Format NVM.
 *
 * Pages are parsed here, by the byte offsets of the NVM Express specifications, so that a drive says
 * the same of itself through SPDK and through the kernel. What cannot be asked counts against the
 * erasing of more than blocks. Any thread; blocks.
 */
#include "admin/drive.h"

#include <string.h>

#include "format/layout.h"
#include "util/error.h"

#define OPCODE_IDENTIFY 0x06
#define OPCODE_RESERVATION_REPORT 0x0e
#define OPCODE_FORMAT_NVM 0x80
#define CNS_NAMESPACE 0u
#define CNS_CONTROLLER 1u
#define CNS_ACTIVE_LIST 2u
#define CNS_ALLOCATED_LIST 0x10u
#define OACS_FORMAT 2u
#define OACS_NAMESPACE_MANAGEMENT 8u
#define ONCS_RESERVATIONS 0x20u
#define FORMAT_TIMEOUT_MS 3600000u /* with user data erase a large drive takes its time */
#define ERASE_USER_DATA 1u
#define ERASE_CRYPTO 2u

struct identify {
    uint8_t *controller, *space, *list; /* a page each */
    uint8_t pages[3 * HIFC_PAGE_BYTES];
};

static uint64_t load(const uint8_t *page, unsigned offset, unsigned bytes)
{
    uint64_t value = 0;
    memcpy(&value, page + offset, bytes); /* little-endian as the pages are: layout.h */
    return value;
}

static int identify_page(struct hifc_device *device, uint32_t cns, uint32_t nsid, uint8_t *page)
{
    struct hifc_nvme_passthru command = {.opcode = OPCODE_IDENTIFY, .nsid = nsid, .cdw10 = cns,
                                         .timeout_ms = HIFC_DRIVE_TIMEOUT_MS, .data = page,
                                         .data_bytes = HIFC_PAGE_BYTES};
    return device->ops->passthru(device, &command);
}

static int identify(struct hifc_device *device, struct identify *out)
{
    uint32_t nsid = device->geometry.nsid;
    if (!device->ops->passthru || nsid == 0) {
        return hifc_fail(-ENOTSUP, "%s is no NVMe namespace", device->uri);
    }
    memset(out, 0, sizeof *out);
    out->controller = out->pages;
    out->space = out->pages + HIFC_PAGE_BYTES;
    out->list = out->pages + 2 * HIFC_PAGE_BYTES;
    int error = identify_page(device, CNS_CONTROLLER, 0, out->controller);
    error = error ? error : identify_page(device, CNS_NAMESPACE, nsid, out->space);
    if (error) {
        return error;
    }
    /* Where namespaces can be detached, those that this controller does not see count as well. */
    bool managed = load(out->controller, 256, 2) & OACS_NAMESPACE_MANAGEMENT;
    uint32_t cns = managed ? CNS_ALLOCATED_LIST : CNS_ACTIVE_LIST;
    if (identify_page(device, cns, 0, out->list) != 0) {
        /* Before NVMe 1.1: as many as Identify Controller says there can be. */
        memset(out->list, 0, HIFC_PAGE_BYTES);
        uint64_t count = load(out->controller, 516, 4);
        for (uint32_t i = 0; i < count && i < HIFC_PAGE_BYTES / 4; i++) {
            out->list[4 * i] = 1;
        }
    }
    return 0;
}

static uint32_t count_namespaces(const struct identify *id)
{
    uint32_t count = 0;
    while (count < HIFC_PAGE_BYTES / 4 && load(id->list, 4 * count, 4) != 0) {
        count++;
    }
    return count;
}

/* ---- reservations ---------------------------------------------------------------------------- */

static int report_reservations(struct hifc_device *device, bool extended, uint8_t *page)
{
    struct hifc_nvme_passthru command = {.opcode = OPCODE_RESERVATION_REPORT, .io_queue = true,
                                         .nsid = device->geometry.nsid,
                                         .cdw10 = HIFC_PAGE_BYTES / 4 - 1, .cdw11 = extended,
                                         .timeout_ms = HIFC_DRIVE_TIMEOUT_MS, .data = page,
                                         .data_bytes = HIFC_PAGE_BYTES};
    return device->ops->passthru(device, &command);
}

/* A host that uses 128-bit identifiers must ask for the extended report; the head is the same. */
static uint32_t reservation_flags(struct hifc_device *device, const struct identify *id)
{
    uint8_t page[HIFC_PAGE_BYTES] = {0};
    if (!(load(id->controller, 520, 2) & ONCS_RESERVATIONS)) {
        return 0;
    }
    if (report_reservations(device, false, page) != 0 &&
        report_reservations(device, true, page) != 0) {
        return HIFC_INFO_RESERVED_UNKNOWN;
    }
    bool held = page[4] != 0, registered = load(page, 5, 2) != 0;
    return held || registered ? HIFC_INFO_RESERVED : 0;
}

/* ---- the whole picture ----------------------------------------------------------------------- */

static void describe(struct hifc_device *device, const struct identify *id,
                     struct hifc_device_info *out)
{
    uint8_t fna = id->controller[524], sanicap = id->controller[328];
    uint32_t format = (id->space[26] & 15u) | (id->space[26] >> 5 & 3u) << 4;
    uint32_t lba_shift = id->space[128 + 4 * format + 2];
    bool formats = load(id->controller, 256, 2) & OACS_FORMAT;
    bool shared = (id->space[30] & 1) || (id->controller[76] & 2);
    out->nsid = device->geometry.nsid;
    out->namespaces = count_namespaces(id);
    memcpy(out->nguid, id->space + 104, sizeof out->nguid);
    memcpy(out->eui64, id->space + 120, sizeof out->eui64);
    out->flags |= HIFC_INFO_NVME | (formats ? HIFC_INFO_FORMAT : 0) |
                  (formats && fna & 4 ? HIFC_INFO_CRYPTO_ERASE : 0) |
                  (fna & 3 ? HIFC_INFO_FORMAT_ALL : 0) | (shared ? HIFC_INFO_SHARED : 0) |
                  (sanicap & 2 ? HIFC_INFO_SANITIZE_BLOCK : 0) |
                  (sanicap & 1 ? HIFC_INFO_SANITIZE_CRYPTO : 0) | reservation_flags(device, id);
    if (lba_shift < 32 && load(id->space, 0, 8) << lba_shift == device->geometry.size_bytes) {
        out->flags |= HIFC_INFO_WHOLE;
    }
    if (sanicap & 7 && hifc_sanitize_read(device, &out->sanitize) != 0) {
        out->sanitize = (struct hifc_sanitize_status){.state = HIFC_SANITIZE_UNKNOWN};
    }
}

int hifc_drive_describe(struct hifc_device *device, struct hifc_device_info *out)
{
    struct identify id;
    int error = identify(device, &id);
    if (!error) {
        describe(device, &id, out);
    }
    return error;
}

const char *hifc_drive_reaches(const struct hifc_device_info *info, bool whole_drive)
{
    return !(info->flags & HIFC_INFO_WHOLE)    ? "this is a part of the NVMe namespace"
           : info->flags & HIFC_INFO_SHARED    ? "other controllers share the namespace"
           : info->flags & HIFC_INFO_RESERVED  ? "another host has the namespace reserved"
           : info->flags & HIFC_INFO_RESERVED_UNKNOWN
               ? "the drive does not tell whether another host has the namespace reserved"
           : whole_drive && info->namespaces != 1 ? "it erases all namespaces of the drive"
                                                  : NULL;
}

int hifc_drive_format(struct hifc_device *device, bool crypto)
{
    struct hifc_device_info info = {0};
    struct identify id;
    int error = identify(device, &id);
    if (error) {
        return error;
    }
    describe(device, &id, &info);
    if (!(info.flags & HIFC_INFO_FORMAT) || (crypto && !(info.flags & HIFC_INFO_CRYPTO_ERASE))) {
        return hifc_fail(-ENOTSUP, "%s: the drive has no Format NVM%s", device->uri,
                         crypto ? " with cryptographic erase" : "");
    }
    const char *beyond = hifc_drive_reaches(&info, info.flags & HIFC_INFO_FORMAT_ALL);
    if (beyond) {
        return hifc_fail(-EPERM, "%s: Format NVM is refused: %s", device->uri, beyond);
    }
    /* The format that it has: FLBAS and DPS of Identify Namespace, in the places of dword 10. */
    uint32_t flbas = id.space[26], dps = id.space[29];
    uint32_t erase = crypto ? ERASE_CRYPTO : ERASE_USER_DATA;
    struct hifc_nvme_passthru command = {.opcode = OPCODE_FORMAT_NVM, .nsid = info.nsid,
                                         .cdw10 = (flbas & 0x1f) | (dps & 7) << 5 |
                                                  (dps >> 3 & 1) << 8 | erase << 9 |
                                                  (flbas >> 5 & 3) << 12,
                                         .timeout_ms = FORMAT_TIMEOUT_MS};
    return device->ops->passthru(device, &command);
}
