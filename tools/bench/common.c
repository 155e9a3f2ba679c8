/* SPDX-License-Identifier: Apache-2.0
 *
 * common.c - clocks, quartiles and a namespace to measure on.
 */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"

void bench_die(const char *format, ...)
{
    struct hifc_error error;
    va_list arguments;
    va_start(arguments, format);
    fputs("hifc_bench: ", stderr);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    if (hifc_last_error(&error) != 0) {
        fprintf(stderr, ": %s", error.message);
    }
    fputc('\n', stderr);
    exit(1);
}

void bench_must(int result, const char *what)
{
    if (result != 0) {
        bench_die("%s: %s", what, strerror(-result));
    }
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

uint64_t bench_now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t bench_cpu_ns(void)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

double bench_ns_per_tsc(void)
{
    static double ratio;
    if (ratio == 0) {
        uint64_t start_ns = bench_now_ns(), start = bench_tsc(), now_ns;
        do {
            now_ns = bench_now_ns();
        } while (now_ns - start_ns < 20000000);
        ratio = (double)(now_ns - start_ns) / (double)(bench_tsc() - start);
    }
    return ratio;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double at(const double *sorted, uint32_t count, double share)
{
    double place = share * (count - 1);
    uint32_t below = (uint32_t)place;
    uint32_t above = below + 1 < count ? below + 1 : below;
    return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

struct bench_quartiles bench_quartiles(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, compare);
    return (struct bench_quartiles){.q1 = at(values, count, 0.25),
                                    .median = at(values, count, 0.5),
                                    .q3 = at(values, count, 0.75)};
}

void bench_print(const char *name, struct bench_quartiles value, bool more)
{
    printf("\"%s\": %.4g, \"%s_iqr\": [%.4g, %.4g]%s", name, value.median, name, value.q1,
           value.q3, more ? ", " : "");
}

uint64_t bench_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

struct hifc_key bench_key(uint64_t number)
{
    uint64_t state = number, half[2];
    struct hifc_key key;
    half[0] = bench_random(&state);
    half[1] = bench_random(&state);
    memcpy(key.bytes, half, sizeof half);
    return key;
}

struct hifc_ns *bench_open(const struct bench_options *options,
                           const struct hifc_format_opts *format, struct hifc_open_opts *open)
{
    struct hifc_ns *ns;
    if (format) {
        bench_must(hifc_format(options->uri, format), "format");
    }
    open->no_owner_socket = 1;
    open->batch_inflight = options->batch_inflight;
    open->batch_size_max_bytes = options->batch_bytes;
    bench_must(hifc_open(options->uri, open, &ns), "open");
    return ns;
}

void bench_run(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count)
{
    struct hifc_ticket *ticket;
    bench_must(hifc_submit(ns, reqs, count, &ticket), "submit");
    while (hifc_ticket_wait(ticket, -1) == 0) {
    }
    hifc_ticket_free(ticket);
    for (uint32_t i = 0; i < count; i++) {
        if (reqs[i].status != HIFC_OK) {
            bench_die("request %u (op %u) was answered %d", i, reqs[i].op, reqs[i].status);
        }
    }
}
