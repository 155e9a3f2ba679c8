/* SPDX-License-Identifier: Apache-2.0
 *
 * run_folder.c - where sockets and locks lie: one place for all users if they may write there, since
 * locks in two places do not see each other. A folder counts only if it is root's or this user's and
 * not everybody's to write to, for /tmp is anybody's. Its group may be given it:
 * install -d -g GROUP -m 2775 /run/hifc.
 */
#include "util/run_folder.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/error.h"

int hifc_run_folder_make(const char *folder)
{
    struct stat found;
    if (mkdir(folder, 0755) != 0 && errno != EEXIST) {
        return hifc_fail(-errno, "%s: the folder for sockets and locks cannot be made: %s", folder,
                         strerror(errno));
    }
    if (lstat(folder, &found) != 0 || !S_ISDIR(found.st_mode) ||
        (found.st_uid != 0 && found.st_uid != geteuid()) || (found.st_mode & S_IWOTH)) {
        return hifc_fail(-EPERM, "%s: this folder for sockets and locks belongs to another user, or "
                                 "everybody may write to it: remove it", folder);
    }
    if (access(folder, R_OK | W_OK | X_OK) != 0) {
        return hifc_fail(-EACCES, "%s: no right to write there", folder);
    }
    return 0;
}

int hifc_run_folder(char *out, size_t size)
{
    unsigned uid = geteuid();
    snprintf(out, size, "/run/hifc");
    if (hifc_run_folder_make(out) == 0) {
        return 0;
    }
    snprintf(out, size, "/run/user/%u/hifc", uid);
    if (hifc_run_folder_make(out) == 0) {
        return 0;
    }
    snprintf(out, size, "/tmp/hifc-%u", uid);
    if (hifc_run_folder_make(out) == 0) {
        return 0;
    }
    return hifc_fail(-EACCES, "none of /run/hifc, /run/user/%u/hifc and /tmp/hifc-%u can be written "
                              "to, and sockets and locks must lie there; as root: install -d -g "
                              "GROUP -m 2775 /run/hifc", uid, uid);
}
