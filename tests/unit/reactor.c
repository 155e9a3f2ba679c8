/* SPDX-License-Identifier: Apache-2.0
 *
 * The reactor: no wakeup is lost, waiting is sleeping, ticks come when idle, and destroy ends what
 * is in flight. The ThreadSanitizer build runs the same tests.
 */
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>

#include "engine/internal.h"
#include "scripted_device.h"

enum { DEVICE_BYTES = 1 << 20, THREADS = 4 };

struct waiter {
    struct hifc_xfer xfer;
    struct hifc_span span;
    sem_t ended;
    _Atomic uint32_t count;
    struct hifc_engine *engine;
    uint32_t iterations;
    uint32_t seed;
    _Alignas(512) uint8_t memory[4096];
};

static _Atomic uint32_t batch_ends, ticks;

static void waiter_done(struct hifc_xfer *xfer)
{
    struct waiter *waiter = xfer->owner;
    atomic_fetch_add(&waiter->count, 1);
    sem_post(&waiter->ended);
}

static void count_batch_end(void *owner)
{
    (void)owner;
    atomic_fetch_add(&batch_ends, 1);
}

static void count_tick(void *owner)
{
    (void)owner;
    atomic_fetch_add(&ticks, 1);
}

static struct hifc_engine *reactor_on(struct scripted_device *device, uint32_t spin_us)
{
    struct hifc_engine *engine;
    struct hifc_engine_opts opts = {.reactor = true, .queue_depth = 16, .spin_us = spin_us,
                                    .batch_end = count_batch_end, .tick = count_tick,
                                    .tick_ms = 20};
    atomic_store(&batch_ends, 0);
    atomic_store(&ticks, 0);
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), 0);
    CHECK(hifc_engine_is_reactor(engine));
    CHECK_EQ(hifc_engine_poll(engine), 0);
    return engine;
}

static void start(struct waiter *waiter, enum hifc_io_op op, uint64_t offset_bytes)
{
    waiter->span = (struct hifc_span){.base = waiter->memory, .bytes = 4096};
    waiter->xfer = (struct hifc_xfer){.spans = &waiter->span, .span_count = 1, .op = (uint8_t)op,
                                      .offset_bytes = offset_bytes, .length_bytes = 4096,
                                      .done = waiter_done, .owner = waiter};
    hifc_engine_submit(waiter->engine, &waiter->xfer);
}

static void await(struct waiter *waiter)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CHECK_HANG_S;
    while (sem_timedwait(&waiter->ended, &until) != 0) {
        CHECK_EQ(errno, EINTR);
    }
}

static void *submit_and_wait(void *argument)
{
    struct waiter *waiter = argument;
    for (uint32_t i = 0; i < waiter->iterations; i++) {
        start(waiter, i % 3 ? HIFC_IO_READ : HIFC_IO_WRITE, waiter->seed * 4096ull);
        await(waiter);
        CHECK_EQ(waiter->xfer.error, 0);
        for (unsigned pause = (unsigned)rand_r(&waiter->seed) % 3000; pause; pause--) {
            __asm__ volatile("");
        }
        waiter->seed %= 64;
    }
    return NULL;
}

static void stress(struct scripted_device *device, uint32_t spin_us, uint32_t iterations)
{
    struct hifc_engine *engine = reactor_on(device, spin_us);
    static struct waiter waiters[THREADS];
    pthread_t threads[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        memset(&waiters[i], 0, sizeof waiters[i]);
        sem_init(&waiters[i].ended, 0, 0);
        waiters[i].engine = engine;
        waiters[i].iterations = iterations;
        waiters[i].seed = i + 1;
        CHECK_EQ(pthread_create(&threads[i], NULL, submit_and_wait, &waiters[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(waiters[i].count, iterations);
        sem_destroy(&waiters[i].ended);
    }
    hifc_engine_destroy(engine);
}

static _Atomic bool endless;

int __real_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *limit,
                 const sigset_t *signals);
int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *limit,
                 const sigset_t *signals);

/* What the reactor sleeps in. While `endless`, a sleep with nothing in flight has no bound, so that
 * nothing but a wakeup ends it. */
int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *limit,
                 const sigset_t *signals)
{
    return __real_ppoll(fds, count, endless && limit->tv_sec > 0 ? NULL : limit, signals);
}

/* Submits just as the reactor falls asleep, a little earlier or later each time. There is no tick
 * and no bound of a sleep to paper over a lost wakeup: the test would not end. */
TEST(no_wakeup_is_lost_when_it_always_sleeps)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine;
    struct hifc_engine_opts opts = {.reactor = true, .queue_depth = 16};
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), 0);
    struct waiter waiter = {.engine = engine, .seed = 1};
    sem_init(&waiter.ended, 0, 0);
    endless = true;
    uint64_t begin_ns = scripted_now_ns();
    for (uint32_t i = 1; i <= 100000 && scripted_now_ns() - begin_ns < 5000000000u; i++) {
        start(&waiter, HIFC_IO_READ, 0);
        while (waiter.count != i) { /* without sleeping, so as to be quick enough */
        }
        for (unsigned pause = (unsigned)rand_r(&waiter.seed) % 2000; pause; pause--) {
            __asm__ volatile("");
        }
    }
    endless = false;
    hifc_engine_destroy(engine);
    sem_destroy(&waiter.ended);
    scripted_free(device);
}

TEST(threads_share_a_reactor)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    stress(device, 0, 2000);
    stress(device, 50, 2000);
    device->event_fds = true;
    device->latency_ns = 20000;
    stress(device, 0, 1000);
    stress(device, 50, 1000);
    device->event_fds = false;
    stress(device, 10, 1000);
    scripted_free(device);
}

/* ---- how often it looks ---------------------------------------------------------------------- */

static _Atomic uint32_t rounds, rounds_waiting; /* all, and those with a read in flight */

static uint32_t count_round(void *owner)
{
    struct scripted_device *device = owner;
    atomic_fetch_add(&rounds, 1);
    atomic_fetch_add(&rounds_waiting, device->inflight_bytes[0] > 0);
    return 0;
}

static uint64_t sleep_as_you_like(void *owner)
{
    (void)owner;
    return UINT64_MAX;
}

static struct hifc_engine *watched_reactor(struct scripted_device *device)
{
    struct hifc_engine *engine;
    struct hifc_engine_opts opts = {.reactor = true, .queue_depth = 16, .spin_us = 50,
                                    .gather = count_round, .sleep_max_ns = sleep_as_you_like,
                                    .tick = count_tick, .tick_ms = 20, .owner = device};
    atomic_store(&ticks, 0);
    CHECK_EQ(hifc_engine_create(&device->base, &opts, &engine), 0);
    return engine;
}

static void await_ticks(uint32_t count)
{
    for (int64_t slept_us = 0; atomic_load(&ticks) < count; slept_us += 1000) {
        CHECK(slept_us < CHECK_HANG_US);
        usleep(1000);
    }
}

/* A sleep ends with a tick, or just before one, and each is followed by one look. Late sleeps make
 * late ticks, so the two stay together however busy the machine is. */
TEST(an_idle_reactor_looks_at_ticks_alone)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = watched_reactor(device);
    await_ticks(2); /* by then it has stopped spinning */
    uint32_t ticks_before = atomic_load(&ticks), rounds_before = atomic_load(&rounds);
    await_ticks(ticks_before + 10);
    uint32_t looks = atomic_load(&rounds) - rounds_before;
    printf("%u looks\n", looks);
    CHECK(looks <= 2 * (atomic_load(&ticks) - ticks_before) + 2);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

/* How often it looks for one read of 2 ms, on average. It spins for 20,000 looks in that time, 2,000
 * under a sanitizer. Asleep it looks twice, or as often as it naps, some thirty times, and spins now
 * and then where it got its processor so late that the read was done before the sleep began. */
static unsigned looks_for_a_read(bool event_fds)
{
    enum { READS = 100 };
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->latency_ns = 2000000;
    device->event_fds = event_fds;
    struct hifc_engine *engine = watched_reactor(device);
    struct waiter waiter = {.engine = engine};
    sem_init(&waiter.ended, 0, 0);
    uint32_t before = 0;
    for (unsigned i = 0; i < 20 + READS; i++) {
        if (i == 20) { /* it has found out how slow the device is */
            before = atomic_load(&rounds_waiting);
        }
        start(&waiter, HIFC_IO_READ, 0);
        await(&waiter);
    }
    uint32_t looks = (atomic_load(&rounds_waiting) - before) / READS;
    await_ticks(5); /* every 20 ms, asleep or not */
    hifc_engine_destroy(engine);
    sem_destroy(&waiter.ended);
    scripted_free(device);
    return looks;
}

TEST(waiting_for_a_slow_disk_is_sleeping)
{
    unsigned by_descriptor = looks_for_a_read(true), by_naps = looks_for_a_read(false);
    printf("looks for a read: %u with descriptors, %u without\n", by_descriptor, by_naps);
    CHECK(by_descriptor <= 100);
    CHECK(by_naps <= 200);
}

TEST(a_sleeping_reactor_still_polls_for_timeouts)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    device->event_fds = true;
    device->frozen = true;
    struct hifc_engine *engine = reactor_on(device, 0);
    struct waiter waiter = {.engine = engine};
    sem_init(&waiter.ended, 0, 0);
    start(&waiter, HIFC_IO_READ, 0);
    usleep(50000);
    CHECK_EQ(waiter.count, 0);
    device->frozen = false; /* no descriptor fires: as a command that times out */
    await(&waiter);
    hifc_engine_destroy(engine);
    sem_destroy(&waiter.ended);
    scripted_free(device);
}

TEST(destroy_ends_what_is_in_flight)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    static struct waiter waiters[40];
    device->event_fds = true;
    device->frozen = true;
    struct hifc_engine *engine = reactor_on(device, 50);
    for (unsigned i = 0; i < 40; i++) { /* more than the queues are deep */
        memset(&waiters[i], 0, sizeof waiters[i]);
        sem_init(&waiters[i].ended, 0, 0);
        waiters[i].engine = engine;
        start(&waiters[i], i % 2 ? HIFC_IO_READ : HIFC_IO_WRITE, 4096 * i);
        if (i == 30) {
            usleep(10000);
        }
    }
    hifc_engine_destroy(engine);
    for (unsigned i = 0; i < 40; i++) {
        CHECK_EQ(waiters[i].count, 1);
        CHECK_EQ(waiters[i].xfer.error, -ECANCELED);
        sem_destroy(&waiters[i].ended);
    }
    CHECK(batch_ends >= 1);
    scripted_free(device);
}

TEST(a_reactor_without_a_device_answers)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = reactor_on(device, 0);
    struct waiter waiter = {.engine = engine};
    sem_init(&waiter.ended, 0, 0);
    device->open_rc = -ENXIO;
    device->lose_polls = 1;
    start(&waiter, HIFC_IO_WRITE, 0);
    await(&waiter);
    CHECK_EQ(waiter.xfer.error, -EIO);
    for (unsigned i = 0; i < 100; i++) {
        start(&waiter, HIFC_IO_WRITE, 0);
        await(&waiter);
        CHECK_EQ(waiter.xfer.error, -ENODEV);
    }
    start(&waiter, HIFC_IO_READ, 0); /* by the other queue pair */
    await(&waiter);
    CHECK_EQ(waiter.xfer.error, 0);
    hifc_engine_destroy(engine);
    sem_destroy(&waiter.ended);
    scripted_free(device);
}

TEST(signals_go_to_other_threads)
{
    struct scripted_device *device = scripted_create(DEVICE_BYTES);
    struct hifc_engine *engine = reactor_on(device, 50);
    CHECK_EQ(pthread_kill(engine->thread, SIGPIPE), 0); /* blocked there: nobody dies */
    CHECK_EQ(pthread_kill(engine->thread, SIGTERM), 0);
    sigset_t mine;
    pthread_sigmask(SIG_SETMASK, NULL, &mine);
    CHECK(!sigismember(&mine, SIGPIPE));
    usleep(20000);
    hifc_engine_destroy(engine);
    scripted_free(device);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
