// SPDX-License-Identifier: Apache-2.0
//
// scales.cu - the scale of each head of each plane of each block, before it is packed with conversion:
// its largest number over the largest that a byte holds. A block of threads reads a head's tokens at
// a time; infinities and NaNs do not count. It takes the struct of the pack kernel that follows.
#include "pages.cuh"

namespace hifc
{

// Bits of the absolute value, which are ordered as the numbers are; 0 for infinity and NaN.
HIFC_DEVICE u32 size_of(const PackArgs &args, u32 item)
{
    const u32 size = bits_of(item_to_float(args, item)) & 0x7fffffff;
    return size < 0x7f800000 ? size : 0;
}

// The largest of 16 items at a multiple of 16 bytes.
HIFC_DEVICE u32 largest_of_16(const PackArgs &args, const u8 *from)
{
    u32 largest = 0;
    HIFC_UNROLL
    for (u32 four = 0; four < 4; four++) {
        u32 item[4];
        Converted::load_four(from, four, 4 / args.item_bytes, item);
        HIFC_UNROLL
        for (u32 i = 0; i < 4; i++) {
            largest = max_of(largest, size_of(args, item[i]));
        }
    }
    return largest;
}

} // namespace hifc

HIFC_KERNEL(hifc_scales, hifc::PACK_THREADS, hifc::PackArgs)
{
    using namespace hifc;
    PerThread<u32, PACK_THREADS> largest;
    const u32 pieces = args.plane_count * args.heads.divisor, tokens = args.tokens.divisor;
    const float limit = args.coded == E4M3 ? E4M3_MAX : INT8_MAX;
    const bool by_16 = args.access_bytes == 16;

    for (u32 work = block.index; work < args.blocks * pieces; work += block.count) {
        const u32 which = work / pieces, first_row = (work - which * pieces) * tokens;
        HIFC_LAST_PHASE (t) {
            u32 mine = 0;
            // By 16 items, or by one, as args.row counts.
            for (u32 i = t; i < tokens * args.row.divisor; i += PACK_THREADS) {
                const u32 token = divide(i, args.row), column = i - token * args.row.divisor;
                const u8 *from = row_address(args, which, first_row + token);
                if (!from) {
                    continue;
                }
                if (by_16) {
                    mine = max_of(mine, largest_of_16(args, from + column * 16 * args.item_bytes));
                } else {
                    const u8 *item = from + i64(column) * args.item_stride;
                    mine = max_of(mine, size_of(args, load_item(item, args.item_bytes)));
                }
            }
            largest[t] = mine;
        }
        const float all = float_of(block_reduce<Max>(block, largest));
        HIFC_LAST_PHASE (t) {
            if (t == 0) {
                args.scales[work] = max_of(all / limit, 0x1p-126f);
            }
        }
    }
}
