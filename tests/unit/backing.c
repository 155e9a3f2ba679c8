/* SPDX-License-Identifier: Apache-2.0
 *
 * The same blocks under several names: hard links, bind mounts, loop devices, their partitions,
 * volumes and file systems on them. As root where loop devices are permitted; the rest is skipped
 * with the reason.
 */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "device/device.h"

static char directory[64], file[100];

__attribute__((format(printf, 1, 2))) static int shell(const char *format, ...)
{
    char command[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return system(command);
}

/* Where the kernel has loop devices: on a disk or not does not matter here. */
static void make_file(void)
{
    snprintf(directory, sizeof directory, "/var/tmp/hifc-backing-%d", (int)getpid());
    snprintf(file, sizeof file, "%s/a.img", directory);
    CHECK_EQ(mkdir(directory, 0700), 0);
    CHECK_EQ(shell("truncate -s 32M %s", file), 0);
}

static void remove_file(void)
{
    CHECK_EQ(shell("rm -rf %s", directory), 0);
}

/* "" where that is not permitted. */
static const char *loop_over(const char *path, const char *options, char out[64])
{
    char command[300];
    snprintf(command, sizeof command, "losetup %s -f --show %s 2>/dev/null", options, path);
    out[0] = '\0';
    FILE *pipe = popen(command, "re");
    if (pipe && !fgets(out, 64, pipe)) {
        out[0] = '\0';
    }
    if (pipe) {
        pclose(pipe);
    }
    out[strcspn(out, "\n")] = '\0';
    if (!out[0]) {
        fprintf(stderr, "  skipped: no loop device may be made here\n");
    }
    return out;
}

static int open_at(const char *path, unsigned flags, struct hifc_device **out)
{
    char uri[300];
    snprintf(uri, sizeof uri, "file://%s", path);
    return hifc_device_open(uri, flags, out);
}

/* Neither of two names may be opened while a writer has the other one. */
static void exclude_each_other(const char *one, const char *other)
{
    const char *names[] = {one, other};
    struct hifc_device *device, *second;
    for (unsigned i = 0; i < 2; i++) {
        CHECK_EQ(open_at(names[i], 0, &device), 0);
        int error = open_at(names[1 - i], 0, &second);
        if (error != -EBUSY) {
            fprintf(stderr, "  %s beside %s\n", names[1 - i], names[i]);
        }
        CHECK_EQ(error, -EBUSY);
        struct hifc_error why;
        hifc_last_error(&why);
        CHECK(strstr(why.message, "has it open already") || last_error_says("in use"));
        CHECK_EQ(open_at(names[1 - i], HIFC_DEVICE_READ_ONLY, &second), -EBUSY);
        hifc_device_close(device);
    }
}

/* Nor for writing while a reader has it. */
static void exclude_writers_only(const char *one, const char *other)
{
    struct hifc_device *device, *second;
    CHECK_EQ(open_at(one, HIFC_DEVICE_READ_ONLY, &device), 0);
    CHECK_EQ(open_at(other, HIFC_DEVICE_READ_ONLY, &second), 0); /* readers may be several */
    hifc_device_close(second);
    CHECK_EQ(open_at(other, 0, &second), -EBUSY);
    hifc_device_close(device);
}

TEST(a_hard_link_and_a_symbolic_link_are_the_same_file)
{
    char other[120];
    make_file();
    snprintf(other, sizeof other, "%s/hard.img", directory);
    CHECK_EQ(link(file, other), 0);
    struct hifc_device *device, *second;
    CHECK_EQ(open_at(file, 0, &device), 0);
    CHECK_EQ(open_at(other, 0, &second), -EBUSY);
    CHECK_EQ(unlink(other), 0);
    CHECK_EQ(symlink(file, other), 0);
    CHECK_EQ(open_at(other, 0, &second), -EBUSY);
    hifc_device_close(device);
    exclude_each_other(file, other);
    exclude_writers_only(file, other);
    remove_file();
}

TEST(a_bind_mount_is_the_same_file)
{
    char other[120];
    make_file();
    snprintf(other, sizeof other, "%s/bound", directory);
    close(open(other, O_CREAT | O_WRONLY, 0600));
    if (mount(file, other, NULL, MS_BIND, NULL) != 0) {
        fprintf(stderr, "  skipped: this machine lets us mount nothing\n");
    } else {
        exclude_each_other(file, other);
        exclude_writers_only(file, other);
        CHECK_EQ(umount(other), 0);
    }
    remove_file();
}

TEST(a_loop_device_and_its_file_exclude_each_other)
{
    char loop[64];
    make_file();
    if (loop_over(file, "", loop)[0]) {
        exclude_each_other(file, loop);
        exclude_writers_only(file, loop);
        CHECK_EQ(shell("losetup -d %s", loop), 0);
    }
    remove_file();
}

TEST(two_loop_devices_over_one_file_exclude_each_other)
{
    char loop[64], other[64];
    make_file();
    if (loop_over(file, "", loop)[0] && loop_over(file, "", other)[0]) {
        exclude_each_other(loop, other);
        exclude_writers_only(loop, other);
        CHECK_EQ(shell("losetup -d %s %s", loop, other), 0);
    }
    remove_file();
}

TEST(a_loop_device_over_a_loop_device_excludes_all_below_it)
{
    char loop[64], upper[64];
    make_file();
    if (loop_over(file, "", loop)[0] && loop_over(loop, "", upper)[0]) {
        exclude_each_other(loop, upper);
        exclude_writers_only(loop, upper);
        exclude_each_other(file, upper);
        exclude_writers_only(file, upper);
        CHECK_EQ(shell("losetup -d %s && losetup -d %s", upper, loop), 0);
    }
    remove_file();
}

TEST(a_file_whose_loop_device_is_mounted_is_refused)
{
    char loop[64];
    struct hifc_device *device;
    make_file();
    if (loop_over(file, "", loop)[0]) {
        if (shell("mkfs.ext4 -q %s && mkdir %s/mnt && mount %s %s/mnt", loop, directory, loop,
                  directory) != 0) {
            fprintf(stderr, "  skipped: this machine lets us mount nothing\n");
        } else {
            CHECK_EQ(open_at(file, 0, &device), -EBUSY);
            CHECK(last_error_says(loop));
            CHECK(last_error_says("unmount it"));
            CHECK_EQ(shell("umount %s", loop), 0);
            CHECK_EQ(open_at(file, 0, &device), 0);
            CHECK(shell("mount %s %s/mnt 2>/dev/null", loop, directory) != 0);
            hifc_device_close(device);
        }
        CHECK_EQ(shell("losetup -d %s", loop), 0);
    }
    remove_file();
}

/* The node of a partition, made where nobody else makes it. */
static bool partition_node(const char *loop, unsigned number, char out[120])
{
    char path[200], line[32] = "";
    unsigned major_number, minor_number;
    snprintf(path, sizeof path, "/sys/block/%.30s/%.30sp%u/dev", loop + 5, loop + 5, number);
    FILE *stream = fopen(path, "re");
    bool got = stream && fgets(line, sizeof line, stream) &&
               sscanf(line, "%u:%u", &major_number, &minor_number) == 2;
    if (stream) {
        fclose(stream);
    }
    snprintf(out, 120, "%s/p%u", directory, number);
    return got && mknod(out, S_IFBLK | 0600, makedev(major_number, minor_number)) == 0;
}

TEST(partitions_of_a_loop_device_exclude_the_file_but_not_each_other)
{
    char loop[64], first[120], second[120];
    struct hifc_device *one, *two;
    make_file();
    if (loop_over(file, "-P", loop)[0]) {
        /* Told to the kernel by hand, which need not know any kind of table. */
        if (shell("addpart %s 1 2048 16384 && addpart %s 2 18432 16384", loop, loop) != 0 ||
            !partition_node(loop, 1, first) || !partition_node(loop, 2, second) ||
            open_at(first, 0, &one) != 0) {
            fprintf(stderr, "  skipped: loop devices have no partitions here\n");
        } else {
            CHECK_EQ(open_at(second, 0, &two), 0);
            hifc_device_close(two);
            hifc_device_close(one);
            exclude_each_other(file, first);
            CHECK_EQ(open_at(second, 0, &two), 0);
            CHECK_EQ(open_at(loop, 0, &one), -EBUSY);
            hifc_device_close(two);
            CHECK_EQ(open_at(loop, 0, &one), 0);
            CHECK_EQ(open_at(second, 0, &two), -EBUSY);
            hifc_device_close(one);
        }
        CHECK_EQ(shell("losetup -d %s", loop), 0);
    }
    remove_file();
}

TEST(a_volume_over_a_loop_device_excludes_the_file)
{
    char loop[64], name[40], volume[80];
    make_file();
    if (loop_over(file, "", loop)[0]) {
        snprintf(name, sizeof name, "hifc-test-%d", (int)getpid());
        snprintf(volume, sizeof volume, "/dev/mapper/%s", name);
        if (shell("dmsetup create %s --table '0 32768 linear %s 2048' 2>/dev/null", name, loop) !=
            0) {
            fprintf(stderr, "  skipped: no device-mapper here\n");
        } else {
            struct hifc_device *device;
            CHECK_EQ(open_at(file, 0, &device), -EBUSY); /* the volume has the loop device */
            CHECK(last_error_says(loop));
            CHECK_EQ(open_at(volume, 0, &device), 0);
            hifc_device_close(device);
            CHECK_EQ(shell("dmsetup remove %s", name), 0);
        }
        CHECK_EQ(shell("losetup -d %s", loop), 0);
    }
    remove_file();
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
