/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.c - the memory of a request ring: laps, credit, several producers and one consumer. Meant
 * for the thread sanitizer as well, which finds a descriptor that is read before it was published.
 */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/ring.h"

#define THREADS 4u
#define EACH 20000u

static struct hifc_ring_memory ring;

static void create(uint32_t slots, uint32_t statuses)
{
    CHECK_EQ(hifc_ring_memory_create(slots, statuses, 1u << 20, 65536, &ring), 0);
}

/* Every field is a function of who and which, so that a torn one is seen. */
static struct hifc_descriptor made_by(uint32_t thread, uint32_t n)
{
    struct hifc_descriptor d = {.place = n * 2654435761u,
                                .first_part = (uint16_t)(n * 7),
                                .part_count = (uint16_t)(n >> 3),
                                .control = HIFC_RING_CONTROL(HIFC_RING_OP_READ, thread)};
    uint32_t words[4] = {thread, n, ~n, thread ^ n};
    memcpy(d.key, words, sizeof words);
    return d;
}

static void check_made(const struct hifc_descriptor *d, uint32_t *thread, uint32_t *n)
{
    uint32_t words[4];
    memcpy(words, d->key, sizeof words);
    struct hifc_descriptor expected = made_by(words[0], words[1]);
    expected.sequence = d->sequence;
    CHECK(memcmp(&expected, d, sizeof expected) == 0);
    *thread = words[0];
    *n = words[1];
}

TEST(a_word_that_is_not_there_is_not_written)
{
    create(16, 16);
    uint32_t behind = 4096 / sizeof(int32_t) - 1; /* of the page that the words share */
    struct hifc_descriptor in = made_by(behind, 1);
    CHECK_EQ(hifc_ring_produce(&ring, &in, 1), 1);
    CHECK_EQ(ring.statuses[behind], 0);
    in = made_by(HIFC_RING_INDEX_MASK, 1); /* far behind the mapping */
    CHECK_EQ(hifc_ring_produce(&ring, &in, 1), 1);
    hifc_ring_memory_destroy(&ring);
}

TEST(a_descriptor_comes_out_as_it_went_in)
{
    create(16, 16);
    struct hifc_descriptor in = made_by(3, 12345), out;
    CHECK(!hifc_ring_news(&ring));
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_EMPTY);
    CHECK_EQ(ring.statuses[3], HIFC_RING_IDLE);
    CHECK_EQ(hifc_ring_produce(&ring, &in, 1), 1);
    CHECK_EQ(ring.statuses[3], HIFC_RING_WAITING);
    CHECK(hifc_ring_news(&ring));
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_TOOK);
    in.sequence = 1;
    CHECK(memcmp(&in, &out, sizeof in) == 0);
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_EMPTY);
    hifc_ring_answer(&ring, 3, HIFC_OK);
    CHECK_EQ(ring.statuses[3], HIFC_OK);
    CHECK_EQ(ring.header->answers, 1);
    hifc_ring_memory_destroy(&ring);
}

TEST(a_cancel_leaves_the_status_word_to_its_owner)
{
    create(16, 16);
    struct hifc_descriptor cancel = {.control = HIFC_RING_CONTROL(HIFC_RING_OP_CANCEL, 5)};
    hifc_ring_answer(&ring, 5, HIFC_OK);
    CHECK_EQ(hifc_ring_produce(&ring, &cancel, 1), 1);
    CHECK_EQ(ring.statuses[5], HIFC_OK);
    hifc_ring_memory_destroy(&ring);
}

TEST(a_full_ring_loses_what_has_no_room_and_counts_it)
{
    struct hifc_descriptor many[40], out;
    create(16, 16);
    for (uint32_t i = 0; i < 40; i++) {
        many[i] = made_by(i % 16, i);
    }
    CHECK_EQ(hifc_ring_produce(&ring, many, 40), 16);
    CHECK_EQ(ring.header->overflowed, 24);
    CHECK_EQ(hifc_ring_produce(&ring, many, 1), 0);
    CHECK_EQ(ring.header->overflowed, 25);
    for (uint32_t i = 0; i < 5; i++) { /* taken, but not given back yet */
        CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_TOOK);
    }
    CHECK_EQ(hifc_ring_produce(&ring, many, 1), 0);
    hifc_ring_credit(&ring);
    CHECK_EQ(ring.header->head, 5);
    CHECK_EQ(hifc_ring_produce(&ring, many + 16, 24), 5);
    for (uint32_t i = 5; i < 21; i++) { /* in order, through the wrap */
        uint32_t thread, n;
        CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_TOOK);
        check_made(&out, &thread, &n);
        CHECK_EQ(n, i);
    }
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_EMPTY);
    hifc_ring_memory_destroy(&ring);
}

TEST(a_lap_that_cannot_be_is_skipped_once)
{
    struct hifc_descriptor in = made_by(1, 1), out;
    create(16, 16);
    ring.slots[0] = in;
    ring.slots[0].sequence = 77; /* a foreign write: it was never claimed */
    CHECK(hifc_ring_news(&ring));
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_STALE);
    for (uint32_t i = 1; i < 16; i++) {
        ring.slots[i].sequence = 1;
        CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_TOOK);
    }
    /* Round again: the old nonsense is no news, the lap that is due is. */
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_EMPTY);
    ring.slots[0].sequence = 1;
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_STALE); /* a lap behind */
    ring.slots[1].sequence = 2;
    CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_TOOK);
    hifc_ring_memory_destroy(&ring);
}

TEST(a_producer_ends_also_where_the_header_is_nonsense)
{
    static const uint64_t nonsense[] = {0, 1, 15, 16, 17, 1ull << 63, UINT64_MAX};
    struct hifc_descriptor many[40] = {{{0}}};
    for (unsigned head = 0; head < 7; head++) {
        for (unsigned tail = 0; tail < 7; tail++) {
            create(16, 16);
            ring.header->head = nonsense[head];
            ring.header->tail = nonsense[tail];
            CHECK(hifc_ring_produce(&ring, many, 40) <= 16);
            hifc_ring_memory_destroy(&ring);
        }
    }
}

TEST(laps_go_on_past_their_largest_number)
{
    struct hifc_descriptor in = made_by(2, 9), out;
    create(16, 16);
    ring.head = ring.header->head = ring.header->tail = (1ull << 36) - 32; /* lap UINT32_MAX */
    for (uint32_t i = 0; i < 16; i++) {
        ring.slots[i].sequence = ring.seen[i] = UINT32_MAX - 1;
    }
    for (uint32_t i = 0; i < 80; i++) {
        CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_EMPTY);
        CHECK_EQ(hifc_ring_produce(&ring, &in, 1), 1);
        CHECK_EQ(hifc_ring_take(&ring, &out), HIFC_RING_TOOK);
        CHECK_EQ(out.sequence, UINT32_MAX + i / 16);
        hifc_ring_credit(&ring);
    }
    hifc_ring_memory_destroy(&ring);
}

/* ---- several producers ----------------------------------------------------------------------- */

static _Atomic uint32_t producing;
static _Atomic uint64_t lost;
/* Plain memory that only publishing makes safe to read: what the thread sanitizer looks at. */
static uint32_t beside[THREADS][EACH];

static void *producer(void *argument)
{
    uint32_t thread = (uint32_t)(uintptr_t)argument, random = thread + 1;
    struct hifc_descriptor some[8];
    bool again = false;
    for (uint32_t n = 0; n < EACH;) {
        random = random * 1664525 + 1013904223;
        uint32_t count = 1 + (random >> 16) % 8;
        count = count < EACH - n ? count : EACH - n;
        for (uint32_t i = 0; i < count; i++) {
            some[i] = made_by(thread, n + i);
        }
        for (uint32_t i = 0; i < count; i++) {
            if (beside[thread][n + i] == 0) { /* once: it may be read from now on */
                beside[thread][n + i] = thread + n + i + 1;
            }
        }
        uint32_t taken = hifc_ring_produce(&ring, some, count);
        atomic_fetch_add(&lost, count - taken);
        /* Now and then it really loses them: by its first attempt, since how many there are depends
         * on when the consumer runs. */
        bool loses = !again && random % 64 == 0;
        n += loses ? count : taken;
        again = taken < count && !loses;
        if (taken < count) {
            usleep(20);
        }
    }
    atomic_fetch_sub(&producing, 1);
    return NULL;
}

/* Slots wrap some thousand times. */
TEST(producers_do_not_disturb_one_another)
{
    pthread_t threads[THREADS];
    uint32_t next[THREADS] = {0};
    uint64_t taken = 0;
    create(16, THREADS);
    producing = THREADS;
    lost = 0;
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, producer, (void *)(uintptr_t)i), 0);
    }
    for (bool last = false; !last;) {
        last = atomic_load(&producing) == 0; /* and then once more */
        struct hifc_descriptor out;
        enum hifc_ring_took took;
        uint32_t before = (uint32_t)taken, thread, n;
        while ((took = hifc_ring_take(&ring, &out)) != HIFC_RING_EMPTY) {
            CHECK_EQ(took, HIFC_RING_TOOK);
            check_made(&out, &thread, &n);
            CHECK(thread < THREADS && n >= next[thread]); /* in the order of each */
            CHECK_EQ(beside[thread][n], thread + n + 1);
            next[thread] = n + 1;
            taken++;
            if (taken % 5 == 0) {
                hifc_ring_credit(&ring);
            }
        }
        hifc_ring_credit(&ring);
        if (before == (uint32_t)taken) {
            usleep(20);
        }
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(taken, ring.header->tail);
    CHECK_EQ(ring.header->overflowed, lost);
    CHECK(taken > THREADS * EACH / 2);
    hifc_ring_memory_destroy(&ring);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
