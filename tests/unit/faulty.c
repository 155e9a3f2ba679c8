/* SPDX-License-Identifier: Apache-2.0
 *
 * The faulty device: what each fault does, and what a cut may and may not lose.
 */
#include "unit/device_rig.h"
#include "faulty/faulty.h"
#include "faulty/faulty_state.h"
#include "faulty/overlay.h"
#include "device/ram.h"

#define LBAS 64u
#define BLOCK 4096u

static char uri[256];

static struct rig open_faulty(const char *params)
{
    snprintf(uri, sizeof(uri), "faulty+ram://f?size=256KiB&%s", params);
    return rig_open(uri, 0, 64);
}

/* What the medium holds after the cut. */
static void read_medium(uint8_t *memory)
{
    struct rig rig = rig_open("ram://f", HIFC_DEVICE_READ_ONLY, 1);
    CHECK_EQ(rig_read(&rig, 0, memory, LBAS * BLOCK), 0);
    rig_close(&rig);
}

/* The version of a block, 0 for a block never written, -1 for anything else. */
static int version_of(const uint8_t *memory, uint64_t lba)
{
    static const uint8_t zeroes[BLOCK];
    if (memcmp(memory + lba * BLOCK, zeroes, BLOCK) == 0) {
        return 0;
    }
    for (int version = 1; version < 10; version++) {
        if (rig_holds(memory + lba * BLOCK, lba * BLOCK, BLOCK, (uint64_t)version)) {
            return version;
        }
    }
    return -1;
}

static int write_lbas(struct rig *rig, uint64_t lba, uint32_t count, int version)
{
    uint8_t *memory = rig_memory(count * BLOCK);
    rig_fill(memory, lba * BLOCK, count * BLOCK, (uint64_t)version);
    int rc = rig_write(rig, lba * BLOCK, memory, count * BLOCK);
    free(memory);
    return rc;
}

TEST(without_faults_it_is_an_ordinary_device)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK);
    struct rig rig = open_faulty("fault_seed=1");
    CHECK(rig.device->geometry.volatile_write_cache);
    CHECK_EQ(write_lbas(&rig, 0, 8, 1), 0);
    CHECK_EQ(write_lbas(&rig, 4, 8, 2), 0);
    CHECK_EQ(hifc_faulty_unflushed(rig.device), 16);
    CHECK_EQ(rig_flush(&rig), 0);
    CHECK_EQ(hifc_faulty_unflushed(rig.device), 0);
    CHECK_EQ(write_lbas(&rig, 6, 1, 3), 0);
    CHECK_EQ(hifc_faulty_count(rig.device), 4);
    CHECK_EQ(rig_read(&rig, 0, memory, LBAS * BLOCK), 0);
    CHECK(hifc_faulty_find("f") == rig.device);
    rig_close(&rig);
    CHECK(hifc_faulty_find("f") == NULL);
    for (int pass = 0; pass < 2; pass++) {
        for (uint64_t lba = 0; lba < 16; lba++) {
            CHECK_EQ(version_of(memory, lba), lba == 6 ? 3 : lba < 4 ? 1 : lba < 12 ? 2 : 0);
        }
        read_medium(memory); /* a clean close moved all of it down */
    }
    free(memory);
    hifc_ram_drop("f");
}

/* Writes 1 to all, flushes, writes 2 and then 3 to some, and cuts. */
static void cut_after_overwrites(const char *params, int *versions)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK);
    struct rig rig = open_faulty(params);
    CHECK_EQ(write_lbas(&rig, 0, LBAS, 1), 0);
    CHECK_EQ(rig_flush(&rig), 0);
    CHECK_EQ(write_lbas(&rig, 16, 32, 2), 0);
    CHECK_EQ(write_lbas(&rig, 32, 16, 3), 0);
    hifc_faulty_cut(rig.device);
    CHECK(hifc_faulty_is_cut(rig.device));
    CHECK_EQ(rig_read(&rig, 0, memory, BLOCK), -EIO);
    CHECK_EQ(write_lbas(&rig, 0, 1, 4), -EIO);
    CHECK_EQ(rig_flush(&rig), -EIO);
    struct hifc_io io = rig_io(HIFC_IO_READ, 0, memory, BLOCK);
    rig_run(&rig, &io);
    CHECK_EQ(io.sct, 3);
    CHECK_EQ(io.sc, 0);
    rig_close(&rig); /* after a cut nothing more moves down */
    read_medium(memory);
    for (uint64_t lba = 0; lba < LBAS; lba++) {
        versions[lba] = version_of(memory, lba);
    }
    free(memory);
    hifc_ram_drop("f");
}

TEST(a_cut_keeps_what_was_flushed_and_any_subset_and_version_of_the_rest)
{
    uint32_t seen_16[4] = {0}, seen_32[4] = {0};
    for (int seed = 0; seed < 200; seed++) {
        char params[64];
        int versions[LBAS];
        snprintf(params, sizeof(params), "fault_drop=50&fault_seed=%d", seed);
        cut_after_overwrites(params, versions);
        for (uint64_t lba = 0; lba < LBAS; lba++) {
            bool twice = lba >= 32 && lba < 48, once = lba >= 16 && lba < 32;
            CHECK(versions[lba] >= 1);
            CHECK(versions[lba] <= (twice ? 3 : once ? 2 : 1));
        }
        seen_16[versions[16]]++;
        seen_32[versions[32]]++;
    }
    /* Half of the time the newest, a quarter the one before, a quarter the flushed one. */
    CHECK(seen_16[2] > 70 && seen_16[1] > 70);
    CHECK(seen_32[3] > 70 && seen_32[2] > 25 && seen_32[1] > 25);
}

TEST(drop_of_nothing_and_of_everything)
{
    int versions[LBAS];
    cut_after_overwrites("fault_drop=0", versions);
    CHECK(versions[0] == 1 && versions[16] == 2 && versions[32] == 3 && versions[47] == 3);
    cut_after_overwrites("fault_drop=100", versions);
    for (uint64_t lba = 0; lba < LBAS; lba++) {
        CHECK_EQ(versions[lba], 1);
    }
}

TEST(the_seed_alone_determines_the_outcome)
{
    int first[LBAS], second[LBAS], differ = 0;
    for (int seed = 0; seed < 20; seed++) {
        char params[64];
        snprintf(params, sizeof(params), "fault_seed=%d", seed);
        cut_after_overwrites(params, first);
        cut_after_overwrites(params, second);
        CHECK(memcmp(first, second, sizeof(first)) == 0);
        snprintf(params, sizeof(params), "fault_seed=%d", seed + 1000);
        cut_after_overwrites(params, second);
        differ += memcmp(first, second, sizeof(first)) != 0;
    }
    CHECK(differ > 10);
}

TEST(the_nth_write_or_flush_is_cut_and_may_be_torn)
{
    uint32_t torn = 0, whole = 0, nothing = 0;
    for (int seed = 0; seed < 100; seed++) {
        char params[96];
        uint8_t *memory = rig_memory(LBAS * BLOCK);
        snprintf(params, sizeof(params), "fault_cut_write=3&fault_seed=%d", seed);
        struct rig rig = open_faulty(params);
        CHECK_EQ(write_lbas(&rig, 0, 4, 1), 0);
        CHECK_EQ(rig_flush(&rig), 0);
        CHECK(!hifc_faulty_is_cut(rig.device));
        CHECK_EQ(write_lbas(&rig, 8, 4, 2), -EIO); /* the third */
        CHECK(hifc_faulty_is_cut(rig.device));
        CHECK_EQ(hifc_faulty_count(rig.device), 3);
        rig_close(&rig);
        read_medium(memory);
        int written = 0;
        for (uint64_t lba = 0; lba < 16; lba++) {
            int version = version_of(memory, lba);
            CHECK(lba < 4 ? version == 1 : version == 0 || (version == 2 && lba >= 8 && lba < 12));
            written += version == 2;
        }
        torn += written > 0 && written < 4;
        whole += written == 4;
        nothing += written == 0;
        free(memory);
        hifc_ram_drop("f");
    }
    CHECK(torn > 10 && whole > 10 && nothing > 10);
}

TEST(a_cut_flush_promises_nothing)
{
    uint32_t lost = 0;
    for (int seed = 0; seed < 20; seed++) {
        char params[96];
        uint8_t *memory = rig_memory(LBAS * BLOCK);
        snprintf(params, sizeof(params), "fault_cut_write=2&fault_drop=50&fault_seed=%d", seed);
        struct rig rig = open_faulty(params);
        CHECK_EQ(write_lbas(&rig, 0, 1, 1), 0);
        CHECK_EQ(rig_flush(&rig), -EIO);
        rig_close(&rig);
        read_medium(memory);
        lost += version_of(memory, 0) == 0;
        free(memory);
        hifc_ram_drop("f");
    }
    CHECK(lost > 3 && lost < 17);
}

TEST(commands_in_flight_at_a_cut_are_in_the_draw)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK);
    uint32_t reached = 0;
    for (int seed = 0; seed < 40; seed++) {
        char params[96];
        bool lossless = seed < 10; /* then all 16 reach the medium, wherever they wait */
        snprintf(params, sizeof(params), "fault_reorder=%d&fault_delay=%d&fault_drop=%d&"
                 "fault_seed=%d", seed & 1, seed % 3, lossless ? 0 : 50, seed);
        struct rig rig = open_faulty(params);
        struct hifc_io ios[16], *pointers[16];
        rig_fill(memory, 0, 16 * BLOCK, 1);
        for (int i = 0; i < 16; i++) {
            ios[i] = rig_io(HIFC_IO_WRITE, (uint64_t)i * BLOCK, memory + i * BLOCK, BLOCK);
            pointers[i] = &ios[i];
        }
        CHECK_EQ(rig.device->ops->submit(rig.qpair, pointers, 16), 16);
        hifc_faulty_cut_at(rig.device, 5);
        rig_completed = 0;
        rig_poll(&rig);
        rig_poll(&rig);
        rig_poll(&rig);
        rig_poll(&rig);
        CHECK_EQ(rig_completed, 16);
        int good = 0;
        for (int i = 0; i < 16; i++) {
            good += ios[i].error == 0;
        }
        CHECK_EQ(good, 4);
        rig_close(&rig);
        read_medium(memory);
        for (uint64_t lba = 0; lba < 16; lba++) {
            CHECK(version_of(memory, lba) >= (lossless ? 1 : 0));
            reached += !lossless && version_of(memory, lba) == 1;
        }
        hifc_ram_drop("f");
    }
    CHECK(reached > 30 * 16 * 2 / 5 && reached < 30 * 16 * 3 / 5);
    free(memory);
}

TEST(read_errors_and_flipped_bits)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK), *again = rig_memory(LBAS * BLOCK);
    struct rig rig = open_faulty("fault_read_error=4-5&fault_flip=9");
    CHECK_EQ(write_lbas(&rig, 0, 16, 1), 0);
    CHECK_EQ(rig_read(&rig, 0, memory, 4 * BLOCK), 0);
    struct hifc_io io = rig_io(HIFC_IO_READ, 3 * BLOCK, memory, 2 * BLOCK);
    CHECK_EQ(rig_run(&rig, &io), -EIO);
    CHECK_EQ(io.sct, 2);
    CHECK_EQ(io.sc, 0x81);
    CHECK_EQ(rig_read(&rig, 6 * BLOCK, memory + 6 * BLOCK, 10 * BLOCK), 0);
    CHECK_EQ(rig_read(&rig, 6 * BLOCK, again + 6 * BLOCK, 10 * BLOCK), 0);
    CHECK(memcmp(memory + 6 * BLOCK, again + 6 * BLOCK, 10 * BLOCK) == 0);
    int bits = 0;
    rig_fill(again, 0, LBAS * BLOCK, 1);
    for (uint32_t i = 6 * BLOCK; i < 16 * BLOCK; i++) {
        int here = __builtin_popcount(memory[i] ^ again[i]);
        CHECK(here == 0 || i / BLOCK == 9);
        bits += here;
    }
    CHECK_EQ(bits, 1);
    CHECK_EQ(hifc_faulty_read_error(rig.device, 20, 20), 0);
    CHECK_EQ(rig_read(&rig, 20 * BLOCK, memory, BLOCK), -EIO);
    CHECK_EQ(hifc_faulty_flip(rig.device, 0, 1), 0);
    CHECK_EQ(rig_read(&rig, 0, memory, BLOCK), 0);
    CHECK_EQ(version_of(memory, 0), -1);
    hifc_faulty_clear(rig.device);
    CHECK_EQ(rig_read(&rig, 0, memory, LBAS * BLOCK), 0);
    for (uint64_t lba = 0; lba < LBAS; lba++) {
        CHECK_EQ(version_of(memory, lba), lba < 16 ? 1 : 0);
    }
    rig_close(&rig);
    hifc_ram_drop("f");
    free(memory);
    free(again);
}

TEST(a_write_error_fails_one_command_only)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK);
    struct rig rig = open_faulty("fault_write_error=2");
    CHECK_EQ(write_lbas(&rig, 0, 2, 1), 0);
    uint8_t *bytes = rig_memory(8 * BLOCK);
    rig_fill(bytes, 8 * BLOCK, 8 * BLOCK, 1);
    struct hifc_io io = rig_io(HIFC_IO_WRITE, 8 * BLOCK, bytes, 8 * BLOCK);
    CHECK_EQ(rig_run(&rig, &io), -EIO);
    CHECK_EQ(io.sct, 2);
    CHECK_EQ(io.sc, 0x80);
    CHECK_EQ(write_lbas(&rig, 2, 2, 1), 0);
    CHECK_EQ(rig_flush(&rig), 0);
    hifc_faulty_write_error(rig.device, 5);
    CHECK_EQ(rig_flush(&rig), -EIO);
    CHECK_EQ(rig_flush(&rig), 0);
    CHECK_EQ(rig_read(&rig, 0, memory, LBAS * BLOCK), 0);
    int written = 0;
    for (uint64_t lba = 0; lba < 16; lba++) {
        CHECK_EQ(version_of(memory, lba) == 1, lba < 4 || version_of(memory, lba) != 0);
        written += lba >= 8 && version_of(memory, lba) == 1;
    }
    CHECK(written > 0 && written < 8); /* part of it landed, as it may */
    rig_close(&rig);
    hifc_ram_drop("f");
    free(bytes);
    free(memory);
}

static struct hifc_io *order[16];
static uint32_t order_count;

static void note_order(struct hifc_io *io)
{
    order[order_count++] = io;
    io->owner = io;
}

TEST(completions_come_late_and_out_of_order)
{
    uint8_t *memory = rig_memory(16 * BLOCK);
    struct rig rig = open_faulty("fault_delay=5&fault_reorder=1");
    struct hifc_io ios[16], *pointers[16];
    for (int i = 0; i < 16; i++) {
        ios[i] = rig_io(HIFC_IO_READ, (uint64_t)i * BLOCK, memory + i * BLOCK, BLOCK);
        ios[i].done = note_order;
        pointers[i] = &ios[i];
    }
    CHECK_EQ(rig.device->ops->submit(rig.qpair, pointers, 16), 16);
    int polls = 0, out_of_order = 0;
    while (order_count < 16) {
        CHECK(rig_poll(&rig) >= 0);
        CHECK(++polls <= 6);
    }
    for (int i = 0; i < 16; i++) {
        out_of_order += order[i] != &ios[i];
        CHECK_EQ(ios[i].error, 0);
    }
    CHECK(polls > 3);
    CHECK(out_of_order > 4);
    rig_close(&rig);
    hifc_ram_drop("f");
    free(memory);
}

TEST(a_command_that_hangs_times_out_and_leaves_the_others_alone)
{
    uint8_t *memory = rig_memory(BLOCK);
    struct rig rig = open_faulty("fault_hang=2");
    rig.device->ops->qpair_close(rig.qpair);
    CHECK_EQ(rig.device->ops->qpair_open(rig.device, 4, 50, &rig.qpair), 0);
    CHECK_EQ(rig_read(&rig, 0, memory, BLOCK), 0);
    double start = rig_now();
    struct hifc_io io = rig_io(HIFC_IO_READ, 0, memory, BLOCK), *pointer = &io;
    CHECK_EQ(rig.device->ops->submit(rig.qpair, &pointer, 1), 1);
    uint8_t *other = rig_memory(BLOCK);
    CHECK_EQ(rig_read(&rig, 0, other, BLOCK), 0);
    CHECK(io.owner == NULL);
    rig_wait(&rig, &io);
    CHECK_EQ(io.error, -ETIMEDOUT);
    CHECK(rig_now() - start > 0.04);
    rig_close(&rig);
    hifc_ram_drop("f");
    free(memory);
    free(other);
}

/* A block that was deallocated reads as anything, its neighbours as before. */
TEST(deallocated_blocks_are_not_to_be_trusted)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK);
    uint32_t zero = 0, kept = 0, ones = 0;
    struct rig rig = open_faulty("fault_seed=3");
    CHECK_EQ(write_lbas(&rig, 0, LBAS, 1), 0);
    CHECK_EQ(rig_deallocate(&rig, 8 * BLOCK, 40 * BLOCK), 0);
    CHECK_EQ(rig_read(&rig, 0, memory, LBAS * BLOCK), 0);
    for (uint64_t lba = 0; lba < LBAS; lba++) {
        int version = version_of(memory, lba);
        CHECK(version == 1 || (lba >= 8 && lba < 48));
        if (lba >= 8 && lba < 48) {
            zero += version == 0;
            kept += version == 1;
            ones += memory[lba * BLOCK] == 0xff;
        }
    }
    CHECK(zero > 4 && kept > 4 && ones > 4);
    CHECK_EQ(zero + kept + ones, 40);
    rig_close(&rig);
    hifc_ram_drop("f");
    free(memory);
}

/* The crash simulation opens thousands of these. */
TEST(thousands_of_images_come_and_go)
{
    enum { IMAGES = 2000 };
    uint8_t *memory = rig_memory(16 * BLOCK);
    for (int i = 0; i < IMAGES; i++) {
        snprintf(uri, sizeof(uri), "faulty+ram://f?size=4MiB&fault_cut_write=3&fault_seed=%d", i);
        struct rig rig = rig_open(uri, 0, 32);
        rig_write(&rig, 0, memory, 16 * BLOCK);
        rig_flush(&rig);
        rig_write(&rig, 16 * BLOCK, memory, 16 * BLOCK);
        CHECK(hifc_faulty_is_cut(rig.device));
        rig_close(&rig);
    }
    free(memory);
    hifc_ram_drop("f");
}

/* A cache that is full writes back; that is no flush, but nothing may be lost by it either. */
TEST(a_full_overlay_writes_back)
{
    uint8_t *memory = rig_memory(LBAS * BLOCK);
    struct rig rig = open_faulty("fault_drop=100");
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)rig.device;
    device->overlay.slots_max = 10;
    for (int version = 1; version < 4; version++) {
        CHECK_EQ(write_lbas(&rig, 0, 8, version), 0);
        CHECK_EQ(write_lbas(&rig, 32, 16, version), 0);
        CHECK(hifc_faulty_unflushed(rig.device) <= 10);
        CHECK_EQ(rig_read(&rig, 0, memory, LBAS * BLOCK), 0);
        for (uint64_t lba = 0; lba < LBAS; lba++) {
            bool written = lba < 8 || (lba >= 32 && lba < 48);
            CHECK_EQ(version_of(memory, lba), written ? version : 0);
        }
    }
    rig_close(&rig);
    hifc_ram_drop("f");
    free(memory);
}

TEST(an_overlay_of_a_large_device_is_sparse)
{
    struct hifc_overlay overlay;
    CHECK_EQ(hifc_overlay_init(&overlay, BLOCK, 1u << 30), 0);
    for (uint64_t i = 0; i < 1000; i++) {
        CHECK(hifc_overlay_put(&overlay, i * 1000) != NULL);
    }
    for (uint64_t i = 0; i < 1000; i++) {
        CHECK(hifc_overlay_get(&overlay, i * 1000) != NULL);
        CHECK(hifc_overlay_get(&overlay, i * 1000 + 1) == NULL);
    }
    hifc_overlay_free(&overlay);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
