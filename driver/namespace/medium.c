/* SPDX-License-Identifier: Apache-2.0
 *
 * medium.c - what is done to a device as a whole, whatever stands on it: lay a namespace, look at it,
 * erase it.
 *
 * Each call opens the device, which takes its lock, and closes it again. Identify pages are parsed
 * here, by the byte offsets of the NVM Express specifications, so that a drive says the same of
 * itself through SPDK and through the kernel. Any thread; blocks. A crash during erase leaves the
 * device erased in part: signatures go first.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "error.h"
#include "namespace/layout.h"

#define OPCODE_IDENTIFY 0x06
#define OPCODE_FORMAT_NVM 0x80
#define CNS_NAMESPACE 0u
#define CNS_CONTROLLER 1u
#define CNS_ACTIVE_LIST 2u
#define ADMIN_TIMEOUT_MS 5000u
#define FORMAT_TIMEOUT_MS 3600000u /* with user data erase a large drive takes its time */
#define EDGE_BYTES (1u << 20)      /* at either end: all known signatures stand within */

struct rig {
    struct hifc_device *device;
    struct hifc_engine *engine;
    struct hifc_blockio *io;
};

static int rig_open(struct rig *rig, const char *uri, unsigned flags)
{
    struct hifc_engine_opts opts = {.queue_depth = 64, .command_timeout_ms = 30000};
    *rig = (struct rig){0};
    if (!uri) {
        return hifc_fail(-EINVAL, "no device URI was given");
    }
    int error = hifc_device_open(uri, flags, &rig->device);
    error = error ? error : hifc_engine_create(rig->device, &opts, &rig->engine);
    return error ? error : hifc_blockio_create(rig->device, rig->engine, &rig->io);
}

/* Hands error on, with the thread's last error as it was. */
static int rig_close(struct rig *rig, int error)
{
    struct hifc_error kept;
    hifc_error_copy(&kept);
    if (rig->engine) {
        hifc_engine_destroy(rig->engine);
    }
    if (rig->io) {
        hifc_blockio_destroy(rig->io);
    }
    if (rig->device) {
        hifc_device_close(rig->device);
    }
    if (error) {
        hifc_error_adopt(&kept);
    }
    return error;
}

HIFC_API int hifc_format(const char *uri, const struct hifc_format_opts *opts)
{
    struct rig rig;
    struct hifc_format_opts none = {0};
    int error = rig_open(&rig, uri, opts && opts->check_only ? 0 : HIFC_DEVICE_CREATE);
    error = error ? error : hifc_format_device(rig.io, opts ? opts : &none);
    return rig_close(&rig, error);
}

/* ---- identify -------------------------------------------------------------------------------- */

struct identify {
    uint8_t *controller, *space, *list; /* a page each */
    uint8_t pages[3 * HIFC_PAGE_BYTES];
};

static uint64_t load(const uint8_t *page, unsigned offset, unsigned bytes)
{
    uint64_t value = 0;
    memcpy(&value, page + offset, bytes); /* x86: little-endian as the pages are */
    return value;
}

static int identify_page(struct hifc_device *device, uint32_t cns, uint32_t nsid, uint8_t *page)
{
    struct hifc_nvme_admin command = {.opcode = OPCODE_IDENTIFY, .nsid = nsid, .cdw10 = cns,
                                      .timeout_ms = ADMIN_TIMEOUT_MS, .data = page,
                                      .data_bytes = HIFC_PAGE_BYTES};
    return device->ops->admin(device, &command);
}

/* -ENOTSUP where the device is no NVMe namespace. */
static int identify(struct hifc_device *device, struct identify *out)
{
    uint32_t nsid = device->geometry.nsid;
    if (!device->ops->admin || nsid == 0) {
        return hifc_fail(-ENOTSUP, "%s is no NVMe namespace", device->uri);
    }
    memset(out, 0, sizeof *out);
    out->controller = out->pages;
    out->space = out->pages + HIFC_PAGE_BYTES;
    out->list = out->pages + 2 * HIFC_PAGE_BYTES;
    int error = identify_page(device, CNS_CONTROLLER, 0, out->controller);
    error = error ? error : identify_page(device, CNS_NAMESPACE, nsid, out->space);
    if (!error && identify_page(device, CNS_ACTIVE_LIST, 0, out->list) != 0) {
        /* Before NVMe 1.1: as many as Identify Controller says there can be. */
        uint64_t count = load(out->controller, 516, 4);
        for (uint32_t i = 0; i < count && i < HIFC_PAGE_BYTES / 4; i++) {
            out->list[4 * i] = 1;
        }
    }
    return error;
}

static uint32_t active_namespaces(const struct identify *id)
{
    uint32_t count = 0;
    while (count < HIFC_PAGE_BYTES / 4 && load(id->list, 4 * count, 4) != 0) {
        count++;
    }
    return count;
}

static void fill_nvme(const struct hifc_device *device, const struct identify *id,
                      struct hifc_device_info *out)
{
    uint8_t fna = id->controller[524];
    uint32_t format = (id->space[26] & 15u) | (id->space[26] >> 5 & 3u) << 4;
    uint32_t lba_shift = id->space[128 + 4 * format + 2];
    bool formats = load(id->controller, 256, 2) & 2;
    bool shared = (id->space[30] & 1) || (id->controller[76] & 2);
    out->nsid = device->geometry.nsid;
    out->namespaces = active_namespaces(id);
    memcpy(out->nguid, id->space + 104, sizeof out->nguid);
    memcpy(out->eui64, id->space + 120, sizeof out->eui64);
    out->flags |= HIFC_INFO_NVME | (formats ? HIFC_INFO_FORMAT : 0) |
                  (formats && fna & 4 ? HIFC_INFO_CRYPTO_ERASE : 0) |
                  (fna & 3 ? HIFC_INFO_FORMAT_ALL : 0) | (shared ? HIFC_INFO_SHARED : 0);
    if (lba_shift < 32 && load(id->space, 0, 8) << lba_shift == device->geometry.size_bytes) {
        out->flags |= HIFC_INFO_WHOLE;
    }
}

static void fill_geometry(const struct hifc_device *device, struct hifc_device_info *out)
{
    const struct hifc_geometry *geometry = &device->geometry;
    out->size_bytes = geometry->size_bytes;
    out->lba_bytes = geometry->lba_bytes;
    out->flags = (geometry->deallocate ? HIFC_INFO_DEALLOCATE : 0) |
                 (geometry->volatile_write_cache ? HIFC_INFO_WRITE_CACHE : 0);
    snprintf(out->model, sizeof out->model, "%s", geometry->model);
    snprintf(out->serial, sizeof out->serial, "%s", geometry->serial);
    snprintf(out->firmware, sizeof out->firmware, "%s", geometry->firmware);
}

static void fill_health(struct hifc_device *device, struct hifc_device_info *out)
{
    struct hifc_error why;
    if (hifc_device_health(device, out->health) == 0) {
        out->flags |= HIFC_INFO_HEALTH;
        return;
    }
    hifc_error_copy(&why);
    snprintf(out->health_problem, sizeof out->health_problem, "%.239s", why.message);
}

HIFC_API int hifc_device_info(const char *uri, struct hifc_device_info *out)
{
    struct rig rig;
    struct identify id;
    if (!out) {
        return hifc_fail(-EINVAL, "no room for the answer was given");
    }
    memset(out, 0, sizeof *out);
    int error = rig_open(&rig, uri, HIFC_DEVICE_READ_ONLY);
    if (!error) {
        int unreadable = 0;
        fill_geometry(rig.device, out);
        fill_health(rig.device, out);
        if (identify(rig.device, &id) == 0) {
            fill_nvme(rig.device, &id, out);
        }
        const char *found = hifc_signature(rig.io, &unreadable);
        snprintf(out->signature, sizeof out->signature, "%s", found ? found : "");
        out->flags |= unreadable ? HIFC_INFO_UNREADABLE : 0;
    }
    return rig_close(&rig, error);
}

/* ---- erase ----------------------------------------------------------------------------------- */

static int zero_range(struct rig *rig, uint64_t from, uint64_t to)
{
    uint8_t *zero = calloc(1, EDGE_BYTES);
    if (!zero) {
        return hifc_fail(-ENOMEM, "no memory to erase");
    }
    int error = 0;
    for (uint64_t at = from; at < to && !error; at += EDGE_BYTES) {
        error = hifc_blockio_write(rig->io, at, zero, to - at < EDGE_BYTES ? to - at : EDGE_BYTES);
    }
    free(zero);
    return error;
}

/* Nothing is found on it any more, whatever becomes of the rest. */
static int zero_ends(struct rig *rig, uint64_t size)
{
    uint64_t edge = size < 2ull * EDGE_BYTES ? size / 2 / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES
                                             : EDGE_BYTES;
    int error = zero_range(rig, 0, edge);
    error = error ? error : zero_range(rig, size - edge, size);
    return error ? error : hifc_blockio_flush(rig->io);
}

static int format_nvm(struct rig *rig, uint32_t secure_erase)
{
    struct hifc_device_info info = {0};
    struct identify id;
    int error = identify(rig->device, &id);
    if (error) {
        return error;
    }
    fill_geometry(rig->device, &info);
    fill_nvme(rig->device, &id, &info);
    if (!(info.flags & HIFC_INFO_FORMAT) ||
        (secure_erase == 2 && !(info.flags & HIFC_INFO_CRYPTO_ERASE))) {
        return hifc_fail(-ENOTSUP, "%s: the drive has no Format NVM%s; deallocate or overwrite it",
                         rig->device->uri, secure_erase == 2 ? " with cryptographic erase" : "");
    }
    if (!(info.flags & HIFC_INFO_WHOLE) || info.flags & HIFC_INFO_SHARED ||
        (info.flags & HIFC_INFO_FORMAT_ALL && info.namespaces != 1)) {
        return hifc_fail(-EPERM, "%s: Format NVM would reach beyond it: %s; deallocate or overwrite "
                         "it", rig->device->uri,
                         !(info.flags & HIFC_INFO_WHOLE) ? "this is a part of the NVMe namespace"
                         : info.flags & HIFC_INFO_SHARED ? "other controllers share the namespace"
                                                         : "it erases all namespaces of the drive");
    }
    /* The format that it has: FLBAS and DPS of Identify Namespace, in the places of dword 10. */
    uint32_t flbas = id.space[26], dps = id.space[29];
    struct hifc_nvme_admin command = {.opcode = OPCODE_FORMAT_NVM, .nsid = info.nsid,
                                      .cdw10 = (flbas & 0x1f) | (dps & 7) << 5 | (dps >> 3 & 1) << 8 |
                                               secure_erase << 9 | (flbas >> 5 & 3) << 12,
                                      .timeout_ms = FORMAT_TIMEOUT_MS};
    return rig->device->ops->admin(rig->device, &command);
}

static int erase(struct rig *rig, uint32_t method)
{
    uint64_t size = rig->device->geometry.size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    int error = 0, unreadable = 0;
    switch (method) {
    case HIFC_ERASE_DEALLOCATE:
        if (!rig->device->geometry.deallocate) {
            return hifc_fail(-ENOTSUP, "%s does not understand deallocate; overwrite it",
                             rig->device->uri);
        }
        error = zero_ends(rig, size);
        error = error ? error : hifc_blockio_deallocate(rig->io, 0, size);
        break;
    case HIFC_ERASE_OVERWRITE:
        error = zero_ends(rig, size);
        error = error ? error : zero_range(rig, 0, size);
        break;
    case HIFC_ERASE_FORMAT:
    case HIFC_ERASE_CRYPTO:
        error = format_nvm(rig, method == HIFC_ERASE_CRYPTO ? 2 : 1);
        break;
    default:
        return hifc_fail(-EINVAL, "%u is no method to erase", method);
    }
    error = error ? error : hifc_blockio_flush(rig->io);
    const char *left = error ? NULL : hifc_signature(rig->io, &unreadable);
    return error ? error
           : left ? hifc_fail(-EIO, "%s: %s can still be read after the erase: the device loses "
                              "writes", rig->device->uri, left)
                  : unreadable;
}

HIFC_API int hifc_erase(const char *uri, uint32_t method)
{
    struct rig rig;
    int error = rig_open(&rig, uri, 0);
    error = error ? error : erase(&rig, method);
    return rig_close(&rig, error);
}
