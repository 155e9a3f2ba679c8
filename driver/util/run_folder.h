/* SPDX-License-Identifier: Apache-2.0
 *
 * run_folder.h - the folder for what lives as long as a process: sockets of owners, locks.
 */
#ifndef HIFC_RUN_FOLDER_H
#define HIFC_RUN_FOLDER_H

#include <stddef.h>

/* The first of /run/hifc, /run/user/UID/hifc and /tmp/hifc-UID that this user may write to, made if
 * it is missing. Any thread. */
int hifc_run_folder(char *out, size_t size);
/* Makes one folder; -EPERM where others could put their own files into it. */
int hifc_run_folder_make(const char *folder);

#endif
