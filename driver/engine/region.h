/* SPDX-License-Identifier: Apache-2.0
 *
 * region.h - memory that a device reads and writes without a copy: the buffer pool and blockio's
 * bounce memory are regions.
 */
#ifndef HIFC_REGION_H
#define HIFC_REGION_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

#define HIFC_HUGE_PAGE_BYTES (2ull << 20)

struct hifc_region {
    uint8_t *base;       /* 2 MiB aligned */
    uint64_t size_bytes; /* multiple of 2 MiB */
    int fd;              /* of the memfd, for processes that attach */
    bool huge;           /* of huge pages; otherwise of ordinary ones, taken as they are touched */
    bool registered;     /* with the device */
};

/* Maps size_bytes, rounded up to 2 MiB, of huge pages where enough are free, and registers it where
 * the device knows registration. A device that takes registered memory only gets huge pages or
 * -ENOMEM. what: names the memory in errors and in /proc/PID/maps. */
int hifc_region_create(struct hifc_device *device, uint64_t size_bytes, const char *what,
                       struct hifc_region *out);
/* Nothing may be in flight to it. Harmless on a zeroed or destroyed region. */
/* Takes it back from the device; the memory stays. */
void hifc_region_release(struct hifc_device *device, struct hifc_region *region);
void hifc_region_destroy(struct hifc_device *device, struct hifc_region *region);

#endif
