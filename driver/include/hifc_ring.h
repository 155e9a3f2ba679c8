/* SPDX-License-Identifier: Apache-2.0
 *
 * hifc_ring.h - the layout of a request ring, for every program that writes one: C, C++, Python
 * and kernels. hifc.h includes it; a kernel that is compiled without standard headers defines
 * HIFC_RING_NO_STDINT and its own uint8_t to uint64_t and int32_t, and includes this file
 * alone.
 *
 * A ring is one region of host memory (a memfd; a GPU maps it with cudaHostRegister). It begins
 * with struct hifc_ring_header, which tells where the slots and the status words stand.
 * Producers put descriptors into slots, each one read that somebody will want soon; the thread
 * that drives the namespace takes them out, reads, verifies, and stores the answer in the
 * descriptor's status word. One ring belongs to one producing side: either the host's threads,
 * or the kernels of one GPU.
 *
 * Positions are free-running 64-bit counts. Position p is slot p % slots in lap (uint32_t)(p /
 * slots + 1); HIFC_RING_LAP and HIFC_RING_SLOT say so in C. Slots start as zeros.
 *
 * To produce n descriptors
 *   1. Load `head` (acquire, system scope). It is the credit: there is room for n where tail +
 *      n - head <= slots.
 *   2. Claim positions [tail, tail + n) by compare-and-swap of tail to tail + n, and only where
 *      there is room: never by an addition that could run past the credit. The host's threads
 *      share `tail` of the header; a GPU keeps its own in its own memory and leaves the
 *      header's alone. Where there is no room the descriptors are lost: add them to
 *      `overflowed` (a GPU, its ring's only producer, stores its running total there), and do
 *      not wait for room.
 *   3. For each, store HIFC_RING_WAITING in its status word, then the first 28 bytes of the
 *      descriptor, all with plain stores.
 *   4. Last, store the lap in `sequence` with release order: memory_order_release on the host,
 *      system scope on a GPU (st.release.sys). That publishes what step 3 wrote. No fence is
 *      needed or used.
 *
 * The consumer loads `sequence` with acquire order, and only where it is the lap that it
 * expects it reads the other 28 bytes, once, into memory of its own. It stores `head` with
 * release order after that, so a slot is written again only after it was read. It writes the
 * answer to the status word with release order, after the data: who loads the word with acquire
 * order (ld.acquire.sys) and finds another value than HIFC_RING_WAITING sees the data. A kernel
 * never waits for a word; it looks once and goes on.
 *
 * A status word belongs to its descriptor from step 3 until its answer. A second descriptor
 * that names it meanwhile is dropped as a duplicate if it is the same in key, parts and place,
 * and is otherwise bad, counted, and has no word to be answered in.
 *
 * Nothing in the region is trusted. The consumer keeps geometry, head and laps for itself and
 * checks every descriptor like any outside input. A sequence that is neither the expected lap
 * nor what stood there before is a torn or foreign write: the slot is skipped, counted, and
 * answered -ESTALE.
 */
#ifndef HIFC_RING_H
#define HIFC_RING_H

#ifndef HIFC_RING_NO_STDINT
#include <stdint.h>
#endif

#define HIFC_RING_MAGIC 0x676e695243466948ull /* "HiFCRing" in memory */
#define HIFC_RING_VERSION 1u
#define HIFC_RING_PAGE_BYTES 4096u /* of `place` */
#define HIFC_RING_SLOTS_MIN 16u
#define HIFC_RING_SLOTS_MAX 65536u
#define HIFC_RING_STATUSES_MAX (1u << 24)

/* hifc_descriptor.control: a status index, and the operation. The four highest bits are zero. */
#define HIFC_RING_INDEX_MASK 0x00ffffffu
#define HIFC_RING_OP_SHIFT 24u
#define HIFC_RING_OP_MASK 0x0f000000u
/* Brings the parts of the key to the place; answered. */
#define HIFC_RING_OP_READ 1u
/* The read that owns the status index is not wanted any more: if it has not started it is answered
 * HIFC_RING_CANCELLED, otherwise it ends as it would have. Not answered itself; key, place and
 * parts are ignored. */
#define HIFC_RING_OP_CANCEL 2u
#define HIFC_RING_CONTROL(op, index) ((uint32_t)(op) << HIFC_RING_OP_SHIFT | (uint32_t)(index))

/* What a status word holds: HIFC_OK (0) when the data is there and verified, HIFC_MISS,
 * HIFC_PENDING and HIFC_RETRY as of `enum hifc_answer`, one of these, or a negative errno:
 *   -EINVAL    operation or reserved bits unknown
 *   -EFAULT    place outside the arena
 *   -ERANGE    no such parts
 *   -EMSGSIZE  more bytes than read_max_bytes, or than the arena has behind the place
 *   -ESTALE    a lap that cannot be
 *   -ESHUTDOWN the ring or its namespace was closed
 *   -EIO, -ENODEV, -EBADMSG as of a get */
#define HIFC_RING_WAITING 7 /* HIFC_IN_FLIGHT */
#define HIFC_RING_CANCELLED 8
#define HIFC_RING_DUPLICATE 9 /* already on its way, to the place of who asked first */
#define HIFC_RING_IDLE 10     /* no descriptor has used this word yet */

/* 32 bytes, aligned to 32. */
struct hifc_descriptor {
    uint8_t key[16];
    uint32_t place;      /* where the bytes go, in HIFC_RING_PAGE_BYTES from the arena's start */
    uint16_t first_part;
    uint16_t part_count; /* 0: the whole value, and first_part is 0 */
    uint32_t control;    /* HIFC_RING_CONTROL */
    uint32_t sequence;   /* the lap, stored last */
};

enum hifc_ring_state {
    HIFC_RING_OPEN = 1,
    HIFC_RING_CLOSING = 2, /* nothing is taken any more */
    HIFC_RING_CLOSED = 3   /* and everything that was taken has been answered */
};

/* 256 bytes at the start of the region. Offsets are from there. */
struct hifc_ring_header {
    uint64_t magic; /* HIFC_RING_MAGIC */
    uint32_t version;
    uint32_t slots;            /* a power of two */
    uint32_t statuses;         /* status words */
    uint32_t read_max_bytes;   /* no read writes more than this from its place on */
    uint64_t region_bytes;     /* whole pages */
    uint64_t slots_offset;     /* of struct hifc_descriptor[slots], on a page */
    uint64_t statuses_offset;  /* of int32_t[statuses], on a page */
    uint64_t arena_bytes;      /* memory that places count in; whole pages */
    uint64_t reserved;
    /* written by the consumer alone */
    uint64_t head;             /* positions before it have been taken */
    uint32_t answers;          /* status words stored so far, wraps; a futex word on the host */
    uint32_t state;            /* enum hifc_ring_state */
    uint8_t reserved_consumer[48];
    /* written by producers alone */
    uint64_t tail;             /* the next position to claim; the host's producers only */
    uint64_t overflowed;       /* descriptors that found no room */
    uint8_t reserved_producer[112];
};

#define HIFC_RING_SLOT(position, slots) ((uint32_t)((position) & ((slots) - 1u)))
#define HIFC_RING_LAP(position, slots) ((uint32_t)((position) / (slots) + 1u))

#ifdef __cplusplus
#define HIFC_RING_ASSERT(what) static_assert(what, #what)
#else
#define HIFC_RING_ASSERT(what) _Static_assert(what, #what)
#endif
HIFC_RING_ASSERT(sizeof(struct hifc_descriptor) == 32);
HIFC_RING_ASSERT(sizeof(struct hifc_ring_header) == 256);
#ifndef __CUDACC_RTC__ /* NVRTC 12 has no offsetof */
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_descriptor, place) == 16);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_descriptor, first_part) == 20);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_descriptor, control) == 24);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_descriptor, sequence) == 28);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_ring_header, slots_offset) == 32);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_ring_header, head) == 64);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_ring_header, answers) == 72);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_ring_header, tail) == 128);
HIFC_RING_ASSERT(__builtin_offsetof(struct hifc_ring_header, overflowed) == 136);
#endif
#undef HIFC_RING_ASSERT

#endif
