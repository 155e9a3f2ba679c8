/* SPDX-License-Identifier: Apache-2.0
 *
 * span.c - walks memory that lies in pieces: see span.h.
 */
#include "util/span.h"

#include <string.h>

#include "util/crc32c.h"

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint8_t *hifc_span_at(const struct hifc_span *span, uint64_t position, uint64_t *run)
{
    if (span->piece_bytes == 0 || span->piece_bytes >= span->bytes) {
        *run = span->bytes - position;
        return span->base + position;
    }
    uint64_t piece = position / span->piece_bytes;
    uint64_t within = position % span->piece_bytes;
    *run = min_u64(span->piece_bytes - within, span->bytes - position);
    return span->base + piece * span->stride_bytes + within;
}

void hifc_span_copy(uint8_t *out, const struct hifc_span *span, uint64_t position, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        const uint8_t *from = hifc_span_at(span, position, &run);
        run = min_u64(run, bytes);
        memcpy(out, from, run);
        out += run;
        position += run;
        bytes -= run;
    }
}

void hifc_span_fill(const struct hifc_span *span, uint64_t position, const uint8_t *from,
                  uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        uint8_t *to = hifc_span_at(span, position, &run);
        run = min_u64(run, bytes);
        memcpy(to, from, run);
        from += run;
        position += run;
        bytes -= run;
    }
}

void hifc_span_zero(const struct hifc_span *span, uint64_t position, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        uint8_t *to = hifc_span_at(span, position, &run);
        run = min_u64(run, bytes);
        memset(to, 0, run);
        position += run;
        bytes -= run;
    }
}

uint32_t hifc_span_crc(uint32_t crc, const struct hifc_span *span, uint64_t position, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t run;
        const uint8_t *from = hifc_span_at(span, position, &run);
        run = min_u64(run, bytes);
        crc = hifc_crc32c_update(crc, from, run);
        position += run;
        bytes -= run;
    }
    return crc;
}
