/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c - not there yet.
 */
#include "device/device.h"
#include "error.h"

static int refuse_open(const struct hifc_uri *uri, unsigned flags, struct hifc_device **out)
{
    (void)flags;
    *out = NULL;
    return hifc_fail(-ENOTSUP, "%s devices are not built yet", uri->scheme);
}

const struct hifc_device_ops hifc_device_file = {.scheme = "file", .open = refuse_open};
