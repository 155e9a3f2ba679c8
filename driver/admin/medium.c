/* SPDX-License-Identifier: Apache-2.0
 *
 * medium.c - what is done to a device as a whole, whatever stands on it: lay a namespace, look at it,
 * erase it.
 *
 * Each call opens the device, which takes its lock, and closes it again. Any thread; blocks. A crash
 * during erase leaves the device erased in part, signatures first; one during sanitize leaves the
 * drive at it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin/drive.h"
#include "engine/engine.h"
#include "format/layout.h"
#include "util/error.h"

#define SANITIZE_POLL_MS 1000u
#define SANITIZE_WAIT_MS (4ull * 3600 * 1000) /* block erase takes minutes, and large drives hours */
#define EDGE_BYTES (1u << 20) /* at either end: all known signatures stand within */

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
    error = error ? error
                  : hifc_sanitize_explain(rig.device,
                                          hifc_format_device(rig.io, opts ? opts : &none));
    error = error || (opts && opts->check_only) ? error : hifc_device_keep(rig.device);
    return rig_close(&rig, error);
}

/* ---- info -------------------------------------------------------------------------------------- */

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
    if (!out) {
        return hifc_fail(-EINVAL, "no room for the answer was given");
    }
    memset(out, 0, sizeof *out);
    int error = rig_open(&rig, uri, HIFC_DEVICE_READ_ONLY);
    if (!error) {
        int unreadable = 0;
        fill_geometry(rig.device, out);
        fill_health(rig.device, out);
        (void)hifc_drive_describe(rig.device, out); /* without HIFC_INFO_NVME: it is none */
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

static int nothing_left(struct rig *rig)
{
    int unreadable = 0;
    int error = hifc_blockio_flush(rig->io);
    const char *left = error ? NULL : hifc_signature(rig->io, &unreadable);
    return error ? error
           : left ? hifc_fail(-EIO, "%s: %s can still be read after the erase: the device loses "
                              "writes", rig->device->uri, left)
                  : unreadable;
}

static int erase(struct rig *rig, uint32_t method)
{
    uint64_t size = rig->device->geometry.size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    int error = 0;
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
        error = hifc_drive_format(rig->device, method == HIFC_ERASE_CRYPTO);
        break;
    default:
        return hifc_fail(-EINVAL, "%u is no method to erase", method);
    }
    return error ? error : nothing_left(rig);
}

HIFC_API int hifc_erase(const char *uri, uint32_t method)
{
    struct rig rig;
    int error = rig_open(&rig, uri, 0);
    error = error ? error : hifc_sanitize_explain(rig.device, erase(&rig, method));
    return rig_close(&rig, error);
}

HIFC_API int hifc_sanitize(const char *uri, hifc_sanitize_watch watch, void *argument)
{
    struct rig rig;
    int error = rig_open(&rig, uri, 0);
    error = error ? error
                  : hifc_sanitize_device(rig.device, watch, argument, SANITIZE_POLL_MS,
                                         SANITIZE_WAIT_MS);
    error = error ? error : nothing_left(&rig);
    return rig_close(&rig, error);
}
