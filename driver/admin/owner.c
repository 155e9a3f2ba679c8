/* SPDX-License-Identifier: Apache-2.0
 *
 * owner.c - the owner's socket: how hifc-admin looks at a drive that a running engine owns.
 *
 * A client connects, sends one word and a newline (hello, stats, health, detach) and gets one JSON
 * object and a newline:
 *
 *   {"ok": true, "uri": "...", "pid": 1, "uuid": "...", ...}   or   {"ok": false, "error": "..."}
 *
 * The socket is FOLDER/PID-N-RANDOM.sock, in the folder of run_folder.h, which containers may share:
 * in each of them there is a process 1. Only its user and root may connect.
 * The name appears by rename once somebody listens, so a socket that refuses is one that a dead
 * process left, and the next owner removes it. One thread serves one client at a time, with a limit
 * on every wait and size; it owns nothing but its own struct and calls the operations. A crash
 * leaves only the dead name.
 */
#define _GNU_SOURCE
#include "admin/owner.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "util/error.h"
#include "util/run_folder.h"
#include "util/thread.h"

#define OWNER_BACKLOG 8
#define OWNER_CLIENT_TIMEOUT_MS 2000
#define OWNER_RETRY_MS 100
#define OWNER_REQUEST_MAX_BYTES 64u
#define OWNER_REPLY_MAX_BYTES 16384u
#define OWNER_SWEEP_MAX 256u

/* A reply under construction; what does not fit makes it an error instead of half an object. */
struct reply {
    size_t used;
    bool overflow;
    char text[OWNER_REPLY_MAX_BYTES];
};

struct hifc_owner {
    int listener;
    int stop; /* eventfd */
    pthread_t thread;
    const struct hifc_owner_ops *ops;
    void *context;
    char uri[1024];
    struct sockaddr_un address;
    struct reply reply;
};

__attribute__((format(printf, 2, 3))) static void add(struct reply *reply, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof(reply->text) - reply->used;
    int length = vsnprintf(reply->text + reply->used, room, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= room) {
        reply->overflow = true;
    } else {
        reply->used += (size_t)length;
    }
}

/* Bytes above 0x7f pass: labels and paths are UTF-8 or the reader replaces them. */
static void add_string(struct reply *reply, const char *name, const char *value, size_t size)
{
    add(reply, ", \"%s\": \"", name);
    for (size_t i = 0; i < size && value[i]; i++) {
        unsigned char c = (unsigned char)value[i];
        if (c < 0x20 || c == '"' || c == '\\' || c == 0x7f) {
            add(reply, "\\u%04x", c);
        } else {
            add(reply, "%c", c);
        }
    }
    add(reply, "\"");
}

static void add_hex(struct reply *reply, const char *name, const uint8_t *bytes, size_t size)
{
    add(reply, ", \"%s\": \"", name);
    for (size_t i = 0; i < size; i++) {
        add(reply, "%02x", bytes[i]);
    }
    add(reply, "\"");
}

/* ---- what can be asked ---------------------------------------------------------------------- */

#define FIELD(name) {#name, offsetof(struct hifc_stats, name), sizeof(((struct hifc_stats *)0)->name)}

/* Every number of struct hifc_stats, in its order. */
static const struct stats_field {
    const char *name;
    size_t offset;
    size_t size;
} STATS_FIELDS[] = {
    FIELD(capacity_bytes), FIELD(live_bytes), FIELD(dead_bytes), FIELD(free_bytes),
    FIELD(metadata_bytes), FIELD(segment_size_bytes), FIELD(segments), FIELD(segments_free),
    FIELD(segments_damaged), FIELD(direct), FIELD(open_epoch), FIELD(entries), FIELD(entries_swap),
    FIELD(index_bytes), FIELD(put_count), FIELD(put_bytes), FIELD(get_count), FIELD(get_bytes),
    FIELD(miss_count), FIELD(exists_count), FIELD(rejected_count), FIELD(retry_count),
    FIELD(no_space_count), FIELD(delete_count), FIELD(device_write_bytes),
    FIELD(device_read_bytes), FIELD(device_write_commands), FIELD(device_read_commands),
    FIELD(flush_count), FIELD(bounce_bytes), FIELD(corrupt_count), FIELD(device_error_count),
    FIELD(reinserted_bytes), FIELD(evicted_count), FIELD(evicted_bytes), FIELD(reclaimed_segments),
    FIELD(batches), FIELD(batch_entries), FIELD(poll_count), FIELD(poll_empty_count),
    FIELD(recovery_ns), FIELD(recovered_entries), FIELD(recovery_dropped), FIELD(recovery_damaged),
    FIELD(requests_inflight), FIELD(buffer_used_bytes), FIELD(buffer_peak_bytes),
    FIELD(buffer_size_bytes), FIELD(reservations), FIELD(leases), FIELD(write_budget_bytes),
    FIELD(write_budget_left_bytes), FIELD(get_elapsed_ns), FIELD(put_elapsed_ns),
    FIELD(prefetch_submitted), FIELD(prefetch_completed), FIELD(prefetch_failed),
    FIELD(prefetch_duplicates), FIELD(prefetch_cancelled), FIELD(prefetch_bad),
    FIELD(prefetch_overflowed), FIELD(prefetch_reads), FIELD(prefetch_bytes),
};
#define STATS_FIELD_COUNT (sizeof(STATS_FIELDS) / sizeof(STATS_FIELDS[0]))
#define STATS_U32_COUNT 4 /* segments, segments_free, segments_damaged, direct */
_Static_assert(sizeof(struct hifc_stats) ==
                   16 + 32 + 8 * (STATS_FIELD_COUNT - STATS_U32_COUNT) + 4 * STATS_U32_COUNT +
                       2 * 8 * HIFC_LATENCY_BUCKETS,
               "a field of struct hifc_stats is missing in STATS_FIELDS");

static void add_histogram(struct reply *reply, const char *name, const uint64_t *buckets)
{
    add(reply, ", \"%s\": [", name);
    for (unsigned i = 0; i < HIFC_LATENCY_BUCKETS; i++) {
        add(reply, "%s%llu", i ? ", " : "", (unsigned long long)buckets[i]);
    }
    add(reply, "]");
}

static int reply_stats(struct hifc_owner *owner, struct reply *reply)
{
    struct hifc_stats stats = {0};
    int error = owner->ops->stats(owner->context, &stats);
    if (error) {
        return error;
    }
    add_hex(reply, "uuid", stats.uuid, sizeof(stats.uuid));
    add_string(reply, "label", stats.label, sizeof(stats.label));
    for (size_t i = 0; i < STATS_FIELD_COUNT; i++) {
        const struct stats_field *field = &STATS_FIELDS[i];
        const char *at = (const char *)&stats + field->offset;
        uint64_t wide = 0;
        uint32_t narrow = 0;
        memcpy(field->size == 8 ? (void *)&wide : (void *)&narrow, at, field->size);
        add(reply, ", \"%s\": %llu", field->name, (unsigned long long)(wide + narrow));
    }
    add_histogram(reply, "get_latency", stats.get_latency);
    add_histogram(reply, "put_latency", stats.put_latency);
    if (owner->ops->published) {
        char json[HIFC_PUBLISH_MAX_BYTES + 1];
        owner->ops->published(owner->context, json, sizeof json);
        add(reply, "%s%s", json[0] ? ", \"published\": " : "", json);
    }
    return 0;
}

static int reply_health(struct hifc_owner *owner, struct reply *reply)
{
    uint8_t log[512];
    int error = owner->ops->health(owner->context, log);
    if (!error) {
        add_hex(reply, "log", log, sizeof(log));
    }
    return error;
}

/* Appends the answer's own members. 0 or a negative errno. */
static int answer(struct hifc_owner *owner, const char *request, struct reply *reply)
{
    if (strcmp(request, "hello") == 0) {
        return 0;
    }
    if (strcmp(request, "stats") == 0 && owner->ops->stats) {
        return reply_stats(owner, reply);
    }
    if (strcmp(request, "health") == 0 && owner->ops->health) {
        return reply_health(owner, reply);
    }
    if (strcmp(request, "detach") == 0 && owner->ops->detach) {
        return owner->ops->detach(owner->context);
    }
    return hifc_fail(-EOPNOTSUPP, "this owner does not answer that; it knows hello%s%s%s",
                     owner->ops->stats ? ", stats" : "", owner->ops->health ? ", health" : "",
                     owner->ops->detach ? ", detach" : "");
}

static void make_reply(struct hifc_owner *owner, const char *request, struct reply *reply)
{
    reply->used = 0;
    reply->overflow = false;
    add(reply, "{\"ok\": true, \"pid\": %ld", (long)getpid());
    add_string(reply, "uri", owner->uri, sizeof(owner->uri));
    int error = answer(owner, request, reply);
    if (!error && reply->overflow) {
        error = hifc_fail(-EOVERFLOW, "the answer is larger than %u bytes", OWNER_REPLY_MAX_BYTES);
    }
    if (error) {
        struct hifc_error detail = {0};
        hifc_error_copy(&detail);
        reply->used = 0;
        add(reply, "{\"ok\": false, \"errno\": %d", -error);
        add_string(reply, "error", detail.message, sizeof(detail.message));
    }
    add(reply, "}\n");
}

/* ---- one client ----------------------------------------------------------------------------- */

/* Reads up to a newline, which it cuts off. False: the client is too slow, too long or gone. */
static bool receive(int client, char *request)
{
    size_t used = 0;
    while (used < OWNER_REQUEST_MAX_BYTES) {
        ssize_t got = recv(client, request + used, OWNER_REQUEST_MAX_BYTES - used, 0);
        if (got <= 0) {
            return false;
        }
        char *end = memchr(request + used, '\n', (size_t)got);
        used += (size_t)got;
        if (end) {
            *end = '\0';
            return true;
        }
    }
    return false;
}

static void serve(struct hifc_owner *owner, int client)
{
    struct reply *reply = &owner->reply;
    const struct timeval limit = {.tv_sec = OWNER_CLIENT_TIMEOUT_MS / 1000,
                                  .tv_usec = OWNER_CLIENT_TIMEOUT_MS % 1000 * 1000};
    char request[OWNER_REQUEST_MAX_BYTES];
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (!receive(client, request)) {
        return;
    }
    make_reply(owner, request, reply);
    for (size_t sent = 0; sent < reply->used;) {
        ssize_t count = send(client, reply->text + sent, reply->used - sent, MSG_NOSIGNAL);
        if (count <= 0) {
            return; /* it left: nobody to tell */
        }
        sent += (size_t)count;
    }
}

static void *owner_main(void *argument)
{
    struct hifc_owner *owner = argument;
    struct pollfd fds[2] = {{.fd = owner->stop, .events = POLLIN},
                            {.fd = owner->listener, .events = POLLIN}};
    while (poll(fds, 2, -1) >= 0 || errno == EINTR) {
        if (fds[0].revents) {
            break;
        }
        int client = fds[1].revents ? accept4(owner->listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (client >= 0) {
            serve(owner, client);
            close(client);
        } else if (fds[1].revents) {
            poll(fds, 1, OWNER_RETRY_MS); /* no descriptors left, say: do not spin on it */
        }
    }
    return NULL;
}

/* ---- start and stop ------------------------------------------------------------------------- */

static bool is_dead(const struct sockaddr_un *address)
{
    int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool refused = probe >= 0 &&
                   connect(probe, (const struct sockaddr *)address, sizeof(*address)) != 0 &&
                   errno == ECONNREFUSED;
    if (probe >= 0) {
        close(probe);
    }
    return refused;
}

/* Removes what killed owners left. */
static void sweep(const char *folder)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    for (unsigned seen = 0; dir && seen < OWNER_SWEEP_MAX && (entry = readdir(dir)); seen++) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        size_t length = strlen(entry->d_name);
        if (length < 5 || strcmp(entry->d_name + length - 5, ".sock") != 0) {
            continue;
        }
        int size = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", folder,
                            entry->d_name);
        if (size > 0 && (size_t)size < sizeof(address.sun_path) && is_dead(&address)) {
            unlink(address.sun_path);
        }
    }
    if (dir) {
        closedir(dir);
    }
}

static int listen_at(struct hifc_owner *owner, const char *folder)
{
    static _Atomic unsigned count;
    struct sockaddr_un early = {.sun_family = AF_UNIX};
    unsigned number = atomic_fetch_add(&count, 1);
    uint64_t random;
    if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
        return hifc_fail(-EIO, "no random number for the name of the owner's socket: %m");
    }
    int size = snprintf(owner->address.sun_path, sizeof(owner->address.sun_path),
                        "%s/%ld-%u-%016llx.sock", folder, (long)getpid(), number,
                        (unsigned long long)random);
    snprintf(early.sun_path, sizeof(early.sun_path), "%s/%ld-%u-%016llx.new", folder,
             (long)getpid(), number, (unsigned long long)random);
    if (size < 0 || (size_t)size >= sizeof(owner->address.sun_path)) {
        return hifc_fail(-ENAMETOOLONG, "%s: too long for the path of a socket", folder);
    }
    owner->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (owner->listener < 0 ||
        bind(owner->listener, (struct sockaddr *)&early, sizeof(early)) != 0 ||
        chmod(early.sun_path, 0600) != 0 || listen(owner->listener, OWNER_BACKLOG) != 0 ||
        rename(early.sun_path, owner->address.sun_path) != 0) {
        int error = errno;
        unlink(early.sun_path);
        return hifc_fail(-error, "%s: the owner's socket cannot be made: %s",
                         owner->address.sun_path, strerror(error));
    }
    return 0;
}

static int start_thread(struct hifc_owner *owner)
{
    owner->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (owner->stop < 0) {
        return hifc_fail_eventfd(errno, "the owner's socket");
    }
    int error = hifc_thread_start(&owner->thread, "hifc-owner", owner_main, owner,
                                  "the owner's socket");
    if (error) {
        close(owner->stop);
    }
    return error;
}

int hifc_owner_start(const char *folder, const char *uri, const struct hifc_owner_ops *ops,
                     void *context, struct hifc_owner **out)
{
    char own[64];
    *out = NULL;
    int error = folder ? hifc_run_folder_make(folder) : hifc_run_folder(own, sizeof(own));
    if (error) {
        return error;
    }
    folder = folder ? folder : own;
    struct hifc_owner *owner = calloc(1, sizeof(*owner));
    if (!owner) {
        return hifc_fail(-ENOMEM, "no memory for the owner's socket");
    }
    owner->listener = -1;
    owner->ops = ops;
    owner->context = context;
    owner->address.sun_family = AF_UNIX;
    snprintf(owner->uri, sizeof(owner->uri), "%s", uri);
    sweep(folder);
    error = listen_at(owner, folder);
    if (!error) {
        error = start_thread(owner);
        if (error) {
            unlink(owner->address.sun_path);
        }
    }
    if (error) {
        if (owner->listener >= 0) {
            close(owner->listener);
        }
        free(owner);
        return error;
    }
    *out = owner;
    return 0;
}

const char *hifc_owner_path(const struct hifc_owner *owner)
{
    return owner->address.sun_path;
}

void hifc_owner_stop(struct hifc_owner *owner)
{
    if (!owner) {
        return;
    }
    unlink(owner->address.sun_path);
    eventfd_write(owner->stop, 1);
    pthread_join(owner->thread, NULL);
    close(owner->listener);
    close(owner->stop);
    free(owner);
}
