/* SPDX-License-Identifier: Apache-2.0
 *
 * backing.h - the same blocks under another name: loop devices and what stands on them
 * (backing.c).
 */
#ifndef HIFC_DEVICE_BACKING_H
#define HIFC_DEVICE_BACKING_H

#include <stdbool.h>
#include <sys/stat.h>

#define HIFC_BACKING_MAX 32u

/* Descriptors that hold what else names the blocks of a device: locked backing files and claimed
 * loop devices. */
struct hifc_backing {
    unsigned count;
    int fds[HIFC_BACKING_MAX];
};

/* Holds everything that names blocks of the open file or block device that status tells of. -EBUSY
 * says what else uses them. Drop it also after a failure. shared: as a reader, beside others. */
int hifc_backing_take(const struct stat *status, bool shared, const char *path,
                      struct hifc_backing *backing);
/* keep_locks: another process still needs them (a child of fork() drops only its descriptors), or
 * something is still in flight. */
void hifc_backing_drop(struct hifc_backing *backing, bool keep_locks);

#endif
