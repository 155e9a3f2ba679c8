/* SPDX-License-Identifier: Apache-2.0
 *
 * merge.c - see merge.h.
 */
#include "format/merge.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "util/error.h"

int hifc_summary_load(struct hifc_blockio *io, const struct hifc_superblock *sb,
                      const struct hifc_merge_input *input, struct hifc_summary_entry **out)
{
    uint64_t bytes = (uint64_t)input->entry_count * sizeof **out;
    uint64_t pages = hifc_whole_pages(bytes);
    uint64_t at = hifc_segment_offset(sb->segment_size_bytes, input->segment) +
                  input->summary_offset;
    struct hifc_summary_entry *entries = aligned_alloc(HIFC_PAGE_BYTES, pages + HIFC_PAGE_BYTES);
    *out = NULL;
    if (!entries) {
        return hifc_fail(-ENOMEM, "no memory for the summary of segment %" PRIu32,
                         input->segment);
    }
    int error = pages ? hifc_blockio_read(io, at, entries, pages) : 0;
    bool good = error == 0 && hifc_summary_checksum(entries, input->entry_count, sb->uuid, at,
                                                    input->generation) == input->summary_checksum;
    uint64_t sequence = input->first_sequence;
    for (uint32_t i = 0; good && i < input->entry_count; i++) {
        good = entries[i].sequence >= sequence;
        sequence = entries[i].sequence;
    }
    if (!good) {
        free(entries);
        return error ? error
                     : hifc_fail(-EBADMSG, "the summary of segment %" PRIu32
                                 " does not match its footer", input->segment);
    }
    *out = entries;
    return 0;
}

/* Applying an entry costs little but the fetch of its place in the index: so many are begun. */
#define AHEAD 16u

struct cursor {
    const struct hifc_merge_input *input;
    const struct hifc_summary_entry *entries;
    struct hifc_summary_entry *loaded; /* to be freed */
    uint32_t at;
};

struct merge {
    struct cursor *cursors;
    uint32_t count, capacity;
};

static int cursor_open(struct merge *merge, struct hifc_blockio *io,
                       const struct hifc_superblock *sb, const struct hifc_merge_input *input)
{
    if (merge->count == merge->capacity) {
        uint32_t more = merge->capacity ? merge->capacity * 2 : 16;
        void *moved = realloc(merge->cursors, more * sizeof *merge->cursors);
        if (!moved) {
            return hifc_fail(-ENOMEM, "no memory to merge summaries");
        }
        merge->cursors = moved;
        merge->capacity = more;
    }
    struct cursor cursor = {.input = input, .entries = input->entries};
    if (!cursor.entries) {
        int error = hifc_summary_load(io, sb, input, &cursor.loaded);
        if (error) {
            return error;
        }
        cursor.entries = cursor.loaded;
    }
    merge->cursors[merge->count++] = cursor;
    return 0;
}

static void cursor_close(struct merge *merge, uint32_t i)
{
    free(merge->cursors[i].loaded);
    merge->cursors[i] = merge->cursors[--merge->count];
}

static uint64_t head_of(const struct cursor *cursor)
{
    return cursor->entries[cursor->at].sequence;
}

/* The cursor with the lowest sequence; *limit: the lowest that any other has. */
static uint32_t lowest(const struct merge *merge, uint64_t *limit)
{
    uint32_t best = 0;
    *limit = UINT64_MAX;
    for (uint32_t i = 1; i < merge->count; i++) {
        uint64_t head = head_of(&merge->cursors[i]), lead = head_of(&merge->cursors[best]);
        uint64_t loser = head < lead ? lead : head;
        *limit = loser < *limit ? loser : *limit;
        best = head < lead ? i : best;
    }
    return best;
}

static int by_first_sequence(const void *a, const void *b)
{
    const struct hifc_merge_input *x = a, *y = b;
    if (x->first_sequence != y->first_sequence) {
        return x->first_sequence < y->first_sequence ? -1 : 1;
    }
    return x->segment < y->segment ? -1 : x->segment > y->segment;
}

int hifc_merge(struct hifc_blockio *io, const struct hifc_superblock *sb,
               struct hifc_merge_input *inputs, uint32_t count,
               const struct hifc_recover_callbacks *callbacks, uint64_t *applied)
{
    struct merge merge = {0};
    uint32_t next = 0;
    int error = 0;
    if (count > 0) {
        qsort(inputs, count, sizeof *inputs, by_first_sequence);
    }
    while (error == 0 && (merge.count > 0 || next < count)) {
        uint64_t limit;
        uint32_t best = lowest(&merge, &limit);
        if (next < count && (merge.count == 0 ||
                             inputs[next].first_sequence <= head_of(&merge.cursors[best]))) {
            error = cursor_open(&merge, io, sb, &inputs[next++]);
            continue;
        }
        if (next < count && inputs[next].first_sequence < limit) {
            limit = inputs[next].first_sequence;
        }
        struct cursor *cursor = &merge.cursors[best];
        do { /* a run that nothing else comes in between */
            if (callbacks->ahead && cursor->input->entry_count - cursor->at > AHEAD) {
                callbacks->ahead(callbacks->ctx, &cursor->entries[cursor->at + AHEAD]);
            }
            error = callbacks->apply(callbacks->ctx, cursor->input->segment,
                                     &cursor->entries[cursor->at++]);
            *applied += error == 0;
        } while (error == 0 && cursor->at < cursor->input->entry_count &&
                 head_of(cursor) < limit);
        if (cursor->at == cursor->input->entry_count) {
            cursor_close(&merge, best);
        }
    }
    while (merge.count > 0) {
        cursor_close(&merge, 0);
    }
    free(merge.cursors);
    return error;
}
