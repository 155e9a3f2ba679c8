/* SPDX-License-Identifier: Apache-2.0
 *
 * file_target.h - what a file URI asks for, and what was found at its path (file_target.c).
 */
#ifndef HIFC_DEVICE_FILE_TARGET_H
#define HIFC_DEVICE_FILE_TARGET_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "device/backing.h"
#include "device/device.h"

enum hifc_tristate { HIFC_NO = 0, HIFC_YES = 1, HIFC_AUTO = 2 };

struct hifc_file_options {
    const char *path;
    uint64_t size_bytes; /* 0: as large as it is */
    uint64_t lba_bytes;
    uint64_t max_transfer_bytes; /* 0: the default */
    enum hifc_tristate sync_io, sparse, direct;
    bool read_only, create;
};

/* What was found out about the path. */
struct hifc_file_target {
    int fd;
    bool block, tmpfs, created, unnamed, direct;
    struct stat status;
    struct hifc_backing backing;
    uint64_t size_bytes;
    uint32_t block_bytes; /* smallest unit of direct I/O */
    uint32_t align_bytes; /* of memory */
};

int hifc_file_options(const struct hifc_uri *uri, unsigned flags,
                      struct hifc_file_options *options);
/* Opens, makes if asked to, locks and measures it. Close it also after a failure. */
int hifc_file_target_open(const struct hifc_file_options *options,
                          struct hifc_file_target *target);
/* A file that was made stays: gives it its name if it has none, and makes both durable. */
int hifc_file_target_keep(const char *path, int fd, bool unnamed);
/* Takes a file that was made away again, if it is still the one under that name. */
void hifc_file_target_remove(const char *path, int fd);
/* Gives up: a file that was made goes again. */
void hifc_file_target_close(const struct hifc_file_options *options,
                            struct hifc_file_target *target);

#endif
