/* SPDX-License-Identifier: Apache-2.0
 *
 * uring.h - a ring, for uring_ring.c (its life and its registered memory) and uring.c (commands).
 */
#ifndef HIFC_DEVICE_URING_H
#define HIFC_DEVICE_URING_H

#include <liburing.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "device/device.h"
#include "util/clock.h"

struct hifc_uring_slot {
    struct hifc_io *io; /* NULL: free */
    uint32_t next_free;
    uint32_t done_bytes;
    uint32_t start_ms;
    uint8_t retries;
    bool cancelled;
};

struct hifc_uring {
    struct hifc_qpair base;
    struct hifc_uring *next; /* of the device's rings */
    struct io_uring ring;
    int event_fd;
    int lost;                /* negative errno: the ring does not work any more */
    uint32_t depth;
    uint32_t inflight;       /* slots in use and refused commands */
    uint32_t free_slot;      /* depth: none */
    uint32_t empty_polls;
    uint32_t timeout_ms;
    uint32_t last_check_ms;
    bool unsubmitted;        /* the submission ring holds entries that the kernel has not seen */
    bool fixed_file;
    _Atomic uint64_t fixed_slots; /* regions that this ring knows */
    struct hifc_io *refused;      /* linked through device_private[0] */
    struct iovec (*partial)[HIFC_IO_IOV_MAX]; /* by slot: what is left of a short transfer */
    struct hifc_uring_slot slots[];
};

/* Gives every command that is still there this outcome; returns their count. */
int hifc_uring_complete_all(struct hifc_uring *ring, int error, uint8_t sct, uint8_t sc);

/* Wraps after 49 days: compare differences. A tick of the kernel, some ms, is fine enough. */
static inline uint32_t hifc_uring_now_ms(void)
{
    return (uint32_t)hifc_now_ms_coarse();
}

#endif
