/* SPDX-License-Identifier: Apache-2.0
 *
 * Files as devices: what a format leaves behind that was refused, failed or killed, and file
 * systems that cannot allocate.
 */
#define _GNU_SOURCE /* O_TMPFILE */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/device.h"

static char directory[64], path[100];

static const char *uri_with(const char *parameters)
{
    static char uri[300];
    snprintf(uri, sizeof uri, "file://%s?%s", path, parameters);
    return uri;
}

/* An empty directory and the name of a file in it, on a disk or on tmpfs. */
static void make_directory(const char *where)
{
    snprintf(directory, sizeof directory, "%s/hifc-file-%d", where, (int)getpid());
    snprintf(path, sizeof path, "%s/kv.hifc", directory);
    CHECK(mkdir(directory, 0700) == 0);
}

static void remove_directory(void)
{
    unlink(path);
    CHECK_EQ(rmdir(directory), 0); /* nothing else is in it */
}

static bool exists(void)
{
    struct stat status;
    return lstat(path, &status) == 0;
}

/* Without a name until it is kept: on overlayfs of old kernels, for one, a file needs one. */
static bool makes_unnamed_files(void)
{
    int fd = open(directory, O_TMPFILE | O_RDWR, 0600);
    if (fd >= 0) {
        close(fd);
    }
    return fd >= 0;
}

static const char *const places[] = {"/var/tmp", "/dev/shm"};

TEST(a_refused_format_leaves_no_file)
{
    struct hifc_format_opts small_segments = {.segment_size_bytes = 1000};
    struct hifc_format_opts large_segments = {.segment_size_bytes = 256u << 20};
    struct hifc_format_opts bad_label = {.label = "a\nb"};
    struct hifc_format_opts long_label = {0};
    memset(long_label.label, 'x', sizeof long_label.label);
    const struct {
        const char *parameters;
        const struct hifc_format_opts *opts;
        int error;
    } refusals[] = {
        {"size=1MiB", NULL, -EINVAL},
        {"size=100", NULL, -EINVAL},
        {"size=64MiB", &small_segments, -EINVAL},
        {"size=64MiB", &large_segments, -EINVAL},
        {"size=64MiB", &bad_label, -EINVAL},
        {"size=64MiB", &long_label, -EINVAL},
        {"size=64MiB&max_transfer=1", NULL, -EINVAL},
        {"size=64MiB&sparse=3", NULL, -EINVAL},
        {"size=9000000TiB", NULL, -EINVAL},
        {"size=8000000TiB", NULL, -EFBIG},
        {"size=8000000TiB&sparse=1", NULL, -EFBIG},
        {"size=9TiB&sparse=0", NULL, -ENOSPC},
        {"size=64MiB", NULL, 0}, /* and the file may be made after all that */
    };
    for (unsigned p = 0; p < 2; p++) {
        make_directory(places[p]);
        for (unsigned i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
            int error = hifc_format(uri_with(refusals[i].parameters), refusals[i].opts);
            if (error != refusals[i].error) {
                fprintf(stderr, "  %s at %s\n", refusals[i].parameters, places[p]);
            }
            CHECK_EQ(error, refusals[i].error);
            CHECK_EQ(exists(), refusals[i].error == 0);
        }
        remove_directory();
    }
}

TEST(a_refused_format_leaves_a_file_that_was_there_as_it_is)
{
    struct stat status;
    struct hifc_format_opts small_segments = {.segment_size_bytes = 1000};
    make_directory("/var/tmp");
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK_EQ(ftruncate(fd, 3 << 20), 0);
    close(fd);
    CHECK_EQ(hifc_format(uri_with("size=64MiB"), NULL), -EINVAL);
    CHECK_EQ(hifc_format(uri_with("size=1MiB"), NULL), -EINVAL);
    CHECK_EQ(hifc_format(uri_with("size=3MiB"), &small_segments), -EINVAL);
    CHECK_EQ(stat(path, &status), 0);
    CHECK_EQ(status.st_size, 3 << 20);
    CHECK_EQ(status.st_blocks, 0);
    remove_directory();
}

TEST(an_open_creates_nothing)
{
    struct hifc_ns *ns;
    make_directory("/var/tmp");
    CHECK_EQ(hifc_open(uri_with("size=64MiB"), NULL, &ns), -ENOENT);
    CHECK(!exists());
    remove_directory();
}

/* Kills a process that has created and sized the file, and is about to lay the namespace. */
TEST(a_killed_format_leaves_no_file)
{
    for (unsigned p = 0; p < 2; p++) {
        int told[2];
        make_directory(places[p]);
        if (!makes_unnamed_files()) {
            fprintf(stderr, "  skipped: %s makes no files without a name\n", places[p]);
            remove_directory();
            continue;
        }
        CHECK_EQ(pipe(told), 0);
        pid_t child = fork();
        if (child == 0) {
            struct hifc_device *device;
            const char *uri = uri_with("size=64MiB");
            char failed = hifc_device_open(uri, HIFC_DEVICE_CREATE, &device) != 0;
            failed = write(told[1], &failed, 1) != 1;
            pause();
            _exit(failed);
        }
        char failed = 1;
        CHECK_EQ(read(told[0], &failed, 1), 1);
        CHECK(!failed);
        kill(child, SIGKILL);
        CHECK_EQ(waitpid(child, NULL, 0), child);
        CHECK(!exists());
        close(told[0]);
        close(told[1]);
        remove_directory();
    }
}

TEST(what_is_not_kept_goes_and_what_somebody_else_made_stays)
{
    struct hifc_device *device;
    make_directory("/var/tmp");
    CHECK_EQ(hifc_device_open(uri_with("size=64MiB"), HIFC_DEVICE_CREATE, &device), 0);
    hifc_device_close(device);
    CHECK(!exists());
    CHECK_EQ(hifc_device_open(uri_with("size=64MiB"), HIFC_DEVICE_CREATE, &device), 0);
    bool named = exists();
    unlink(path);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    CHECK_EQ(hifc_device_keep(device), named ? 0 : -EEXIST);
    hifc_device_close(device);
    CHECK(exists());
    remove_directory();
}

/* ---- file systems that cannot allocate ------------------------------------------------------- */

/* From now on fallocate answers in this process as on ext2, ext3 and NFS. */
static bool forbid_fallocate(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_fallocate, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof code[0], .filter = code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void without_fallocate(void)
{
    struct stat status;
    struct statvfs fs;
    char parameters[60];
    CHECK_EQ(hifc_format(uri_with("size=16MiB&sparse=0"), NULL), 0);
    CHECK_EQ(stat(path, &status), 0);
    CHECK_EQ(status.st_size, 16 << 20);
    CHECK((uint64_t)status.st_blocks * 512 >= 16u << 20);
    CHECK_EQ(unlink(path), 0);
    /* More than there is room for is refused before it takes the last of it. */
    CHECK_EQ(statvfs(directory, &fs), 0);
    snprintf(parameters, sizeof parameters, "size=%llu&sparse=0",
             ((unsigned long long)fs.f_bavail + 4096) * fs.f_frsize);
    CHECK_EQ(hifc_format(uri_with(parameters), NULL), -ENOSPC);
    CHECK(last_error_says("use a smaller size"));
    CHECK(!exists());
    /* A sparse one works: zeros make room for a segment before it is used. */
    CHECK_EQ(hifc_format(uri_with("size=16MiB&sparse=1&io=sync"), NULL), 0);
    struct hifc_ns *ns;
    CHECK_EQ(hifc_open(uri_with("size=16MiB&sparse=1&io=sync"), NULL, &ns), 0);
    CHECK_EQ(hifc_close(ns), 0);
    CHECK_EQ(stat(path, &status), 0);
    CHECK((uint64_t)status.st_blocks * 512 >= 5u << 19);
    CHECK((uint64_t)status.st_blocks * 512 < 16u << 20);
}

TEST(where_fallocate_is_missing_room_is_written_for_real)
{
    make_directory("/dev/shm"); /* where room is soon measured and given back */
    pid_t child = fork();
    if (child == 0) {
        if (!forbid_fallocate()) {
            _exit(77);
        }
        without_fallocate();
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        fprintf(stderr, "  skipped: no seccomp here\n");
    } else {
        CHECK_EQ(WEXITSTATUS(status), 0);
    }
    remove_directory();
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
