/* SPDX-License-Identifier: Apache-2.0
 *
 * reactor.c - the thread that drives both queue pairs.
 *
 * It spins after progress, then sleeps: on an eventfd that submit writes, and with commands in
 * flight also on the queue pairs' own descriptors, or in short naps where a device has none. How
 * long it spins adapts, up to spin_us, to whether spinning would have caught what came next: on a
 * fast device it never sleeps under load, on a slow disk it soon does not spin at all and leaves
 * the core to compute.
 *
 * No wakeup is lost: the reactor sets `sleeping`, then looks at the intake; submit pushes, then
 * looks at `sleeping`; all four are sequentially consistent, so one of the two sees the other. The
 * same holds for what gather finds where its producers wake; for those that cannot, a GPU's kernels,
 * sleep_max_ns bounds the sleep.
 *
 * All signals are blocked in the thread: SIGPIPE of a broken socket must end nobody, and handlers
 * run elsewhere.
 */
#define _GNU_SOURCE /* ppoll, pthread_setname_np */
#include "engine/internal.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/cpu.h"
#include "util/error.h"
#include "util/thread.h"

/* With commands in flight the device's poll also finds timeouts: it is called at least so often. */
#define SLEEP_BUSY_MAX_NS 100000000ull
#define SLEEP_IDLE_MAX_NS 1000000000ull
/* A nap is an eighth of the wait so far, within these bounds: it adds little to any latency. */
#define NAP_MIN_NS 20000ull
#define NAP_MAX_NS 200000ull
#define TIMER_SLACK_NS 1000ul

/* One wait for progress. */
struct idle {
    uint64_t since_ns;   /* 0: there was progress just now */
    uint64_t asleep_ns;  /* since when it sleeps for it; 0: it does not */
    bool inflight;       /* waits for the device, otherwise for somebody to submit */
    uint64_t spin_ns[2]; /* budget by inflight */
};

void hifc_reactor_wake(struct hifc_engine *engine)
{
    if (atomic_load(&engine->sleeping) && atomic_exchange(&engine->sleeping, false)) {
        uint64_t one = 1;
        while (write(engine->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
}

/* Descriptors to sleep on besides the eventfd; -1: a queue with work has none. */
static int add_queue(struct hifc_queue *queue, struct pollfd *fds, int count)
{
    if (count < 0 || !hifc_queue_busy(queue)) {
        return count;
    }
    int fd = queue->inflight ? queue->engine->device->ops->event_fd(queue->qpair) : -1;
    if (fd < 0) {
        return -1;
    }
    fds[count] = (struct pollfd){.fd = fd, .events = POLLIN};
    return count + 1;
}

static uint64_t nap_ns(uint64_t waited_ns)
{
    uint64_t nap = waited_ns / 8;
    return nap < NAP_MIN_NS ? NAP_MIN_NS : nap < NAP_MAX_NS ? nap : NAP_MAX_NS;
}

static void sleep_once(struct hifc_engine *engine, uint64_t waited_ns)
{
    struct pollfd fds[3] = {{.fd = engine->wake_fd, .events = POLLIN}};
    bool busy = hifc_queue_busy(&engine->reads) || hifc_queue_busy(&engine->writes);
    int count = add_queue(&engine->writes, fds, add_queue(&engine->reads, fds, 1));
    uint64_t limit_ns = busy ? SLEEP_BUSY_MAX_NS : SLEEP_IDLE_MAX_NS;
    if (engine->opts.tick && engine->opts.tick_ms * 1000000ull < limit_ns) {
        limit_ns = engine->opts.tick_ms * 1000000ull;
    }
    if (count < 0) {
        count = 1;
        limit_ns = nap_ns(waited_ns);
    }
    atomic_store(&engine->sleeping, true);
    if (engine->opts.gather) {
        uint64_t most_ns = engine->opts.sleep_max_ns(engine->opts.owner);
        limit_ns = most_ns < limit_ns ? most_ns : limit_ns;
    }
    struct timespec limit = {.tv_sec = (time_t)(limit_ns / 1000000000u),
                             .tv_nsec = (long)(limit_ns % 1000000000u)};
    if (limit_ns && !atomic_load(&engine->intake) && !atomic_load(&engine->stopping)) {
        ppoll(fds, (nfds_t)count, &limit, NULL); /* why it ended, the round finds out */
    }
    atomic_store(&engine->sleeping, false);
    if (fds[0].revents) {
        uint64_t writes;
        while (read(engine->wake_fd, &writes, sizeof writes) < 0 && errno == EINTR) {
        }
    }
}

/* A sleep that was shorter than a spin may take should have been one, and the other way round. */
static void adapt(struct idle *idle, uint64_t spin_max_ns)
{
    uint64_t *spin_ns = &idle->spin_ns[idle->inflight];
    if (hifc_now_ns() - idle->asleep_ns < spin_max_ns) {
        *spin_ns = *spin_ns * 2 + spin_max_ns / 8;
        *spin_ns = *spin_ns < spin_max_ns ? *spin_ns : spin_max_ns;
    } else {
        *spin_ns /= 2;
    }
}

static void *reactor_main(void *argument)
{
    struct hifc_engine *engine = argument;
    uint64_t spin_max_ns = engine->opts.spin_us * 1000ull;
    struct idle idle = {.spin_ns = {spin_max_ns, spin_max_ns}};
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
    while (!atomic_load_explicit(&engine->stopping, memory_order_acquire)) {
        bool news = atomic_load_explicit(&engine->intake, memory_order_relaxed) != NULL;
        if (hifc_engine_round(engine) || news) {
            if (idle.asleep_ns) {
                adapt(&idle, spin_max_ns);
            }
            idle.since_ns = idle.asleep_ns = 0;
            continue;
        }
        uint64_t now = hifc_now_ns();
        if (!idle.since_ns) {
            idle.since_ns = now;
            idle.inflight = hifc_queue_busy(&engine->reads) || hifc_queue_busy(&engine->writes);
        }
        if (now - idle.since_ns < idle.spin_ns[idle.inflight]) {
            hifc_cpu_relax();
            continue;
        }
        if (!idle.asleep_ns) {
            idle.asleep_ns = now;
        }
        sleep_once(engine, now - idle.since_ns);
    }
    return NULL;
}

int hifc_reactor_start(struct hifc_engine *engine)
{
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->wake_fd < 0) {
        return hifc_fail_eventfd(errno, engine->device->uri);
    }
    engine->opts.reactor = true;
    int rc = hifc_thread_start(&engine->thread, "hifc-reactor", reactor_main, engine,
                               engine->device->uri);
    if (rc) {
        engine->opts.reactor = false;
        close(engine->wake_fd);
        engine->wake_fd = -1;
    }
    return rc;
}

void hifc_reactor_stop(struct hifc_engine *engine)
{
    atomic_store(&engine->stopping, true);
    hifc_reactor_wake(engine);
    pthread_join(engine->thread, NULL);
    close(engine->wake_fd);
    engine->wake_fd = -1;
}
