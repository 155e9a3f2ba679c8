/* SPDX-License-Identifier: Apache-2.0
 *
 * clock.h - the one clock of the library: monotonic, read here only. Any thread.
 */
#ifndef HIFC_CLOCK_H
#define HIFC_CLOCK_H

#include <stdint.h>
#include <time.h>

uint64_t hifc_now_ns(void);
uint64_t hifc_now_ms(void);
/* The time of the kernel's last tick: some milliseconds old, and read in a few nanoseconds. */
uint64_t hifc_now_ms_coarse(void);
/* A point of time on this clock. timeout_us < 0: never, which is UINT64_MAX. */
uint64_t hifc_deadline_ns(int64_t timeout_us);
/* The point of time duration_ns from now, as pthread_cond_timedwait and sem_clockwait take it. */
struct timespec hifc_after_ns(uint64_t duration_ns);

#endif
