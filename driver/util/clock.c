/* SPDX-License-Identifier: Apache-2.0
 *
 * clock.c - the one clock of the library: see clock.h.
 */
#include "util/clock.h"

#include <stdbool.h>

#define NS_PER_S 1000000000ull

static uint64_t read_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t hifc_now_ns(void)
{
    return read_ns(CLOCK_MONOTONIC);
}

uint64_t hifc_now_ms(void)
{
    return read_ns(CLOCK_MONOTONIC) / 1000000;
}

uint64_t hifc_now_ms_coarse(void)
{
    return read_ns(CLOCK_MONOTONIC_COARSE) / 1000000;
}

uint64_t hifc_deadline_ns(int64_t timeout_us)
{
    uint64_t now = hifc_now_ns();
    bool never = timeout_us < 0 || (uint64_t)timeout_us > (UINT64_MAX - now) / 1000;
    return never ? UINT64_MAX : now + (uint64_t)timeout_us * 1000;
}

struct timespec hifc_after_ns(uint64_t duration_ns)
{
    uint64_t then = hifc_now_ns() + duration_ns;
    return (struct timespec){.tv_sec = (time_t)(then / NS_PER_S), .tv_nsec = (long)(then % NS_PER_S)};
}
