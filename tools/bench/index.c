/* SPDX-License-Identifier: Apache-2.0
 *
 * index.c - the index at size: bytes a live entry, and how long a look-up takes.
 *
 * Memory is all that the index holds, tables included, after random keys were inserted one by one.
 * Shards grow one at a time, so it is looked at SAMPLES times while the second half goes in: the
 * figure is the mean, and the largest stands beside it. Look-ups ask for random keys out of far more
 * than a cache holds: serial ones each wait for the one before, batched ones have the lines of a
 * chain of keys fetched ahead, as hifc_lookup does it. CPU time of the thread.
 */
#define _GNU_SOURCE /* memfd_create */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "namespace/index.h"

#define LOOKUPS 204800u /* a round */
#define BATCH 64u
#define SAMPLES 50u

struct keys {
    struct hifc_key key[LOOKUPS];
};

/* Keys first .. first + count, in random order. */
static void choose(struct keys *keys, uint64_t first, uint64_t count, uint64_t *state)
{
    for (uint32_t i = 0; i < LOOKUPS; i++) {
        keys->key[i] = bench_key(first + bench_random(state) % count);
    }
}

static double done(uint64_t start_ns, uint32_t found, bool expect)
{
    double ns = (double)(bench_cpu_ns() - start_ns) / LOOKUPS;
    if (found != (expect ? LOOKUPS : 0)) {
        bench_die("%u of %u keys were found", found, LOOKUPS);
    }
    return ns;
}

static double serial(struct hifc_index *index, const struct keys *keys, bool expect)
{
    uint32_t found = 0, shift = 0;
    uint64_t start_ns = bench_cpu_ns();
    for (uint32_t i = 0; i < LOOKUPS; i++) {
        const struct hifc_slot *slot = hifc_index_find(index, &keys->key[i + shift]);
        shift = slot ? slot->heat : 0; /* 0 always, but the next one cannot begin before */
        found += slot != NULL;
    }
    return done(start_ns, found, expect);
}

static double batched(struct hifc_index *index, const struct keys *keys, bool expect)
{
    uint32_t found = 0;
    uint64_t start_ns = bench_cpu_ns();
    for (uint32_t i = 0; i < LOOKUPS; i += BATCH) {
        for (uint32_t j = i; j < i + BATCH; j++) {
            hifc_index_prefetch(index, &keys->key[j]);
        }
        for (uint32_t j = i; j < i + BATCH; j++) {
            found += hifc_index_find(index, &keys->key[j]) != NULL;
        }
    }
    return done(start_ns, found, expect);
}

/* One load from a random line of as much memory of the same kind, each waiting for the one before:
 * what a look-up costs at least where the index is in no cache. */
static double memory_load(const uint64_t *memory, uint64_t lines, uint64_t *state)
{
    uint64_t word = 0, x = bench_random(state);
    uint64_t start_ns = bench_cpu_ns();
    for (uint32_t i = 0; i < LOOKUPS; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull + word;
        word = memory[(x >> 20) % lines * 8];
    }
    return (double)(bench_cpu_ns() - start_ns) / LOOKUPS + (double)word;
}

static uint64_t *memory_like(uint64_t bytes)
{
    int fd = memfd_create("hifc-bench", MFD_CLOEXEC);
    void *memory = fd < 0 || ftruncate(fd, (off_t)bytes) != 0
                       ? MAP_FAILED
                       : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        bench_die("no memory for %llu bytes", (unsigned long long)bytes);
    }
    memset(memory, 0, bytes);
    close(fd);
    return memory;
}

/* Inserts keys 0 .. entries; ns of one insertion. */
static double fill(struct hifc_index *index, uint64_t entries, double *mean, double *largest)
{
    uint64_t step = entries / 2 / SAMPLES, start_ns = bench_cpu_ns();
    uint32_t samples = 0;
    *mean = *largest = 0;
    for (uint64_t i = 1; i <= entries; i++) {
        struct hifc_key key = bench_key(i - 1);
        if (!hifc_index_insert(index, &key)) {
            bench_die("the index is full at %llu entries", (unsigned long long)i);
        }
        if (i > entries / 2 && (entries - i) % step == 0) {
            double bytes = (double)hifc_index_bytes(index) / (double)i;
            *mean += bytes;
            *largest = bytes > *largest ? bytes : *largest;
            samples++;
        }
    }
    *mean /= samples;
    return (double)(bench_cpu_ns() - start_ns) / (double)entries;
}

int bench_index(const struct bench_options *options)
{
    struct hifc_index *index;
    uint64_t entries = options->entries, state = 1;
    double mean, largest, values[5][options->rounds];
    struct keys *keys = malloc(sizeof *keys);
    if (entries < 2 * SAMPLES || !keys) {
        bench_die("an index of %llu entries is too small", (unsigned long long)entries);
    }
    bench_must(hifc_index_create(entries, 1, &index), "index");
    double insert_ns = fill(index, entries, &mean, &largest);
    uint64_t bytes = hifc_index_bytes(index);
    uint64_t *memory = memory_like(bytes);
    for (uint32_t i = 0; i < options->rounds; i++) {
        choose(keys, 0, entries, &state);
        values[0][i] = serial(index, keys, true);
        choose(keys, 0, entries, &state);
        values[1][i] = batched(index, keys, true);
        choose(keys, entries, entries, &state);
        values[2][i] = serial(index, keys, false);
        choose(keys, entries, entries, &state);
        values[3][i] = batched(index, keys, false);
        values[4][i] = memory_load(memory, bytes / 64, &state);
    }
    printf("{\"entries\": %llu, \"bytes_per_entry\": %.2f, \"bytes_per_entry_max\": %.2f, "
           "\"insert_ns\": %.0f, ", (unsigned long long)entries, mean, largest, insert_ns);
    bench_print("hit_ns", bench_quartiles(values[0], options->rounds), true);
    bench_print("hit_batched_ns", bench_quartiles(values[1], options->rounds), true);
    bench_print("miss_ns", bench_quartiles(values[2], options->rounds), true);
    bench_print("miss_batched_ns", bench_quartiles(values[3], options->rounds), true);
    bench_print("memory_load_ns", bench_quartiles(values[4], options->rounds), false);
    printf("}\n");
    hifc_index_destroy(index);
    munmap(memory, bytes);
    free(keys);
    return 0;
}
