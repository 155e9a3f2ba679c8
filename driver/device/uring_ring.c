/* SPDX-License-Identifier: Apache-2.0
 *
 * uring_ring.c - the life of a ring: set up, told about registered memory, torn down.
 *
 * Memory is registered with every ring of a device under the device's mutex, by any thread, also
 * while another thread drives a ring; a ring opened later learns of it then.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "device/command.h"
#include "device/file.h"
#include "device/uring.h"
#include "util/error.h"

#define URING_DEPTH_MAX 4096u
#define URING_CLOSE_EXTRA_MS 5000u /* close waits this much longer than the command timeout */
#define URING_MEMORY_WAIT_MS 500
#define URING_MEMORY_RETRY_MS 10

/* ---- registered memory ----------------------------------------------------------------------- */

/* The caller holds the device's mutex. A ring that the kernel refuses to pin memory for (an old
 * kernel, RLIMIT_MEMLOCK) works with unpinned memory, a little slower. */
static void ring_learn(struct hifc_uring *ring, uint32_t index, uintptr_t base, uint64_t size_bytes)
{
    struct iovec iov = {(void *)base, size_bytes};
    __u64 tag = 0;
    int learnt = io_uring_register_buffers_update_tag(&ring->ring, index, &iov, &tag, 1);
    if (learnt == 1 && size_bytes) {
        atomic_fetch_or_explicit(&ring->fixed_slots, 1ull << index, memory_order_release);
    }
}

static void ring_forget(struct hifc_uring *ring, uint32_t index)
{
    uint64_t bit = 1ull << index;
    if (atomic_fetch_and(&ring->fixed_slots, ~bit) & bit) {
        ring_learn(ring, index, 0, 0);
    }
}

static void add_region(struct hifc_file_device *device, uintptr_t base, uint64_t size_bytes)
{
    for (uint32_t i = 0; i < HIFC_FILE_REGIONS_MAX; i++) {
        struct hifc_file_region *region = &device->regions[i];
        if (atomic_load(&region->size_bytes)) {
            continue;
        }
        for (struct hifc_uring *ring = device->rings; ring; ring = ring->next) {
            ring_learn(ring, i, base, size_bytes);
        }
        atomic_store(&region->base, base);
        atomic_store_explicit(&region->size_bytes, size_bytes, memory_order_release);
        if (i >= atomic_load(&device->region_count)) {
            atomic_store(&device->region_count, i + 1);
        }
        return;
    }
    /* No slot left: commands there go as unregistered memory. */
}

int hifc_uring_register(struct hifc_device *base_device, void *base, uint64_t size_bytes)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base_device;
    pthread_mutex_lock(&device->mutex);
    for (uint64_t at = 0; at < size_bytes; at += HIFC_FILE_REGION_MAX_BYTES) {
        uint64_t rest = size_bytes - at;
        add_region(device, (uintptr_t)base + at,
                   rest < HIFC_FILE_REGION_MAX_BYTES ? rest : HIFC_FILE_REGION_MAX_BYTES);
    }
    pthread_mutex_unlock(&device->mutex);
    return 0;
}

int hifc_uring_unregister(struct hifc_device *base_device, void *base, uint64_t size_bytes)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base_device;
    pthread_mutex_lock(&device->mutex);
    for (uint32_t i = 0; i < HIFC_FILE_REGIONS_MAX; i++) {
        struct hifc_file_region *region = &device->regions[i];
        uintptr_t at = atomic_load(&region->base);
        if (!atomic_load(&region->size_bytes) || at < (uintptr_t)base ||
            at - (uintptr_t)base >= size_bytes) {
            continue;
        }
        atomic_store(&region->size_bytes, 0);
        for (struct hifc_uring *ring = device->rings; ring; ring = ring->next) {
            ring_forget(ring, i);
        }
    }
    pthread_mutex_unlock(&device->mutex);
    return 0;
}

/* ---- opening and closing --------------------------------------------------------------------- */

static int refuse_ring(struct hifc_device *device, int error)
{
    if (error == -EPERM || error == -EACCES) {
        return hifc_fail(-EPERM, "%.200s: io_uring is not permitted; allow it (sysctl "
                         "kernel.io_uring_disabled=0, in a container a seccomp profile with "
                         "io_uring_setup, io_uring_enter and io_uring_register), or add io=sync to "
                         "the URI, which is slower", device->uri);
    }
    if (error == -ENOSYS) {
        return hifc_fail(-ENOTSUP, "%.200s: this kernel has no io_uring (5.6 or newer has), or a "
                         "seccomp profile hides it; allow it, or add io=sync to the URI, which is "
                         "slower", device->uri);
    }
    if (error == -ENOMEM) {
        return hifc_fail(-ENOMEM, "%.200s: no memory that may be locked for a ring; raise ulimit "
                         "-l (LimitMEMLOCK), or add io=sync to the URI", device->uri);
    }
    return hifc_fail(error, "%.200s: io_uring_setup failed: %s; add io=sync to the URI to do "
                     "without", device->uri, strerror(-error));
}

static void learn_regions(struct hifc_uring *ring, struct hifc_file_device *device)
{
    if (io_uring_register_buffers_sparse(&ring->ring, HIFC_FILE_REGIONS_MAX) != 0) {
        return;
    }
    for (uint32_t i = 0; i < HIFC_FILE_REGIONS_MAX; i++) {
        uint64_t size_bytes = atomic_load(&device->regions[i].size_bytes);
        if (size_bytes) {
            ring_learn(ring, i, atomic_load(&device->regions[i].base), size_bytes);
        }
    }
}

static struct hifc_uring *allocate(struct hifc_device *device, uint32_t depth)
{
    struct hifc_uring *ring = calloc(1, sizeof(*ring) + depth * sizeof(ring->slots[0]));
    if (!ring) {
        return NULL;
    }
    ring->partial = calloc(depth, sizeof(ring->partial[0]));
    if (!ring->partial) {
        free(ring);
        return NULL;
    }
    ring->base.device = device;
    ring->depth = depth;
    ring->event_fd = -1;
    for (uint32_t i = 0; i < depth; i++) {
        ring->slots[i].next_free = i + 1;
    }
    return ring;
}

static void release(struct hifc_uring *ring)
{
    if (ring->event_fd >= 0) {
        close(ring->event_fd);
    }
    free(ring->partial);
    free(ring);
}

/* The kernel counts a ring as locked memory, and one that was closed for some ms longer. */
static int set_up(struct hifc_uring *ring, uint32_t depth)
{
    int rc = io_uring_queue_init(depth, &ring->ring, 0);
    for (int waited_ms = 0; rc == -ENOMEM && waited_ms < URING_MEMORY_WAIT_MS;
         waited_ms += URING_MEMORY_RETRY_MS) {
        nanosleep(&(struct timespec){.tv_nsec = URING_MEMORY_RETRY_MS * 1000000l}, NULL);
        rc = io_uring_queue_init(depth, &ring->ring, 0);
    }
    return rc;
}

int hifc_uring_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                    struct hifc_qpair **out)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base;
    if (depth == 0 || depth > URING_DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%.200s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         URING_DEPTH_MAX);
    }
    struct hifc_uring *ring = allocate(base, depth);
    if (!ring) {
        return hifc_fail(-ENOMEM, "%.200s: out of memory for a queue pair", base->uri);
    }
    ring->timeout_ms = command_timeout_ms;
    ring->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ring->event_fd < 0) {
        int error = errno;
        release(ring);
        return hifc_fail_eventfd(error, base->uri);
    }
    int rc = set_up(ring, depth);
    if (rc) {
        release(ring);
        return refuse_ring(base, rc);
    }
    rc = io_uring_register_eventfd(&ring->ring, ring->event_fd);
    if (rc) {
        io_uring_queue_exit(&ring->ring);
        release(ring);
        return refuse_ring(base, rc);
    }
    io_uring_ring_dontfork(&ring->ring);
    ring->fixed_file = io_uring_register_files(&ring->ring, &device->fd, 1) == 0;
    pthread_mutex_lock(&device->mutex);
    learn_regions(ring, device);
    ring->next = device->rings;
    device->rings = ring;
    pthread_mutex_unlock(&device->mutex);
    *out = &ring->base;
    return 0;
}

void hifc_uring_abandon(struct hifc_file_device *device)
{
    for (struct hifc_uring *ring = device->rings; ring; ring = ring->next) {
        close(ring->ring.ring_fd);
        close(ring->event_fd);
    }
}

void hifc_uring_close(struct hifc_qpair *base)
{
    struct hifc_uring *ring = (struct hifc_uring *)base;
    struct hifc_file_device *device = (struct hifc_file_device *)base->device;
    if (hifc_forked_since(base->device->fork_generation)) {
        return;
    }
    pthread_mutex_lock(&device->mutex);
    struct hifc_uring **link = &device->rings;
    while (*link != ring) {
        link = &(*link)->next;
    }
    *link = ring->next;
    pthread_mutex_unlock(&device->mutex);
    uint32_t start_ms = hifc_uring_now_ms();
    uint32_t bound_ms = ring->timeout_ms + URING_CLOSE_EXTRA_MS;
    while (ring->inflight && !ring->lost && hifc_uring_now_ms() - start_ms < bound_ms) {
        hifc_uring_poll(base);
        struct __kernel_timespec pause = {.tv_nsec = 1000000};
        struct io_uring_cqe *cqe;
        if (ring->inflight && !ring->refused && !ring->lost) {
            io_uring_wait_cqe_timeout(&ring->ring, &cqe, &pause);
        }
    }
    device->stranded |= ring->inflight > 0;
    if (ring->fixed_file) {
        /* The ring itself goes in the background, with the claim on a block device if we let it. */
        io_uring_unregister_files(&ring->ring);
    }
    io_uring_queue_exit(&ring->ring);
    hifc_uring_complete_all(ring, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
    release(ring);
}

int hifc_uring_event_fd(struct hifc_qpair *base)
{
    return ((struct hifc_uring *)base)->event_fd;
}
