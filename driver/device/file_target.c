/* SPDX-License-Identifier: Apache-2.0
 *
 * file_target.c - finds out what stands behind a file URI: its parameters, the file or block device
 * itself, who else has it, how large it is and in which units it takes direct I/O. Any thread.
 *
 * A file is created, with HIFC_DEVICE_CREATE and size=, readable by its owner alone since it holds
 * what users typed, and its space is allocated then and there: a device that runs out of space
 * later would be worse. Where the file system cannot allocate, zeros are written. sparse=1 (and
 * tmpfs) allocates each segment before it is used and gives space back on deallocate. A file never
 * grows afterwards. It gets its name when it is kept, so that a format that fails or is killed
 * leaves nothing behind; where the file system makes no files without a name, a kill leaves a file
 * of the size asked for, or an empty one, which the next open refuses with the fix.
 */
#define _GNU_SOURCE /* O_DIRECT, statx, fallocate */
#include "device/file_target.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "device/lock.h"
#include "util/error.h"

#define FILE_MAX_TRANSFER_MAX (64u << 20)
#define FILE_ALIGN_UNKNOWN 4096u /* where the kernel does not tell: before 6.1 */

#define ZEROS_BYTES (1u << 20)

#define CLAIM_WAIT_MS 500
#define CLAIM_RETRY_MS 10

/* ---- parameters ------------------------------------------------------------------------------ */

static int read_tristate(const struct hifc_uri *uri, const char *name, enum hifc_tristate *out)
{
    uint64_t value = *out;
    int rc = hifc_uri_u64(uri, name, &value);
    if (!rc && value > HIFC_AUTO) {
        rc = hifc_fail(-EINVAL, "file device: %s=%llu; it can be 0 or 1", name,
                       (unsigned long long)value);
    }
    *out = (enum hifc_tristate)value;
    return rc;
}

static int read_io(const struct hifc_uri *uri, enum hifc_tristate *sync_io)
{
    const char *io = hifc_uri_param(uri, "io");
    *sync_io = HIFC_AUTO;
    if (!io) {
        return 0;
    }
    *sync_io = strcmp(io, "sync") == 0;
    if (*sync_io == HIFC_NO && strcmp(io, "uring") != 0) {
        return hifc_fail(-EINVAL, "file device: io=%.40s; it can be uring or sync", io);
    }
    return 0;
}

int hifc_file_options(const struct hifc_uri *uri, unsigned flags, struct hifc_file_options *options)
{
    static const char *const known[] = {"size", "lba",    "max_transfer", "io",
                                        "sparse", "direct", NULL};
    *options = (struct hifc_file_options){.path = uri->target, .sparse = HIFC_AUTO,
                                          .direct = HIFC_AUTO,
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
        (options->max_transfer_bytes < 4096 || options->max_transfer_bytes % 4096 ||
         options->max_transfer_bytes > FILE_MAX_TRANSFER_MAX)) {
        return hifc_fail(-EINVAL, "file device: max_transfer=%llu; it must be whole pages of "
                         "4 KiB, at most 64 MiB", (unsigned long long)options->max_transfer_bytes);
    }
    return 0;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Where the kernel's devices are. A file made there would be one in memory under a drive's name. */
static bool is_device_folder(const char *path)
{
    return strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0;
}

static int explain_open(const struct hifc_file_options *options, int error)
{
    const char *path = options->path;
    switch (error) {
    case ENOENT:
        if (is_device_folder(path)) {
            return hifc_fail(-ENOENT, "%.200s: no such device; lsblk shows those of the kernel, and "
                             "a drive that was bound to vfio-pci is spdk://BDF?ns=1 (hifc-admin "
                             "list)", path);
        }
        if (options->create) {
            return hifc_fail(-ENOENT, "%.200s: the file or its directory does not exist; make the "
                             "directory, and give size= so that the file can be made", path);
        }
        return hifc_fail(-ENOENT, "%.200s: no such file; format it first, giving its size, or "
                         "check the path", path);
    case EACCES:
    case EPERM:
        return hifc_fail(-EACCES, "%.200s: not permitted; give this user access to it (group or "
                         "udev rule of the device, owner and mode of the file)", path);
    case EBUSY:
        return hifc_fail(-EBUSY, "%.200s: the kernel uses it: it, or a partition of it, is mounted "
                         "or belongs to a volume (see lsblk and findmnt); unmount it, or use "
                         "another device", path);
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

/* Who claims a block device: if it is one of us, the lock on it, or on what it stands on, tells. */
static int explain_claim(const struct hifc_file_options *options)
{
    int rc = 0;
    int fd = open(options->path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        struct stat status;
        struct hifc_backing backing = {0};
        rc = hifc_lock_take(fd, false, options->path);
        if (!rc && fstat(fd, &status) == 0) {
            rc = hifc_backing_take(&status, false, options->path, &backing);
            hifc_backing_drop(&backing, false);
        }
        close(fd);
    }
    return rc ? rc : explain_open(options, EBUSY);
}

static const char *directory_of(const char *path, char directory[PATH_MAX])
{
    snprintf(directory, PATH_MAX, "%s", path);
    *strrchr(directory, '/') = '\0';
    return directory[0] ? directory : "/";
}

static int open_path(const struct hifc_file_options *options, struct hifc_file_target *target)
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
    } else if (errno == ENOENT && options->create && options->size_bytes &&
               !is_device_folder(options->path)) {
        flags |= O_CREAT | O_EXCL;
        target->created = true;
    }
    target->fd = -1;
    if (target->created) {
        char directory[PATH_MAX];
        target->fd = open(directory_of(options->path, directory), O_TMPFILE | O_RDWR | O_CLOEXEC,
                          0600);
        target->unnamed = target->fd >= 0;
    }
    if (target->fd < 0) {
        target->fd = open_claiming(options->path, flags);
    }
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

static int no_room(const char *path, uint64_t size_bytes)
{
    return hifc_fail(-ENOSPC, "%.200s: no room for %llu bytes on that file system; use a smaller "
                     "size, or sparse=1 to allocate as it fills", path,
                     (unsigned long long)size_bytes);
}

static bool is_full(int error)
{
    return error == ENOSPC || error == EDQUOT;
}

/* ext2, ext3 and NFS before 4.2 cannot allocate: what is written has room. */
static int write_zeros(int fd, uint64_t size_bytes)
{
    struct statvfs fs;
    if (fstatvfs(fd, &fs) == 0 && size_bytes / fs.f_frsize > fs.f_bavail) {
        return ENOSPC; /* before the last user's room is taken for nothing */
    }
    uint8_t *zeros = calloc(1, ZEROS_BYTES);
    int rc = zeros ? 0 : ENOMEM;
    for (uint64_t done = 0; done < size_bytes && !rc;) {
        uint64_t left = size_bytes - done;
        ssize_t written = pwrite(fd, zeros, left < ZEROS_BYTES ? left : ZEROS_BYTES, (off_t)done);
        if (written > 0) {
            done += (uint64_t)written;
        } else if (errno != EINTR) {
            rc = errno;
        }
    }
    free(zeros);
    return rc ? rc : fsync(fd) == 0 ? 0 : errno;
}

static int give_size(const struct hifc_file_options *options, struct hifc_file_target *target)
{
    off_t size = (off_t)options->size_bytes;
    bool sparse = options->sparse == HIFC_AUTO ? target->tmpfs : options->sparse == HIFC_YES;
    int rc = sparse                                    ? ftruncate(target->fd, size)
             : fallocate(target->fd, 0, 0, size) == 0 ? 0
                                                       : -1;
    rc = rc == 0 ? 0 : errno;
    if (!sparse && (rc == EOPNOTSUPP || rc == ENOSYS)) {
        rc = write_zeros(target->fd, options->size_bytes);
    }
    if (is_full(rc)) {
        return no_room(options->path, options->size_bytes);
    }
    if (rc == EFBIG || rc == EINVAL) {
        return hifc_fail(-EFBIG, "%.200s: that file system has no files of %llu bytes; use a "
                         "smaller size", options->path, (unsigned long long)options->size_bytes);
    }
    return rc ? hifc_fail(-rc, "%.200s: cannot make it %llu bytes long: %s", options->path,
                          (unsigned long long)options->size_bytes, strerror(rc))
              : 0;
}

/* Gives the file its name, unless somebody else has made one of that name meanwhile. */
static int give_name(const char *path, int fd)
{
    char self[40];
    snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
    if (linkat(fd, "", AT_FDCWD, path, AT_EMPTY_PATH) == 0 ||
        (errno != EEXIST && linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0)) {
        return 0;
    }
    int error = errno;
    return error == EEXIST ? hifc_fail(-EEXIST, "%.200s: another process made this file meanwhile; "
                                       "use that one, or another path", path)
                           : hifc_fail(-error, "%.200s: cannot give the new file its name: %s; "
                                       "check the directory and that /proc is mounted", path,
                                       strerror(error));
}

int hifc_file_target_keep(const char *path, int fd, bool unnamed)
{
    char directory[PATH_MAX];
    int rc = unnamed ? give_name(path, fd) : 0;
    if (rc) {
        return rc;
    }
    int folder = open(directory_of(path, directory), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rc = fsync(fd) == 0 && (folder < 0 || fsync(folder) == 0) ? 0 : errno;
    if (folder >= 0) {
        close(folder);
    }
    if (rc) {
        hifc_file_target_remove(path, fd);
        return is_full(rc) ? hifc_fail(-ENOSPC, "%.200s: no room for the new file; free some there",
                                       path)
                           : hifc_fail(-rc, "%.200s: cannot make the new file durable: %s", path,
                                       strerror(rc));
    }
    return 0;
}

void hifc_file_target_remove(const char *path, int fd)
{
    struct stat here, there;
    if (fstat(fd, &here) == 0 && lstat(path, &there) == 0 && here.st_ino == there.st_ino &&
        here.st_dev == there.st_dev) {
        unlink(path);
    }
}

static int measure(const struct hifc_file_options *options, struct hifc_file_target *target)
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
        return hifc_fail(-EINVAL, "%.200s: it has %llu bytes, fewer than size=%llu; leave size "
                         "out, or remove it and format it anew if it is a file", options->path,
                         (unsigned long long)target->size_bytes,
                         (unsigned long long)options->size_bytes);
    }
    if (options->size_bytes) {
        target->size_bytes = options->size_bytes;
    }
    return 0;
}

/* Turns O_DIRECT on where that means something, and asks for its units. */
static int go_direct(const struct hifc_file_options *options, struct hifc_file_target *target)
{
    struct statx unit;
    uint32_t minimum = target->block ? target->block_bytes : 512;
    target->direct = options->direct != HIFC_NO && !target->tmpfs &&
                     fcntl(target->fd, F_SETFL, O_DIRECT) == 0;
    if (!target->direct) {
        if (options->direct == HIFC_YES) {
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

int hifc_file_target_open(const struct hifc_file_options *options, struct hifc_file_target *target)
{
    int rc = open_path(options, target);
    rc = rc ? rc : hifc_lock_take(target->fd, options->read_only, options->path);
    rc = rc ? rc
            : target->created ? give_size(options, target)
                              : hifc_backing_take(&target->status, options->read_only,
                                                  options->path, &target->backing);
    rc = rc ? rc : measure(options, target);
    return rc ? rc : go_direct(options, target);
}

void hifc_file_target_close(const struct hifc_file_options *options,
                            struct hifc_file_target *target)
{
    hifc_backing_drop(&target->backing, false);
    if (target->fd >= 0) {
        if (target->created && !target->unnamed) {
            hifc_file_target_remove(options->path, target->fd);
        }
        close(target->fd);
    }
}
