/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.h - the bytes of a namespace on its device. docs/format.md is the same in words.
 *
 * Little-endian, pages of 4 KiB. Every metadata page carries a CRC-32C in its `checksum` field,
 * computed over the page with that field zero and seeded with namespace uuid, device offset and
 * generation (the superblock: its offset alone), so that a page of another namespace, another
 * place or an earlier life of the segment never passes.
 *
 *   0            superblock copies 0 and 1 (at 0 and 64 KiB)
 *   1 MiB        segment 0, segment 1, ...
 *   end          superblock copies 2 and 3 (128 KiB and 64 KiB before the end)
 *
 * A segment: header page, append batches, gap, summary, footer page (its last page).
 */
#ifndef HIFC_LAYOUT_H
#define HIFC_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "hifc.h"

/* Fields are read and written as they lie in memory. NVMe's pages, too, are little-endian. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the processor is little-endian");

#define HIFC_FORMAT_VERSION 1u
#define HIFC_DATA_OFFSET_BYTES (1u << 20)
#define HIFC_TAIL_BYTES (128u << 10)
#define HIFC_SEGMENT_SIZE_MIN_BYTES (256u << 10)
#define HIFC_SEGMENT_SIZE_MAX_BYTES (256u << 20)
#define HIFC_SEGMENTS_MIN 12u
#define HIFC_SEGMENTS_MAX (1u << 20)
#define HIFC_UNIT_BYTES 16u /* granularity of a value's place */

#define HIFC_MAGIC_SUPER 0x5250555343464948ull   /* "HIFCSUPR" */
#define HIFC_MAGIC_SEGMENT 0x4d47455343464948ull /* "HIFCSEGM" */
#define HIFC_MAGIC_BATCH 0x4843544243464948ull   /* "HIFCBTCH" */
#define HIFC_MAGIC_FOOTER 0x544f4f4643464948ull  /* "HIFCFOOT" */

/* Every metadata page begins with this. */
struct hifc_page_head {
    uint64_t magic;
    uint32_t checksum;
    uint32_t version; /* HIFC_FORMAT_VERSION */
};

struct hifc_superblock {
    struct hifc_page_head head;
    uint8_t uuid[16];
    uint64_t sequence; /* of superblock updates; never goes back */
    uint64_t size_bytes;
    uint64_t segment_size_bytes;
    uint64_t data_offset_bytes;
    uint32_t segment_count;
    uint32_t lba_bytes;
    uint64_t features_compatible;
    uint64_t features_incompatible; /* an unknown bit refuses the open */
    uint64_t open_epoch;            /* counts writable opens */
    uint32_t clean;                 /* 1: closed in order */
    uint32_t reserved;
    char label[32];
    uint8_t padding[3960];
};
_Static_assert(sizeof(struct hifc_superblock) == HIFC_PAGE_BYTES, "one page");

enum hifc_segment_disk_state { HIFC_DISK_FREE = 1, HIFC_DISK_OPEN = 2 };

struct hifc_segment_header {
    struct hifc_page_head head; /* seeded with generation 0: the generation is read from here */
    uint64_t generation;        /* goes up each time the segment is freed */
    uint64_t epoch;             /* open epoch of the process that opened it */
    uint64_t open_sequence;     /* the batch sequence when it was opened */
    uint32_t segment;
    uint8_t state; /* enum hifc_segment_disk_state */
    uint8_t cls;   /* enum hifc_class */
    uint8_t reserved[2];
    uint8_t padding[4048];
};
_Static_assert(sizeof(struct hifc_segment_header) == HIFC_PAGE_BYTES, "one page");

enum hifc_entry_kind {
    HIFC_ENTRY_VALUE = 1,    /* its bytes stand in this batch */
    HIFC_ENTRY_RESERVED = 2, /* room in this batch, filled later; names no value yet */
    HIFC_ENTRY_PUBLISH = 3,  /* its bytes stand in room reserved earlier in this segment */
    HIFC_ENTRY_TOMBSTONE = 4 /* the key is gone */
};

struct hifc_disk_entry {
    struct hifc_key key;
    uint32_t offset;   /* within the segment, in units of 16 bytes */
    uint32_t length;   /* bytes */
    uint32_t checksum; /* bound to the key; reserved, tombstone: 0 */
    uint16_t part_count;
    uint8_t kind; /* enum hifc_entry_kind */
    uint8_t reserved;
};
_Static_assert(sizeof(struct hifc_disk_entry) == 32, "entries are 32 bytes");

#define HIFC_BATCH_ENTRIES_MAX 124u

struct hifc_batch_header {
    struct hifc_page_head head; /* seeded with the segment's generation */
    uint64_t generation;
    uint64_t epoch;
    uint64_t sequence;         /* of batches, over the whole namespace, never reused */
    uint64_t flushed_sequence; /* all batches up to it are known to be on stable media */
    uint32_t segment;
    uint32_t index;         /* of this batch within its segment, from 0 */
    uint32_t previous;      /* head.checksum of the batch before; index 0: of the segment header */
    uint32_t length_pages;  /* of the batch, this page included: where the next one begins */
    uint32_t entry_count;
    uint8_t reserved[60];
    struct hifc_disk_entry entries[HIFC_BATCH_ENTRIES_MAX];
};
_Static_assert(sizeof(struct hifc_batch_header) == HIFC_PAGE_BYTES, "one page");

/* An entry of the summary: kind is VALUE or TOMBSTONE, published values included. */
struct hifc_summary_entry {
    struct hifc_disk_entry entry;
    uint64_t sequence; /* of the batch that made it visible */
};
_Static_assert(sizeof(struct hifc_summary_entry) == 40, "summary entries are 40 bytes");

struct hifc_footer {
    struct hifc_page_head head; /* seeded with the segment's generation */
    uint64_t generation;
    uint64_t epoch;
    uint64_t first_sequence;
    uint64_t last_sequence;
    uint32_t segment;
    uint32_t entry_count;
    uint32_t batch_count;
    uint32_t chain;             /* head.checksum of the last batch */
    uint32_t summary_offset;    /* within the segment, in bytes; the summary ends at the footer */
    uint32_t summary_checksum;  /* raw CRC-32C over the entries, seeded as a page there */
    uint32_t used_bytes;        /* end of the last batch, within the segment */
    uint8_t cls;
    uint8_t reserved[3];
    uint8_t padding[4016];
};
_Static_assert(sizeof(struct hifc_footer) == HIFC_PAGE_BYTES, "one page");

/* bytes, rounded up to whole pages. */
static inline uint64_t hifc_whole_pages(uint64_t bytes)
{
    return (bytes + HIFC_PAGE_BYTES - 1) / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
}

/* What a summary of so many entries takes in its segment. */
static inline uint64_t hifc_summary_bytes(uint32_t entries)
{
    return hifc_whole_pages((uint64_t)entries * sizeof(struct hifc_summary_entry));
}

/* Completes head (magic, version, checksum) of a page that is to stand at offset_bytes. */
void hifc_page_seal(void *page, uint64_t magic, const uint8_t uuid[16], uint64_t offset_bytes,
                    uint64_t generation);
/* True if the page is what it says, where it says. Does not look at version. */
bool hifc_page_valid(const void *page, uint64_t magic, const uint8_t uuid[16],
                     uint64_t offset_bytes, uint64_t generation);
/* The checksum of a run of summary entries, seeded like a page. */
uint32_t hifc_summary_checksum(const struct hifc_summary_entry *entries, uint32_t count,
                               const uint8_t uuid[16], uint64_t offset_bytes, uint64_t generation);

/* A value's checksum: its raw CRC (of several parts: the raw CRC of the little-endian vector of
 * their raw CRCs), bound to key, length and part count. */
uint32_t hifc_bind_checksum(uint32_t raw, const struct hifc_key *key, uint32_t length,
                            uint32_t part_count);

/* Bytes that a value takes in a segment: the value, and with two parts or more the table of part
 * checksums (uint32_t each) behind it at the next multiple of 4. Payloads of a page or more are
 * rounded up to pages, smaller ones to 16 bytes. */
uint64_t hifc_extent_bytes(uint32_t length, uint32_t part_count);
/* Where the table stands, relative to the value. */
static inline uint64_t hifc_table_offset(uint32_t length)
{
    return ((uint64_t)length + 3u) & ~3ull;
}
/* An extent of a page or more starts on a page. */
static inline bool hifc_extent_on_pages(uint32_t length, uint32_t part_count)
{
    uint64_t table = part_count > 1 ? part_count * 4ull : 0;
    return (part_count > 1 ? hifc_table_offset(length) + table : length) >= HIFC_PAGE_BYTES;
}

/* ---- superblock (superblock.c) ---- */

struct hifc_device;
struct hifc_blockio;

#define HIFC_SUPERBLOCK_COPIES 4u
#define HIFC_SUPERBLOCK_DISTANCE_BYTES (64u << 10)

/* Offset of copy 0..3 on a device of size_bytes. */
uint64_t hifc_superblock_offset(unsigned copy, uint64_t size_bytes);
uint32_t hifc_segment_count_for(uint64_t size_bytes, uint64_t segment_size_bytes);
static inline uint64_t hifc_segment_offset(uint64_t segment_size_bytes, uint32_t segment)
{
    return HIFC_DATA_OFFSET_BYTES + (uint64_t)segment * segment_size_bytes;
}

/* Reads the four copies and takes the newest on which two agree; sb->sequence is that copy's,
 * *highest the highest sequence in any valid copy. -ENOMEDIUM: no HiFC namespace here (the message
 * names what is there instead, if it is known); -EPROTONOSUPPORT: newer version or unknown
 * feature; -EFBIG: the device is smaller than the namespace; -EUCLEAN: copies, but no two agree. */
int hifc_superblock_read(struct hifc_blockio *io, struct hifc_superblock *sb, uint64_t *highest);
/* Writes all four copies with sb->sequence: the two first, flush, the two last, flush (the other
 * way round where a cut update left the newest state in the two first only). */
int hifc_superblock_write(struct hifc_blockio *io, struct hifc_superblock *sb);
/* Names a foreign signature (file system, partition table, LVM, RAID, LUKS, ZFS, swap) or a HiFC
 * namespace in the device's first and last bytes; NULL when there is none, or a negative errno
 * in *error. */
const char *hifc_signature(struct hifc_blockio *io, int *error);

/* ---- format (format.c) ---- */
int hifc_format_device(struct hifc_blockio *io, const struct hifc_format_opts *opts);

#endif
