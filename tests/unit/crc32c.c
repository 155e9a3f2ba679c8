/* SPDX-License-Identifier: Apache-2.0
 *
 * Every CRC-32C path against the definition, bit by bit, and against published values.
 *
 *   unit_crc32c speed    also prints GB/s and ns of the path in use (no bar: machines differ)
 */
#include "util/crc32c.h"

#include <time.h>

#include "check.h"
#include "util/crc32c_paths.h"

enum { BUFFER_BYTES = 40000 };
static uint8_t buffer[BUFFER_BYTES + 64];

static uint32_t by_definition(uint32_t crc, const uint8_t *data, size_t size_bytes)
{
    for (size_t i = 0; i < size_bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        }
    }
    return crc;
}

static uint64_t random_state = 0x9E3779B97F4A7C15ull;

static uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void fill_buffer(void)
{
    for (size_t i = 0; i < sizeof buffer; i++) {
        buffer[i] = (uint8_t)random_u64();
    }
}

TEST(published_values)
{
    uint8_t ascending[32], zeros[32] = {0};
    for (unsigned i = 0; i < 32; i++) {
        ascending[i] = (uint8_t)i;
    }
    for (unsigned i = 0; i < hifc_crc32c_path_count; i++) {
        const struct hifc_crc32c_path *path = &hifc_crc32c_paths[i];
        if (path->usable()) { /* RFC 3720 B.4, with its inversions */
            CHECK_EQ(~path->update(~0u, "123456789", 9), 0xE3069283u);
            CHECK_EQ(~path->update(~0u, zeros, 32), 0x8A9136AAu);
            CHECK_EQ(~path->update(~0u, ascending, 32), 0x46DD794Eu);
        }
    }
}

TEST(every_path_equals_the_definition_at_every_length_and_alignment)
{
    fill_buffer();
    for (unsigned i = 0; i < hifc_crc32c_path_count; i++) {
        const struct hifc_crc32c_path *path = &hifc_crc32c_paths[i];
        if (!path->usable()) {
            printf("%s is not usable on this machine\n", path->name);
            continue;
        }
        for (size_t size = 0; size < 1100; size++) {
            uint32_t start = (uint32_t)random_u64();
            const uint8_t *data = buffer + size % 9;
            CHECK_EQ(path->update(start, data, size), by_definition(start, data, size));
        }
        const size_t sizes[] = {4080, 4095, 4096, 4097, 16368, 16384, 20448, 32768, BUFFER_BYTES};
        for (unsigned k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
            uint32_t start = (uint32_t)random_u64();
            CHECK_EQ(path->update(start, buffer + k, sizes[k]),
                     by_definition(start, buffer + k, sizes[k]));
        }
    }
}

TEST(shift_appends_zeros)
{
    static const uint8_t zeros[8192];
    for (unsigned i = 0; i < hifc_crc32c_path_count; i++) {
        const struct hifc_crc32c_path *path = &hifc_crc32c_paths[i];
        for (uint64_t size = 0; path->usable() && size < sizeof zeros; size += 1 + size / 40) {
            uint32_t crc = (uint32_t)random_u64();
            CHECK_EQ(path->shift(crc, size), by_definition(crc, zeros, size));
        }
    }
}

TEST(shift_of_large_sizes_adds_up_and_paths_agree)
{
    for (unsigned k = 0; k < 500; k++) {
        uint64_t one = random_u64() >> (k % 60 + 2), two = random_u64() >> (k * 7 % 60 + 2);
        uint32_t crc = (uint32_t)random_u64();
        uint32_t expected = hifc_crc32c_paths[0].shift(crc, one + two);
        for (unsigned i = 0; i < hifc_crc32c_path_count; i++) {
            const struct hifc_crc32c_path *path = &hifc_crc32c_paths[i];
            if (path->usable()) {
                CHECK_EQ(path->shift(path->shift(crc, one), two), expected);
            }
        }
    }
    CHECK_EQ(hifc_crc32c_shift(0x12345678, 0), 0x12345678);
    CHECK_EQ(hifc_crc32c_shift(0, UINT64_MAX), 0);
    CHECK_EQ(hifc_crc32c_shift(1, UINT64_MAX), hifc_crc32c_paths[0].shift(1, UINT64_MAX));
}

TEST(chunks_in_any_order_combine)
{
    fill_buffer();
    uint32_t whole = hifc_crc32c_raw(buffer, BUFFER_BYTES), combined = 0;
    const size_t chunk = 4096;
    size_t last = (BUFFER_BYTES - 1) / chunk;
    for (size_t k = 0; k <= last; k++) {
        size_t start = (k * 7 % (last + 1)) * chunk;
        size_t end = start + chunk < BUFFER_BYTES ? start + chunk : BUFFER_BYTES;
        combined ^= hifc_crc32c_shift(hifc_crc32c_raw(buffer + start, end - start),
                                      BUFFER_BYTES - end);
    }
    CHECK_EQ(combined, whole);
    CHECK_EQ(hifc_crc32c_update(hifc_crc32c_update(0, buffer, 777), buffer + 777,
                                BUFFER_BYTES - 777), whole);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void print_speed(void)
{
    const size_t size_max = 128u << 20;
    uint8_t *data = malloc(size_max);
    CHECK(data);
    memset(data, 0x5a, size_max);
    volatile uint32_t sink = 0;
    const size_t sizes[] = {512, 4096, 131072, size_max};
    for (unsigned k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        double best = 1e9;
        for (int round = 0; round < 7; round++) {
            unsigned repeats = (unsigned)((128u << 20) / sizes[k]);
            double start = now_s();
            for (unsigned r = 0; r < repeats; r++) {
                sink = hifc_crc32c_raw(data, sizes[k]); /* no dependence: as in use */
            }
            double took = (now_s() - start) / repeats;
            best = took < best ? took : best;
        }
        printf("update of %zu bytes: %.1f GB/s\n", sizes[k], (double)sizes[k] / best * 1e-9);
    }
    const uint64_t shifts[] = {4096, 131072, 1048576 - 4096, 360u << 10, 0x1FFFFFFF};
    for (unsigned k = 0; k < sizeof shifts / sizeof shifts[0]; k++) {
        uint32_t crc = 1;
        double start = now_s();
        for (unsigned r = 0; r < 1000000; r++) {
            crc = hifc_crc32c_shift(crc, shifts[k]);
        }
        printf("shift by %" PRIu64 ": %.1f ns\n", shifts[k], (now_s() - start) * 1e3);
        sink = crc;
    }
    (void)sink;
    free(data);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "speed") == 0) {
        print_speed();
        return 0;
    }
    return check_main(argc, argv);
}
