// SPDX-License-Identifier: Apache-2.0
//
// crc32c.cuh - raw CRC-32C (Castagnoli, reflected, initial value 0, no final inversion) of data that
// a block of threads reads together; equal to hifc_crc32c_raw of the driver.
//
// A CRC is a polynomial over GF(2) modulo P, stored reflected: bit 31 is the coefficient of x^0.
// Appending n zero bytes multiplies by x^(8n). Threads read 16 bytes each, one beside the other, in
// rows of CRC_ROW_BYTES, so a thread sees 16 bytes of each row. For it the others' bytes are zeros:
// its tables hold the CRC of a byte followed by the zeros up to its next 16 bytes, which makes a row
// as cheap as slicing by 16 over contiguous bytes. In the end its CRC has run past the end of the row
// by as many bytes as it stands from the row's start, which is taken back by a power of x^-1.
#ifndef HIFC_CRC32C_CUH
#define HIFC_CRC32C_CUH

#include "portable.cuh"

namespace hifc
{

constexpr u32 CRC_THREADS = 256;
constexpr u32 CRC_ROW_BYTES = CRC_THREADS * 16;
constexpr u32 CRC_ONE = 0x80000000u; // x^0

HIFC_FN constexpr u32 crc_times_x(u32 a)
{
    return a >> 1 ^ (a & 1 ? 0x82F63B78u : 0);
}

HIFC_FN constexpr u32 crc_over_x(u32 a)
{
    return a & CRC_ONE ? (a ^ 0x82F63B78u) << 1 | 1 : a << 1;
}

HIFC_FN constexpr u32 crc_multiply(u32 a, u32 b)
{
    u32 product = 0;
    for (u32 bit = 0; bit < 32; bit++) {
        product ^= a << bit & CRC_ONE ? b : 0;
        b = crc_times_x(b);
    }
    return product;
}

struct CrcTables {
    u32 slice[16][256];        // [k][b]: byte b at place k of 16, then zeros up to the next row's 16
    u32 take_back[CRC_THREADS]; // [t]: x^(-8 * 16 * t)
    u32 power[32];             // [i]: x^(8 * 2^i), what 2^i zero bytes multiply by
};

HIFC_FN constexpr CrcTables make_crc_tables()
{
    CrcTables tables{};
    tables.power[0] = CRC_ONE >> 8;
    for (u32 i = 1; i < 32; i++) {
        tables.power[i] = crc_multiply(tables.power[i - 1], tables.power[i - 1]);
    }
    // A byte stands for its bits times x^8, and each zero byte after it is another x^8.
    u32 after = tables.power[0];
    for (u32 i = 0; i < 32; i++) {
        if ((CRC_ROW_BYTES - 16) >> i & 1) {
            after = crc_multiply(after, tables.power[i]);
        }
    }
    for (u32 k = 16; k-- > 0; after = crc_multiply(after, tables.power[0])) {
        u32 value = crc_multiply(after, 0x80); // bit 7 is x^24
        for (u32 bit = 0x80; bit; bit >>= 1, value = crc_times_x(value)) {
            tables.slice[k][bit] = value;
        }
        for (u32 byte = 1; byte < 256; byte++) {
            u32 lowest = byte & -byte;
            tables.slice[k][byte] = tables.slice[k][byte ^ lowest] ^ tables.slice[k][lowest];
        }
    }
    tables.take_back[0] = CRC_ONE;
    for (u32 t = 1; t < CRC_THREADS; t++) {
        u32 value = tables.take_back[t - 1];
        for (u32 bit = 0; bit < 128; bit++) {
            value = crc_over_x(value);
        }
        tables.take_back[t] = value;
    }
    return tables;
}

HIFC_TABLE CrcTables crc_tables = make_crc_tables();

// A block's copy of the slices: 16 look-ups for 16 bytes go to shared memory.
struct CrcShared {
    u32 slice[16][256];
};

// Between phases, once for a block.
template <u32 THREADS> HIFC_DEVICE void crc_load(const Block<THREADS> &block, CrcShared &shared)
{
    HIFC_PHASE (t) {
        for (u32 i = t; i < 16 * 256; i += THREADS) {
            shared.slice[i / 256][i % 256] = crc_tables.slice[i / 256][i % 256];
        }
    }
}

// A thread's CRC after its 16 bytes of one row more.
HIFC_DEVICE u32 crc_row(const CrcShared &shared, u32 crc, Vec16 bytes)
{
    bytes.word[0] ^= crc;
    crc = 0;
    HIFC_UNROLL
    for (u32 k = 0; k < 16; k++) {
        crc ^= shared.slice[k][bytes.word[k / 4] >> k % 4 * 8 & 255];
    }
    return crc;
}

// That thread's share of the CRC at the end of the last row; the shares are joined by Xor.
HIFC_DEVICE u32 crc_share(u32 crc, u32 t)
{
    return crc ? crc_multiply(crc, crc_tables.take_back[t]) : 0;
}

// The CRC after `bytes` zero bytes.
HIFC_DEVICE u32 crc_shift(u32 crc, u32 bytes)
{
    for (u32 i = 0; bytes >> i; i++) {
        if (bytes >> i & 1) {
            crc = crc_multiply(crc, crc_tables.power[i]);
        }
        if (i == 31) {
            break;
        }
    }
    return crc;
}

// Continues a CRC byte by byte: for ends of less than 16 bytes.
HIFC_DEVICE u32 crc_byte(u32 crc, u8 byte)
{
    return crc_multiply(crc ^ byte, crc_tables.power[0]);
}

} // namespace hifc

#endif
