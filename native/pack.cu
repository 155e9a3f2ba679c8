// SPDX-License-Identifier: Apache-2.0
//
// pack.cu - pack gathers the pages of blocks of KV into packed blocks, unpack scatters them back; both
// compute the raw CRC-32C of each part of a packed block on the way, if asked to.
//
// Threads of a block stand side by side over 16 bytes each of a packed block, so the packed side is
// read or written whole, and the pages in runs of a row. The CRC is taken from registers. Chunks and
// rows are as in checksum.cu. A kernel a way, so that the plain copy keeps few registers:
//   hifc_pack_rows          rows of whole 16 bytes; hifc_pack_rows_crc: with checksums
//   hifc_pack_bytes         any sizes, strides and addresses; checksums or not, as the next two
//   hifc_pack_converted     rows of whole 16 bytes, items converted to a byte each
//   hifc_pack_items         the same of any sizes, strides and addresses
// and hifc_unpack_* likewise.
#include "crc32c.cuh"
#include "pages.cuh"

namespace hifc
{

// 16 packed bytes, or `count` of them where Way does not know them aligned.
template <typename Way>
HIFC_DEVICE Vec16 load_packed(const PackArgs &args, const u8 *from, u32 count)
{
    if constexpr (Way::aligned) {
        return load16_once(from);
    } else {
        if (args.packed_aligned && count == 16) {
            return load16_once(from);
        }
        Vec16 bytes{};
        HIFC_UNROLL
        for (u32 i = 0; i < 16; i++) {
            bytes.word[i / 4] |= i < count ? u32(from[i]) << i % 4 * 8 : 0;
        }
        return bytes;
    }
}

template <typename Way>
HIFC_DEVICE void store_packed(const PackArgs &args, u8 *to, u32 count, Vec16 bytes)
{
    if constexpr (Way::aligned) {
        store16_once(to, bytes);
    } else {
        if (args.packed_aligned && count == 16) {
            store16_once(to, bytes);
            return;
        }
        HIFC_UNROLL
        for (u32 i = 0; i < 16; i++) {
            if (i < count) {
                to[i] = u8(bytes.word[i / 4] >> i % 4 * 8);
            }
        }
    }
}

// Moves `count` bytes at offset `at` of a packed block and returns them.
template <bool PACK, typename Way>
HIFC_DEVICE Vec16 move_unit(const PackArgs &args, u32 block, u32 at, u32 count)
{
    u8 *packed = reinterpret_cast<u8 *>(args.packed[block]) + at;
    Vec16 bytes;
    if (PACK) {
        bytes = Way::gather(args, block, at, count);
        store_packed<Way>(args, packed, count, bytes);
    } else {
        bytes = load_packed<Way>(args, packed, count);
        Way::scatter(args, block, at, count, bytes);
    }
    return bytes;
}

// The bytes of a part behind its last 16, moved by one thread; continues their CRC from 0.
template <bool PACK, typename Way>
HIFC_DEVICE u32 move_tail(const PackArgs &args, u32 block, u32 at, u32 count)
{
    const Vec16 bytes = move_unit<PACK, Way>(args, block, at, count);
    u32 crc = 0;
    HIFC_UNROLL
    for (u32 i = 0; i < 16; i++) {
        crc = i < count ? crc_byte(crc, u8(bytes.word[i / 4] >> i % 4 * 8)) : crc;
    }
    return crc;
}

// Way::unroll rows of one thread, from offset `at` on: all addresses, then all loads, then all
// stores, so that the loads are in flight together.
template <bool PACK, typename Way>
HIFC_DEVICE u32 move_rows(const PackArgs &args, const CrcShared *tables, u32 block, u32 at, u32 crc)
{
    u8 *packed = reinterpret_cast<u8 *>(args.packed[block]) + at;
    u8 *page[Way::unroll];
    Vec16 bytes[Way::unroll];
    bool all = true;
    HIFC_UNROLL
    for (u32 i = 0; i < Way::unroll; i++) {
        page[i] = Way::address(args, block, at + i * CRC_ROW_BYTES);
        all = all && page[i];
    }
    HIFC_UNROLL
    for (u32 i = 0; i < Way::unroll; i++) {
        const u8 *from = PACK ? page[i] : packed + i * CRC_ROW_BYTES;
        bytes[i] = from ? load16_once(from) : Vec16{};
    }
    HIFC_UNROLL
    for (u32 i = 0; i < Way::unroll; i++) {
        if (PACK) {
            store16_once(packed + i * CRC_ROW_BYTES, bytes[i]);
        } else if (page[i]) {
            store16(page[i], bytes[i]);
        }
    }
    HIFC_UNROLL
    for (u32 i = 0; i < Way::unroll; i++) {
        crc = tables ? crc_row(*tables, crc, bytes[i]) : 0;
    }
    if (!all) {
        *args.faults = 1;
    }
    return crc;
}

// One thread's share of a chunk that ends at 16-byte unit `end` of the part at offset `part_at`.
template <bool PACK, typename Way>
HIFC_DEVICE u32 move_chunk(const PackArgs &args, const CrcShared *tables, u32 block, u32 part_at,
                           u32 end, u32 t)
{
    const u32 rows = min_of(args.chunk_rows, (end + PACK_THREADS - 1) / PACK_THREADS);
    // The first row may be short.
    u32 row = rows && rows * PACK_THREADS - t > end ? rows - 1 : rows, crc = 0;
    const u32 at = part_at + (end - (row * PACK_THREADS - t)) * 16, first = row;
    if constexpr (Way::unroll > 1) {
        for (; row >= Way::unroll; row -= Way::unroll) {
            const u32 next = (first - row) * CRC_ROW_BYTES;
            crc = move_rows<PACK, Way>(args, tables, block, at + next, crc);
        }
    }
    HIFC_ROLLED
    for (; row > 0; row--) {
        const u32 next = (first - row) * CRC_ROW_BYTES;
        const Vec16 bytes = move_unit<PACK, Way>(args, block, at + next, 16);
        crc = tables ? crc_row(*tables, crc, bytes) : 0;
    }
    return crc;
}

// tables: what crc_load filled, null without checksums.
template <bool PACK, typename Way>
HIFC_DEVICE void move(const PackArgs &args, const Block<PACK_THREADS> &block,
                      const CrcShared *tables)
{
    static_assert(PACK_THREADS == CRC_THREADS, "rows of both are the same");
    PerThread<u32, PACK_THREADS> crc;
    const u32 units = args.part_bytes / 16, tail = args.part_bytes % 16;
    const u32 works = args.blocks * args.parts * args.chunks;

    for (u32 work = block.index; work < works; work += block.count) {
        const u32 part = work / args.chunks, chunk = work - part * args.chunks;
        const u32 which = part / args.parts;
        const u32 part_at = (part - which * args.parts) * args.part_bytes;
        const u32 before = chunk * args.chunk_rows * PACK_THREADS; // units from the part's end
        HIFC_LAST_PHASE (t) {
            crc[t] = move_chunk<PACK, Way>(args, tables, which, part_at, units - before, t);
            crc[t] = tables ? crc_share(crc[t], t) : 0;
        }
        u32 all = tables ? block_reduce<Xor>(block, crc) : 0;
        HIFC_LAST_PHASE (t) {
            if (t == 0) {
                all = tables ? crc_shift(all, before * 16 + tail) : 0;
                if (!Way::aligned && tail && chunk == 0) {
                    all ^= move_tail<PACK, Way>(args, which, part_at + units * 16, tail);
                }
                if (tables) {
                    atomic_xor(&args.checksums[part], all);
                }
            }
        }
    }
}

// The same of tables in `shared`, where args asks for checksums.
template <bool PACK, typename Way>
HIFC_DEVICE void move_and_sum(const PackArgs &args, const Block<PACK_THREADS> &block,
                              CrcShared &shared)
{
    if (args.checksums) {
        crc_load(block, shared);
    }
    move<PACK, Way>(args, block, args.checksums ? &shared : nullptr);
}

template <bool PACK>
HIFC_DEVICE void move_bytes(const PackArgs &args, const Block<PACK_THREADS> &block, CrcShared &shared)
{
    switch (args.access_bytes) {
    case 8:
        move_and_sum<PACK, Bytes<u64>>(args, block, shared);
        break;
    case 4:
        move_and_sum<PACK, Bytes<u32>>(args, block, shared);
        break;
    case 2:
        move_and_sum<PACK, Bytes<u16>>(args, block, shared);
        break;
    default:
        move_and_sum<PACK, Bytes<u8>>(args, block, shared);
    }
}

} // namespace hifc

HIFC_KERNEL(hifc_pack_rows, hifc::PACK_THREADS, hifc::PackArgs)
{
    hifc::move<true, hifc::Rows>(args, block, nullptr);
}

HIFC_KERNEL(hifc_pack_rows_crc, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_and_sum<true, hifc::Rows>(args, block, shared);
}

HIFC_KERNEL(hifc_pack_converted, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_and_sum<true, hifc::Converted>(args, block, shared);
}

HIFC_KERNEL(hifc_pack_items, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_and_sum<true, hifc::Items>(args, block, shared);
}

HIFC_KERNEL(hifc_pack_bytes, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_bytes<true>(args, block, shared);
}

HIFC_KERNEL(hifc_unpack_rows, hifc::PACK_THREADS, hifc::PackArgs)
{
    hifc::move<false, hifc::Rows>(args, block, nullptr);
}

HIFC_KERNEL(hifc_unpack_rows_crc, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_and_sum<false, hifc::Rows>(args, block, shared);
}

HIFC_KERNEL(hifc_unpack_converted, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_and_sum<false, hifc::Converted>(args, block, shared);
}

HIFC_KERNEL(hifc_unpack_items, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_and_sum<false, hifc::Items>(args, block, shared);
}

HIFC_KERNEL(hifc_unpack_bytes, hifc::PACK_THREADS, hifc::PackArgs)
{
    HIFC_SHARED hifc::CrcShared shared;
    hifc::move_bytes<false>(args, block, shared);
}
