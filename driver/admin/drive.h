/* SPDX-License-Identifier: Apache-2.0
 *
 * drive.h - what an NVMe drive says of itself, and the commands of it that erase (drive.c), the
 * longest of which is sanitize (sanitize.c). All send commands to an open device, through SPDK or
 * the kernel, and wait for each with a bound. Any thread, one at a time for a device.
 */
#ifndef HIFC_NAMESPACE_DRIVE_H
#define HIFC_NAMESPACE_DRIVE_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "hifc.h"

#define HIFC_DRIVE_TIMEOUT_MS 5000u /* of a command that only tells something */

/* ---- drive.c ---- */
/* Fills what Identify, the reservation report and the sanitize log tell, from nsid on; flags are
 * added. -ENOTSUP where the device is no NVMe namespace. */
int hifc_drive_describe(struct hifc_device *device, struct hifc_device_info *out);
/* Format NVM with the format that it has, and user data or cryptographic erase. */
int hifc_drive_format(struct hifc_device *device, bool crypto);
/* What of the namespace would be reached beyond it by erasing it, or who else would be hit; NULL:
 * nothing and nobody. whole_drive: the command erases all namespaces. */
const char *hifc_drive_reaches(const struct hifc_device_info *info, bool whole_drive);

/* ---- sanitize.c ---- */
/* The Sanitize Status log page. */
int hifc_sanitize_read(struct hifc_device *device, struct hifc_sanitize_status *out);
/* hifc_sanitize, with a look at the log page every poll_ms, for wait_ms at most. */
int hifc_sanitize_device(struct hifc_device *device, hifc_sanitize_watch watch, void *argument,
                         uint32_t poll_ms, uint64_t wait_ms);
/* error, unless the device fails reads and writes because of a sanitize: then an error that says so.
 * The kernel hides that status behind EIO. */
int hifc_sanitize_explain(struct hifc_device *device, int error);

#endif
