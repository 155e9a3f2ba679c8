/* SPDX-License-Identifier: Apache-2.0
 *
 * segments.c - which segment is opened next, and what the accounts of segments and of part counts
 * make of entries that come and go.
 */
#include "submit.h"

#include <errno.h>

#include "namespace/ns.h"

#define NAME "ram://segments-test?size=16MiB"
#define SEGMENT_BYTES (512u << 10)
#define HALF_BYTES (200u << 10) /* two of them fill a segment */

static struct hifc_ns *ns;
static uint64_t at;

static void open_ns(void)
{
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 8u << 20};
    CHECK_EQ(hifc_open(NAME, &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 1u << 20, &at), 0);
}

static void start(void)
{
    struct hifc_format_opts format = {.segment_size_bytes = SEGMENT_BYTES, .force = 1};
    CHECK_EQ(hifc_format(NAME, &format), 0);
    open_ns();
}

static void finish(void)
{
    struct hifc_check_result result;
    CHECK_EQ(hifc_check(ns, HIFC_CHECK_INDEX | HIFC_CHECK_PAYLOAD, &result), 0);
    if (result.problems) {
        fprintf(stderr, "%s\n", result.first_problem);
    }
    CHECK_EQ(result.problems, 0);
    CHECK_EQ(hifc_close(ns), 0);
}

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    return key;
}

static int put(uint32_t n, uint32_t length, uint32_t parts, uint8_t cls)
{
    struct hifc_req req = {.op = HIFC_OP_PUT, .cls = cls, .key = key_of(n), .buffer_offset = at,
                           .length = length, .part_count = parts};
    return submit_and_wait(ns, &req, 1);
}

static int delete(uint32_t n)
{
    struct hifc_req req = {.op = HIFC_OP_DELETE, .key = key_of(n)};
    return submit_and_wait(ns, &req, 1);
}

static uint32_t segment_of(uint32_t n)
{
    struct hifc_key key = key_of(n);
    return hifc_index_find(ns->index, &key)->segment;
}

/* ---- which is opened next -------------------------------------------------------------------- */

TEST(the_lowest_free_segment_is_opened_first_also_after_reclaim)
{
    start();
    for (uint32_t n = 0; n < 20; n++) {
        CHECK_EQ(put(n, HALF_BYTES, 1, HIFC_SWAP), HIFC_OK);
        CHECK_EQ(segment_of(n), n / 2);
    }
    static const uint32_t emptied[] = {2, 7, 5, 3};
    for (uint32_t i = 0; i < 4; i++) {
        CHECK_EQ(delete(2 * emptied[i]), HIFC_OK);
        CHECK_EQ(delete(2 * emptied[i] + 1), HIFC_OK);
        CHECK_EQ(ns_sync(ns), 0);
        ns_janitor_inline(ns);
        CHECK_EQ(ns->segments[emptied[i]].state, NS_FREE);
    }
    static const uint32_t lowest[] = {2, 3, 5, 7, 10, 11};
    for (uint32_t n = 0; n < 12; n++) {
        CHECK_EQ(put(100 + n, HALF_BYTES, 1, HIFC_REUSE), HIFC_OK);
        CHECK_EQ(segment_of(100 + n), lowest[n / 2]);
    }
    finish();
}

/* ---- part counts ----------------------------------------------------------------------------- */

TEST(part_counts_are_bounded_by_those_in_use_not_by_those_ever_seen)
{
    start();
    for (uint32_t parts = 1; parts <= 3 * NS_PART_COUNTS_MAX; parts++) {
        uint8_t cls = parts % 2 ? HIFC_SWAP : HIFC_REUSE;
        CHECK_EQ(put(parts, 16 * parts, parts, cls), HIFC_OK);
        CHECK_EQ(delete(parts), HIFC_OK);
    }
    /* The one of single parts, and one less than all others. */
    for (uint32_t parts = 2; parts <= NS_PART_COUNTS_MAX; parts++) {
        CHECK_EQ(put(parts, 16 * parts, parts, HIFC_REUSE), HIFC_OK);
    }
    uint32_t more = NS_PART_COUNTS_MAX + 1;
    CHECK_EQ(put(more, 16 * more, more, HIFC_SWAP), -EINVAL);
    CHECK_EQ(put(1000, 5000, 1, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(put(1001, 30, 30, HIFC_SWAP), HIFC_OK); /* one of those in use */
    CHECK_EQ(delete(30), HIFC_OK);
    CHECK_EQ(put(more, 16 * more, more, HIFC_SWAP), -EINVAL); /* there is one of it left */
    CHECK_EQ(put(1001, 5000, 1, HIFC_SWAP), HIFC_OK); /* replaced by another part count */
    CHECK_EQ(put(more, 16 * more, more, HIFC_SWAP), HIFC_OK);
    CHECK_EQ(put(more, 16 * (more + 1), more + 1, HIFC_SWAP), -EINVAL);
    CHECK_EQ(hifc_sync(ns), 0);
    struct hifc_check_result result;
    CHECK_EQ(hifc_check(ns, HIFC_CHECK_INDEX, &result), 0);
    CHECK_EQ(result.problems, 0);
    CHECK_EQ(hifc_close(ns), 0);
    open_ns(); /* what was swap is gone, and so is its part count */
    CHECK_EQ(put(more, 16 * more, more, HIFC_SWAP), HIFC_OK);
    finish();
}

TEST(a_reservation_holds_its_part_count_until_it_ends)
{
    start();
    for (uint32_t parts = 2; parts < NS_PART_COUNTS_MAX; parts++) {
        CHECK_EQ(put(parts, 16 * parts, parts, HIFC_REUSE), HIFC_OK);
    }
    uint32_t last = NS_PART_COUNTS_MAX;
    struct hifc_req reserve = {.op = HIFC_OP_RESERVE, .cls = HIFC_SWAP, .key = key_of(2000),
                               .length = 16 * last, .part_count = last};
    CHECK_EQ(submit_and_wait(ns, &reserve, 1), HIFC_OK);
    CHECK_EQ(put(last + 1, 16 * (last + 1), last + 1, HIFC_REUSE), -EINVAL);
    struct hifc_req abort_it = {.op = HIFC_OP_ABORT, .handle = reserve.handle};
    CHECK_EQ(submit_and_wait(ns, &abort_it, 1), HIFC_OK);
    CHECK_EQ(put(last + 1, 16 * (last + 1), last + 1, HIFC_REUSE), HIFC_OK);
    finish();
}

TEST(part_counts_come_and_go_with_reclaim)
{
    start();
    for (uint32_t n = 0; n < 2000; n++) { /* several times the device: most of it is evicted */
        uint32_t parts = n % 50 + 1 + n / 400 * 50;
        CHECK_EQ(put(n, parts * 1000, parts, HIFC_REUSE), HIFC_OK);
    }
    struct hifc_stats stats;
    CHECK_EQ(hifc_stats(ns, &stats), 0);
    CHECK(stats.evicted_count > 0);
    finish();
}

TEST(entries_that_were_evicted_and_come_back_do_not_keep_it_from_opening)
{
    start();
    for (uint32_t parts = 2; parts <= NS_PART_COUNTS_MAX; parts++) {
        CHECK_EQ(put(parts, 16 * parts, parts, HIFC_REUSE), HIFC_OK);
    }
    CHECK_EQ(hifc_close(ns), 0);
    open_ns();
    /* Evicted, and their segments are not freed before the end. */
    for (uint32_t parts = 2; parts <= NS_PART_COUNTS_MAX; parts++) {
        struct hifc_key key = key_of(parts);
        struct hifc_slot *slot = hifc_index_find(ns->index, &key);
        ns_lock(ns);
        ns->segments[slot->segment].leases = 1;
        ns_slot_dead(ns, slot);
        hifc_index_remove(ns->index, slot);
        ns_unlock(ns);
    }
    for (uint32_t parts = NS_PART_COUNTS_MAX + 1; parts < 2 * NS_PART_COUNTS_MAX; parts++) {
        CHECK_EQ(put(parts, 16 * parts, parts, HIFC_REUSE), HIFC_OK);
    }
    CHECK_EQ(hifc_sync(ns), 0);
    CHECK_EQ(hifc_close(ns), 0);
    open_ns();
    for (uint32_t parts = NS_PART_COUNTS_MAX + 1; parts < 2 * NS_PART_COUNTS_MAX; parts++) {
        CHECK(segment_of(parts) < ns->segment_count); /* what was synced last is there */
    }
    CHECK_EQ(hifc_index_count(ns->index), NS_PART_COUNTS_MAX - 1);
    CHECK_EQ(ns->stats.evicted_count, NS_PART_COUNTS_MAX - 1);
    finish();
}

/* ---- reservations ---------------------------------------------------------------------------- */

TEST(a_reserved_entry_on_flash_says_how_long_its_room_is)
{
    start();
    struct hifc_req reserve = {.op = HIFC_OP_RESERVE, .cls = HIFC_REUSE, .key = key_of(1),
                               .length = 40960, .part_count = 10};
    CHECK_EQ(submit_and_wait(ns, &reserve, 1), HIFC_OK);
    CHECK_EQ(hifc_sync(ns), 0);
    struct ns_reservation *reservation = ns_reservation_find(ns, reserve.handle);
    struct hifc_batch_header *header = aligned_alloc(HIFC_PAGE_BYTES, HIFC_PAGE_BYTES);
    CHECK(reservation && header);
    uint64_t place = ns_segment_base(ns, reservation->segment) + HIFC_PAGE_BYTES;
    CHECK_EQ(hifc_blockio_read(ns->io, place, header, HIFC_PAGE_BYTES), 0);
    CHECK_EQ(header->entry_count, 1);
    CHECK_EQ(header->entries[0].kind, HIFC_ENTRY_RESERVED);
    CHECK_EQ(header->entries[0].offset, reservation->offset);
    CHECK_EQ(header->entries[0].length, 40960);
    CHECK_EQ(header->entries[0].part_count, 10);
    free(header);
    struct hifc_req end = {.op = HIFC_OP_ABORT, .handle = reserve.handle};
    CHECK_EQ(submit_and_wait(ns, &end, 1), HIFC_OK);
    finish();
}

/* ---- tombstones ------------------------------------------------------------------------------ */

static uint32_t tombstones(void)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        sum += ns->segments[i].tombstones;
    }
    return sum;
}

/* Closes and seals what is open, then reclaims the oldest segment that nobody holds. */
static void reclaim(uint32_t expected)
{
    ns_lock(ns);
    for (struct ns_open *open = ns->open_list; open; open = open->next) {
        ns_open_close(ns, open);
    }
    ns_unlock(ns);
    ns_janitor_inline(ns);
    CHECK_EQ(ns_reclaim_one(ns), 1);
    CHECK_EQ(ns->segments[expected].state, NS_FREE);
}

TEST(a_tombstone_goes_on_while_an_older_segment_is_left_and_ends_with_it)
{
    start();
    struct hifc_key held = key_of(2);
    uint64_t lease;
    for (uint32_t n = 1; n <= 4; n++) {
        CHECK_EQ(put(n, HALF_BYTES, 1, HIFC_REUSE), HIFC_OK);
    }
    CHECK_EQ(hifc_lease(ns, &held, 1, 0, NULL, &lease), 0); /* segment 0 stays */
    CHECK_EQ(delete(1), HIFC_OK);
    CHECK_EQ(tombstones(), 1);
    CHECK_EQ(ns->segments[1].tombstones, 1);
    reclaim(1);
    CHECK_EQ(tombstones(), 1); /* it hides what segment 0 holds of key 1 */
    CHECK_EQ(hifc_lease_release(ns, lease), 0);
    reclaim(0);
    CHECK_EQ(tombstones(), 1);
    reclaim(2); /* where it stands now: nothing is older */
    CHECK_EQ(tombstones(), 0);
    finish();
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
