/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_watch.c - the thread that keeps controllers alive.
 *
 * One a process, "hifc-admin", polls the admin queue of every controller each WATCH_POLL_MS: that
 * sends keep-alives, without which a fabrics target hangs up after 10 s, and notices a connection
 * that broke and a drive that leaves. It is not pinned, all signals are blocked in it, and it runs
 * as long as there is a device.
 *
 * A drive that somebody unplugs in order still works until we let it go. Its queue pairs take
 * nothing more then, and it finishes what it has: nothing that it did is told as an error, and it
 * is not reset with commands in hand. A queue pair whose commands take over LEAVE_MS is lost.
 *
 * list_mutex guards the list that it walks and is held while it polls. Who adds and removes devices
 * sees to it that only one thread does so at a time (spdk_controller.c).
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/spdk.h"
#include "util/clock.h"
#include "util/error.h"
#include "util/thread.h"

#define WATCH_POLL_MS 100
#define LEAVE_MS 5000u

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t list_changed;
static struct hifc_spdk_device *devices; /* list_mutex */
static bool thread_runs;                 /* changed by who adds and removes */
static bool thread_stops;                /* list_mutex */
static pthread_t thread;

bool hifc_spdk_is_gone(const struct hifc_spdk_device *device)
{
    return device->target.pcie &&
           spdk_nvme_ctrlr_get_regs_csts(device->ctrlr).raw == 0xffffffffu;
}

bool hifc_spdk_note_leaving(struct hifc_spdk_device *device)
{
    if (!hifc_spdk_is_leaving(device) && device->target.pcie &&
        spdk_pci_device_is_removed(spdk_nvme_ctrlr_get_pci_device(device->ctrlr))) {
        uint32_t now_ms = hifc_spdk_clock_ms();
        atomic_store_explicit(&device->leaving_since_ms, now_ms ? now_ms : 1,
                              memory_order_relaxed);
    }
    return hifc_spdk_is_leaving(device);
}

bool hifc_spdk_may_finish(const struct hifc_spdk_device *device)
{
    uint32_t since_ms = atomic_load_explicit(&device->leaving_since_ms, memory_order_relaxed);
    return since_ms != 0 && hifc_spdk_clock_ms() - since_ms < LEAVE_MS;
}

/* A controller that is gone, or whose admin queue is, is failed, so that queue pairs notice at
 * their next poll. */
static void tend(struct hifc_spdk_device *device)
{
    struct spdk_nvme_ctrlr *ctrlr = device->ctrlr;
    (void)hifc_spdk_note_leaving(device);
    if (spdk_nvme_ctrlr_is_failed(ctrlr)) {
        return;
    }
    bool lost = hifc_spdk_is_gone(device) ||
                spdk_nvme_ctrlr_process_admin_completions(ctrlr) < 0;
    if (lost && !spdk_nvme_ctrlr_is_failed(ctrlr)) {
        spdk_nvme_ctrlr_fail(ctrlr);
    }
}

static void *admin_main(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&list_mutex);
    while (!thread_stops) {
        for (struct hifc_spdk_device *device = devices; device; device = device->next) {
            tend(device);
        }
        struct timespec until = hifc_after_ns(WATCH_POLL_MS * 1000000ull);
        pthread_cond_timedwait(&list_changed, &list_mutex, &until);
    }
    pthread_mutex_unlock(&list_mutex);
    return NULL;
}

static int start_thread(void)
{
    pthread_condattr_t monotonic;
    if (thread_runs) {
        return 0;
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&list_changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    thread_stops = false;
    int rc = hifc_thread_start(&thread, "hifc-admin", admin_main, NULL, "spdk");
    thread_runs = rc == 0;
    return rc;
}

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

int hifc_spdk_watch(struct hifc_spdk_device *device)
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

void hifc_spdk_unwatch(struct hifc_spdk_device *device)
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
