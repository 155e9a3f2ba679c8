/* SPDX-License-Identifier: Apache-2.0
 *
 * lock.c - one process owns a device.
 *
 * flock() on the descriptor that does the I/O: it excludes a second open in this process as well,
 * and it is what mkfs, systemd and udev honour on block devices. It goes with the last reference,
 * and a ring is one: after a kill the kernel keeps the lock until it has got every command of the
 * dead process back from the drive, so that the next owner never meets a stale write. That takes
 * tens of milliseconds, hence the wait for a holder who is dead. Any thread.
 */
#include "device/lock.h"

#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "util/error.h"

#define LOCK_RETRY_MS 5
/* udev holds a shared lock on a block device for the moment in which it probes it, and whether a
 * holder in another pid namespace is dead is not to be seen. */
#define LOCK_WAIT_MS 300
#define LOCK_WAIT_DEAD_MS 10000

struct holders {
    char text[160]; /* "pid 12 (python3), pid 13 (hifc-admin)" */
    int32_t pids[HIFC_ERROR_HOLDERS_MAX];
    uint32_t count; /* of pids */
    bool self;
    bool alive; /* at least one runs */
    bool dead;  /* at least one is gone */
};

/* False when the process is gone or a zombie. */
static bool comm_of(long pid, char *out, size_t size)
{
    char path[64], line[256] = "";
    snprintf(path, sizeof(path), "/proc/%ld/stat", pid);
    snprintf(out, size, "ended");
    FILE *file = fopen(path, "re");
    if (!file) {
        return false;
    }
    bool got = fgets(line, sizeof(line), file);
    fclose(file);
    char *open = strchr(line, '('), *end = strrchr(line, ')');
    if (!got || !open || !end || end < open || strlen(end) < 3 || end[2] == 'Z' || end[2] == 'X') {
        return false;
    }
    snprintf(out, size, "%.*s", (int)(end - open - 1), open + 1);
    return true;
}

static void add_holder(struct holders *holders, long pid)
{
    char comm[64], holder[128];
    bool alive = comm_of(pid, comm, sizeof(comm));
    size_t used = strlen(holders->text);
    snprintf(holder, sizeof(holder), "%spid %ld (%s)", used ? ", " : "", pid, comm);
    strncat(holders->text, holder, sizeof(holders->text) - used - 1);
    if (holders->count < HIFC_ERROR_HOLDERS_MAX) {
        holders->pids[holders->count++] = (int32_t)pid;
    }
    holders->self |= pid == getpid();
    holders->alive |= alive;
    holders->dead |= !alive;
}

static void find_holders(int fd, struct holders *holders)
{
    struct stat status;
    char line[256];
    memset(holders, 0, sizeof(*holders));
    FILE *file = fopen("/proc/locks", "re");
    if (!file) {
        return;
    }
    while (fstat(fd, &status) == 0 && fgets(line, sizeof(line), file)) {
        long pid;
        unsigned major_number, minor_number;
        unsigned long inode;
        /* Waiters have "->" after their number and do not match. */
        if (sscanf(line, "%*d: FLOCK %*s %*s %ld %x:%x:%lu", &pid, &major_number, &minor_number,
                   &inode) == 4 &&
            inode == status.st_ino && major_number == major(status.st_dev) &&
            minor_number == minor(status.st_dev) && pid > 0) {
            add_holder(holders, pid);
        }
    }
    fclose(file);
}

static int fail_busy(const struct holders *holders, const char *what)
{
    if (holders->self) {
        return hifc_fail(-EBUSY, "%.200s: this process, %s, has it open already; close that one "
                         "first", what, holders->text);
    }
    if (holders->dead && !holders->alive) {
        return hifc_fail(-EBUSY, "%.200s: the kernel still waits for I/O of %s; look at the kernel "
                         "log, the drive may hang", what, holders->text);
    }
    return hifc_fail(-EBUSY, "%.200s: in use by %s; one process owns a device: stop that one "
                     "first, or use another device", what,
                     holders->text[0] ? holders->text : "another process");
}

int hifc_lock_take(int fd, bool shared, const char *what)
{
    struct holders holders;
    for (int waited_ms = 0;; waited_ms += LOCK_RETRY_MS) {
        if (flock(fd, (shared ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0) {
            return 0;
        }
        if (errno != EWOULDBLOCK) {
            int code = -errno;
            return hifc_fail(code, "%.200s: cannot lock it: %s; put it on a file system with flock",
                             what, strerror(errno));
        }
        find_holders(fd, &holders);
        int bound_ms = holders.self                     ? 0
                       : holders.dead && !holders.alive ? LOCK_WAIT_DEAD_MS
                                                        : LOCK_WAIT_MS;
        if (waited_ms >= bound_ms) {
            int rc = fail_busy(&holders, what);
            hifc_error_holders(holders.pids, holders.count);
            return rc;
        }
        nanosleep(&(struct timespec){.tv_nsec = LOCK_RETRY_MS * 1000000l}, NULL);
    }
}

void hifc_lock_drop(int fd)
{
    flock(fd, LOCK_UN);
}
