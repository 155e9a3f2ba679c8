/* SPDX-License-Identifier: Apache-2.0
 *
 * thread.h - how the library starts a thread of its own. Any thread.
 */
#ifndef HIFC_THREAD_H
#define HIFC_THREAD_H

#include <pthread.h>
#include "util/thread.h"

/* Starts a thread that no signal is delivered to, since signals belong to the program. name: at most
 * 15 characters, shown by ps and gdb. owner: what the error message names, for example a device URI.
 * 0, or a negative errno with the last error set. */
int hifc_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *argument,
                      const char *owner);

#endif
