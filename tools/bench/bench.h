/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.h - what the measurements of hifc_bench share: clocks, quartiles, a namespace to measure on.
 *
 * hifc_bench is the C part of tools/bench/driver. It is linked with the library's own objects, so
 * that it reaches internal functions of the very code that ships; only the ram device is built a
 * second time, with a switch that turns its copying off (ram_switch.c). Each command measures one
 * thing and prints one JSON object on stdout. One thread.
 */
#ifndef HIFC_BENCH_H
#define HIFC_BENCH_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "hifc.h"

struct bench_options {
    const char *uri;
    uint64_t entries;    /* index, reopen */
    uint64_t size_bytes; /* of a value */
    uint32_t batch;      /* requests a submission */
    uint32_t depth;      /* requests in flight */
    uint32_t rounds;
    uint32_t round_ms;
    uint32_t batch_inflight; /* open options of the same name; 0: the default */
    uint32_t batch_bytes;
    bool write;
};

/* ---- common.c ------------------------------------------------------------------------------- */

/* Prints the message, and the library's last error where that is set, and ends the process. */
void bench_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* Dies unless result is 0. */
void bench_must(int result, const char *what);

uint64_t bench_now_ns(void); /* CLOCK_MONOTONIC */
/* CPU time of this thread: time in which others had the CPU does not count. */
uint64_t bench_cpu_ns(void);

static inline uint64_t bench_tsc(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ __volatile__("isb; mrs %0, cntvct_el0" : "=r"(ticks)::"memory");
    return ticks;
#else
    return bench_now_ns();
#endif
}
double bench_ns_per_tsc(void); /* calibrated at the first call */

struct bench_quartiles {
    double q1, median, q3;
};
struct bench_quartiles bench_quartiles(double *values, uint32_t count); /* sorts values */
/* "NAME": MEDIAN, "NAME_iqr": [Q1, Q3] and a comma if more follows. */
void bench_print(const char *name, struct bench_quartiles value, bool more);

uint64_t bench_random(uint64_t *state); /* splitmix64 */
struct hifc_key bench_key(uint64_t number);

struct hifc_ns *bench_open(const struct bench_options *options,
                           const struct hifc_format_opts *format, struct hifc_open_opts *open);
/* Submits, waits and frees the ticket; dies unless every request ended with HIFC_OK. */
void bench_run(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count);

/* ---- ram_switch.c --------------------------------------------------------------------------- */

/* Off: commands of ram devices complete without their bytes being moved. For Python, too. */
HIFC_API void hifc_bench_ram_copies(int on);

/* ---- the commands --------------------------------------------------------------------------- */

int bench_compare(const struct bench_options *options);
int bench_cost(const struct bench_options *options);
int bench_index(const struct bench_options *options);
int bench_reopen(const struct bench_options *options);
int bench_throughput(const struct bench_options *options);

#endif
