/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_controller.c - controllers and their queue pairs: connecting, reset, parting.
 *
 * Several of SPDK's calls (connecting a queue pair, parting, its synchronous admin commands) wait
 * without a bound when a controller stops answering half-way. Hence the rule here: such a call
 * is made only right after the controller answered, to an admin command with a bound of its
 * own or, where there is none yet or it has failed, to a probe of its address (spdk_tcp.c).
 * A controller that does not answer is failed, after which SPDK waits for nothing any more; it
 * comes back by a reset when the next queue pair is opened.
 *
 * Two devices on one target share SPDK's controller, which counts them. Any thread; control_mutex
 * lets one at a time change controllers and their queue pairs and is not taken while commands run.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "device/spdk.h"
#include "util/clock.h"
#include "util/error.h"

#define CONTROLLER_INIT_TIMEOUT_MS 10000 /* of SPDK's admin commands while it brings one up */
#define RESET_PAUSE_MS 20000             /* after one that failed */
#define QUEUE_ENTRIES_MAX 4096u
#define QPAIR_NUMBERS_MAX 16u /* tried for one queue pair */
#define ATTACH_TRIES 10u
#define ATTACH_PAUSE_MS 100

/* Of DPDK's rte_memory.h; what its VFIO code registers, by its name there. */
int rte_mem_event_callback_unregister(const char *name, void *argument);
#define DPDK_VFIO_CALLBACK "vfio_mem_event_clb"

static pthread_mutex_t control_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint32_t pcie_attached; /* devices; control_mutex */

/* ---- controllers; control_mutex is held ------------------------------------------------------ */

static int probe(const struct hifc_spdk_device *device)
{
    switch (device->target.trid.trtype) {
    case SPDK_NVME_TRANSPORT_TCP:
        return hifc_spdk_tcp_probe(&device->target);
    case SPDK_NVME_TRANSPORT_PCIE:
        return hifc_spdk_check_pcie(&device->target);
    default:
        return 0;
    }
}

/* SPDK waits for a drive as long as it says that it may take (CAP.TO, often 7 s and more). One
 * that did not come back is not waited for again at once, so that a loss is known soon. */
static int reset(struct hifc_spdk_device *device)
{
    if (hifc_spdk_is_gone(device) || (int64_t)hifc_now_ms() < device->reset_after_ms) {
        return -ENODEV;
    }
    if (spdk_nvme_ctrlr_reset(device->ctrlr) != 0) {
        device->reset_after_ms = (int64_t)hifc_now_ms() + RESET_PAUSE_MS;
        return -ENODEV;
    }
    return 0;
}

/* Brings a failed controller back. */
static int revive(struct hifc_spdk_device *device)
{
    int rc = probe(device);
    if (rc) {
        return rc;
    }
    hifc_spdk_log_clear();
    if (reset(device) != 0) {
        return hifc_fail(-ENODEV, "%s: the controller cannot be reset: %s; check the target, or "
                         "whether the drive is still there", device->target.where,
                         hifc_spdk_log_text());
    }
    return 0;
}

static int ensure_alive(struct hifc_spdk_device *device)
{
    if (hifc_spdk_note_leaving(device) || hifc_spdk_is_gone(device)) {
        return hifc_fail(-ENODEV, "%s: the drive was unplugged; close the namespace, then put the "
                         "drive back, bind and open it", device->target.where);
    }
    return spdk_nvme_ctrlr_is_failed(device->ctrlr) ? revive(device) : hifc_spdk_ping(device);
}

static void fill_opts(const struct hifc_spdk_target *target, struct spdk_nvme_ctrlr_opts *opts)
{
    spdk_nvme_ctrlr_get_default_ctrlr_opts(opts, sizeof(*opts));
    opts->io_queue_size = QUEUE_ENTRIES_MAX; /* SPDK lowers it to what the controller has */
    opts->admin_timeout_ms = CONTROLLER_INIT_TIMEOUT_MS;
    opts->disable_error_logging = true; /* every failed command is told with its status anyway */
    if (target->hostnqn[0]) {
        snprintf(opts->hostnqn, sizeof(opts->hostnqn), "%s", target->hostnqn);
    } else if (strncmp(opts->hostnqn, "nqn.", 4) != 0) {
        char made_up[sizeof(opts->hostnqn)]; /* SPDK 20.07 forgets the prefix; the kernel minds */
        snprintf(made_up, sizeof(made_up), "nqn.%.200s", opts->hostnqn);
        snprintf(opts->hostnqn, sizeof(opts->hostnqn), "%s", made_up);
    }
}

static int fail_connect(const struct hifc_spdk_target *target)
{
    struct rlimit locked;
    if (target->pcie && strstr(hifc_spdk_log_text(), "Cannot allocate memory") &&
        getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
        return hifc_fail(-EPERM, "%s: this user may lock %llu bytes of memory, and all that a drive "
                         "is to reach counts; raise it by LimitMEMLOCK=infinity in a service's "
                         "unit, or hifc-admin install and a new login (ulimit -l shows it)",
                         target->where, (unsigned long long)locked.rlim_cur);
    }
    if (target->pcie && strstr(hifc_spdk_log_text(), "Permission denied")) {
        return hifc_fail(-EACCES, "%s: this user may not open its group in /dev/vfio; join group "
                         "hifc and log in anew, or: hifc-admin bind %s --user NAME", target->where,
                         target->where);
    }
    if (target->pcie) {
        return hifc_fail(-ENODEV, "%s: SPDK cannot take it: %s; check that it is an NVMe drive and "
                         "that this user may open its group in /dev/vfio",
                         target->where, hifc_spdk_log_text());
    }
    return hifc_fail(-ENODEV, "%s: the target answers but refused the connection: %s; check the "
                     "NQN of the subsystem, that this host may use it (hostnqn=), and huge pages",
                     target->where, hifc_spdk_log_text());
}

/* Whether VFIO refused the drive itself, as it does while the kernel still holds its lock: for a
 * moment after it was plugged in or bound. DPDK then leaves a callback behind on account of which
 * it would refuse every later drive of this process. */
static bool was_locked(const struct hifc_spdk_target *target)
{
    if (!target->pcie || !strstr(hifc_spdk_log_text(), "Getting a vfio_dev_fd")) {
        return false;
    }
    if (!pcie_attached) {
        (void)rte_mem_event_callback_unregister(DPDK_VFIO_CALLBACK, NULL);
    }
    return true;
}

static int attach(struct hifc_spdk_device *device)
{
    struct spdk_nvme_ctrlr_opts opts;
    fill_opts(&device->target, &opts);
    for (uint32_t tries = 0; tries < ATTACH_TRIES; tries++) {
        hifc_spdk_log_clear();
        device->ctrlr = spdk_nvme_connect(&device->target.trid, &opts, sizeof(opts));
        if (device->ctrlr) {
            pcie_attached += device->target.pcie;
            return 0;
        }
        if (!was_locked(&device->target)) {
            break;
        }
        usleep(ATTACH_PAUSE_MS * 1000);
    }
    return fail_connect(&device->target);
}

int hifc_spdk_connect(struct hifc_spdk_device *device)
{
    pthread_mutex_lock(&control_mutex);
    int rc = probe(device);
    rc = rc ? rc : attach(device);
    if (!rc) {
        rc = hifc_spdk_watch(device);
        /* Another device may have connected it before, and it may have failed since. */
        rc = rc ? rc : ensure_alive(device);
    }
    pthread_mutex_unlock(&control_mutex);
    if (rc && device->ctrlr) {
        hifc_spdk_disconnect(device);
    }
    return rc;
}

static void free_kept(struct hifc_spdk_device *device);

void hifc_spdk_disconnect(struct hifc_spdk_device *device)
{
    pthread_mutex_lock(&control_mutex);
    hifc_spdk_unwatch(device);
    if (!spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        (void)hifc_spdk_ping(device); /* parting waits for answers */
    }
    free_kept(device);
    spdk_nvme_detach(device->ctrlr);
    device->ctrlr = NULL;
    pcie_attached -= device->target.pcie;
    pthread_mutex_unlock(&control_mutex);
}

/* ---- queue pairs ----------------------------------------------------------------------------- */

/* A reset in SPDK 20.07 counts the numbers of all queue pairs as free, also of those that live on.
 * So a lost queue pair is not freed but kept, and connected again under its number; and a new one
 * that the controller refuses keeps its wrong number from being tried again. */

/* control_mutex is held. */
static bool take_kept(struct hifc_spdk_device *device, uint32_t entries,
                      struct spdk_nvme_qpair **out)
{
    for (uint32_t i = 0; i < HIFC_SPDK_KEPT_MAX; i++) {
        struct hifc_spdk_kept *kept = &device->kept[i];
        if (kept->qpair && kept->entries == entries) {
            *out = kept->qpair;
            kept->qpair = NULL;
            if (spdk_nvme_ctrlr_reconnect_io_qpair(*out) == 0) {
                return true;
            }
            spdk_nvme_ctrlr_free_io_qpair(*out);
        }
    }
    *out = NULL;
    return false;
}

static void free_kept(struct hifc_spdk_device *device)
{
    for (uint32_t i = 0; i < HIFC_SPDK_KEPT_MAX; i++) {
        if (device->kept[i].qpair) {
            spdk_nvme_ctrlr_free_io_qpair(device->kept[i].qpair);
            device->kept[i].qpair = NULL;
        }
    }
}

static struct spdk_nvme_qpair *alloc_new(struct hifc_spdk_device *device,
                                         const struct spdk_nvme_io_qpair_opts *opts)
{
    struct spdk_nvme_qpair *refused[QPAIR_NUMBERS_MAX], *qpair = NULL;
    uint32_t count = 0;
    while (count < QPAIR_NUMBERS_MAX && !spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        qpair = spdk_nvme_ctrlr_alloc_io_qpair(device->ctrlr, opts, sizeof(*opts));
        if (!qpair || spdk_nvme_ctrlr_connect_io_qpair(device->ctrlr, qpair) == 0) {
            break;
        }
        refused[count++] = qpair;
        qpair = NULL;
        if (hifc_spdk_ping(device) != 0) {
            break; /* not the number: it is gone */
        }
    }
    while (count) {
        spdk_nvme_ctrlr_free_io_qpair(refused[--count]);
    }
    return qpair;
}

static int try_alloc(struct hifc_spdk_device *device, uint32_t entries,
                     struct spdk_nvme_qpair **out, uint32_t *entries_out)
{
    struct spdk_nvme_io_qpair_opts opts;
    int rc = ensure_alive(device);
    if (rc) {
        return rc;
    }
    spdk_nvme_ctrlr_get_default_io_qpair_opts(device->ctrlr, &opts, sizeof(opts));
    opts.io_queue_size = entries < opts.io_queue_size ? entries : opts.io_queue_size;
    /* Commands that SPDK cuts in two, or holds back for a moment, take requests of their own. */
    opts.io_queue_requests = 2 * opts.io_queue_size + 2 * HIFC_IO_IOV_MAX;
    opts.create_only = true; /* SPDK 20.07 keeps a dangling pointer when it fails to connect one */
    opts.delay_cmd_submit = true; /* one doorbell for all that was submitted before a poll */
    *entries_out = opts.io_queue_size;
    if (take_kept(device, opts.io_queue_size, out)) {
        return 0;
    }
    hifc_spdk_log_clear();
    *out = alloc_new(device, &opts);
    return *out ? 0
                : hifc_fail(-ENODEV, "%s: no queue pair of %u entries: %s; the controller may have "
                            "no more of them, or huge pages are short", device->target.where,
                            *entries_out, hifc_spdk_log_text());
}

int hifc_spdk_qpair_alloc(struct hifc_spdk_device *device, uint32_t entries,
                          struct spdk_nvme_qpair **out, uint32_t *entries_out)
{
    pthread_mutex_lock(&control_mutex);
    int rc = try_alloc(device, entries, out, entries_out);
    if (rc == -ENODEV && spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        rc = try_alloc(device, entries, out, entries_out); /* it was lost only just now: reset it */
    }
    pthread_mutex_unlock(&control_mutex);
    return rc;
}

void hifc_spdk_qpair_free(struct hifc_spdk_device *device, struct spdk_nvme_qpair *qpair)
{
    pthread_mutex_lock(&control_mutex);
    /* Deleting a PCIe queue needs a controller that answers. One that does not is stopped by a
     * reset, or nobody may touch the memory of its commands again. */
    if (device->target.pcie &&
        (spdk_nvme_ctrlr_is_failed(device->ctrlr) || hifc_spdk_ping(device) != 0)) {
        (void)reset(device);
    }
    spdk_nvme_ctrlr_free_io_qpair(qpair);
    pthread_mutex_unlock(&control_mutex);
}

bool hifc_spdk_qpair_disconnect(struct hifc_spdk_device *device, struct spdk_nvme_qpair *qpair)
{
    bool stopped = true;
    pthread_mutex_lock(&control_mutex);
    if (device->target.pcie) {
        stopped = reset(device) == 0;
        if (stopped) {
            (void)spdk_nvme_qpair_process_completions(qpair, 0); /* aborts what was in it */
        }
    } else {
        spdk_nvme_ctrlr_disconnect_io_qpair(qpair);
    }
    pthread_mutex_unlock(&control_mutex);
    return stopped;
}

bool hifc_spdk_qpair_keep(struct hifc_spdk_device *device, struct spdk_nvme_qpair *qpair,
                          uint32_t entries)
{
    bool kept = false;
    pthread_mutex_lock(&control_mutex);
    for (uint32_t i = 0; i < HIFC_SPDK_KEPT_MAX && !kept; i++) {
        if (!device->kept[i].qpair) {
            device->kept[i] = (struct hifc_spdk_kept){qpair, entries};
            kept = true;
        }
    }
    pthread_mutex_unlock(&control_mutex);
    return kept;
}
