/* SPDX-License-Identifier: Apache-2.0
 *
 * throughput.c - how fast values are stored and loaded on one device, and how much CPU time that
 * takes: blocks (--size bytes, 30 equal parts), whole; one part of a block; and values of the size
 * of a part. Checksums on, the reactor drives, two batches in flight, loads in random order.
 *
 * A round stores and loads everything and deletes it again. CPU time is that of the process, with
 * the kernel's part and its worker threads.
 */
#define _DEFAULT_SOURCE /* usleep */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "bench.h"

#define PARTS 30u
#define SLOTS 2u
#define RETRY_NS 30000000000ull
#define RETRY_NAP_US 100u
#define PIECES_A_BLOCK_OF_BATCH 16u /* a batch of pieces has so many requests a block of the others' */

enum phase { BLOCK_PUT, BLOCK_GET, RANGE_GET, PIECE_PUT, PIECE_GET, PHASES };

static const char *const phase_names[PHASES] = {"block_put", "block_get", "range_get", "piece_put",
                                                "piece_get"};

struct rig {
    struct hifc_ns *ns;
    uint32_t block_bytes, batch;
    uint64_t blocks;     /* a round */
    uint64_t next_key;   /* of this round */
    uint64_t buffers;    /* offset within pool 0 */
    uint64_t *order;     /* of loads */
    struct hifc_req *reqs;
    double *gb_s[PHASES], *cpu_s_gb[PHASES];
};

static double process_cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static bool is_piece(enum phase phase)
{
    return phase >= RANGE_GET;
}

static uint64_t count_of(const struct rig *rig, enum phase phase)
{
    return is_piece(phase) ? rig->blocks * PARTS : rig->blocks;
}

static uint32_t batch_of(const struct rig *rig, enum phase phase)
{
    return is_piece(phase) ? rig->batch * PIECES_A_BLOCK_OF_BATCH : rig->batch;
}

/* Request i of a phase, with the buffer at place. */
static void request(const struct rig *rig, enum phase phase, uint64_t i, uint32_t place,
                    struct hifc_req *req)
{
    bool put = phase == BLOCK_PUT || phase == PIECE_PUT;
    uint32_t piece = rig->block_bytes / PARTS;
    uint64_t key = put ? i : rig->order[i];
    *req = (struct hifc_req){.op = put ? HIFC_OP_PUT : HIFC_OP_GET,
                             .cls = HIFC_SWAP,
                             .length = is_piece(phase) ? piece : rig->block_bytes};
    if (phase == BLOCK_PUT) {
        req->part_count = PARTS;
    } else if (phase == RANGE_GET) {
        req->value_offset = (uint32_t)(key % PARTS) * piece;
        key /= PARTS;
    }
    if (phase >= PIECE_PUT) {
        key += rig->blocks;
    }
    req->key = bench_key(rig->next_key + key);
    req->buffer_offset = rig->buffers + (uint64_t)place * req->length;
}

/* Waits for a batch. What was answered Retry, where space is being freed, is asked for again. */
static void finish(struct hifc_ns *ns, struct hifc_ticket *ticket, struct hifc_req *reqs,
                   uint32_t count)
{
    uint64_t deadline_ns = bench_now_ns() + RETRY_NS;
    while (count > 0) {
        uint32_t again = 0;
        while (hifc_ticket_wait(ticket, -1) == 0) {
        }
        hifc_ticket_free(ticket);
        for (uint32_t i = 0; i < count; i++) {
            if (reqs[i].status == HIFC_RETRY && bench_now_ns() < deadline_ns) {
                reqs[again++] = reqs[i];
            } else if (reqs[i].status != HIFC_OK) {
                bench_die("a request was answered %d", reqs[i].status);
            }
        }
        count = again;
        if (count > 0) {
            usleep(RETRY_NAP_US);
            bench_must(hifc_submit(ns, reqs, count, &ticket), "submit");
        }
    }
}

static void run_phase(struct rig *rig, enum phase phase)
{
    struct hifc_ticket *tickets[SLOTS] = {NULL};
    uint32_t counts[SLOTS];
    uint64_t count = count_of(rig, phase), done = 0;
    uint32_t limit = batch_of(rig, phase);
    for (unsigned turn = 0; done < count || tickets[turn % SLOTS]; turn++) {
        unsigned slot = turn % SLOTS;
        struct hifc_req *reqs = rig->reqs + (size_t)slot * limit;
        if (tickets[slot]) {
            finish(rig->ns, tickets[slot], reqs, counts[slot]);
            tickets[slot] = NULL;
        }
        uint32_t n = 0;
        for (; n < limit && done < count; n++, done++) {
            request(rig, phase, done, slot * limit + n, &reqs[n]);
        }
        counts[slot] = n;
        if (n > 0) {
            bench_must(hifc_submit(rig->ns, reqs, n, &tickets[slot]), "submit");
        }
    }
    if (phase == BLOCK_PUT || phase == PIECE_PUT) {
        bench_must(hifc_sync(rig->ns), "sync");
    }
}

static void shuffle(struct rig *rig, uint64_t count, uint64_t *state)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t j = bench_random(state) % (i + 1);
        rig->order[i] = rig->order[j];
        rig->order[j] = i;
    }
}

static void delete_all(struct rig *rig)
{
    uint64_t count = rig->blocks * (1 + PARTS);
    for (uint64_t i = 0; i < count; i += rig->batch) {
        uint32_t n = 0;
        for (; n < rig->batch && i + n < count; n++) {
            rig->reqs[n] = (struct hifc_req){.op = HIFC_OP_DELETE,
                                             .key = bench_key(rig->next_key + i + n)};
        }
        bench_run(rig->ns, rig->reqs, n);
    }
    rig->next_key += count;
}

static void measure_round(struct rig *rig, uint32_t round, uint64_t *state)
{
    double gb = (double)rig->blocks * rig->block_bytes * 1e-9;
    for (enum phase phase = 0; phase < PHASES; phase++) {
        shuffle(rig, count_of(rig, phase), state);
        double cpu_s = process_cpu_s();
        uint64_t start_ns = bench_now_ns();
        run_phase(rig, phase);
        rig->gb_s[phase][round] = gb / ((double)(bench_now_ns() - start_ns) * 1e-9);
        rig->cpu_s_gb[phase][round] = (process_cpu_s() - cpu_s) / gb;
    }
    delete_all(rig);
}

static void *array(uint64_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (!memory) {
        bench_die("no memory for %llu elements", (unsigned long long)count);
    }
    return memory;
}

int bench_throughput(const struct bench_options *options)
{
    struct hifc_format_opts format = {.force = 1};
    struct hifc_open_opts open = {.drive = HIFC_REACTOR};
    struct rig rig = {.block_bytes = (uint32_t)options->size_bytes,
                      .batch = options->batch,
                      .blocks = options->entries};
    uint64_t state = 1, bytes = (uint64_t)SLOTS * rig.batch * rig.block_bytes;
    open.pool_size_bytes = (32u << 20) + bytes;
    rig.ns = bench_open(options, &format, &open);
    bench_must(hifc_buffer_alloc(rig.ns, bytes, &rig.buffers), "buffers");
    uint64_t *words = (uint64_t *)((uint8_t *)hifc_pool_base(rig.ns, 0, NULL) + rig.buffers);
    for (uint64_t i = 0; i < bytes / sizeof *words; i++) {
        words[i] = bench_random(&state);
    }
    rig.order = array(rig.blocks * PARTS, sizeof *rig.order);
    rig.reqs = array((uint64_t)SLOTS * batch_of(&rig, PIECE_GET), sizeof *rig.reqs);
    for (enum phase phase = 0; phase < PHASES; phase++) {
        rig.gb_s[phase] = array(options->rounds, sizeof(double));
        rig.cpu_s_gb[phase] = array(options->rounds, sizeof(double));
    }
    for (uint32_t i = 0; i < options->rounds; i++) {
        measure_round(&rig, i, &state);
    }
    struct hifc_stats stats;
    bench_must(hifc_stats(rig.ns, &stats), "stats");
    printf("{\"block_bytes\": %u, \"piece_bytes\": %u, \"bytes_a_phase\": %llu, \"direct\": %s, "
           "\"rounds\": %u, ", rig.block_bytes, rig.block_bytes / PARTS,
           (unsigned long long)rig.blocks * rig.block_bytes, stats.direct ? "true" : "false",
           options->rounds);
    for (enum phase phase = 0; phase < PHASES; phase++) {
        char name[64];
        snprintf(name, sizeof name, "%s_gb_s", phase_names[phase]);
        bench_print(name, bench_quartiles(rig.gb_s[phase], options->rounds), true);
        snprintf(name, sizeof name, "%s_cpu_s_gb", phase_names[phase]);
        bench_print(name, bench_quartiles(rig.cpu_s_gb[phase], options->rounds),
                    phase + 1 < PHASES);
    }
    printf("}\n");
    bench_must(hifc_close(rig.ns), "close");
    return 0;
}
