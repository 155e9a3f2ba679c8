/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c - a file or a kernel block device: file:///path?size=8GiB, file:///dev/nvme1n1
 *
 * Here it is opened, locked and measured; commands go through uring.c, or through psync.c on tmpfs
 * and where io=sync asks for it. O_DIRECT wherever the file system takes it (geometry.direct).
 *
 * A file is created, with HIFC_DEVICE_CREATE and size=, readable by its owner alone since it holds
 * what users typed, and its space is allocated then and there: a device that runs out of space
 * later would be worse. sparse=1 (and tmpfs) leaves that to the first write and gives space back on
 * deallocate. A file never grows afterwards. A crash leaves a file behind that is as large as asked.
 */
#define _GNU_SOURCE /* O_DIRECT, statx, fallocate */
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "device/command.h"
#include "device/device.h"
#include "device/file.h"
#include "device/lock.h"
#include "error.h"

#define FILE_MAX_TRANSFER_DEFAULT (512u << 10)
#define TMPFS_MAX_TRANSFER_DEFAULT (256u << 10) /* what was copied is still in cache afterwards */
#define FILE_MAX_TRANSFER_MAX (64u << 20)
#define FILE_LBA_BYTES 4096u
#define FILE_ALIGN_UNKNOWN 4096u /* where the kernel does not tell: before 6.1 */

#define CLAIM_WAIT_MS 500
#define CLAIM_RETRY_MS 10

enum tristate { NO = 0, YES = 1, AUTO = 2 };

struct options {
    const char *path;
    uint64_t size_bytes; /* 0: as large as it is */
    uint64_t lba_bytes;
    uint64_t max_transfer_bytes; /* 0: the default */
    enum tristate sync_io, sparse, direct;
    bool read_only, create;
};

/* What was found out about the path. */
struct target {
    int fd;
    bool block, tmpfs, created, direct;
    struct stat status;
    uint64_t size_bytes;
    uint32_t block_bytes; /* smallest unit of direct I/O */
    uint32_t align_bytes; /* of memory */
};

/* ---- parameters ------------------------------------------------------------------------------ */

static int read_tristate(const struct hifc_uri *uri, const char *name, enum tristate *out)
{
    uint64_t value = *out;
    int rc = hifc_uri_u64(uri, name, &value);
    if (!rc && value > AUTO) {
        rc = hifc_fail(-EINVAL, "file device: %s=%llu; it can be 0 or 1", name,
                       (unsigned long long)value);
    }
    *out = (enum tristate)value;
    return rc;
}

static int read_io(const struct hifc_uri *uri, enum tristate *sync_io)
{
    const char *io = hifc_uri_param(uri, "io");
    *sync_io = AUTO;
    if (!io) {
        return 0;
    }
    *sync_io = strcmp(io, "sync") == 0;
    if (*sync_io == NO && strcmp(io, "uring") != 0) {
        return hifc_fail(-EINVAL, "file device: io=%.40s; it can be uring or sync", io);
    }
    return 0;
}

static int read_options(const struct hifc_uri *uri, unsigned flags, struct options *options)
{
    static const char *const known[] = {"size", "lba",    "max_transfer", "io",
                                        "sparse", "direct", NULL};
    *options = (struct options){.path = uri->target, .lba_bytes = 0, .sparse = AUTO, .direct = AUTO,
                                .read_only = flags & HIFC_DEVICE_READ_ONLY,
                                .create = flags & HIFC_DEVICE_CREATE};
    int rc = hifc_uri_allow(uri, known);
    rc = rc ? rc : hifc_uri_size(uri, "size", &options->size_bytes);
    rc = rc ? rc : hifc_uri_u64(uri, "lba", &options->lba_bytes);
    rc = rc ? rc : hifc_uri_size(uri, "max_transfer", &options->max_transfer_bytes);
    rc = rc ? rc : read_io(uri, &options->sync_io);
    rc = rc ? rc : read_tristate(uri, "sparse", &options->sparse);
    rc = rc ? rc : read_tristate(uri, "direct", &options->direct);
    if (rc) {
        return rc;
    }
    if (options->path[0] != '/') {
        return hifc_fail(-EINVAL, "file device: '%.200s' is no absolute path; write three slashes, "
                         "as in file:///var/lib/hifc.img", options->path);
    }
    if (options->lba_bytes && options->lba_bytes != 512 && options->lba_bytes != 4096) {
        return hifc_fail(-EINVAL, "file device: lba=%llu; it can be 512 or 4096",
                         (unsigned long long)options->lba_bytes);
    }
    if (hifc_uri_param(uri, "max_transfer") &&
        (options->max_transfer_bytes < 4096 || options->max_transfer_bytes > FILE_MAX_TRANSFER_MAX ||
         options->max_transfer_bytes % 4096)) {
        return hifc_fail(-EINVAL, "file device: max_transfer=%llu; it must be whole pages of 4 KiB, "
                         "at most 64 MiB", (unsigned long long)options->max_transfer_bytes);
    }
    return 0;
}

/* ---- opening --------------------------------------------------------------------------------- */

static int explain_open(const struct options *options, int error)
{
    const char *path = options->path;
    switch (error) {
    case ENOENT:
        if (options->create) {
            return hifc_fail(-ENOENT, "%.200s: the file or its directory does not exist; make the "
                             "directory, and give size= so that the file can be made", path);
        }
        return hifc_fail(-ENOENT, "%.200s: no such file; format it first, giving its size, or check "
                         "the path", path);
    case EACCES:
    case EPERM:
        return hifc_fail(-EACCES, "%.200s: not permitted; give this user access to it (group or "
                         "udev rule of the device, owner and mode of the file)", path);
    case EBUSY:
        return hifc_fail(-EBUSY, "%.200s: the kernel uses it: it, or a partition of it, is mounted "
                         "or belongs to a volume (see lsblk and findmnt); unmount it, or use another "
                         "device", path);
    case EROFS:
        return hifc_fail(-EROFS, "%.200s: read-only; open it read-only, or make it writable", path);
    case ENXIO:
    case ENODEV:
    case ENOMEDIUM:
        return hifc_fail(-ENODEV, "%.200s: no device stands behind it; check lsblk", path);
    default:
        return hifc_fail(-error, "%.200s: cannot open it: %s", path, strerror(error));
    }
}

/* The claim on a block device (O_EXCL) outlives a killed owner by the time that the kernel takes to
 * get its commands back, as the lock does (lock.c). */
static int open_claiming(const char *path, int flags)
{
    int fd = open(path, flags, 0600);
    for (int waited_ms = 0; fd < 0 && errno == EBUSY && waited_ms < CLAIM_WAIT_MS;
         waited_ms += CLAIM_RETRY_MS) {
        nanosleep(&(struct timespec){.tv_nsec = CLAIM_RETRY_MS * 1000000l}, NULL);
        fd = open(path, flags, 0600);
    }
    return fd;
}

/* Who claims a block device: if it is one of us, the lock tells. */
static int explain_claim(const struct options *options)
{
    int rc = 0;
    int fd = open(options->path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        rc = hifc_lock_take(fd, false, options->path);
        close(fd);
    }
    return rc ? rc : explain_open(options, EBUSY);
}

static int open_path(const struct options *options, struct target *target)
{
    int flags = O_CLOEXEC | (options->read_only ? O_RDONLY : O_RDWR);
    struct stat status;
    if (stat(options->path, &status) == 0) {
        if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
            return hifc_fail(-EINVAL, "%.200s: neither a file nor a block device", options->path);
        }
        if (S_ISBLK(status.st_mode) && !options->read_only) {
            flags |= O_EXCL; /* refused while it is mounted or part of a volume */
        }
    } else if (errno == ENOENT && options->create && options->size_bytes) {
        flags |= O_CREAT | O_EXCL;
        target->created = true;
    }
    target->fd = open_claiming(options->path, flags);
    if (target->fd < 0) {
        return errno == EBUSY ? explain_claim(options) : explain_open(options, errno);
    }
    if (fstat(target->fd, &target->status) != 0) {
        return explain_open(options, errno);
    }
    target->block = S_ISBLK(target->status.st_mode);
    struct statfs fs;
    target->tmpfs = !target->block && fstatfs(target->fd, &fs) == 0 &&
                    (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
    return 0;
}

static int give_size(const struct options *options, struct target *target)
{
    off_t size = (off_t)options->size_bytes;
    bool sparse = options->sparse == AUTO ? target->tmpfs : options->sparse == YES;
    int rc = 0;
    if (!sparse) {
        rc = fallocate(target->fd, 0, 0, size) == 0 ? 0 : errno;
    }
    if (sparse || rc == EOPNOTSUPP || rc == ENOSYS) {
        rc = ftruncate(target->fd, size) == 0 ? 0 : errno;
    }
    if (rc == ENOSPC || rc == EDQUOT) {
        return hifc_fail(-ENOSPC, "%.200s: no room for %llu bytes on that file system; use a smaller "
                         "size, or sparse=1 to allocate on first write", options->path,
                         (unsigned long long)options->size_bytes);
    }
    if (rc) {
        return hifc_fail(-rc, "%.200s: cannot make it %llu bytes long: %s", options->path,
                         (unsigned long long)options->size_bytes, strerror(rc));
    }
    return 0;
}

static int measure(const struct options *options, struct target *target)
{
    int sector = 512;
    if (target->block) {
        if (ioctl(target->fd, BLKGETSIZE64, &target->size_bytes) != 0 ||
            ioctl(target->fd, BLKSSZGET, &sector) != 0) {
            return explain_open(options, errno);
        }
        target->block_bytes = (uint32_t)sector;
    } else {
        if (fstat(target->fd, &target->status) != 0) {
            return explain_open(options, errno);
        }
        target->size_bytes = (uint64_t)target->status.st_size;
    }
    if (options->size_bytes > target->size_bytes) {
        return hifc_fail(-EINVAL, "%.200s: it has %llu bytes, fewer than size=%llu; leave size out, "
                         "or remove it and format it anew if it is a file", options->path,
                         (unsigned long long)target->size_bytes,
                         (unsigned long long)options->size_bytes);
    }
    if (options->size_bytes) {
        target->size_bytes = options->size_bytes;
    }
    return 0;
}

/* Turns O_DIRECT on where that means something, and asks for its units. */
static int go_direct(const struct options *options, struct target *target)
{
    struct statx unit;
    uint32_t minimum = target->block ? target->block_bytes : 512;
    target->direct = options->direct != NO && !target->tmpfs &&
                     fcntl(target->fd, F_SETFL, O_DIRECT) == 0;
    if (!target->direct) {
        if (options->direct == YES) {
            return hifc_fail(-ENOTSUP, "%.200s: this file system has no direct I/O; leave direct=1 "
                             "out, or put the file elsewhere", options->path);
        }
        fcntl(target->fd, F_SETFL, 0);
        target->block_bytes = minimum;
        target->align_bytes = 1;
        return 0;
    }
    target->block_bytes = minimum;
    target->align_bytes = target->block ? minimum : FILE_ALIGN_UNKNOWN;
#ifdef STATX_DIOALIGN
    if (statx(target->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &unit) == 0 &&
        unit.stx_mask & STATX_DIOALIGN && unit.stx_dio_offset_align) {
        target->block_bytes = unit.stx_dio_offset_align > minimum ? unit.stx_dio_offset_align
                                                                  : minimum;
        /* One number for addresses and lengths of elements: the larger. */
        target->align_bytes = unit.stx_dio_mem_align > target->block_bytes ? unit.stx_dio_mem_align
                                                                           : target->block_bytes;
    }
#else
    (void)unit;
#endif
    return 0;
}

static int open_target(const struct options *options, struct target *target)
{
    int rc = open_path(options, target);
    rc = rc ? rc : hifc_lock_take(target->fd, options->read_only, options->path);
    rc = rc ? rc : target->created ? give_size(options, target) : 0;
    rc = rc ? rc : measure(options, target);
    return rc ? rc : go_direct(options, target);
}

static void close_target(const struct options *options, struct target *target)
{
    if (target->fd >= 0) {
        if (target->created) {
            unlink(options->path);
        }
        close(target->fd);
    }
}

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

static void describe_block(const struct target *target, struct hifc_geometry *geometry)
{
    char line[64];
    snprintf(geometry->model, sizeof(geometry->model), "block device");
    read_sysfs(&target->status, "device/model", geometry->model, sizeof(geometry->model));
    read_sysfs(&target->status, "device/serial", geometry->serial, sizeof(geometry->serial));
    read_sysfs(&target->status, "device/firmware_rev", geometry->firmware,
               sizeof(geometry->firmware));
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

static int describe(const struct options *options, const struct target *target,
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
        return hifc_fail(-EINVAL, "%.200s: it is empty; remove it and format it with size=, or check "
                         "the path", options->path);
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
    geometry->deallocate = options->sparse == AUTO ? target->tmpfs || holes
                                                   : options->sparse == YES;
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
    struct options options;
    struct target target = {.fd = -1};
    struct hifc_geometry geometry = {.serial = "-", .firmware = "-"};
    int rc = read_options(uri, flags, &options);
    if (rc) {
        return rc;
    }
    rc = open_target(&options, &target);
    rc = rc ? rc : describe(&options, &target, &geometry);
    struct hifc_file_device *device = rc ? NULL : calloc(1, sizeof(*device));
    if (!device) {
        close_target(&options, &target);
        return rc ? rc : hifc_fail(-ENOMEM, "%.200s: out of memory", options.path);
    }
    device->base.geometry = geometry;
    bool sync_io = options.sync_io == AUTO ? target.tmpfs : options.sync_io == YES;
    device->base.ops = sync_io ? &psync_ops : &hifc_device_file;
    device->fd = target.fd;
    device->read_only = options.read_only;
    pthread_mutex_init(&device->mutex, NULL);
    pthread_mutex_lock(&open_mutex);
    device->next = open_devices;
    open_devices = device;
    pthread_mutex_unlock(&open_mutex);
    *out = &device->base;
    return 0;
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
    if (!device->stranded) {
        hifc_lock_drop(device->fd); /* rings let go of the descriptor later, in the background */
    }
    close(device->fd);
    pthread_mutex_destroy(&device->mutex);
    free(device);
}

/* What the block layer answers, turned back into the NVMe status that it came from where there is
 * only one (blk_errors in the kernel), the nearest one otherwise. */
void hifc_io_fail_errno(struct hifc_io *io, int positive_errno)
{
    static const struct {
        int from, to;
        uint8_t sct, sc;
    } table[] = {
        {ENOSPC, -ENOSPC, HIFC_SCT_GENERIC, HIFC_SC_CAPACITY},
        {EDQUOT, -ENOSPC, HIFC_SCT_GENERIC, HIFC_SC_CAPACITY},
        {EFBIG, -EIO, HIFC_SCT_GENERIC, HIFC_SC_LBA_OUT_OF_RANGE},
        {ENODATA, -EIO, HIFC_SCT_MEDIA, HIFC_SC_UNRECOVERED_READ},
        {EILSEQ, -EIO, HIFC_SCT_MEDIA, HIFC_SC_GUARD_CHECK},
        {ENOLINK, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH},
        {ENODEV, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH},
        {ENXIO, -EIO, HIFC_SCT_PATH, HIFC_SC_HOST_PATH},
        {ETIMEDOUT, -ETIMEDOUT, HIFC_SCT_GENERIC, HIFC_SC_ABORTED},
        {ECANCELED, -ECANCELED, HIFC_SCT_GENERIC, HIFC_SC_ABORTED},
        {EOPNOTSUPP, -ENOTSUP, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD},
        {EINVAL, -EINVAL, HIFC_SCT_GENERIC, HIFC_SC_INVALID_FIELD},
        {EFAULT, -EFAULT, HIFC_SCT_GENERIC, HIFC_SC_DATA_TRANSFER},
        {EROFS, -EROFS, HIFC_SCT_COMMAND, HIFC_SC_READ_ONLY_RANGE},
        {EPERM, -EROFS, HIFC_SCT_COMMAND, HIFC_SC_READ_ONLY_RANGE},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (table[i].from == positive_errno) {
            hifc_io_set(io, table[i].to, table[i].sct, table[i].sc);
            return;
        }
    }
    hifc_io_set(io, -EIO, HIFC_SCT_GENERIC, HIFC_SC_INTERNAL);
}

const struct hifc_device_ops hifc_device_file = {
    .scheme = "file",
    .open = file_open,
    .close = file_close,
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
    .qpair_open = hifc_psync_open,
    .qpair_close = hifc_psync_close,
    .submit = hifc_psync_submit,
    .poll = hifc_psync_poll,
    .event_fd = hifc_psync_event_fd,
};
