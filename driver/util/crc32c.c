/* SPDX-License-Identifier: Apache-2.0
 *
 * crc32c.c - CRC-32C, by the processor's crc32 and carry-less multiplication where it has them (512 bits
 * wide where it has that), by tables where not.
 *
 * A CRC is a polynomial over GF(2) modulo P, stored reflected: bit 31 is the coefficient of x^0.
 * Appending n zero bytes multiplies by x^(8n). Two facts carry the fast path:
 *  - crc32 has a latency of three cycles and starts one a cycle, so three runs side by side are
 *    three times as fast as one; they are joined by multiplying the earlier ones by x^(8 * run);
 *  - the 64-bit carry-less product of a and b, put through crc32, is a * b * x^33 mod P (32 from
 *    crc32, one because the product of two reflected values is one place off). With constants that
 *    hold x^(n - 33), a multiplication is two instructions.
 *
 * Tables are built by a constructor, before main and before dlopen returns. Any thread.
 */
#include "util/crc32c.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "hifc.h"
#include "util/crc32c_paths.h"

#define CRC32C_POLYNOMIAL 0x82F63B78u
#define ONE 0x80000000u /* x^0 */

/* slices[k][byte]: the raw CRC of byte followed by k zero bytes. */
static uint32_t slices[8][256];
/* powers[i]: x^(8 * 2^i), what 2^i zero bytes multiply by. */
static uint32_t powers[64];

/* ---- portable ------------------------------------------------------------------------------- */

static uint32_t times_x(uint32_t a)
{
    return (a >> 1) ^ (a & 1 ? CRC32C_POLYNOMIAL : 0);
}

static uint32_t multiply_portable(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a; a <<= 1) {
        product ^= a & ONE ? b : 0;
        b = times_x(b);
    }
    return product;
}

static uint32_t shift_portable(uint32_t crc, uint64_t size_bytes)
{
    for (unsigned i = 0; crc && size_bytes >> i; i++) {
        if (size_bytes >> i & 1) {
            crc = multiply_portable(crc, powers[i]);
        }
        if (i == 63) {
            break;
        }
    }
    return crc;
}

static uint32_t update_portable(uint32_t crc, const void *data, size_t size_bytes)
{
    const uint8_t *p = data;
    for (; size_bytes >= 8; size_bytes -= 8, p += 8) {
        crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = slices[7][crc & 255] ^ slices[6][crc >> 8 & 255] ^ slices[5][crc >> 16 & 255] ^
              slices[4][crc >> 24] ^ slices[3][p[4]] ^ slices[2][p[5]] ^ slices[1][p[6]] ^
              slices[0][p[7]];
    }
    for (; size_bytes; size_bytes--) {
        crc = crc >> 8 ^ slices[0][(crc ^ *p++) & 255];
    }
    return crc;
}

static bool usable_portable(void)
{
    return true;
}

static void build_portable(void)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = times_x(crc);
        }
        slices[0][byte] = crc;
    }
    for (unsigned k = 1; k < 8; k++) {
        for (unsigned byte = 0; byte < 256; byte++) {
            uint32_t before = slices[k - 1][byte];
            slices[k][byte] = before >> 8 ^ slices[0][before & 255];
        }
    }
    powers[0] = ONE >> 8;
    for (unsigned i = 1; i < 64; i++) {
        powers[i] = multiply_portable(powers[i - 1], powers[i - 1]);
    }
}

/* ---- x86-64 with SSE 4.2 and PCLMULQDQ ------------------------------------------------------- */

#if defined(__x86_64__)
#define TARGET_SSE42 __attribute__((target("sse4.2,pclmul")))

/* nibbles[i][d]: x^(8 * d * 16^i - 33), so that a shift is one multiplication for each hexadecimal
 * digit of the size that is not zero: one to three for the sizes of chunks. */
static uint32_t nibbles[16][16];

/* Bytes of each of the three runs. 3 * 1360 is a page less 16 bytes, which one run ends quickly. */
enum { RUN_SIZES = 3, PREFETCH_BYTES = 1024 };
static const uint16_t run_bytes[RUN_SIZES] = {5456, 1360, 160};
/* x^(8 * run - 33) and x^(16 * run - 33) */
static uint32_t run_shift[RUN_SIZES][2];

static bool usable_sse42(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

TARGET_SSE42 static inline uint64_t product_sse42(uint32_t a, uint32_t b)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)a), _mm_cvtsi32_si128((int)b), 0);
    return (uint64_t)_mm_cvtsi128_si64(product);
}

TARGET_SSE42 static uint32_t shift_sse42(uint32_t crc, uint64_t size_bytes)
{
    while (size_bytes) {
        unsigned digit = (unsigned)__builtin_ctzll(size_bytes) / 4;
        unsigned value = size_bytes >> 4 * digit & 15;
        crc = (uint32_t)_mm_crc32_u64(0, product_sse42(crc, nibbles[digit][value]));
        size_bytes &= ~(15ull << 4 * digit);
    }
    return crc;
}

static inline uint64_t load64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* One round of three runs of run bytes each. */
TARGET_SSE42 static inline uint32_t three_runs(uint32_t crc, const uint8_t *p, size_t run,
                                               const uint32_t shift[2])
{
    uint64_t a = crc, b = 0, c = 0;
    for (const uint8_t *end = p + run; p < end; p += 8) {
        /* Three streams are more than the processor's own prefetcher follows well: from memory
         * this is a third faster, in cache it costs nothing. */
        _mm_prefetch((const char *)p + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)p + run + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)p + 2 * run + PREFETCH_BYTES, _MM_HINT_T0);
        a = _mm_crc32_u64(a, load64(p));
        b = _mm_crc32_u64(b, load64(p + run));
        c = _mm_crc32_u64(c, load64(p + 2 * run));
    }
    /* Both products are reduced by one crc32. */
    uint64_t joined = product_sse42((uint32_t)a, shift[1]) ^ product_sse42((uint32_t)b, shift[0]);
    return (uint32_t)(_mm_crc32_u64(0, joined) ^ c);
}

TARGET_SSE42 static uint32_t update_sse42(uint32_t crc, const void *data, size_t size_bytes)
{
    const uint8_t *p = data;
    for (unsigned i = 0; i < RUN_SIZES; i++) {
        size_t run = run_bytes[i];
        for (; size_bytes >= 3 * run; size_bytes -= 3 * run, p += 3 * run) {
            crc = three_runs(crc, p, run, run_shift[i]);
        }
    }
    uint64_t tail = crc;
    for (; size_bytes >= 8; size_bytes -= 8, p += 8) {
        tail = _mm_crc32_u64(tail, load64(p));
    }
    for (; size_bytes; size_bytes--) {
        tail = _mm_crc32_u8((uint32_t)tail, *p++);
    }
    return (uint32_t)tail;
}

static void build_sse42(uint32_t less_33)
{
    for (unsigned digit = 0; digit < 16; digit++) {
        for (uint64_t value = 0; value < 16; value++) {
            nibbles[digit][value] = shift_portable(less_33, value << 4 * digit);
        }
    }
    for (unsigned i = 0; i < RUN_SIZES; i++) {
        run_shift[i][0] = shift_portable(less_33, run_bytes[i]);
        run_shift[i][1] = shift_portable(less_33, 2ull * run_bytes[i]);
    }
}
#endif

/* ---- x86-64 with AVX-512 and VPCLMULQDQ ------------------------------------------------------ */

/* A block of 64 bytes stands for its message: multiplied by x^n and added to what follows n bits
 * later it may be dropped. In a lane of 128 bits the low half is x^64 times the high half's place,
 * and a carry-less product of reflected halves is one place off: hence x^(n + 63) and x^(n - 1), in
 * the upper half of 64 bits since they are reflected in 32. Four blocks go side by side, for the
 * latency of the multiplication; what is left in the end are 64 bytes for crc32. */
#if defined(__x86_64__)
#define TARGET_AVX512 __attribute__((target("avx512f,vpclmulqdq,sse4.2,pclmul")))

enum { BLOCK_BYTES = 64, STRIDE_BYTES = 4 * BLOCK_BYTES, AVX512_BYTES_MIN = 4 * STRIDE_BYTES };
/* Low and high half's factor for one block and for four. */
static uint64_t block_fold[2], stride_fold[2];

static bool usable_avx512(void)
{
    return usable_sse42() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("vpclmulqdq");
}

TARGET_AVX512 static inline __m512i fold(__m512i block, __m512i by, __m512i onto)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(block, by, 0x00),
                                     _mm512_clmulepi64_epi128(block, by, 0x11), onto, 0x96);
}

TARGET_AVX512 static inline uint64_t crc_of_lane(uint64_t crc, __m128i lane)
{
    crc = _mm_crc32_u64(crc, (uint64_t)_mm_cvtsi128_si64(lane));
    return _mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(lane, 1));
}

TARGET_AVX512 static inline __m512i factor(const uint64_t halves[2])
{
    return _mm512_set4_epi64((long long)halves[1], (long long)halves[0], (long long)halves[1],
                             (long long)halves[0]);
}

TARGET_AVX512 static uint32_t update_avx512(uint32_t crc, const void *data, size_t size_bytes)
{
    const uint8_t *p = data;
    if (size_bytes < AVX512_BYTES_MIN) {
        return update_sse42(crc, data, size_bytes);
    }
    __m512i by = factor(stride_fold), a = _mm512_loadu_si512(p);
    __m512i b = _mm512_loadu_si512(p + 64), c = _mm512_loadu_si512(p + 128);
    __m512i d = _mm512_loadu_si512(p + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (p += STRIDE_BYTES, size_bytes -= STRIDE_BYTES; size_bytes >= STRIDE_BYTES;
         p += STRIDE_BYTES, size_bytes -= STRIDE_BYTES) {
        a = fold(a, by, _mm512_loadu_si512(p));
        b = fold(b, by, _mm512_loadu_si512(p + 64));
        c = fold(c, by, _mm512_loadu_si512(p + 128));
        d = fold(d, by, _mm512_loadu_si512(p + 192));
    }
    by = factor(block_fold);
    d = fold(fold(fold(a, by, b), by, c), by, d);
    for (; size_bytes >= BLOCK_BYTES; p += BLOCK_BYTES, size_bytes -= BLOCK_BYTES) {
        d = fold(d, by, _mm512_loadu_si512(p));
    }
    uint64_t last = 0; /* by extraction: a store could not be forwarded to loads of another size */
    last = crc_of_lane(last, _mm512_extracti32x4_epi32(d, 0));
    last = crc_of_lane(last, _mm512_extracti32x4_epi32(d, 1));
    last = crc_of_lane(last, _mm512_extracti32x4_epi32(d, 2));
    last = crc_of_lane(last, _mm512_extracti32x4_epi32(d, 3));
    return update_sse42((uint32_t)last, p, size_bytes);
}

static void build_fold(uint32_t less_33, uint64_t halves[2], uint64_t size_bytes)
{
    /* x^(8 * size + 63) is x^(8 * (size + 12) - 33), x^(8 * size - 1) is x^(8 * (size + 4) - 33). */
    halves[0] = (uint64_t)shift_portable(less_33, size_bytes + 12) << 32;
    halves[1] = (uint64_t)shift_portable(less_33, size_bytes + 4) << 32;
}
#endif

/* ---- choice --------------------------------------------------------------------------------- */

const struct hifc_crc32c_path hifc_crc32c_paths[] = {
    {"portable", usable_portable, update_portable, shift_portable},
#if defined(__x86_64__)
    {"sse4.2", usable_sse42, update_sse42, shift_sse42},
    {"avx512", usable_avx512, update_avx512, shift_sse42},
#endif
};
const unsigned hifc_crc32c_path_count = sizeof hifc_crc32c_paths / sizeof hifc_crc32c_paths[0];

static const struct hifc_crc32c_path *path = &hifc_crc32c_paths[0];

__attribute__((constructor)) static void build(void)
{
    build_portable();
#if defined(__x86_64__)
    uint32_t less_33 = ONE; /* x^-33 */
    for (int i = 0; i < 33; i++) {
        less_33 = less_33 & ONE ? (less_33 ^ CRC32C_POLYNOMIAL) << 1 | 1 : less_33 << 1;
    }
    build_sse42(less_33);
    build_fold(less_33, block_fold, BLOCK_BYTES);
    build_fold(less_33, stride_fold, STRIDE_BYTES);
#endif
    for (unsigned i = 0; i < hifc_crc32c_path_count; i++) {
        if (hifc_crc32c_paths[i].usable()) {
            path = &hifc_crc32c_paths[i];
        }
    }
}

uint32_t hifc_crc32c_update(uint32_t crc, const void *data, size_t size_bytes)
{
    return path->update(crc, data, size_bytes);
}

uint32_t hifc_crc32c_shift(uint32_t crc, uint64_t size_bytes)
{
    return path->shift(crc, size_bytes);
}

uint32_t hifc_crc32c_raw(const void *data, size_t size_bytes)
{
    return path->update(0, data, size_bytes);
}
