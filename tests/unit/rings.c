/* SPDX-License-Identifier: Apache-2.0
 *
 * rings.c - request rings of a namespace: descriptors become verified reads, in both driving modes.
 * Inline, nothing happens until somebody polls, so what is under way at a time is known.
 */
#include "submit.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "faulty/faulty.h"
#include "long_sleep.h"

#define NAME "ring-test"
#define PLAIN "ram://" NAME "?size=32MiB"
#define PART 8192u
#define PARTS 4u
#define VALUE (PART * PARTS)
#define KEYS 24u
#define ARENA_PAGES 256u
#define SLOTS 64u
#define READ_MAX (64u << 10)
#define POLL_NS 3000000u

static struct hifc_ns *ns;
static struct hifc_ring *ring;
static struct hifc_ring_header *header;
static int32_t *statuses;
static uint8_t *pool;
static uint64_t at; /* of the arena */

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    key.bytes[15] = 9;
    return key;
}

static uint8_t byte_of(uint32_t n, uint32_t i)
{
    return (uint8_t)(n * 29 + i * 13 + (i >> 9) + 1);
}

static int put(uint32_t n, uint32_t length, uint32_t parts)
{
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = key_of(n), .buffer_offset = at,
                           .length = length, .part_count = parts};
    for (uint32_t i = 0; i < length; i++) {
        pool[at + i] = byte_of(n, i);
    }
    return submit_and_wait(ns, &req, 1);
}

static void open_ring(uint32_t slots)
{
    struct hifc_ring_opts opts = {.slots = slots, .arena_offset = at,
                                  .arena_bytes = ARENA_PAGES * 4096ull,
                                  .read_max_bytes = READ_MAX, .poll_us = 1000000};
    uint64_t bytes;
    CHECK_EQ(hifc_ring_open(ns, &opts, &ring), 0);
    header = hifc_ring_base(ring, &bytes);
    CHECK_EQ(header->magic, HIFC_RING_MAGIC);
    CHECK_EQ(header->region_bytes, bytes);
    CHECK_EQ(header->state, HIFC_RING_OPEN);
    statuses = (int32_t *)((uint8_t *)header + header->statuses_offset);
}

static void start_with(const char *uri, struct hifc_open_opts opts)
{
    struct hifc_format_opts format = {.segment_size_bytes = 1u << 20, .force = 1};
    opts.pool_size_bytes = 8u << 20;
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open(uri, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    /* More than the arena, so that what lies behind it is the caller's as well. */
    CHECK_EQ(hifc_buffer_alloc(ns, 2 * ARENA_PAGES * 4096ull, &at), 0);
    for (uint32_t n = 0; n < KEYS; n++) {
        CHECK_EQ(put(n, VALUE, PARTS), HIFC_OK);
    }
    memset(pool + at, 0, 2 * ARENA_PAGES * 4096ull);
    open_ring(SLOTS);
}

static void start(uint32_t drive)
{
    start_with(PLAIN, (struct hifc_open_opts){.drive = drive});
}

static struct hifc_stats stats(void)
{
    struct hifc_stats out;
    CHECK_EQ(hifc_stats(ns, &out), 0);
    return out;
}

static void finish(void)
{
    struct hifc_stats s = stats();
    CHECK_EQ(s.prefetch_submitted, s.prefetch_completed + s.prefetch_failed +
                                       s.prefetch_duplicates + s.prefetch_cancelled +
                                       s.prefetch_bad);
    CHECK_EQ(hifc_ring_close(ring), 0);
    CHECK_EQ(hifc_close(ns), 0);
}

static struct hifc_descriptor want(uint32_t n, uint32_t place, uint32_t first, uint32_t count,
                                   uint32_t index)
{
    struct hifc_descriptor d = {.place = place,
                                .first_part = (uint16_t)first,
                                .part_count = (uint16_t)count,
                                .control = HIFC_RING_CONTROL(HIFC_RING_OP_READ, index)};
    struct hifc_key key = key_of(n);
    memcpy(d.key, key.bytes, sizeof d.key);
    return d;
}

static struct hifc_descriptor unwant(uint32_t index)
{
    return (struct hifc_descriptor){.control = HIFC_RING_CONTROL(HIFC_RING_OP_CANCEL, index)};
}

static void submit(const struct hifc_descriptor *some, uint32_t count)
{
    CHECK_EQ(hifc_ring_submit(ring, some, count), count);
}

static int32_t status(uint32_t index)
{
    return __atomic_load_n(&statuses[index], __ATOMIC_ACQUIRE);
}

static int32_t answer(uint32_t index)
{
    CHECK_EQ(hifc_ring_wait(ring, &index, 1, CHECK_HANG_US), 1);
    return status(index);
}

static void check_bytes(uint32_t n, uint32_t place, uint32_t offset, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++) {
        CHECK_EQ(pool[at + place * 4096ull + i], byte_of(n, offset + i));
    }
}

/* ---- reads ----------------------------------------------------------------------------------- */

static void values_and_parts_arrive(uint32_t drive)
{
    start(drive);
    struct hifc_descriptor some[] = {want(3, 0, 0, 0, 0), want(4, 8, 1, 2, 1),
                                     want(5, 12, 3, 1, 2), want(77, 20, 0, 0, 3)};
    submit(some, 4);
    CHECK_EQ(answer(0), HIFC_OK);
    CHECK_EQ(answer(1), HIFC_OK);
    CHECK_EQ(answer(2), HIFC_OK);
    CHECK_EQ(answer(3), HIFC_MISS);
    check_bytes(3, 0, 0, VALUE);
    check_bytes(4, 8, PART, 2 * PART);
    check_bytes(5, 12, 3 * PART, PART);
    for (uint32_t i = 14 * 4096; i < 8 * 4096 + VALUE; i++) {
        CHECK_EQ(pool[at + i], 0); /* nothing beyond */
    }
    struct hifc_stats s = stats();
    CHECK_EQ(s.prefetch_submitted, 4);
    CHECK_EQ(s.prefetch_completed, 3);
    CHECK_EQ(s.prefetch_failed, 1);
    CHECK_EQ(s.prefetch_bytes, VALUE + 3 * PART);
    CHECK_EQ(s.get_count, 0); /* counted apart */
    CHECK_EQ(header->answers, 4);
    finish();
}

TEST(values_and_parts_arrive_inline)
{
    values_and_parts_arrive(HIFC_INLINE);
}

TEST(values_and_parts_arrive_by_the_reactor)
{
    values_and_parts_arrive(HIFC_REACTOR);
}

TEST(small_and_odd_values_arrive)
{
    static const uint32_t lengths[] = {1, 100, 4095, 4097, 12300, 61440};
    start(HIFC_REACTOR);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQ(put(100 + i, lengths[i], i % 2 && lengths[i] % 3 == 0 ? 3 : 1), HIFC_OK);
        struct hifc_descriptor d = want(100 + i, 20 * i, 0, 0, i);
        submit(&d, 1);
        CHECK_EQ(answer(i), HIFC_OK);
        check_bytes(100 + i, 20 * i, 0, lengths[i]);
    }
    finish();
}

TEST(a_ring_wraps_many_times)
{
    start(HIFC_REACTOR);
    for (uint32_t round = 0; round < 3000; round++) {
        struct hifc_descriptor some[8];
        uint32_t indices[8];
        for (uint32_t i = 0; i < 8; i++) {
            uint32_t n = (round * 5 + i) % KEYS;
            indices[i] = i;
            some[i] = want(n, i * 2, (round + i) % PARTS, 1, i);
        }
        memset(pool + at, 0, 8 * PART);
        submit(some, 8);
        CHECK_EQ(hifc_ring_wait(ring, indices, 8, CHECK_HANG_US), 1);
        for (uint32_t i = 0; i < 8; i++) {
            CHECK_EQ(status(i), HIFC_OK);
            CHECK_EQ(pool[at + i * PART + 77],
                     byte_of((round * 5 + i) % KEYS, (round + i) % PARTS * PART + 77));
        }
    }
    CHECK_EQ(header->head, 24000);
    CHECK_EQ(stats().prefetch_overflowed, 0);
    finish();
}

/* More than are taken, or answered, in one go, and none of them a read that would end one day. */
static void many_misses_are_answered(uint32_t drive)
{
    enum { MANY = 4096 };
    static struct hifc_descriptor some[MANY];
    static uint32_t indices[MANY];
    start(drive);
    CHECK_EQ(hifc_ring_close(ring), 0);
    open_ring(MANY);
    for (uint32_t i = 0; i < MANY; i++) {
        indices[i] = i;
        some[i] = want(1000 + i, 0, 0, 0, i);
    }
    submit(some, MANY);
    CHECK_EQ(hifc_ring_wait(ring, indices, MANY, CHECK_HANG_US), 1);
    CHECK_EQ(stats().prefetch_failed, MANY);
    finish();
}

TEST(many_misses_are_answered_inline)
{
    many_misses_are_answered(HIFC_INLINE);
}

TEST(many_misses_are_answered_by_the_reactor)
{
    many_misses_are_answered(HIFC_REACTOR);
}

TEST(neighbours_are_one_read)
{
    start(HIFC_INLINE);
    struct hifc_descriptor some[] = {
        want(1, 0, 0, 1, 0), want(1, 2, 1, 2, 1), want(1, 6, 3, 1, 2), /* one */
        want(2, 8, 0, 1, 3), want(2, 12, 1, 1, 4), /* not adjacent in memory: two */
        want(3, 20, 0, 1, 5), want(3, 22, 2, 1, 6), /* not adjacent in the value: two */
        want(4, 40, 0, 0, 7)};
    struct hifc_stats before = stats();
    submit(some, 8);
    for (uint32_t i = 0; i < 8; i++) {
        CHECK_EQ(answer(i), HIFC_OK);
    }
    check_bytes(1, 0, 0, VALUE);
    check_bytes(2, 12, PART, PART);
    check_bytes(3, 22, 2 * PART, PART);
    struct hifc_stats s = stats();
    CHECK_EQ(s.prefetch_reads, 6);
    CHECK_EQ(s.prefetch_completed, 8);
    /* A command a read, and one for the table of checksums of keys 2 and 3. */
    CHECK(s.device_read_commands - before.device_read_commands <= 6 + 4);
    finish();
}

/* A neighbour whose pages were given back fails alone, wherever it stands. */
TEST(neighbours_without_memory_fail_alone)
{
    const uint64_t half = ARENA_PAGES / 2 * 4096ull;
    uint64_t behind;
    start(HIFC_INLINE);
    CHECK_EQ(hifc_ring_close(ring), 0);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, half, &at), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, half, &behind), 0);
    CHECK_EQ(behind, at + half);
    open_ring(SLOTS);
    CHECK_EQ(hifc_buffer_free(ns, behind), 0);
    struct hifc_descriptor some[] = {
        want(1, 124, 0, 1, 0), want(1, 126, 1, 1, 1), want(1, 128, 2, 1, 2), /* over the end */
        want(2, 130, 0, 1, 3), want(2, 0, 1, 1, 4)};
    submit(some, 5);
    CHECK_EQ(answer(0), HIFC_OK);
    CHECK_EQ(answer(1), HIFC_OK);
    CHECK_EQ(answer(2), -EFAULT);
    CHECK_EQ(answer(3), -EFAULT);
    CHECK_EQ(answer(4), HIFC_OK);
    check_bytes(1, 124, 0, 2 * PART);
    check_bytes(2, 0, PART, PART);
    CHECK_EQ(stats().prefetch_reads, 2);
    finish();
}

/* ---- dropped --------------------------------------------------------------------------------- */

TEST(duplicates_are_dropped)
{
    start(HIFC_INLINE);
    struct hifc_descriptor some[] = {want(1, 0, 0, 0, 0), want(1, 8, 0, 0, 1), /* same read */
                                     want(1, 0, 0, 0, 0), /* the very same */
                                     want(1, 16, 0, 4, 2) /* another read, as it says */};
    submit(some, 4);
    CHECK_EQ(answer(0), HIFC_OK);
    CHECK_EQ(answer(1), HIFC_RING_DUPLICATE);
    CHECK_EQ(answer(2), HIFC_OK);
    CHECK_EQ(pool[at + 8 * 4096], 0);
    CHECK_EQ(stats().prefetch_duplicates, 2);
    submit(some, 1); /* no longer in flight: read again */
    CHECK_EQ(answer(0), HIFC_OK);
    CHECK_EQ(stats().prefetch_completed, 3);
    finish();
}

TEST(cancelled_reads_do_not_start)
{
    start_with(PLAIN, (struct hifc_open_opts){.drive = HIFC_INLINE, .prefetch_inflight = 1});
    struct hifc_descriptor some[12];
    for (uint32_t i = 0; i < 8; i++) {
        some[i] = want(i, i * 8, 0, 0, i);
    }
    some[8] = unwant(0);
    some[9] = unwant(5);
    some[10] = unwant(7);
    some[11] = unwant(40); /* nobody's */
    submit(some, 12);
    for (uint32_t i = 0; i < 8; i++) {
        bool cancelled = i == 0 || i == 5 || i == 7;
        CHECK_EQ(answer(i), cancelled ? HIFC_RING_CANCELLED : HIFC_OK);
        CHECK_EQ(pool[at + i * VALUE] != 0, !cancelled && byte_of(i, 0) != 0);
    }
    CHECK_EQ(status(40), HIFC_RING_IDLE);
    struct hifc_stats s = stats();
    CHECK_EQ(s.prefetch_submitted, 8);
    CHECK_EQ(s.prefetch_cancelled, 3);
    CHECK_EQ(s.prefetch_reads, 5);
    submit(&some[8], 1); /* too late: it has its answer */
    submit(&some[5], 1);
    CHECK_EQ(answer(5), HIFC_OK);
    CHECK_EQ(status(0), HIFC_RING_CANCELLED);
    finish();
}

/* The device may be writing to its memory, which nobody else may have before it has an answer. */
TEST(a_cancelled_read_that_has_started_ends)
{
    start_with("faulty+" PLAIN "&fault_delay=50", (struct hifc_open_opts){.drive = HIFC_INLINE});
    struct hifc_descriptor wanted = want(1, 0, 0, 0, 0), unwanted = unwant(0);
    submit(&wanted, 1);
    CHECK_EQ(hifc_ring_kick(ring), 0);
    submit(&unwanted, 1);
    CHECK_EQ(hifc_ring_kick(ring), 0);
    CHECK_EQ(header->head, 2);
    CHECK_EQ(status(0), HIFC_RING_WAITING);
    CHECK_EQ(answer(0), HIFC_OK);
    check_bytes(1, 0, 0, VALUE);
    CHECK_EQ(stats().prefetch_cancelled, 0);
    finish();
}

TEST(a_full_ring_loses_prefetches_and_no_demand_read)
{
    start(HIFC_INLINE);
    struct hifc_descriptor some[SLOTS + 10];
    for (uint32_t i = 0; i < SLOTS + 10; i++) {
        some[i] = want(i % KEYS, 0, i % PARTS, 1, i % SLOTS);
    }
    CHECK_EQ(hifc_ring_submit(ring, some, SLOTS + 10), SLOTS);
    CHECK_EQ(hifc_ring_submit(ring, some, 3), 0);
    CHECK_EQ(stats().prefetch_overflowed, 13);
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(2), .length = VALUE,
                           .buffer_offset = at + 128 * 4096};
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    check_bytes(2, 128, 0, VALUE);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK(answer(i) == HIFC_OK || answer(i) == HIFC_RING_DUPLICATE);
    }
    CHECK_EQ(hifc_ring_close(ring), 0);
    CHECK_EQ(stats().prefetch_overflowed, 13); /* kept */
    open_ring(16);
    finish();
}

/* ---- bad ------------------------------------------------------------------------------------- */

TEST(bad_descriptors_are_answered_and_counted)
{
    start(HIFC_INLINE);
    struct hifc_descriptor some[] = {
        want(1, ARENA_PAGES, 0, 0, 0),     /* outside the arena */
        want(1, UINT32_MAX, 0, 0, 1),
        want(1, ARENA_PAGES - 7, 0, 0, 2), /* and partly */
        want(1, 0, 0, 5, 3),               /* no such parts */
        want(1, 0, 4, 1, 4),
        want(1, 0, 65535, 1, 5),
        want(1, 0, 2, 0, 6),               /* the whole value from its second part on */
        want(1, 0, 0, 0, 7),               /* operation 0 */
        want(1, 0, 0, 0, 8),               /* operation 3 */
        want(1, 0, 0, 0, 9),               /* a reserved bit */
        want(50, 0, 0, 0, 10),             /* longer than read_max_bytes */
        want(2, 24, 0, 0, 11)};            /* and one that is good */
    static const int32_t expected[] = {-EFAULT, -EFAULT, -EMSGSIZE, -ERANGE, -ERANGE, -ERANGE,
                                       -ERANGE, -EINVAL, -EINVAL, -EINVAL, -EMSGSIZE, HIFC_OK};
    some[7].control = HIFC_RING_CONTROL(0, 7);
    some[8].control = HIFC_RING_CONTROL(3, 8);
    some[9].control |= 1u << 31;
    CHECK_EQ(put(50, READ_MAX + 4096, 1), HIFC_OK);
    submit(some, 12);
    for (uint32_t i = 0; i < 12; i++) {
        CHECK_EQ(answer(i), expected[i]);
    }
    check_bytes(2, 24, 0, VALUE);
    for (uint32_t i = 0; i < READ_MAX; i++) {
        CHECK_EQ(pool[at + ARENA_PAGES * 4096ull + i], 0);
    }
    CHECK_EQ(stats().prefetch_bad, 11);
    /* A status word that is not there, which only a producer of its own can name. */
    struct hifc_descriptor *slots = (void *)((uint8_t *)header + header->slots_offset);
    slots[12] = want(1, 0, 0, 0, SLOTS);
    slots[12].sequence = 1;
    slots[13] = want(1, 0, 0, 0, 13);
    slots[13].sequence = 999; /* a lap that cannot be */
    header->tail = 14;
    CHECK_EQ(hifc_ring_kick(ring), 0);
    CHECK_EQ(status(13), -ESTALE);
    CHECK_EQ(stats().prefetch_bad, 13);
    CHECK_EQ(hifc_ring_submit(ring, &slots[12], 1), -EINVAL);
    /* A status word in use by another read. */
    struct hifc_descriptor two[] = {want(1, 0, 0, 0, 20), want(2, 8, 0, 0, 20)};
    submit(two, 2);
    CHECK_EQ(answer(20), HIFC_OK);
    check_bytes(1, 0, 0, VALUE);
    CHECK_EQ(stats().prefetch_bad, 14);
    finish();
}

TEST(nonsense_in_the_region_harms_nobody)
{
    start(HIFC_INLINE);
    struct hifc_descriptor *slots = (void *)((uint8_t *)header + header->slots_offset);
    uint64_t state = 12345, head = 0;
    for (uint32_t round = 0; round < 3000; round++) {
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t slot = (uint32_t)((head + i) % SLOTS);
            uint32_t words[8];
            for (uint32_t w = 0; w < 8; w++) {
                state = state * 6364136223846793005ull + 1442695040888963407ull;
                words[w] = (uint32_t)(state >> 33);
            }
            memcpy(&slots[slot], words, sizeof words);
            if (words[7] % 4) { /* mostly a lap and an operation that can be, a key that is there */
                slots[slot].sequence = (uint32_t)((head + i) / SLOTS + 1);
                uint32_t op = words[6] % 8 ? HIFC_RING_OP_READ : HIFC_RING_OP_CANCEL;
                slots[slot].control = words[6] % 3 ? HIFC_RING_CONTROL(op, words[6] % 80)
                                                   : words[6] & 0x830000ffu;
                struct hifc_key key = key_of(words[0] % (KEYS + 4));
                memcpy(slots[slot].key, key.bytes, 16);
                slots[slot].place = words[1] % 5 ? words[1] % ARENA_PAGES : words[1];
                slots[slot].first_part = (uint16_t)(words[4] % 2 ? words[2] % 5 : 0);
                slots[slot].part_count = (uint16_t)(words[4] % 2 ? words[3] % 6 : 0);
            }
        }
        /* The rest of the header is nobody's business once the ring is open. */
        header->slots = (uint32_t)state;
        header->statuses = (uint32_t)(state >> 7);
        header->slots_offset = state;
        header->tail = state;
        CHECK_EQ(hifc_ring_kick(ring), 0);
        head = header->head;
    }
    struct hifc_stats s = stats();
    CHECK(s.prefetch_bad > 1000 && s.prefetch_completed > 1000);
    header->tail = header->head;
    struct hifc_check_result result;
    CHECK_EQ(hifc_ring_close(ring), 0);
    CHECK_EQ(hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &result), 0);
    CHECK_EQ(result.problems, 0);
    open_ring(16);
    struct hifc_descriptor good = want(1, 0, 0, 0, 0);
    submit(&good, 1);
    CHECK_EQ(answer(0), HIFC_OK);
    check_bytes(1, 0, 0, VALUE);
    finish();
}

TEST(options_are_checked)
{
    start(HIFC_INLINE);
    struct hifc_ring_opts good = {.slots = 16, .arena_offset = at, .arena_bytes = 8192,
                                  .read_max_bytes = 4096}, bad;
    struct hifc_ring *other;
#define REFUSED(field, value)                                 \
    bad = good;                                               \
    bad.field = (value);                                      \
    CHECK_EQ(hifc_ring_open(ns, &bad, &other), -EINVAL)
    REFUSED(slots, 17);
    REFUSED(slots, 8);
    REFUSED(slots, 1u << 17);
    REFUSED(statuses, (1u << 24) + 1);
    REFUSED(pool, 1);
    REFUSED(pool, 64);
    REFUSED(read_max_bytes, 0);
    REFUSED(read_max_bytes, 8193);
    REFUSED(arena_offset, at + 1);
    REFUSED(arena_offset, at + 2 * ARENA_PAGES * 4096ull - 4096);
    REFUSED(arena_bytes, 0);
    REFUSED(arena_bytes, 4097);
    REFUSED(poll_us, 1000001);
#undef REFUSED
    struct hifc_ring *many[15];
    for (unsigned i = 0; i < 15; i++) {
        CHECK_EQ(hifc_ring_open(ns, &good, &many[i]), 0);
    }
    CHECK_EQ(hifc_ring_open(ns, &good, &other), -ENOSPC);
    for (unsigned i = 0; i < 15; i++) {
        CHECK_EQ(hifc_ring_close(many[i]), 0);
    }
    finish();
}

/* ---- what others see ------------------------------------------------------------------------- */

/* Values of 256 KiB: with the bounds of a background read only a few have gone out when the demand
 * read comes, which then is done before nearly all of them. */
TEST(a_demand_read_overtakes)
{
    enum { LARGE = 256u << 10, COUNT = 16 };
    struct hifc_format_opts format = {.segment_size_bytes = 2u << 20, .force = 1};
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 16u << 20,
                                  .requests_max = 1};
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open(PLAIN, &opts, &ns), 0);
    pool = hifc_pool_base(ns, 0, NULL);
    CHECK_EQ(hifc_buffer_alloc(ns, (COUNT + 1) * LARGE, &at), 0);
    for (uint32_t n = 0; n <= COUNT; n++) {
        CHECK_EQ(put(n, LARGE, 1), HIFC_OK);
    }
    struct hifc_ring_opts ring_opts = {.slots = 16, .arena_offset = at,
                                       .arena_bytes = COUNT * LARGE, .read_max_bytes = LARGE};
    uint64_t bytes;
    CHECK_EQ(hifc_ring_open(ns, &ring_opts, &ring), 0);
    header = hifc_ring_base(ring, &bytes);
    statuses = (int32_t *)((uint8_t *)header + header->statuses_offset);
    struct hifc_descriptor some[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        some[i] = want(i, i * LARGE / 4096, 0, 0, i);
    }
    submit(some, COUNT);
    CHECK_EQ(hifc_ring_kick(ring), 0);
    /* The only operation that there is for requests has not gone to a prefetch. */
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(COUNT), .length = LARGE,
                           .buffer_offset = at + COUNT * LARGE};
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    uint32_t before = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        before += status(i) != HIFC_RING_WAITING;
    }
    CHECK(before <= 8);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(answer(i), HIFC_OK);
        check_bytes(i, i * LARGE / 4096, 0, LARGE);
    }
    finish();
}

TEST(a_sleeping_reactor_is_woken)
{
    atomic_store(&sleeps_are_endless, true); /* it never looks by itself */
    start(HIFC_REACTOR);
    struct hifc_descriptor d = want(1, 0, 0, 0, 0);
    for (uint32_t i = 0; i < 200; i++) {
        uint32_t sleeps = atomic_load(&sleep_count);
        submit(&d, 1);
        CHECK_EQ(answer(0), HIFC_OK);
        if (i % 10 == 0) { /* the others meet it on its way to sleep */
            await_sleep_after(sleeps);
        }
    }
    finish();
    atomic_store(&sleeps_are_endless, false);
}

/* A kernel cannot wake anybody: then poll_us bounds how long a descriptor stands. */
TEST(a_descriptor_is_found_without_a_kick)
{
    start(HIFC_REACTOR);
    CHECK_EQ(hifc_ring_close(ring), 0);
    struct hifc_ring_opts opts = {.slots = 16, .arena_offset = at, .arena_bytes = VALUE,
                                  .read_max_bytes = VALUE, .poll_us = POLL_NS / 1000};
    uint64_t bytes;
    CHECK_EQ(hifc_ring_open(ns, &opts, &ring), 0);
    header = hifc_ring_base(ring, &bytes);
    statuses = (int32_t *)((uint8_t *)header + header->statuses_offset);
    struct hifc_descriptor *slots = (void *)((uint8_t *)header + header->slots_offset);
    uint32_t sleeps = atomic_load(&sleep_count);
    await_sleep_after(sleeps + 1); /* one that began with this ring open */
    CHECK(atomic_load(&sleep_limit_ns) <= POLL_NS);
    struct hifc_descriptor d = want(1, 0, 0, 0, 3);
    __atomic_store_n(&statuses[3], HIFC_RING_WAITING, __ATOMIC_RELAXED);
    uint32_t words[8];
    memcpy(words, &d, sizeof d);
    for (uint32_t w = 0; w < 7; w++) {
        __atomic_store_n((uint32_t *)&slots[0] + w, words[w], __ATOMIC_RELAXED);
    }
    __atomic_store_n(&slots[0].sequence, 1, __ATOMIC_RELEASE);
    CHECK_EQ(answer(3), HIFC_OK); /* hifc_ring_wait wakes nobody either */
    check_bytes(1, 0, 0, VALUE);
    finish();
}

TEST(a_pool_is_kept_while_a_ring_reads_into_it)
{
    start(HIFC_REACTOR);
    uint32_t number;
    uint8_t *memory = aligned_alloc(4096, 16 * 4096);
    CHECK_EQ(hifc_pool_register(ns, memory, 16 * 4096, &number), 0);
    struct hifc_ring_opts opts = {.slots = 16, .pool = number, .arena_offset = 4096,
                                  .arena_bytes = VALUE, .read_max_bytes = VALUE};
    struct hifc_ring *other;
    CHECK_EQ(hifc_ring_open(ns, &opts, &other), 0);
    CHECK_EQ(hifc_pool_unregister(ns, number), -EBUSY);
    struct hifc_descriptor d = want(6, 0, 0, 0, 0);
    uint32_t zero = 0;
    CHECK_EQ(hifc_ring_submit(other, &d, 1), 1);
    CHECK_EQ(hifc_ring_wait(other, &zero, 1, CHECK_HANG_US), 1);
    CHECK_EQ(memory[4096 + 9], byte_of(6, 9));
    CHECK_EQ(hifc_ring_close(other), 0);
    CHECK_EQ(hifc_pool_unregister(ns, number), 0);
    free(memory);
    finish();
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

TEST(damaged_bytes_do_not_arrive)
{
    start_with("faulty+" PLAIN, (struct hifc_open_opts){.drive = HIFC_REACTOR});
    struct hifc_device *device = hifc_faulty_find(NAME);
    CHECK_EQ(hifc_faulty_flip(device, (1u << 20) / 4096 + 1, (32u << 20) / 4096 - 64), 0);
    struct hifc_descriptor some[] = {want(1, 0, 0, 0, 0), want(2, 8, 1, 1, 1)};
    memset(pool + at, 0xee, 2 * VALUE);
    submit(some, 2);
    CHECK_EQ(answer(0), HIFC_MISS);
    CHECK_EQ(answer(1), HIFC_MISS);
    for (uint32_t i = 0; i < VALUE; i++) {
        CHECK_EQ(pool[at + i], 0);
    }
    CHECK_EQ(stats().corrupt_count, 2);
    hifc_faulty_clear(device);
    CHECK_EQ(hifc_faulty_read_error(device, 256, 8000), 0);
    some[0] = want(3, 0, 0, 0, 0);
    submit(some, 1);
    CHECK_EQ(answer(0), -EIO);
    CHECK_EQ(stats().prefetch_failed, 3);
    hifc_faulty_clear(device);
    finish();
}

/* Every command takes some hundred polls, so that much is in flight when the end comes. */
static void close_while_reading(uint32_t drive, bool namespace_first)
{
    start_with("faulty+" PLAIN "&fault_delay=300",
               (struct hifc_open_opts){.drive = drive, .prefetch_inflight = 4});
    struct hifc_descriptor some[24];
    for (uint32_t i = 0; i < 20; i++) {
        some[i] = want(i, i * 8, 0, 0, i);
    }
    submit(some, 20);
    CHECK_EQ(hifc_ring_kick(ring), 0);
    if (!namespace_first) {
        CHECK_EQ(hifc_ring_close(ring), 0);
        CHECK_EQ(hifc_close(ns), 0);
        return;
    }
    for (uint32_t i = 20; i < 24; i++) { /* inline, these are never even looked at */
        some[i] = want(i - 20, i * 8, 1, 1, i);
    }
    submit(&some[20], 4);
    CHECK_EQ(hifc_close(ns), 0);
    uint32_t read = 0, refused = 0, zero = 0;
    for (uint32_t i = 0; i < 24; i++) {
        read += status(i) == HIFC_OK;
        refused += status(i) == -ESHUTDOWN;
    }
    CHECK_EQ(read + refused, 24);
    CHECK(refused > 0 || drive == HIFC_REACTOR); /* which may have been faster */
    CHECK_EQ(header->state, HIFC_RING_CLOSED);
    CHECK_EQ(hifc_ring_submit(ring, some, 1), -ESHUTDOWN);
    CHECK_EQ(hifc_ring_kick(ring), -ESHUTDOWN);
    CHECK_EQ(hifc_ring_wait(ring, &zero, 1, CHECK_HANG_US), 1);
    statuses[0] = HIFC_RING_WAITING; /* a kernel that has not heard of it */
    CHECK_EQ(hifc_ring_wait(ring, &zero, 1, CHECK_HANG_US), -ESHUTDOWN);
    CHECK_EQ(hifc_ring_close(ring), 0);
}

TEST(a_ring_is_closed_while_it_reads_inline)
{
    close_while_reading(HIFC_INLINE, false);
}

TEST(a_ring_is_closed_while_it_reads)
{
    close_while_reading(HIFC_REACTOR, false);
}

TEST(a_namespace_is_closed_while_its_ring_reads_inline)
{
    close_while_reading(HIFC_INLINE, true);
}

TEST(a_namespace_is_closed_while_its_ring_reads)
{
    close_while_reading(HIFC_REACTOR, true);
}

TEST(a_vanished_device_is_an_answer)
{
    start_with("faulty+" PLAIN, (struct hifc_open_opts){.drive = HIFC_REACTOR});
    struct hifc_descriptor some[20];
    hifc_faulty_cut(hifc_faulty_find(NAME));
    for (uint32_t i = 0; i < 20; i++) {
        some[i] = want(i, i * 8, 0, 0, i);
    }
    submit(some, 20);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(answer(i), -EIO);
    }
    CHECK_EQ(hifc_ring_close(ring), 0);
    CHECK(hifc_close(ns) < 0);
}

TEST(a_child_of_fork_is_refused)
{
    start(HIFC_INLINE);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct hifc_descriptor d = want(1, 0, 0, 0, 0);
        uint32_t zero = 0;
        struct hifc_ring_opts opts = {0};
        bool refused = hifc_ring_submit(ring, &d, 1) == -ECHILD &&
                       hifc_ring_kick(ring) == -ECHILD &&
                       hifc_ring_wait(ring, &zero, 1, 0) == -ECHILD &&
                       hifc_ring_close(ring) == -ECHILD &&
                       hifc_ring_open(ns, &opts, &ring) == -ECHILD;
        _exit(refused ? 0 : 1);
    }
    int result;
    CHECK_EQ(waitpid(child, &result, 0), child);
    CHECK_EQ(result, 0);
    finish();
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
