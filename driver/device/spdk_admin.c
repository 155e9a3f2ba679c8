/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_admin.c - controllers: connecting, keeping alive, admin commands, reset, parting.
 *
 * One thread a process, "hifc-admin", polls the admin queue of every controller each
 * ADMIN_POLL_MS: that sends keep-alives, without which a fabrics target hangs up after 10 s, and
 * notices a connection that broke. It is not pinned, all signals are blocked in it, and it runs as
 * long as there is a device.
 *
 * Several of SPDK's calls (connecting a queue pair, parting, its synchronous admin commands) wait
 * without a bound when a controller stops answering half-way. Hence the rule here: such a call
 * is made only right after the controller answered, to an admin command with a bound of its
 * own or, where there is none yet or it has failed, to a probe of its address (spdk_tcp.c).
 * A controller that does not answer is failed, after which SPDK waits for nothing any more; it
 * comes back by a reset when the next queue pair is opened.
 *
 * Two devices on one target share SPDK's controller, which counts them. control_mutex lets one
 * thread at a time change controllers and their queue pairs; list_mutex guards the list that the
 * admin thread walks. Neither is taken while commands run.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/command.h"
#include "device/spdk.h"
#include "error.h"

#define ADMIN_POLL_MS 100
#define ADMIN_TIMEOUT_MS 5000      /* of our own admin commands */
#define ADMIN_INIT_TIMEOUT_MS 10000 /* of SPDK's, while it brings a controller up */
#define ADMIN_NAP_NS 20000
#define RESET_PAUSE_MS 20000 /* after one that failed */
#define HEALTH_LOG_BYTES 512u
#define QUEUE_ENTRIES_MAX 4096u
#define QPAIR_NUMBERS_MAX 16u /* tried for one queue pair */

static pthread_mutex_t control_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t list_changed;
static struct hifc_spdk_device *devices; /* list_mutex */
static bool thread_runs, thread_stops;   /* list_mutex; started and joined under control_mutex */
static pthread_t thread;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- the admin thread ------------------------------------------------------------------------ */

/* A drive that was torn out: its registers read as ones. */
static bool is_gone(const struct hifc_spdk_device *device)
{
    return device->target.pcie &&
           spdk_nvme_ctrlr_get_regs_csts(device->ctrlr).raw == 0xffffffffu;
}

/* One that is gone, or that the kernel asks us to let go because somebody unplugs it. */
static bool is_leaving(const struct hifc_spdk_device *device)
{
    return is_gone(device) ||
           (device->target.pcie &&
            spdk_pci_device_is_removed(spdk_nvme_ctrlr_get_pci_device(device->ctrlr)));
}

/* A controller that leaves, or whose admin queue is gone, is failed, so that queue pairs notice at
 * their next poll. */
static void tend(struct hifc_spdk_device *device)
{
    struct spdk_nvme_ctrlr *ctrlr = device->ctrlr;
    if (spdk_nvme_ctrlr_is_failed(ctrlr)) {
        return;
    }
    bool lost = is_leaving(device) || spdk_nvme_ctrlr_process_admin_completions(ctrlr) < 0;
    if (lost && !spdk_nvme_ctrlr_is_failed(ctrlr)) {
        spdk_nvme_ctrlr_fail(ctrlr);
    }
}

static void *admin_main(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&list_mutex);
    while (!thread_stops) {
        struct timespec until;
        for (struct hifc_spdk_device *device = devices; device; device = device->next) {
            tend(device);
        }
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += ADMIN_POLL_MS * 1000000l;
        until.tv_sec += until.tv_nsec / 1000000000l;
        until.tv_nsec %= 1000000000l;
        pthread_cond_timedwait(&list_changed, &list_mutex, &until);
    }
    pthread_mutex_unlock(&list_mutex);
    return NULL;
}

/* control_mutex is held. */
static int start_thread(void)
{
    pthread_condattr_t monotonic;
    sigset_t all, before;
    if (thread_runs) {
        return 0;
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&list_changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    thread_stops = false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&thread, NULL, admin_main, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        return hifc_fail(-rc, "spdk: cannot start the admin thread: %s", strerror(rc));
    }
    pthread_setname_np(thread, "hifc-admin");
    thread_runs = true;
    return 0;
}

/* control_mutex is held. */
static void stop_thread(void)
{
    pthread_mutex_lock(&list_mutex);
    thread_stops = true;
    pthread_cond_signal(&list_changed);
    pthread_mutex_unlock(&list_mutex);
    pthread_join(thread, NULL);
    pthread_cond_destroy(&list_changed);
    thread_runs = false;
}

static int list_add(struct hifc_spdk_device *device)
{
    int rc = start_thread();
    if (!rc) {
        pthread_mutex_lock(&list_mutex);
        device->next = devices;
        devices = device;
        pthread_mutex_unlock(&list_mutex);
    }
    return rc;
}

static void list_remove(struct hifc_spdk_device *device)
{
    pthread_mutex_lock(&list_mutex);
    struct hifc_spdk_device **link = &devices;
    while (*link && *link != device) {
        link = &(*link)->next;
    }
    if (*link) {
        *link = device->next;
    }
    bool last = devices == NULL;
    pthread_mutex_unlock(&list_mutex);
    if (last && thread_runs) {
        stop_thread();
    }
}

/* A child of fork() has no such thread, and would keep the locks after we are gone. */
static void before_fork(void)
{
    pthread_mutex_lock(&list_mutex);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&list_mutex);
}

static void after_fork_child(void)
{
    for (struct hifc_spdk_device *device = devices; device; device = device->next) {
        close(device->lock.fd);
    }
    devices = NULL;
    thread_runs = false;
    pthread_mutex_unlock(&list_mutex);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, after_fork_child);
}

/* ---- admin commands with a bound ------------------------------------------------------------- */

enum { WAITING, DONE, GIVEN_UP };

/* Who gives up leaves it to the completion, which comes at the latest when the controller goes. */
struct admin_command {
    _Atomic int state;
    uint8_t sct, sc;
    void *data; /* the controller writes here */
};

static void free_command(struct admin_command *command)
{
    spdk_dma_free(command->data);
    free(command);
}

static void command_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct admin_command *command = argument;
    command->sct = completion->status.sct;
    command->sc = completion->status.sc;
    if (atomic_exchange(&command->state, DONE) == GIVEN_UP) {
        free_command(command);
    }
}

static struct admin_command *new_command(uint32_t data_bytes)
{
    struct admin_command *command = calloc(1, sizeof(*command));
    if (command && data_bytes) {
        command->data = spdk_dma_zmalloc(data_bytes, 4096, NULL);
        if (!command->data) {
            free(command);
            command = NULL;
        }
    }
    return command;
}

/* 0 when an answer came, be it an error of the command; the command is then the caller's. */
static int wait_command_for(struct spdk_nvme_ctrlr *ctrlr, struct admin_command *command,
                            uint32_t timeout_ms)
{
    int64_t end_ms = now_ms() + timeout_ms;
    int rc = 0;
    while (atomic_load(&command->state) == WAITING && rc >= 0 && now_ms() < end_ms) {
        rc = spdk_nvme_ctrlr_process_admin_completions(ctrlr);
        if (rc == 0) {
            nanosleep(&(struct timespec){.tv_nsec = ADMIN_NAP_NS}, NULL);
        }
    }
    if (atomic_exchange(&command->state, GIVEN_UP) != DONE) {
        return rc < 0 ? -ENODEV : -ETIMEDOUT;
    }
    bool aborted = command->sct == HIFC_SCT_GENERIC && (command->sc == HIFC_SC_ABORTED ||
                                                        command->sc == HIFC_SC_ABORTED_SQ_DELETION);
    if (aborted) {
        free_command(command);
        return -ENODEV;
    }
    return 0;
}

static int wait_command(struct spdk_nvme_ctrlr *ctrlr, struct admin_command *command)
{
    return wait_command_for(ctrlr, command, ADMIN_TIMEOUT_MS);
}

/* Whether the controller answers; one that does not is failed. */
static int ping(struct hifc_spdk_device *device)
{
    struct admin_command *command = new_command(0);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: out of memory", device->target.where);
    }
    int rc = spdk_nvme_ctrlr_cmd_get_feature(device->ctrlr, SPDK_NVME_FEAT_NUMBER_OF_QUEUES, 0,
                                             NULL, 0, command_done, command);
    if (rc) {
        free_command(command);
        rc = -ENODEV;
    } else {
        rc = wait_command(device->ctrlr, command);
        if (!rc) {
            free_command(command);
        }
    }
    if (rc && !spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        spdk_nvme_ctrlr_fail(device->ctrlr);
    }
    return rc == 0 ? 0
           : rc == -ETIMEDOUT
               ? hifc_fail(rc, "%s: the controller did not answer within %d ms; check that the "
                           "target runs and is not stopped", device->target.where, ADMIN_TIMEOUT_MS)
               : hifc_fail(rc, "%s: the connection to the controller broke; check that the target "
                           "runs, then open it again", device->target.where);
}

int hifc_spdk_health(struct hifc_device *base, uint8_t log[512])
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    const char *where = device->target.where;
    if (hifc_forked_since(base->fork_generation)) {
        return hifc_fail(-EPERM, "%s: it belongs to the parent of this process", where);
    }
    struct admin_command *command = new_command(HEALTH_LOG_BYTES);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: no huge page for its health log", where);
    }
    int rc = spdk_nvme_ctrlr_cmd_get_log_page(device->ctrlr, SPDK_NVME_LOG_HEALTH_INFORMATION,
                                              SPDK_NVME_GLOBAL_NS_TAG, command->data,
                                              HEALTH_LOG_BYTES, 0, command_done, command);
    if (rc) {
        free_command(command);
        return hifc_fail(-ENODEV, "%s: the controller is gone; check the target, then open it "
                         "again", where);
    }
    rc = wait_command(device->ctrlr, command);
    if (rc) {
        return hifc_fail(rc, "%s: the controller did not give its health log within %d ms; check "
                         "that the target runs", where, ADMIN_TIMEOUT_MS);
    }
    if (command->sct || command->sc) {
        rc = hifc_fail(-EIO, "%s: health log: %s (status code type %#x, status code %#x)", where,
                       hifc_nvme_status_text(command->sct, command->sc), command->sct, command->sc);
    } else {
        memcpy(log, command->data, HEALTH_LOG_BYTES);
    }
    free_command(command);
    return rc;
}

int hifc_spdk_admin(struct hifc_device *base, struct hifc_nvme_admin *admin)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    const char *where = device->target.where;
    uint32_t timeout_ms = admin->timeout_ms ? admin->timeout_ms : ADMIN_TIMEOUT_MS;
    if (hifc_forked_since(base->fork_generation)) {
        return hifc_fail(-EPERM, "%s: it belongs to the parent of this process", where);
    }
    struct admin_command *command = new_command(admin->data_bytes);
    if (!command) {
        return hifc_fail(-ENOMEM, "%s: no huge page for an admin command", where);
    }
    struct spdk_nvme_cmd raw = {.opc = admin->opcode, .nsid = admin->nsid, .cdw10 = admin->cdw10};
    int rc = spdk_nvme_ctrlr_cmd_admin_raw(device->ctrlr, &raw, command->data, admin->data_bytes,
                                           command_done, command);
    if (rc) {
        free_command(command);
        return hifc_fail(-ENODEV, "%s: the controller is gone; check the drive or target, then open "
                         "it again", where);
    }
    rc = wait_command_for(device->ctrlr, command, timeout_ms);
    if (rc) {
        return hifc_fail(rc, "%s: no answer to admin command %#x within %u ms", where,
                         admin->opcode, timeout_ms);
    }
    admin->sct = command->sct;
    admin->sc = command->sc;
    if (admin->sct || admin->sc) {
        rc = hifc_fail(-EIO, "%s: admin command %#x: %s (status code type %#x, status code %#x)",
                       where, admin->opcode, hifc_nvme_status_text(admin->sct, admin->sc),
                       admin->sct, admin->sc);
    } else if (admin->data_bytes) {
        memcpy(admin->data, command->data, admin->data_bytes);
    }
    free_command(command);
    return rc;
}

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

/* SPDK waits for a drive as long as the drive says that it may take (CAP.TO, often 7 s and more). One
 * that did not come back is not waited for again at once, so that a loss is known soon. */
static int reset(struct hifc_spdk_device *device)
{
    if (is_gone(device) || now_ms() < device->reset_after_ms) {
        return -ENODEV;
    }
    if (spdk_nvme_ctrlr_reset(device->ctrlr) != 0) {
        device->reset_after_ms = now_ms() + RESET_PAUSE_MS;
        return -ENODEV;
    }
    return 0;
}

/* Brings a failed controller back. */
static int revive(struct hifc_spdk_device *device)
{
    if (is_leaving(device)) {
        return hifc_fail(-ENODEV, "%s: the drive was unplugged; close the namespace, then put the "
                         "drive back, bind and open it", device->target.where);
    }
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
    return spdk_nvme_ctrlr_is_failed(device->ctrlr) ? revive(device) : ping(device);
}

static void fill_opts(const struct hifc_spdk_target *target, struct spdk_nvme_ctrlr_opts *opts)
{
    spdk_nvme_ctrlr_get_default_ctrlr_opts(opts, sizeof(*opts));
    opts->io_queue_size = QUEUE_ENTRIES_MAX; /* SPDK lowers it to what the controller has */
    opts->admin_timeout_ms = ADMIN_INIT_TIMEOUT_MS;
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
    if (target->pcie) {
        return hifc_fail(-ENODEV, "%s: SPDK cannot take it: %s; give this user access to its group "
                         "in /dev/vfio, and check that it is an NVMe drive and RLIMIT_MEMLOCK",
                         target->where, hifc_spdk_log_text());
    }
    return hifc_fail(-ENODEV, "%s: the target answers but refused the connection: %s; check the "
                     "NQN of the subsystem, that this host may use it (hostnqn=), and free huge pages",
                     target->where, hifc_spdk_log_text());
}

int hifc_spdk_connect(struct hifc_spdk_device *device)
{
    struct spdk_nvme_ctrlr_opts opts;
    pthread_mutex_lock(&control_mutex);
    int rc = probe(device);
    if (!rc) {
        fill_opts(&device->target, &opts);
        hifc_spdk_log_clear();
        device->ctrlr = spdk_nvme_connect(&device->target.trid, &opts, sizeof(opts));
        if (!device->ctrlr) {
            rc = fail_connect(&device->target);
        }
    }
    if (!rc) {
        rc = list_add(device);
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
    list_remove(device);
    if (!spdk_nvme_ctrlr_is_failed(device->ctrlr)) {
        (void)ping(device); /* parting waits for answers */
    }
    free_kept(device);
    spdk_nvme_detach(device->ctrlr);
    device->ctrlr = NULL;
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
        if (ping(device) != 0) {
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
        (spdk_nvme_ctrlr_is_failed(device->ctrlr) || ping(device) != 0)) {
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
