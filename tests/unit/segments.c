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
    /* In the order in which they are emptied, in another one, and across a reopen none the less. */
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

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
