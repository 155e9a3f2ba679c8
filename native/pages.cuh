// SPDX-License-Identifier: Apache-2.0
//
// pages.cuh - where KV stands in the pages of a cache, and how 16 bytes of a packed block come from
// there or go there.
//
// A cache is planes (K or V of a layer, each with a base address) of pages of tokens of heads of items,
// in any order: only the strides tell vLLM's layouts from transformers'. A packed block is contiguous
// rows: for each plane, for each head, for each token the items of one head, which is `[layer, K|V,
// head, token, item]`. Page numbers come from outside, so each is checked: a page that the cache has
// not is read as zeros, not written, and told in `faults`.
#ifndef HIFC_PAGES_CUH
#define HIFC_PAGES_CUH

#include "numbers.cuh"

namespace hifc
{

constexpr u32 PACK_THREADS = 256;
constexpr u32 PACK_BLOCKS_MAX = 32; // packed blocks of one launch

enum Number : u32 { RAW, FLOAT32, FLOAT16, BFLOAT16, E4M3, INT8 };

struct PackArgs {
    u64 packed[PACK_BLOCKS_MAX]; // addresses of the packed blocks
    const u64 *planes;           // [planes]: addresses of their first items
    const i32 *pages;            // [blocks][block_pages]
    float *scales;               // [blocks][planes][heads], where items are converted
    u32 *checksums;              // [blocks][parts], zeros
    u32 *faults;                 // becomes 1 if a page number is none, 2 if a scale is none
    u64 cache_tokens;            // pages of the cache * tokens of a page, or as many as there are
    i64 page_stride;             // strides in bytes
    i64 token_stride;
    i64 head_stride;
    i64 item_stride;
    Divider row;         // a packed row, in units of 16 bytes or, for Bytes and Items, in bytes
    Divider tokens;      // of a block
    Divider heads;
    Divider page_tokens; // of a page
    u32 blocks;
    u32 block_pages;
    u32 plane_count;
    u32 item_bytes;     // in a page
    u32 access_bytes;   // what addresses, strides and lengths are multiples of: 1, 2, 4 or 8
    u32 packed_aligned; // packed addresses and parts are multiples of 16
    u32 kind;           // Number in a page
    u32 coded;          // Number in a packed block; RAW: as in the page
    u32 part_bytes;
    u32 parts; // of a packed block
    u32 chunk_rows;
    u32 chunks; // of a part
};

// Address of the first item of a packed row, null where its page is none.
HIFC_DEVICE u8 *row_address(const PackArgs &args, u32 block, u32 row)
{
    const u32 piece = divide(row, args.tokens), token = row - piece * args.tokens.divisor;
    const u32 plane = divide(piece, args.heads), head = piece - plane * args.heads.divisor;
    const u32 place = divide(token, args.page_tokens);
    const u32 slot = token - place * args.page_tokens.divisor;
    const u32 page = u32(args.pages[block * args.block_pages + place]);
    if (u64(page) * args.page_tokens.divisor + slot >= args.cache_tokens) {
        return nullptr;
    }
    return reinterpret_cast<u8 *>(args.planes[plane]) + i64(page) * args.page_stride +
           i64(slot) * args.token_stride + i64(head) * args.head_stride;
}

// The same, and tells that a page was none.
HIFC_DEVICE u8 *checked_address(const PackArgs &args, u32 block, u32 row)
{
    u8 *first = row_address(args, block, row);
    if (!first) {
        *args.faults = 1;
    }
    return first;
}

HIFC_DEVICE float scale_of(const PackArgs &args, u32 block, u32 row)
{
    const u32 which = block * (args.plane_count * args.heads.divisor) + divide(row, args.tokens);
    const float scale = args.scales[which];
    if (!(scale >= 0x1p-126f && scale <= 0x1.fffffep127f)) {
        *args.faults = 2;
    }
    return scale;
}

// ---- one item ------------------------------------------------------------------------------------

HIFC_DEVICE float item_to_float(const PackArgs &args, u32 item)
{
    switch (args.kind) {
    case FLOAT16:
        return half_to_float(item);
    case BFLOAT16:
        return bfloat_to_float(item);
    default:
        return float_of(item);
    }
}

HIFC_DEVICE u32 float_to_item(const PackArgs &args, float value)
{
    switch (args.kind) {
    case FLOAT16:
        return float_to_half(value);
    case BFLOAT16:
        return float_to_bfloat(value);
    default:
        return bits_of(value);
    }
}

HIFC_DEVICE u32 encode(const PackArgs &args, u32 item, float over_scale)
{
    const float value = item_to_float(args, item) * over_scale;
    return args.coded == E4M3 ? float_to_e4m3(value) : u32(float_to_int8(value)) & 255;
}

HIFC_DEVICE u32 decode(const PackArgs &args, u32 code, float scale)
{
    const float value = args.coded == E4M3 ? e4m3_to_float(code) : float(i32(i8(code)));
    return float_to_item(args, value * scale);
}

// An item of 1, 2 or 4 bytes at any address.
HIFC_DEVICE u32 load_item(const u8 *from, u32 item_bytes)
{
    u32 bits = 0;
    for (u32 i = 0; i < item_bytes; i++) {
        bits |= u32(from[i]) << 8 * i;
    }
    return bits;
}

HIFC_DEVICE void store_item(u8 *to, u32 item_bytes, u32 bits)
{
    for (u32 i = 0; i < item_bytes; i++) {
        to[i] = u8(bits >> 8 * i);
    }
}

// ---- ways from a page to 16 packed bytes and back ------------------------------------------------
// gather and scatter: `count` bytes, at most 16, at offset `at` of a packed block; those of Rows and
// Converted are always 16 and stand in one row.

// Whole rows of multiples of 16 bytes at multiples of 16. pack.cu takes several addresses before it
// loads, so that the loads are in flight together.
struct Rows {
    static constexpr u32 unroll = 4;
    static constexpr bool aligned = true;

    HIFC_DEVICE u8 *address(const PackArgs &args, u32 block, u32 at)
    {
        const u32 row = divide(at / 16, args.row), column = at - row * args.row.divisor * 16;
        u8 *first = row_address(args, block, row);
        return first ? first + column : nullptr;
    }

    HIFC_DEVICE Vec16 gather(const PackArgs &args, u32 block, u32 at, u32)
    {
        const u8 *from = address(args, block, at);
        if (!from) {
            *args.faults = 1;
        }
        return from ? load16_once(from) : Vec16{};
    }

    HIFC_DEVICE void scatter(const PackArgs &args, u32 block, u32 at, u32, Vec16 bytes)
    {
        u8 *to = address(args, block, at);
        if (to) {
            store16(to, bytes);
        } else {
            *args.faults = 1;
        }
    }
};

// The same in pieces of T, at multiples of its size: a row may end within 16 bytes, and items may
// stand apart.
template <typename T> struct Bytes {
    static constexpr u32 unroll = 1;
    static constexpr bool aligned = false;

    HIFC_DEVICE u8 *address(const PackArgs &args, u32 block, u32 at)
    {
        const u32 row = divide(at, args.row), column = at - row * args.row.divisor;
        u8 *first = checked_address(args, block, row);
        // item_bytes is a power of two.
        const u32 within = column & (args.item_bytes - 1);
        const u32 item = column >> (31 - leading_zeros(args.item_bytes));
        return first ? first + i64(item) * args.item_stride + within : nullptr;
    }

    // By 8 bytes, so that the rolled loops index no array.
    HIFC_DEVICE Vec16 gather(const PackArgs &args, u32 block, u32 at, u32 count)
    {
        Vec16 bytes{};
        HIFC_UNROLL
        for (u32 half = 0; half < 2; half++) {
            u64 eight = 0;
            HIFC_ROLLED
            for (u32 i = 0; i < 8 && half * 8 + i < count; i += sizeof(T)) {
                const u8 *from = address(args, block, at + half * 8 + i);
                eight |= from ? u64(load_as<T>(from)) << i * 8 : 0;
            }
            bytes.word[half * 2] = u32(eight);
            bytes.word[half * 2 + 1] = u32(eight >> 32);
        }
        return bytes;
    }

    HIFC_DEVICE void scatter(const PackArgs &args, u32 block, u32 at, u32 count, Vec16 bytes)
    {
        HIFC_UNROLL
        for (u32 half = 0; half < 2; half++) {
            const u64 eight = u64(bytes.word[half * 2 + 1]) << 32 | bytes.word[half * 2];
            HIFC_ROLLED
            for (u32 i = 0; i < 8 && half * 8 + i < count; i += sizeof(T)) {
                u8 *to = address(args, block, at + half * 8 + i);
                if (to) {
                    store_as<T>(to, T(eight >> i * 8));
                }
            }
        }
    }
};

// 16 items of 2 or 4 bytes, whole rows at multiples of 16, from or to one byte each.
struct Converted {
    static constexpr u32 unroll = 1;
    static constexpr bool aligned = true;

    HIFC_DEVICE Vec16 gather(const PackArgs &args, u32 block, u32 at, u32)
    {
        const u32 row = divide(at / 16, args.row), column = at - row * args.row.divisor * 16;
        const u8 *from = checked_address(args, block, row);
        Vec16 bytes{};
        if (!from) {
            return bytes;
        }
        const float over_scale = 1.0f / scale_of(args, block, row);
        const u32 per_word = 4 / args.item_bytes;
        from += u64(column) * args.item_bytes;
        HIFC_UNROLL
        for (u32 four = 0; four < 4; four++) {
            u32 item[4];
            load_four(from, four, per_word, item);
            HIFC_UNROLL
            for (u32 i = 0; i < 4; i++) {
                bytes.word[four] |= encode(args, item[i], over_scale) << 8 * i;
            }
        }
        return bytes;
    }

    HIFC_DEVICE void scatter(const PackArgs &args, u32 block, u32 at, u32, Vec16 bytes)
    {
        const u32 row = divide(at / 16, args.row), column = at - row * args.row.divisor * 16;
        u8 *to = checked_address(args, block, row);
        if (!to) {
            return;
        }
        const float scale = scale_of(args, block, row);
        to += u64(column) * args.item_bytes;
        Vec16 out{};
        HIFC_UNROLL
        for (u32 four = 0; four < 4; four++) {
            u32 item[4];
            HIFC_UNROLL
            for (u32 i = 0; i < 4; i++) {
                item[i] = decode(args, bytes.word[four] >> 8 * i & 255, scale);
            }
            if (args.item_bytes == 4) {
                store16(to + four * 16, Vec16{{item[0], item[1], item[2], item[3]}});
            } else {
                out.word[four % 2 * 2] = item[0] | item[1] << 16;
                out.word[four % 2 * 2 + 1] = item[2] | item[3] << 16;
                if (four % 2) {
                    store16(to + four / 2 * 16, out);
                }
            }
        }
    }

    // Items 4 * four to 4 * four + 3, which are 16 or 8 bytes.
    HIFC_DEVICE void load_four(const u8 *from, u32 four, u32 per_word, u32 item[4])
    {
        if (per_word == 1) {
            const Vec16 loaded = load16(from + four * 16);
            HIFC_UNROLL
            for (u32 i = 0; i < 4; i++) {
                item[i] = loaded.word[i];
            }
        } else {
            const u64 loaded = load_as<u64>(from + four * 8);
            HIFC_UNROLL
            for (u32 i = 0; i < 4; i++) {
                item[i] = u32(loaded >> 16 * i) & 0xffff;
            }
        }
    }
};

// The same for items at any address, one by one.
struct Items {
    static constexpr u32 unroll = 1;
    static constexpr bool aligned = false;

    // Address of the item of a packed byte, null where its page is none; row: where it stands.
    HIFC_DEVICE u8 *address(const PackArgs &args, u32 block, u32 at, u32 *row)
    {
        *row = divide(at, args.row);
        u8 *first = checked_address(args, block, *row);
        return first ? first + i64(at - *row * args.row.divisor) * args.item_stride : nullptr;
    }

    HIFC_DEVICE Vec16 gather(const PackArgs &args, u32 block, u32 at, u32 count)
    {
        Vec16 bytes{};
        HIFC_UNROLL
        for (u32 four = 0; four < 4; four++) {
            HIFC_ROLLED
            for (u32 i = 0; i < 4 && four * 4 + i < count; i++) {
                u32 row;
                const u8 *from = address(args, block, at + four * 4 + i, &row);
                if (from) {
                    const u32 item = load_item(from, args.item_bytes);
                    const float over_scale = 1.0f / scale_of(args, block, row);
                    bytes.word[four] |= encode(args, item, over_scale) << i * 8;
                }
            }
        }
        return bytes;
    }

    HIFC_DEVICE void scatter(const PackArgs &args, u32 block, u32 at, u32 count, Vec16 bytes)
    {
        HIFC_UNROLL
        for (u32 four = 0; four < 4; four++) {
            HIFC_ROLLED
            for (u32 i = 0; i < 4 && four * 4 + i < count; i++) {
                u32 row;
                u8 *to = address(args, block, at + four * 4 + i, &row);
                if (to) {
                    const u32 code = bytes.word[four] >> i * 8 & 255;
                    store_item(to, args.item_bytes,
                               decode(args, code, scale_of(args, block, row)));
                }
            }
        }
    }
};

} // namespace hifc

#endif
