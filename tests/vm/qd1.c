/* SPDX-License-Identifier: Apache-2.0
 *
 * qd1.c - how long one read of 4 KiB takes when nothing else is in flight, by the kernel or by HiFC.
 *
 *   qd1 kernel /dev/nvme1n1       preadv with O_DIRECT
 *   qd1 hifc URI STARTS ENOUGH    get of a value, driven inline; stores the values first. Up to
 *                                 STARTS times, until the median is at most ENOUGH nanoseconds
 *   qd1 lost                      no read: how much of both CPUs other programs of the host take
 *
 * Prints the (least) median in nanoseconds, or the share that is lost in thousandths. Checksums are left to the caller (HIFC_F_CHECKSUMS), as with GPU
 * staging: an emulated CPU takes longer for one than the drive for the read. Both ways pick from
 * the same number of places by the same sequence, on one thread.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hifc.h"

#define VALUE_BYTES 4096u
#define PLACES 256u
#define READS_WARM 200u
#define READS 2000u

static uint64_t samples[READS];

static void die(const char *what)
{
    struct hifc_error error = {0};
    hifc_last_error(&error);
    fprintf(stderr, "qd1: %s: %s\n", what, error.message);
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t next_place(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % PLACES;
}

static int compare(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static uint64_t median_ns(void (*read_one)(uint32_t place))
{
    for (uint32_t i = 0; i < READS_WARM + READS; i++) {
        uint32_t place = next_place();
        uint64_t start = now_ns();
        read_one(place);
        if (i >= READS_WARM) {
            samples[i - READS_WARM] = now_ns() - start;
        }
    }
    qsort(samples, READS, sizeof(samples[0]), compare);
    return samples[READS / 2];
}

/* ---- the kernel's path ----------------------------------------------------------------------- */

static int device_fd;
static void *device_buffer;

static void read_kernel(uint32_t place)
{
    if (pread(device_fd, device_buffer, VALUE_BYTES, (off_t)place * VALUE_BYTES) != VALUE_BYTES) {
        die("pread");
    }
}

static void open_kernel(const char *path)
{
    device_fd = open(path, O_RDONLY | O_DIRECT);
    if (device_fd < 0 || posix_memalign(&device_buffer, VALUE_BYTES, VALUE_BYTES) != 0) {
        die(path);
    }
}

/* ---- HiFC's ---------------------------------------------------------------------------------- */

static struct hifc_ns *ns;
static uint64_t value_offset, checksum_offset;

static int32_t submit(uint8_t op, uint32_t place)
{
    struct hifc_ticket *ticket;
    struct hifc_req request = {
        .op = op,
        .flags = op == HIFC_OP_GET ? HIFC_F_CHECKSUMS : 0,
        .buffer_offset = value_offset,
        .length = VALUE_BYTES,
        .checksum_offset = checksum_offset,
    };
    memcpy(request.key.bytes, &place, sizeof(place));
    if (hifc_submit(ns, &request, 1, &ticket) != 0 || hifc_ticket_wait(ticket, -1) != 1) {
        die("hifc_submit");
    }
    hifc_ticket_free(ticket);
    return request.status;
}

static void read_hifc(uint32_t place)
{
    if (submit(HIFC_OP_GET, place) != HIFC_OK) {
        die("get");
    }
}

static void open_hifc(const char *uri)
{
    struct hifc_format_opts format = {.segment_size_bytes = 2u << 20, .force = 1};
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 4u << 20};
    if (hifc_format(uri, &format) != 0 || hifc_open(uri, &opts, &ns) != 0 ||
        hifc_buffer_alloc(ns, VALUE_BYTES, &value_offset) != 0 ||
        hifc_buffer_alloc(ns, VALUE_BYTES, &checksum_offset) != 0) {
        die(uri);
    }
    for (uint32_t place = 0; place < PLACES; place++) {
        if (submit(HIFC_OP_PUT, place) != HIFC_OK) {
            die("put");
        }
    }
    if (hifc_sync(ns) != 0) {
        die("hifc_sync");
    }
}

static uint64_t least_median_ns(const char *uri, int starts, uint64_t enough_ns)
{
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < starts && least > enough_ns; i++) {
        open_hifc(uri);
        uint64_t median = median_ns(read_hifc);
        least = median < least ? median : least;
        if (hifc_close(ns) != 0) {
            die("hifc_close");
        }
    }
    return least;
}

/* ---- the host -------------------------------------------------------------------------------- */

#define CPUS 2
#define SPIN_NS 1000000000u
#define GAP_NS 1000000u /* longer than anything of the guest or of QEMU takes a CPU away */

/* A CPU that is emulated stands still while another program has the host's. */
static void *spin(void *argument)
{
    uint64_t *lost_ns = argument, start = now_ns(), last = start;
    while (last - start < SPIN_NS) {
        uint64_t now = now_ns();
        *lost_ns += now - last > GAP_NS ? now - last : 0;
        last = now;
    }
    return NULL;
}

static void measure_lost(void)
{
    pthread_t threads[CPUS];
    uint64_t lost_ns[CPUS] = {0}, sum = 0;
    for (int i = 0; i < CPUS; i++) {
        if (pthread_create(&threads[i], NULL, spin, &lost_ns[i]) != 0) {
            die("pthread_create");
        }
    }
    for (int i = 0; i < CPUS; i++) {
        pthread_join(threads[i], NULL);
        sum += lost_ns[i];
    }
    printf("%llu\n", (unsigned long long)(sum * 1000 / CPUS / SPIN_NS));
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "lost") == 0) {
        measure_lost();
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "kernel") == 0) {
        open_kernel(argv[2]);
        printf("%llu\n", (unsigned long long)median_ns(read_kernel));
        return 0;
    }
    if (argc == 5 && strcmp(argv[1], "hifc") == 0) {
        printf("%llu\n", (unsigned long long)least_median_ns(argv[2], atoi(argv[3]),
                                                             strtoull(argv[4], NULL, 10)));
        return 0;
    }
    fprintf(stderr, "usage: qd1 kernel DEVICE | qd1 hifc URI STARTS ENOUGH | qd1 lost\n");
    return 2;
}
