/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk.h - what the files of the SPDK device share:
 *   spdk.c         opening, geometry, closing, the tables of functions
 *   spdk_uri.c     what a URI names
 *   spdk_lock.c    who owns it
 *   spdk_env.c     the process-wide environment and registered memory
 *   spdk_log.c     SPDK's and DPDK's messages
 *   spdk_tcp.c     whether an NVMe/TCP target is there, found out without SPDK
 *   spdk_watch.c   the thread that keeps controllers alive
 *   spdk_admin.c   admin commands with a bound
 *   spdk_controller.c  connecting, reset, queue pairs as SPDK has them
 *   spdk_qpair.c   queue pairs: their life, poll, timeouts
 *   spdk_submit.c  commands on their way down and back
 */
#ifndef HIFC_DEVICE_SPDK_H
#define HIFC_DEVICE_SPDK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#include <spdk/env.h>
#include <spdk/nvme.h>

#include "device/device.h"
#include "util/clock.h"

/* What a URI names. */
struct hifc_spdk_target {
    struct spdk_nvme_transport_id trid;
    uint32_t nsid;
    bool pcie;
    char hostnqn[224]; /* empty: one that SPDK makes up */
    char where[300];   /* "127.0.0.1:4420/nqn..." or the BDF: for messages, and what is locked */
};

struct hifc_spdk_lock {
    int fd; /* -1: not held */
    char path[300];
};

/* A lost queue pair, to be connected again (spdk_controller.c). */
#define HIFC_SPDK_KEPT_MAX 4u
struct hifc_spdk_kept {
    struct spdk_nvme_qpair *qpair; /* NULL: none */
    uint32_t entries;
};

struct hifc_spdk_device {
    struct hifc_device base;
    struct hifc_spdk_target target;
    struct spdk_nvme_ctrlr *ctrlr;
    bool read_only;
    struct hifc_spdk_lock lock;
    int64_t reset_after_ms; /* no reset before; see spdk_controller.c */
    _Atomic uint32_t leaving_since_ms; /* 0: it stays; see spdk_watch.c */
    struct hifc_spdk_kept kept[HIFC_SPDK_KEPT_MAX];
    struct hifc_spdk_device *next; /* of all open ones, see spdk_watch.c */
};

static inline uint32_t hifc_spdk_clock_ms(void)
{
    return (uint32_t)hifc_now_ms_coarse();
}

/* Whether the kernel asks us to let the drive go, because somebody unplugs it. It still works. */
static inline bool hifc_spdk_is_leaving(const struct hifc_spdk_device *device)
{
    return atomic_load_explicit(&device->leaving_since_ms, memory_order_relaxed) != 0;
}

/* ---- spdk_uri.c ---- */
int hifc_spdk_target_parse(const struct hifc_uri *uri, struct hifc_spdk_target *out);
/* Whether SPDK may have a PCIe drive, or what is to be done first. */
int hifc_spdk_check_pcie(const struct hifc_spdk_target *target);

/* ---- spdk_lock.c ---- */
/* Takes the lock that says which process owns the namespace. -EBUSY names who has it. */
int hifc_spdk_lock_take(const struct hifc_spdk_target *target, bool shared,
                        struct hifc_spdk_lock *lock);
void hifc_spdk_lock_drop(struct hifc_spdk_lock *lock);

/* ---- spdk_env.c ---- */
/* Starts the environment, once a process. */
int hifc_spdk_env_start(void);
int hifc_spdk_register(struct hifc_device *device, void *base, uint64_t size_bytes);
int hifc_spdk_unregister(struct hifc_device *device, void *base, uint64_t size_bytes);
/* Whether all of it is registered; lock-free. *index: where the last look-up ended, a hint. */
bool hifc_spdk_is_registered(const void *memory, uint64_t size_bytes, uint32_t *index);

/* ---- spdk_log.c ---- */
/* Before the environment starts: from here on messages are kept here. What SPDK prints to stdout
 * while it starts is to go to *stream. One thread at a time. */
int hifc_spdk_log_start(FILE **stream);
/* Forgets, and tells, what SPDK said on this thread: its warnings and errors, one after another. */
void hifc_spdk_log_clear(void);
const char *hifc_spdk_log_text(void);

/* ---- spdk_tcp.c ---- */
/* 0 when an NVMe/TCP target answers there, else the error says what does not. */
int hifc_spdk_tcp_probe(const struct hifc_spdk_target *target);

/* ---- spdk_watch.c ---- */
/* Keeps the device's controller alive from now on; one thread at a time. */
int hifc_spdk_watch(struct hifc_spdk_device *device);
void hifc_spdk_unwatch(struct hifc_spdk_device *device);
/* A drive that was torn out: its registers read as ones. */
bool hifc_spdk_is_gone(const struct hifc_spdk_device *device);
/* Asks SPDK whether the kernel wants it back, so that is_leaving tells. */
bool hifc_spdk_note_leaving(struct hifc_spdk_device *device);
/* Whether a drive that leaves still has time to finish its commands. */
bool hifc_spdk_may_finish(const struct hifc_spdk_device *device);

/* ---- spdk_admin.c ---- */
/* Whether the controller answers; one that does not is failed. */
int hifc_spdk_ping(struct hifc_spdk_device *device);
int hifc_spdk_health(struct hifc_device *device, uint8_t log[512]);
int hifc_spdk_passthru(struct hifc_device *device, struct hifc_nvme_passthru *admin);

/* ---- spdk_controller.c ---- */
int hifc_spdk_connect(struct hifc_spdk_device *device);
void hifc_spdk_disconnect(struct hifc_spdk_device *device);
/* Allocates an I/O queue pair, after a reset of the controller if that has failed. */
int hifc_spdk_qpair_alloc(struct hifc_spdk_device *device, uint32_t entries,
                          struct spdk_nvme_qpair **out, uint32_t *entries_out);
/* Frees it; what is outstanding completes. */
void hifc_spdk_qpair_free(struct hifc_spdk_device *device, struct spdk_nvme_qpair *qpair);
/* Stops a lost one: nothing is transferred any more, and what is outstanding completes, unless SPDK
 * had it in a queue of its own. False where it could not be stopped: free it. */
bool hifc_spdk_qpair_disconnect(struct hifc_spdk_device *device, struct spdk_nvme_qpair *qpair);
/* Keeps a stopped one, with nothing outstanding, for a later alloc; false if there is no room. */
bool hifc_spdk_qpair_keep(struct hifc_spdk_device *device, struct spdk_nvme_qpair *qpair,
                          uint32_t entries);

/* ---- spdk_qpair.c, spdk_submit.c ---- */
int hifc_spdk_qpair_open(struct hifc_device *device, uint32_t depth, uint32_t command_timeout_ms,
                         struct hifc_qpair **out);
void hifc_spdk_qpair_close(struct hifc_qpair *qpair);
uint32_t hifc_spdk_submit(struct hifc_qpair *qpair, struct hifc_io *const *ios, uint32_t count);
int hifc_spdk_poll(struct hifc_qpair *qpair);
int hifc_spdk_event_fd(struct hifc_qpair *qpair);

#endif
