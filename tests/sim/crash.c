/* SPDX-License-Identifier: Apache-2.0
 *
 * crash.c - cuts the power at every write and flush of small seeded workloads and looks at what is
 * left: an acknowledged and synced value is there, a deleted and synced key is not, no byte is ever
 * wrong, the invariants hold, and the namespace goes on working.
 *
 *   sim_crash [SEED [CUT]]      one workload, or one image of it; a failure prints both
 */
#include "check.h"

#include "faulty/faulty.h"

#define NAME "crash"
#define SIZE "4480KiB" /* twelve segments of 256 KiB */
#define PLAIN "ram://" NAME "?size=" SIZE
#define ROOM "2MiB" /* on the disk below, in every third seed: eight segments at most */
#define KEYS 96u
#define SWAP_FROM 72u /* keys from here on are of class swap */
#define OPS 150u
#define SEEDS 14u
#define VALUE_MAX 60000u

enum { ABSENT, PRESENT, EITHER };

static struct hifc_ns *ns;
static uint8_t *pool;
static uint64_t buffer;
static uint64_t random_state;
static uint64_t seed_now, cut_now;
static uint8_t acknowledged[KEYS];
static uint8_t durable[KEYS]; /* what a crash must leave; EITHER where it may not say */

#define EXPECT(condition, ...)                                                                \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            struct hifc_error expect_error = {0};                                             \
            hifc_last_error(&expect_error);                                                   \
            fprintf(stderr, "%s:%d: seed %" PRIu64 " cut %" PRIu64 ": ", __FILE__, __LINE__,  \
                    seed_now, cut_now);                                                       \
            fprintf(stderr, __VA_ARGS__);                                                     \
            fprintf(stderr, " (last error: %s)\n", expect_error.message);                     \
            abort();                                                                          \
        }                                                                                     \
    } while (0)

static uint32_t next_random(uint32_t below)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((random_state >> 33) % below);
}

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    memcpy(key.bytes + 8, &seed_now, sizeof seed_now);
    return key;
}

/* Length, parts and bytes follow from the key. */
static uint32_t parts_of(uint32_t n)
{
    static const uint32_t parts[] = {1, 1, 3, 8};
    return parts[n % 4];
}

static uint32_t length_of(uint32_t n)
{
    static const uint32_t bases[] = {40, 700, 4096, 5000, 8192, 20480, 50000};
    uint32_t length = bases[n % 7] + n / 7;
    return length - length % parts_of(n);
}

static void fill(uint8_t *data, uint32_t n)
{
    uint64_t state = (n + 1) * 0x9e3779b97f4a7c15ull ^ seed_now;
    for (uint32_t i = 0; i < length_of(n); i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        data[i] = (uint8_t)(state >> 56);
    }
}

static int open_ns(const char *uri)
{
    struct hifc_open_opts opts = {.drive = HIFC_INLINE,
                                  .pool_size_bytes = 4u << 20,
                                  .requests_max = 64,
                                  .reservations_max = 16,
                                  .leases_max = 16,
                                  .events_max = 1024,
                                  .index_entries_max = 4096,
                                  .no_owner_socket = 1};
    int error = hifc_open(uri, &opts, &ns);
    if (!error) {
        pool = hifc_pool_base(ns, 0, NULL);
        CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &buffer), 0);
    }
    return error;
}

static int run(struct hifc_req *reqs, uint32_t count)
{
    struct hifc_ticket *ticket;
    int error = hifc_submit(ns, reqs, count, &ticket);
    EXPECT(error == 0, "submit: %d", error);
    EXPECT(hifc_ticket_wait(ticket, CHECK_HANG_US) == 1, "a request hangs");
    hifc_ticket_free(ticket);
    return reqs[0].status;
}

static struct hifc_req put_req(uint32_t n, uint64_t at)
{
    fill(pool + at, n);
    return (struct hifc_req){.op = HIFC_OP_PUT,
                             .cls = n >= SWAP_FROM ? HIFC_SWAP : HIFC_REUSE,
                             .key = key_of(n),
                             .buffer_offset = at,
                             .length = length_of(n),
                             .part_count = parts_of(n)};
}

/* A request that would bring key n into state was answered with status. */
static void note(uint32_t n, uint8_t state, int status)
{
    if (status == HIFC_OK || status == HIFC_EXISTS) {
        acknowledged[n] = state;
    } else if (status < 0) {
        acknowledged[n] = EITHER;
    }
    if (durable[n] != state) {
        durable[n] = EITHER;
    }
}

/* ---- steps: false when the device has died --------------------------------------------------- */

static bool step_put(void)
{
    struct hifc_req reqs[6];
    uint32_t keys[6], count = 1 + next_random(6);
    for (uint32_t i = 0; i < count; i++) {
        keys[i] = (next_random(16) * 6 + i) % KEYS; /* different keys */
        reqs[i] = put_req(keys[i], buffer + i * 65536);
    }
    /* Half of the time one by one, so that several batches are on their way at once. */
    struct hifc_ticket *tickets[6];
    uint32_t each = next_random(2) ? 1 : count, submitted = 0;
    for (uint32_t i = 0; i < count; i += each) {
        int error = hifc_submit(ns, reqs + i, each, &tickets[submitted++]);
        EXPECT(error == 0, "submit: %d", error);
    }
    for (uint32_t i = 0; i < submitted; i++) {
        EXPECT(hifc_ticket_wait(tickets[i], CHECK_HANG_US) == 1, "a request hangs");
        hifc_ticket_free(tickets[i]);
    }
    bool alive = true;
    for (uint32_t i = 0; i < count; i++) {
        note(keys[i], PRESENT, reqs[i].status);
        alive &= reqs[i].status >= 0;
    }
    return alive;
}

static bool step_delete(void)
{
    uint32_t n = next_random(KEYS);
    struct hifc_req req = {.op = HIFC_OP_DELETE, .key = key_of(n)};
    int status = run(&req, 1);
    note(n, ABSENT, status);
    return status >= 0;
}

static void check_bytes(uint32_t n, const struct hifc_req *req)
{
    static uint8_t expected[VALUE_MAX];
    fill(expected, n);
    EXPECT(req->value_length == length_of(n), "key %u has %u bytes", n, req->value_length);
    EXPECT(memcmp(expected, pool + buffer, length_of(n)) == 0, "key %u: wrong bytes", n);
}

static void forget_evicted(void)
{
    struct hifc_event events[64];
    uint64_t dropped;
    int count;
    while ((count = hifc_events(ns, events, 64, &dropped)) > 0) {
        EXPECT(dropped == 0, "events were dropped");
        for (int i = 0; i < count; i++) {
            uint32_t n;
            memcpy(&n, events[i].key.bytes, sizeof n);
            if (events[i].kind == HIFC_EVENT_EVICTED) {
                durable[n] = acknowledged[n] = EITHER;
            }
        }
    }
}

static bool step_get(void)
{
    uint32_t n = next_random(KEYS);
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(n), .buffer_offset = buffer,
                           .capacity = 65536};
    int status = run(&req, 1);
    forget_evicted();
    EXPECT(status != HIFC_MISS || acknowledged[n] != PRESENT, "key %u was acknowledged", n);
    EXPECT(status != HIFC_OK || acknowledged[n] != ABSENT, "key %u was deleted", n);
    if (status == HIFC_OK) {
        check_bytes(n, &req);
    }
    return status >= 0;
}

static bool step_two_phase(void)
{
    uint32_t n = next_random(KEYS), beside = (n + 1) % KEYS;
    struct hifc_req reserve = put_req(n, buffer);
    reserve.op = HIFC_OP_RESERVE;
    int status = run(&reserve, 1);
    if (status != HIFC_OK) {
        return status >= 0;
    }
    struct hifc_req other = put_req(beside, buffer + 65536);
    status = run(&other, 1);
    note(beside, PRESENT, status);
    bool alive = status >= 0;
    struct hifc_req write = reserve, end = {.handle = reserve.handle};
    write.op = HIFC_OP_WRITE;
    alive &= run(&write, 1) >= 0;
    end.op = next_random(4) ? HIFC_OP_COMMIT : HIFC_OP_ABORT;
    status = run(&end, 1);
    if (end.op == HIFC_OP_COMMIT) {
        note(n, PRESENT, status);
    }
    return alive && status >= 0;
}

static bool step_sync(void)
{
    if (hifc_sync(ns) != 0) {
        return false;
    }
    memcpy(durable, acknowledged, sizeof durable);
    return true;
}

static void workload(void)
{
    random_state = seed_now * 77 + 5;
    bool alive = true;
    for (uint32_t op = 0; op < OPS && alive; op++) {
        uint32_t dice = next_random(100);
        alive = dice < 55   ? step_put()
                : dice < 70 ? step_get()
                : dice < 80 ? step_delete()
                : dice < 90 ? step_two_phase()
                            : step_sync();
        forget_evicted();
    }
}

/* ---- after the crash ------------------------------------------------------------------------- */

static void check_invariants(const char *when)
{
    struct hifc_check_result result;
    int error = hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &result);
    EXPECT(error == 0 && result.problems == 0, "%s: %s", when, result.first_problem);
    struct hifc_stats stats;
    hifc_stats(ns, &stats);
    EXPECT(stats.live_bytes + stats.dead_bytes + stats.free_bytes + stats.metadata_bytes ==
                   stats.capacity_bytes &&
               stats.dead_bytes <= stats.capacity_bytes,
           "%s: the accounts do not add up", when);
    EXPECT(stats.recovery_damaged == 0, "%s: a crash alone reads as damage", when);
    EXPECT(stats.segments_damaged == 0, "%s: a crash alone damaged a segment", when);
}

static void check_values(void)
{
    for (uint32_t n = 0; n < KEYS; n++) {
        struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(n), .buffer_offset = buffer,
                           .capacity = 65536};
        int status = run(&req, 1);
        EXPECT(status == HIFC_OK || status == HIFC_MISS, "key %u answers %d", n, status);
        if (n >= SWAP_FROM) {
            EXPECT(status == HIFC_MISS, "swap key %u outlived its process", n);
            durable[n] = acknowledged[n] = ABSENT;
            continue;
        }
        forget_evicted(); /* what came first may have made room */
        EXPECT(status != HIFC_MISS || durable[n] != PRESENT, "synced key %u is lost", n);
        EXPECT(status != HIFC_OK || durable[n] != ABSENT, "deleted key %u is back", n);
        if (status == HIFC_OK) {
            check_bytes(n, &req);
        }
        durable[n] = acknowledged[n] = status == HIFC_OK ? PRESENT : ABSENT;
    }
}

/* Returns how many writes and flushes the workload made; cut 0: none is cut. */
static uint64_t image(uint64_t seed, uint64_t cut)
{
    char uri[256];
    struct hifc_format_opts format = {.segment_size_bytes = 256u << 10, .force = 1};
    seed_now = seed;
    cut_now = cut;
    memset(durable, ABSENT, sizeof durable);
    memset(acknowledged, ABSENT, sizeof acknowledged);
    EXPECT(hifc_format(PLAIN, &format) == 0, "format");
    snprintf(uri, sizeof uri,
             "faulty+" PLAIN "&fault_seed=%" PRIu64 "&fault_cut_write=%" PRIu64
             "&fault_reorder=%" PRIu64 "&fault_delay=%" PRIu64 "%s",
             seed * 1000003 + cut, cut, seed % 2, seed == 1 ? 3ul : 0ul,
             seed % 3 == 0 ? "&fault_room=" ROOM : "");
    hifc_faulty_room_forget(NAME);
    uint64_t count = 0;
    if (open_ns(uri) == 0) {
        workload();
        count = hifc_faulty_count(hifc_faulty_find(NAME));
        (void)hifc_close(ns);
    }
    EXPECT(open_ns(PLAIN) == 0, "the namespace does not open after the crash");
    check_invariants("after the crash");
    check_values();
    for (uint32_t i = 0; i < 4; i++) {
        EXPECT(step_put() && step_sync(), "it does not go on after the crash");
        forget_evicted();
    }
    check_invariants("going on");
    EXPECT(hifc_close(ns) == 0, "close");
    EXPECT(open_ns(PLAIN) == 0, "the second open");
    check_values();
    EXPECT(hifc_close(ns) == 0, "the second close");
    return count;
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t last = argc > 1 ? first : SEEDS;
    uint64_t images = 0;
    if (argc > 2) {
        image(first, strtoull(argv[2], NULL, 10));
        printf("1 passed, 0 failed\n");
        return 0;
    }
    for (uint64_t seed = first; seed <= last; seed++) {
        uint64_t writes = image(seed, 0);
        for (uint64_t cut = 1; cut <= writes; cut++) {
            image(seed, cut);
            images++;
        }
        fprintf(stderr, "seed %" PRIu64 ": cut at each of %" PRIu64 " writes and flushes\n", seed,
                writes);
    }
    printf("%" PRIu64 " images\n%" PRIu64 " passed, 0 failed\n", images, images);
    return images == 0;
}
