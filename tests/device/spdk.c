/* SPDX-License-Identifier: Apache-2.0
 *
 * The SPDK device against what goes wrong with it. tests/device/test_spdk_device.py runs these,
 * each in a process of its own, since SPDK's environment starts once in a process.
 *
 *   HIFC_TEST_URIS     the target's URI
 *   HIFC_TEST_PID      its process, to stop and to kill
 *   HIFC_TEST_RESTART  a shell command that starts it again and prints its new process
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "device/command.h"
#include "device/spdk.h"
#include "unit/device_rig.h"

#define MIB (1u << 20)
#define COUNT 32

static const char *uri(void)
{
    const char *given = getenv("HIFC_TEST_URIS");
    CHECK(given != NULL);
    if (!rig_arena.base) {
        rig_arena_open();
    }
    return given;
}

static pid_t target;

/* The state of the target's process in /proc, '-' when it is gone; its threads may still end after
 * the first of them became a zombie. */
static char target_state(void)
{
    char path[64], text[512] = "", state = '-';
    int threads = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)target);
    FILE *file = fopen(path, "r");
    if (file) {
        text[fread(text, 1, sizeof(text) - 1, file)] = 0;
        fclose(file);
    }
    const char *after_name = strrchr(text, ')');
    if (after_name) {
        CHECK_EQ(sscanf(after_name + 1, " %c%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%d",
                        &state, &threads), 2);
    }
    return state == 'Z' && threads > 1 ? 'R' : state;
}

static void signal_target(int number)
{
    if (!target) {
        CHECK(getenv("HIFC_TEST_PID") != NULL);
        target = atoi(getenv("HIFC_TEST_PID"));
    }
    CHECK(target > 1);
    CHECK_EQ(kill(target, number), 0);
    const char *reached = number == SIGSTOP ? "T" : number == SIGKILL ? "ZX-" : NULL;
    for (double end = rig_now() + CHECK_HANG_S; reached && !strchr(reached, target_state());) {
        CHECK(rig_now() < end);
        usleep(1000);
    }
}

static void restart_target(void)
{
    CHECK(getenv("HIFC_TEST_RESTART") != NULL);
    FILE *out = popen(getenv("HIFC_TEST_RESTART"), "r");
    CHECK(out != NULL);
    CHECK_EQ(fscanf(out, "%d", &target), 1);
    CHECK_EQ(pclose(out), 0);
}

static void expect_open(const char *text, int code, const char *words)
{
    struct hifc_device *device;
    CHECK_EQ(hifc_device_open(text, 0, &device), code);
    CHECK(device == NULL);
    CHECK(last_error_says(words));
}

/* COUNT writes of 64 KiB in flight. */
struct load {
    struct hifc_io ios[COUNT], *pointers[COUNT];
    uint8_t *memory;
};

static void start_load(struct rig *rig, struct load *load)
{
    load->memory = rig_memory(65536);
    for (uint32_t i = 0; i < COUNT; i++) {
        load->ios[i] = rig_io(i & 1 ? HIFC_IO_READ : HIFC_IO_WRITE, (uint64_t)i * 65536,
                              load->memory, 65536);
        load->pointers[i] = &load->ios[i];
    }
    rig_completed = 0;
    CHECK_EQ(rig->device->ops->submit(rig->qpair, load->pointers, COUNT), COUNT);
}

/* Polls until the queue pair is lost; every command must have come back by then. */
static int poll_until_lost(struct rig *rig)
{
    int rc = 0;
    for (double end = rig_now() + CHECK_HANG_S; rc >= 0;) {
        rc = rig_poll(rig);
        CHECK(rig_now() < end);
    }
    CHECK_EQ(rig_completed, COUNT);
    CHECK_EQ(rig_poll(rig), rc); /* it stays lost */
    CHECK_EQ(rig_completed, COUNT);
    return rc;
}

static void reopen_qpair(struct rig *rig)
{
    rig->device->ops->qpair_close(rig->qpair);
    CHECK_EQ(rig->device->ops->qpair_open(rig->device, COUNT, RIG_TIMEOUT_MS, &rig->qpair), 0);
}

static struct rig open_with_timeout(uint32_t timeout_ms)
{
    struct rig rig = rig_open(uri(), 0, COUNT);
    rig.device->ops->qpair_close(rig.qpair);
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, COUNT, timeout_ms, &rig.qpair), 0);
    return rig;
}

static void expect_works(struct rig *rig)
{
    uint8_t *memory = rig_memory(131072);
    rig_fill(memory, 65536, 65536, 77);
    CHECK_EQ(rig_write(rig, 65536, memory, 65536), 0);
    CHECK_EQ(rig_read(rig, 65536, memory + 65536, 65536), 0);
    CHECK(rig_holds(memory + 65536, 65536, 65536, 77));
    rig_free(memory);
}

/* ---- memory ---------------------------------------------------------------------------------- */

TEST(memory_that_is_not_registered_is_refused)
{
    struct rig rig = rig_open(uri(), 0, 4);
    uint8_t *plain = aligned_alloc(4096, 8192), *good = rig_memory(8192);
    CHECK_EQ(rig_read(&rig, 0, plain, 4096), -EINVAL);
    CHECK_EQ(rig_write(&rig, 0, plain, 8192), -EINVAL);
    struct hifc_io io = rig_io(HIFC_IO_READ, 0, good, 8192);
    io.iov_count = 2;
    io.iov[0].iov_len = 4096;
    io.iov[1] = (struct iovec){plain, 4096};
    CHECK_EQ(rig_run(&rig, &io), -EINVAL);
    /* The last bytes of the arena and the first behind it. */
    io = rig_io(HIFC_IO_READ, 0, rig_arena.base + RIG_ARENA_BYTES - 4096, 8192);
    CHECK_EQ(rig_run(&rig, &io), -EINVAL);
    CHECK_EQ(rig_read(&rig, 0, good + 512, 4096), -EINVAL); /* TCP would take it, PCIe would not */
    io = rig_io(HIFC_IO_READ, 0, good, 4096);
    io.iov_count = 2;
    io.iov[1] = (struct iovec){good + 4096, 0};
    CHECK_EQ(rig_run(&rig, &io), -EINVAL);
    CHECK_EQ(rig_read(&rig, 0, good, 8192), 0);
    free(plain);
    rig_free(good);
    rig_close(&rig);
}

TEST(memory_registers_as_often_as_one_likes_and_goes_as_often)
{
    struct rig rig = rig_open(uri(), 0, 4);
    const struct hifc_device_ops *ops = rig.device->ops;
    uint8_t *huge = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    CHECK(huge != MAP_FAILED);
    CHECK_EQ(ops->register_memory(rig.device, huge + 4096, 2 * MIB), -EINVAL);
    CHECK_EQ(ops->register_memory(rig.device, huge, 4096), -EINVAL);
    CHECK_EQ(rig_read(&rig, 0, huge, 4096), -EINVAL);
    CHECK_EQ(ops->register_memory(rig.device, huge, 4 * MIB), 0);
    CHECK_EQ(ops->register_memory(rig.device, huge, 4 * MIB), 0);
    CHECK_EQ(ops->register_memory(rig.device, huge, 2 * MIB), -EBUSY);
    CHECK_EQ(rig_read(&rig, 0, huge + 2 * MIB - 4096, 8192), 0);
    CHECK_EQ(ops->unregister_memory(rig.device, huge, 2 * MIB), -EINVAL);
    CHECK_EQ(ops->unregister_memory(rig.device, huge, 4 * MIB), 0);
    CHECK_EQ(rig_read(&rig, 0, huge, 4096), 0);
    CHECK_EQ(ops->unregister_memory(rig.device, huge, 4 * MIB), 0);
    CHECK_EQ(rig_read(&rig, 0, huge, 4096), -EINVAL);
    CHECK_EQ(ops->unregister_memory(rig.device, huge, 4 * MIB), -EINVAL);
    munmap(huge, 4 * MIB);
    rig_close(&rig);
}

/* ---- commands of every shape ----------------------------------------------------------------- */

#define RANDOM_SPAN (4u * MIB)

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Cuts length bytes of the region at random page boundaries, in random order of memory. */
static void scatter(struct hifc_io *io, uint8_t *region, uint32_t length, uint32_t *state)
{
    uint32_t done = 0, at = 0;
    io->length_bytes = length;
    io->iov_count = 0;
    while (done < length) {
        uint32_t part = (1 + next_random(state) % 6) * 4096;
        bool last = io->iov_count == HIFC_IO_IOV_MAX - 1;
        part = last || part > length - done ? length - done : part;
        at += (next_random(state) & 1) * 4096;
        io->iov[io->iov_count++] = (struct iovec){region + at, part};
        at += part;
        done += part;
    }
}

static void copy_scattered(const struct hifc_io *io, uint8_t *flat, bool out)
{
    for (uint32_t i = 0; i < io->iov_count; i++) {
        memcpy(out ? flat : io->iov[i].iov_base, out ? io->iov[i].iov_base : flat,
               io->iov[i].iov_len);
        flat += io->iov[i].iov_len;
    }
}

/* Rounds of 16 commands at disjoint places: some write a pattern, some read and compare. */
TEST(scattered_commands_across_every_boundary_move_the_right_bytes)
{
    struct rig rig = rig_open(uri(), 0, 16);
    uint32_t state = 4711, most = rig.device->geometry.max_transfer_bytes;
    uint8_t *shadow = calloc(1, RANDOM_SPAN), *flat = malloc(most);
    uint8_t *memory = rig_memory(16 * 2 * (size_t)most);
    struct hifc_io ios[16], *pointers[16];
    for (uint32_t at = 0; at < RANDOM_SPAN; at += most) {
        memset(memory, 0, most);
        CHECK_EQ(rig_write(&rig, at, memory, most), 0);
    }
    for (int round = 0; round < 150; round++) {
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t slot = RANDOM_SPAN / 16, length = (1 + next_random(&state) % (most / 4096)) *
                                                       4096;
            uint32_t offset = i * slot + next_random(&state) % ((slot - length) / 4096 + 1) * 4096;
            bool write = next_random(&state) & 1;
            ios[i] = rig_io(write ? HIFC_IO_WRITE : HIFC_IO_READ, offset, NULL, 0);
            scatter(&ios[i], memory + i * 2 * (size_t)most, length, &state);
            if (write) {
                rig_fill(shadow + offset, offset, length, (uint64_t)round + 1);
                copy_scattered(&ios[i], shadow + offset, false);
            }
            pointers[i] = &ios[i];
        }
        rig_completed = 0;
        uint32_t taken = 0;
        for (double end = rig_now() + CHECK_HANG_S; rig_completed < 16;) {
            taken += rig.device->ops->submit(rig.qpair, pointers + taken, 16 - taken);
            CHECK(rig_poll(&rig) >= 0);
            CHECK(rig_now() < end);
        }
        for (int i = 0; i < 16; i++) {
            CHECK_EQ(ios[i].error, 0);
            if (ios[i].op == HIFC_IO_READ) {
                copy_scattered(&ios[i], flat, true);
                CHECK(memcmp(flat, shadow + ios[i].offset_bytes, ios[i].length_bytes) == 0);
            }
        }
    }
    free(shadow);
    free(flat);
    rig_free(memory);
    rig_close(&rig);
}

/* ---- a target that stops answering ----------------------------------------------------------- */

TEST(a_stopped_target_times_out_and_comes_back)
{
    struct rig rig = open_with_timeout(2000);
    struct load load;
    signal_target(SIGSTOP);
    double start = rig_now();
    start_load(&rig, &load);
    CHECK_EQ(poll_until_lost(&rig), -ETIMEDOUT);
    CHECK(rig_now() - start >= 1.9); /* not before its time */
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(load.ios[i].error, -ETIMEDOUT);
    }
    struct hifc_io late = rig_io(HIFC_IO_READ, 0, load.memory, 4096), *pointer = &late;
    rig_completed = COUNT - 1; /* what comes later is told at the next poll */
    CHECK_EQ(rig.device->ops->submit(rig.qpair, &pointer, 1), 1);
    CHECK(rig_poll(&rig) < 0);
    CHECK_EQ(late.error, -EIO);
    rig.device->ops->qpair_close(rig.qpair);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(rig.device->ops->qpair_open(rig.device, COUNT, 500, &rig.qpair), -ETIMEDOUT);
        CHECK(last_error_says("stopped"));
        }
    signal_target(SIGCONT);
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, COUNT, RIG_TIMEOUT_MS, &rig.qpair), 0);
    expect_works(&rig);
    rig_free(load.memory);
    rig_close(&rig);
}

TEST(a_stopped_target_can_be_left)
{
    struct rig rig = open_with_timeout(60000);
    struct load load;
    signal_target(SIGSTOP);
    start_load(&rig, &load);
    rig_poll(&rig);
    rig_close(&rig);
    CHECK_EQ(rig_completed, COUNT);
    for (int i = 0; i < COUNT; i++) {
        CHECK(load.ios[i].error == 0 || load.ios[i].error == -ECANCELED);
    }
    expect_open(uri(), -ETIMEDOUT, "no answer within");
    signal_target(SIGCONT);
    rig = rig_open(uri(), 0, COUNT);
    expect_works(&rig);
    rig_free(load.memory);
    rig_close(&rig);
}

TEST(a_health_log_of_a_stopped_target_is_an_error)
{
    uint8_t log[512];
    struct rig rig = rig_open(uri(), 0, COUNT);
    CHECK_EQ(hifc_device_health(rig.device, log), 0);
    signal_target(SIGSTOP);
    CHECK_EQ(hifc_device_health(rig.device, log), -ETIMEDOUT);
    signal_target(SIGCONT);
    CHECK_EQ(hifc_device_health(rig.device, log), 0);
    expect_works(&rig);
    rig_close(&rig);
}

/* ---- a drive that leaves ----------------------------------------------------------------------- */

/* As if somebody had pressed the button at its slot so long ago. */
static void ask_to_leave(struct rig *rig, uint32_t since_ms)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)rig->device;
    atomic_store(&device->leaving_since_ms, hifc_spdk_clock_ms() - since_ms);
}

static void expect_refused(struct rig *rig)
{
    struct hifc_qpair *another;
    CHECK_EQ(rig->device->ops->qpair_open(rig->device, COUNT, RIG_TIMEOUT_MS, &another), -ENODEV);
    CHECK(last_error_says("unplugged"));
}

TEST(a_drive_that_leaves_finishes_what_it_has_and_takes_no_more)
{
    struct rig rig = rig_open(uri(), 0, COUNT + 1);
    struct load load;
    start_load(&rig, &load);
    ask_to_leave(&rig, 0);
    struct hifc_io late = rig_io(HIFC_IO_READ, 0, load.memory, 4096), *pointer = &late;
    CHECK_EQ(rig.device->ops->submit(rig.qpair, &pointer, 1), 1);
    for (double end = rig_now() + CHECK_HANG_S; rig_poll(&rig) >= 0;) {
        CHECK(rig_now() < end);
    }
    CHECK_EQ(rig_completed, COUNT + 1);
    CHECK_EQ(late.error, -EIO);
    CHECK_EQ(late.sct, HIFC_SCT_PATH);
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(load.ios[i].error, 0);
    }
    expect_refused(&rig);
    rig_free(load.memory);
    rig_close(&rig);
}

TEST(a_drive_that_leaves_and_does_not_get_done_is_lost)
{
    struct rig rig = open_with_timeout(60000);
    struct load load;
    signal_target(SIGSTOP);
    start_load(&rig, &load);
    double start = rig_now();
    ask_to_leave(&rig, 3000); /* of five seconds */
    struct hifc_io late = rig_io(HIFC_IO_READ, 0, load.memory, 4096), *pointer = &late;
    CHECK_EQ(rig.device->ops->submit(rig.qpair, &pointer, 1), 0); /* full */
    CHECK(poll_until_lost(&rig) < 0);
    CHECK(rig_now() - start >= 1.9); /* not before its time */
    expect_refused(&rig);
    signal_target(SIGCONT);
    rig_free(load.memory);
    rig_close(&rig);
}

TEST(an_idle_drive_that_leaves_can_be_closed)
{
    struct rig rig = rig_open(uri(), 0, COUNT);
    ask_to_leave(&rig, 60000);
    expect_refused(&rig);
    rig_close(&rig);
    rig = rig_open(uri(), 0, COUNT); /* another device: it was not the target that left */
    expect_works(&rig);
    rig_close(&rig);
}

/* ---- a target that goes away ----------------------------------------------------------------- */

TEST(a_killed_target_is_an_error_and_its_successor_works)
{
    struct rig rig = rig_open(uri(), 0, COUNT);
    struct load load;
    signal(SIGPIPE, SIG_DFL); /* must not end us */
    expect_works(&rig);
    start_load(&rig, &load);
    rig_poll(&rig);
    signal_target(SIGKILL);
    for (double end = rig_now() + CHECK_HANG_S; rig_completed < COUNT;) {
        rig_poll(&rig);
        CHECK(rig_now() < end);
    }
    rig_free(load.memory);
    start_load(&rig, &load);
    int rc = poll_until_lost(&rig);
    CHECK(rc < 0);
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(load.ios[i].error, -EIO);
    }
    rig.device->ops->qpair_close(rig.qpair);
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, COUNT, RIG_TIMEOUT_MS, &rig.qpair), -ENODEV);
    CHECK(last_error_says("refused"));
    restart_target();
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, COUNT, RIG_TIMEOUT_MS, &rig.qpair), 0);
    expect_works(&rig);
    rig_free(load.memory);
    rig_close(&rig);
}

/* SPDK calls the same sendmsg as this program does: the one of spdk_env.c. */
TEST(a_broken_socket_ends_nobody)
{
    int pair[2];
    struct iovec iov = {"x", 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    signal(SIGPIPE, SIG_DFL);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    CHECK_EQ(sendmsg(pair[0], &message, 0), 1);
    close(pair[1]);
    CHECK_EQ(sendmsg(pair[0], &message, 0), -1);
    CHECK_EQ(errno, EPIPE);
    close(pair[0]);
}

TEST(two_queue_pairs_come_back_one_after_the_other)
{
    struct rig rig = rig_open(uri(), HIFC_DEVICE_READ_ONLY, COUNT), other = rig;
    struct rig reader = rig_open(uri(), HIFC_DEVICE_READ_ONLY, COUNT); /* shares the controller */
    uint8_t *memory = rig_memory(4096);
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, COUNT, RIG_TIMEOUT_MS, &other.qpair), 0);
    signal_target(SIGKILL);
    restart_target();
    struct rig *const all[] = {&rig, &other, &reader};
    for (int i = 0; i < 3; i++) {
        struct hifc_io io = rig_io(HIFC_IO_READ, 0, memory, 4096), *pointer = &io;
        CHECK_EQ(rig.device->ops->submit(all[i]->qpair, &pointer, 1), 1);
        int rc = 0;
        for (double end = rig_now() + CHECK_HANG_S; rc >= 0;) {
            rc = rig_poll(all[i]);
            CHECK(rig_now() < end);
        }
        CHECK_EQ(io.error, -EIO);
        reopen_qpair(all[i]);
        CHECK_EQ(rig_read(all[i], 0, memory, 4096), 0);
    }
    CHECK_EQ(rig_read(&rig, 0, memory, 4096), 0); /* the later ones took nothing from it */
    other.device->ops->qpair_close(other.qpair);
    rig_free(memory);
    rig_close(&reader);
    rig_close(&rig);
}

TEST(a_killed_target_can_be_left)
{
    struct rig rig = rig_open(uri(), 0, COUNT);
    signal_target(SIGKILL);
    rig_close(&rig);
    expect_open(uri(), -ENODEV, "refused");
    restart_target();
    rig = rig_open(uri(), 0, COUNT);
    expect_works(&rig);
    rig_close(&rig);
}

/* A target hangs up after 10 s without a keep-alive. */
TEST(an_idle_device_is_kept_alive)
{
    struct rig rig = rig_open(uri(), 0, COUNT);
    expect_works(&rig);
    sleep(13);
    expect_works(&rig);
    rig_close(&rig);
}

/* ---- what is wrong with a URI ---------------------------------------------------------------- */

TEST(uris_that_lead_nowhere_say_why)
{
    char text[512], *slash, *query;
    expect_open("spdk://3b:00.0?ns=1", -EINVAL, "PCI address");
    expect_open("spdk://0000:3b:00.0?size=1GiB", -EINVAL, "known: ns");
    expect_open("spdk+tcp://127.0.0.1/nqn.2026-01.io.hifc:a", -EINVAL, "ADDRESS:PORT/NQN");
    expect_open("spdk+tcp://127.0.0.1:4420", -EINVAL, "ADDRESS:PORT/NQN");
    expect_open("spdk+tcp://127.0.0.1:70000/nqn.2026-01.io.hifc:a", -EINVAL, "no port");
    expect_open("spdk+tcp://127.0.0.1:4420/nqn.2026-01.io.hifc:a?ns=0", -EINVAL, "count from 1");
    expect_open("spdk+tcp://127.0.0.1:4420/nqn.2026-01.io.hifc:a?hostnqn=me", -EINVAL, "no NQN");
    expect_open("spdk+tcp://no.such.host.invalid:1/nqn.2026-01.io.hifc:a", -EINVAL, "address");
    expect_open("spdk+rdma://127.0.0.1:4420/nqn.2026-01.io.hifc:a", -ENOTSUP, "without RDMA");
    expect_open("spdk+tcp://127.0.0.1:1/nqn.2026-01.io.hifc:a", -ENODEV, "nothing listens");
    expect_open("spdk+tcp://[::1]:1/nqn.2026-01.io.hifc:a", -ENODEV, "[::1]:1");
    snprintf(text, sizeof(text), "%s", uri());
    query = strchr(text, '?');
    snprintf(query, 16, "?ns=7");
    expect_open(text, -ENOENT, "no namespace 7");
    slash = strrchr(text, '/');
    snprintf(slash, 100, "/nqn.2026-01.io.hifc:nobody");
    expect_open(text, -ENODEV, "check the NQN");
    expect_open("spdk://ffff:ff:1f.7", -ENODEV, "no such PCI device");
}

/* A server that accepts and then says the given bytes, or nothing. */
static void expect_server(const char *says, int code, const char *words)
{
    char text[128];
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    int listening = socket(AF_INET, SOCK_STREAM, 0), ready[2];
    CHECK_EQ(bind(listening, (struct sockaddr *)&address, size), 0);
    CHECK_EQ(listen(listening, 1), 0);
    CHECK_EQ(getsockname(listening, (struct sockaddr *)&address, &size), 0);
    CHECK_EQ(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        int fd = accept(listening, NULL, NULL);
        _exit(write(fd, says, strlen(says)) < 0 || read(ready[0], text, 1) < 0);
    }
    snprintf(text, sizeof(text), "spdk+tcp://127.0.0.1:%d/nqn.2026-01.io.hifc:a",
             ntohs(address.sin_port));
    expect_open(text, code, words);
    close(ready[1]);
    close(listening);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
}

TEST(what_is_no_target_is_told_from_one_that_hangs)
{
    expect_server("220 mail.example.org ESMTP\r\n", -ENODEV, "does not speak NVMe/TCP");
    expect_server("", -ETIMEDOUT, "no answer within");
}

/* ---- processes ------------------------------------------------------------------------------- */

TEST(the_lock_names_its_holder_and_goes_with_it)
{
    int ready[2];
    char byte, words[64];
    CHECK_EQ(pipe(ready), 0);
    (void)uri();
    pid_t child = fork();
    if (child == 0) {
        struct rig rig = rig_open(uri(), 0, COUNT);
        CHECK_EQ(write(ready[1], "x", 1), 1);
        for (;;) {
            expect_works(&rig);
        }
    }
    close(ready[1]);
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    snprintf(words, sizeof(words), "pid %d", (int)child);
    expect_open(uri(), -EBUSY, words);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    struct rig rig = rig_open(uri(), 0, COUNT);
    expect_works(&rig);
    rig_close(&rig);
}

TEST(a_child_of_fork_is_refused_and_breaks_nothing)
{
    struct rig rig = rig_open(uri(), 0, COUNT);
    int hold[2], status;
    expect_works(&rig);
    CHECK_EQ(pipe(hold), 0);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        uint8_t log[512];
        struct hifc_device *device;
        close(hold[1]);
        rig.device->ops->qpair_close(rig.qpair);
        CHECK_EQ(hifc_device_health(rig.device, log), -EPERM);
        hifc_device_close(rig.device);
        CHECK_EQ(hifc_device_open(uri(), 0, &device), -EPERM);
        CHECK(last_error_says("fork"));
        _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
    }
    expect_works(&rig);
    sleep(1);
    expect_works(&rig);
    rig_close(&rig);
    rig = rig_open(uri(), 0, COUNT); /* while the child lives */
    expect_works(&rig);
    close(hold[1]);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    rig_close(&rig);
}

static void *open_and_close(void *argument)
{
    for (int i = 0; i < 10; i++) {
        struct rig rig = rig_open(argument, HIFC_DEVICE_READ_ONLY, 4);
        uint8_t log[512];
        CHECK_EQ(hifc_device_health(rig.device, log), 0);
        rig_close(&rig);
    }
    return NULL;
}

TEST(threads_open_and_close_at_the_same_time)
{
    pthread_t threads[3];
    char *text = strdup(uri());
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, open_and_close, text), 0);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    free(text);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
