/* SPDX-License-Identifier: Apache-2.0
 *
 * tsc_khz.c - prints how many thousand times a second this host's time stamp counter counts.
 *
 * An emulated CPU counts with it, and a kernel that boots measures it against an emulated timer: on a
 * busy host it was seen to be off by a factor of five, and so were then all clocks and timeouts in
 * the machine. Either end is the shortest of several readings, so that being preempted does no harm.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

#define READINGS 100
#define INTERVAL_NS 200000000l

struct reading {
    uint64_t ticks, ns, width_ns;
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_RAW, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct reading read_both(void)
{
    struct reading best = {.width_ns = UINT64_MAX};
    for (int i = 0; i < READINGS; i++) {
        uint64_t before = now_ns(), ticks = __rdtsc(), width = now_ns() - before;
        if (width < best.width_ns) {
            best = (struct reading){ticks, before + width / 2, width};
        }
    }
    return best;
}

int main(void)
{
    struct reading first = read_both();
    nanosleep(&(struct timespec){.tv_nsec = INTERVAL_NS}, NULL);
    struct reading last = read_both();
    double us = (double)(last.ns - first.ns) / 1e3;
    printf("%.0f\n", (double)(last.ticks - first.ticks) / us * 1e3);
    return 0;
}
