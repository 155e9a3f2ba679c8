/* SPDX-License-Identifier: Apache-2.0
 *
 * region.c - memfd memory, huge pages first, registered with the device.
 *
 * A mapping of huge pages reserves them, so a shortage shows here and not as a SIGBUS later; they
 * are populated at once. Ordinary pages come as they are touched. Any thread; nothing outlives the
 * process, since a memfd has no name.
 */
#define _GNU_SOURCE /* memfd_create, MADV_* */
#include "engine/region.h"

#include <linux/memfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static long read_number(const char *path)
{
    long value = -1;
    FILE *file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%ld", &value) != 1) {
            value = -1;
        }
        fclose(file);
    }
    return value;
}

/* Maps fd at a 2 MiB aligned address, or MAP_FAILED. */
static void *map_aligned(int fd, uint64_t size_bytes)
{
    uint64_t reserve_bytes = size_bytes + HIFC_HUGE_PAGE_BYTES;
    uint8_t *reserve = mmap(NULL, reserve_bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserve == MAP_FAILED) {
        return MAP_FAILED;
    }
    uint64_t head = -(uintptr_t)reserve & (HIFC_HUGE_PAGE_BYTES - 1);
    void *base = mmap(reserve + head, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      fd, 0);
    int error = errno;
    if (base == MAP_FAILED) {
        munmap(reserve, reserve_bytes);
        errno = error;
        return MAP_FAILED;
    }
    if (head) {
        munmap(reserve, head);
    }
    munmap(reserve + head + size_bytes, HIFC_HUGE_PAGE_BYTES - head);
    return base;
}

/* 0 or a negative errno, silently: the caller knows whether there is another way. */
static int map_memfd(uint64_t size_bytes, const char *what, bool huge, struct hifc_region *out)
{
    int fd = memfd_create(what, MFD_CLOEXEC | (huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
    if (fd < 0) {
        return -errno;
    }
    void *base = MAP_FAILED;
    if (ftruncate(fd, (off_t)size_bytes) == 0) {
        base = map_aligned(fd, size_bytes);
    }
    int error = base == MAP_FAILED ? errno : 0;
    if (!error && huge && madvise(base, size_bytes, MADV_POPULATE_WRITE) && errno != EINVAL) {
        error = errno; /* EINVAL: a kernel before 5.14, pages come as they are touched */
        munmap(base, size_bytes);
    }
    if (error) {
        close(fd);
        return -error;
    }
    if (!huge) {
        (void)madvise(base, size_bytes, MADV_HUGEPAGE); /* advice */
    }
    *out = (struct hifc_region){.base = base, .size_bytes = size_bytes, .fd = fd, .huge = huge};
    return 0;
}

static int fail_huge(int code, struct hifc_device *device, uint64_t size_bytes, const char *what)
{
    const char *const folder = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    char path[96];
    snprintf(path, sizeof path, "%s/free_hugepages", folder);
    long free_pages = read_number(path);
    snprintf(path, sizeof path, "%s/nr_hugepages", folder);
    long total = read_number(path), needed = (long)(size_bytes / HIFC_HUGE_PAGE_BYTES);
    return hifc_fail(code, "%s: %s needs %ld free huge pages of 2 MiB for this device, %ld of %ld "
                     "are free (%s); raise nr_hugepages: echo %ld > %s/nr_hugepages", device->uri,
                     what, needed, free_pages, total, strerror(-code),
                     (total > 0 ? total : 0) + needed - (free_pages > 0 ? free_pages : 0), folder);
}

int hifc_region_create(struct hifc_device *device, uint64_t size_bytes, const char *what,
                       struct hifc_region *out)
{
    *out = (struct hifc_region){.fd = -1};
    if (size_bytes == 0 || size_bytes > (1ull << 46)) {
        return hifc_fail(-EINVAL, "%s: %s of %llu bytes makes no sense", device->uri, what,
                         (unsigned long long)size_bytes);
    }
    size_bytes = (size_bytes + HIFC_HUGE_PAGE_BYTES - 1) & ~(HIFC_HUGE_PAGE_BYTES - 1);
    int rc = map_memfd(size_bytes, what, true, out);
    if (rc && device->geometry.registered_only) {
        return fail_huge(rc == -EMFILE || rc == -ENFILE ? rc : -ENOMEM, device, size_bytes, what);
    }
    if (rc) {
        rc = map_memfd(size_bytes, what, false, out);
    }
    if (rc) {
        return hifc_fail(rc, "%s: cannot map %llu bytes for %s: %s", device->uri,
                         (unsigned long long)size_bytes, what, strerror(-rc));
    }
    if (device->ops->register_memory) {
        rc = device->ops->register_memory(device, out->base, out->size_bytes);
        out->registered = rc == 0;
        if (rc && device->geometry.registered_only) {
            hifc_region_destroy(device, out);
            return rc; /* the device set the error */
        }
    }
    return 0;
}

void hifc_region_release(struct hifc_device *device, struct hifc_region *region)
{
    if (region->base && region->registered && device->ops->unregister_memory) {
        (void)device->ops->unregister_memory(device, region->base, region->size_bytes);
    }
    region->registered = false;
}

void hifc_region_destroy(struct hifc_device *device, struct hifc_region *region)
{
    if (!region->base) {
        return;
    }
    hifc_region_release(device, region);
    munmap(region->base, region->size_bytes);
    close(region->fd);
    *region = (struct hifc_region){.fd = -1};
}
