/* SPDX-License-Identifier: Apache-2.0
 *
 * backing.c - finds and holds the other names of a device's blocks.
 *
 * The lock of lock.c stands on one inode, and a loop device is another one than the file behind it.
 * So whoever opens a loop device, a partition of one, or a device-mapper or RAID device over one,
 * locks the backing file as well; and whoever opens a file or block device that loop devices stand
 * on claims those (O_EXCL), which fails while one is mounted or part of a volume; a reader does so
 * for a moment. Hard links and bind mounts are the same inode and need nothing of this.
 *
 * A partition or a volume may be one of several in a backing file, so it locks that shared: it
 * excludes whoever opens the file itself, not its siblings. What cannot be looked at (a backing
 * file of another mount namespace, a loop device that this user may not open) is looked for in
 * /proc/locks and among the mounts. Any thread.
 */
#define _GNU_SOURCE
#include "device/backing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "device/lock.h"
#include "util/error.h"

#define DEPTH_MAX 8u     /* a partition of a volume over a loop device over a block device ... */
#define OWN_MAX HIFC_BACKING_MAX
#define CLAIM_WAIT_MS 300 /* as long as udev may look at a device */
#define CLAIM_RETRY_MS 10

struct search {
    struct hifc_backing *out;
    const char *path; /* what is opened, for messages */
    bool shared;
    dev_t own[OWN_MAX]; /* loop devices that the opened one stands on */
    unsigned own_count;
};

/* What a loop device stands on. */
struct loop {
    char name[64]; /* /dev/loop0 */
    char file[PATH_MAX];
    dev_t self, device, rdev; /* rdev: not 0 where it is a block device */
    ino_t inode;
};

static bool read_line(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "re");
    bool got = file && fgets(out, (int)size, file);
    if (file) {
        fclose(file);
    }
    if (got) {
        out[strcspn(out, "\n")] = '\0';
    }
    return got;
}

static bool read_device(const char *path, dev_t *out)
{
    char line[32];
    unsigned major_number, minor_number;
    bool got = read_line(path, line, sizeof(line)) &&
               sscanf(line, "%u:%u", &major_number, &minor_number) == 2;
    if (got) {
        *out = makedev(major_number, minor_number);
    }
    return got;
}

/* Of /sys/block/NAME; false where that is no loop device, or nothing is attached to it. */
static bool describe_loop(const char *name, struct loop *loop)
{
    char path[PATH_MAX];
    struct loop_info64 info;
    struct stat status;
    *loop = (struct loop){0};
    snprintf(path, sizeof(path), "/sys/block/%.40s/loop/backing_file", name);
    if (!read_line(path, loop->file, sizeof(loop->file))) {
        return false;
    }
    snprintf(loop->name, sizeof(loop->name), "/dev/%.40s", name);
    snprintf(path, sizeof(path), "/sys/block/%.40s/dev", name);
    if (!read_device(path, &loop->self)) {
        return false;
    }
    int fd = open(loop->name, O_RDONLY | O_CLOEXEC);
    bool told = fd >= 0 && ioctl(fd, LOOP_GET_STATUS64, &info) == 0;
    if (fd >= 0) {
        close(fd);
    }
    if (told) {
        loop->device = (dev_t)info.lo_device;
        loop->inode = (ino_t)info.lo_inode;
        loop->rdev = (dev_t)info.lo_rdevice;
    } else if (stat(loop->file, &status) == 0) {
        loop->device = status.st_dev;
        loop->inode = status.st_ino;
        loop->rdev = S_ISBLK(status.st_mode) ? status.st_rdev : 0;
    }
    return true;
}

static int keep(struct search *search, int fd)
{
    if (search->out->count == HIFC_BACKING_MAX) {
        close(fd);
        return hifc_fail(-EMFILE, "%.200s: more than %u loop devices stand on it; detach some",
                         search->path, HIFC_BACKING_MAX);
    }
    search->out->fds[search->out->count++] = fd;
    return 0;
}

/* ---- upwards: loop devices over what is opened ----------------------------------------------- */

static int claim(const char *name)
{
    int fd = open(name, O_RDONLY | O_EXCL | O_CLOEXEC);
    for (int waited_ms = 0; fd < 0 && errno == EBUSY && waited_ms < CLAIM_WAIT_MS;
         waited_ms += CLAIM_RETRY_MS) {
        nanosleep(&(struct timespec){.tv_nsec = CLAIM_RETRY_MS * 1000000l}, NULL);
        fd = open(name, O_RDONLY | O_EXCL | O_CLOEXEC);
    }
    return fd;
}

static bool is_mounted(dev_t device)
{
    char line[1024], wanted[32];
    bool found = false;
    FILE *file = fopen("/proc/self/mountinfo", "re");
    snprintf(wanted, sizeof(wanted), " %u:%u ", major(device), minor(device));
    while (file && !found && fgets(line, sizeof(line), file)) {
        found = strstr(line, wanted) != NULL;
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static int hold_loop(struct search *search, const struct loop *loop)
{
    for (unsigned i = 0; i < search->own_count; i++) {
        if (search->own[i] == loop->self) {
            return 0;
        }
    }
    int fd = claim(loop->name);
    if (fd >= 0 && search->shared) {
        close(fd); /* nobody writes to it; other readers may come */
        return 0;
    }
    if (fd >= 0) {
        return keep(search, fd);
    }
    if (errno == EBUSY || is_mounted(loop->self)) {
        return hifc_fail(-EBUSY, "%.200s: %s shows the same blocks and is in use: it, or a "
                         "partition of it, is mounted, belongs to a volume or is open (see lsblk "
                         "and losetup); unmount it and detach it, or use another device",
                         search->path, loop->name);
    }
    return 0;
}

/* rdev: of a block device, else 0. */
static int hold_loops_over(struct search *search, dev_t device, ino_t inode, dev_t rdev)
{
    int rc = 0;
    DIR *folder = opendir("/sys/block");
    struct dirent *entry;
    while (folder && rc == 0 && (entry = readdir(folder))) {
        struct loop loop;
        if (strncmp(entry->d_name, "loop", 4) == 0 && describe_loop(entry->d_name, &loop) &&
            (rdev ? loop.rdev == rdev
                  : loop.rdev == 0 && loop.device == device && loop.inode == inode)) {
            rc = hold_loop(search, &loop);
        }
    }
    if (folder) {
        closedir(folder);
    }
    return rc;
}

/* ---- downwards: what the opened block device stands on --------------------------------------- */

static int walk_down(struct search *search, dev_t device, bool whole, unsigned depth);

/* Of a backing file that cannot be opened here. */
static bool is_locked(const struct loop *loop)
{
    char line[256];
    bool found = false;
    FILE *file = fopen("/proc/locks", "re");
    while (file && !found && fgets(line, sizeof(line), file)) {
        unsigned major_number, minor_number;
        unsigned long inode;
        found = sscanf(line, "%*d: FLOCK %*s %*s %*d %x:%x:%lu", &major_number, &minor_number,
                       &inode) == 3 &&
                inode == loop->inode && makedev(major_number, minor_number) == loop->device;
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static int hold_backing(struct search *search, const struct loop *loop, bool whole,
                        unsigned depth)
{
    char what[200];
    struct stat status;
    snprintf(what, sizeof(what), "%.60s: its backing file %.100s", search->path, loop->file);
    int fd = open(loop->file, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0 || status.st_ino != loop->inode ||
        status.st_dev != loop->device) {
        if (fd >= 0) {
            close(fd);
        }
        return is_locked(loop) ? hifc_fail(-EBUSY, "%s: in use by another process; one process "
                                           "owns a device: stop that one first, or use another "
                                           "device", what)
                               : 0;
    }
    int rc = hifc_lock_take(fd, search->shared || !whole, what);
    if (rc) {
        close(fd);
        return rc;
    }
    rc = keep(search, fd);
    rc = rc ? rc : hold_loops_over(search, loop->device, loop->inode, loop->rdev);
    return rc || !loop->rdev ? rc : walk_down(search, loop->rdev, whole, depth + 1);
}

static int walk_slaves(struct search *search, const char *base, unsigned depth)
{
    char path[PATH_MAX];
    int rc = 0;
    snprintf(path, sizeof(path), "%.200s/slaves", base);
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && rc == 0 && (entry = readdir(folder))) {
        dev_t below;
        snprintf(path, sizeof(path), "%.200s/slaves/%.200s/dev", base, entry->d_name);
        if (entry->d_name[0] != '.' && read_device(path, &below)) {
            rc = walk_down(search, below, false, depth + 1);
        }
    }
    if (folder) {
        closedir(folder);
    }
    return rc;
}

static int walk_down(struct search *search, dev_t device, bool whole, unsigned depth)
{
    char base[64], path[128], resolved[PATH_MAX];
    dev_t disk;
    struct loop loop;
    snprintf(base, sizeof(base), "/sys/dev/block/%u:%u", major(device), minor(device));
    snprintf(path, sizeof(path), "%s/partition", base);
    if (depth == DEPTH_MAX || !realpath(base, resolved)) {
        return 0;
    }
    if (access(path, F_OK) == 0) {
        snprintf(path, sizeof(path), "%s/../dev", base);
        return read_device(path, &disk) ? walk_down(search, disk, false, depth + 1) : 0;
    }
    if (!describe_loop(strrchr(resolved, '/') + 1, &loop)) {
        return walk_slaves(search, base, depth);
    }
    if (search->own_count < OWN_MAX) {
        search->own[search->own_count++] = device;
    }
    return hold_backing(search, &loop, whole, depth);
}

int hifc_backing_take(const struct stat *status, bool shared, const char *path,
                      struct hifc_backing *backing)
{
    struct search search = {.out = backing, .path = path, .shared = shared};
    dev_t rdev = S_ISBLK(status->st_mode) ? status->st_rdev : 0;
    int rc = rdev ? walk_down(&search, rdev, true, 0) : 0;
    return rc ? rc : hold_loops_over(&search, status->st_dev, status->st_ino, rdev);
}

void hifc_backing_drop(struct hifc_backing *backing, bool keep_locks)
{
    for (unsigned i = 0; i < backing->count; i++) {
        if (!keep_locks) {
            hifc_lock_drop(backing->fds[i]);
        }
        close(backing->fds[i]);
    }
    backing->count = 0;
}
