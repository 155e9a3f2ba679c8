/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_qpair.h - a queue pair, for spdk_qpair.c (its life, poll, timeouts) and spdk_submit.c
 * (commands on their way down and back).
 *
 * device_private of a command: [0] pieces and start, [1] and [2] its list, [3] its queue pair.
 */
#ifndef HIFC_DEVICE_SPDK_QPAIR_H
#define HIFC_DEVICE_SPDK_QPAIR_H

#include "device/spdk.h"

struct hifc_spdk_list {
    struct hifc_io *head, *tail;
};

struct hifc_spdk_qpair {
    struct hifc_qpair base;
    struct spdk_nvme_qpair *qpair; /* NULL: lost */
    struct spdk_nvme_ns *ns;
    struct hifc_spdk_list running, ready;
    uint32_t entries;
    uint32_t depth;       /* commands taken at most ... */
    uint32_t pieces_max;  /* ... and of SPDK's commands */
    uint32_t inflight, pieces;
    uint32_t completed;   /* in this poll */
    uint32_t polls;
    uint32_t timeout_ms, now_ms;
    uint32_t lba_shift;
    uint32_t boundary_bytes;
    uint32_t region; /* that memory was in last */
    int lost;             /* negative errno */
    bool submitting, closing, vectored, read_only;
    struct { /* where SPDK is in the list of the command that it takes */
        uint32_t index;
        uint64_t skip;
    } walk;
};

/* When it was submitted, and how many pieces SPDK has of it. */
static inline void hifc_spdk_start(struct hifc_io *io, uint32_t start_ms)
{
    io->device_private[0] = (uint64_t)start_ms << 32;
}

static inline uint32_t hifc_spdk_start_ms(const struct hifc_io *io)
{
    return (uint32_t)(io->device_private[0] >> 32);
}

static inline void hifc_spdk_piece_add(struct hifc_io *io)
{
    io->device_private[0]++;
}

/* True if it was the last. */
static inline bool hifc_spdk_piece_remove(struct hifc_io *io)
{
    return (uint32_t)--io->device_private[0] == 0;
}

static inline struct hifc_spdk_qpair *hifc_spdk_qpair_of(const struct hifc_io *io)
{
    return (struct hifc_spdk_qpair *)(uintptr_t)io->device_private[3];
}

static inline struct hifc_io *hifc_spdk_link(const struct hifc_io *io, unsigned which)
{
    return (struct hifc_io *)(uintptr_t)io->device_private[which];
}

static inline void hifc_spdk_list_push(struct hifc_spdk_list *list, struct hifc_io *io)
{
    io->device_private[1] = 0;
    io->device_private[2] = (uintptr_t)list->tail;
    if (list->tail) {
        list->tail->device_private[1] = (uintptr_t)io;
    } else {
        list->head = io;
    }
    list->tail = io;
}

static inline void hifc_spdk_list_remove(struct hifc_spdk_list *list, struct hifc_io *io)
{
    struct hifc_io *next = hifc_spdk_link(io, 1), *before = hifc_spdk_link(io, 2);
    if (next) {
        next->device_private[2] = (uintptr_t)before;
    } else {
        list->tail = before;
    }
    if (before) {
        before->device_private[1] = (uintptr_t)next;
    } else {
        list->head = next;
    }
}

static inline void hifc_spdk_finish(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    qpair->inflight--;
    qpair->completed++;
    io->done(io);
}

/* The last piece came back, or there was none. */
static inline void hifc_spdk_settle(struct hifc_spdk_qpair *qpair, struct hifc_io *io)
{
    hifc_spdk_list_remove(&qpair->running, io);
    if (qpair->submitting) {
        hifc_spdk_list_push(&qpair->ready, io);
    } else {
        hifc_spdk_finish(qpair, io);
    }
}

#endif
