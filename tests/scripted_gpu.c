/* SPDX-License-Identifier: Apache-2.0
 *
 * scripted_gpu.c - stands in for libcuda.so.1 and libgdrapi.so.2, for the calls of hifc/staging/cuda.py and
 * hifc/staging/gdrcopy.py.
 *
 * Memory of its one GPU is a memfd, mapped once as kernels see it and once more by gdr_map, so that a
 * test sees whether both are one. Neither mapping begins where a careless caller would like. Each
 * call is a line on the descriptor that SCRIPT_LOG names, and the one that SCRIPT_FAIL names fails.
 * Both libraries are one file by two names, so that they share the memory. One thread.
 */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GPU_PAGE 65536ul
#define PIECE (2ul << 20)

struct handle {
    unsigned long h;
};

struct info {
    uint64_t va, mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1, wc_mapping : 1;
    int mapping_type;
};

static int memory = -1;        /* of the GPU */
static char *gpu_view;         /* as kernels see it */
static uint64_t pinned, pinned_bytes, registered;

/* 0, or code where the script says that this call fails. */
static int call(const char *name, int code)
{
    const char *log = getenv("SCRIPT_LOG"), *fail = getenv("SCRIPT_FAIL");
    if (log) {
        dprintf(atoi(log), "%s\n", name);
    }
    return fail && strcmp(fail, name) == 0 ? code : 0;
}

static int flag(const char *name)
{
    return getenv(name) ? atoi(getenv(name)) : 0;
}

/* Room at a multiple of 2 MiB. */
static char *room(size_t bytes)
{
    char *at = mmap(NULL, bytes + PIECE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return (char *)(((uintptr_t)at + PIECE - 1) & ~(PIECE - 1));
}

/* ---- libcuda --------------------------------------------------------------------------------- */

int cuInit(unsigned flags) { (void)flags; return call(__func__, 100); }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)(uintptr_t)(device + 1);
    return call(__func__, 2);
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return call(__func__, 3); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    (void)device;
    *flags = 0;
    *active = flag("SCRIPT_ACTIVE");
    return 0;
}
int cuCtxGetDevice(int *device) { (void)device; return 201; }
int cuCtxPushCurrent_v2(void *context) { (void)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; return 0; }
int cuGetErrorString(int code, const char **text)
{
    *text = code == 2 ? "out of memory" : "scripted";
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 116 ? !flag("SCRIPT_CONSUMER") : attribute == 117 ? 1
             : attribute == 118 ? flag("SCRIPT_ORDERING") : 0;
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    memory = memfd_create("gpu", MFD_CLOEXEC);
    if (ftruncate(memory, (off_t)(bytes + 4096)) != 0) {
        return 2;
    }
    gpu_view = room(bytes + 4096);
    mmap(gpu_view, bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0);
    *address = (uintptr_t)gpu_view + 4096;
    return call(__func__, 2);
}
int cuMemFree_v2(uint64_t address) { (void)address; return call(__func__, 3); }
int cuPointerSetAttribute(const void *value, int attribute, uint64_t address)
{
    (void)address;
    return attribute == 6 && *(const unsigned *)value == 1 ? call(__func__, 3) : 1;
}
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    registered = (uintptr_t)address;
    return flags == 3 && bytes % PIECE == 0 ? call(__func__, 3) : 1;
}
int cuMemHostUnregister(void *address)
{
    return (uintptr_t)address == registered ? call(__func__, 3) : 1;
}
int cuMemHostGetDevicePointer_v2(uint64_t *seen, void *address, unsigned flags)
{
    *seen = (uintptr_t)address + 0x10000000000ull;
    return flags == 0 ? call(__func__, 3) : 1;
}
int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    return target == 0 && scope == 100 ? call(__func__, 3) : 1;
}

/* ---- libgdrapi ------------------------------------------------------------------------------- */

void *gdr_open(void) { return call(__func__, 1) ? NULL : &memory; }
int gdr_close(void *session) { return session == &memory ? call(__func__, EIO) : EINVAL; }

int gdr_pin_buffer(void *session, unsigned long address, size_t bytes, uint64_t token,
                   uint32_t space, struct handle *handle)
{
    int rc = call(__func__, ENOMEM);
    if (session != &memory || address % GPU_PAGE || token || space) {
        return EINVAL;
    }
    pinned = address;
    pinned_bytes = bytes;
    handle->h = 77;
    return rc;
}
int gdr_unpin_buffer(void *session, struct handle handle)
{
    return session == &memory && handle.h == 77 ? call(__func__, EIO) : EINVAL;
}
int gdr_get_info_v2(void *session, struct handle handle, struct info *info)
{
    *info = (struct info){.va = pinned, .mapped_size = pinned_bytes, .page_size = 65536,
                          .mapped = 1, .wc_mapping = 1, .mapping_type = 1};
    return session == &memory && handle.h == 77 ? call(__func__, EIO) : EINVAL;
}
int gdr_map(void *session, struct handle handle, void **address, size_t bytes)
{
    int rc = call(__func__, EAGAIN);
    if (session != &memory || handle.h != 77) {
        return EINVAL;
    }
    *address = mmap(room(bytes) + 3 * 4096, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                    memory, (off_t)(pinned - (uintptr_t)gpu_view));
    return rc;
}
int gdr_unmap(void *session, struct handle handle, void *address, size_t bytes)
{
    (void)session;
    return handle.h == 77 ? call(__func__, munmap(address, bytes)) : EINVAL;
}
