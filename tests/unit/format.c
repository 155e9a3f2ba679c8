/* SPDX-License-Identifier: Apache-2.0
 *
 * Format and superblock on memory with power cuts and unreadable places: geometry, refusals, and
 * that no cut leaves anything but the old namespace, no namespace, or the new one.
 */
#include "memory_io.h"
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#include "format/superblock.c"
#include "format/signature.c"
#include "admin/format.c"

#include "util/crc32c.h"

#define MIB (1ull << 20)
#define SMALLEST_BYTES (MIB + HIFC_TAIL_BYTES + 12 * 256 * KIB)

static struct hifc_error last;

static const char *message(void)
{
    hifc_last_error(&last);
    return last.message;
}

static struct hifc_superblock open_superblock(struct hifc_blockio *io)
{
    struct hifc_superblock sb;
    uint64_t highest;
    CHECK_EQ(hifc_superblock_read(io, &sb, &highest), 0);
    return sb;
}

static void check_headers(struct hifc_blockio *io, const struct hifc_superblock *sb)
{
    for (uint32_t i = 0; i < sb->segment_count; i++) {
        uint64_t at = hifc_segment_offset(sb->segment_size_bytes, i);
        CHECK(hifc_page_valid(io->memory + at, HIFC_MAGIC_SEGMENT, sb->uuid, at, 0));
        struct hifc_segment_header *header = (void *)(io->memory + at);
        CHECK_EQ(header->generation, 1);
        CHECK_EQ(header->segment, i);
        CHECK_EQ(header->state, HIFC_DISK_FREE);
    }
}

TEST(formats_and_reads_back)
{
    for (uint32_t lba = 512; lba <= 4096; lba *= 8) {
        struct hifc_blockio *io = memory_io_new(20 * MIB, lba);
        struct hifc_format_opts opts = {.label = "kv"};
        CHECK_EQ(hifc_format_device(io, &opts), 0);
        struct hifc_superblock sb = open_superblock(io);
        CHECK_EQ(sb.size_bytes, 20 * MIB);
        CHECK_EQ(sb.segment_size_bytes, 256 * KIB);
        CHECK_EQ(sb.segment_count, 75);
        CHECK_EQ(sb.lba_bytes, lba);
        CHECK_EQ(sb.sequence, 1);
        CHECK_EQ(sb.open_epoch, 0);
        CHECK(strcmp(sb.label, "kv") == 0);
        check_headers(io, &sb);
        CHECK_EQ(io->log_count, 0);
        memory_io_free(io);
    }
}

TEST(the_smallest_device_works_and_one_page_less_says_the_minimum)
{
    struct hifc_blockio *io = memory_io_new(SMALLEST_BYTES, 512);
    CHECK_EQ(hifc_format_device(io, NULL), 0);
    CHECK_EQ(open_superblock(io).segment_count, 12);
    memory_io_free(io);
    uint64_t sizes[] = {SMALLEST_BYTES - 512, 4096, 512, MIB};
    for (unsigned i = 0; i < 4; i++) {
        io = memory_io_new(sizes[i], 512);
        CHECK_EQ(hifc_format_device(io, NULL), -EINVAL);
        CHECK(strstr(message(), "minimum is 4325376 bytes"));
        CHECK_EQ(io->operations, 0);
        memory_io_free(io);
    }
}

TEST(chooses_segments_by_device_size)
{
    const uint64_t gib = 1024 * MIB;
    CHECK_EQ(choose_segment_size(SMALLEST_BYTES), 256 * KIB);
    CHECK_EQ(choose_segment_size(100 * MIB), MIB);
    CHECK_EQ(choose_segment_size(gib), 8 * MIB);
    CHECK_EQ(choose_segment_size(4 * gib), 64 * MIB);
    CHECK_EQ(choose_segment_size(250 * gib), 64 * MIB);
    CHECK_EQ(choose_segment_size(500 * gib), 128 * MIB);
    CHECK_EQ(choose_segment_size(8192 * gib), 256 * MIB);
    for (uint64_t size = 18 * MIB; size < 1024 * gib; size += size / 7) {
        uint32_t count = hifc_segment_count_for(size, choose_segment_size(size));
        CHECK(count >= 63 && count <= 4096);
    }
}

TEST(bad_options_are_named)
{
    struct hifc_blockio *io = memory_io_new(20 * MIB, 512);
    uint64_t sizes[] = {1, 128 * KIB, 300 * KIB, 512 * MIB, 1ull << 63};
    for (unsigned i = 0; i < 5; i++) {
        struct hifc_format_opts opts = {.segment_size_bytes = sizes[i]};
        CHECK_EQ(hifc_format_device(io, &opts), -EINVAL);
        CHECK(strstr(message(), "segment_size_bytes"));
    }
    struct hifc_format_opts large = {.segment_size_bytes = 2 * MIB};
    CHECK_EQ(hifc_format_device(io, &large), -EINVAL);
    CHECK(strstr(message(), "choose smaller segments"));
    struct hifc_format_opts long_label = {0};
    memset(long_label.label, 'x', sizeof long_label.label);
    CHECK_EQ(hifc_format_device(io, &long_label), -EINVAL);
    struct hifc_format_opts control = {.label = "a\nb"};
    CHECK_EQ(hifc_format_device(io, &control), -EINVAL);
    struct hifc_format_opts neither = {.check_only = 2};
    CHECK_EQ(hifc_format_device(io, &neither), -EINVAL);
    io->device.geometry.lba_bytes = 520;
    CHECK_EQ(hifc_format_device(io, NULL), -EINVAL);
    CHECK(strstr(message(), "520"));
    CHECK_EQ(io->operations, 0);
    memory_io_free(io);
}

TEST(too_many_segments_are_refused)
{
    struct hifc_superblock sb;
    struct hifc_device device = {.geometry = {.size_bytes = 1ull << 40, .lba_bytes = 512}};
    struct hifc_format_opts opts = {.segment_size_bytes = 256 * KIB};
    CHECK_EQ(choose_geometry(&device, &opts, &sb), -EFBIG);
    CHECK(strstr(message(), "larger segments"));
    device.geometry.size_bytes = 1ull << 49;
    opts.segment_size_bytes = 0;
    CHECK_EQ(choose_geometry(&device, &opts, &sb), -EFBIG);
    CHECK(strstr(message(), "256 TiB"));
}

TEST(refuses_what_is_there_without_force)
{
    struct hifc_blockio *io = memory_io_new(20 * MIB, 512);
    struct hifc_format_opts opts = {.label = "first"}, force = {.force = 1};
    CHECK_EQ(hifc_format_device(io, &opts), 0);
    struct hifc_superblock first = open_superblock(io);
    uint32_t operations = io->operations;
    CHECK_EQ(hifc_format_device(io, &opts), -EEXIST);
    CHECK(strstr(message(), "HiFC namespace with label 'first'"));
    CHECK_EQ(io->operations, operations);
    CHECK_EQ(hifc_format_device(io, &force), 0);
    struct hifc_superblock second = open_superblock(io);
    CHECK(memcmp(first.uuid, second.uuid, 16) != 0);
    check_headers(io, &second);

    memset(io->memory, 0, io->device.geometry.size_bytes);
    memcpy(io->memory + 1024 + 56, "\x53\xef", 2);
    memcpy(io->memory + 4096, "\xfc\x4e\x2b\xa9", 4);
    CHECK_EQ(hifc_format_device(io, NULL), -EEXIST);
    CHECK(strstr(message(), "ext2"));
    CHECK_EQ(hifc_format_device(io, &force), 0);
    int error;
    CHECK(strstr(hifc_signature(io, &error), "HiFC"));
    uint8_t zero[4] = {0};
    CHECK(memcmp(io->memory + 4096, zero, 4) == 0); /* no older mark shines through */
    memory_io_free(io);
}

TEST(an_unreadable_place_is_not_taken_for_an_empty_one)
{
    struct hifc_blockio *io = memory_io_new(20 * MIB, 512);
    io->bad_from = 20 * MIB - 4096;
    io->bad_bytes = 512;
    CHECK_EQ(hifc_format_device(io, NULL), -EIO);
    CHECK_EQ(io->operations, 0);
    struct hifc_superblock sb;
    uint64_t highest;
    io->bad_from = 0;
    CHECK_EQ(hifc_superblock_read(io, &sb, &highest), -EIO);
    memory_io_free(io);
}

TEST(any_two_copies_are_enough_and_one_is_not)
{
    struct hifc_blockio *io = memory_io_new(20 * MIB, 512);
    CHECK_EQ(hifc_format_device(io, NULL), 0);
    struct hifc_superblock sb;
    uint64_t highest;
    for (unsigned mask = 0; mask < 16; mask++) {
        memcpy(io->memory, io->media, io->device.geometry.size_bytes);
        for (unsigned copy = 0; copy < 4; copy++) {
            if (mask >> copy & 1) {
                io->memory[hifc_superblock_offset(copy, 20 * MIB) + 700] ^= 1;
            }
        }
        int damaged = __builtin_popcount(mask);
        CHECK_EQ(hifc_superblock_read(io, &sb, &highest), damaged <= 2 ? 0 : -EUCLEAN);
        int error = 0;
        CHECK(strstr(hifc_signature(io, &error), "HiFC"));
    }
    memory_io_free(io);
}

static void check_is_update(struct hifc_blockio *io, uint64_t old, uint64_t new, uint64_t *seen)
{
    struct hifc_superblock sb;
    uint64_t highest;
    CHECK_EQ(hifc_superblock_read(io, &sb, &highest), 0);
    CHECK(sb.sequence == old || sb.sequence == new);
    CHECK(highest >= sb.sequence && highest <= new);
    CHECK_EQ(sb.open_epoch, sb.sequence * 10);
    *seen |= 1ull << (sb.sequence == new);
}

TEST(an_update_cut_anywhere_leaves_the_old_or_the_new_superblock)
{
    struct hifc_blockio *io = memory_io_new(SMALLEST_BYTES, 512);
    CHECK_EQ(hifc_format_device(io, NULL), 0);
    struct hifc_superblock sb = open_superblock(io);
    sb.sequence = 2;
    sb.open_epoch = 20;
    CHECK_EQ(hifc_superblock_write(io, &sb), 0);
    uint64_t seen = 0;
    uint8_t *base = malloc(SMALLEST_BYTES);
    memcpy(base, io->media, SMALLEST_BYTES);
    for (uint32_t cut = 1; cut <= 6; cut++) {
        for (uint64_t seed = 0; seed < 200; seed++) {
            memcpy(io->memory, base, SMALLEST_BYTES);
            memcpy(io->media, base, SMALLEST_BYTES);
            sb.sequence = 3;
            sb.open_epoch = 30;
            io->operations = 0;
            io->cut = cut;
            CHECK_EQ(hifc_superblock_write(io, &sb), -EIO);
            memory_io_crash(io, seed * 7919 + cut);
            check_is_update(io, 2, 3, &seen);
            if (cut == 1 || seed % 50 == 0) {
                continue;
            }
            /* The next update starts from there and is cut, too. */
            struct hifc_superblock next;
            uint64_t highest, ignored;
            CHECK_EQ(hifc_superblock_read(io, &next, &highest), 0);
            uint64_t from = next.sequence;
            next.sequence = highest + 1;
            next.open_epoch = next.sequence * 10;
            io->operations = 0;
            io->cut = 1 + (uint32_t)seed % 6;
            hifc_superblock_write(io, &next);
            memory_io_crash(io, seed);
            check_is_update(io, from, highest + 1, &ignored);
        }
    }
    CHECK_EQ(seen, 3);
    free(base);
    memory_io_free(io);
}

TEST(a_format_cut_anywhere_leaves_the_old_none_or_the_new_namespace)
{
    const uint64_t size = SMALLEST_BYTES;
    struct hifc_blockio *io = memory_io_new(size, 512);
    struct hifc_format_opts force = {.force = 1};
    CHECK_EQ(hifc_format_device(io, NULL), 0);
    struct hifc_superblock old = open_superblock(io), sb;
    uint8_t *base = malloc(size);
    memcpy(base, io->media, size);
    uint64_t outcomes[3] = {0}, highest;
    uint32_t cut = 1;
    for (int rc = -EIO; rc != 0; cut++) {
        for (uint64_t seed = 0; seed < 8; seed++) {
            memcpy(io->memory, base, size);
            memcpy(io->media, base, size);
            io->operations = 0;
            io->cut = cut;
            rc = hifc_format_device(io, &force);
            memory_io_crash(io, seed * 104729 + cut);
            int opened = hifc_superblock_read(io, &sb, &highest);
            CHECK(opened == 0 || opened == -EUCLEAN || opened == -ENOMEDIUM);
            bool is_old = opened == 0 && memcmp(sb.uuid, old.uuid, 16) == 0;
            outcomes[opened ? 1 : is_old ? 0 : 2]++;
            if (opened == 0) {
                check_headers(io, &sb);
            }
            CHECK(rc != 0 || (opened == 0 && !is_old));
            CHECK_EQ(hifc_format_device(io, &force), 0); /* and can always be repeated */
        }
    }
    CHECK(outcomes[0] && outcomes[1] && outcomes[2]);
    CHECK(cut > 20);
    free(base);
    memory_io_free(io);
}

TEST(a_newer_version_or_feature_a_truncated_and_a_grown_device)
{
    struct hifc_blockio *io = memory_io_new(20 * MIB, 512);
    CHECK_EQ(hifc_format_device(io, NULL), 0);
    struct hifc_superblock sb = open_superblock(io), read;
    uint64_t highest;

    io->device.geometry.size_bytes = 19 * MIB;
    CHECK_EQ(hifc_superblock_read(io, &read, &highest), -EFBIG);
    CHECK(strstr(message(), "truncated"));
    io->memory[100] ^= 1; /* now a lone copy says so */
    CHECK_EQ(hifc_superblock_read(io, &read, &highest), -EFBIG);
    io->memory[100] ^= 1;
    io->device.geometry.size_bytes = 20 * MIB;

    sb.features_incompatible = 1ull << 40;
    CHECK_EQ(hifc_superblock_write(io, &sb), 0);
    CHECK_EQ(hifc_superblock_read(io, &read, &highest), -EPROTONOSUPPORT);
    CHECK(strstr(message(), "0x10000000000"));
    sb.features_incompatible = 0;
    sb.features_compatible = 1;
    CHECK_EQ(hifc_superblock_write(io, &sb), 0);
    CHECK_EQ(hifc_superblock_read(io, &read, &highest), 0);

    sb.segment_count = 76; /* one more than there is room for */
    CHECK_EQ(hifc_superblock_write(io, &sb), 0);
    CHECK_EQ(hifc_superblock_read(io, &read, &highest), -EUCLEAN);
    sb.segment_count = 75;

    sb.size_bytes = 18 * MIB; /* laid when the device was smaller */
    sb.segment_count = 60;
    memset(io->memory + 20 * MIB - HIFC_TAIL_BYTES, 0, HIFC_TAIL_BYTES);
    CHECK_EQ(hifc_superblock_write(io, &sb), 0);
    CHECK_EQ(hifc_superblock_read(io, &read, &highest), 0);
    struct hifc_format_opts force = {.force = 1};
    CHECK_EQ(hifc_format_device(io, &force), 0);
    CHECK_EQ(io->memory[18 * MIB - HIFC_TAIL_BYTES], 0); /* its last copies are gone, too */
    memory_io_free(io);
}

/* A newer library seals with its own number; the checksum rule stays. */
TEST(a_newer_format_version_is_refused)
{
    struct hifc_blockio *io = memory_io_new(20 * MIB, 512);
    CHECK_EQ(hifc_format_device(io, NULL), 0);
    for (unsigned copy = 0; copy < 4; copy++) {
        uint64_t offset = hifc_superblock_offset(copy, 20 * MIB);
        uint8_t *page = io->memory + offset;
        uint8_t seed[32] = {0}, zero[4] = {0};
        memcpy(seed + 16, &offset, 8);
        page[12] = HIFC_FORMAT_VERSION + 1;
        uint32_t crc = hifc_crc32c_update(UINT32_MAX, seed, sizeof seed);
        crc = hifc_crc32c_update(crc, page, 8);
        crc = hifc_crc32c_update(crc, zero, 4);
        crc = ~hifc_crc32c_update(crc, page + 12, HIFC_PAGE_BYTES - 12);
        memcpy(page + 8, &crc, 4);
    }
    struct hifc_superblock sb;
    uint64_t highest;
    CHECK_EQ(hifc_superblock_read(io, &sb, &highest), -EPROTONOSUPPORT);
    CHECK(strstr(message(), "version 2"));
    memory_io_free(io);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
