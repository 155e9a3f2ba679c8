/* SPDX-License-Identifier: Apache-2.0
 *
 * format.c - lays an empty namespace on a device.
 *
 * Touches the superblock areas at both ends (so that no old signature survives) and the first page
 * of every segment, nothing else. What a crash leaves behind: until the old superblocks are gone
 * and flushed, the old namespace or parts of its superblocks; after that no namespace, until all
 * segment headers are flushed and the new superblocks are written. The new uuid seeds every
 * checksum, so nothing of an older namespace is ever taken for a part of the new one.
 *
 * Called by the thread that formats; blocking.
 */
#include "format/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "engine/engine.h"
#include "util/error.h"

#define SEGMENTS_AIM_MIN 64u
#define SEGMENTS_AIM_MAX 4096u
#define LARGE_DEVICE_BYTES (4ull << 30)
#define LARGE_SEGMENT_BYTES (64u << 20)

static uint64_t size_for(uint64_t segment_size_bytes, uint64_t segments)
{
    return HIFC_DATA_OFFSET_BYTES + HIFC_TAIL_BYTES + segments * segment_size_bytes;
}

/* 64 MiB on a device of 4 GiB and more, larger where that makes more than SEGMENTS_AIM_MAX;
 * otherwise as large as leaves SEGMENTS_AIM_MIN segments. */
static uint64_t choose_segment_size(uint64_t size_bytes)
{
    uint64_t segment = HIFC_SEGMENT_SIZE_MIN_BYTES;
    if (size_bytes >= LARGE_DEVICE_BYTES) {
        segment = LARGE_SEGMENT_BYTES;
        while (segment < HIFC_SEGMENT_SIZE_MAX_BYTES &&
               hifc_segment_count_for(size_bytes, segment) > SEGMENTS_AIM_MAX) {
            segment *= 2;
        }
        return segment;
    }
    while (hifc_segment_count_for(size_bytes, segment * 2) >= SEGMENTS_AIM_MIN) {
        segment *= 2;
    }
    return segment;
}

static int check_options(const struct hifc_device *device, const struct hifc_format_opts *opts)
{
    uint64_t segment = opts->segment_size_bytes;
    if (segment != 0 && (segment < HIFC_SEGMENT_SIZE_MIN_BYTES ||
                         segment > HIFC_SEGMENT_SIZE_MAX_BYTES || (segment & (segment - 1)) != 0)) {
        return hifc_fail(-EINVAL,
                         "segment_size_bytes is %" PRIu64 "; give a power of two from %u (256 KiB) "
                         "to %u (256 MiB), or 0 to have it chosen",
                         segment, HIFC_SEGMENT_SIZE_MIN_BYTES, HIFC_SEGMENT_SIZE_MAX_BYTES);
    }
    if (opts->check_only > 1) {
        return hifc_fail(-EINVAL, "hifc_format_opts.check_only is %" PRIu32 ": set it to 0 or 1",
                         opts->check_only);
    }
    if (!memchr(opts->label, '\0', sizeof opts->label)) {
        return hifc_fail(-EINVAL, "the label is longer than %zu bytes: shorten it",
                         sizeof opts->label - 1);
    }
    for (const char *c = opts->label; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 0x7f) {
            return hifc_fail(-EINVAL, "the label has the control character 0x%02x at %td: use text",
                             (unsigned char)*c, c - opts->label);
        }
    }
    uint32_t lba = device->geometry.lba_bytes;
    if (lba != 512 && lba != HIFC_PAGE_BYTES) {
        return hifc_fail(-EINVAL,
                         "%s has logical blocks of %" PRIu32 " bytes, HiFC needs 512 or 4096: "
                         "format the drive's namespace with such an LBA format and no metadata",
                         device->uri, lba);
    }
    return 0;
}

/* Fills sb's geometry. */
static int choose_geometry(const struct hifc_device *device, const struct hifc_format_opts *opts,
                           struct hifc_superblock *sb)
{
    uint64_t size = device->geometry.size_bytes / HIFC_PAGE_BYTES * HIFC_PAGE_BYTES;
    uint64_t segment = opts->segment_size_bytes ? opts->segment_size_bytes
                                                : choose_segment_size(size);
    uint32_t count = hifc_segment_count_for(size, segment);
    if (count < HIFC_SEGMENTS_MIN) {
        bool smaller = hifc_segment_count_for(size, HIFC_SEGMENT_SIZE_MIN_BYTES) >=
                       HIFC_SEGMENTS_MIN;
        return hifc_fail(-EINVAL,
                         "%s has %" PRIu64 " bytes, too few for %u segments of %" PRIu64
                         " bytes; the minimum is %" PRIu64 " bytes%s",
                         device->uri, device->geometry.size_bytes, HIFC_SEGMENTS_MIN, segment,
                         size_for(segment, HIFC_SEGMENTS_MIN),
                         smaller ? ", or choose smaller segments" : "");
    }
    if (count > HIFC_SEGMENTS_MAX) {
        bool larger = hifc_segment_count_for(size, HIFC_SEGMENT_SIZE_MAX_BYTES) <=
                      HIFC_SEGMENTS_MAX;
        return hifc_fail(-EFBIG,
                         "%s has room for %" PRIu32 " segments of %" PRIu64 " bytes, the limit is "
                         "%u; %s",
                         device->uri, count, segment, HIFC_SEGMENTS_MAX,
                         larger ? "choose larger segments (0 = chosen by the device's size)"
                                : "use a partition or drive namespace of at most 256 TiB");
    }
    sb->size_bytes = size;
    sb->segment_size_bytes = segment;
    sb->data_offset_bytes = HIFC_DATA_OFFSET_BYTES;
    sb->segment_count = count;
    sb->lba_bytes = device->geometry.lba_bytes;
    return 0;
}

static int new_uuid(uint8_t uuid[16])
{
    if (getrandom(uuid, 16, 0) != 16) {
        int code = -errno;
        return hifc_fail(code, "getrandom for the namespace's uuid: %s", strerror(-code));
    }
    uuid[6] = (uint8_t)(0x40 | (uuid[6] & 0x0f)); /* version 4, RFC 9562 */
    uuid[8] = (uint8_t)(0x80 | (uuid[8] & 0x3f));
    return 0;
}

/* Zeroes both superblock areas, and the last copies of a namespace that was laid when the device
 * was smaller; these were found by reading the first ones before. */
static int wipe(struct hifc_blockio *io, const struct hifc_superblock *sb, uint64_t old_size_bytes)
{
    uint8_t *zero = calloc(1, HIFC_DATA_OFFSET_BYTES);
    if (!zero) {
        return hifc_fail(-ENOMEM, "no memory to format");
    }
    int rc = hifc_blockio_write(io, 0, zero, HIFC_DATA_OFFSET_BYTES);
    if (rc == 0) {
        rc = hifc_blockio_write(io, sb->size_bytes - HIFC_TAIL_BYTES, zero, HIFC_TAIL_BYTES);
    }
    for (unsigned copy = 2; rc == 0 && old_size_bytes != 0 && copy < 4; copy++) {
        rc = hifc_blockio_write(io, hifc_superblock_offset(copy, old_size_bytes), zero,
                                HIFC_PAGE_BYTES);
    }
    free(zero);
    return rc ? rc : hifc_blockio_flush(io);
}

static int write_headers(struct hifc_blockio *io, const struct hifc_superblock *sb)
{
    for (uint32_t segment = 0; segment < sb->segment_count; segment++) {
        uint64_t offset = hifc_segment_offset(sb->segment_size_bytes, segment);
        struct hifc_segment_header header = {
            .generation = 1, .segment = segment, .state = HIFC_DISK_FREE};
        hifc_page_seal(&header, HIFC_MAGIC_SEGMENT, sb->uuid, offset, 0);
        int rc = hifc_blockio_write(io, offset, &header, sizeof header);
        if (rc != 0) {
            return rc;
        }
    }
    return hifc_blockio_flush(io);
}

/* Refuses what would destroy something without force. */
static int check_empty(struct hifc_blockio *io, bool force)
{
    int error = 0;
    const char *found = hifc_signature(io, &error);
    if (force) {
        return 0;
    }
    if (error) {
        return error;
    }
    return found ? hifc_fail(-EEXIST,
                             "%s holds %s: formatting would destroy it; name another device, or "
                             "force it",
                             hifc_blockio_device(io)->uri, found)
                 : 0;
}

int hifc_format_device(struct hifc_blockio *io, const struct hifc_format_opts *opts)
{
    static const struct hifc_format_opts defaults;
    const struct hifc_device *device = hifc_blockio_device(io);
    struct hifc_superblock sb = {.sequence = 1, .clean = 1}, old;
    uint64_t highest = 0, old_size_bytes = 0;

    opts = opts ? opts : &defaults;
    int rc = check_options(device, opts);
    if (rc == 0) {
        rc = choose_geometry(device, opts, &sb);
    }
    if (rc == 0) {
        rc = check_empty(io, opts->force);
    }
    if (rc == 0) {
        rc = new_uuid(sb.uuid);
    }
    if (rc != 0 || opts->check_only) {
        return rc;
    }
    memcpy(sb.label, opts->label, strlen(opts->label));
    if (hifc_superblock_read(io, &old, &highest) == 0) {
        old_size_bytes = old.size_bytes;
    }
    rc = wipe(io, &sb, old_size_bytes);
    if (rc == 0) {
        rc = write_headers(io, &sb);
    }
    if (rc == 0) {
        rc = hifc_superblock_write(io, &sb);
    }
    if (rc == 0) {
        rc = hifc_superblock_read(io, &old, &highest);
    }
    if (rc == 0 && memcmp(old.uuid, sb.uuid, sizeof sb.uuid) != 0) {
        rc = hifc_fail(-EIO, "%s: the new superblock did not read back: the device loses writes",
                       device->uri);
    }
    return rc;
}
