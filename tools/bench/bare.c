/* SPDX-License-Identifier: Apache-2.0
 *
 * bare.c - the measure of the comparison: the shortest loop that drives SPDK.
 *
 * It holds depth commands outstanding on a queue pair of its own, on the controller that the
 * namespace uses, and submits the next one from within the completion of the last, as SPDK's own
 * perf does.
 */
#include <stdlib.h>

#include "compare.h"

#ifdef HIFC_WITH_SPDK

#include "device/spdk.h"

#define IDLE_POLLS 2001u

struct task {
    struct bench_bare *bare;
    uint8_t *memory;
};

struct bench_bare {
    struct bench_bare_options options;
    struct spdk_nvme_ns *ns;
    struct spdk_nvme_qpair *qpair;
    struct bench_account account;
    uint32_t lba_bytes;
    uint32_t outstanding;
    uint64_t next;
    bool stopping;
    struct task tasks[];
};

static void completed(void *argument, const struct spdk_nvme_cpl *completion);

static void submit(struct task *task)
{
    struct bench_bare *bare = task->bare;
    uint64_t lba = bare->options.offsets[bare->next] / bare->lba_bytes;
    uint32_t count = bare->options.size_bytes / bare->lba_bytes;
    bare->next = bare->next + 1 < bare->options.count ? bare->next + 1 : 0;
    int rc = bare->options.write ? spdk_nvme_ns_cmd_write(bare->ns, bare->qpair, task->memory, lba,
                                                          count, completed, task, 0)
                                 : spdk_nvme_ns_cmd_read(bare->ns, bare->qpair, task->memory, lba,
                                                         count, completed, task, 0);
    if (rc) {
        bench_die("SPDK does not take a command: %d", rc);
    }
    bare->outstanding++;
}

static void completed(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct task *task = argument;
    struct bench_bare *bare = task->bare;
    if (spdk_nvme_cpl_is_error(completion)) {
        bench_die("a bare command failed: %x/%x", completion->status.sct, completion->status.sc);
    }
    bare->outstanding--;
    bare->account.operations++;
    if (!bare->stopping) {
        submit(task);
    }
}

static int poll_once(struct bench_bare *bare)
{
    int count = spdk_nvme_qpair_process_completions(bare->qpair, 0);
    if (count < 0) {
        bench_die("the bare queue pair was lost");
    }
    return count;
}

struct bench_bare *bench_bare_create(const struct bench_bare_options *options)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)options->device;
    struct bench_bare *bare = calloc(1, sizeof *bare + options->depth * sizeof bare->tasks[0]);
    uint32_t entries;
    if (!bare) {
        bench_die("no memory");
    }
    bare->options = *options;
    bare->lba_bytes = options->device->geometry.lba_bytes;
    bare->ns = spdk_nvme_ctrlr_get_ns(device->ctrlr, device->target.nsid);
    bench_must(hifc_spdk_qpair_alloc(device, 2 * options->depth + 1, &bare->qpair, &entries),
               "bare queue pair");
    for (uint32_t i = 0; i < options->depth; i++) {
        bare->tasks[i] = (struct task){
            .bare = bare, .memory = options->memory + (uint64_t)i * options->size_bytes};
    }
    return bare;
}

void bench_bare_destroy(struct bench_bare *bare)
{
    hifc_spdk_qpair_free((struct hifc_spdk_device *)bare->options.device, bare->qpair);
    free(bare);
}

uint64_t bench_bare_idle_poll(struct bench_bare *bare)
{
    static double ticks[IDLE_POLLS];
    for (uint32_t i = 0; i < IDLE_POLLS; i++) {
        uint64_t start = bench_tsc();
        poll_once(bare);
        ticks[i] = (double)(bench_tsc() - start);
    }
    return (uint64_t)bench_quartiles(ticks, IDLE_POLLS).median;
}

struct bench_rate bench_bare_run(struct bench_bare *bare, uint64_t limit_tsc, uint32_t round_ms)
{
    bare->stopping = false;
    bench_account_start(&bare->account, limit_tsc, round_ms);
    for (uint32_t i = 0; i < bare->options.depth; i++) {
        submit(&bare->tasks[i]);
    }
    while (!bench_account_over(&bare->account)) {
        uint64_t start = bench_tsc();
        bool none = poll_once(bare) == 0;
        bench_account_poll(&bare->account, start, none);
    }
    struct bench_rate rate = bench_account_end(&bare->account);
    bare->stopping = true;
    while (bare->outstanding > 0) {
        poll_once(bare);
    }
    return rate;
}

#else

struct bench_bare *bench_bare_create(const struct bench_bare_options *options)
{
    (void)options;
    bench_die("this hifc_bench was built without SPDK: run tools/build_spdk, then "
              "tools/bench/driver again");
}

void bench_bare_destroy(struct bench_bare *bare)
{
    (void)bare;
}

uint64_t bench_bare_idle_poll(struct bench_bare *bare)
{
    (void)bare;
    return 0;
}

struct bench_rate bench_bare_run(struct bench_bare *bare, uint64_t limit_tsc, uint32_t round_ms)
{
    (void)bare, (void)limit_tsc, (void)round_ms;
    return (struct bench_rate){0};
}

#endif
