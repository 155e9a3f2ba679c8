/* SPDX-License-Identifier: Apache-2.0
 *
 * limits.c - a limit of the system that open meets is named for what it is: no thread left is not
 * "try again", and a forbidden eventfd is not io_uring.
 */
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

static _Atomic int thread_error, eventfd_error;
static _Atomic int skip; /* calls that still succeed */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *argument);
int __real_eventfd(unsigned value, int flags);
int __wrap_eventfd(unsigned value, int flags);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *argument)
{
    return thread_error && skip-- <= 0 ? thread_error
                                       : __real_pthread_create(thread, attributes, run, argument);
}

int __wrap_eventfd(unsigned value, int flags)
{
    if (eventfd_error && skip-- <= 0) {
        errno = eventfd_error;
        return -1;
    }
    return __real_eventfd(value, flags);
}

static char uri[128];

static int open_ns(uint32_t drive, int succeed)
{
    struct hifc_open_opts opts = {.drive = drive, .pool_size_bytes = 2u << 20};
    struct hifc_ns *ns;
    skip = succeed;
    int error = hifc_open(uri, &opts, &ns);
    if (!error) {
        CHECK_EQ(hifc_close(ns), 0);
    }
    return error;
}

static void format(const char *name)
{
    struct hifc_format_opts opts = {.force = 1};
    snprintf(uri, sizeof uri, "%s", name);
    thread_error = eventfd_error = 0;
    CHECK_EQ(hifc_format(uri, &opts), 0);
}

TEST(no_thread_left_names_the_limit_of_threads)
{
    format("ram://limits-test?size=16MiB");
    thread_error = EAGAIN;
    int refused = 0;
    for (int succeed = 0; open_ns(HIFC_REACTOR, succeed) != 0; succeed++) {
        refused++; /* reactor, janitor, owner */
        CHECK(last_error_says("limit of threads is reached"));
        CHECK(last_error_says("ulimit -u"));
        CHECK_EQ(hifc_last_error(NULL), -EUSERS);
    }
    CHECK_EQ(refused, 3);
    thread_error = 0;
}

TEST(a_forbidden_eventfd_is_named_and_not_io_uring)
{
    char name[96];
    snprintf(name, sizeof name, "file:///var/tmp/hifc-limits-%ld?size=16MiB", (long)getpid());
    format(name);
    static const int errors[] = {EPERM, ENOSYS, EMFILE};
    for (unsigned i = 0; i < 3; i++) {
        int refused = 0;
        eventfd_error = errors[i];
        for (int succeed = 0; open_ns(HIFC_REACTOR, succeed) != 0; succeed++) {
            struct hifc_error error;
            refused++;
            CHECK_EQ(hifc_last_error(&error), errors[i] == EMFILE ? -EMFILE : -EPERM);
            CHECK(last_error_says("eventfd"));
            CHECK(!strstr(error.message, "io_uring"));
        }
        CHECK(refused >= 2); /* reactor, owner, and the queue pairs where there is io_uring */
    }
    eventfd_error = 0;
    *strchr(name, '?') = '\0';
    unlink(name + strlen("file://"));
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
