/* SPDX-License-Identifier: Apache-2.0
 *
 * file.h - what file.c (opening), uring.c and psync.c (the two kinds of queue pairs) share.
 */
#ifndef HIFC_DEVICE_FILE_H
#define HIFC_DEVICE_FILE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/backing.h"
#include "device/device.h"

/* Registered memory: slot i stands for buffer i of every ring of the device. */
#define HIFC_FILE_REGIONS_MAX 64u
/* What the kernel takes as one buffer. */
#define HIFC_FILE_REGION_MAX_BYTES (1ull << 30)

struct hifc_file_region {
    _Atomic(uintptr_t) base;
    _Atomic uint64_t size_bytes; /* 0: free; stored last, cleared first */
};

struct hifc_uring;

struct hifc_file_device {
    struct hifc_device base;
    int fd;
    struct hifc_backing backing;
    bool read_only;
    bool created;  /* by this open, and not kept so far */
    bool unnamed;  /* created without a name, which keep gives it */
    bool stranded; /* a ring was closed while the kernel still held commands: keep the lock */
    char *path; /* of what was created */
    struct hifc_file_device *next; /* of all open ones, see file.c */
    pthread_mutex_t mutex;         /* guards rings and changes of regions */
    struct hifc_uring *rings;
    struct hifc_file_region regions[HIFC_FILE_REGIONS_MAX];
    _Atomic uint32_t region_count; /* one above the highest slot ever used */
};

/* uring.c */
int hifc_uring_open(struct hifc_device *device, uint32_t depth, uint32_t command_timeout_ms,
                    struct hifc_qpair **out);
void hifc_uring_close(struct hifc_qpair *qpair);
uint32_t hifc_uring_submit(struct hifc_qpair *qpair, struct hifc_io *const *ios, uint32_t count);
int hifc_uring_poll(struct hifc_qpair *qpair);
int hifc_uring_event_fd(struct hifc_qpair *qpair);
int hifc_uring_register(struct hifc_device *device, void *base, uint64_t size_bytes);
int hifc_uring_unregister(struct hifc_device *device, void *base, uint64_t size_bytes);
/* In a child of fork(): closes the descriptors that it inherited. The device's mutex is free. */
void hifc_uring_abandon(struct hifc_file_device *device);

/* psync.c */
int hifc_psync_open(struct hifc_device *device, uint32_t depth, uint32_t command_timeout_ms,
                    struct hifc_qpair **out);
void hifc_psync_close(struct hifc_qpair *qpair);
uint32_t hifc_psync_submit(struct hifc_qpair *qpair, struct hifc_io *const *ios, uint32_t count);
int hifc_psync_poll(struct hifc_qpair *qpair);
int hifc_psync_event_fd(struct hifc_qpair *qpair);

#endif
