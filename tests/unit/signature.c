/* SPDX-License-Identifier: Apache-2.0
 *
 * What is recognised on a device: marks made by hand for every kind, and the real tools' images
 * where mkfs.ext4 and mkswap are installed. Each case is one that format would otherwise destroy.
 */
#include "memory_io.h"
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#include "format/superblock.c"
#include "format/signature.c"

#include <unistd.h>

#define SIZE_BYTES (32u << 20)

static const char *signature_of(struct hifc_blockio *io)
{
    int error = 1;
    const char *name = hifc_signature(io, &error);
    CHECK_EQ(error, 0);
    return name;
}

static void expect(struct hifc_blockio *io, int64_t offset, const void *mark, uint64_t bytes,
                   const char *word)
{
    int64_t at = offset < 0 ? (int64_t)io->device.geometry.size_bytes + offset : offset;
    memcpy(io->memory + at, mark, bytes);
    const char *name = signature_of(io);
    if (!name || !strstr(name, word)) {
        fprintf(stderr, "%s at %" PRId64 ": found %s\n", word, offset, name ? name : "nothing");
        abort();
    }
    memset(io->memory + at, 0, bytes);
    CHECK(signature_of(io) == NULL);
}

TEST(an_empty_device_and_random_bytes_have_no_signature)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
    CHECK(signature_of(io) == NULL);
    uint64_t x = 1;
    for (uint64_t i = 0; i < SIZE_BYTES; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        io->memory[i] = (uint8_t)(x >> 56);
    }
    io->memory[511] = 0;
    CHECK(signature_of(io) == NULL);
    memory_io_free(io);
}

TEST(tiny_devices_are_looked_at_without_reading_outside)
{
    for (uint64_t size = 512; size <= 2u << 20; size += size / 1024 * 512 + 512) {
        struct hifc_blockio *io = memory_io_new(size, 512);
        CHECK(signature_of(io) == NULL);
        if (size >= 4096) {
            expect(io, 0, "XFSB", 4, "xfs");
        }
        memory_io_free(io);
    }
}

TEST(every_mark_is_recognised)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        expect(io, marks[i].offset, marks[i].mark, marks[i].bytes, marks[i].name);
    }
    expect(io, 0, "LUKS\xba\xbe\0\2", 8, "LUKS");
    expect(io, 512, "LABELONE", 8, "LVM");
    expect(io, 65536 + 64, "_BHRfS_M", 8, "btrfs");
    memory_io_free(io);
}

TEST(md_is_recognised_at_all_its_places)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
    expect(io, 0, "\xfc\x4e\x2b\xa9", 4, "md");
    expect(io, 4096, "\xfc\x4e\x2b\xa9", 4, "md");
    expect(io, -8192, "\xfc\x4e\x2b\xa9", 4, "md");
    expect(io, -65536, "\xfc\x4e\x2b\xa9", 4, "md");
    expect(io, -65536, "\xa9\x2b\x4e\xfc", 4, "md");
    memory_io_free(io);
    io = memory_io_new(SIZE_BYTES + 3 * 512, 512); /* a last page that is not whole */
    expect(io, (int64_t)SIZE_BYTES - 8192, "\xfc\x4e\x2b\xa9", 4, "md");
    expect(io, (int64_t)SIZE_BYTES - 65536, "\xfc\x4e\x2b\xa9", 4, "md");
    memory_io_free(io);
}

TEST(zfs_is_recognised_by_any_of_its_four_labels)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES + 12288, 512);
    const int64_t starts[] = {0, 256 * KIB, SIZE_BYTES - 512 * KIB, SIZE_BYTES - 256 * KIB};
    for (unsigned i = 0; i < 4; i++) {
        expect(io, starts[i] + 128 * KIB, "\x0c\xb1\xba\0\0\0\0\0", 8, "ZFS");
        expect(io, starts[i] + 200 * KIB, "\x0c\xb1\xba\0\0\0\0\0", 8, "ZFS");
        expect(io, starts[i] + 255 * KIB, "\0\0\0\0\0\xba\xb1\x0c", 8, "ZFS");
    }
    memory_io_free(io);
}

TEST(ext_generations_are_told_apart)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
    uint8_t sb[128] = {0};
    sb[56] = 0x53;
    sb[57] = 0xef;
    expect(io, 1024, sb, sizeof sb, "ext2");
    sb[92] = 0x04;
    expect(io, 1024, sb, sizeof sb, "ext3");
    sb[96] = 0x40;
    expect(io, 1024, sb, sizeof sb, "ext4");
    memory_io_free(io);
}

TEST(partition_tables_and_boot_sectors_are_recognised)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
    uint8_t sector[512] = {0};
    sector[510] = 0x55;
    sector[511] = 0xaa;
    expect(io, 0, sector, sizeof sector, "boot sector");
    sector[446 + 16 + 4] = 0x83;
    sector[446 + 16 + 12] = 1;
    expect(io, 0, sector, sizeof sector, "MBR");
    memcpy(io->memory + 512, "EFI PART", 8);
    memcpy(io->memory, sector, sizeof sector); /* protective */
    CHECK(strstr(signature_of(io), "GPT"));
    memory_io_free(io);
}

TEST(an_unreadable_end_is_an_error)
{
    for (unsigned end = 0; end < 2; end++) {
        struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
        io->bad_from = end ? SIZE_BYTES - 512 : 0;
        io->bad_bytes = 512;
        int error = 0;
        CHECK(hifc_signature(io, &error) == NULL);
        CHECK_EQ(error, -EIO);
        memory_io_free(io);
    }
}

static int names_of(const struct hifc_blockio *io, char *out, size_t out_bytes)
{
    uint64_t size = io->device.geometry.size_bytes, whole = size / 4096 * 4096;
    uint64_t edge = whole < HIFC_EDGE_BYTES ? whole : HIFC_EDGE_BYTES;
    return hifc_signatures(io->memory, io->memory + whole - edge, edge, size, out, out_bytes);
}

TEST(all_signatures_are_named_once_each)
{
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES + 512, 512);
    char out[4096];
    CHECK_EQ(names_of(io, out, sizeof out), 0);
    CHECK(strcmp(out, "") == 0);
    memcpy(io->memory, "XFSB", 4);
    memcpy(io->memory + 512, "EFI PART", 8);
    memcpy(io->memory + 4096, "EFI PART", 8); /* the same name again */
    memcpy(io->memory + SIZE_BYTES + 512 - 65536 - 512, "\xfc\x4e\x2b\xa9", 4); /* md 0.90 */
    memcpy(io->memory + 510, "\x55\xaa", 2);
    CHECK_EQ(names_of(io, out, sizeof out), 4);
    CHECK(strcmp(out, "an md RAID member\nan xfs file system\na GPT partition table\na boot sector")
          == 0);
    CHECK_EQ(names_of(io, out, 40), -ENOSPC);
    CHECK_EQ(hifc_signatures(io->memory, io->memory, 4096, SIZE_BYTES, out, sizeof out), -EINVAL);
    memory_io_free(io);
}

TEST(a_small_device_shows_all_of_itself)
{
    struct hifc_blockio *io = memory_io_new(8192, 512);
    char out[128];
    memcpy(io->memory, "XFSB", 4);
    CHECK_EQ(names_of(io, out, sizeof out), 1);
    CHECK(strcmp(out, "an xfs file system") == 0);
    memory_io_free(io);
}

/* Runs a tool on an image and looks at what it wrote. False: the tool is not installed. */
static bool made_by(const char *tool, const char *command, const char *word)
{
    char path[] = "/tmp/hifc-signature-XXXXXX", line[512];
    if (access(tool, X_OK) != 0) {
        fprintf(stderr, "  skipped: no %s\n", tool);
        return false;
    }
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_EQ(ftruncate(fd, SIZE_BYTES), 0);
    snprintf(line, sizeof line, "%s %s %s >/dev/null 2>&1", tool, command, path);
    CHECK_EQ(system(line), 0);
    struct hifc_blockio *io = memory_io_new(SIZE_BYTES, 512);
    CHECK_EQ(pread(fd, io->memory, SIZE_BYTES, 0), SIZE_BYTES);
    const char *name = signature_of(io);
    CHECK(name && strstr(name, word));
    memory_io_free(io);
    close(fd);
    unlink(path);
    return true;
}

TEST(images_of_the_real_tools_are_recognised)
{
    made_by("/usr/sbin/mkfs.ext4", "-q -F -t ext4", "ext4");
    made_by("/usr/sbin/mkfs.ext4", "-q -F -t ext3", "ext3");
    made_by("/usr/sbin/mkfs.ext4", "-q -F -t ext2", "ext2");
    made_by("/usr/sbin/mkswap", "", "swap");
    made_by("/usr/sbin/mkfs.xfs", "-q -f", "xfs");
    made_by("/usr/sbin/mkfs.btrfs", "-q -f", "btrfs");
    made_by("/usr/sbin/mkfs.vfat", "", "vfat");
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
