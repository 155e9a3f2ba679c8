/* SPDX-License-Identifier: Apache-2.0
 *
 * recover.c - finds the free segments; reading back the others comes next, until then they count as
 * damaged and stay as they are.
 */
#include "namespace/recover.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

int hifc_recover(struct hifc_blockio *io, const struct hifc_superblock *sb,
                 const struct hifc_recover_opts *opts, const struct hifc_recover_callbacks *callbacks,
                 struct hifc_recover_result *out)
{
    struct hifc_segment_header *header = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    int error = header ? 0 : hifc_fail(-ENOMEM, "no memory for a segment header");
    (void)opts;
    memset(out, 0, sizeof *out);
    out->next_sequence = 1;
    for (uint32_t i = 0; i < sb->segment_count && !error; i++) {
        uint64_t at = hifc_segment_offset(sb->segment_size_bytes, i);
        struct hifc_recovered_segment found = {.segment = i, .state = HIFC_RECOVERED_DAMAGED};
        error = hifc_blockio_read(io, at, header, HIFC_PAGE_BYTES);
        if (!error && hifc_page_valid(header, HIFC_MAGIC_SEGMENT, sb->uuid, at, 0)) {
            found.generation = header->generation;
            found.state = header->state == HIFC_DISK_FREE ? HIFC_RECOVERED_FREE
                                                          : HIFC_RECOVERED_DAMAGED;
        }
        error = error ? error : callbacks->segment(callbacks->ctx, &found);
    }
    free(header);
    return error;
}
