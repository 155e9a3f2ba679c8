/* SPDX-License-Identifier: Apache-2.0
 *
 * command.c - the NVMe status of a command that the kernel carried out. Any thread.
 */
#include "device/command.h"

/* What the block layer answers, turned back into the NVMe status that it came from where there is
 * only one (blk_errors in the kernel), the nearest one otherwise. */
void hifc_io_fail_errno(struct hifc_io *io, int positive_errno)
{
    static const struct {
        int from, to;
        uint8_t sct, sc;
    } table[] = {
        {ENOSPC, -ENOSPC, HIFC_SCT_GENERIC, HIFC_SC_CAPACITY},
        {EDQUOT, -ENOSPC, HIFC_SCT_GENERIC, HIFC_SC_CAPACITY},
        {EFBIG, -EIO, HIFC_SCT_GENERIC, HIFC_SC_LBA_OUT_OF_RANGE},
        {ENODATA, -EIO, HIFC_SCT_MEDIA, HIFC_SC_UNRECOVERED_READ},
        {EILSEQ, -EIO, HIFC_SCT_MEDIA, HIFC_SC_GUARD_CHECK},
        {ENOLINK, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH},
        {ENODEV, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH},
        {ENXIO, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH},
        {ETIMEDOUT, -ETIMEDOUT, HIFC_SCT_GENERIC, HIFC_SC_ABORTED},
        {ECANCELED, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED},
        {EOPNOTSUPP, -ENOTSUP, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD},
        {EINVAL, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD},
        {EFAULT, -EFAULT, HIFC_SCT_GENERIC, HIFC_SC_DATA_TRANSFER},
        {EROFS, -EROFS, HIFC_SCT_COMMAND, HIFC_SC_READ_ONLY_RANGE},
        {EPERM, -EROFS, HIFC_SCT_COMMAND, HIFC_SC_READ_ONLY_RANGE},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (table[i].from == positive_errno) {
            hifc_io_set(io, table[i].to, table[i].sct, table[i].sc);
            return;
        }
    }
    hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_INTERNAL);
}
