/* SPDX-License-Identifier: Apache-2.0
 *
 * faulty_state.h - what faulty.c (opening, URIs, tests' functions) and faulty_queue.c (commands,
 * the cut, queue pairs) share.
 */
#ifndef HIFC_DEVICE_FAULTY_STATE_H
#define HIFC_DEVICE_FAULTY_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "faulty/faulty.h"
#include "faulty/overlay.h"

struct hifc_fault_range {
    uint64_t first, last;
};

/* The room of a thin medium: it outlives the device, as what was written does. */
struct hifc_faulty_room {
    struct hifc_faulty_room *next;
    char target[256];
    uint64_t left;   /* blocks */
    uint64_t full_at; /* allocate or write that finds left = 0 from then on; 0: none */
    uint64_t count;
    uint8_t has[];   /* by LBA */
};

struct hifc_faulty_pending {
    struct hifc_io *io;
    uint64_t due; /* number of the poll that may complete it; UINT64_MAX: it hangs */
    uint64_t start_ms;
};

struct hifc_faulty_qpair;

struct hifc_faulty_device {
    struct hifc_device base;
    struct hifc_device *inner;
    struct hifc_qpair *inner_qpair;
    struct hifc_io inner_io;
    bool inner_done;
    bool read_only;
    bool cut;
    bool reorder;
    char target[256];
    struct hifc_faulty_device *next; /* of all open ones */
    struct hifc_faulty_qpair *qpairs;
    pthread_mutex_t mutex; /* everything below, the qpairs' pending, and the inner device */
    struct hifc_overlay overlay;
    struct hifc_faulty_room *room; /* NULL: not thin */
    bool no_allocate, copy_on_write;
    uint64_t random;
    uint32_t drop_percent;
    uint32_t delay_polls;
    uint64_t count; /* writes and flushes */
    uint64_t cut_at, write_error_at, hang_at;
    struct hifc_fault_range errors[HIFC_FAULTY_RANGES_MAX], flips[HIFC_FAULTY_RANGES_MAX];
    uint32_t error_count, flip_count;
};

struct hifc_faulty_qpair {
    struct hifc_qpair base;
    struct hifc_faulty_qpair *next;
    uint32_t depth, inflight, pending_count;
    uint32_t timeout_ms;
    uint64_t poll_number;
    uint64_t taken; /* commands, for fault_hang */
    struct hifc_io **ready;   /* due in the poll that is going on: */
    uint32_t ready_count, ready_done;
    struct hifc_faulty_pending pending[];
};

/* Everything that was written goes down; with a percentage, less what the draw loses. The caller
 * holds the mutex. */
int hifc_faulty_drain(struct hifc_faulty_device *device, uint32_t drop_percent);
/* The power goes while current, if any, is carried out. The caller holds the mutex. */
void hifc_faulty_cut_power(struct hifc_faulty_device *device, struct hifc_io *current);

int hifc_faulty_qpair_open(struct hifc_device *device, uint32_t depth,
                           uint32_t command_timeout_ms, struct hifc_qpair **out);
void hifc_faulty_qpair_close(struct hifc_qpair *qpair);
uint32_t hifc_faulty_submit(struct hifc_qpair *qpair, struct hifc_io *const *ios, uint32_t count);
int hifc_faulty_poll(struct hifc_qpair *qpair);
int hifc_faulty_event_fd(struct hifc_qpair *qpair);

#endif
