/* SPDX-License-Identifier: Apache-2.0
 *
 * close.c - the end of a namespace: a close that found a call inside does everything when it is
 * called again, and what a detach could not write is what the close after it answers.
 */
#include "submit.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "faulty/faulty.h"
#include "namespace/ns.h"
#include "admin/owner.h"

#define NAME "close-test"
#define PLAIN "ram://" NAME "?size=16MiB"

static struct hifc_ns *ns;
static uint64_t at;

static struct hifc_key key_of(uint32_t n)
{
    struct hifc_key key = {{0}};
    memcpy(key.bytes, &n, sizeof n);
    return key;
}

static void start(const char *uri, uint32_t drive)
{
    struct hifc_format_opts format = {.segment_size_bytes = 512u << 10, .force = 1};
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 4u << 20};
    CHECK_EQ(hifc_format(PLAIN, &format), 0);
    CHECK_EQ(hifc_open(uri, &opts, &ns), 0);
    CHECK_EQ(hifc_buffer_alloc(ns, 65536, &at), 0);
    struct hifc_req req = {.op = HIFC_OP_PUT, .key = key_of(1), .buffer_offset = at,
                           .length = 5000};
    memset((uint8_t *)hifc_pool_base(ns, 0, NULL) + at, 7, 5000);
    CHECK_EQ(submit_and_wait(ns, &req, 1), HIFC_OK);
    ns->close_timeout_us = 1000;
}

/* Sends the owner a word. True: it was answered by "ok": true. */
static bool ask_owner(const char *word)
{
    char answer[8192] = "";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", hifc_owner_path(ns->owner));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    CHECK(send(fd, word, strlen(word), MSG_NOSIGNAL) > 0);
    size_t used = 0;
    for (ssize_t got; (got = recv(fd, answer + used, sizeof answer - 1 - used, 0)) > 0;) {
        used += (size_t)got;
    }
    close(fd);
    CHECK(used > 0);
    return strstr(answer, "\"ok\": true") != NULL;
}

/* It was closed cleanly, every segment sealed, and the value is there. */
static void check_sealed(void)
{
    struct hifc_open_opts opts = {.read_only = 1, .drive = HIFC_INLINE,
                                  .pool_size_bytes = 4u << 20};
    struct hifc_key key = key_of(1);
    int32_t answer;
    CHECK_EQ(hifc_open(PLAIN, &opts, &ns), 0);
    CHECK_EQ(ns->sb.clean, 1);
    CHECK_EQ(hifc_lookup(ns, &key, 1, &answer, NULL), 0);
    CHECK_EQ(answer, HIFC_OK);
    for (uint32_t i = 0; i < ns->segment_count; i++) {
        CHECK(!ns->segments[i].entries); /* a summary that recovery had to make itself */
    }
    CHECK_EQ(hifc_close(ns), 0);
}

TEST(a_close_that_was_busy_seals_and_frees_when_it_is_called_again)
{
    for (uint32_t drive = HIFC_REACTOR; drive <= HIFC_INLINE; drive++) {
        start(PLAIN, drive);
        struct hifc_ns *visit = NULL;
        CHECK_EQ(ns_enter(ns, &visit), 0);
        for (unsigned i = 0; i < 3; i++) {
            CHECK_EQ(hifc_close(ns), -EBUSY);
            CHECK(last_error_says("close it again"));
            CHECK_EQ(hifc_sync(ns), -ESHUTDOWN);
            CHECK_EQ(ns->visits, 1); /* it is still there for the call that is inside */
            CHECK(ns->device != NULL);
        }
        ns_leave(&visit);
        CHECK_EQ(hifc_close(ns), 0);
        check_sealed();
    }
}

TEST(a_detach_that_was_busy_seals_when_it_or_close_is_called_again)
{
    for (unsigned detach_again = 0; detach_again < 2; detach_again++) {
        start(PLAIN, HIFC_REACTOR);
        struct hifc_ns *visit = NULL;
        CHECK_EQ(ns_enter(ns, &visit), 0);
        CHECK(!ask_owner("detach\n"));
        CHECK_EQ(hifc_sync(ns), -ESHUTDOWN);
        ns_leave(&visit);
        if (detach_again) {
            CHECK(ask_owner("detach\n"));
            CHECK(ask_owner("detach\n")); /* what has ended stays so */
        }
        CHECK_EQ(hifc_close(ns), 0);
        check_sealed();
    }
}

TEST(what_a_detach_could_not_write_is_what_close_answers)
{
    start("faulty+" PLAIN, HIFC_REACTOR);
    hifc_faulty_cut(hifc_faulty_find(NAME));
    CHECK(!ask_owner("detach\n"));
    CHECK(!ask_owner("detach\n"));
    CHECK_EQ(hifc_close(ns), -EIO);
    CHECK(last_error_says("failed"));
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
