/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_qpair.c - queue pairs of SPDK.
 *
 * One thread at a time submits (spdk_submit.c) and polls.
 *
 * Invariants:
 *   - every command taken is in exactly one list: running, oldest first, or ready, which the
 *     next poll hands out: what was refused, and what SPDK completed from within submit;
 *   - io->done is called when the last piece came back, from within poll or close;
 *   - once lost, a queue pair of SPDK is disconnected, which stops every transfer, before its
 *     commands complete with an error.
 *
 * A command that outlives the timeout loses the queue pair: the transport has no other way to get
 * the buffer back. The engine above opens another one.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include <spdk/likely.h>

#include "device/command.h"
#include "device/spdk_qpair.h"
#include "util/error.h"

#define DEPTH_MAX 4096u
/* Polls between looks at the clock: some microseconds each, and one at most every nap when idle. */
#define CLOCK_EVERY_POLLS 64u

static int deliver(struct hifc_spdk_qpair *qpair)
{
    struct hifc_io *io;
    int count = 0;
    struct hifc_spdk_list ready = qpair->ready;
    qpair->ready = (struct hifc_spdk_list){NULL, NULL};
    while ((io = ready.head)) {
        hifc_spdk_list_remove(&ready, io);
        hifc_spdk_finish(qpair, io);
        count++;
    }
    return count;
}

/* ---- poll ------------------------------------------------------------------------------------ */

/* Whatever SPDK still has completes. */
static void release(struct hifc_spdk_qpair *qpair)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)qpair->base.device;
    struct spdk_nvme_qpair *spdk_qpair = qpair->qpair;
    qpair->qpair = NULL;
    hifc_spdk_qpair_free(device, spdk_qpair);
    /* None should be left; one that SPDK forgot is not to be waited for in vain. */
    while (qpair->running.head) {
        struct hifc_io *io = qpair->running.head;
        hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
        hifc_spdk_settle(qpair, io);
    }
}

/* Lost because the drive leaves, which still finishes what it has. */
static bool leaves_at_work(const struct hifc_spdk_qpair *qpair)
{
    return qpair->qpair && qpair->pieces > 0 &&
           hifc_spdk_may_finish((const struct hifc_spdk_device *)qpair->base.device);
}

static int lose(struct hifc_spdk_qpair *qpair, int code)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)qpair->base.device;
    qpair->lost = code;
    if (qpair->qpair) {
        /* Other queue pairs of a drive that leaves may be at work: no reset without need. */
        bool stopped = (qpair->pieces == 0 && hifc_spdk_is_leaving(device)) ||
                       hifc_spdk_qpair_disconnect(device, qpair->qpair);
        if (stopped && qpair->pieces == 0 &&
            hifc_spdk_qpair_keep(device, qpair->qpair, qpair->entries)) {
            qpair->qpair = NULL;
        } else {
            release(qpair);
        }
    }
    deliver(qpair);
    return code;
}

/* Marks what is too old; true if there is any. */
static bool find_overdue(struct hifc_spdk_qpair *qpair)
{
    struct hifc_io *io = qpair->running.head;
    qpair->now_ms = hifc_spdk_clock_ms();
    if (!io || qpair->now_ms - hifc_spdk_start_ms(io) <= qpair->timeout_ms) {
        return false;
    }
    for (; io && qpair->now_ms - hifc_spdk_start_ms(io) > qpair->timeout_ms;
         io = hifc_spdk_link(io, 1)) {
        hifc_io_set(io, -ETIMEDOUT, HIFC_SCT_GENERIC, HIFC_SC_ABORTED);
    }
    return true;
}

int hifc_spdk_poll(struct hifc_qpair *base)
{
    struct hifc_spdk_qpair *qpair = (struct hifc_spdk_qpair *)base;
    qpair->completed = 0;
    if (spdk_unlikely(qpair->ready.head != NULL)) {
        deliver(qpair);
    }
    if (spdk_unlikely(qpair->lost && !leaves_at_work(qpair))) {
        return lose(qpair, qpair->lost);
    }
    int rc = spdk_nvme_qpair_process_completions(qpair->qpair, 0);
    if (spdk_unlikely(rc < 0)) {
        return lose(qpair, -ENODEV);
    }
    if (qpair->polls++ % CLOCK_EVERY_POLLS == 0 && qpair->timeout_ms && find_overdue(qpair)) {
        return lose(qpair, -ETIMEDOUT);
    }
    return (int)qpair->completed;
}

/* ---- open and close -------------------------------------------------------------------------- */

/* The namespace again, which may have changed while the controller was away. */
static int check_namespace(struct hifc_spdk_device *device, struct spdk_nvme_ns **out)
{
    const struct hifc_geometry *geometry = &device->base.geometry;
    struct spdk_nvme_ns *ns = spdk_nvme_ctrlr_get_ns(device->ctrlr, device->target.nsid);
    if (!ns || !spdk_nvme_ns_is_active(ns) ||
        spdk_nvme_ns_get_sector_size(ns) != geometry->lba_bytes ||
        spdk_nvme_ns_get_num_sectors(ns) * geometry->lba_bytes < geometry->size_bytes) {
        return hifc_fail(-ENODEV, "%s: namespace %u is not what it was when it was opened; open it "
                         "again", device->target.where, device->target.nsid);
    }
    *out = ns;
    return 0;
}

int hifc_spdk_qpair_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                         struct hifc_qpair **out)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    if (depth == 0 || depth > DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         DEPTH_MAX);
    }
    struct hifc_spdk_qpair *qpair = calloc(1, sizeof(*qpair));
    if (!qpair) {
        return hifc_fail(-ENOMEM, "%s: out of memory for a queue pair", base->uri);
    }
    /* Room for commands that become several; one entry of a PCIe queue always stays empty. */
    int rc = hifc_spdk_qpair_alloc(device, 2 * depth + 1, &qpair->qpair, &qpair->entries);
    rc = rc ? rc : check_namespace(device, &qpair->ns);
    if (rc) {
        if (qpair->qpair) {
            hifc_spdk_qpair_free(device, qpair->qpair);
        }
        free(qpair);
        return rc;
    }
    qpair->base.device = base;
    qpair->depth = depth;
    qpair->pieces_max = device->target.pcie ? qpair->entries - 1 : qpair->entries;
    qpair->timeout_ms = command_timeout_ms;
    qpair->lba_shift = (uint32_t)__builtin_ctz(base->geometry.lba_bytes);
    qpair->boundary_bytes = base->geometry.boundary_bytes;
    qpair->vectored = device->target.pcie;
    qpair->read_only = device->read_only;
    *out = &qpair->base;
    return 0;
}

void hifc_spdk_qpair_close(struct hifc_qpair *base)
{
    struct hifc_spdk_qpair *qpair = (struct hifc_spdk_qpair *)base;
    if (hifc_forked_since(base->device->fork_generation)) {
        return;
    }
    qpair->closing = true;
    deliver(qpair);
    if (qpair->qpair) {
        release(qpair);
    }
    deliver(qpair);
    free(qpair);
}

int hifc_spdk_event_fd(struct hifc_qpair *qpair)
{
    (void)qpair;
    return -1; /* SPDK polls */
}
