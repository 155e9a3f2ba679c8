/* SPDX-License-Identifier: Apache-2.0
 *
 * reopen.c - how long opening takes with many entries on the device: after a close, when every
 * segment carries a summary. Wall time, and the CPU time of the opening thread, which does it all.
 *
 * Every entry is a small value of class reuse, put in batches; the device's cache is warm, so that
 * what is measured is the reading and rebuilding, not the medium.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define BATCH 1024u
#define POOL_BYTES (64ull << 20)

static void fill(struct hifc_ns *ns, uint64_t entries, uint32_t size_bytes)
{
    struct hifc_req *reqs = calloc(BATCH, sizeof *reqs);
    uint64_t buffer;
    bench_must(hifc_buffer_alloc(ns, size_bytes, &buffer), "buffer");
    memset((uint8_t *)hifc_pool_base(ns, 0, NULL) + buffer, 0x5a, size_bytes);
    for (uint64_t done = 0; done < entries && reqs; done += BATCH) {
        uint32_t count = entries - done < BATCH ? (uint32_t)(entries - done) : BATCH;
        for (uint32_t i = 0; i < count; i++) {
            reqs[i] = (struct hifc_req){.op = HIFC_OP_PUT,
                                        .cls = HIFC_REUSE,
                                        .key = bench_key(done + i),
                                        .buffer_offset = buffer,
                                        .length = size_bytes};
        }
        bench_run(ns, reqs, count);
    }
    free(reqs);
}

int bench_reopen(const struct bench_options *options)
{
    struct hifc_format_opts format = {.force = 1};
    struct hifc_open_opts open = {.drive = HIFC_INLINE,
                                  .pool_size_bytes = POOL_BYTES,
                                  .index_entries_max = 2 * options->entries};
    struct hifc_ns *ns = bench_open(options, &format, &open);
    fill(ns, options->entries, (uint32_t)options->size_bytes);
    bench_must(hifc_close(ns), "close");

    double open_s[options->rounds], cpu_s[options->rounds];
    uint64_t entries = 0;
    for (uint32_t i = 0; i < options->rounds; i++) {
        struct hifc_stats stats;
        uint64_t start_ns = bench_now_ns(), start_cpu_ns = bench_cpu_ns();
        ns = bench_open(options, NULL, &open);
        open_s[i] = (double)(bench_now_ns() - start_ns) * 1e-9;
        cpu_s[i] = (double)(bench_cpu_ns() - start_cpu_ns) * 1e-9;
        bench_must(hifc_stats(ns, &stats), "stats");
        entries = stats.entries;
        bench_must(hifc_close(ns), "close");
    }
    printf("{\"entries\": %llu, \"entries_found\": %llu, \"size_bytes\": %llu, ",
           (unsigned long long)options->entries, (unsigned long long)entries,
           (unsigned long long)options->size_bytes);
    bench_print("open_s", bench_quartiles(open_s, options->rounds), true);
    bench_print("open_cpu_s", bench_quartiles(cpu_s, options->rounds), false);
    printf("}\n");
    return 0;
}
