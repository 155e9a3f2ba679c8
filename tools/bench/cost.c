/* SPDX-License-Identifier: Apache-2.0
 *
 * cost.c - what the library's software costs a block: CPU time of a put and of a get on the ram
 * device, driven inline, in batches, in a namespace that holds other entries already.
 *
 * Two namespaces take turns. In one nothing moves: the copying of its ram device is off, and the
 * caller gives the checksums, so that no byte of a payload is touched; that is the cost which the
 * bar names. In the other everything does. A round puts, gets and deletes enough blocks to fill
 * several segments, so sealing, freeing and whatever else a put brings with it is in the figure.
 * CPU time is the thread's: what it waits for on a busy machine does not count.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define BATCHES_A_ROUND 32u
#define FILL_BYTES 64u
#define FILL_BATCH 1024u

struct rig {
    struct hifc_ns *ns;
    struct hifc_req *reqs; /* of a whole round, prepared before the clock runs */
    bool bare;
    uint32_t batch;
    uint32_t size_bytes;
    uint64_t buffers;   /* offset within pool 0 */
    uint64_t checksums; /* offset of a uint32_t a request of a batch */
    uint64_t next_key;
    double *put_ns, *get_ns; /* a figure a round */
};

static void *allocate(size_t size_bytes)
{
    void *memory = calloc(1, size_bytes);
    if (!memory) {
        bench_die("no memory for %zu bytes", size_bytes);
    }
    return memory;
}

static void prepare(struct rig *rig, uint8_t op)
{
    for (uint32_t i = 0; i < BATCHES_A_ROUND * rig->batch; i++) {
        uint32_t slot = i % rig->batch;
        rig->reqs[i] = (struct hifc_req){.op = op,
                                         .cls = HIFC_SWAP,
                                         .flags = rig->bare ? HIFC_F_CHECKSUMS : 0,
                                         .key = bench_key(rig->next_key + i),
                                         .buffer_offset =
                                             rig->buffers + (uint64_t)slot * rig->size_bytes,
                                         .length = rig->size_bytes,
                                         .checksum_offset = rig->checksums + slot * 4ull};
    }
}

/* CPU nanoseconds of one request of the prepared round. */
static double measure(struct rig *rig)
{
    uint64_t start_ns = bench_cpu_ns();
    for (uint32_t i = 0; i < BATCHES_A_ROUND; i++) {
        bench_run(rig->ns, &rig->reqs[i * rig->batch], rig->batch);
    }
    return (double)(bench_cpu_ns() - start_ns) / (BATCHES_A_ROUND * rig->batch);
}

static void round_run(struct rig *rig, uint32_t round)
{
    hifc_bench_ram_copies(!rig->bare);
    prepare(rig, HIFC_OP_PUT);
    rig->put_ns[round] = measure(rig);
    prepare(rig, HIFC_OP_GET);
    rig->get_ns[round] = measure(rig);
    prepare(rig, HIFC_OP_DELETE);
    measure(rig);
    hifc_bench_ram_copies(1);
    rig->next_key += BATCHES_A_ROUND * rig->batch;
}

/* So that the index is as large, and as far from the cache, as it is in use. */
static void fill(struct rig *rig, uint64_t entries)
{
    struct hifc_req *reqs = allocate(FILL_BATCH * sizeof *reqs);
    for (uint64_t done = 0; done < entries; done += FILL_BATCH) {
        for (uint32_t i = 0; i < FILL_BATCH; i++) {
            reqs[i] = (struct hifc_req){.op = HIFC_OP_PUT,
                                        .cls = HIFC_SWAP,
                                        .key = bench_key(rig->next_key++),
                                        .buffer_offset = rig->buffers,
                                        .length = FILL_BYTES};
        }
        bench_run(rig->ns, reqs, FILL_BATCH);
    }
    free(reqs);
}

static void rig_open(struct rig *rig, const struct bench_options *options, bool bare)
{
    struct hifc_format_opts format = {.segment_size_bytes = 64u << 20, .force = 1};
    struct hifc_open_opts open = {.drive = HIFC_INLINE,
                                  .index_entries_max = 2 * options->entries + (1u << 20),
                                  .pool_size_bytes =
                                      (16u << 20) + 2ull * options->batch * options->size_bytes};
    uint64_t bytes = options->batch * options->size_bytes;
    struct bench_options named = *options;
    named.uri = bare ? "ram://bare?size=2GiB" : "ram://whole?size=2GiB";
    *rig = (struct rig){.ns = bench_open(&named, &format, &open),
                        .bare = bare,
                        .batch = options->batch,
                        .size_bytes = (uint32_t)options->size_bytes};
    rig->reqs = allocate((size_t)BATCHES_A_ROUND * rig->batch * sizeof *rig->reqs);
    rig->put_ns = allocate(options->rounds * sizeof *rig->put_ns);
    rig->get_ns = allocate(options->rounds * sizeof *rig->get_ns);
    bench_must(hifc_buffer_alloc(rig->ns, bytes, &rig->buffers), "buffers");
    bench_must(hifc_buffer_alloc(rig->ns, rig->batch * 4ull, &rig->checksums), "checksums");
    memset((uint8_t *)hifc_pool_base(rig->ns, 0, NULL) + rig->buffers, 0x5a, bytes);
    fill(rig, options->entries);
}

static void rig_close(struct rig *rig)
{
    bench_must(hifc_close(rig->ns), "close");
    free(rig->reqs);
    free(rig->put_ns);
    free(rig->get_ns);
}

int bench_cost(const struct bench_options *options)
{
    struct rig bare, whole;
    rig_open(&bare, options, true);
    rig_open(&whole, options, false);
    for (uint32_t i = 0; i < 2 * options->rounds; i++) {
        /* The first half of the rounds once more is all the warming up there is. */
        round_run(&bare, i % options->rounds);
        round_run(&whole, i % options->rounds);
    }
    printf("{\"size_bytes\": %u, \"batch\": %u, \"entries\": %llu, \"rounds\": %u, ",
           bare.size_bytes, bare.batch, (unsigned long long)options->entries, options->rounds);
    bench_print("put", bench_quartiles(bare.put_ns, options->rounds), true);
    bench_print("get", bench_quartiles(bare.get_ns, options->rounds), true);
    bench_print("put_with_data", bench_quartiles(whole.put_ns, options->rounds), true);
    bench_print("get_with_data", bench_quartiles(whole.get_ns, options->rounds), false);
    printf("}\n");
    rig_close(&bare);
    rig_close(&whole);
    return 0;
}
