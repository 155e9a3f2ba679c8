/* SPDX-License-Identifier: Apache-2.0
 *
 * The owner's socket: its answers, its limits, and what it does with the names of dead owners.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "util/error.h"
#include "admin/owner.h"

static char folder[64];
static unsigned detached;

static int give_stats(void *context, struct hifc_stats *out)
{
    (void)context;
    memset(out->uuid, 0xab, sizeof(out->uuid));
    snprintf(out->label, sizeof(out->label), "a \"quoted\"\n\\");
    out->capacity_bytes = UINT64_MAX;
    out->segments_damaged = 7;
    out->leases = 42;
    out->put_latency[HIFC_LATENCY_BUCKETS - 1] = 3;
    return 0;
}

static int health(void *context, uint8_t log[512])
{
    (void)log;
    return hifc_fail(-ENOTSUP, "%s has no health log", (const char *)context);
}

static int detach(void *context)
{
    (void)context;
    detached++;
    return 0;
}

static void published(void *context, char *json, size_t size)
{
    (void)context;
    snprintf(json, size, "{\"hit\": 5}");
}

static const struct hifc_owner_ops OPS = {
    .stats = give_stats, .health = health, .detach = detach, .published = published};
static char device[] = "it";

static struct hifc_owner *start(void)
{
    struct hifc_owner *owner;
    snprintf(folder, sizeof(folder), "/tmp/hifc-owner-test-%ld", (long)getpid());
    CHECK_EQ(hifc_owner_start(folder, "file:///x?size=1GiB", &OPS, device, &owner), 0);
    return owner;
}

static void stop(struct hifc_owner *owner)
{
    hifc_owner_stop(owner);
    CHECK_EQ(rmdir(folder), 0); /* it left nothing */
}

static int dial(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

/* The answer to a request, "" if the owner hung up. */
static const char *ask(const struct hifc_owner *owner, const char *request)
{
    static char answer[20000];
    int fd = dial(hifc_owner_path(owner));
    CHECK(send(fd, request, strlen(request), MSG_NOSIGNAL) == (ssize_t)strlen(request));
    size_t used = 0;
    ssize_t got;
    while ((got = recv(fd, answer + used, sizeof(answer) - 1 - used, 0)) > 0) {
        used += (size_t)got;
    }
    answer[used] = '\0';
    close(fd);
    return answer;
}

TEST(answers_are_one_object_on_one_line)
{
    struct hifc_owner *owner = start();
    char expected[128];
    snprintf(expected, sizeof(expected),
             "{\"ok\": true, \"pid\": %ld, \"uri\": \"file:///x?size=1GiB\"}\n", (long)getpid());
    CHECK(strcmp(ask(owner, "hello\n"), expected) == 0);
    const char *answer = ask(owner, "stats\n");
    CHECK(strstr(answer, "\"uuid\": \"abababababababababababababababab\""));
    CHECK(strstr(answer, "\"label\": \"a \\u0022quoted\\u0022\\u000a\\u005c\""));
    CHECK(strstr(answer, "\"capacity_bytes\": 18446744073709551615,"));
    CHECK(strstr(answer, "\"segments_damaged\": 7,"));
    CHECK(strstr(answer, "\"leases\": 42, "));
    CHECK(strstr(answer, "\"get_latency\": [0, 0, "));
    CHECK(strstr(answer, ", 0, 3], \"published\": {\"hit\": 5}}\n"));
    stop(owner);
}

TEST(a_failure_carries_its_message)
{
    struct hifc_owner *owner = start();
    CHECK(strcmp(ask(owner, "health\n"), "{\"ok\": false, \"errno\": 95, \"error\": "
                                         "\"it has no health log\"}\n") == 0);
    CHECK(strstr(ask(owner, "mount\n"), "it knows hello, stats, health, detach"));
    stop(owner);
}

TEST(detach_reaches_the_owner)
{
    struct hifc_owner *owner = start();
    CHECK(strstr(ask(owner, "detach\n"), "\"ok\": true"));
    CHECK_EQ(detached, 1);
    stop(owner);
}

TEST(an_endless_or_cut_request_ends_the_connection_only)
{
    struct hifc_owner *owner = start();
    char endless[65];
    memset(endless, 'a', 64);
    endless[64] = '\0';
    CHECK(strcmp(ask(owner, endless), "") == 0);
    close(dial(hifc_owner_path(owner)));
    CHECK(strstr(ask(owner, "hello\n"), "\"ok\": true"));
    stop(owner);
}

TEST(a_silent_client_does_not_block_others_for_ever)
{
    struct hifc_owner *owner = start();
    int silent = dial(hifc_owner_path(owner));
    CHECK(strstr(ask(owner, "hello\n"), "\"ok\": true"));
    close(silent);
    stop(owner);
}

TEST(only_the_user_may_connect)
{
    struct hifc_owner *owner = start();
    struct stat found;
    CHECK_EQ(stat(hifc_owner_path(owner), &found), 0);
    CHECK_EQ(found.st_mode & 0777, 0600);
    stop(owner);
}

TEST(names_of_dead_owners_are_removed_and_those_of_live_ones_kept)
{
    struct hifc_owner *first = start();
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/1-0.sock", folder);
    int dead = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(bind(dead, (struct sockaddr *)&address, sizeof(address)), 0);
    close(dead);
    struct hifc_owner *second = start();
    CHECK_EQ(access(address.sun_path, F_OK), -1);
    CHECK(strstr(ask(first, "hello\n"), "\"ok\": true"));
    CHECK(strstr(ask(second, "hello\n"), "\"ok\": true"));
    hifc_owner_stop(first);
    stop(second);
}

TEST(a_folder_may_be_its_groups_but_not_everybodys)
{
    struct hifc_owner *owner;
    snprintf(folder, sizeof(folder), "/tmp/hifc-owner-test-%ld", (long)getpid());
    CHECK_EQ(mkdir(folder, 0700), 0);
    CHECK_EQ(chmod(folder, 02775), 0);
    CHECK_EQ(hifc_owner_start(folder, "ram://", &OPS, device, &owner), 0);
    hifc_owner_stop(owner);
    CHECK_EQ(chmod(folder, 0777), 0);
    CHECK_EQ(hifc_owner_start(folder, "ram://", &OPS, device, &owner), -EPERM);
    CHECK(owner == NULL);
    CHECK_EQ(rmdir(folder), 0);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
