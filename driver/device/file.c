/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c - a file or a kernel block device: file:///path?size=8GiB, file:///dev/nvme1n1
 *
 * Opened, locked and measured by file_target.c; here it gets its geometry and becomes a device.
 * Commands go through uring.c, or through psync.c on tmpfs and where io=sync asks for it. O_DIRECT
 * wherever the file system takes it (geometry.direct). Opening and closing from any thread.
 */
#include <linux/nvme_ioctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "device/command.h"
#include "device/device.h"
#include "device/file.h"
#include "device/file_target.h"
#include "device/lock.h"
#include "util/error.h"

#define FILE_MAX_TRANSFER_DEFAULT (512u << 10)
#define NVME_GET_LOG_PAGE 0x02
#define NVME_LOG_SMART 0x02
#define NVME_NSID_ALL 0xffffffffu
#define TMPFS_MAX_TRANSFER_DEFAULT (256u << 10) /* what was copied is still in cache afterwards */
#define FILE_LBA_BYTES 4096u

/* ---- geometry -------------------------------------------------------------------------------- */

/* A line of /sys/dev/block/M:N/NAME, where a partition looks at its whole disk. */
static bool read_sysfs(const struct stat *status, const char *name, char *out, size_t size)
{
    static const char *const places[] = {"", "../"};
    for (size_t i = 0; i < 2; i++) {
        char path[128];
        snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/%s%s", major(status->st_rdev),
                 minor(status->st_rdev), places[i], name);
        FILE *file = fopen(path, "re");
        if (!file) {
            continue;
        }
        bool got = fgets(out, (int)size, file);
        fclose(file);
        if (got) {
            size_t end = strcspn(out, "\n");
            while (end && out[end - 1] == ' ') {
                end--;
            }
            out[end] = '\0';
            return true;
        }
    }
    return false;
}

static void describe_block(const struct hifc_file_target *target, struct hifc_geometry *geometry)
{
    char line[64];
    snprintf(geometry->model, sizeof(geometry->model), "block device");
    read_sysfs(&target->status, "device/model", geometry->model, sizeof(geometry->model));
    read_sysfs(&target->status, "device/serial", geometry->serial, sizeof(geometry->serial));
    read_sysfs(&target->status, "device/firmware_rev", geometry->firmware,
               sizeof(geometry->firmware));
    int nsid = ioctl(target->fd, NVME_IOCTL_ID); /* nobody but NVMe's driver knows it */
    geometry->nsid = nsid > 0 ? (uint32_t)nsid : 0;
    geometry->volatile_write_cache =
        !read_sysfs(&target->status, "queue/write_cache", line, sizeof(line)) ||
        strcmp(line, "write through") != 0;
    /* The kernel punches a hole in a block device by write zeroes with deallocation. */
    geometry->deallocate =
        read_sysfs(&target->status, "queue/write_zeroes_max_bytes", line, sizeof(line)) &&
        strcmp(line, "0") != 0 &&
        read_sysfs(&target->status, "queue/discard_max_bytes", line, sizeof(line)) &&
        strcmp(line, "0") != 0;
}

static int describe(const struct hifc_file_options *options, const struct hifc_file_target *target,
                    struct hifc_geometry *geometry)
{
    uint32_t lba = options->lba_bytes ? (uint32_t)options->lba_bytes
                   : target->block    ? target->block_bytes
                                      : FILE_LBA_BYTES;
    if (lba < target->block_bytes) {
        return hifc_fail(-EINVAL, "%.200s: lba=%u; what is below has blocks of %u bytes, use that",
                         options->path, lba, target->block_bytes);
    }
    if (lba > 4096) {
        return hifc_fail(-ENOTSUP, "%.200s: blocks of %u bytes; HiFC needs 4096 or fewer",
                         options->path, lba);
    }
    geometry->size_bytes = target->size_bytes / lba * lba;
    if (geometry->size_bytes == 0) {
        return hifc_fail(-EINVAL, "%.200s: %llu bytes are less than one block; format it "
                         "with a larger size= (after removing it, if it is there), or check the path",
                         options->path, (unsigned long long)target->size_bytes);
    }
    geometry->lba_bytes = lba;
    geometry->max_transfer_bytes = options->max_transfer_bytes
                                       ? (uint32_t)options->max_transfer_bytes
                                   : target->tmpfs ? TMPFS_MAX_TRANSFER_DEFAULT
                                                   : FILE_MAX_TRANSFER_DEFAULT;
    geometry->max_iov = HIFC_IO_IOV_MAX;
    geometry->buffer_align_bytes = target->align_bytes;
    geometry->direct = target->direct;
    if (target->block) {
        describe_block(target, geometry);
        return 0;
    }
    bool holes = (uint64_t)target->status.st_blocks * 512 < (uint64_t)target->status.st_size;
    geometry->deallocate = options->sparse == HIFC_AUTO ? target->tmpfs || holes
                                                   : options->sparse == HIFC_YES;
    geometry->thin = geometry->deallocate || holes;
    geometry->volatile_write_cache = !target->tmpfs;
    snprintf(geometry->model, sizeof(geometry->model), "%s",
             target->tmpfs ? "file on tmpfs" : "file");
    return 0;
}

/* ---- the table of open devices, for fork() --------------------------------------------------- */

static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct hifc_file_device *open_devices;

static void before_fork(void)
{
    pthread_mutex_lock(&open_mutex);
    for (struct hifc_file_device *device = open_devices; device; device = device->next) {
        pthread_mutex_lock(&device->mutex);
    }
}

static void after_fork(void)
{
    for (struct hifc_file_device *device = open_devices; device; device = device->next) {
        pthread_mutex_unlock(&device->mutex);
    }
    pthread_mutex_unlock(&open_mutex);
}

/* A child must not hold on to the lock of a device that its parent closes. */
static void after_fork_child(void)
{
    for (struct hifc_file_device *device = open_devices; device; device = device->next) {
        pthread_mutex_unlock(&device->mutex);
        hifc_uring_abandon(device);
        close(device->fd);
        hifc_backing_drop(&device->backing, true);
    }
    open_devices = NULL;
    pthread_mutex_unlock(&open_mutex);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, after_fork_child);
}

/* ---- the device ------------------------------------------------------------------------------ */

static const struct hifc_device_ops psync_ops;

static int file_open(const struct hifc_uri *uri, unsigned flags, struct hifc_device **out)
{
    struct hifc_file_options options;
    struct hifc_file_target target = {.fd = -1};
    struct hifc_geometry geometry = {.serial = "-", .firmware = "-"};
    int rc = hifc_file_options(uri, flags, &options);
    if (rc) {
        return rc;
    }
    rc = hifc_file_target_open(&options, &target);
    rc = rc ? rc : describe(&options, &target, &geometry);
    struct hifc_file_device *device = rc ? NULL : calloc(1, sizeof(*device));
    if (device && target.created && !(device->path = strdup(options.path))) {
        free(device);
        device = NULL;
    }
    if (!device) {
        hifc_file_target_close(&options, &target);
        return rc ? rc : hifc_fail(-ENOMEM, "%.200s: out of memory", options.path);
    }
    device->base.geometry = geometry;
    bool sync_io = options.sync_io == HIFC_AUTO ? target.tmpfs : options.sync_io == HIFC_YES;
    device->base.ops = sync_io ? &psync_ops : &hifc_device_file;
    device->fd = target.fd;
    device->backing = target.backing;
    device->read_only = options.read_only;
    device->created = target.created;
    device->unnamed = target.unnamed;
    pthread_mutex_init(&device->mutex, NULL);
    pthread_mutex_lock(&open_mutex);
    device->next = open_devices;
    open_devices = device;
    pthread_mutex_unlock(&open_mutex);
    *out = &device->base;
    return 0;
}

static int file_keep(struct hifc_device *base)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base;
    int rc = device->created ? hifc_file_target_keep(device->path, device->fd, device->unnamed) : 0;
    device->created = device->created && rc != 0;
    return rc;
}

static void file_close(struct hifc_device *base)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base;
    pthread_mutex_lock(&open_mutex);
    struct hifc_file_device **link = &open_devices;
    while (*link != device) {
        link = &(*link)->next;
    }
    *link = device->next;
    pthread_mutex_unlock(&open_mutex);
    if (device->created && !device->unnamed) {
        hifc_file_target_remove(device->path, device->fd);
    }
    free(device->path);
    hifc_backing_drop(&device->backing, device->stranded);
    if (!device->stranded) {
        hifc_lock_drop(device->fd); /* rings let go of the descriptor later, in the background */
    }
    close(device->fd);
    pthread_mutex_destroy(&device->mutex);
    free(device);
}

/* The kernel's own NVMe driver passes commands on, for those who may. */
static int file_passthru(struct hifc_device *base, struct hifc_nvme_passthru *ours)
{
    struct hifc_file_device *device = (struct hifc_file_device *)base;
    struct nvme_passthru_cmd command = {.opcode = ours->opcode, .nsid = ours->nsid,
                                        .addr = (uintptr_t)ours->data,
                                        .data_len = ours->data_bytes, .cdw10 = ours->cdw10,
                                        .cdw11 = ours->cdw11, .timeout_ms = ours->timeout_ms};
    if (base->geometry.nsid == 0) {
        return hifc_fail(-ENOTSUP, "%.200s: it is no NVMe drive", base->uri);
    }
    int rc = ioctl(device->fd, ours->io_queue ? NVME_IOCTL_IO_CMD : NVME_IOCTL_ADMIN_CMD, &command);
    if (rc == 0) {
        return 0;
    }
    if (rc > 0) {
        ours->sct = rc >> 8 & 7;
        ours->sc = rc & 0xff;
        return hifc_fail(-EIO, "%.200s: the drive refused command %#x: %s", base->uri, ours->opcode,
                         hifc_nvme_status_text(ours->sct, ours->sc));
    }
    if (errno == EACCES || errno == EPERM) {
        return hifc_fail(-EACCES, "%.200s: not permitted to send NVMe commands; run as root, or with "
                         "CAP_SYS_ADMIN", base->uri);
    }
    return hifc_fail(-errno, "%.200s: NVMe command %#x: %m", base->uri, ours->opcode);
}

static int file_health(struct hifc_device *base, uint8_t log[512])
{
    struct hifc_nvme_passthru command = {.opcode = NVME_GET_LOG_PAGE, .nsid = NVME_NSID_ALL,
                                         .cdw10 = (512 / 4 - 1) << 16 | NVME_LOG_SMART,
                                         .data = log, .data_bytes = 512};
    if (base->geometry.nsid == 0) {
        return hifc_fail(-ENOTSUP, "%.200s: no health log, for it is no NVMe drive", base->uri);
    }
    return file_passthru(base, &command);
}

const struct hifc_device_ops hifc_device_file = {
    .scheme = "file",
    .open = file_open,
    .close = file_close,
    .keep = file_keep,
    .health = file_health,
    .passthru = file_passthru,
    .register_memory = hifc_uring_register,
    .unregister_memory = hifc_uring_unregister,
    .qpair_open = hifc_uring_open,
    .qpair_close = hifc_uring_close,
    .submit = hifc_uring_submit,
    .poll = hifc_uring_poll,
    .event_fd = hifc_uring_event_fd,
};

static const struct hifc_device_ops psync_ops = {
    .scheme = "file",
    .open = file_open,
    .close = file_close,
    .keep = file_keep,
    .health = file_health,
    .passthru = file_passthru,
    .qpair_open = hifc_psync_open,
    .qpair_close = hifc_psync_close,
    .submit = hifc_psync_submit,
    .poll = hifc_psync_poll,
    .event_fd = hifc_psync_event_fd,
};
