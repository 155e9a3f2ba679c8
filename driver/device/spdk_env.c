/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_env.c - the environment that SPDK wants, once a process, and memory registered with it.
 *
 * It starts with the first SPDK device and stays until the process ends: DPDK cannot be started a
 * second time. Starting pins the calling thread to a CPU, so a thread of its own does it, with all
 * signals blocked, which DPDK's threads inherit. PCI is always looked at, which needs no
 * privilege and touches no device, so that a process may open drives in any order.
 *
 * A child of fork() has the memory but none of the threads and must not use any of it.
 *
 * Registered memory counts by region, since several devices may register the same one and SPDK
 * takes it once. Queue pairs look it up here, without a lock, since NVMe/TCP does not ask. With
 * addresses of the device equal to ours (iova_mode "va", which needs an IOMMU for PCIe and no
 * privilege for the rest) any memory of whole huge pages' size registers. Any thread.
 */
#define _GNU_SOURCE /* sched_getaffinity */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "device/spdk.h"
#include "util/error.h"
#include "util/thread.h"

#define REGIONS_MAX 256u
#define REGION_ALIGN_BYTES (2ull << 20)
/* What the environment, a controller and two queue pairs take. */
#define FREE_HUGE_PAGES_MIN 4l

struct region {
    _Atomic uintptr_t base;
    _Atomic uint64_t size_bytes; /* 0: nothing is registered; stored last, cleared first */
    uint32_t count;              /* devices that registered it; 0: free slot */
};

static pthread_mutex_t env_mutex = PTHREAD_MUTEX_INITIALIZER;
static bool env_started;
static uint64_t env_fork_generation;
static struct region regions[REGIONS_MAX];  /* changed under the mutex, read without */
static _Atomic uint32_t region_limit;       /* one above the highest slot ever used */

/* SPDK's sockets send without MSG_NOSIGNAL, so that a target that went away would end the process
 * by SIGPIPE. SPDK is linked into this library and finds this function before the C library's; the
 * rest of the process does not see it. */
ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    return syscall(SYS_sendmsg, fd, message, flags | MSG_NOSIGNAL);
}

/* DPDK's telemetry would listen on /tmp/dpdk_telemetry.v2, one name for all processes: whoever is not
 * root and finds the socket of another user there, alive or dead, could not start at all. SPDK 20.07
 * passes on one argument of ours only, and it is taken, so the linker leads the call here instead
 * (cmake/spdk.cmake). */
int __wrap_rte_telemetry_init(void);
int __wrap_rte_telemetry_init(void)
{
    return 0;
}

/* DPDK makes a folder for each process and removes it when the next one with the same name starts. */
const char *rte_eal_get_runtime_dir(void);

/* ---- starting -------------------------------------------------------------------------------- */

static long meminfo(const char *name)
{
    char line[128];
    long value = -1;
    size_t length = strlen(name);
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof(line), file)) {
        if (strncmp(line, name, length) == 0 && sscanf(line + length, ": %ld", &value) == 1) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return value;
}

static bool hugetlbfs_is_mounted(void)
{
    char line[512], type[64];
    bool found = false;
    FILE *file = fopen("/proc/self/mounts", "re");
    while (file && !found && fgets(line, sizeof(line), file)) {
        found = sscanf(line, "%*s %*s %63s", type) == 1 && strcmp(type, "hugetlbfs") == 0;
    }
    if (file) {
        fclose(file);
    }
    return found;
}

/* DPDK is not told twice to start, so what it would trip over is looked at before. */
static int check_huge_pages(void)
{
    if (!hugetlbfs_is_mounted()) {
        return hifc_fail(-ENOMEM, "spdk: no hugetlbfs is mounted; as root: mkdir -p /dev/hugepages "
                         "&& mount -t hugetlbfs hugetlbfs /dev/hugepages");
    }
    long free_pages = meminfo("HugePages_Free"), total = meminfo("HugePages_Total");
    if (free_pages < FREE_HUGE_PAGES_MIN) {
        return hifc_fail(-ENOMEM, "spdk: %ld huge pages of %ld are free, at least %ld are needed, "
                         "besides the buffer pool's; raise their number: echo %ld > "
                         "/proc/sys/vm/nr_hugepages", free_pages, total, FREE_HUGE_PAGES_MIN,
                         (total > 0 ? total : 0) + 64);
    }
    return 0;
}

/* One CPU that this process may use, as DPDK wants it. */
static void pick_core(char *out, size_t size)
{
    cpu_set_t cpus;
    int cpu = 0;
    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
        while (cpu < CPU_SETSIZE - 1 && !CPU_ISSET(cpu, &cpus)) {
            cpu++;
        }
    }
    snprintf(out, size, "[%d]", cpu);
}

struct start {
    int rc;
    char text[256];
};

static void *start_thread(void *argument)
{
    struct start *start = argument;
    struct spdk_env_opts opts;
    char core[16];
    FILE *stream = NULL, *before = stdout;
    start->rc = hifc_spdk_log_start(&stream);
    if (start->rc) {
        return NULL;
    }
    memset(&opts, 0, sizeof(opts));
#ifdef HIFC_SPDK_ENV_OPTS_SIZE
    opts.opts_size = sizeof(opts);
#endif
    spdk_env_opts_init(&opts);
    pick_core(core, sizeof(core));
    opts.name = "hifc";
    opts.core_mask = core;
    opts.mem_size = 0; /* takes huge pages as it needs them */
    opts.shm_id = -1;
    /* A killed process leaves none behind. Unlinked files would do as well, but DPDK 20.05 keeps
     * their descriptors when it frees a page and cannot take that page again: the second controller
     * with many namespaces found no memory. */
    opts.env_context = (char[]){"--in-memory"};
    opts.iova_mode = "va";
    hifc_spdk_log_clear();
    stdout = stream; /* glibc lets one; it tells its version there */
    start->rc = spdk_env_init(&opts);
    fflush(stream);
    stdout = before;
    snprintf(start->text, sizeof(start->text), "%s", hifc_spdk_log_text());
    return NULL;
}

/* The caller holds the mutex. */
static int start_locked(void)
{
    struct start start = {0};
    pthread_t thread;
    int rc = check_huge_pages();
    if (rc) {
        return rc;
    }
    rc = hifc_thread_start(&thread, "hifc-spdk-start", start_thread, &start, "spdk");
    if (rc) {
        return rc;
    }
    pthread_join(thread, NULL);
    if (start.rc) {
        return hifc_fail(start.rc == -ENOMEM ? -ENOMEM : -EIO, "spdk: its environment does not "
                         "start (%d): %s; check huge pages (grep Huge /proc/meminfo) and the "
                         "rights on their mount point", start.rc, start.text);
    }
    (void)rmdir(rte_eal_get_runtime_dir()); /* in memory, it puts nothing there: rmdir would refuse */
    env_started = true;
    env_fork_generation = hifc_fork_generation();
    return 0;
}

static void before_fork(void)
{
    pthread_mutex_lock(&env_mutex);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&env_mutex);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
}

int hifc_spdk_env_start(void)
{
    int rc = 0;
    pthread_mutex_lock(&env_mutex);
    if (!env_started) {
        rc = start_locked();
    } else if (hifc_forked_since(env_fork_generation)) {
        rc = hifc_fail(-EPERM, "spdk: this process is a fork of one that used SPDK, which does not "
                       "survive that; start processes afresh (Python: the start method 'spawn')");
    }
    pthread_mutex_unlock(&env_mutex);
    return rc;
}

/* ---- registered memory ----------------------------------------------------------------------- */

/* The mutex is held. */
static struct region *find_region(uintptr_t base, uint64_t size_bytes)
{
    for (uint32_t i = 0; i < REGIONS_MAX; i++) {
        struct region *region = &regions[i];
        if (region->count && region->base == base && region->size_bytes == size_bytes) {
            return region;
        }
    }
    return NULL;
}

/* The mutex is held. */
static int register_new(const struct hifc_device *device, uintptr_t base, uint64_t size_bytes)
{
    struct region *region = regions;
    while (region < regions + REGIONS_MAX && region->count) {
        region++;
    }
    if (region == regions + REGIONS_MAX) {
        return hifc_fail(-ENOSPC, "%s: %u memory regions are registered already; unregister some, "
                         "or register larger ones", device->uri, REGIONS_MAX);
    }
    int rc = spdk_mem_register((void *)base, size_bytes);
    if (rc == -EBUSY) {
        return hifc_fail(rc, "%s: part of the %llu bytes at %p is registered already; register "
                         "memory in the same pieces everywhere", device->uri,
                         (unsigned long long)size_bytes, (void *)base);
    }
    if (rc) {
        (void)spdk_mem_unregister((void *)base, size_bytes); /* SPDK leaves it half registered */
        return hifc_fail(rc == -ENOMEM ? rc : -EINVAL, "%s: the %llu bytes at %p cannot be "
                         "registered (%d); use buffers of the pool, or huge pages, and check "
                         "RLIMIT_MEMLOCK", device->uri, (unsigned long long)size_bytes,
                         (void *)base, rc);
    }
    region->count = 1;
    atomic_store(&region->base, base);
    atomic_store_explicit(&region->size_bytes, size_bytes, memory_order_release);
    uint32_t index = (uint32_t)(region - regions);
    if (index >= atomic_load(&region_limit)) {
        atomic_store(&region_limit, index + 1);
    }
    return 0;
}

int hifc_spdk_register(struct hifc_device *device, void *base, uint64_t size_bytes)
{
    int rc = 0;
    if (((uintptr_t)base | size_bytes) & (REGION_ALIGN_BYTES - 1) || !size_bytes) {
        return hifc_fail(-EINVAL, "%s: memory at %p of %llu bytes; it must be whole pages of 2 MiB",
                         device->uri, base, (unsigned long long)size_bytes);
    }
    pthread_mutex_lock(&env_mutex);
    struct region *region = find_region((uintptr_t)base, size_bytes);
    if (region) {
        region->count++;
    } else {
        rc = register_new(device, (uintptr_t)base, size_bytes);
    }
    pthread_mutex_unlock(&env_mutex);
    return rc;
}

int hifc_spdk_unregister(struct hifc_device *device, void *base, uint64_t size_bytes)
{
    int rc = 0;
    pthread_mutex_lock(&env_mutex);
    struct region *region = find_region((uintptr_t)base, size_bytes);
    if (!region) {
        rc = hifc_fail(-EINVAL, "%s: no region of %llu bytes is registered at %p", device->uri,
                       (unsigned long long)size_bytes, base);
    } else if (--region->count == 0) {
        atomic_store(&region->size_bytes, 0);
        rc = spdk_mem_unregister(base, size_bytes);
        if (rc) {
            rc = hifc_fail(rc, "%s: SPDK does not unregister the %llu bytes at %p (%d)",
                           device->uri, (unsigned long long)size_bytes, base, rc);
        }
    }
    pthread_mutex_unlock(&env_mutex);
    return rc;
}

/* How many of the bytes from at on are registered, as far as the region reaches that *index names;
 * if it is another one, *index becomes that. */
static uint64_t registered_run(uintptr_t at, uint32_t *index)
{
    uint32_t limit = atomic_load_explicit(&region_limit, memory_order_acquire);
    for (uint32_t i = 0, slot = *index; i < limit; i++, slot = slot + 1 < limit ? slot + 1 : 0) {
        struct region *region = &regions[slot];
        uint64_t size = atomic_load_explicit(&region->size_bytes, memory_order_acquire);
        uint64_t position = at - atomic_load_explicit(&region->base, memory_order_relaxed);
        if (position < size) {
            *index = slot;
            return size - position;
        }
    }
    return 0;
}

bool hifc_spdk_is_registered(const void *memory, uint64_t size_bytes, uint32_t *index)
{
    uintptr_t at = (uintptr_t)memory;
    for (;;) {
        uint64_t run = registered_run(at, index);
        if (run >= size_bytes) {
            return true;
        }
        if (run == 0) {
            return false;
        }
        at += run;
        size_bytes -= run;
    }
}
