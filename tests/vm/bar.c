/* SPDX-License-Identifier: Apache-2.0
 *
 * bar.c - moves values between a drive and the BAR of another PCI device, with no copy in memory.
 *
 *   bar URI /sys/bus/pci/devices/BDF/resource2
 *
 * The BAR stands in for a GPU's. It is mapped, registered as a pool, and a namespace's values are
 * written from it and read into it: a pool's memory is what the drive reads and writes. Exits 0 when
 * every byte came back. One thread.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "hifc.h"

#define HUGE_BYTES ((size_t)2 << 20)
#define VALUE_BYTES (512u << 10)
#define VALUES 8u

static void die(const char *what)
{
    struct hifc_error error = {0};
    hifc_last_error(&error);
    fprintf(stderr, "bar: %s: %s\n", what, error.message);
    exit(1);
}

/* Registered memory begins at a multiple of 2 MiB, which mmap does not promise for a BAR. */
static void *map_bar(const char *path, size_t *size)
{
    struct stat status;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0) {
        die(path);
    }
    *size = (size_t)status.st_size;
    char *room = mmap(NULL, *size + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) {
        die("mmap of address space");
    }
    char *aligned = (char *)(((uintptr_t)room + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1));
    void *bar = mmap(aligned, *size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (bar == MAP_FAILED) {
        die("mmap of the BAR");
    }
    return bar;
}

static void fill(uint64_t *words, uint32_t number)
{
    for (uint32_t i = 0; i < VALUE_BYTES / sizeof(*words); i++) {
        words[i] = 0x9e3779b97f4a7c15ull * ((uint64_t)number << 32 | (i + 1));
    }
}

static void run(struct hifc_ns *ns, uint8_t op, uint32_t pool)
{
    struct hifc_req requests[VALUES] = {0};
    struct hifc_ticket *ticket;
    for (uint32_t i = 0; i < VALUES; i++) {
        requests[i].op = op;
        requests[i].pool = pool;
        requests[i].key.bytes[0] = (uint8_t)(i + 1);
        requests[i].buffer_offset = (uint64_t)i * VALUE_BYTES;
        requests[i].length = VALUE_BYTES;
    }
    if (hifc_submit(ns, requests, VALUES, &ticket) != 0 || hifc_ticket_wait(ticket, -1) != 1) {
        die("hifc_submit");
    }
    hifc_ticket_free(ticket);
    for (uint32_t i = 0; i < VALUES; i++) {
        if (requests[i].status != HIFC_OK) {
            fprintf(stderr, "bar: op %u of value %u ended with %d\n", op, i, requests[i].status);
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    struct hifc_format_opts format = {.segment_size_bytes = 2u << 20, .force = 1};
    struct hifc_ns *ns;
    size_t size;
    uint32_t pool;
    static uint64_t expected[VALUE_BYTES / sizeof(uint64_t)];
    if (argc != 3) {
        fprintf(stderr, "usage: bar URI RESOURCE\n");
        return 2;
    }
    char *bar = map_bar(argv[2], &size);
    if (hifc_format(argv[1], &format) != 0 || hifc_open(argv[1], NULL, &ns) != 0) {
        die(argv[1]);
    }
    if (hifc_pool_register(ns, bar, size, &pool) != 0) {
        die("hifc_pool_register");
    }
    for (uint32_t i = 0; i < VALUES; i++) {
        fill((uint64_t *)(bar + (size_t)i * VALUE_BYTES), i);
    }
    run(ns, HIFC_OP_PUT, pool);
    memset(bar, 0, (size_t)VALUES * VALUE_BYTES);
    run(ns, HIFC_OP_GET, pool);
    for (uint32_t i = 0; i < VALUES; i++) {
        fill(expected, i);
        if (memcmp(expected, bar + (size_t)i * VALUE_BYTES, VALUE_BYTES) != 0) {
            fprintf(stderr, "bar: value %u came back wrong\n", i);
            return 1;
        }
    }
    if (hifc_pool_unregister(ns, pool) != 0) {
        die("hifc_pool_unregister");
    }
    return hifc_close(ns) == 0 ? 0 : 1;
}
