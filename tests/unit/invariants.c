/* SPDX-License-Identifier: Apache-2.0
 *
 * invariants.c - one violation of each kind is planted, in a process of its own, and ends it with the
 * condition that does not hold.
 */
#include "submit.h"

#include <signal.h>
#include <sys/wait.h>

#include "namespace/ns.h"
#include "util/invariant.h"

static struct hifc_ns *ns;

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    return key;
}

static void start(void)
{
    struct hifc_format_opts format = {.segment_size_bytes = 4u << 20, .force = 1};
    struct hifc_open_opts opts = {.drive = HIFC_INLINE, .pool_size_bytes = 4u << 20,
                                  .no_owner_socket = 1};
    uint64_t at = HIFC_NO_BUFFER;
    CHECK_EQ(hifc_format("ram://invariants?size=64MiB", &format), 0);
    CHECK_EQ(hifc_open("ram://invariants", &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 4096, &at), 0);
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = key_of(1), .buffer_offset = at,
                           .length = 4096};
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    CHECK_EQ(hifc_buffer_free(ns, at), 0);
}

/* Runs violate in a child, which must end by an assertion with words in it. */
static void caught(void (*violate)(void), const char *words)
{
    char text[512] = "";
    int out[2];
    start();
    CHECK_EQ(pipe(out), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(out[1], STDERR_FILENO);
        violate();
        _exit(0);
    }
    close(out[1]);
    size_t used = 0;
    for (ssize_t got; (got = read(out[0], text + used, sizeof text - 1 - used)) > 0;) {
        used += (size_t)got;
    }
    close(out[0]);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || !strstr(text, words)) {
        fprintf(stderr, "status %#x, \"%s\" instead of \"%s\"\n", (unsigned)status, text, words);
        abort();
    }
    CHECK_EQ(hifc_close(ns), 0);
}

static struct ns_open *open_segment(void)
{
    CHECK(ns->streams[NS_STREAM_REUSE] != NULL);
    return ns->streams[NS_STREAM_REUSE];
}

static void seal_an_open_segment(void)
{
    ns_lock(ns);
    ns_segment_enter(ns, open_segment()->segment, NS_SEALED);
}

TEST(a_segment_that_skips_a_state)
{
    caught(seal_an_open_segment, "from[to]");
}

static void free_a_live_segment(void)
{
    uint32_t segment = open_segment()->segment;
    ns_lock(ns);
    ns->segments[segment].state = NS_RECLAIMING;
    ns_segment_reset(ns, segment, ns->segments[segment].generation + 1);
}

TEST(a_segment_that_is_freed_with_values_in_it)
{
    caught(free_a_live_segment, "live_entries == 0");
}

static void unpin_twice(void)
{
    ns_lock(ns);
    ns_segment_unpin(ns, open_segment()->segment);
}

TEST(a_counter_that_would_go_below_zero)
{
    caught(unpin_twice, "pins");
}

static void count_a_value_dead_twice(void)
{
    const struct hifc_slot *slot = hifc_index_find(ns->index, &(struct hifc_key){{1}});
    CHECK(slot != NULL);
    ns_lock(ns);
    ns_slot_dead(ns, slot);
    ns_slot_dead(ns, slot);
}

TEST(a_value_that_dies_twice)
{
    caught(count_a_value_dead_twice, "part_counts");
}

static void touch_without_the_mutex(void)
{
    ns_segment_pin(ns, open_segment()->segment);
}

TEST(shared_state_that_is_touched_without_the_mutex)
{
    caught(touch_without_the_mutex, "holder");
}

static void answer_once_too_often(void)
{
    struct hifc_req req = {.op = HIFC_OP_GET, .key = key_of(1)};
    ns_lock(ns);
    struct hifc_ticket *ticket = ns_ticket_alloc(ns, 1, HIFC_OP_GET);
    ns->requests_inflight += 2;
    ns_answer(ns, ticket, &req, 0, HIFC_OK, 0, NULL);
    ns_answer(ns, ticket, &req, 0, HIFC_OK, 0, NULL);
}

TEST(a_request_that_is_answered_twice)
{
    caught(answer_once_too_often, "completed < info->requests");
}

static void give_a_ticket_back_too_early(void)
{
    ns_lock(ns);
    ns_ticket_recycle(ns_ticket_alloc(ns, 1, HIFC_OP_GET));
}

TEST(a_ticket_that_is_given_back_before_it_is_done)
{
    caught(give_a_ticket_back_too_early, "ns_ticket_is_done");
}

static void close_a_batch_twice(void)
{
    ns_lock(ns);
    struct ns_batch *batch = ns_batch_forming(ns, open_segment());
    ns_batch_close(ns, batch);
    ns_batch_close(ns, batch);
}

TEST(a_batch_that_is_sent_twice)
{
    caught(close_a_batch_twice, "forming == batch");
}

static void complete_a_batch_twice(void)
{
    struct ns_open *open = open_segment();
    ns_lock(ns);
    struct ns_batch *batch = ns_batch_forming(ns, open);
    batch->completed = true;
    open->inflight = 1;
    ns_batches_completed(ns, batch);
}

TEST(a_batch_that_completes_twice)
{
    caught(complete_a_batch_twice, "!batch->completed");
}

static void release_with_a_write_in_flight(void)
{
    struct hifc_req req = {.op = HIFC_OP_RESERVE, .key = key_of(2), .length = 4096};
    ns_lock(ns);
    CHECK_EQ(ns_reserve(ns, &req), HIFC_OK);
    struct ns_reservation *reservation = ns_reservation_find(ns, req.handle);
    reservation->writes_inflight = 1;
    ns_reservation_release(ns, reservation);
}

TEST(a_reservation_that_ends_under_its_writes)
{
    caught(release_with_a_write_in_flight, "writes_inflight == 0");
}

static void release_a_batch_twice(void)
{
    ns_lock(ns);
    struct ns_batch *batch = ns_batch_forming(ns, open_segment());
    ns_batch_release(ns, batch);
    ns_batch_release(ns, batch);
}

TEST(a_batch_that_is_let_go_too_often)
{
    caught(release_a_batch_twice, "holders");
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
