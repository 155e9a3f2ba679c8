/* SPDX-License-Identifier: Apache-2.0
 *
 * Every device against the same promises (device.h): one table of devices drives all tests.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "unit/device_rig.h"
#include "device/ram.h"

#define MIB (1u << 20)
#define SIZE_BYTES (8ull * MIB)

struct combination {
    const char *name;
    const char *uri; /* %s: a directory on disk */
    bool file;
    bool persistent;
    bool deallocate_zeroes;
};

static const struct combination combinations[] = {
    {"ram", "ram://?size=8MiB", false, false, true},
    {"ram, 512", "ram://?size=8MiB&lba=512&max_transfer=64KiB", false, false, true},
    {"ram, named", "ram://table?size=8MiB", false, true, true},
    {"ram, aligned", "ram://?size=8MiB&align=512", false, false, true},
    {"disk", "file://%s/a.img?size=8MiB", true, true, false},
    {"disk, sparse, 512", "file://%s/b.img?size=8MiB&sparse=1&lba=512", true, true, true},
    {"disk, buffered", "file://%s/c.img?size=8MiB&direct=0&sparse=1", true, true, true},
    {"disk, sync", "file://%s/d.img?size=8MiB&io=sync", true, true, false},
    {"tmpfs", "file:///dev/shm%s/e.img?size=8MiB", true, true, true},
    {"tmpfs, uring", "file:///dev/shm%s/f.img?size=8MiB&io=uring", true, true, true},
    {"faulty ram", "faulty+ram://wrapped?size=8MiB&fault_reorder=1&fault_delay=3", false, true,
     false},
    {"faulty disk", "faulty+file://%s/g.img?size=8MiB", true, true, false},
    {"block device", "file://%s", true, true, true},
    {0},
};

static char directory[64];
static char loop_device[64]; /* empty: this machine lets us make none */
static pid_t test_pid;

static void remove_directory(void)
{
    char command[256];
    if (getpid() != test_pid) {
        return;
    }
    snprintf(command, sizeof(command), "losetup -d %s", loop_device);
    if (loop_device[0] && system(command) != 0) {
        fprintf(stderr, "could not detach %s\n", loop_device);
    }
    snprintf(command, sizeof(command), "rm -rf %s /dev/shm%s; cd /dev/shm && rmdir -p "
             "--ignore-fail-on-non-empty var/tmp", directory, directory);
    if (directory[0] && system(command) != 0) {
        fprintf(stderr, "could not remove %s\n", directory);
    }
}

static void make_directory(void)
{
    if (directory[0]) {
        return;
    }
    char shm[200];
    /* Where the build is, which is a disk more often than /tmp is. */
    snprintf(directory, sizeof(directory), "/var/tmp/hifc-test-%d", (int)getpid());
    snprintf(shm, sizeof(shm), "mkdir -p %s /dev/shm%s", directory, directory);
    CHECK_EQ(system(shm), 0);
    test_pid = getpid();
    atexit(remove_directory);
    snprintf(shm, sizeof(shm), "truncate -s 8M %s/loop.img && losetup -f --show %s/loop.img 2>&1",
             directory, directory);
    FILE *pipe_in = popen(shm, "re");
    if (!pipe_in || !fgets(loop_device, sizeof(loop_device), pipe_in) ||
        strncmp(loop_device, "/dev/", 5) != 0) {
        fprintf(stderr, "skipped: tests on a block device, for losetup said: %s\n", loop_device);
        loop_device[0] = '\0';
    }
    loop_device[strcspn(loop_device, "\n")] = '\0';
    if (pipe_in) {
        pclose(pipe_in);
    }
}

static const char *uri_of(const struct combination *combination)
{
    static char uri[256];
    bool block = strcmp(combination->uri, "file://%s") == 0;
    make_directory();
    snprintf(uri, sizeof(uri), combination->uri, block ? loop_device : directory);
    return uri;
}

/* With HIFC_TEST_URIS, a list of URIs of 8 MiB devices separated by spaces, those alone. */
static const struct combination *all_combinations(void)
{
    static struct combination given[9];
    char *uris = getenv("HIFC_TEST_URIS");
    if (!uris) {
        return combinations;
    }
    if (!given[0].uri) {
        char *rest = strdup(uris);
        CHECK(rest != NULL);
        for (int i = 0; i < 8 && (given[i].uri = strsep(&rest, " ")); i++) {
            given[i].name = given[i].uri;
            given[i].persistent = true;
        }
        rig_arena_open();
    }
    return given;
}

#define FOR_EACH(each)                                                                       \
    for (const struct combination *each = all_combinations();                                \
         each->uri && (make_directory(), fprintf(stderr, "  %s\n", each->name) > 0);         \
         each++)                                                                             \
        if (strcmp(each->uri, "file://%s") == 0 && !loop_device[0]) {                        \
            continue;                                                                        \
        } else

TEST(geometry_is_sane)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 1);
        const struct hifc_geometry *g = &rig.device->geometry;
        CHECK_EQ(g->size_bytes, SIZE_BYTES);
        CHECK(g->lba_bytes == 512 || g->lba_bytes == 4096);
        CHECK(g->max_transfer_bytes >= 4096 && g->max_transfer_bytes % g->lba_bytes == 0);
        CHECK(g->max_iov >= 1 && g->max_iov <= HIFC_IO_IOV_MAX);
        CHECK(g->buffer_align_bytes >= 1 && g->buffer_align_bytes <= 4096);
        CHECK(strcmp(rig.device->uri, uri_of(c)) == 0);
        CHECK(g->model[0] != '\0');
        rig_close(&rig);
    }
}

/* Every element has another length; all lengths and positions are multiples of the alignment. */
TEST(scattered_write_is_read_back_in_one_piece_and_in_others)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        uint32_t length = 64u << 10, align = rig.device->geometry.buffer_align_bytes;
        align = align < 8 ? 8 : align;
        uint8_t *from = rig_memory(MIB), *to = rig_memory(MIB), *pattern = rig_memory(length);
        uint64_t offset = 12 * 4096;
        rig_fill(pattern, offset, length, 1);
        struct hifc_io io = rig_io(HIFC_IO_WRITE, offset, from, length);
        uint32_t done = 0, gap = align;
        io.iov_count = 0;
        while (done < length) {
            uint32_t part = align * (1 + io.iov_count * 3 % 7);
            part = io.iov_count == HIFC_IO_IOV_MAX - 1 || part > length - done ? length - done
                                                                              : part;
            io.iov[io.iov_count++] = (struct iovec){from + gap + done, part};
            memcpy(from + gap + done, pattern + done, part);
            done += part;
            gap += align;
        }
        CHECK(io.iov_count > 4);
        CHECK_EQ(rig_run(&rig, &io), 0);
        CHECK_EQ(rig_read(&rig, offset, to, length), 0);
        CHECK(memcmp(to, pattern, length) == 0);
        io = rig_io(HIFC_IO_READ, offset, to, length);
        io.iov_count = 3;
        io.iov[0] = (struct iovec){to + 65536, length / 2};
        io.iov[1] = (struct iovec){to, length / 4};
        io.iov[2] = (struct iovec){to + 524288, length / 4};
        memset(to, 0, MIB);
        CHECK_EQ(rig_run(&rig, &io), 0);
        CHECK(memcmp(to + 65536, pattern, length / 2) == 0);
        CHECK(memcmp(to, pattern + length / 2, length / 4) == 0);
        CHECK(memcmp(to + 524288, pattern + length / 4 * 3, length / 4) == 0);
        rig_free(from);
        rig_free(to);
        rig_free(pattern);
        rig_close(&rig);
    }
}

TEST(largest_transfer_and_last_block)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        uint32_t length = rig.device->geometry.max_transfer_bytes;
        uint64_t offset = SIZE_BYTES - length;
        uint8_t *memory = rig_memory(length);
        rig_fill(memory, offset, length, 2);
        CHECK_EQ(rig_write(&rig, offset, memory, length), 0);
        memset(memory, 0, length);
        CHECK_EQ(rig_read(&rig, offset, memory, length), 0);
        CHECK(rig_holds(memory, offset, length, 2));
        uint32_t unit = rig_unit(&rig);
        CHECK_EQ(rig_read(&rig, SIZE_BYTES - unit, memory, unit), 0);
        CHECK(rig_holds(memory, SIZE_BYTES - unit, unit, 2));
        rig_free(memory);
        rig_close(&rig);
    }
}

/* More than fits is offered: what is not taken is not touched, what is taken completes once. */
static void fill_queue(struct rig *rig, uint32_t depth, uint8_t op, uint8_t *memory)
{
    uint32_t count = depth + 5, taken_all = 0;
    struct hifc_io *ios = calloc(count, sizeof(*ios)), *pointers[64];
    for (uint32_t i = 0; i < count; i++) {
        ios[i] = rig_io(op, (uint64_t)i * 8192, memory + (size_t)i * 8192, 8192);
        pointers[i] = &ios[i];
    }
    rig_completed = 0;
    uint32_t taken = rig->device->ops->submit(rig->qpair, pointers, count);
    CHECK_EQ(taken, depth);
    CHECK_EQ(rig->device->ops->submit(rig->qpair, pointers + taken, count - taken), 0);
    CHECK_EQ(rig_completed, 0);
    for (double end = rig_now() + CHECK_HANG_S; rig_completed < count;) {
        CHECK(rig_poll(rig) >= 0);
        if (taken < count) {
            taken += rig->device->ops->submit(rig->qpair, pointers + taken, count - taken);
        }
        CHECK(rig_now() < end);
        taken_all = taken;
    }
    CHECK_EQ(taken_all, count);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(rig_poll(rig), 0);
    }
    CHECK_EQ(rig_completed, count);
    for (uint32_t i = 0; i < count; i++) {
        CHECK_EQ(ios[i].error, 0);
        CHECK(ios[i].owner == &ios[i]);
    }
    free(ios);
}

TEST(depth_is_kept_and_every_command_completes_once)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 24);
        uint8_t *memory = rig_memory(64 * 8192);
        rig_fill(memory, 0, 64 * 8192, 3);
        fill_queue(&rig, 24, HIFC_IO_WRITE, memory);
        memset(memory, 0, 64 * 8192);
        fill_queue(&rig, 24, HIFC_IO_READ, memory);
        CHECK(rig_holds(memory, 0, 29 * 8192, 3));
        rig_free(memory);
        rig_close(&rig);
    }
}

static void expect_refused(struct rig *rig, struct hifc_io io, uint8_t sct, uint8_t sc)
{
    int error = rig_run(rig, &io);
    CHECK(error < 0);
    CHECK_EQ(io.sct, sct);
    CHECK_EQ(io.sc, sc);
}

TEST(commands_that_make_no_sense_complete_with_their_status)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        uint32_t lba = rig.lba, align = rig.device->geometry.buffer_align_bytes;
        uint32_t most = rig.device->geometry.max_transfer_bytes;
        uint8_t *memory = rig_memory(most + 4096);
        expect_refused(&rig, rig_io(HIFC_IO_READ, SIZE_BYTES, memory, lba), 0, 0x80);
        expect_refused(&rig, rig_io(HIFC_IO_WRITE, SIZE_BYTES - lba, memory, 2 * lba), 0, 0x80);
        expect_refused(&rig, rig_io(HIFC_IO_READ, UINT64_MAX - lba + 1, memory, lba), 0, 0x80);
        expect_refused(&rig, rig_io(HIFC_IO_READ, 1, memory, lba), 0, 0x02);
        expect_refused(&rig, rig_io(HIFC_IO_READ, 0, memory, lba - 1), 0, 0x02);
        expect_refused(&rig, rig_io(HIFC_IO_READ, 0, memory, 0), 0, 0x02);
        expect_refused(&rig, rig_io(HIFC_IO_READ, 0, memory, most + lba), 0, 0x02);
        expect_refused(&rig, rig_io(77, 0, memory, lba), 0, 0x02);
        if (align > 1) {
            expect_refused(&rig, rig_io(HIFC_IO_READ, 0, memory + align / 2, lba), 0, 0x02);
        }
        struct hifc_io io = rig_io(HIFC_IO_WRITE, 0, memory, 2 * lba);
        io.iov[0].iov_len = lba;
        expect_refused(&rig, io, 0, 0x02);
        CHECK_EQ(rig_read(&rig, 0, memory, rig_unit(&rig)), 0); /* the queue pair lives on */
        rig_free(memory);
        rig_close(&rig);
    }
}

TEST(a_health_log_or_an_error_that_says_there_is_none)
{
    FOR_EACH (c) {
        uint8_t log[512];
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 1);
        if (rig.device->geometry.registered_only) {
            CHECK_EQ(hifc_device_health(rig.device, log), 0);
        } else {
            CHECK_EQ(hifc_device_health(rig.device, log), -ENOTSUP);
            CHECK(last_error_says("no health log"));
        }
        rig_close(&rig);
    }
}

TEST(flush_and_deallocate)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        uint8_t *memory = rig_memory(3 * 65536);
        uint64_t offset = 65536;
        rig_fill(memory, offset, 3 * 65536, 4);
        CHECK_EQ(rig_write(&rig, offset, memory, 65536), 0);
        CHECK_EQ(rig_write(&rig, offset + 65536, memory + 65536, 65536), 0);
        CHECK_EQ(rig_write(&rig, offset + 131072, memory + 131072, 65536), 0);
        CHECK_EQ(rig_flush(&rig), 0);
        int rc = rig_deallocate(&rig, offset + 65536, 65536);
        CHECK_EQ(rc, rig.device->geometry.deallocate ? 0 : -ENOTSUP);
        CHECK(!c->deallocate_zeroes || rc == 0);
        memset(memory, 0xee, 3 * 65536);
        CHECK_EQ(rig_read(&rig, offset, memory, 65536), 0);
        CHECK_EQ(rig_read(&rig, offset + 65536, memory + 65536, 65536), 0);
        CHECK_EQ(rig_read(&rig, offset + 131072, memory + 131072, 65536), 0);
        CHECK(rig_holds(memory, offset, 65536, 4));
        CHECK(rig_holds(memory + 131072, offset + 131072, 65536, 4));
        for (uint32_t i = 0; c->deallocate_zeroes && i < 65536; i++) {
            CHECK_EQ(memory[65536 + i], 0);
        }
        rig_free(memory);
        rig_close(&rig);
    }
}

TEST(deallocate_of_single_blocks_clears_no_neighbour)
{
    struct rig rig = rig_open("ram://?size=1MiB&lba=512", 0, 4);
    uint8_t *memory = rig_memory(65536);
    rig_fill(memory, 0, 65536, 5);
    CHECK_EQ(rig_write(&rig, 0, memory, 65536), 0);
    CHECK_EQ(rig_deallocate(&rig, 512, 512), 0);
    CHECK_EQ(rig_deallocate(&rig, 3 * 512, 8192), 0);
    CHECK_EQ(rig_read(&rig, 0, memory, 65536), 0);
    for (uint32_t i = 0; i < 128; i++) {
        bool gone = i == 1 || (i >= 3 && i < 19);
        uint8_t zeroes[512] = {0};
        CHECK(gone ? memcmp(memory + i * 512, zeroes, 512) == 0
                   : rig_holds(memory + i * 512, (uint64_t)i * 512, 512, 5));
    }
    rig_free(memory);
    rig_close(&rig);
}

TEST(bytes_survive_close_and_open)
{
    FOR_EACH (c) {
        if (!c->persistent) {
            continue;
        }
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        uint8_t *memory = rig_memory(65536);
        rig_fill(memory, 0, 65536, 6);
        CHECK_EQ(rig_write(&rig, 0, memory, 65536), 0);
        rig_close(&rig);
        memset(memory, 0, 65536);
        rig = rig_open(uri_of(c), 0, 4);
        CHECK_EQ(rig_read(&rig, 0, memory, 65536), 0);
        CHECK(rig_holds(memory, 0, 65536, 6));
        rig_close(&rig);
        rig_free(memory);
    }
}

TEST(one_writer_or_several_readers)
{
    FOR_EACH (c) {
        if (!c->persistent) {
            continue;
        }
        struct hifc_device *second;
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        CHECK_EQ(hifc_device_open(uri_of(c), 0, &second), -EBUSY);
        CHECK(second == NULL);
        CHECK(last_error_says("this process"));
        CHECK_EQ(hifc_device_open(uri_of(c), HIFC_DEVICE_READ_ONLY, &second), -EBUSY);
        rig_close(&rig);
        rig = rig_open(uri_of(c), HIFC_DEVICE_READ_ONLY, 4);
        CHECK_EQ(hifc_device_open(uri_of(c), 0, &second), -EBUSY);
        CHECK_EQ(hifc_device_open(uri_of(c), HIFC_DEVICE_READ_ONLY, &second), 0);
        hifc_device_close(second);
        rig_close(&rig);
    }
}

TEST(read_only_changes_nothing)
{
    FOR_EACH (c) {
        if (!c->persistent) {
            continue;
        }
        uint8_t *memory = rig_memory(4096);
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        rig_fill(memory, 0, 4096, 7);
        CHECK_EQ(rig_write(&rig, 0, memory, 4096), 0);
        rig_close(&rig);
        rig = rig_open(uri_of(c), HIFC_DEVICE_READ_ONLY, 4);
        memset(memory, 0, 4096);
        CHECK_EQ(rig_write(&rig, 0, memory, 4096), -EROFS);
        CHECK_EQ(rig_deallocate(&rig, 0, 4096), -EROFS);
        CHECK_EQ(rig_flush(&rig), 0);
        CHECK_EQ(rig_read(&rig, 0, memory, 4096), 0);
        CHECK(rig_holds(memory, 0, 4096, 7));
        rig_close(&rig);
        rig_free(memory);
    }
}

TEST(close_returns_what_is_in_flight)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 16);
        uint8_t *memory = rig_memory(16 * 65536);
        struct hifc_io ios[16], *pointers[16];
        for (int i = 0; i < 16; i++) {
            ios[i] = rig_io(HIFC_IO_WRITE, (uint64_t)i * 65536, memory + i * 65536, 65536);
            pointers[i] = &ios[i];
        }
        rig_completed = 0;
        CHECK_EQ(rig.device->ops->submit(rig.qpair, pointers, 16), 16);
        rig.device->ops->qpair_close(rig.qpair);
        CHECK_EQ(rig_completed, 16);
        for (int i = 0; i < 16; i++) {
            CHECK(ios[i].error == 0 || ios[i].error == -ECANCELED);
        }
        rig_close_device(&rig);
        rig_free(memory);
    }
}

TEST(two_queue_pairs_see_each_others_writes)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4), other = rig;
        CHECK_EQ(rig.device->ops->qpair_open(rig.device, 4, RIG_TIMEOUT_MS, &other.qpair), 0);
        uint8_t *memory = rig_memory(65536);
        rig_fill(memory, 0, 65536, 8);
        CHECK_EQ(rig_write(&rig, 0, memory, 65536), 0);
        memset(memory, 0, 65536);
        CHECK_EQ(rig_read(&other, 0, memory, 65536), 0);
        CHECK(rig_holds(memory, 0, 65536, 8));
        other.device->ops->qpair_close(other.qpair);
        rig_close(&rig);
        rig_free(memory);
    }
}

static void sleep_until_done(struct rig *rig, int fd, struct hifc_io *io)
{
    double end = rig_now() + CHECK_HANG_S;
    while (!io->owner) {
        struct pollfd pollfd = {.fd = fd, .events = POLLIN};
        CHECK(poll(&pollfd, 1, CHECK_HANG_S * 1000) == 1); /* a lost wake-up */
        rig_poll(rig);
        CHECK(rig_now() < end);
    }
}

static void fall_silent(struct rig *rig, int fd)
{
    int wakes = 0;
    struct pollfd pollfd = {.fd = fd, .events = POLLIN};
    while (poll(&pollfd, 1, 0) == 1) {
        rig_poll(rig);
        CHECK(++wakes < 200); /* readable for ever with nothing to do */
    }
}

TEST(event_fd_wakes_and_falls_silent)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        int fd = rig.device->ops->event_fd(rig.qpair);
        uint8_t *memory = rig_memory(65536);
        for (int round = 0; fd >= 0 && round < 200; round++) {
            struct hifc_io io = rig_io(round & 1, 0, memory, round % 16 == 5 ? 17 : 65536);
            struct hifc_io *pointer = &io;
            fall_silent(&rig, fd);
            CHECK_EQ(rig.device->ops->submit(rig.qpair, &pointer, 1), 1);
            sleep_until_done(&rig, fd, &io);
            CHECK_EQ(io.error, round % 16 == 5 ? -EINVAL : 0);
        }
        rig_free(memory);
        rig_close(&rig);
    }
}

/* Commands that take longer than they may are cancelled, and every one comes back once. */
TEST(a_timeout_returns_every_command_once)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 1);
        uint32_t length = rig.device->geometry.max_transfer_bytes, completed = 0, late = 0;
        rig.device->ops->qpair_close(rig.qpair);
        CHECK_EQ(rig.device->ops->qpair_open(rig.device, 32, 1, &rig.qpair), 0);
        uint8_t *memory = rig_memory(length);
        struct hifc_io ios[32], *pointers[32];
        for (int round = 0; round < 4; round++) {
            for (uint32_t i = 0; i < 32; i++) {
                bool flush = i % 8 == 7;
                ios[i] = rig_io(flush ? HIFC_IO_FLUSH : HIFC_IO_WRITE,
                                (uint64_t)i * length % (SIZE_BYTES - length), memory, length);
                ios[i].iov_count = !flush;
                pointers[i] = &ios[i];
            }
            rig_completed = 0;
            CHECK_EQ(rig.device->ops->submit(rig.qpair, pointers, 32), 32);
            for (double end = rig_now() + CHECK_HANG_S; rig_completed < 32;) {
                if (rig_poll(&rig) < 0) { /* its queue pair is lost, and all came back */
                    CHECK(rig.device->geometry.registered_only);
                    CHECK_EQ(rig_completed, 32);
                    rig.device->ops->qpair_close(rig.qpair);
                    CHECK_EQ(rig.device->ops->qpair_open(rig.device, 32, 1, &rig.qpair), 0);
                }
                CHECK(rig_now() < end);
            }
            for (int i = 0; i < 32; i++) {
                bool with_others = rig.device->geometry.registered_only && ios[i].error == -EIO;
                CHECK(ios[i].owner && (ios[i].error == 0 || ios[i].error == -ETIMEDOUT ||
                                       with_others));
                late += ios[i].error != 0;
            }
            completed += rig_completed;
        }
        CHECK_EQ(completed, 128);
        fprintf(stderr, "    %u of %u cancelled\n", late, completed);
        rig_free(memory);
        rig_close(&rig);
    }
}

static void *submit_and_end(void *argument)
{
    struct rig *rig = argument;
    static struct hifc_io ios[16];
    struct hifc_io *pointers[16];
    uint8_t *memory = rig_memory(65536);
    for (int i = 0; i < 16; i++) {
        ios[i] = rig_io(i % 4 == 3 ? HIFC_IO_FLUSH : HIFC_IO_WRITE, (uint64_t)i * 65536, memory,
                        65536);
        ios[i].iov_count = i % 4 != 3;
        pointers[i] = &ios[i];
    }
    CHECK_EQ(rig->device->ops->submit(rig->qpair, pointers, 16), 16);
    return ios;
}

/* The kernel cancels what a thread that ends had handed to its workers. */
TEST(commands_outlive_the_thread_that_submitted_them)
{
    FOR_EACH (c) {
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 16);
        for (int round = 0; round < 10; round++) {
            pthread_t thread;
            void *result;
            rig_completed = 0;
            CHECK_EQ(pthread_create(&thread, NULL, submit_and_end, &rig), 0);
            CHECK_EQ(pthread_join(thread, &result), 0);
            struct hifc_io *ios = result;
            for (int i = 0; i < 16; i++) {
                rig_wait(&rig, &ios[i]);
                CHECK_EQ(ios[i].error, 0);
            }
            rig_free(ios[0].iov[0].iov_base);
        }
        rig_close(&rig);
    }
}

/* ---- two threads ----------------------------------------------------------------------------- */

static void *hammer(void *argument)
{
    struct rig *rig = argument;
    uint8_t *memory = rig_memory(65536);
    uint64_t base = (uint64_t)(rig->lba & 1) * SIZE_BYTES / 2;
    rig->lba &= ~1u;
    for (int i = 0; i < 200; i++) {
        struct hifc_io io = rig_io(HIFC_IO_WRITE, base + (uint64_t)(i % 32) * 65536, memory, 65536);
        rig_fill(memory, io.offset_bytes, 65536, (uint64_t)i);
        CHECK_EQ(rig_run(rig, &io), 0);
        memset(memory, 0, 65536);
        io.op = HIFC_IO_READ;
        CHECK_EQ(rig_run(rig, &io), 0);
        CHECK(rig_holds(memory, io.offset_bytes, 65536, (uint64_t)i));
    }
    rig_free(memory);
    return NULL;
}

TEST(two_threads_drive_two_queue_pairs_while_memory_is_registered)
{
    FOR_EACH (c) {
        struct rig rigs[2];
        pthread_t threads[2];
        rigs[0] = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        rigs[1] = rigs[0];
        const struct hifc_device_ops *ops = rigs[0].device->ops;
        CHECK_EQ(ops->qpair_open(rigs[0].device, 4, RIG_TIMEOUT_MS, &rigs[1].qpair), 0);
        rigs[1].lba |= 1; /* the second half is its own */
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(pthread_create(&threads[i], NULL, hammer, &rigs[i]), 0);
        }
        uint8_t *raw = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                            0);
        uint8_t *memory = (uint8_t *)(((uintptr_t)raw + 2 * MIB - 1) & ~(uintptr_t)(2 * MIB - 1));
        for (int i = 0; ops->register_memory && i < 20; i++) {
            CHECK_EQ(ops->register_memory(rigs[0].device, memory, 2 * MIB), 0);
            CHECK_EQ(ops->unregister_memory(rigs[0].device, memory, 2 * MIB), 0);
        }
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
        }
        munmap(raw, 4 * MIB);
        ops->qpair_close(rigs[1].qpair);
        rig_close(&rigs[0]);
    }
}

/* ---- registered memory ----------------------------------------------------------------------- */

TEST(registered_memory_works_before_and_after_the_queue_pair_opens)
{
    FOR_EACH (c) {
        size_t size = 4 * MIB;
        uint8_t *raw = mmap(NULL, size + 2 * MIB, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        uint8_t *memory = (uint8_t *)(((uintptr_t)raw + 2 * MIB - 1) & ~(uintptr_t)(2 * MIB - 1));
        struct hifc_device *device;
        CHECK_EQ(hifc_device_open(uri_of(c), HIFC_DEVICE_CREATE, &device), 0);
        CHECK_EQ(hifc_device_keep(device), 0);
        const struct hifc_device_ops *ops = device->ops;
        if (ops->register_memory && !device->geometry.registered_only) {
            struct rig rig = {.device = device};
            CHECK_EQ(ops->register_memory(device, memory, 2 * MIB), 0);
            CHECK_EQ(ops->qpair_open(device, 8, RIG_TIMEOUT_MS, &rig.qpair), 0);
            CHECK_EQ(ops->register_memory(device, memory + 2 * MIB, 2 * MIB), 0);
            rig_fill(memory, 0, 65536, 9);
            CHECK_EQ(rig_write(&rig, 0, memory, 65536), 0);
            CHECK_EQ(rig_read(&rig, 0, memory + 3 * MIB, 65536), 0);
            CHECK(rig_holds(memory + 3 * MIB, 0, 65536, 9));
            /* Across the seam, and after unregistering: as any other memory. */
            CHECK_EQ(rig_read(&rig, 0, memory + 2 * MIB - 32768, 65536), 0);
            CHECK(rig_holds(memory + 2 * MIB - 32768, 0, 65536, 9));
            CHECK_EQ(ops->unregister_memory(device, memory, 2 * MIB), 0);
            CHECK_EQ(rig_read(&rig, 0, memory, 65536), 0);
            CHECK(rig_holds(memory, 0, 65536, 9));
            CHECK_EQ(ops->unregister_memory(device, memory + 2 * MIB, 2 * MIB), 0);
            ops->qpair_close(rig.qpair);
        }
        hifc_device_close(device);
        munmap(raw, size + 2 * MIB);
    }
}

/* ---- what is wrong with a URI or with what stands behind it ---------------------------------- */

static void expect_open(const char *format, unsigned flags, int code, const char *words)
{
    char uri[256];
    struct hifc_device *device;
    make_directory();
    snprintf(uri, sizeof(uri), format, directory);
    fprintf(stderr, "  %s\n", uri);
    int rc = hifc_device_open(uri, flags, &device);
    if (rc == 0) {
        hifc_device_close(device);
    }
    CHECK_EQ(rc, code);
    CHECK(device == NULL);
    struct hifc_error error;
    CHECK_EQ(hifc_last_error(&error), code);
    CHECK(last_error_says(words));
}

TEST(bad_uris_are_refused_with_the_fix)
{
    expect_open("nonsense", 0, -EINVAL, "scheme://target");
    expect_open("", 0, -EINVAL, "no device URI");
    expect_open("://x", 0, -EINVAL, "no device URI");
    expect_open("FILE:///x", 0, -EINVAL, "no scheme");
    expect_open("floppy://a", 0, -EINVAL, hifc_schemes());
    expect_open("faulty+floppy://a", 0, -EINVAL, "unknown scheme");
    expect_open("ram://", 0, -EINVAL, "no size");
    expect_open("ram://nobody", 0, -ENOENT, "give size=");
    expect_open("ram://?size=1GiBs", 0, -EINVAL, "not a size");
    expect_open("ram://?size=-1", 0, -EINVAL, "not a size");
    expect_open("ram://?size=99999999999999999999", 0, -EINVAL, "not a size");
    expect_open("ram://?size=99999999TiB", 0, -EINVAL, "not a size");
    expect_open("ram://?size=64M", 0, -EINVAL, "write 64MiB");
    expect_open("ram://?size=1.5g", 0, -EINVAL, "write 1.5GiB");
    expect_open("ram://?size=8gib", 0, -EINVAL, "write 8GiB");
    expect_open("ram://?size=8gb", 0, -EINVAL, "write 8GB");
    expect_open("ram://?size=8xb", 0, -EINVAL, "write bytes, or");
    expect_open("ram://?size=1.3KiB", 0, -EINVAL, "whole number of bytes");
    expect_open("ram://?size=1.5", 0, -EINVAL, "whole number of bytes");
    expect_open("ram://?size=1.MiB", 0, -EINVAL, "not a size");
    expect_open("ram://?size=.5MiB", 0, -EINVAL, "not a size");
    expect_open("ram://?size=", 0, -EINVAL, "not a size");
    expect_open("ram://?size=1MiB&colour=red", 0, -EINVAL, "known: size, lba");
    expect_open("ram://?size=1MiB&size=2MiB", 0, -EINVAL, "twice");
    expect_open("ram://?size", 0, -EINVAL, "name=value");
    expect_open("ram://?size=1MiB&lba=520", 0, -EINVAL, "512 or 4096");
    expect_open("ram://?size=1000&lba=512", 0, -EINVAL, "multiple");
    expect_open("ram://?size=1%%zz", 0, -EINVAL, "hex digits");
    expect_open("file://relative?size=1MiB", 0, -EINVAL, "three slashes");
    expect_open("file:///dev/null", 0, -EINVAL, "neither a file nor a block device");
    expect_open("file:///nowhere/x?size=1MiB", HIFC_DEVICE_CREATE, -ENOENT, "directory");
    expect_open("file://%s/none.img", 0, -ENOENT, "format it");
    expect_open("file://%s/none.img", HIFC_DEVICE_CREATE, -ENOENT, "size=");
    expect_open("file://%s/none.img?size=1MiB&io=magic", 0, -EINVAL, "uring or sync");
    expect_open("file://%s/none.img?size=1MiB&direct=7", 0, -EINVAL, "0 or 1");
    expect_open("file:///dev/shm%s/n.img?size=1MiB&direct=1", HIFC_DEVICE_CREATE, -ENOTSUP,
                "direct");
    expect_open("faulty+ram://?size=1MiB&fault_dropp=1", 0, -EINVAL, "unknown parameter");
    expect_open("faulty+ram://?size=1MiB&fault_drop=101", 0, -EINVAL, "percentage");
    expect_open("faulty+ram://?size=1MiB&fault_flip=9-7", 0, -EINVAL, "FIRST-LAST");
    expect_open("faulty+ram://?size=1MiB&colour=red", 0, -EINVAL, "known: size, lba");
    char path[160];
    snprintf(path, sizeof(path), "%s/none.img", directory);
    CHECK(access(path, F_OK) != 0); /* no refused open left a file behind */
}

TEST(sizes_are_read_as_the_configuration_reads_them)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } sizes[] = {
        {"4096", 4096},
        {"4096B", 4096},
        {"1.5GiB", 3ull << 29},
        {"1.50GiB", 3ull << 29},
        {"0.5KiB", 512},
        {"2.25MiB", 9ull << 18},
        {"1.5kB", 1500},
        {"1.5KB", 1500},
        {"0.001MB", 1000},
        {"1.5%20GiB", 3ull << 29},
        {"8388607TiB", 8388607ull << 40},
        {"9223372036854775807", INT64_MAX},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char text[64];
        struct hifc_uri uri;
        uint64_t bytes = 0;
        snprintf(text, sizeof text, "ram://?size=%s", sizes[i].text);
        CHECK_EQ(hifc_uri_parse(text, &uri), 0);
        CHECK_EQ(hifc_uri_size(&uri, "size", &bytes), 0);
        CHECK_EQ(bytes, sizes[i].bytes);
    }
}

#ifndef HIFC_WITH_SPDK
TEST(an_spdk_uri_says_how_to_get_spdk)
{
    expect_open("spdk://0000:3b:00.0?ns=1", 0, -ENOTSUP, "tools/build_spdk");
    expect_open("spdk+tcp://127.0.0.1:4420/nqn.2026-01.io.hifc:a?ns=1", 0, -ENOTSUP,
                "HIFC_SPDK=on");
}
#endif

TEST(a_file_is_created_whole_private_and_never_grows)
{
    char path[160], uri[200];
    make_directory();
    snprintf(path, sizeof(path), "%s/grow 100%%.img", directory);
    snprintf(uri, sizeof(uri), "file://%s/grow%%20100%%25.img?size=2MiB", directory);
    struct rig rig = rig_open(uri, HIFC_DEVICE_CREATE, 1);
    rig_close(&rig);
    struct stat status;
    CHECK_EQ(stat(path, &status), 0);
    CHECK_EQ(status.st_size, 2 * MIB);
    CHECK_EQ(status.st_mode & 0777, 0600);
    CHECK(status.st_blocks * 512 >= 2 * MIB);
    snprintf(uri, sizeof(uri), "file://%s/grow%%20100%%25.img?size=4MiB", directory);
    struct hifc_device *device;
    CHECK_EQ(hifc_device_open(uri, HIFC_DEVICE_CREATE, &device), -EINVAL);
    CHECK(last_error_says("fewer than size"));
    snprintf(uri, sizeof(uri), "file://%s/grow%%20100%%25.img?size=1MiB", directory);
    rig = rig_open(uri, 0, 1);
    CHECK_EQ(rig.device->geometry.size_bytes, MIB); /* smaller than the file is fine */
    rig_close(&rig);
    CHECK_EQ(stat(path, &status), 0);
    CHECK_EQ(status.st_size, 2 * MIB);
    snprintf(path, sizeof(path), "%s/empty.img", directory);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    expect_open("file://%s/empty.img", 0, -EINVAL, "empty");
}

TEST(a_mounted_block_device_is_refused)
{
    char command[320];
    struct hifc_device *device;
    make_directory();
    if (!loop_device[0]) {
        fprintf(stderr, "  skipped: no block device\n");
        return;
    }
    snprintf(command, sizeof(command), "mkfs.ext4 -q %s && mkdir %s/mnt && mount %s %s/mnt",
             loop_device, directory, loop_device, directory);
    if (system(command) != 0) {
        fprintf(stderr, "  skipped: this machine lets us mount nothing\n");
        return;
    }
    snprintf(command, sizeof(command), "file://%s", loop_device);
    CHECK_EQ(hifc_device_open(command, 0, &device), -EBUSY);
    CHECK(last_error_says("mounted"));
    CHECK(last_error_says("unmount it"));
    snprintf(command, sizeof(command), "umount %s", loop_device);
    CHECK_EQ(system(command), 0);
    snprintf(command, sizeof(command), "file://%s", loop_device);
    CHECK_EQ(hifc_device_open(command, 0, &device), 0);
    hifc_device_close(device);
}

TEST(a_file_that_shrinks_is_an_error_and_no_hang)
{
    static const char *const kinds[] = {"uring", "sync"};
    for (int i = 0; i < 2; i++) {
        char path[160], uri[200];
        make_directory();
        snprintf(path, sizeof(path), "%s/shrink.img", directory);
        snprintf(uri, sizeof(uri), "file://%s?size=1MiB&io=%s", path, kinds[i]);
        struct rig rig = rig_open(uri, HIFC_DEVICE_CREATE, 4);
        uint8_t *memory = rig_memory(65536);
        CHECK_EQ(truncate(path, 524288 + 4096), 0);
        CHECK_EQ(rig_read(&rig, 524288 - 32768, memory, 65536), -EIO);
        CHECK_EQ(rig_read(&rig, 700 << 10, memory, 65536), -EIO);
        CHECK_EQ(rig_read(&rig, 0, memory, 65536), 0);
        rig_free(memory);
        rig_close(&rig);
        unlink(path);
    }
}

/* The end of the file moves between the short completion and the poll that sees it. */
TEST(a_short_transfer_goes_on_where_it_stopped)
{
    char path[160], uri[200];
    make_directory();
    snprintf(path, sizeof(path), "%s/short.img", directory);
    snprintf(uri, sizeof(uri), "file://%s?size=1MiB", path);
    struct rig rig = rig_open(uri, HIFC_DEVICE_CREATE, 4);
    uint8_t *memory = rig_memory(131072), *pattern = rig_memory(131072);
    rig_fill(pattern, 0, 131072, 11);
    CHECK_EQ(rig_write(&rig, 0, pattern, 131072), 0);
    for (uint32_t pieces = 1; pieces < 6; pieces += 2) {
        CHECK_EQ(truncate(path, 65536 - 4096), 0);
        memset(memory, 0, 131072);
        struct hifc_io io = rig_io(HIFC_IO_READ, 0, memory, 131072), *pointer = &io;
        for (uint32_t i = 0; i < pieces; i++) {
            uint32_t start = i * 32768, end = i + 1 == pieces ? 131072 : start + 32768;
            io.iov[i] = (struct iovec){memory + start, end - start};
        }
        io.iov_count = pieces;
        int fd = rig.device->ops->event_fd(rig.qpair);
        fall_silent(&rig, fd);
        CHECK_EQ(rig.device->ops->submit(rig.qpair, &pointer, 1), 1);
        struct pollfd pollfd = {.fd = fd, .events = POLLIN};
        CHECK_EQ(poll(&pollfd, 1, 5000), 1);
        int file = open(path, O_WRONLY | O_CLOEXEC);
        CHECK_EQ(pwrite(file, pattern, 131072, 0), 131072);
        close(file);
        rig_wait(&rig, &io);
        CHECK_EQ(io.error, 0);
        CHECK(rig_holds(memory, 0, 131072, 11));
    }
    rig_free(memory);
    rig_free(pattern);
    rig_close(&rig);
}

/* ---- named images ---------------------------------------------------------------------------- */

TEST(named_images_live_until_they_are_dropped)
{
    struct hifc_device *device;
    struct rig rig = rig_open("ram://drop?size=1MiB", 0, 4);
    uint8_t *memory = rig_memory(4096);
    rig_fill(memory, 0, 4096, 10);
    CHECK_EQ(rig_write(&rig, 0, memory, 4096), 0);
    CHECK_EQ(hifc_ram_drop("drop"), -EBUSY);
    rig_close(&rig);
    CHECK_EQ(hifc_device_open("ram://drop?size=2MiB", 0, &device), -EINVAL);
    CHECK(last_error_says("1048576"));
    rig = rig_open("ram://drop", 0, 4);
    CHECK_EQ(rig_read(&rig, 0, memory, 4096), 0);
    CHECK(rig_holds(memory, 0, 4096, 10));
    rig_close(&rig);
    CHECK_EQ(hifc_ram_drop("drop"), 0);
    CHECK_EQ(hifc_ram_drop("drop"), -ENOENT);
    CHECK_EQ(hifc_device_open("ram://drop", 0, &device), -ENOENT);
    rig = rig_open("ram://drop?size=1MiB", 0, 4);
    CHECK_EQ(rig_read(&rig, 0, memory, 4096), 0);
    for (int i = 0; i < 4096; i++) {
        CHECK_EQ(memory[i], 0);
    }
    rig_close(&rig);
    rig_free(memory);
    CHECK_EQ(hifc_ram_drop("drop"), 0);
}

/* ---- the lock between processes -------------------------------------------------------------- */

/* A child that has the device open and writes without end; it tells when it has begun. */
static pid_t start_owner(const char *uri)
{
    int ready[2];
    char byte;
    CHECK_EQ(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        struct rig rig = rig_open(uri, 0, 32);
        uint8_t *memory = rig_memory(MIB);
        struct hifc_io ios[32], *pointer;
        CHECK_EQ(write(ready[1], "x", 1), 1);
        for (int i = 0; i < 32; i++) {
            ios[i] = rig_io(HIFC_IO_WRITE, (uint64_t)(i % 8) * MIB, memory, MIB);
            ios[i].owner = &ios[i];
        }
        for (;;) {
            for (int i = 0; i < 32; i++) {
                if (ios[i].owner) {
                    ios[i].owner = NULL;
                    pointer = &ios[i];
                    rig.device->ops->submit(rig.qpair, &pointer, 1);
                }
            }
            rig_poll(&rig);
        }
    }
    close(ready[1]);
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return child;
}

TEST(the_lock_names_its_holder_and_goes_with_it)
{
    FOR_EACH (c) {
        if (!c->file) {
            continue;
        }
        char words[64];
        struct hifc_device *device;
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 1);
        rig_close(&rig);
        pid_t child = start_owner(uri_of(c));
        CHECK_EQ(hifc_device_open(uri_of(c), 0, &device), -EBUSY);
        snprintf(words, sizeof(words), "pid %d (unit_device)", (int)child);
        CHECK(last_error_says(words));
        CHECK(last_error_says("stop that one"));
        kill(child, SIGKILL);
        CHECK_EQ(waitpid(child, NULL, 0), child);
        rig = rig_open(uri_of(c), 0, 1); /* at once, though the kernel may still own commands */
        rig_close(&rig);
    }
}

TEST(a_forked_child_neither_holds_the_lock_nor_breaks_it)
{
    FOR_EACH (c) {
        if (!c->file) {
            continue;
        }
        struct rig rig = rig_open(uri_of(c), HIFC_DEVICE_CREATE, 4);
        int hold[2];
        CHECK_EQ(pipe(hold), 0);
        pid_t child = fork();
        if (child == 0) {
            char byte;
            close(hold[1]);
            rig.device->ops->qpair_close(rig.qpair);
            hifc_device_close(rig.device);
            _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
        }
        uint8_t *memory = rig_memory(4096);
        struct hifc_device *second;
        CHECK_EQ(hifc_device_open(uri_of(c), 0, &second), -EBUSY);
        CHECK_EQ(rig_write(&rig, 0, memory, 4096), 0);
        rig_close(&rig);
        rig = rig_open(uri_of(c), 0, 4); /* while the child lives */
        CHECK_EQ(rig_read(&rig, 0, memory, 4096), 0);
        rig_close(&rig);
        rig_free(memory);
        int status;
        close(hold[1]);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        close(hold[0]);
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(a_failed_command_is_told_with_status_place_and_fix)
{
    struct hifc_error error;
    CHECK_EQ(hifc_fail_command(-EIO, 2, 0x81, 0x02, 1234, 8, 4096, "spdk://0000:3b:00.0?ns=1"),
             -EIO);
    CHECK_EQ(hifc_last_error(&error), -EIO);
    CHECK_EQ(error.sct, 2);
    CHECK_EQ(error.sc, 0x81);
    CHECK_EQ(error.lba, 1234);
    CHECK_EQ(error.nlb, 8);
    CHECK(last_error_says("read of 8 blocks of 4096 bytes at LBA 1234"));
    CHECK(last_error_says("Unrecovered Read Error"));
    CHECK(last_error_says("0000:3b:00.0"));
    CHECK(strcmp(hifc_nvme_status_text(0, 0x80), "LBA Out of Range") == 0);
    CHECK(strcmp(hifc_nvme_status_text(7, 1), "Vendor Specific Status") == 0);
    CHECK(strcmp(hifc_nvme_status_text(1, 0x7f), "Unknown Command Specific Status") == 0);
    CHECK_EQ(hifc_fail(-EINVAL, "again: %s", "x"), -EINVAL);
    hifc_last_error(&error);
    CHECK_EQ(error.sct, 0);
    CHECK(strcmp(error.message, "again: x") == 0);
    struct hifc_error other = {.code = -EBUSY};
    hifc_error_adopt(&other);
    CHECK_EQ(hifc_last_error(NULL), -EBUSY);
}

TEST(a_fork_is_noticed)
{
    uint64_t generation = hifc_fork_generation();
    CHECK(!hifc_forked_since(generation));
    pid_t child = fork();
    if (child == 0) {
        _exit(hifc_forked_since(generation) ? 0 : 1);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(!hifc_forked_since(generation));
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
