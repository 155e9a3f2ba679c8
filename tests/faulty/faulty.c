/* SPDX-License-Identifier: Apache-2.0
 *
 * faulty.c - wraps any device in faults that a seed determines: faulty+ram://NAME?size=8MiB&
 * fault_seed=7&fault_cut_write=120
 *
 * What is written stays in an overlay (overlay.c) above the device below and moves down at a flush
 * and at close. A cut, at the nth write or flush or when a test says so, draws for each block which
 * of its unflushed versions, if any, reached the medium; commands in flight, the one that is cut
 * among them, are in that draw, so a write may be torn at any block. From then on everything fails
 * with -EIO (Internal Path Error), and the device below holds what the next open finds.
 *
 * Invariants: what a completed flush covered survives every cut; a read between faults returns what
 * was last written; the same commands in the same order and the same seed give the same bytes.
 *
 * Commands are carried out when they are polled, under one mutex, by synchronous commands to the
 * device below. Two threads may drive two queue pairs, but then the order is theirs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "faulty/faulty.h"
#include "faulty/faulty_state.h"
#include "util/error.h"

#define FAULTY_DELAY_MAX 10000u
#define FAULTY_INNER_TIMEOUT_MS 30000u

static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct hifc_faulty_device *open_devices;
static struct hifc_faulty_room *rooms;

/* ---- the device ------------------------------------------------------------------------------ */

static int read_range(const struct hifc_uri *uri, const char *name, struct hifc_fault_range *ranges,
                      uint32_t *count)
{
    const char *text = hifc_uri_param(uri, name);
    char *end;
    if (!text) {
        return 0;
    }
    struct hifc_fault_range range;
    errno = 0;
    range.first = range.last = strtoull(text, &end, 10);
    if (*end == '-' && end != text) {
        range.last = strtoull(end + 1, &end, 10);
    }
    if (errno || *end || text[0] < '0' || text[0] > '9' || range.last < range.first) {
        return hifc_fail(-EINVAL, "faulty device: %s='%.60s'; write an LBA, or FIRST-LAST", name,
                         text);
    }
    ranges[(*count)++] = range;
    return 0;
}

static int read_faults(const struct hifc_uri *uri, struct hifc_faulty_device *device)
{
    static const uint32_t drops[] = {0, 10, 50, 90, 100};
    uint64_t seed = 1, delay = 0, reorder = 0, no_allocate = 0, copy_on_write = 0;
    int rc = hifc_uri_u64(uri, "fault_seed", &seed);
    device->random = seed;
    uint64_t drop = drops[hifc_random(&device->random) % 5]; /* few lose much; many lose little */
    rc = rc ? rc : hifc_uri_u64(uri, "fault_drop", &drop);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_cut_write", &device->cut_at);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_write_error", &device->write_error_at);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_hang", &device->hang_at);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_delay", &delay);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_no_allocate", &no_allocate);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_copy_on_write", &copy_on_write);
    rc = rc ? rc : hifc_uri_u64(uri, "fault_reorder", &reorder);
    rc = rc ? rc : read_range(uri, "fault_read_error", device->errors, &device->error_count);
    rc = rc ? rc : read_range(uri, "fault_flip", device->flips, &device->flip_count);
    if (!rc && (drop > 100 || delay > FAULTY_DELAY_MAX || reorder > 1)) {
        rc = hifc_fail(-EINVAL, "faulty device: fault_drop is a percentage, fault_delay at most %u "
                       "polls, fault_reorder 0 or 1", FAULTY_DELAY_MAX);
    }
    device->drop_percent = (uint32_t)drop;
    device->delay_polls = (uint32_t)delay;
    device->reorder = reorder;
    device->no_allocate = no_allocate;
    device->copy_on_write = copy_on_write;
    return rc;
}

static int check_names(const struct hifc_uri *uri)
{
    static const char *const known[] = {
        "fault_seed", "fault_drop", "fault_cut_write", "fault_write_error", "fault_hang",
        "fault_delay", "fault_reorder", "fault_read_error", "fault_flip", "fault_room",
        "fault_no_allocate", "fault_copy_on_write", NULL};
    for (uint32_t i = 0; i < uri->param_count; i++) {
        const char *const *name = known;
        while (*name && strcmp(*name, uri->params[i].name) != 0) {
            name++;
        }
        if (!*name && strncmp(uri->params[i].name, "fault_", 6) == 0) {
            return hifc_fail(-EINVAL, "faulty device: unknown parameter '%.60s'; known: fault_seed "
                             "_drop _cut_write _write_error _hang _delay _reorder _read_error "
                             "_flip _room _no_allocate _copy_on_write", uri->params[i].name);
        }
    }
    return 0;
}

static int open_inner(const struct hifc_uri *uri, unsigned flags, struct hifc_faulty_device *device)
{
    char inner[sizeof(uri->text)];
    int rc = hifc_uri_render(uri, strchr(uri->scheme, '+') + 1, "fault_", inner, sizeof(inner));
    rc = rc ? rc : hifc_device_open(inner, flags, &device->inner);
    if (rc) {
        return rc;
    }
    const struct hifc_geometry *geometry = &device->inner->geometry;
    if (geometry->registered_only) {
        return hifc_fail(-ENOTSUP, "faulty device: %.200s takes registered memory only; wrap a ram "
                         "or file device", inner);
    }
    rc = device->inner->ops->qpair_open(device->inner, 1, FAULTY_INNER_TIMEOUT_MS,
                                        &device->inner_qpair);
    rc = rc ? rc : hifc_overlay_init(&device->overlay, geometry->lba_bytes,
                                     geometry->size_bytes / geometry->lba_bytes);
    device->base.geometry = *geometry;
    device->base.geometry.volatile_write_cache = true;
    return rc;
}

/* The room that an earlier device of this target left, or what fault_room gives. */
static int open_room(const struct hifc_uri *uri, struct hifc_faulty_device *device)
{
    const struct hifc_geometry *geometry = &device->base.geometry;
    uint64_t blocks = geometry->size_bytes / geometry->lba_bytes, bytes = 0;
    int rc = hifc_uri_size(uri, "fault_room", &bytes);
    if (rc || !hifc_uri_param(uri, "fault_room")) {
        return rc;
    }
    pthread_mutex_lock(&open_mutex);
    device->room = rooms;
    while (device->room && strcmp(device->room->target, device->target) != 0) {
        device->room = device->room->next;
    }
    if (!device->room && (device->room = calloc(1, sizeof(*device->room) + blocks))) {
        snprintf(device->room->target, sizeof(device->room->target), "%s", device->target);
        device->room->left = bytes / geometry->lba_bytes;
        device->room->next = rooms;
        rooms = device->room;
    }
    pthread_mutex_unlock(&open_mutex);
    device->base.geometry.thin = true;
    return device->room ? 0 : hifc_fail(-ENOMEM, "faulty device: out of memory");
}

static void release(struct hifc_faulty_device *device)
{
    hifc_overlay_free(&device->overlay);
    if (device->inner_qpair) {
        device->inner->ops->qpair_close(device->inner_qpair);
    }
    hifc_device_close(device->inner);
    pthread_mutex_destroy(&device->mutex);
    free(device);
}

static int faulty_open(const struct hifc_uri *uri, unsigned flags, struct hifc_device **out)
{
    struct hifc_faulty_device *device = calloc(1, sizeof(*device));
    if (!device) {
        return hifc_fail(-ENOMEM, "faulty device: out of memory");
    }
    pthread_mutex_init(&device->mutex, NULL);
    device->read_only = flags & HIFC_DEVICE_READ_ONLY;
    snprintf(device->target, sizeof(device->target), "%s", uri->target);
    int rc = check_names(uri);
    rc = rc ? rc : read_faults(uri, device);
    rc = rc ? rc : open_inner(uri, flags, device);
    rc = rc ? rc : open_room(uri, device);
    if (rc) {
        release(device);
        return rc;
    }
    pthread_mutex_lock(&open_mutex);
    device->next = open_devices;
    open_devices = device;
    pthread_mutex_unlock(&open_mutex);
    *out = &device->base;
    return 0;
}

static int faulty_keep(struct hifc_device *base)
{
    return hifc_device_keep(((struct hifc_faulty_device *)base)->inner);
}

static void faulty_close(struct hifc_device *base)
{
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base;
    pthread_mutex_lock(&open_mutex);
    struct hifc_faulty_device **link = &open_devices;
    while (*link != device) {
        link = &(*link)->next;
    }
    *link = device->next;
    pthread_mutex_unlock(&open_mutex);
    if (!device->cut && !device->read_only) {
        hifc_faulty_drain(device, 0);
    }
    release(device);
}

const struct hifc_device_ops hifc_device_faulty = {
    .scheme = "faulty",
    .open = faulty_open,
    .close = faulty_close,
    .keep = faulty_keep,
    .qpair_open = hifc_faulty_qpair_open,
    .qpair_close = hifc_faulty_qpair_close,
    .submit = hifc_faulty_submit,
    .poll = hifc_faulty_poll,
    .event_fd = hifc_faulty_event_fd,
};

/* ---- for tests ------------------------------------------------------------------------------- */

struct hifc_device *hifc_faulty_find(const char *target)
{
    pthread_mutex_lock(&open_mutex);
    struct hifc_faulty_device *device = open_devices;
    while (device && strcmp(device->target, target) != 0) {
        device = device->next;
    }
    pthread_mutex_unlock(&open_mutex);
    return device ? &device->base : NULL;
}

static struct hifc_faulty_device *lock_device(struct hifc_device *base)
{
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base;
    pthread_mutex_lock(&device->mutex);
    return device;
}

uint64_t hifc_faulty_count(struct hifc_device *base)
{
    struct hifc_faulty_device *device = lock_device(base);
    uint64_t count = device->count;
    pthread_mutex_unlock(&device->mutex);
    return count;
}

uint64_t hifc_faulty_unflushed(struct hifc_device *base)
{
    struct hifc_faulty_device *device = lock_device(base);
    uint64_t blocks = device->overlay.slot_count;
    pthread_mutex_unlock(&device->mutex);
    return blocks;
}

void hifc_faulty_cut(struct hifc_device *base)
{
    struct hifc_faulty_device *device = lock_device(base);
    hifc_faulty_cut_power(device, NULL);
    pthread_mutex_unlock(&device->mutex);
}

void hifc_faulty_cut_at(struct hifc_device *base, uint64_t nth)
{
    struct hifc_faulty_device *device = lock_device(base);
    device->cut_at = nth;
    pthread_mutex_unlock(&device->mutex);
}

bool hifc_faulty_is_cut(struct hifc_device *base)
{
    struct hifc_faulty_device *device = lock_device(base);
    bool cut = device->cut;
    pthread_mutex_unlock(&device->mutex);
    return cut;
}

static int add_range(struct hifc_device *base, struct hifc_fault_range *ranges, uint32_t *count,
                     uint64_t first_lba, uint64_t last_lba)
{
    struct hifc_faulty_device *device = lock_device(base);
    int rc = 0;
    if (*count < HIFC_FAULTY_RANGES_MAX) {
        ranges[(*count)++] = (struct hifc_fault_range){first_lba, last_lba};
    } else {
        rc = hifc_fail(-ENOSPC, "faulty device: more than %u ranges", HIFC_FAULTY_RANGES_MAX);
    }
    pthread_mutex_unlock(&device->mutex);
    return rc;
}

int hifc_faulty_read_error(struct hifc_device *base, uint64_t first_lba, uint64_t last_lba)
{
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base;
    return add_range(base, device->errors, &device->error_count, first_lba, last_lba);
}

int hifc_faulty_flip(struct hifc_device *base, uint64_t first_lba, uint64_t last_lba)
{
    struct hifc_faulty_device *device = (struct hifc_faulty_device *)base;
    return add_range(base, device->flips, &device->flip_count, first_lba, last_lba);
}

void hifc_faulty_write_error(struct hifc_device *base, uint64_t nth)
{
    struct hifc_faulty_device *device = lock_device(base);
    device->write_error_at = nth;
    pthread_mutex_unlock(&device->mutex);
}

void hifc_faulty_room(struct hifc_device *base, uint64_t left_bytes)
{
    struct hifc_faulty_device *device = lock_device(base);
    device->room->left = left_bytes / base->geometry.lba_bytes;
    pthread_mutex_unlock(&device->mutex);
}

void hifc_faulty_full_at(struct hifc_device *base, uint64_t nth)
{
    struct hifc_faulty_device *device = lock_device(base);
    device->room->count = 0;
    device->room->full_at = nth;
    pthread_mutex_unlock(&device->mutex);
}

uint64_t hifc_faulty_room_count(struct hifc_device *base)
{
    struct hifc_faulty_device *device = lock_device(base);
    uint64_t count = device->room->count;
    pthread_mutex_unlock(&device->mutex);
    return count;
}

void hifc_faulty_room_forget(const char *target)
{
    pthread_mutex_lock(&open_mutex);
    for (struct hifc_faulty_room **link = &rooms; *link; link = &(*link)->next) {
        struct hifc_faulty_room *room = *link;
        if (strcmp(room->target, target) == 0) {
            *link = room->next;
            free(room);
            break;
        }
    }
    pthread_mutex_unlock(&open_mutex);
}

void hifc_faulty_clear(struct hifc_device *base)
{
    struct hifc_faulty_device *device = lock_device(base);
    device->error_count = device->flip_count = 0;
    device->cut_at = device->write_error_at = 0;
    pthread_mutex_unlock(&device->mutex);
}
