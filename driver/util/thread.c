/* SPDX-License-Identifier: Apache-2.0
 *
 * thread.c - how the library starts a thread of its own: see thread.h.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "util/thread.h"

#include <signal.h>

#include "util/error.h"

int hifc_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *argument,
                      const char *owner)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        return hifc_fail_thread(error, owner);
    }
    pthread_setname_np(*thread, name);
    return 0;
}
