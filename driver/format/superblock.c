/* SPDX-License-Identifier: Apache-2.0
 *
 * superblock.c - the four copies that say what a namespace is. See docs/format.md.
 *
 * Invariants: two copies that agree on the newest update stay untouched until the next one is on
 * stable media in the two others, so the update that an open finds never goes back, however many
 * updates in a row are cut. A copy that could not be read is never taken for a copy that is not
 * there.
 *
 * Called by the thread that opens, formats or closes; blocking.
 */
#include "format/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "util/error.h"

#define FEATURES_KNOWN UINT64_C(0)

/* What was found at the four places. */
struct copies {
    struct hifc_superblock page[HIFC_SUPERBLOCK_COPIES];
    bool valid[HIFC_SUPERBLOCK_COPIES];
    bool foreign[HIFC_SUPERBLOCK_COPIES]; /* our magic, but the checksum does not hold */
    int error;            /* of the last read that failed */
};

static void read_copy(struct hifc_blockio *io, struct copies *copies, unsigned copy,
                      uint64_t size_bytes)
{
    uint64_t device_bytes = hifc_blockio_device(io)->geometry.size_bytes;
    if (size_bytes < HIFC_DATA_OFFSET_BYTES + HIFC_TAIL_BYTES || size_bytes > device_bytes) {
        return;
    }
    uint64_t offset = hifc_superblock_offset(copy, size_bytes);
    struct hifc_superblock *page = &copies->page[copy];
    int rc = hifc_blockio_read(io, offset, page, sizeof *page);
    if (rc != 0) {
        copies->error = rc;
        return;
    }
    copies->valid[copy] = hifc_page_valid(page, HIFC_MAGIC_SUPER, NULL, offset, 0);
    copies->foreign[copy] = !copies->valid[copy] && page->head.magic == HIFC_MAGIC_SUPER;
}

/* A namespace may be smaller than its device, so the first copies say where the last ones are. */
static void read_copies(struct hifc_blockio *io, struct copies *copies)
{
    uint64_t size_bytes = hifc_blockio_device(io)->geometry.size_bytes;
    read_copy(io, copies, 0, size_bytes);
    read_copy(io, copies, 1, size_bytes);
    for (unsigned i = 0; i < 2; i++) {
        if (copies->valid[i]) {
            size_bytes = copies->page[i].size_bytes;
            break;
        }
    }
    read_copy(io, copies, 2, size_bytes);
    read_copy(io, copies, 3, size_bytes);
}

/* Equal but for the checksum, which depends on the place. */
static bool agree(const struct hifc_superblock *a, const struct hifc_superblock *b)
{
    struct hifc_superblock x = *a, y = *b;
    x.head.checksum = y.head.checksum = 0;
    return memcmp(&x, &y, sizeof x) == 0;
}

/* The newest copy that another one agrees with, or -1. */
static int choose(const struct copies *copies)
{
    int best = -1;
    for (unsigned i = 0; i < HIFC_SUPERBLOCK_COPIES; i++) {
        for (unsigned j = i + 1; j < HIFC_SUPERBLOCK_COPIES; j++) {
            if (copies->valid[i] && copies->valid[j] &&
                agree(&copies->page[i], &copies->page[j]) &&
                (best < 0 || copies->page[i].sequence > copies->page[best].sequence)) {
                best = (int)i;
            }
        }
    }
    return best;
}

static int nothing_here(struct hifc_blockio *io, const struct copies *copies)
{
    const char *uri = hifc_blockio_device(io)->uri;
    unsigned valid = 0, foreign = 0;
    for (unsigned i = 0; i < HIFC_SUPERBLOCK_COPIES; i++) {
        valid += copies->valid[i];
        foreign += copies->foreign[i];
    }
    if (copies->error) {
        return copies->error; /* the device's own message says what and where */
    }
    if (valid || foreign) {
        return hifc_fail(-EUCLEAN,
                         "%s: of four superblock copies %u are valid, %u damaged, and no two "
                         "agree: the format was interrupted or the device lost data; format it "
                         "anew, after an image was taken if its content matters",
                         uri, valid, foreign);
    }
    int error = 0;
    const char *found = hifc_signature(io, &error);
    if (error) {
        return error;
    }
    if (!found) {
        return hifc_fail(-ENOMEDIUM, "%s: no HiFC namespace here, nor anything else that is known; "
                         "name the right device or lay one with hifc-admin format", uri);
    }
    return hifc_fail(-ENOMEDIUM, "%s: no HiFC namespace here, but %s; name the right device", uri,
                     found);
}

static int check_geometry(struct hifc_blockio *io, const struct hifc_superblock *sb)
{
    const struct hifc_device *device = hifc_blockio_device(io);
    if (sb->head.version != HIFC_FORMAT_VERSION) {
        return hifc_fail(-EPROTONOSUPPORT,
                         "%s: the namespace has format version %" PRIu32 ", this library knows %u; "
                         "use the release that wrote it",
                         device->uri, sb->head.version, HIFC_FORMAT_VERSION);
    }
    if (sb->features_incompatible & ~FEATURES_KNOWN) {
        return hifc_fail(-EPROTONOSUPPORT,
                         "%s: the namespace needs features 0x%" PRIx64 " that this library does "
                         "not know; use the release that wrote it",
                         device->uri, sb->features_incompatible & ~FEATURES_KNOWN);
    }
    if (sb->size_bytes > device->geometry.size_bytes) {
        return hifc_fail(-EFBIG,
                         "%s: the namespace has %" PRIu64 " bytes, the device only %" PRIu64
                         "; it is a truncated image, or the wrong device: name the right one",
                         device->uri, sb->size_bytes, device->geometry.size_bytes);
    }
    uint64_t segment = sb->segment_size_bytes;
    bool sane = segment >= HIFC_SEGMENT_SIZE_MIN_BYTES && segment <= HIFC_SEGMENT_SIZE_MAX_BYTES &&
                (segment & (segment - 1)) == 0 && sb->segment_count >= HIFC_SEGMENTS_MIN &&
                sb->segment_count <= HIFC_SEGMENTS_MAX &&
                sb->segment_count <= hifc_segment_count_for(sb->size_bytes, segment) &&
                sb->data_offset_bytes == HIFC_DATA_OFFSET_BYTES &&
                (sb->lba_bytes == 512 || sb->lba_bytes == HIFC_PAGE_BYTES);
    return sane ? 0
                : hifc_fail(-EUCLEAN,
                            "%s: the superblock's geometry makes no sense (%" PRIu32
                            " segments of %" PRIu64 " bytes): it was written wrong; format anew",
                            device->uri, sb->segment_count, segment);
}

int hifc_superblock_read(struct hifc_blockio *io, struct hifc_superblock *sb, uint64_t *highest)
{
    struct copies *copies = calloc(1, sizeof *copies);
    if (!copies) {
        return hifc_fail(-ENOMEM, "no memory for the superblock copies");
    }
    *highest = 0;
    read_copies(io, copies);
    int best = choose(copies), rc = 0, lone = -1;
    for (unsigned i = 0; i < HIFC_SUPERBLOCK_COPIES; i++) {
        if (copies->valid[i]) {
            lone = (int)i;
            if (best < 0 || memcmp(copies->page[i].uuid, copies->page[best].uuid, 16) == 0) {
                uint64_t sequence = copies->page[i].sequence;
                *highest = sequence > *highest ? sequence : *highest;
            }
        }
    }
    if (best < 0 && lone >= 0 &&
        copies->page[lone].size_bytes > hifc_blockio_device(io)->geometry.size_bytes) {
        best = lone; /* to be told that the image is truncated, not that copies are missing */
    }
    if (best < 0) {
        rc = nothing_here(io, copies);
    } else {
        *sb = copies->page[best];
        sb->label[sizeof sb->label - 1] = '\0';
        rc = check_geometry(io, sb);
    }
    free(copies);
    return rc;
}

/* Two copies that agree on the namespace's newest state: the last two, unless an update that was
 * cut left it in others. They stay as they are until the new state is in the other two. */
static void choose_protected(struct hifc_blockio *io, const struct hifc_superblock *sb,
                             bool protected[HIFC_SUPERBLOCK_COPIES])
{
    struct copies *copies = calloc(1, sizeof *copies);
    int best = -1;
    if (copies) {
        read_copies(io, copies);
        best = choose(copies);
    }
    if (best < 0 || memcmp(copies->page[best].uuid, sb->uuid, sizeof sb->uuid) != 0) {
        protected[2] = protected[3] = true;
    } else {
        for (unsigned copy = HIFC_SUPERBLOCK_COPIES, count = 0; copy-- > 0 && count < 2;) {
            protected[copy] = copies->valid[copy] && agree(&copies->page[copy],
                                                           &copies->page[best]);
            count += protected[copy];
        }
    }
    free(copies);
}

int hifc_superblock_write(struct hifc_blockio *io, struct hifc_superblock *sb)
{
    bool protected[HIFC_SUPERBLOCK_COPIES] = {false};
    if (sb->sequence == 0 || sb->size_bytes > hifc_blockio_device(io)->geometry.size_bytes) {
        return hifc_fail(-EINVAL, "superblock update %" PRIu64 " of a namespace of %" PRIu64
                         " bytes: an internal error, please report it", sb->sequence,
                         sb->size_bytes);
    }
    choose_protected(io, sb, protected);
    for (unsigned turn = 0; turn < 2; turn++) {
        for (unsigned copy = 0; copy < HIFC_SUPERBLOCK_COPIES; copy++) {
            if (protected[copy] != (turn == 1)) {
                continue;
            }
            uint64_t offset = hifc_superblock_offset(copy, sb->size_bytes);
            hifc_page_seal(sb, HIFC_MAGIC_SUPER, NULL, offset, 0);
            int rc = hifc_blockio_write(io, offset, sb, sizeof *sb);
            if (rc != 0) {
                return rc;
            }
        }
        int rc = hifc_blockio_flush(io);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}
