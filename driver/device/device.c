/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c - the table of schemes, and opening a device through it.
 *
 * A program that links hifc_device_faulty (tests/faulty/) also has "faulty+" before any scheme, which
 * wraps that device in injected faults. The shipped library does not link it. Any thread.
 */
#include <stdio.h>
#include <string.h>

#include "device/device.h"
#include "util/error.h"

#define FAULTY_PREFIX "faulty+"

extern const struct hifc_device_ops hifc_device_faulty
    __attribute__((weak, visibility("hidden")));

static const struct hifc_device_ops *const device_table[] = {
    &hifc_device_ram,
    &hifc_device_file,
#ifdef HIFC_WITH_SPDK
    &hifc_device_spdk_pcie,
    &hifc_device_spdk_tcp,
    &hifc_device_spdk_rdma,
#endif
};

#ifdef HIFC_WITH_SPDK
#define SCHEMES "ram file spdk spdk+tcp spdk+rdma"
#else
#define SCHEMES "ram file"
#endif

const char *hifc_schemes(void)
{
    return SCHEMES;
}

static const struct hifc_device_ops *find_ops(const char *scheme)
{
    if (strncmp(scheme, FAULTY_PREFIX, strlen(FAULTY_PREFIX)) == 0) {
        return &hifc_device_faulty; /* NULL where it is not linked */
    }
    for (size_t i = 0; i < sizeof(device_table) / sizeof(device_table[0]); i++) {
        if (strcmp(scheme, device_table[i]->scheme) == 0) {
            return device_table[i];
        }
    }
    return NULL;
}

static int no_such_scheme(const char *uri, const char *scheme)
{
    if (strcmp(scheme, "spdk") == 0 || strncmp(scheme, "spdk+", 5) == 0) {
#ifndef HIFC_WITH_SPDK
        return hifc_fail(-ENOTSUP, "'%.200s': this build of libhifc lacks SPDK; run "
                         "tools/build_spdk, then build again with HIFC_SPDK=on and "
                         "SPDK_DIR=<the prefix that it prints>", uri);
#endif
    }
    return hifc_fail(-EINVAL, "'%.200s': unknown scheme '%.40s'; this build knows: %s", uri, scheme,
                     SCHEMES);
}

int hifc_device_open(const char *uri, unsigned flags, struct hifc_device **out)
{
    struct hifc_uri parsed;
    *out = NULL;
    int rc = hifc_uri_parse(uri, &parsed);
    if (rc) {
        return rc;
    }
    const struct hifc_device_ops *ops = find_ops(parsed.scheme);
    if (!ops) {
        return no_such_scheme(uri, parsed.scheme);
    }
    struct hifc_device *device = NULL;
    rc = ops->open(&parsed, flags, &device);
    if (rc) {
        return rc;
    }
    if (!device->ops) {
        device->ops = ops; /* unless the device chose one of several tables of its own */
    }
    device->fork_generation = hifc_fork_generation();
    snprintf(device->uri, sizeof(device->uri), "%s", uri);
    *out = device;
    return 0;
}

int hifc_device_keep(struct hifc_device *device)
{
    return device->ops->keep ? device->ops->keep(device) : 0;
}

void hifc_device_close(struct hifc_device *device)
{
    if (device && !hifc_forked_since(device->fork_generation)) {
        device->ops->close(device);
    }
}

int hifc_device_health(struct hifc_device *device, uint8_t log[512])
{
    if (!device->ops->health) {
        return hifc_fail(-ENOTSUP, "%.200s: a %s device has no health log (NVMe devices have one)",
                         device->uri, device->ops->scheme);
    }
    return device->ops->health(device, log);
}
