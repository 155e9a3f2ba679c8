/* SPDX-License-Identifier: Apache-2.0
 *
 * long_sleep.h - takes the place of the C library's ppoll, by which the reactor sleeps, in the one
 * program that includes it. A test sees how long the reactor means to sleep at most and can take
 * that bound away: a wakeup that is lost then never comes, on a quick machine and on a slow one,
 * instead of coming late.
 */
#ifndef HIFC_LONG_SLEEP_H
#define HIFC_LONG_SLEEP_H

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic bool sleeps_are_endless;
static _Atomic uint32_t sleep_count;
static _Atomic uint64_t sleep_limit_ns; /* of the latest sleep; UINT64_MAX: none was asked for */

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *limit, const sigset_t *mask);

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *limit, const sigset_t *mask)
{
    struct timespec left = limit ? *limit : (struct timespec){0}; /* the kernel writes to it */
    bool endless = !limit || atomic_load(&sleeps_are_endless);
    atomic_store(&sleep_limit_ns, limit ? (uint64_t)left.tv_sec * 1000000000u +
                                              (uint64_t)left.tv_nsec : UINT64_MAX);
    atomic_fetch_add(&sleep_count, 1);
    return (int)syscall(SYS_ppoll, fds, count, endless ? NULL : &left, mask, 8);
}

/* Until the reactor has begun another sleep than the first `before` of them. It may still be on its
 * way into the kernel, and a wakeup at that point must not be lost either. */
static inline void await_sleep_after(uint32_t before)
{
    for (int64_t slept_us = 0; atomic_load(&sleep_count) <= before; slept_us += 100) {
        CHECK(slept_us < CHECK_HANG_US);
        usleep(100);
    }
}

#endif
