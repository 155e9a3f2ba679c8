/* SPDX-License-Identifier: Apache-2.0
 *
 * signature.c - what is on a device already: file systems, partition tables, volume managers,
 * RAID members, encryption, swap, and HiFC itself. It stands between `format` and somebody's data.
 *
 * A false alarm costs the operator one --force, a miss costs the data: marks are matched loosely,
 * and a place that cannot be read is an error, never "nothing there".
 *
 * Called by the thread that formats or opens; blocking. The name handed out belongs to the calling
 * thread until its next call.
 */
#include "format/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "util/error.h"

#define KIB 1024ll

struct view {
    const uint8_t *head, *tail;
    uint64_t edge_bytes;  /* of head, and of tail: HIFC_EDGE_BYTES, all of a smaller device */
    uint64_t whole_bytes; /* where tail ends: HiFC never touches what is no whole page */
    uint64_t size_bytes;
};

/* bytes bytes at offset, from the end where negative; NULL where the device has no such place. */
static const uint8_t *look(const struct view *view, int64_t offset, uint64_t bytes)
{
    uint64_t at = (uint64_t)offset;
    if (offset < 0) {
        if ((uint64_t)-offset > view->size_bytes) {
            return NULL;
        }
        at = view->size_bytes - (uint64_t)-offset;
    }
    if (at + bytes <= view->edge_bytes) {
        return view->head + at;
    }
    uint64_t tail_at = view->whole_bytes - view->edge_bytes;
    if (at >= tail_at && at + bytes <= view->whole_bytes) {
        return view->tail + (at - tail_at);
    }
    return NULL;
}

static bool matches(const struct view *view, int64_t offset, const void *mark, uint64_t bytes)
{
    const uint8_t *there = look(view, offset, bytes);
    return there && memcmp(there, mark, bytes) == 0;
}

static uint32_t load32(const uint8_t *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* ---- marks at fixed places ------------------------------------------------------------------ */

#define MARK(offset, text, name)                                                             \
    {                                                                                        \
        offset, sizeof(text) - 1, text, name                                                 \
    }

static const struct {
    int64_t offset;
    uint32_t bytes;
    const char *mark;
    const char *name;
} marks[] = {
    MARK(0, "XFSB", "an xfs file system"),
    MARK(64 * KIB + 64, "_BHRfS_M", "a btrfs file system"),
    MARK(0x36, "FAT12   ", "a vfat file system"),
    MARK(0x36, "FAT16   ", "a vfat file system"),
    MARK(0x52, "FAT32   ", "a vfat file system"),
    MARK(3, "NTFS    ", "an ntfs file system"),
    MARK(3, "EXFAT   ", "an exfat file system"),
    MARK(3, "ReFS\0\0\0", "a refs file system"),
    MARK(3, "-FVE-FS-", "a BitLocker volume"),
    MARK(4 * KIB - 10, "SWAPSPACE2", "a swap area"),
    MARK(4 * KIB - 10, "SWAP-SPACE", "a swap area"),
    MARK(8 * KIB - 10, "SWAPSPACE2", "a swap area"),
    MARK(16 * KIB - 10, "SWAPSPACE2", "a swap area"),
    MARK(32 * KIB - 10, "SWAPSPACE2", "a swap area"),
    MARK(64 * KIB - 10, "SWAPSPACE2", "a swap area"),
    MARK(4 * KIB - 10, "S1SUSPEND", "a hibernation image"),
    MARK(4 * KIB - 10, "S2SUSPEND", "a hibernation image"),
    MARK(0, "LABELONE", "an LVM physical volume"),
    MARK(512, "LABELONE", "an LVM physical volume"),
    MARK(1024, "LABELONE", "an LVM physical volume"),
    MARK(1536, "LABELONE", "an LVM physical volume"),
    MARK(0, "\xfc\x4e\x2b\xa9", "an md RAID member"), /* 1.1 */
    MARK(4 * KIB, "\xfc\x4e\x2b\xa9", "an md RAID member"), /* 1.2 */
    MARK(0, "LUKS\xba\xbe", "a LUKS volume"),
    MARK(16 * KIB, "SKUL\xba\xbe", "a LUKS volume"),
    MARK(32 * KIB, "SKUL\xba\xbe", "a LUKS volume"),
    MARK(64 * KIB, "SKUL\xba\xbe", "a LUKS volume"),
    MARK(128 * KIB, "SKUL\xba\xbe", "a LUKS volume"),
    MARK(256 * KIB, "SKUL\xba\xbe", "a LUKS volume"),
    MARK(512 * KIB, "SKUL\xba\xbe", "a LUKS volume"),
    MARK(4 * KIB + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
         "a bcache device"),
    MARK(4 * KIB + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
         "a bcachefs file system"),
    MARK(0, "hsqs", "a squashfs image"),
    MARK(1024, "\xe2\xe1\xf5\xe0", "an erofs image"),
    MARK(1024, "\x10\x20\xf5\xf2", "an f2fs file system"),
    MARK(1024, "H+\0\4", "an hfsplus file system"),
    MARK(32, "NXSB", "an apfs container"),
    MARK(32 * KIB, "JFS1", "a jfs file system"),
    MARK(32 * KIB + 1, "CD001", "an iso9660 image"),
    MARK(64 * KIB, "\x01\x16\x19\x70", "a gfs2 file system"),
    MARK(64 * KIB + 52, "ReIsEr", "a reiserfs file system"),
    MARK(0, "bluestore block device", "a Ceph BlueStore device"),
    MARK(0, "dmvdo001", "a VDO volume"),
    MARK(512, "EFI PART", "a GPT partition table"),
    MARK(4 * KIB, "EFI PART", "a GPT partition table"),
    MARK(-512, "EFI PART", "a GPT partition table (its copy at the end)"),
    MARK(-4 * KIB, "EFI PART", "a GPT partition table (its copy at the end)"),
};

/* ---- marks that need a look at more than one place ------------------------------------------ */

static const char *find_ext(const struct view *view)
{
    const uint8_t *sb = look(view, 1024, 1024);
    if (!sb || sb[56] != 0x53 || sb[57] != 0xef) {
        return NULL;
    }
    enum { HAS_JOURNAL = 0x4, EXTENTS = 0x40, BITS64 = 0x80, FLEX_BG = 0x200 };
    if (load32(sb + 96) & (EXTENTS | BITS64 | FLEX_BG)) {
        return "an ext4 file system";
    }
    return load32(sb + 92) & HAS_JOURNAL ? "an ext3 file system" : "an ext2 file system";
}

/* md 1.0 stands 8 to 12 KiB before the end, 0.90 64 to 128 KiB, in either byte order. */
static const char *find_md(const struct view *view)
{
    static const uint8_t little[] = {0xfc, 0x4e, 0x2b, 0xa9}, big[] = {0xa9, 0x2b, 0x4e, 0xfc};
    int64_t sectors = (int64_t)(view->size_bytes / 512);
    int64_t end_1_0 = ((sectors - 16) & ~7ll) * 512;
    int64_t end_0_90 = ((int64_t)view->size_bytes & ~(64 * KIB - 1)) - 64 * KIB;
    bool found = (end_1_0 > 0 && matches(view, end_1_0, little, 4)) ||
                 (end_0_90 > 0 && (matches(view, end_0_90, little, 4) ||
                                   matches(view, end_0_90, big, 4)));
    return found ? "an md RAID member" : NULL;
}

/* Four labels of 256 KiB, two at either end; each ends with a ring of uberblocks. */
static const char *find_zfs(const struct view *view)
{
    static const uint8_t little[] = {0x0c, 0xb1, 0xba, 0x00}, big[] = {0x00, 0xba, 0xb1, 0x0c};
    int64_t label = 256 * KIB, end = (int64_t)view->size_bytes / label * label;
    int64_t at[] = {0, label, end - 2 * label, end - label};
    for (unsigned i = 0; i < 4; i++) {
        for (int64_t ring = 128 * KIB; at[i] >= 0 && ring < label; ring += KIB) {
            if (matches(view, at[i] + ring, little, 4) ||
                matches(view, at[i] + ring + 4, big, 4)) {
                return "a ZFS pool member";
            }
        }
    }
    return NULL;
}

/* An MBR has nothing but 0x55aa of its own: it counts with a partition in use in it. */
static const char *find_mbr(const struct view *view)
{
    const uint8_t *sector = look(view, 0, 512);
    if (!sector || sector[510] != 0x55 || sector[511] != 0xaa) {
        return NULL;
    }
    bool used = false;
    for (const uint8_t *entry = sector + 446; entry < sector + 510; entry += 16) {
        used |= entry[4] != 0 && load32(entry + 12) != 0;
    }
    return used ? "an MBR partition table" : "a boot sector";
}

static const char *find_hifc(const struct view *view)
{
    static _Thread_local char name[128];
    const char *result = NULL;
    for (unsigned copy = 0; copy < 4; copy++) {
        uint64_t offset = hifc_superblock_offset(copy, view->size_bytes);
        const uint8_t *page = look(view, (int64_t)offset, HIFC_PAGE_BYTES);
        if (page && hifc_page_valid(page, HIFC_MAGIC_SUPER, NULL, offset, 0)) {
            struct hifc_superblock sb;
            memcpy(&sb, page, sizeof sb);
            snprintf(name, sizeof name, "a HiFC namespace with label '%.*s'", (int)sizeof sb.label,
                     sb.label);
            return name;
        }
        uint64_t magic = 0;
        if (page) {
            memcpy(&magic, page, sizeof magic);
        }
        if (magic == HIFC_MAGIC_SUPER) {
            result = "a damaged HiFC namespace";
        }
    }
    return result;
}

static const char *(*const finders[])(const struct view *) = {find_hifc, find_ext, find_md,
                                                              find_zfs};
#define FINDER_COUNT (sizeof finders / sizeof *finders)
#define MARK_COUNT (sizeof marks / sizeof *marks)

/* The next thing found: *step, 0 at first, tells where to go on. NULL at the end. */
static const char *find_next(const struct view *view, unsigned *step)
{
    const char *name = NULL;
    while (!name && *step <= FINDER_COUNT + MARK_COUNT) {
        unsigned i = (*step)++;
        if (i < FINDER_COUNT) {
            name = finders[i](view);
        } else if (i < FINDER_COUNT + MARK_COUNT) {
            const typeof(*marks) *mark = &marks[i - FINDER_COUNT];
            name = matches(view, mark->offset, mark->mark, mark->bytes) ? mark->name : NULL;
        } else {
            name = find_mbr(view);
        }
    }
    return name;
}

const char *hifc_signature(struct hifc_blockio *io, int *error)
{
    const struct hifc_device *device = hifc_blockio_device(io);
    uint64_t size_bytes = device->geometry.size_bytes;
    uint64_t whole_bytes = size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    uint64_t edge_bytes = whole_bytes < HIFC_EDGE_BYTES ? whole_bytes : HIFC_EDGE_BYTES;
    struct view view = {
        .edge_bytes = edge_bytes, .whole_bytes = whole_bytes, .size_bytes = size_bytes};
    const char *name = NULL;

    *error = 0;
    if (edge_bytes == 0) {
        return NULL;
    }
    uint8_t *both = malloc(2 * edge_bytes);
    if (!both) {
        *error = hifc_fail(-ENOMEM, "no memory to look at %s", device->uri);
        return NULL;
    }
    view.head = both;
    view.tail = both + edge_bytes;
    *error = hifc_blockio_read(io, 0, both, edge_bytes);
    if (*error == 0) {
        *error = hifc_blockio_read(io, whole_bytes - edge_bytes, both + edge_bytes, edge_bytes);
    }
    if (*error == 0) {
        unsigned step = 0;
        name = find_next(&view, &step);
    }
    free(both);
    return name;
}

/* Whether the lines written so far have that one already. */
static bool has_line(const char *lines, const char *name)
{
    size_t length = strlen(name);
    for (const char *line = lines; *line;) {
        size_t size = strcspn(line, "\n");
        if (size == length && memcmp(line, name, length) == 0) {
            return true;
        }
        line += size + (line[size] == '\n');
    }
    return false;
}

int hifc_signatures(const void *head, const void *tail, uint64_t edge_bytes, uint64_t size_bytes,
                    char *out, size_t out_bytes)
{
    uint64_t whole_bytes = size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    uint64_t wanted = whole_bytes < HIFC_EDGE_BYTES ? whole_bytes : HIFC_EDGE_BYTES;
    struct view view = {.head = head,
                        .tail = tail,
                        .edge_bytes = edge_bytes,
                        .whole_bytes = whole_bytes,
                        .size_bytes = size_bytes};
    unsigned step = 0;
    const char *found;
    char name[128];
    size_t used = 0;
    int count = 0;

    if (!head || !tail || !out || !out_bytes || edge_bytes != wanted) {
        return hifc_fail(-EINVAL, "hifc_signatures wants the first and the last %llu bytes of a "
                         "device of %llu", (unsigned long long)wanted,
                         (unsigned long long)size_bytes);
    }
    out[0] = '\0';
    while (wanted && (found = find_next(&view, &step))) {
        snprintf(name, sizeof name, "%s", found);
        for (char *c = name; *c; c++) {
            *c = (unsigned char)*c < ' ' ? '?' : *c; /* a label is anybody's bytes */
        }
        if (has_line(out, name)) {
            continue;
        }
        int size = snprintf(out + used, out_bytes - used, "%s%s", count ? "\n" : "", name);
        if (size < 0 || (size_t)size >= out_bytes - used) {
            return hifc_fail(-ENOSPC, "%zu bytes do not hold the names of all signatures",
                             out_bytes);
        }
        used += (size_t)size;
        count++;
    }
    return count;
}
