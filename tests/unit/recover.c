/* SPDX-License-Identifier: Apache-2.0
 *
 * Recovery against images made by hand: what counts, what is dropped, what is damage. The images
 * are written by layout.h alone, so that the namespace's own writer cannot hide a shared mistake.
 */
#include "memory_io.h"
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#include "format/recover.c"
#include "format/scan.c"
#include "format/merge.c"

#define SEGMENT_BYTES (256u << 10)
#define SEGMENTS 14u
#define KEYS 600u
#define PAGE HIFC_PAGE_BYTES

/* ---- the image builder ----------------------------------------------------------------------- */

struct image {
    struct hifc_blockio *io;
    struct hifc_superblock sb;
    uint64_t sequence, mark, epoch;
    uint32_t generations[SEGMENTS];
};

struct writer {
    struct image *image;
    uint32_t segment;
    uint8_t cls;
    uint64_t epoch;
    uint32_t offset, index, previous; /* of the next batch */
    uint32_t packed, packed_end;      /* room in a page of small values */
    uint32_t bytes;                   /* of the batch under construction */
    struct hifc_batch_header header;
    struct hifc_summary_entry entries[8192];
    uint32_t entry_count, batch_entry_first;
    uint64_t first_sequence, last_sequence;
};

static uint64_t seed;

static uint32_t draw(uint32_t below)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((seed >> 33) % below);
}

static struct hifc_key key_of(uint32_t id)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes + 3, &id, sizeof id);
    return key;
}

static uint32_t id_of(const struct hifc_key *key)
{
    uint32_t id;
    memcpy(&id, key->bytes + 3, sizeof id);
    return id;
}

static uint8_t *at(struct image *image, uint32_t segment, uint32_t offset)
{
    return image->io->memory + hifc_segment_offset(SEGMENT_BYTES, segment) + offset;
}

static void put_header(struct image *image, uint32_t segment, uint8_t state, uint8_t cls,
                       uint64_t epoch)
{
    struct hifc_segment_header header = {.generation = image->generations[segment],
                                         .epoch = epoch,
                                         .open_sequence = image->sequence,
                                         .segment = segment,
                                         .state = state,
                                         .cls = cls};
    hifc_page_seal(&header, HIFC_MAGIC_SEGMENT, image->sb.uuid,
                   hifc_segment_offset(SEGMENT_BYTES, segment), 0);
    memcpy(at(image, segment, 0), &header, sizeof header);
}

static void image_init(struct image *image)
{
    uint64_t size = HIFC_DATA_OFFSET_BYTES + HIFC_TAIL_BYTES + SEGMENTS * (uint64_t)SEGMENT_BYTES;
    *image = (struct image){.io = memory_io_new(size, 512), .epoch = 5};
    image->sb = (struct hifc_superblock){.uuid = {9, 8, 7},
                                         .size_bytes = size,
                                         .segment_size_bytes = SEGMENT_BYTES,
                                         .data_offset_bytes = HIFC_DATA_OFFSET_BYTES,
                                         .segment_count = SEGMENTS,
                                         .open_epoch = 6};
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        image->generations[i] = 1;
        put_header(image, i, HIFC_DISK_FREE, 0, 0);
    }
}

static struct writer *segment_begin(struct image *image, uint32_t segment, uint8_t cls)
{
    struct writer *w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    *w = (struct writer){.image = image, .segment = segment, .cls = cls, .epoch = image->epoch,
                         .offset = PAGE};
    put_header(image, segment, HIFC_DISK_OPEN, cls, image->epoch);
    w->previous = ((struct hifc_segment_header *)at(image, segment, 0))->head.checksum;
    w->bytes = PAGE;
    return w;
}

static uint32_t place(struct writer *w, uint32_t length, uint32_t parts, bool own_pages)
{
    uint32_t extent = (uint32_t)hifc_extent_bytes(length, parts);
    if (!own_pages && !hifc_extent_on_pages(length, parts)) {
        if (w->packed + extent > w->packed_end) {
            w->packed = w->offset + w->bytes;
            w->packed_end = w->packed + PAGE;
            w->bytes += PAGE;
        }
        w->packed += extent;
        return w->packed - extent;
    }
    uint32_t offset = w->offset + w->bytes;
    w->bytes += (extent + PAGE - 1) / PAGE * PAGE;
    return offset;
}

/* Writes a value of random bytes, its table, and returns its checksum. */
static uint32_t fill(struct writer *w, uint32_t id, uint32_t offset, uint32_t length,
                     uint32_t parts)
{
    uint8_t *value = at(w->image, w->segment, offset);
    struct hifc_key key = key_of(id);
    for (uint32_t i = 0; i < length; i++) {
        value[i] = (uint8_t)draw(256);
    }
    uint32_t raw = hifc_crc32c_update(0, value, length);
    if (parts > 1) {
        uint8_t *table = value + hifc_table_offset(length);
        for (uint32_t i = 0; i < parts; i++) {
            uint32_t part = hifc_crc32c_update(0, value + length / parts * i, length / parts);
            memcpy(table + i * 4, &part, 4);
        }
        raw = hifc_crc32c_update(0, table, parts * 4);
    }
    return hifc_bind_checksum(raw, &key, length, parts);
}

static struct hifc_disk_entry *add(struct writer *w, uint32_t id, uint8_t kind)
{
    CHECK(w->header.entry_count < HIFC_BATCH_ENTRIES_MAX);
    struct hifc_disk_entry *entry = &w->header.entries[w->header.entry_count++];
    *entry = (struct hifc_disk_entry){.key = key_of(id), .kind = kind};
    return entry;
}

static void add_value(struct writer *w, uint32_t id, uint32_t length, uint32_t parts)
{
    struct hifc_disk_entry *entry = add(w, id, HIFC_ENTRY_VALUE);
    uint32_t offset = place(w, length, parts, false);
    entry->offset = offset / HIFC_UNIT_BYTES;
    entry->length = length;
    entry->part_count = (uint16_t)parts;
    entry->checksum = fill(w, id, offset, length, parts);
}

static uint32_t add_reserved(struct writer *w, uint32_t id, uint32_t length)
{
    struct hifc_disk_entry *entry = add(w, id, HIFC_ENTRY_RESERVED);
    uint32_t offset = place(w, length, 1, true);
    entry->offset = offset / HIFC_UNIT_BYTES;
    entry->length = length;
    entry->part_count = 1;
    return offset;
}

static void add_publish(struct writer *w, uint32_t id, uint32_t offset, uint32_t length)
{
    struct hifc_disk_entry *entry = add(w, id, HIFC_ENTRY_PUBLISH);
    entry->offset = offset / HIFC_UNIT_BYTES;
    entry->length = length;
    entry->part_count = 1;
    entry->checksum = fill(w, id, offset, length, 1);
}

/* Returns the offset of the header. */
static uint32_t batch_end(struct writer *w)
{
    struct hifc_batch_header *header = &w->header;
    uint32_t offset = w->offset;
    header->generation = w->image->generations[w->segment];
    header->epoch = w->epoch;
    header->sequence = ++w->image->sequence;
    header->flushed_sequence = w->image->mark;
    header->segment = w->segment;
    header->index = w->index++;
    header->previous = w->previous;
    header->length_pages = w->bytes / PAGE;
    hifc_page_seal(header, HIFC_MAGIC_BATCH, w->image->sb.uuid,
                   hifc_segment_offset(SEGMENT_BYTES, w->segment) + offset, header->generation);
    w->previous = header->head.checksum;
    memcpy(at(w->image, w->segment, offset), header, sizeof *header);
    for (uint32_t i = 0; i < header->entry_count; i++) {
        if (header->entries[i].kind != HIFC_ENTRY_RESERVED) {
            struct hifc_summary_entry *to = &w->entries[w->entry_count++];
            *to = (struct hifc_summary_entry){header->entries[i], header->sequence};
            to->entry.kind = to->entry.kind == HIFC_ENTRY_TOMBSTONE ? HIFC_ENTRY_TOMBSTONE
                                                                    : HIFC_ENTRY_VALUE;
        }
    }
    w->first_sequence = w->first_sequence ? w->first_sequence : header->sequence;
    w->last_sequence = header->sequence;
    w->offset += w->bytes;
    w->bytes = PAGE;
    w->packed = w->packed_end = 0;
    memset(header, 0, sizeof *header);
    return offset;
}

static uint32_t batch_of(struct writer *w, uint32_t id, uint32_t length)
{
    add_value(w, id, length, 1);
    return batch_end(w);
}

static void segment_seal(struct writer *w)
{
    uint32_t pages = (w->entry_count * 40 + PAGE - 1) / PAGE * PAGE;
    uint64_t base = hifc_segment_offset(SEGMENT_BYTES, w->segment);
    struct hifc_footer footer = {.generation = w->image->generations[w->segment],
                                 .epoch = w->epoch,
                                 .first_sequence = w->first_sequence,
                                 .last_sequence = w->last_sequence,
                                 .segment = w->segment,
                                 .entry_count = w->entry_count,
                                 .batch_count = w->index,
                                 .chain = w->previous,
                                 .summary_offset = SEGMENT_BYTES - PAGE - pages,
                                 .used_bytes = w->offset,
                                 .cls = w->cls};
    CHECK(footer.used_bytes <= footer.summary_offset);
    memset(at(w->image, w->segment, footer.summary_offset), 0, pages);
    memcpy(at(w->image, w->segment, footer.summary_offset), w->entries, w->entry_count * 40ull);
    footer.summary_checksum =
        hifc_summary_checksum(w->entries, w->entry_count, w->image->sb.uuid,
                              base + footer.summary_offset, footer.generation);
    hifc_page_seal(&footer, HIFC_MAGIC_FOOTER, w->image->sb.uuid, base + SEGMENT_BYTES - PAGE,
                   footer.generation);
    memcpy(at(w->image, w->segment, SEGMENT_BYTES - PAGE), &footer, sizeof footer);
}

/* ---- what recovery says --------------------------------------------------------------------- */

struct seen {
    struct hifc_recovered_segment segments[SEGMENTS];
    uint32_t segment_count;
    struct hifc_summary_entry newest[KEYS]; /* kind 0: nothing, or removed */
    uint32_t where[KEYS];
    uint64_t applied, last_sequence;
    struct hifc_recover_result result;
};

static int see_segment(void *ctx, const struct hifc_recovered_segment *segment)
{
    struct seen *seen = ctx;
    CHECK_EQ(segment->segment, seen->segment_count);
    CHECK_EQ(seen->applied, 0);
    CHECK((segment->state == HIFC_RECOVERED_SCANNED && segment->entry_count > 0) ==
          (segment->entries != NULL && segment->entry_count > 0));
    seen->segments[seen->segment_count++] = *segment;
    return 0;
}

static int see_entry(void *ctx, uint32_t segment, const struct hifc_summary_entry *entry)
{
    struct seen *seen = ctx;
    CHECK(entry->sequence >= seen->last_sequence);
    CHECK(entry->entry.kind == HIFC_ENTRY_VALUE || entry->entry.kind == HIFC_ENTRY_TOMBSTONE);
    CHECK_EQ(seen->segments[segment].cls, HIFC_REUSE);
    seen->last_sequence = entry->sequence;
    seen->applied++;
    uint32_t id = id_of(&entry->entry.key);
    CHECK(id < KEYS);
    seen->newest[id] = *entry;
    seen->where[id] = segment;
    if (entry->entry.kind == HIFC_ENTRY_TOMBSTONE) {
        memset(&seen->newest[id], 0, sizeof seen->newest[id]);
    }
    return 0;
}

static int try_recover(struct image *image, bool scan_all, struct seen *seen)
{
    struct hifc_recover_opts opts = {.scan_all = scan_all};
    struct hifc_recover_callbacks callbacks = {seen, see_segment, see_entry};
    memset(seen, 0, sizeof *seen);
    return hifc_recover(image->io, &image->sb, &opts, &callbacks, &seen->result);
}

static struct seen recovered(struct image *image)
{
    static struct seen seen;
    CHECK_EQ(try_recover(image, false, &seen), 0);
    CHECK_EQ(seen.segment_count, SEGMENTS);
    CHECK_EQ(seen.result.accepted, seen.applied);
    CHECK(seen.result.next_sequence > seen.result.flushed_sequence);
    CHECK((seen.result.damaged == 0) == (seen.result.first_damage[0] == '\0'));
    return seen;
}

static bool has(const struct seen *seen, uint32_t id)
{
    return seen->newest[id].entry.kind == HIFC_ENTRY_VALUE;
}

/* ---- tests ---------------------------------------------------------------------------------- */

TEST(an_empty_namespace_is_all_free)
{
    struct image image;
    image_init(&image);
    struct seen seen = recovered(&image);
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        CHECK_EQ(seen.segments[i].state, HIFC_RECOVERED_FREE);
        CHECK_EQ(seen.segments[i].generation, 1);
    }
    CHECK_EQ(seen.result.next_sequence, 1);
    CHECK_EQ(seen.applied, 0);
    memory_io_free(image.io);
}

TEST(the_newest_entry_of_a_key_wins_over_sealed_and_open_segments)
{
    struct image image;
    image_init(&image);
    struct writer *a = segment_begin(&image, 3, HIFC_REUSE);
    struct writer *b = segment_begin(&image, 1, HIFC_REUSE);
    batch_of(a, 1, 5000);  /* 1 */
    batch_of(b, 1, 100);   /* 2 */
    batch_of(a, 2, 100);   /* 3 */
    add(b, 2, HIFC_ENTRY_TOMBSTONE);
    batch_end(b);          /* 4 */
    batch_of(b, 3, 40000); /* 5 */
    batch_of(a, 3, 64);    /* 6 */
    segment_seal(a);
    struct seen seen = recovered(&image);
    CHECK_EQ(seen.applied, 6);
    CHECK(has(&seen, 1) && seen.where[1] == 1 && seen.newest[1].sequence == 2);
    CHECK(!has(&seen, 2));
    CHECK(has(&seen, 3) && seen.where[3] == 3);
    CHECK_EQ(seen.segments[3].state, HIFC_RECOVERED_SEALED);
    CHECK_EQ(seen.segments[1].state, HIFC_RECOVERED_SCANNED);
    CHECK_EQ(seen.segments[1].used_bytes, b->offset);
    CHECK_EQ(seen.segments[1].batch_count, 3);
    CHECK_EQ(seen.segments[1].chain, b->previous);
    CHECK_EQ(seen.segments[1].first_sequence, 2);
    CHECK_EQ(seen.segments[1].last_sequence, 5);
    CHECK_EQ(seen.result.next_sequence, 7);
    CHECK_EQ(seen.result.damaged + seen.result.dropped, 0);
    free(a);
    free(b);
    memory_io_free(image.io);
}

/* Three batches above the mark; the second is torn in every way a cut can tear it. */
TEST(a_torn_batch_ends_what_counts)
{
    enum { HEADER, HEADER_TAIL, PAYLOAD, SMALL, TABLE, TOMBSTONE_HEADER, PUBLISH, WAYS };
    for (unsigned way = 0; way < WAYS; way++) {
        struct image image;
        image_init(&image);
        struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
        uint32_t room = 0;
        add_value(w, 1, 9000, 3);
        room = add_reserved(w, 5, 6000);
        batch_end(w);
        add_value(w, 2, 8192, 2);
        add_value(w, 3, 20, 1);
        add(w, 1, HIFC_ENTRY_TOMBSTONE);
        add_publish(w, 5, room, 6000);
        uint32_t second = batch_end(w);
        batch_of(w, 4, 100);
        struct seen seen = recovered(&image);
        CHECK(!has(&seen, 1) && has(&seen, 2) && has(&seen, 3) && has(&seen, 4) && has(&seen, 5));
        const struct hifc_batch_header *header = (void *)at(&image, 0, second);
        uint32_t places[WAYS] = {
            [HEADER] = second,
            [HEADER_TAIL] = second + 4095,
            [PAYLOAD] = header->entries[0].offset * 16 + 8191,
            [SMALL] = header->entries[1].offset * 16 + 19,
            [TABLE] = header->entries[0].offset * 16 + 8192 + 7,
            [TOMBSTONE_HEADER] = second + 128 + 2 * 32,
            [PUBLISH] = room + 5999,
        };
        *at(&image, 0, places[way]) ^= 0x40;
        seen = recovered(&image);
        CHECK(has(&seen, 1) && !has(&seen, 2) && !has(&seen, 3) && !has(&seen, 4) &&
              !has(&seen, 5));
        CHECK_EQ(seen.segments[0].batch_count, 1);
        CHECK_EQ(seen.segments[0].used_bytes, second);
        CHECK(seen.result.dropped >= 1);
        CHECK_EQ(seen.result.damaged, 0);
        CHECK_EQ(seen.result.next_sequence, 4); /* above what was dropped, too */
        free(w);
        memory_io_free(image.io);
    }
}

TEST(unfilled_room_breaks_nothing)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    uint32_t room = add_reserved(w, 5, 70000);
    batch_end(w);
    memset(at(&image, 0, room), 0xee, 70000);
    batch_of(w, 1, 100);
    struct seen seen = recovered(&image);
    CHECK(has(&seen, 1) && !has(&seen, 5));
    CHECK_EQ(seen.applied, 1);
    CHECK_EQ(seen.segments[0].entry_count, 1);
    CHECK_EQ(seen.segments[0].first_sequence, 1);
    free(w);
    memory_io_free(image.io);
}

/* Mark in another segment's header: what was flushed is not verified again, and a hole in it is
 * damage that the rest survives. */
TEST(a_hole_below_the_mark_is_damage_and_is_scanned_past)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    struct writer *other = segment_begin(&image, 1, HIFC_REUSE);
    uint32_t holes[2];
    batch_of(w, 1, 100);
    holes[0] = batch_of(w, 2, 30000);
    batch_of(w, 3, 100);
    holes[1] = batch_of(w, 4, 100);
    batch_of(w, 5, 5000); /* sequence 5 */
    image.mark = 5;
    batch_of(w, 6, 5000);
    batch_of(other, 7, 100);
    *at(&image, 0, holes[0] + 40) ^= 1;
    memset(at(&image, 0, holes[1]), 0, 2 * PAGE);
    struct seen seen = recovered(&image);
    CHECK(has(&seen, 1) && !has(&seen, 2) && has(&seen, 3) && !has(&seen, 4) && has(&seen, 5));
    CHECK(has(&seen, 6) && has(&seen, 7));
    CHECK_EQ(seen.result.damaged, 2);
    CHECK(strstr(seen.result.first_damage, "segment 0"));
    CHECK_EQ(seen.segments[0].batch_count, 4);
    CHECK_EQ(seen.result.flushed_sequence, 5);

    /* Without the mark the same holes end the segment's history: nothing was promised. */
    memory_io_free(image.io);
    image_init(&image);
    free(w);
    w = segment_begin(&image, 0, HIFC_REUSE);
    batch_of(w, 1, 100);
    uint32_t hole = batch_of(w, 2, 30000);
    batch_of(w, 3, 100);
    *at(&image, 0, hole + 40) ^= 1;
    seen = recovered(&image);
    CHECK(has(&seen, 1) && !has(&seen, 3));
    CHECK_EQ(seen.result.damaged, 0);
    CHECK_EQ(seen.result.dropped, 1);
    free(w);
    free(other);
    memory_io_free(image.io);
}

TEST(a_first_batch_that_is_lost_below_the_mark_is_damage)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    uint32_t first = batch_of(w, 1, 100);
    batch_of(w, 2, 100);
    image.mark = 2;
    batch_of(w, 3, 100);
    image.io->bad_from = hifc_segment_offset(SEGMENT_BYTES, 0) + first;
    image.io->bad_bytes = 512;
    struct seen seen = recovered(&image);
    CHECK(!has(&seen, 1) && has(&seen, 2) && has(&seen, 3));
    CHECK_EQ(seen.result.damaged, 1);
    free(w);
    memory_io_free(image.io);
}

/* The case that makes marks belong to an epoch: a batch behind a torn one was dropped once; later
 * marks have passed its number by, and it must stay dropped. */
TEST(what_an_earlier_recovery_dropped_stays_dropped)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    batch_of(w, 1, 100);
    uint32_t torn = batch_of(w, 2, 100);
    batch_of(w, 3, 100);
    *at(&image, 0, torn) ^= 1;
    image.epoch++;
    struct writer *later = segment_begin(&image, 1, HIFC_REUSE);
    image.sequence += 10;
    batch_of(later, 4, 100);
    image.mark = image.sequence;
    batch_of(later, 5, 100);
    struct seen seen = recovered(&image);
    CHECK(has(&seen, 1) && !has(&seen, 2) && !has(&seen, 3) && has(&seen, 4) && has(&seen, 5));
    CHECK_EQ(seen.result.damaged, 0);
    free(w);
    free(later);
    memory_io_free(image.io);
}

TEST(nothing_of_an_earlier_life_of_a_segment_counts)
{
    struct image image;
    image_init(&image);
    struct writer *old = segment_begin(&image, 0, HIFC_REUSE);
    for (uint32_t i = 0; i < 20; i++) {
        batch_of(old, 10 + i, 100);
    }
    segment_seal(old);
    image.generations[0]++; /* freed and opened again */
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    batch_of(w, 1, 100);
    struct seen seen = recovered(&image);
    CHECK_EQ(seen.applied, 1);
    CHECK(has(&seen, 1));

    /* The same generation, opened a second time: the header of the first try was lost. */
    image.epoch++;
    image.sequence = 50;
    free(w);
    w = segment_begin(&image, 0, HIFC_REUSE);
    old->epoch = image.epoch - 1;
    batch_of(w, 2, 100);
    old->offset = w->offset;
    old->index = 1;
    image.sequence = 99;
    batch_of(old, 40, 100); /* right where the chain goes on */
    seen = recovered(&image);
    CHECK_EQ(seen.applied, 1);
    CHECK(has(&seen, 2) && !has(&seen, 40));
    CHECK_EQ(seen.result.next_sequence, 101);
    CHECK_EQ(seen.result.damaged, 0);
    struct writer *other = segment_begin(&image, 1, HIFC_REUSE);
    image.mark = 100; /* and it does not become a hole in this life, either */
    batch_of(other, 3, 100);
    seen = recovered(&image);
    CHECK(has(&seen, 2) && has(&seen, 3) && !has(&seen, 40));
    CHECK_EQ(seen.result.damaged, 0);
    free(other);
    free(old);
    free(w);
    memory_io_free(image.io);
}

TEST(a_broken_link_does_not_count_even_if_its_page_is_valid)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    batch_of(w, 1, 100);
    w->previous ^= 1;
    batch_of(w, 2, 100);
    struct seen seen = recovered(&image);
    CHECK(has(&seen, 1) && !has(&seen, 2));
    CHECK_EQ(seen.result.dropped, 1);
    free(w);
    memory_io_free(image.io);
}

TEST(swap_of_an_earlier_owner_is_dead_as_a_whole)
{
    struct image image;
    image_init(&image);
    struct writer *open = segment_begin(&image, 0, HIFC_SWAP);
    struct writer *sealed = segment_begin(&image, 1, HIFC_SWAP);
    struct writer *reuse = segment_begin(&image, 2, HIFC_REUSE);
    uint32_t hole = batch_of(reuse, 3, 100);
    batch_of(reuse, 4, 100);
    batch_of(open, 1, 100);
    batch_of(sealed, 2, 100);
    segment_seal(sealed);
    image.mark = 2;
    batch_of(open, 5, 100); /* only swap knows of the mark */
    *at(&image, 2, hole) ^= 1;
    struct seen seen = recovered(&image);
    CHECK_EQ(seen.segments[0].state, HIFC_RECOVERED_SWAP_DEAD);
    CHECK_EQ(seen.segments[1].state, HIFC_RECOVERED_SWAP_DEAD);
    CHECK_EQ(seen.applied, 1);
    CHECK(has(&seen, 4));
    CHECK_EQ(seen.result.damaged, 1);
    CHECK_EQ(seen.result.next_sequence, 6);
    free(open);
    free(sealed);
    free(reuse);
    memory_io_free(image.io);
}

TEST(a_damaged_segment_header_costs_that_segment_only)
{
    for (unsigned way = 0; way < 3; way++) {
        struct image image;
        image_init(&image);
        struct writer *a = segment_begin(&image, 0, HIFC_REUSE);
        struct writer *b = segment_begin(&image, 1, HIFC_REUSE);
        batch_of(a, 1, 100);
        batch_of(b, 2, 100);
        segment_seal(a);
        if (way == 0) {
            *at(&image, 0, 20) ^= 1;
        } else if (way == 1) {
            image.io->bad_from = hifc_segment_offset(SEGMENT_BYTES, 0);
            image.io->bad_bytes = PAGE;
        } else {
            memset(at(&image, 0, 0), 0, PAGE);
        }
        struct seen seen = recovered(&image);
        CHECK_EQ(seen.segments[0].state, HIFC_RECOVERED_DAMAGED);
        CHECK(!has(&seen, 1) && has(&seen, 2));
        CHECK_EQ(seen.result.damaged, 1);
        CHECK(strstr(seen.result.first_damage, "segment 0"));
        CHECK(seen.result.next_sequence > SEGMENTS * (SEGMENT_BYTES / PAGE));
        free(a);
        free(b);
        memory_io_free(image.io);
    }
}

TEST(a_lost_path_is_an_error_and_not_damage)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    batch_of(w, 1, 100);
    static struct seen seen;
    uint64_t base = hifc_segment_offset(SEGMENT_BYTES, 0);
    uint64_t places[] = {base, base + PAGE, base + SEGMENT_BYTES - PAGE};
    image.io->bad_bytes = 512;
    image.io->gone = true;
    for (unsigned i = 0; i < 3; i++) {
        image.io->bad_from = places[i];
        CHECK_EQ(try_recover(&image, false, &seen), -EIO);
        CHECK_EQ(seen.segment_count, 0);
    }
    free(w);
    memory_io_free(image.io);
}

TEST(without_footer_or_summary_the_batches_tell_the_same)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    for (uint32_t i = 0; i < 12; i++) {
        batch_of(w, i, 100 + i * 900);
    }
    add(w, 3, HIFC_ENTRY_TOMBSTONE);
    batch_end(w);
    segment_seal(w);
    struct seen sealed = recovered(&image);
    CHECK_EQ(sealed.segments[0].state, HIFC_RECOVERED_SEALED);
    CHECK(!has(&sealed, 3) && has(&sealed, 11));
    const struct hifc_footer *footer = (void *)at(&image, 0, SEGMENT_BYTES - PAGE);
    uint32_t places[] = {SEGMENT_BYTES - PAGE + 50, footer->summary_offset + 13};
    for (unsigned way = 0; way < 2; way++) {
        *at(&image, 0, places[way]) ^= 4;
        struct seen scanned = recovered(&image);
        CHECK_EQ(scanned.segments[0].state, HIFC_RECOVERED_SCANNED);
        CHECK_EQ(scanned.result.damaged, 0); /* a cut while sealing leaves the same */
        CHECK(memcmp(scanned.newest, sealed.newest, sizeof sealed.newest) == 0);
        CHECK_EQ(scanned.segments[0].chain, sealed.segments[0].chain);
        CHECK_EQ(scanned.segments[0].used_bytes, sealed.segments[0].used_bytes);
        CHECK_EQ(scanned.segments[0].batch_count, sealed.segments[0].batch_count);
        CHECK_EQ(scanned.segments[0].last_sequence, sealed.segments[0].last_sequence);
        *at(&image, 0, places[way]) ^= 4;
    }
    image.io->bad_from = hifc_segment_offset(SEGMENT_BYTES, 0) + footer->summary_offset;
    image.io->bad_bytes = 512;
    struct seen unread = recovered(&image);
    CHECK_EQ(unread.segments[0].state, HIFC_RECOVERED_SCANNED);
    CHECK_EQ(unread.result.damaged, 1);
    CHECK(memcmp(unread.newest, sealed.newest, sizeof sealed.newest) == 0);
    image.io->bad_bytes = 0;
    /* A sealed segment that lost a header: the summary serves, fsck reports. */
    *at(&image, 0, PAGE + 8) ^= 1;
    struct seen served = recovered(&image);
    CHECK_EQ(served.result.damaged, 0);
    CHECK(memcmp(served.newest, sealed.newest, sizeof sealed.newest) == 0);
    static struct seen checked;
    CHECK_EQ(try_recover(&image, true, &checked), 0);
    CHECK(checked.result.damaged > 0);
    CHECK(memcmp(checked.newest, sealed.newest, sizeof sealed.newest) == 0);
    free(w);
    memory_io_free(image.io);
}

/* ---- random histories ------------------------------------------------------------------------ */

struct history {
    struct image image;
    struct writer *writers[SEGMENTS];
    uint32_t count;
    struct hifc_summary_entry newest[KEYS];
};

static void random_batch(struct history *history, struct writer *w)
{
    for (uint32_t n = 1 + draw(4); n > 0; n--) {
        uint32_t id = draw(KEYS);
        if (draw(6) == 0) {
            add(w, id, HIFC_ENTRY_TOMBSTONE);
        } else if (draw(8) == 0) {
            add_reserved(w, id, 1 + draw(9000));
        } else {
            uint32_t parts = draw(3) == 0 ? 2 + draw(5) : 1;
            add_value(w, id, parts * (1 + draw(draw(4) == 0 ? 4000 : 200)), parts);
        }
    }
    uint32_t before = w->entry_count;
    batch_end(w);
    for (uint32_t i = before; w->cls == HIFC_REUSE && i < w->entry_count; i++) {
        uint32_t id = id_of(&w->entries[i].entry.key);
        memset(&history->newest[id], 0, sizeof history->newest[id]);
        if (w->entries[i].entry.kind == HIFC_ENTRY_VALUE) {
            history->newest[id] = w->entries[i];
        }
    }
}

/* Three streams that write and roll over; about half of the full segments are sealed. */
static void random_history(struct history *history, uint32_t rounds)
{
    struct writer *open[3] = {NULL};
    memset(history, 0, sizeof *history);
    image_init(&history->image);
    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t stream = draw(3);
        struct writer *w = open[stream];
        if (w && w->offset > SEGMENT_BYTES - 120000) {
            if (draw(2)) {
                segment_seal(w);
            }
            w = NULL;
        }
        if (!w) {
            if (history->count == SEGMENTS) {
                break;
            }
            w = segment_begin(&history->image, history->count,
                              stream == 2 ? HIFC_SWAP : HIFC_REUSE);
            history->writers[history->count++] = w;
        }
        open[stream] = w;
        random_batch(history, w);
        if (draw(10) == 0) {
            history->image.mark = history->image.sequence;
        }
    }
}

static void history_free(struct history *history)
{
    for (uint32_t i = 0; i < history->count; i++) {
        free(history->writers[i]);
    }
    memory_io_free(history->image.io);
}

TEST(random_histories_come_back_whole_by_summary_and_by_full_scan)
{
    static struct history history;
    static struct seen checked;
    for (uint32_t i = 0; i < 60; i++) {
        seed = 77 + i;
        random_history(&history, 20 + draw(300));
        struct seen seen = recovered(&history.image);
        CHECK(memcmp(seen.newest, history.newest, sizeof seen.newest) == 0);
        CHECK_EQ(seen.result.damaged + seen.result.dropped, 0);
        CHECK_EQ(seen.result.next_sequence, history.image.sequence + 1);
        CHECK_EQ(try_recover(&history.image, true, &checked), 0);
        CHECK_EQ(checked.result.damaged, 0);
        CHECK(memcmp(checked.newest, history.newest, sizeof seen.newest) == 0);
        for (uint32_t s = 0; s < SEGMENTS; s++) {
            memset(at(&history.image, s, SEGMENT_BYTES - PAGE), 0, PAGE);
        }
        seen = recovered(&history.image);
        CHECK(memcmp(seen.newest, history.newest, sizeof seen.newest) == 0);
        CHECK_EQ(seen.result.damaged + seen.result.dropped, 0);
        history_free(&history);
    }
}

static bool payload_matches(struct image *image, uint32_t segment,
                            const struct hifc_disk_entry *entry)
{
    struct hifc_scan_source source;
    bool good = false;
    CHECK_EQ(hifc_scan_source_init(&source, image->io, &image->sb), 0);
    turn_to(&source, segment);
    CHECK_EQ(verify_entry(&source, entry, &good), 0);
    hifc_scan_source_free(&source);
    return good;
}

/* Sectors of unflushed batches are lost at random: nothing above the mark that does not match its
 * checksum is taken, nothing up to the mark is missing, and each segment keeps a prefix. */
TEST(random_cuts_leave_a_prefix_of_every_segment)
{
    static struct history history;
    uint64_t dropped = 0, kept = 0;
    for (uint32_t i = 0; i < 150; i++) {
        seed = 4000 + i;
        random_history(&history, 20 + draw(200));
        struct image *image = &history.image;
        uint64_t mark = 0;
        for (uint32_t s = 0; s < history.count; s++) {
            struct writer *w = history.writers[s];
            for (uint32_t offset = PAGE; offset < w->offset;) {
                struct hifc_batch_header header;
                memcpy(&header, at(image, s, offset), sizeof header);
                mark = header.flushed_sequence > mark ? header.flushed_sequence : mark;
                offset += header.length_pages * PAGE;
            }
        }
        for (uint32_t s = 0; s < history.count; s++) {
            const struct hifc_footer *footer = (void *)at(image, s, SEGMENT_BYTES - PAGE);
            for (uint32_t offset = PAGE; footer->head.magic == 0 &&
                                         offset < history.writers[s]->offset;) {
                struct hifc_batch_header header;
                memcpy(&header, at(image, s, offset), sizeof header);
                uint32_t bytes = header.length_pages * PAGE;
                if (header.sequence > mark && draw(6) == 0) {
                    memset(at(image, s, offset + draw(bytes / 512) * 512), 0, 512);
                }
                offset += bytes;
            }
        }
        struct seen seen = recovered(image);
        CHECK_EQ(seen.result.damaged, 0);
        dropped += seen.result.dropped;
        for (uint32_t s = 0; s < history.count; s++) {
            const struct writer *w = history.writers[s];
            const struct hifc_recovered_segment *found = &seen.segments[s];
            if (found->state == HIFC_RECOVERED_SWAP_DEAD) {
                continue;
            }
            for (uint32_t e = 0; e < w->entry_count; e++) {
                CHECK(w->entries[e].sequence > mark || e < found->entry_count);
            }
            kept += found->entry_count;
        }
        for (uint32_t id = 0; id < KEYS; id++) {
            const struct hifc_summary_entry *entry = &seen.newest[id];
            CHECK(!has(&seen, id) || entry->sequence <= mark ||
                  payload_matches(image, seen.where[id], &entry->entry));
        }
        history_free(&history);
    }
    CHECK(dropped > 0 && kept > 0);
}

/* Whatever the bytes, recovery ends, stays within memory, and hands out only what is in place. */
TEST(random_damage_never_breaks_recovery)
{
    static struct history history;
    static struct seen seen;
    for (uint32_t i = 0; i < 150; i++) {
        seed = 9000 + i;
        random_history(&history, 10 + draw(150));
        struct image *image = &history.image;
        uint64_t size = image->sb.size_bytes - HIFC_DATA_OFFSET_BYTES - HIFC_TAIL_BYTES;
        for (uint32_t n = 1 + draw(40); n > 0; n--) {
            uint64_t page = draw((uint32_t)(size / PAGE));
            uint8_t *bytes = image->io->memory + HIFC_DATA_OFFSET_BYTES + page * PAGE;
            if (draw(3) == 0) {
                memset(bytes, (int)draw(256), PAGE);
            } else {
                bytes[draw(128)] ^= (uint8_t)(1 + draw(255));
            }
        }
        image->io->bad_from = HIFC_DATA_OFFSET_BYTES + draw((uint32_t)(size / PAGE)) * PAGE;
        image->io->bad_bytes = draw(2) * 512;
        CHECK_EQ(try_recover(image, i % 2, &seen), 0);
        CHECK_EQ(seen.segment_count, SEGMENTS);
        history_free(&history);
    }
}

/* Pages that are valid by checksum but make no sense: a writer with a bug, or worse. */
TEST(sealed_nonsense_is_refused)
{
    for (unsigned way = 0; way < 8; way++) {
        struct image image;
        image_init(&image);
        struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
        batch_of(w, 1, 100);
        add_value(w, 2, 100, 1);
        struct hifc_disk_entry *entry = &w->header.entries[0];
        switch (way) {
        case 0:
            entry->offset = 0;
            break;
        case 1:
            entry->length = UINT32_MAX;
            break;
        case 2:
            entry->kind = 77;
            break;
        case 3:
            entry->offset = UINT32_MAX;
            break;
        case 4:
            w->bytes = 0;
            break;
        case 5:
            w->bytes = UINT32_MAX / PAGE * PAGE;
            break;
        case 6:
            entry->part_count = UINT16_MAX;
            break;
        default:
            entry->kind = HIFC_ENTRY_PUBLISH;
            entry->offset = PAGE / HIFC_UNIT_BYTES;
            break;
        }
        batch_end(w);
        struct seen seen = recovered(&image);
        CHECK(has(&seen, 1) && !has(&seen, 2));
        free(w);
        memory_io_free(image.io);
    }
}

static int stop_segment(void *ctx, const struct hifc_recovered_segment *segment)
{
    (void)segment;
    return --*(int *)ctx == 0 ? -ECANCELED : 0;
}

static int stop_entry(void *ctx, uint32_t segment, const struct hifc_summary_entry *entry)
{
    (void)segment;
    (void)entry;
    return --*(int *)ctx == 0 ? -ECANCELED : 0;
}

TEST(a_callback_can_stop_it)
{
    struct image image;
    image_init(&image);
    struct writer *w = segment_begin(&image, 0, HIFC_REUSE);
    batch_of(w, 1, 100);
    batch_of(w, 2, 100);
    segment_seal(w);
    for (int steps = 1; steps <= (int)SEGMENTS + 2; steps++) {
        int left = steps;
        struct hifc_recover_opts opts = {0};
        struct hifc_recover_callbacks callbacks = {&left, stop_segment, stop_entry};
        struct hifc_recover_result result;
        CHECK_EQ(hifc_recover(image.io, &image.sb, &opts, &callbacks, &result), -ECANCELED);
        CHECK_EQ(left, 0);
    }
    free(w);
    memory_io_free(image.io);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
