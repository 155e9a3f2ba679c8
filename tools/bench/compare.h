/* SPDX-License-Identifier: Apache-2.0
 *
 * compare.h - what the two sides of a comparison share: an account of CPU time, and the bare side.
 *
 * CPU time of an operation is the CPU time of the driving thread over a round, less the polls that
 * found nothing, over the operations that completed in it. A poll found nothing if it completed
 * nothing and took no longer than twice what a poll takes when nothing is outstanding: one that
 * moved a part of a transfer is work, though it completes nothing. The same rule, the same clock
 * and the same limit hold for both sides.
 */
#ifndef HIFC_BENCH_COMPARE_H
#define HIFC_BENCH_COMPARE_H

#include "bench.h"
#include "device/device.h"

struct bench_account {
    uint64_t start_ns, start_cpu_ns, end_tsc, last_tsc;
    uint64_t limit_tsc; /* no longer than this: nothing was found */
    uint64_t empty_tsc;
    uint64_t polls, empty;
    uint64_t operations;
};

struct bench_rate {
    double per_s;
    double cpu_ns; /* an operation */
    double empty;  /* share of polls */
    double share;  /* of its CPU that the thread had: less than one where others had it */
};

void bench_account_start(struct bench_account *account, uint64_t limit_tsc, uint32_t round_ms);
struct bench_rate bench_account_end(const struct bench_account *account);

/* On a busy machine a round may end with nothing done: it goes on until something is. */
static inline bool bench_account_over(const struct bench_account *account)
{
    uint64_t now = bench_tsc();
    return now >= account->end_tsc && (account->operations > 0 || now >= account->last_tsc);
}

static inline void bench_account_poll(struct bench_account *account, uint64_t start_tsc,
                                      bool completed_none)
{
    uint64_t took = bench_tsc() - start_tsc;
    account->polls++;
    if (completed_none && took <= account->limit_tsc) {
        account->empty++;
        account->empty_tsc += took;
    }
}

/* ---- bare.c: a loop on a queue pair of SPDK and nothing else --------------------------------- */

struct bench_bare;

struct bench_bare_options {
    struct hifc_device *device; /* of SPDK: the loop uses its controller */
    uint8_t *memory;            /* depth * size_bytes, registered */
    const uint64_t *offsets;    /* on the device, of count operations; taken round and round */
    uint64_t count;
    uint32_t size_bytes;
    uint32_t depth;
    bool write;
};

struct bench_bare *bench_bare_create(const struct bench_bare_options *options);
void bench_bare_destroy(struct bench_bare *bare);
/* TSC ticks of a poll with nothing outstanding: the median. */
uint64_t bench_bare_idle_poll(struct bench_bare *bare);
struct bench_rate bench_bare_run(struct bench_bare *bare, uint64_t limit_tsc, uint32_t round_ms);

#endif
