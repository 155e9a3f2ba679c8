/* SPDX-License-Identifier: Apache-2.0
 *
 * scripted_device.h - a device in memory that behaves as badly as the contract of device.h allows:
 * completes in random order, a few commands a poll, after a latency, has less room than promised,
 * fails chosen commands, loses its queue pairs, has event descriptors or none.
 *
 * It checks the engine's side of the contract: a command that breaks the geometry ends the test.
 * Fields of the script are set before the engine is created, or while it is idle.
 */
#ifndef HIFC_SCRIPTED_DEVICE_H
#define HIFC_SCRIPTED_DEVICE_H

#include <errno.h>
#include <stdatomic.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "device/command.h"
#include "device/device.h"

enum { SCRIPTED_LOG_MAX = 1 << 16, SCRIPTED_DEPTH_MAX = 256 };

struct scripted_qpair {
    struct hifc_qpair base;
    uint32_t depth, count;
    int timer_fd;
    struct hifc_io *ios[SCRIPTED_DEPTH_MAX]; /* device_private[0]: ready at, ns */
};

struct scripted_device {
    struct hifc_device base;
    uint8_t *bytes;
    /* the script */
    unsigned shuffle_seed; /* 0: in order */
    uint32_t room;         /* commands that a queue pair takes; 0: its depth */
    uint32_t per_poll;     /* completions of one poll; 0: all */
    uint64_t latency_ns;
    bool event_fds;
    _Atomic bool frozen;     /* completes nothing */
    uint64_t fail_offset;  /* a read or write that covers it fails; UINT64_MAX: none */
    int fail_error;
    _Atomic int lose_polls;  /* this many polls, from now, lose their queue pair */
    _Atomic int open_rc;     /* what qpair_open returns */
    /* what was seen */
    uint32_t inflight_max;
    uint64_t write_beside_read_max_bytes;
    uint64_t inflight_bytes[2]; /* reads, others */
    _Atomic uint32_t opens;
    uint32_t log_count;
    struct { uint8_t op; uint64_t offset_bytes; uint32_t length_bytes; } log[SCRIPTED_LOG_MAX];
};

static inline uint64_t scripted_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline int scripted_qpair_open(struct hifc_device *base, uint32_t depth,
                                      uint32_t timeout_ms, struct hifc_qpair **out)
{
    struct scripted_device *device = (struct scripted_device *)base;
    (void)timeout_ms;
    CHECK(depth <= SCRIPTED_DEPTH_MAX);
    device->opens++;
    if (device->open_rc) {
        return device->open_rc;
    }
    struct scripted_qpair *qpair = calloc(1, sizeof *qpair);
    CHECK(qpair);
    qpair->base.device = base;
    qpair->depth = depth;
    qpair->timer_fd = device->event_fds
                          ? timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC) : -1;
    *out = &qpair->base;
    return 0;
}

/* Fires when the first command is ready. */
static inline void scripted_arm(struct scripted_device *device, struct scripted_qpair *qpair)
{
    uint64_t first = UINT64_MAX;
    for (uint32_t i = 0; i < qpair->count; i++) {
        first = qpair->ios[i]->device_private[0] < first ? qpair->ios[i]->device_private[0] : first;
    }
    struct itimerspec when = {0};
    if (first != UINT64_MAX && !device->frozen) {
        when.it_value.tv_sec = (time_t)(first / 1000000000u);
        when.it_value.tv_nsec = (long)(first % 1000000000u) + 1;
    }
    if (qpair->timer_fd >= 0) {
        timerfd_settime(qpair->timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
    }
}

static inline uint32_t scripted_submit(struct hifc_qpair *base, struct hifc_io *const *ios,
                                       uint32_t count)
{
    struct scripted_qpair *qpair = (struct scripted_qpair *)base;
    struct scripted_device *device = (struct scripted_device *)base->device;
    uint32_t room = device->room && device->room < qpair->depth ? device->room : qpair->depth;
    uint32_t taken = 0;
    for (; taken < count && qpair->count < room; taken++) {
        struct hifc_io *io = ios[taken];
        CHECK_EQ(io->error, 0);
        CHECK(hifc_io_check(&base->device->geometry, io, false));
        io->device_private[0] = device->latency_ns ? scripted_now_ns() + device->latency_ns : 0;
        qpair->ios[qpair->count++] = io;
        device->inflight_bytes[io->op != HIFC_IO_READ] += io->length_bytes;
        if (device->inflight_bytes[0] &&
            device->inflight_bytes[1] > device->write_beside_read_max_bytes &&
            io->op == HIFC_IO_WRITE) {
            device->write_beside_read_max_bytes = device->inflight_bytes[1];
        }
        if (device->log_count < SCRIPTED_LOG_MAX) {
            device->log[device->log_count].op = io->op;
            device->log[device->log_count].offset_bytes = io->offset_bytes;
            device->log[device->log_count++].length_bytes = io->length_bytes;
        }
    }
    device->inflight_max = qpair->count > device->inflight_max ? qpair->count
                                                               : device->inflight_max;
    scripted_arm(device, qpair);
    return taken;
}

static inline void scripted_move(struct scripted_device *device, struct hifc_io *io)
{
    uint8_t *at = device->bytes + io->offset_bytes;
    for (uint32_t i = 0; i < io->iov_count; i++) {
        struct iovec *iov = &io->iov[i];
        memcpy(io->op == HIFC_IO_READ ? iov->iov_base : at,
               io->op == HIFC_IO_READ ? at : iov->iov_base, iov->iov_len);
        at += iov->iov_len;
    }
}

static inline void scripted_complete(struct scripted_qpair *qpair, uint32_t index, int error)
{
    struct scripted_device *device = (struct scripted_device *)qpair->base.device;
    struct hifc_io *io = qpair->ios[index];
    for (uint32_t i = index; i + 1 < qpair->count; i++) {
        qpair->ios[i] = qpair->ios[i + 1];
    }
    qpair->count--;
    device->inflight_bytes[io->op != HIFC_IO_READ] -= io->length_bytes;
    bool covers = io->op <= HIFC_IO_WRITE && device->fail_offset >= io->offset_bytes &&
                  device->fail_offset - io->offset_bytes < io->length_bytes;
    if (!error && covers) {
        hifc_io_set(io, device->fail_error, HIFC_SCT_MEDIA, HIFC_SC_UNRECOVERED_READ);
    } else if (error) {
        hifc_io_set(io, error, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
    } else {
        scripted_move(device, io);
    }
    io->done(io);
}

static inline int scripted_poll(struct hifc_qpair *base)
{
    struct scripted_qpair *qpair = (struct scripted_qpair *)base;
    struct scripted_device *device = (struct scripted_device *)base->device;
    if (device->lose_polls > 0) {
        device->lose_polls--;
        while (qpair->count) {
            scripted_complete(qpair, 0, -EIO);
        }
        return -ENXIO;
    }
    uint32_t limit = device->per_poll ? device->per_poll : UINT32_MAX, completed = 0;
    uint64_t now = device->latency_ns ? scripted_now_ns() : 1;
    for (uint32_t tries = qpair->count; tries && completed < limit && !device->frozen; tries--) {
        uint32_t pick = device->shuffle_seed ? (uint32_t)rand_r(&device->shuffle_seed) %
                                               qpair->count : 0;
        if (qpair->ios[pick]->device_private[0] <= now) {
            scripted_complete(qpair, pick, 0);
            completed++;
        }
    }
    scripted_arm(device, qpair);
    return (int)completed;
}

static inline void scripted_qpair_close(struct hifc_qpair *base)
{
    struct scripted_qpair *qpair = (struct scripted_qpair *)base;
    while (qpair->count) {
        scripted_complete(qpair, qpair->count - 1, -ECANCELED);
    }
    if (qpair->timer_fd >= 0) {
        close(qpair->timer_fd);
    }
    free(qpair);
}

static inline int scripted_event_fd(struct hifc_qpair *base)
{
    return ((struct scripted_qpair *)base)->timer_fd;
}

static const struct hifc_device_ops scripted_ops = {
    .scheme = "scripted",
    .qpair_open = scripted_qpair_open,
    .qpair_close = scripted_qpair_close,
    .submit = scripted_submit,
    .poll = scripted_poll,
    .event_fd = scripted_event_fd,
};

/* Static size; the contents start as a pattern of the offset. */
static inline struct scripted_device *scripted_create(uint64_t size_bytes)
{
    struct scripted_device *device = calloc(1, sizeof *device);
    CHECK(device);
    device->bytes = malloc(size_bytes);
    CHECK(device->bytes);
    for (uint64_t i = 0; i < size_bytes; i++) {
        device->bytes[i] = (uint8_t)(i * 2654435761u >> 11);
    }
    device->base.ops = &scripted_ops;
    device->base.geometry = (struct hifc_geometry){
        .size_bytes = size_bytes, .lba_bytes = 512, .max_transfer_bytes = 16384, .max_iov = 4,
        .buffer_align_bytes = 4, .deallocate = true, .direct = true};
    device->fail_offset = UINT64_MAX;
    device->fail_error = -EIO;
    snprintf(device->base.uri, sizeof device->base.uri, "scripted://");
    return device;
}

static inline void scripted_free(struct scripted_device *device)
{
    CHECK_EQ(device->inflight_bytes[0] + device->inflight_bytes[1], 0);
    free(device->bytes);
    free(device);
}

#endif
