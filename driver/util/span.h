/* SPDX-License-Identifier: Apache-2.0
 *
 * span.h - memory that lies in equal pieces, and the one walker over it. Any thread.
 */
#ifndef HIFC_SPAN_H
#define HIFC_SPAN_H

#include <stdint.h>

/* bytes bytes of memory, in pieces of piece_bytes every stride_bytes (piece_bytes 0 or
 * equal to bytes: contiguous). */
struct hifc_span {
    uint8_t *base;
    uint64_t bytes;
    uint64_t piece_bytes;
    uint64_t stride_bytes;
};

/* The address of position, and in *run how many bytes follow it without a gap. */
uint8_t *hifc_span_at(const struct hifc_span *span, uint64_t position, uint64_t *run);
void hifc_span_copy(uint8_t *out, const struct hifc_span *span, uint64_t position, uint64_t bytes);
void hifc_span_fill(const struct hifc_span *span, uint64_t position, const uint8_t *from,
                    uint64_t bytes);
void hifc_span_zero(const struct hifc_span *span, uint64_t position, uint64_t bytes);
/* CRC-32C of [position, +bytes), continued from crc. */
uint32_t hifc_span_crc(uint32_t crc, const struct hifc_span *span, uint64_t position,
                       uint64_t bytes);

#endif
