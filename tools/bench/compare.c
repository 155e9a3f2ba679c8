/* SPDX-License-Identifier: Apache-2.0
 *
 * compare.c - the engine against bare SPDK: the same process, controller, ranges of the device and
 * queue depth, in alternating rounds.
 *
 * The engine's side stores or loads values through hifc_submit, and the same thread polls (inline).
 * After a poll it asks for as many values, in one batch, as were answered: so both sides hold the
 * same number outstanding at any time, and batches are as large as completions come. A third side is the engine with the checksums left to the caller, so that what they cost
 * is seen where it is spent. Reads ask both sides for the very ranges that hold values, in random
 * order; writes go through the device from front to back on both sides, the engine's by replacing
 * its oldest values. The bare side writes over the namespace, which is given up afterwards.
 */
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "namespace/ns.h"

#define FILL_BATCH 16u
#define DEPTH_MAX 256u
#define ROUNDS_LATE 200u

enum side { BARE, ENGINE, ENGINE_BARE_CHECKSUM, SIDES };

/* Requests submitted together. req.user is set once its answer was seen. */
struct group {
    struct hifc_ticket *ticket;
    struct hifc_req *reqs;
    uint32_t count, unseen;
};

struct rig {
    const struct bench_options *options;
    struct hifc_ns *ns;
    struct bench_bare *bare;
    uint64_t keys;
    uint64_t next; /* of writes: the next key */
    uint64_t seed;
    uint64_t memory;    /* offset within pool 0: depth values */
    uint64_t checksums; /* a uint32_t a value in flight */
    uint64_t *offsets;  /* on the device, for the bare side */
    uint64_t limit_tsc;
    struct group groups[DEPTH_MAX]; /* the first group_count are in flight */
    uint32_t group_count;
    bool taken[DEPTH_MAX]; /* shares of the memory, by requests in flight */
    uint32_t free_count;
    uint64_t submissions, submitted;
    double *per_s[SIDES], *cpu_ns[SIDES], *ratio, *empty, *share;
};

/* ---- the account ---------------------------------------------------------------------------- */

void bench_account_start(struct bench_account *account, uint64_t limit_tsc, uint32_t round_ms)
{
    double ticks = round_ms * 1e6 / bench_ns_per_tsc();
    *account = (struct bench_account){.limit_tsc = limit_tsc,
                                      .start_ns = bench_now_ns(),
                                      .start_cpu_ns = bench_cpu_ns(),
                                      .end_tsc = bench_tsc() + (uint64_t)ticks,
                                      .last_tsc = bench_tsc() + ROUNDS_LATE * (uint64_t)ticks};
}

struct bench_rate bench_account_end(const struct bench_account *account)
{
    uint64_t cpu_ns = bench_cpu_ns() - account->start_cpu_ns;
    double wall_s = (double)(bench_now_ns() - account->start_ns) * 1e-9;
    double busy_ns = (double)cpu_ns - (double)account->empty_tsc * bench_ns_per_tsc();
    double operations = (double)account->operations;
    if (account->operations == 0) {
        bench_die("nothing completed for %.1f s", wall_s);
    }
    return (struct bench_rate){.per_s = (double)account->operations / wall_s,
                               .cpu_ns = busy_ns / operations,
                               .share = (double)cpu_ns * 1e-9 / wall_s,
                               .empty = (double)account->empty /
                                        (double)(account->polls ? account->polls : 1)};
}

/* ---- the engine's side ---------------------------------------------------------------------- */

/* A request for each free share of the memory, from the lowest on: what is stored together lies
 * together, as it does in a staging buffer. */
static void submit(struct rig *rig, bool caller_checks)
{
    struct group *group = &rig->groups[rig->group_count++];
    uint32_t size = (uint32_t)rig->options->size_bytes;
    group->count = group->unseen = rig->free_count;
    uint32_t place = 0;
    for (uint32_t i = 0; i < group->count; i++, place++) {
        while (rig->taken[place]) {
            place++;
        }
        rig->taken[place] = true;
        uint64_t number = rig->options->write ? rig->next++ : bench_random(&rig->seed);
        group->reqs[i] =
            (struct hifc_req){.op = rig->options->write ? HIFC_OP_PUT : HIFC_OP_GET,
                              .cls = HIFC_SWAP,
                              .flags = caller_checks ? HIFC_F_CHECKSUMS : 0,
                              .key = bench_key(number % rig->keys),
                              .buffer_offset = rig->memory + (uint64_t)place * size,
                              .length = size,
                              .checksum_offset = rig->checksums + place * 4ull};
    }
    rig->free_count = 0;
    bench_must(hifc_submit(rig->ns, group->reqs, group->count, &group->ticket), "submit");
    rig->submissions++;
    rig->submitted += group->count;
}

/* Takes new answers of a group; how many were OK. A put that found no room is not. */
static uint32_t group_look(struct rig *rig, struct group *group)
{
    uint32_t succeeded = 0;
    for (uint32_t i = 0; i < group->count; i++) {
        struct hifc_req *req = &group->reqs[i];
        int status = __atomic_load_n(&req->status, __ATOMIC_ACQUIRE);
        if (req->user || status == HIFC_IN_FLIGHT) {
            continue;
        }
        if (status != HIFC_OK && status != HIFC_RETRY && status != HIFC_PENDING) {
            bench_die("a request was answered %d", status);
        }
        req->user = 1;
        group->unseen--;
        succeeded += status == HIFC_OK;
        rig->taken[(req->buffer_offset - rig->memory) / rig->options->size_bytes] = false;
        rig->free_count++;
    }
    return succeeded;
}

static uint32_t look(struct rig *rig)
{
    uint32_t succeeded = 0;
    for (uint32_t i = 0; i < rig->group_count;) {
        struct group *group = &rig->groups[i];
        succeeded += group_look(rig, group);
        if (group->unseen == 0) {
            struct group done = *group;
            hifc_ticket_free(done.ticket);
            *group = rig->groups[--rig->group_count];
            rig->groups[rig->group_count] = done;
        } else {
            i++;
        }
    }
    return succeeded;
}

static uint64_t empty_polls(struct rig *rig)
{
    struct hifc_engine_stats stats;
    hifc_engine_stats_get(rig->ns->engine, &stats);
    return stats.poll_empty_count;
}

static struct bench_rate engine_run(struct rig *rig, bool caller_checks)
{
    struct bench_account account;
    bench_account_start(&account, rig->limit_tsc, rig->options->round_ms);
    submit(rig, caller_checks);
    uint64_t empty = empty_polls(rig);
    while (!bench_account_over(&account)) {
        uint64_t start = bench_tsc();
        hifc_ticket_wait(rig->groups[0].ticket, 0);
        uint64_t empty_now = empty_polls(rig);
        bench_account_poll(&account, start, empty_now != empty);
        if (empty_now == empty) {
            account.operations += look(rig);
            if (rig->free_count > 0) {
                submit(rig, caller_checks);
            }
        }
        empty = empty_now;
    }
    struct bench_rate rate = bench_account_end(&account);
    while (rig->group_count > 0) {
        while (hifc_ticket_wait(rig->groups[0].ticket, -1) == 0) {
        }
        look(rig);
    }
    return rate;
}

/* ---- before the rounds ---------------------------------------------------------------------- */

static void *allocate(size_t size_bytes)
{
    void *memory = calloc(1, size_bytes);
    if (!memory) {
        bench_die("no memory for %zu bytes", size_bytes);
    }
    return memory;
}

static void fill(struct rig *rig)
{
    struct hifc_req reqs[FILL_BATCH];
    for (uint64_t done = 0; done < rig->keys; done += FILL_BATCH) {
        for (uint32_t i = 0; i < FILL_BATCH; i++) {
            reqs[i] = (struct hifc_req){.op = HIFC_OP_PUT,
                                        .cls = HIFC_SWAP,
                                        .key = bench_key(done + i),
                                        .buffer_offset = rig->memory,
                                        .length = (uint32_t)rig->options->size_bytes};
        }
        bench_run(rig->ns, reqs, FILL_BATCH);
    }
}

/* Where the bare side goes: to the values themselves, or through the segments. */
static void choose_offsets(struct rig *rig)
{
    uint64_t size = rig->options->size_bytes, state = 7;
    rig->offsets = allocate(rig->keys * sizeof *rig->offsets);
    for (uint64_t i = 0; i < rig->keys; i++) {
        if (rig->options->write) {
            rig->offsets[i] = ns_segment_base(rig->ns, 0) + i * size;
            continue;
        }
        struct hifc_key key = bench_key(bench_random(&state) % rig->keys);
        const struct hifc_slot *slot = hifc_index_find(rig->ns->index, &key);
        if (!slot) {
            bench_die("a value is missing");
        }
        rig->offsets[i] = ns_segment_base(rig->ns, slot->segment) +
                          (uint64_t)slot->offset * HIFC_UNIT_BYTES;
    }
}

static void rig_open(struct rig *rig, const struct bench_options *options)
{
    struct hifc_format_opts format = {.segment_size_bytes = 32u << 20, .force = 1};
    struct hifc_open_opts open = {.drive = HIFC_INLINE};
    uint64_t bytes = options->size_bytes * options->depth;
    open.pool_size_bytes = (16u << 20) + 2 * bytes;
    *rig = (struct rig){.options = options,
                        .ns = bench_open(options, &format, &open),
                        .seed = 3};
    if (options->depth == 0 || options->depth > DEPTH_MAX) {
        bench_die("the depth is 1 to %u", DEPTH_MAX);
    }
    uint64_t room = (uint64_t)rig->ns->segment_count * rig->ns->segment_size;
    rig->keys = options->entries ? options->entries : room / 2 / options->size_bytes;
    rig->keys -= rig->keys % FILL_BATCH;
    bench_must(hifc_buffer_alloc(rig->ns, bytes, &rig->memory), "buffers");
    bench_must(hifc_buffer_alloc(rig->ns, options->depth * 4ull, &rig->checksums), "checksums");
    uint8_t *base = hifc_pool_base(rig->ns, 0, NULL);
    memset(base + rig->memory, 0x5a, bytes);
    for (uint32_t i = 0; i < options->depth; i++) {
        rig->groups[i].reqs = allocate(options->depth * sizeof(struct hifc_req));
    }
    rig->free_count = options->depth;
    fill(rig);
    choose_offsets(rig);
    struct bench_bare_options bare = {.device = rig->ns->device,
                                      .memory = base + rig->memory,
                                      .offsets = rig->offsets,
                                      .count = rig->keys,
                                      .size_bytes = (uint32_t)options->size_bytes,
                                      .depth = options->depth,
                                      .write = options->write};
    rig->bare = bench_bare_create(&bare);
    rig->limit_tsc = 2 * bench_bare_idle_poll(rig->bare);
    for (unsigned side = 0; side < SIDES; side++) {
        rig->per_s[side] = allocate(options->rounds * sizeof(double));
        rig->cpu_ns[side] = allocate(options->rounds * sizeof(double));
    }
    rig->ratio = allocate(options->rounds * sizeof(double));
    rig->empty = allocate(options->rounds * sizeof(double));
    rig->share = allocate(options->rounds * sizeof(double));
}

/* ---- rounds --------------------------------------------------------------------------------- */

static void run_round(struct rig *rig, uint32_t round)
{
    for (unsigned turn = 0; turn < SIDES; turn++) {
        enum side side = (turn + round) % SIDES; /* no side always follows the same one */
        struct bench_rate rate = side == BARE
                                     ? bench_bare_run(rig->bare, rig->limit_tsc,
                                                      rig->options->round_ms)
                                     : engine_run(rig, side == ENGINE_BARE_CHECKSUM);
        rig->per_s[side][round] = rate.per_s;
        rig->cpu_ns[side][round] = rate.cpu_ns;
        if (side == BARE) {
            rig->empty[round] = rate.empty;
            rig->share[round] = rate.share;
        }
    }
    rig->ratio[round] = rig->per_s[ENGINE][round] / rig->per_s[BARE][round];
}

static void print(struct rig *rig, const struct hifc_stats *before, const struct hifc_stats *after)
{
    const struct bench_options *options = rig->options;
    uint32_t rounds = options->rounds;
    printf("{\"op\": \"%s\", \"size_bytes\": %llu, \"queue_depth\": %u, \"rounds\": %u, "
           "\"round_ms\": %u, \"values_per_submit\": %.1f, ",
           options->write ? "write" : "read", (unsigned long long)options->size_bytes,
           options->depth, rounds, options->round_ms,
           (double)rig->submitted / (double)rig->submissions);
    bench_print("hifc", bench_quartiles(rig->per_s[ENGINE], rounds), true);
    bench_print("spdk", bench_quartiles(rig->per_s[BARE], rounds), true);
    bench_print("ratio", bench_quartiles(rig->ratio, rounds), true);
    bench_print("cpu_ns_per_op_hifc", bench_quartiles(rig->cpu_ns[ENGINE], rounds), true);
    bench_print("cpu_ns_per_op_spdk", bench_quartiles(rig->cpu_ns[BARE], rounds), true);
    bench_print("cpu_ns_per_op_hifc_without_checksum",
                bench_quartiles(rig->cpu_ns[ENGINE_BARE_CHECKSUM], rounds), true);
    bench_print("empty_poll_share_spdk", bench_quartiles(rig->empty, rounds), true);
    bench_print("cpu_share", bench_quartiles(rig->share, rounds), true);
    printf("\"idle_poll_ns\": %.0f", (double)rig->limit_tsc / 2 * bench_ns_per_tsc());
    if (options->write) {
        uint64_t written = after->device_write_bytes - before->device_write_bytes;
        uint64_t accepted = after->put_bytes - before->put_bytes;
        uint64_t batches = after->batches - before->batches;
        printf(", \"write_amplification\": %.4f, \"values_per_batch\": %.1f",
               (double)written / (double)accepted,
               (double)(after->batch_entries - before->batch_entries) / (double)batches);
    }
    printf("}\n");
}

int bench_compare(const struct bench_options *options)
{
    static struct rig rig;
    struct hifc_stats before, after;
    rig_open(&rig, options);
    run_round(&rig, 0); /* warms up */
    bench_must(hifc_stats(rig.ns, &before), "stats");
    for (uint32_t i = 0; i < options->rounds; i++) {
        run_round(&rig, i);
    }
    bench_must(hifc_stats(rig.ns, &after), "stats");
    print(&rig, &before, &after);
    bench_bare_destroy(rig.bare);
    int closed = hifc_close(rig.ns);
    if (!options->write) {
        bench_must(closed, "close");
    }
    return 0;
}
