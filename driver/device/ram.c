/* SPDX-License-Identifier: Apache-2.0
 *
 * ram.c - a device in memory: ram://?size=1GiB, ram://NAME?size=64MiB&lba=512
 *
 * Without a name the bytes go with the device. A named image lives until hifc_ram_drop or the end
 * of the process, through any number of closes and opens, which is how tests reopen a namespace;
 * it has one writer or any number of readers at a time.
 *
 * A command only enters a ring at submit. Its bytes are copied in poll, just before its completion
 * is called, so that whoever verifies a checksum there finds them in cache. Poll stops after
 * RAM_POLL_BYTES, so that a queue pair with deep writes does not keep its thread from another one.
 *
 * Deallocated ranges read as zeroes and give their memory back. Images are not inherited by fork().
 */
#define _GNU_SOURCE /* MADV_*, MAP_ANONYMOUS */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/command.h"
#include "device/device.h"
#include "device/ram.h"
#include "util/error.h"

#define RAM_IMAGES_MAX 4096u
#define RAM_NAME_MAX 200u
#define RAM_POLL_BYTES (2u << 20)
#define RAM_MAX_TRANSFER_DEFAULT (256u << 10) /* copied bytes are still in cache at completion */
#define RAM_DEPTH_MAX 65536u
#define PAGE_BYTES 4096u

struct image {
    struct image *next;
    uint8_t *bytes;
    uint64_t size_bytes;
    uint32_t readers;
    bool writer;
    char name[RAM_NAME_MAX + 1]; /* empty: freed with its device */
};

struct ram_device {
    struct hifc_device base;
    struct image *image;
    bool read_only;
};

struct ram_qpair {
    struct hifc_qpair base;
    uint8_t *bytes;
    bool read_only;
    uint32_t depth;
    uint32_t mask;
    uint32_t head, tail; /* of the ring; free-running */
    struct hifc_io *ring[];
};

static pthread_mutex_t images_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct image *images;
static uint32_t image_count;

/* ---- images ---------------------------------------------------------------------------------- */

static int image_create(const char *name, uint64_t size_bytes, struct image **out)
{
    struct image *image = calloc(1, sizeof(*image));
    void *bytes = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!image || bytes == MAP_FAILED) {
        free(image);
        return hifc_fail(-ENOMEM, "ram device: no address space for %llu bytes; use a smaller size",
                         (unsigned long long)size_bytes);
    }
    madvise(bytes, size_bytes, MADV_HUGEPAGE); /* advice: first touch costs 512 times less */
    madvise(bytes, size_bytes, MADV_DONTFORK);
    image->bytes = bytes;
    image->size_bytes = size_bytes;
    snprintf(image->name, sizeof(image->name), "%s", name);
    *out = image;
    return 0;
}

static void image_free(struct image *image)
{
    munmap(image->bytes, image->size_bytes);
    free(image);
}

static struct image *image_find(const char *name)
{
    struct image *image = images;
    while (image && strcmp(image->name, name) != 0) {
        image = image->next;
    }
    return image;
}

/* Finds or makes the named image and takes it; images_mutex is held. */
static int image_take_named(const char *name, uint64_t size_bytes, bool read_only,
                            struct image **out)
{
    struct image *image = image_find(name);
    if (!image) {
        if (!size_bytes) {
            return hifc_fail(-ENOENT, "ram://%s: no such image in this process; give size= to make "
                             "it", name);
        }
        if (image_count == RAM_IMAGES_MAX) {
            return hifc_fail(-ENOSPC, "ram://%s: %u images exist already; drop some", name,
                             RAM_IMAGES_MAX);
        }
        int rc = image_create(name, size_bytes, &image);
        if (rc) {
            return rc;
        }
        image->next = images;
        images = image;
        image_count++;
    }
    if (size_bytes && size_bytes != image->size_bytes) {
        return hifc_fail(-EINVAL, "ram://%s: the image has %llu bytes, not %llu; leave size out or "
                         "use another name", name, (unsigned long long)image->size_bytes,
                         (unsigned long long)size_bytes);
    }
    if (image->writer || (!read_only && image->readers)) {
        int rc = hifc_fail(-EBUSY, "ram://%s: this process has it open already; close that one "
                           "first (one writer, or several read-only)", name);
        hifc_error_holders(&(int32_t){getpid()}, 1);
        return rc;
    }
    image->writer = !read_only;
    image->readers += read_only;
    *out = image;
    return 0;
}

int hifc_ram_drop(const char *name)
{
    int rc = 0;
    pthread_mutex_lock(&images_mutex);
    struct image **link = &images;
    while (*link && strcmp((*link)->name, name) != 0) {
        link = &(*link)->next;
    }
    struct image *image = *link;
    if (!image) {
        rc = hifc_fail(-ENOENT, "ram://%s: no such image", name);
    } else if (image->writer || image->readers) {
        rc = hifc_fail(-EBUSY, "ram://%s: it is open; close it before dropping it", name);
    } else {
        *link = image->next;
        image_count--;
        image_free(image);
    }
    pthread_mutex_unlock(&images_mutex);
    return rc;
}

/* ---- the device ------------------------------------------------------------------------------ */

static int read_params(const struct hifc_uri *uri, uint64_t *size_bytes,
                       struct hifc_geometry *geometry)
{
    static const char *const known[] = {"size", "lba", "max_transfer", "align", NULL};
    uint64_t lba = 4096, max_transfer = RAM_MAX_TRANSFER_DEFAULT, align = 1;
    int rc = hifc_uri_allow(uri, known);
    rc = rc ? rc : hifc_uri_size(uri, "size", size_bytes);
    rc = rc ? rc : hifc_uri_u64(uri, "lba", &lba);
    rc = rc ? rc : hifc_uri_size(uri, "max_transfer", &max_transfer);
    rc = rc ? rc : hifc_uri_u64(uri, "align", &align);
    if (rc) {
        return rc;
    }
    if (lba != 512 && lba != 4096) {
        return hifc_fail(-EINVAL, "ram device: lba=%llu; it can be 512 or 4096",
                         (unsigned long long)lba);
    }
    if (max_transfer < PAGE_BYTES || max_transfer > (1u << 30) || max_transfer % PAGE_BYTES) {
        return hifc_fail(-EINVAL, "ram device: max_transfer=%llu; it must be whole pages of 4 KiB, "
                         "at most 1 GiB", (unsigned long long)max_transfer);
    }
    if (align == 0 || align > PAGE_BYTES || align & (align - 1)) {
        return hifc_fail(-EINVAL, "ram device: align=%llu; it must be a power of two up to 4096",
                         (unsigned long long)align);
    }
    if (*size_bytes % lba) {
        return hifc_fail(-EINVAL, "ram device: size=%llu is not a multiple of lba=%llu",
                         (unsigned long long)*size_bytes, (unsigned long long)lba);
    }
    geometry->lba_bytes = (uint32_t)lba;
    geometry->max_transfer_bytes = (uint32_t)max_transfer;
    geometry->buffer_align_bytes = (uint32_t)align;
    return 0;
}

static int ram_open(const struct hifc_uri *uri, unsigned flags, struct hifc_device **out)
{
    struct hifc_geometry geometry = {
        .max_iov = HIFC_IO_IOV_MAX, .deallocate = true, .direct = true,
        .model = "HiFC ram", .serial = "-", .firmware = "1"};
    uint64_t size_bytes = 0;
    bool read_only = flags & HIFC_DEVICE_READ_ONLY;
    int rc = read_params(uri, &size_bytes, &geometry);
    if (rc) {
        return rc;
    }
    if (!*uri->target && !size_bytes) {
        return hifc_fail(-EINVAL, "ram device: no size; give one, e.g. ram://?size=1GiB");
    }
    if (strlen(uri->target) > RAM_NAME_MAX) {
        return hifc_fail(-EINVAL, "ram device: the name is longer than %u bytes", RAM_NAME_MAX);
    }
    struct ram_device *device = calloc(1, sizeof(*device));
    if (!device) {
        return hifc_fail(-ENOMEM, "ram device: out of memory");
    }
    if (*uri->target) {
        pthread_mutex_lock(&images_mutex);
        rc = image_take_named(uri->target, size_bytes, read_only, &device->image);
        pthread_mutex_unlock(&images_mutex);
    } else {
        rc = image_create("", size_bytes, &device->image);
    }
    if (rc) {
        free(device);
        return rc;
    }
    geometry.size_bytes = device->image->size_bytes;
    device->read_only = read_only;
    device->base.geometry = geometry;
    *out = &device->base;
    return 0;
}

static void ram_close(struct hifc_device *base)
{
    struct ram_device *device = (struct ram_device *)base;
    struct image *image = device->image;
    if (!*image->name) {
        image_free(image);
    } else {
        pthread_mutex_lock(&images_mutex);
        if (device->read_only) {
            image->readers--;
        } else {
            image->writer = false;
        }
        pthread_mutex_unlock(&images_mutex);
    }
    free(device);
}

/* ---- the queue pair -------------------------------------------------------------------------- */

static int ram_qpair_open(struct hifc_device *base, uint32_t depth, uint32_t command_timeout_ms,
                          struct hifc_qpair **out)
{
    (void)command_timeout_ms; /* a copy cannot hang */
    struct ram_device *device = (struct ram_device *)base;
    if (depth == 0 || depth > RAM_DEPTH_MAX) {
        return hifc_fail(-EINVAL, "%s: queue depth %u; it must be 1 to %u", base->uri, depth,
                         RAM_DEPTH_MAX);
    }
    uint32_t slots = 1;
    while (slots < depth) {
        slots *= 2;
    }
    struct ram_qpair *qpair = calloc(1, sizeof(*qpair) + slots * sizeof(qpair->ring[0]));
    if (!qpair) {
        return hifc_fail(-ENOMEM, "%s: out of memory for a queue pair", base->uri);
    }
    qpair->base.device = base;
    qpair->bytes = device->image->bytes;
    qpair->read_only = device->read_only;
    qpair->depth = depth;
    qpair->mask = slots - 1;
    *out = &qpair->base;
    return 0;
}

static uint32_t ram_submit(struct hifc_qpair *base, struct hifc_io *const *ios, uint32_t count)
{
    struct ram_qpair *qpair = (struct ram_qpair *)base;
    uint32_t room = qpair->depth - (qpair->tail - qpair->head);
    uint32_t taken = count < room ? count : room;
    for (uint32_t i = 0; i < taken; i++) {
        hifc_io_check(&base->device->geometry, ios[i], qpair->read_only);
        qpair->ring[qpair->tail++ & qpair->mask] = ios[i];
    }
    return taken;
}

/* Whole pages go back to the system, what is left at the ends is cleared. */
static void punch(uint8_t *from, uint64_t length)
{
    uint8_t *end = from + length;
    uint8_t *page = (uint8_t *)(((uintptr_t)from + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1));
    uint8_t *page_end = (uint8_t *)((uintptr_t)end & ~(uintptr_t)(PAGE_BYTES - 1));
    if (page >= page_end || madvise(page, (size_t)(page_end - page), MADV_DONTNEED) != 0) {
        memset(from, 0, length);
        return;
    }
    memset(from, 0, (size_t)(page - from));
    memset(page_end, 0, (size_t)(end - page_end));
}

static void carry_out(struct ram_qpair *qpair, struct hifc_io *io)
{
    uint8_t *at = qpair->bytes + io->offset_bytes;
    switch (io->op) {
    case HIFC_IO_READ:
        for (uint32_t i = 0; i < io->iov_count; i++) {
            memcpy(io->iov[i].iov_base, at, io->iov[i].iov_len);
            at += io->iov[i].iov_len;
        }
        break;
    case HIFC_IO_WRITE:
        for (uint32_t i = 0; i < io->iov_count; i++) {
            memcpy(at, io->iov[i].iov_base, io->iov[i].iov_len);
            at += io->iov[i].iov_len;
        }
        break;
    case HIFC_IO_DEALLOCATE:
        punch(at, io->length_bytes);
        break;
    default: /* flush: memory holds no cache */
        break;
    }
}

static int ram_poll(struct hifc_qpair *base)
{
    struct ram_qpair *qpair = (struct ram_qpair *)base;
    uint32_t end = qpair->tail; /* completions may submit more: those wait for the next poll */
    uint64_t moved = 0;
    int completed = 0;
    while (qpair->head != end && moved < RAM_POLL_BYTES) {
        struct hifc_io *io = qpair->ring[qpair->head++ & qpair->mask];
        if (!io->error) {
            carry_out(qpair, io);
            moved += io->op <= HIFC_IO_WRITE ? io->length_bytes : 0;
        }
        io->done(io);
        completed++;
    }
    return completed;
}

static void ram_qpair_close(struct hifc_qpair *base)
{
    struct ram_qpair *qpair = (struct ram_qpair *)base;
    while (qpair->head != qpair->tail) {
        struct hifc_io *io = qpair->ring[qpair->head++ & qpair->mask];
        if (!io->error) {
            hifc_io_set(io, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED_SQ_DELETION);
        }
        io->done(io);
    }
    free(qpair);
}

static int ram_event_fd(struct hifc_qpair *qpair)
{
    (void)qpair;
    return -1;
}

const struct hifc_device_ops hifc_device_ram = {
    .scheme = "ram",
    .open = ram_open,
    .close = ram_close,
    .qpair_open = ram_qpair_open,
    .qpair_close = ram_qpair_close,
    .submit = ram_submit,
    .poll = ram_poll,
    .event_fd = ram_event_fd,
};
