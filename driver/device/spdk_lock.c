/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_lock.c - one process owns a namespace of a drive or target.
 *
 * There is no file to lock, so that it is one in the folder of sockets and locks, named after what
 * it stands for. This keeps processes of one machine apart; a second machine that opens the same
 * namespace is not noticed. The last owner removes the file while he holds it alone; a lock on
 * a file that was removed meanwhile counts for nothing and is taken anew. What a killed process
 * leaves behind, the next owner removes. Any thread.
 */
#define _GNU_SOURCE /* O_NOFOLLOW */
#include <ctype.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/lock.h"
#include "device/spdk.h"
#include "util/error.h"
#include "util/run_folder.h"

#define TRIES_MAX 100u

/* Long and odd names are told apart by their hash (FNV-1a). */
static int make_path(const struct hifc_spdk_target *target, char *out, size_t size)
{
    char folder[64], key[400];
    uint64_t hash = 0xcbf29ce484222325ull;
    int rc = hifc_run_folder(folder, sizeof(folder));
    if (rc) {
        return rc;
    }
    snprintf(key, sizeof(key), "%s-ns%u", target->where, target->nsid);
    for (char *c = key; *c; c++) {
        hash = (hash ^ (uint8_t)*c) * 0x100000001b3ull;
        *c = isalnum((unsigned char)*c) || *c == '.' || *c == '-' ? *c : '_';
    }
    snprintf(out, size, "%s/%.160s-%08x.lock", folder, key, (unsigned)(hash ^ hash >> 32));
    return 0;
}

static bool is_still_there(int fd, const char *path)
{
    struct stat ours, found;
    return fstat(fd, &ours) == 0 && stat(path, &found) == 0 && ours.st_dev == found.st_dev &&
           ours.st_ino == found.st_ino;
}

int hifc_spdk_lock_take(const struct hifc_spdk_target *target, bool shared,
                        struct hifc_spdk_lock *lock)
{
    lock->fd = -1;
    int rc = make_path(target, lock->path, sizeof(lock->path));
    for (unsigned i = 0; rc == 0 && i < TRIES_MAX; i++) {
        int fd = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0660);
        if (fd < 0) {
            return hifc_fail(errno == EACCES ? -EACCES : -EIO, "%s: cannot open its lock %s: %s",
                             target->where, lock->path, strerror(errno));
        }
        rc = hifc_lock_take(fd, shared, target->where);
        if (rc == 0 && is_still_there(fd, lock->path)) {
            lock->fd = fd;
            return 0;
        }
        close(fd);
    }
    return rc ? rc : hifc_fail(-EBUSY, "%s: others open and close it all the time", target->where);
}

void hifc_spdk_lock_drop(struct hifc_spdk_lock *lock)
{
    if (lock->fd < 0) {
        return;
    }
    if (flock(lock->fd, LOCK_EX | LOCK_NB) == 0 && is_still_there(lock->fd, lock->path)) {
        unlink(lock->path);
    }
    hifc_lock_drop(lock->fd);
    close(lock->fd);
    lock->fd = -1;
}
