/* SPDX-License-Identifier: Apache-2.0
 *
 * full_disk.c - lets the disk below a sparse device be full from every write and allocate on, and
 * looks at what that does: no request fails, what is answered is OK, RETRY or NO_SPACE; whatever
 * was acknowledged is there or was evicted; close, and an open while the disk is still full, work;
 * and once there is room again, puts work.
 *
 *   sim_full_disk [SEED [POSITION]]      one workload, or one position; a failure prints both
 */
#include <errno.h>
#include <unistd.h>

#include "check.h"

#include "faulty/faulty.h"

#define NAME "full"
#define SEGMENT_BYTES (256u << 10)
#define SEGMENTS 20u
#define AROUND_BYTES (1152u << 10) /* superblocks */
#define SIZE "6272KiB"
#define KEYS 64u
#define SWAP_FROM 56u /* keys from here on are of class swap */
#define OPS 160u
#define SEEDS 6u
#define VALUE_BYTES 40000u
#define RETRIES_MAX 400u

static struct hifc_ns *ns;
static uint8_t *pool;
static uint64_t buffer;
static uint64_t random_state, seed_now, position_now;
static bool acknowledged[KEYS], deleted[KEYS];
static bool may_fail; /* where the file system copies on write, nothing can be overwritten either */

#define EXPECT(condition, ...)                                                                  \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            struct hifc_error expect_error = {0};                                               \
            hifc_last_error(&expect_error);                                                     \
            fprintf(stderr, "%s:%d: seed %" PRIu64 " position %" PRIu64 ": ", __FILE__,         \
                    __LINE__, seed_now, position_now);                                          \
            fprintf(stderr, __VA_ARGS__);                                                       \
            fprintf(stderr, " (last error: %s)\n", expect_error.message);                       \
            abort();                                                                            \
        }                                                                                       \
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
    return key;
}

static void fill(uint8_t *data, uint32_t n)
{
    memset(data, (int)(n + 1), VALUE_BYTES);
}

static int open_ns(const char *uri)
{
    struct hifc_open_opts opts = {.drive = HIFC_INLINE,
                                  .pool_size_bytes = 4u << 20,
                                  .requests_max = 64,
                                  .events_max = 4096,
                                  .index_entries_max = 4096,
                                  .no_owner_socket = 1};
    int error = hifc_open(uri, &opts, &ns);
    if (!error) {
        pool = hifc_pool_base(ns, 0, NULL);
        CHECK_EQ(hifc_buffer_alloc(ns, 1u << 16, &buffer), 0);
    }
    return error;
}

/* Asks again while the answer is RETRY, as callers do. */
static int run(struct hifc_req *req)
{
    struct hifc_req copy = *req;
    for (uint32_t i = 0; i < RETRIES_MAX; i++) {
        struct hifc_ticket *ticket;
        *req = copy;
        int error = hifc_submit(ns, req, 1, &ticket);
        EXPECT(error == 0, "submit: %d", error);
        EXPECT(hifc_ticket_wait(ticket, 20000000) == 1, "a request hangs");
        hifc_ticket_free(ticket);
        if (req->status != HIFC_RETRY) {
            break;
        }
    }
    EXPECT(req->status != HIFC_RETRY, "it can be retried for ever");
    return req->status;
}

static int put(uint32_t n)
{
    struct hifc_req req = {.op = HIFC_OP_PUT, .cls = n >= SWAP_FROM ? HIFC_SWAP : HIFC_REUSE,
                           .key = key_of(n), .buffer_offset = buffer, .length = VALUE_BYTES,
                           .part_count = 1};
    fill(pool + buffer, n);
    int status = run(&req);
    EXPECT(status == HIFC_OK || status == HIFC_EXISTS || status == HIFC_NO_SPACE ||
               (may_fail && status == -ENOSPC),
           "put of key %u: %d", n, status);
    if (status == HIFC_OK || status == HIFC_EXISTS) {
        acknowledged[n] = true;
        deleted[n] = false;
    }
    return status;
}

/* The same in two steps: room is reserved, written to, and published. */
static void put_reserved(uint32_t n)
{
    struct hifc_req reserve = {.op = HIFC_OP_RESERVE,
                               .cls = n >= SWAP_FROM ? HIFC_SWAP : HIFC_REUSE, .key = key_of(n),
                               .buffer_offset = buffer, .length = VALUE_BYTES, .part_count = 1};
    fill(pool + buffer, n);
    int status = run(&reserve);
    EXPECT(status == HIFC_OK || status == HIFC_EXISTS || status == HIFC_NO_SPACE,
           "reservation of key %u: %d", n, status);
    if (status != HIFC_OK) {
        return;
    }
    struct hifc_req write = reserve, commit = {.op = HIFC_OP_COMMIT, .handle = reserve.handle};
    write.op = HIFC_OP_WRITE;
    status = run(&write);
    EXPECT(status == HIFC_OK || may_fail, "write to the room of key %u: %d", n, status);
    status = run(&commit);
    EXPECT(status == HIFC_OK || may_fail, "commit of key %u: %d", n, status);
    acknowledged[n] |= status == HIFC_OK;
    deleted[n] = false;
}

static int delete(uint32_t n)
{
    struct hifc_req req = {.op = HIFC_OP_DELETE, .key = key_of(n)};
    int status = run(&req);
    EXPECT(status == HIFC_OK || status == HIFC_MISS || status == HIFC_NO_SPACE ||
               (may_fail && status == -ENOSPC),
           "delete of key %u: %d", n, status);
    if (status == HIFC_OK || status < 0) {
        acknowledged[n] = false;
        deleted[n] = status == HIFC_OK;
    }
    return status;
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
                acknowledged[n] = false;
            }
        }
    }
}

static void get(uint32_t n)
{
    static uint8_t expected[VALUE_BYTES];
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(n), .buffer_offset = buffer,
                           .capacity = 1u << 16};
    int status = run(&req);
    forget_evicted();
    EXPECT(status == HIFC_OK || status == HIFC_MISS, "get of key %u: %d", n, status);
    EXPECT(status == HIFC_OK || !acknowledged[n], "acknowledged key %u is gone", n);
    EXPECT(status == HIFC_MISS || !deleted[n], "deleted key %u is back", n);
    if (status == HIFC_OK) {
        fill(expected, n);
        EXPECT(req.value_length == VALUE_BYTES && !memcmp(expected, pool + buffer, VALUE_BYTES),
               "key %u: wrong bytes", n);
    }
}

static void check_all(const char *when)
{
    struct hifc_check_result result;
    int error = hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &result);
    EXPECT(error == 0 && result.problems == 0, "%s: %s", when, result.first_problem);
    for (uint32_t n = 0; n < KEYS; n++) {
        get(n);
    }
}

static void workload(void)
{
    for (uint32_t op = 0; op < OPS; op++) {
        uint32_t n = next_random(KEYS), dice = next_random(100);
        if (dice < 60) {
            put(n);
        } else if (dice < 75) {
            put_reserved(n);
        } else if (dice < 85) {
            get(n);
        } else if (dice < 95) {
            delete(n);
        } else {
            EXPECT(hifc_sync(ns) == 0, "sync");
        }
        forget_evicted();
    }
}

static void forget_swap(void)
{
    memset(acknowledged + SWAP_FROM, 0, sizeof acknowledged - SWAP_FROM);
}

enum below { ALLOCATES, WRITES_ZEROS, COPIES_ON_WRITE };

static void format_with_room(uint64_t seed, uint64_t room_bytes, enum below below, char uri[256])
{
    struct hifc_format_opts format = {.segment_size_bytes = SEGMENT_BYTES, .force = 1};
    snprintf(uri, 256, "faulty+ram://" NAME "?size=" SIZE "&fault_room=%" PRIu64
             "&fault_no_allocate=%d&fault_copy_on_write=%d&fault_seed=%" PRIu64,
             room_bytes, below == WRITES_ZEROS, below == COPIES_ON_WRITE, seed);
    may_fail = below == COPIES_ON_WRITE;
    hifc_faulty_room_forget(NAME);
    memset(acknowledged, 0, sizeof acknowledged);
    memset(deleted, 0, sizeof deleted);
    random_state = seed * 77 + 5;
    EXPECT(hifc_format(uri, &format) == 0, "format");
    EXPECT(open_ns(uri) == 0, "open");
}

/* Position 0: never full. Returns how many writes and allocates there were. */
static uint64_t full_from(uint64_t seed, uint64_t position, enum below below)
{
    char uri[256];
    struct hifc_device *device;
    seed_now = seed;
    position_now = position;
    format_with_room(seed, 1u << 30, below, uri);
    hifc_faulty_full_at(hifc_faulty_find(NAME), position ? position : UINT64_MAX);
    workload();
    uint64_t count = hifc_faulty_room_count(hifc_faulty_find(NAME));
    check_all("on a full disk");
    EXPECT(hifc_close(ns) == 0, "close");
    forget_swap();
    if (below != COPIES_ON_WRITE || position == 0) {
        EXPECT(open_ns(uri) == 0, "open on a full disk");
        hifc_faulty_full_at(hifc_faulty_find(NAME), position ? 1 : UINT64_MAX);
        check_all("opened on a full disk");
        workload();
        check_all("going on on a full disk");
        EXPECT(hifc_close(ns) == 0, "close again");
        forget_swap();
    } else {
        EXPECT(open_ns(uri) == -ENOSPC, "open where nothing can be written");
    }
    EXPECT(hifc_device_open(uri, 0, &device) == 0, "the device");
    hifc_faulty_full_at(device, 0);
    hifc_faulty_room(device, 1u << 30);
    hifc_device_close(device);
    EXPECT(open_ns(uri) == 0, "the third open");
    check_all("with room again");
    for (uint32_t n = 0; n < SWAP_FROM; n++) {
        EXPECT(put(n) != HIFC_NO_SPACE, "put of key %u with room again", n);
        forget_evicted();
    }
    EXPECT(hifc_close(ns) == 0, "the last close");
    return count;
}

/* All that is stored may be evicted for more, however few segments have room on the disk. With
 * room for none, those alone that the open finds room for first, and somebody else takes whatever
 * is given back. */
static void fewer_segments_than_the_size_says(uint32_t segments, enum below below)
{
    char uri[256];
    seed_now = segments;
    position_now = 0;
    uint64_t around = AROUND_BYTES + SEGMENTS * 4096; /* what format writes */
    uint32_t given = segments ? segments : SEGMENTS;
    format_with_room(segments, around + (uint64_t)given * SEGMENT_BYTES, below, uri);
    if (segments == 0) {
        hifc_faulty_room(hifc_faulty_find(NAME), 0);
    }
    for (uint32_t lap = 0; lap < 8; lap++) {
        for (uint32_t n = 0; n < SWAP_FROM; n++) {
            EXPECT(put(n) != HIFC_NO_SPACE, "put of key %u in lap %u", n, lap);
            forget_evicted();
            if (segments == 0) {
                hifc_faulty_room(hifc_faulty_find(NAME), 0);
            }
            if (n % 5 == 0) {
                EXPECT(delete(n) != HIFC_NO_SPACE, "delete of key %u", n);
            }
        }
        EXPECT(hifc_sync(ns) == 0, "sync");
        check_all("beyond the room of the disk");
        EXPECT(hifc_close(ns) == 0, "close");
        EXPECT(open_ns(uri) == 0, "open");
        check_all("opened again");
    }
    struct hifc_stats stats;
    EXPECT(hifc_stats(ns, &stats) == 0 && stats.device_error_count == 0, "a command failed");
    EXPECT(hifc_close(ns) == 0, "close");
}

int main(int argc, char **argv)
{
    alarm(550);
    if (argc > 2) {
        uint64_t seed = strtoull(argv[1], NULL, 10);
        full_from(seed, strtoull(argv[2], NULL, 10), (enum below)(seed % 3));
        return 0;
    }
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t positions = 0;
    for (uint32_t segments = 0; segments < SEGMENTS; segments += 4) {
        fewer_segments_than_the_size_says(segments, ALLOCATES);
        fewer_segments_than_the_size_says(segments, WRITES_ZEROS);
    }
    for (uint64_t seed = first; seed < (argc > 1 ? first + 1 : first + SEEDS); seed++) {
        enum below below = (enum below)(seed % 3);
        uint64_t count = full_from(seed, 0, below);
        for (uint64_t position = 1; position <= count; position++) {
            full_from(seed, position, below);
            positions++;
        }
    }
    printf("full_disk: %" PRIu64 " positions\n", positions);
    return 0;
}
