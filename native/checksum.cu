// SPDX-License-Identifier: Apache-2.0
//
// checksum.cu - raw CRC-32C of the equal parts of a value that stands in memory, as the driver keeps
// it: what verifies a block that was read straight to where it is used.
//
// A part is cut into chunks of whole rows, counted from the part's end since leading zeros do not
// change a raw CRC: the first row of the first chunk may be short, the others are full. Bytes that do
// not fill 16 stand at the end and are done one by one. Blocks take chunks in turn and join what they
// find by an atomic exclusive or, so `checksums` holds zeros before.
#include "crc32c.cuh"

struct ChecksumArgs {
    const hifc::u8 *data; // a multiple of 16
    hifc::u32 *checksums; // [parts], zeros
    hifc::u64 part_stride_bytes; // a multiple of 16
    hifc::u32 part_bytes;
    hifc::u32 parts;
    hifc::u32 chunk_rows;
    hifc::u32 chunks; // of one part
};

HIFC_KERNEL(hifc_checksum, hifc::CRC_THREADS, ChecksumArgs)
{
    using namespace hifc;
    HIFC_SHARED CrcShared shared;
    PerThread<u32, CRC_THREADS> crc;
    const u32 units = args.part_bytes / 16, tail = args.part_bytes % 16;
    const u32 chunk_units = args.chunk_rows * CRC_THREADS;

    crc_load(block, shared);
    for (u64 work = block.index; work < u64(args.parts) * args.chunks; work += block.count) {
        const u32 part = u32(work / args.chunks), chunk = u32(work % args.chunks);
        const u8 *data = args.data + part * args.part_stride_bytes;
        // Chunk 0 is the last of the part.
        const u32 end = units - chunk * chunk_units; // chunks * chunk_units may be above units
        const u32 rows = min_of(args.chunk_rows, (end + CRC_THREADS - 1) / CRC_THREADS);
        HIFC_LAST_PHASE (t) { // block_reduce brings its barriers
            u32 mine = 0;
            for (u32 row = rows; row > 0; row--) {
                const u32 back = row * CRC_THREADS - t;
                if (back <= end) {
                    mine = crc_row(shared, mine, load16_once(data + u64(end - back) * 16));
                }
            }
            crc[t] = crc_share(mine, t);
        }
        u32 all = block_reduce<Xor>(block, crc);
        HIFC_LAST_PHASE (t) {
            if (t == 0) {
                all = crc_shift(all, chunk * chunk_units * 16 + tail);
                if (chunk == 0) {
                    u32 rest = 0;
                    for (u32 i = 0; i < tail; i++) {
                        rest = crc_byte(rest, data[u64(units) * 16 + i]);
                    }
                    all ^= rest;
                }
                atomic_xor(&args.checksums[part], all);
            }
        }
    }
}
