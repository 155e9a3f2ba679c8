/* SPDX-License-Identifier: Apache-2.0
 *
 * prefetch.c - descriptors of request rings become background reads, and reads become answers.
 *
 * Every descriptor is checked here like any outside input: operation, status index, place, parts
 * (against the value, when the read starts) and length (against the ring's bound and the arena).
 * A want whose key and parts are on their way already is a duplicate and dropped. Wants that
 * stand behind one another in the queue and ask for parts of one value that follow one another,
 * into memory that does, become one read. All reads that start together go to the device
 * together.
 *
 * Driving thread only; prefetch.h tells what the mutex is for.
 */
#include "namespace/prefetch.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MIX 0x9e3779b97f4a7c15ull

/* ---- wants ----------------------------------------------------------------------------------- */

static uint32_t index_of(const struct hifc_descriptor *what)
{
    return what->control & HIFC_RING_INDEX_MASK;
}

static bool same_read(const struct hifc_descriptor *a, const struct hifc_descriptor *b)
{
    return memcmp(a->key, b->key, sizeof a->key) == 0 && a->first_part == b->first_part &&
           a->part_count == b->part_count;
}

static uint32_t *bucket_of(struct hifc_ring *ring, const struct hifc_descriptor *what)
{
    uint64_t words[2];
    memcpy(words, what->key, sizeof words);
    uint64_t hash = (words[0] ^ ring->seed) * MIX;
    hash = (hash ^ hash >> 32 ^ words[1]) * MIX;
    hash = (hash ^ hash >> 32 ^ ((uint32_t)what->first_part << 16 | what->part_count)) * MIX;
    return &ring->buckets[hash >> 32 & (ring->memory.slot_count - 1)];
}

static void queue_add(struct hifc_ring *ring, uint32_t number)
{
    struct ns_want *want = &ring->wants[number];
    want->next = NS_NO_WANT;
    want->prev = ring->queue_tail;
    if (want->prev == NS_NO_WANT) {
        ring->queue_head = number;
    } else {
        ring->wants[want->prev].next = number;
    }
    ring->queue_tail = number;
}

static void queue_remove(struct hifc_ring *ring, uint32_t number)
{
    struct ns_want *want = &ring->wants[number];
    uint32_t *before = want->prev == NS_NO_WANT ? &ring->queue_head : &ring->wants[want->prev].next;
    uint32_t *after = want->next == NS_NO_WANT ? &ring->queue_tail : &ring->wants[want->next].prev;
    *before = want->next;
    *after = want->prev;
}

static void want_free(struct hifc_ring *ring, uint32_t number)
{
    struct ns_want *want = &ring->wants[number];
    uint32_t *link = bucket_of(ring, &want->what);
    while (*link != number) {
        link = &ring->wants[*link].bucket_next;
    }
    *link = want->bucket_next;
    ring->owners[index_of(&want->what)] = NS_NO_WANT;
    want->next = ring->want_free;
    ring->want_free = number;
}

/* ---- answers --------------------------------------------------------------------------------- */

static bool is_bad(int status)
{
    return status == -EINVAL || status == -EFAULT || status == -ERANGE || status == -EMSGSIZE ||
           status == -ESTALE;
}

static void count(struct hifc_ns *ns, int status)
{
    struct hifc_stats *stats = &ns->stats;
    stats->prefetch_completed += status == HIFC_OK;
    stats->prefetch_duplicates += status == HIFC_RING_DUPLICATE;
    stats->prefetch_cancelled += status == HIFC_RING_CANCELLED;
    stats->prefetch_bad += is_bad(status);
    stats->prefetch_failed += status != HIFC_OK && status != HIFC_RING_DUPLICATE &&
                              status != HIFC_RING_CANCELLED && !is_bad(status);
}

/* The status word of a descriptor that is no want, where it has one that is nobody else's. */
static void answer_free_word(struct hifc_ns *ns, struct hifc_ring *ring, uint32_t index, int status)
{
    count(ns, status);
    if (index < ring->memory.status_count && ring->owners[index] == NS_NO_WANT) {
        hifc_ring_answer(&ring->memory, index, status);
        ring->answered = true;
    }
}

static void answer_want(struct hifc_ns *ns, struct hifc_ring *ring, uint32_t number, int status)
{
    uint32_t index = index_of(&ring->wants[number].what);
    want_free(ring, number);
    answer_free_word(ns, ring, index, status);
}

static void wake(struct hifc_ring *ring)
{
    ring->answered = false;
    if (atomic_load(&ring->waiters) != 0) {
        syscall(SYS_futex, &ring->memory.header->answers, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    }
}

void ns_rings_wake(struct hifc_ns *ns)
{
    struct ns_prefetch *prefetch = ns->prefetch;
    for (uint32_t i = 0; i < prefetch->driven_count; i++) {
        if (prefetch->driven[i]->answered) {
            wake(prefetch->driven[i]);
        }
    }
}

/* ---- descriptors in -------------------------------------------------------------------------- */

static void cancel(struct hifc_ns *ns, struct hifc_ring *ring, uint32_t index)
{
    uint32_t number = ring->owners[index];
    if (number != NS_NO_WANT && !ring->wants[number].started) {
        queue_remove(ring, number);
        answer_want(ns, ring, number, HIFC_RING_CANCELLED);
    }
}

static int check(const struct hifc_ring *ring, const struct hifc_descriptor *what)
{
    if (what->part_count == 0 ? what->first_part != 0
                              : (uint32_t)what->first_part + what->part_count > HIFC_PARTS_MAX) {
        return -ERANGE;
    }
    return (uint64_t)what->place * HIFC_RING_PAGE_BYTES < ring->arena_bytes ? 0 : -EFAULT;
}

static bool on_its_way(struct hifc_ring *ring, const struct hifc_descriptor *what)
{
    uint32_t number = *bucket_of(ring, what);
    while (number != NS_NO_WANT && !same_read(&ring->wants[number].what, what)) {
        number = ring->wants[number].bucket_next;
    }
    return number != NS_NO_WANT;
}

/* One that names a status word in use: the same again, or nonsense that cannot be answered. */
static void word_in_use(struct hifc_ns *ns, struct hifc_ring *ring,
                        const struct hifc_descriptor *what)
{
    const struct hifc_descriptor *owner = &ring->wants[ring->owners[index_of(what)]].what;
    count(ns, same_read(owner, what) && owner->place == what->place ? HIFC_RING_DUPLICATE
                                                                    : -EINVAL);
}

/* A want is free. */
static void accept(struct hifc_ns *ns, struct hifc_ring *ring, const struct hifc_descriptor *what)
{
    uint32_t index = index_of(what), op = what->control >> HIFC_RING_OP_SHIFT;
    bool known = (op == HIFC_RING_OP_READ || op == HIFC_RING_OP_CANCEL) &&
                 index < ring->memory.status_count;
    if (known && op == HIFC_RING_OP_CANCEL) {
        cancel(ns, ring, index);
        return;
    }
    ns->stats.prefetch_submitted++;
    int error = known ? check(ring, what) : -EINVAL;
    if (error) {
        answer_free_word(ns, ring, index, error);
    } else if (ring->owners[index] != NS_NO_WANT) {
        word_in_use(ns, ring, what);
    } else if (on_its_way(ring, what)) {
        answer_free_word(ns, ring, index, HIFC_RING_DUPLICATE);
    } else {
        uint32_t number = ring->want_free, *bucket = bucket_of(ring, what);
        struct ns_want *want = &ring->wants[number];
        ring->want_free = want->next;
        want->what = *what;
        want->started = false;
        want->bucket_next = *bucket;
        *bucket = number;
        ring->owners[index] = number;
        queue_add(ring, number);
    }
}

static bool can_take(const struct hifc_ring *ring)
{
    return ring->want_free != NS_NO_WANT && !atomic_load(&ring->closing) &&
           hifc_ring_news(&ring->memory);
}

/* What is left, the next round takes. */
static uint32_t take(struct hifc_ns *ns, struct hifc_ring *ring)
{
    uint32_t taken = 0;
    struct hifc_descriptor what;
    while (taken < NS_RING_STEP_MAX && ring->want_free != NS_NO_WANT) {
        enum hifc_ring_took took = hifc_ring_take(&ring->memory, &what);
        if (took == HIFC_RING_EMPTY) {
            break;
        }
        if (took == HIFC_RING_STALE) {
            ns->stats.prefetch_submitted++;
            answer_free_word(ns, ring, index_of(&what), -ESTALE);
        } else {
            accept(ns, ring, &what);
        }
        taken++;
    }
    if (taken) {
        hifc_ring_credit(&ring->memory);
    }
    return taken;
}

/* ---- reads out ------------------------------------------------------------------------------- */

/* What of the value a want asks for: 0, or the answer. */
static int range_of(const struct hifc_ns *ns, const struct hifc_ring *ring,
                    const struct hifc_slot *slot, const struct hifc_descriptor *what,
                    uint32_t *offset, uint32_t *bytes)
{
    uint32_t parts = ns_slot_parts(ns, slot), part_bytes = slot->length / parts;
    uint32_t wanted = what->part_count ? what->part_count : parts;
    if ((uint32_t)what->first_part + wanted > parts) {
        return -ERANGE;
    }
    *offset = what->first_part * part_bytes;
    *bytes = wanted * part_bytes;
    uint64_t place = (uint64_t)what->place * HIFC_RING_PAGE_BYTES;
    return *bytes <= ring->read_max_bytes && *bytes <= ring->arena_bytes - place ? 0 : -EMSGSIZE;
}

/* Moves the head of the queue to the fetch. */
static void start_want(struct hifc_ring *ring, uint32_t *link)
{
    uint32_t number = ring->queue_head;
    queue_remove(ring, number);
    ring->wants[number].next = NS_NO_WANT;
    ring->wants[number].started = true;
    ring->started++;
    *link = number;
}

/* Adds to a fetch what follows in the queue, in the value and in memory. */
static void add_neighbours(struct hifc_ns *ns, struct ns_fetch *fetch, const struct hifc_slot *slot)
{
    struct hifc_ring *ring = fetch->ring;
    struct ns_want *last = &ring->wants[fetch->first];
    uint32_t offset, bytes, part_end = (uint32_t)last->what.first_part + last->what.part_count;
    while (ring->queue_head != NS_NO_WANT && last->what.part_count &&
           fetch->req.length % HIFC_RING_PAGE_BYTES == 0) {
        struct ns_want *next = &ring->wants[ring->queue_head];
        uint64_t place = ring->arena_offset + (uint64_t)next->what.place * HIFC_RING_PAGE_BYTES;
        if (next->what.part_count == 0 || next->what.first_part != part_end ||
            place != fetch->req.buffer_offset + fetch->req.length ||
            memcmp(next->what.key, last->what.key, sizeof last->what.key) != 0 ||
            range_of(ns, ring, slot, &next->what, &offset, &bytes) != 0 ||
            !hifc_pools_resolve_lent(ns->pools, ring->pool, place, bytes)) {
            break;
        }
        start_want(ring, &last->next);
        fetch->req.length += bytes;
        part_end += next->what.part_count;
        last = next;
    }
}

static void fetch_completed(struct hifc_ns *ns, struct ns_fetch *fetch, int status)
{
    struct hifc_ring *ring = fetch->ring;
    ns->stats.prefetch_bytes += status == HIFC_OK ? fetch->req.length : 0;
    for (uint32_t number = fetch->first, next; number != NS_NO_WANT; number = next) {
        next = ring->wants[number].next;
        ring->started--;
        answer_want(ns, ring, number, status);
    }
    fetch->next_free = ns->prefetch->free_fetches;
    ns->prefetch->free_fetches = fetch;
    if (atomic_load(&ring->closing)) {
        atomic_store(&ns->prefetch->changed, true);
    }
}

static void read_done(struct hifc_ns *ns, struct ns_op *op, int status)
{
    ns_op_free(ns, op);
    fetch_completed(ns, op->fetch, status);
}

static int plan(struct hifc_ns *ns, struct ns_fetch *fetch)
{
    struct hifc_ring *ring = fetch->ring;
    const struct hifc_descriptor *what = &ring->wants[fetch->first].what;
    struct hifc_key key;
    memcpy(key.bytes, what->key, sizeof key.bytes);
    const struct hifc_slot *slot = hifc_index_find(ns->index, &key);
    uint32_t offset, bytes;
    if (!slot || slot->flags & (HIFC_SLOT_PENDING | HIFC_SLOT_QUARANTINED)) {
        /* ns_get has the answer, before it looks at the range */
        offset = bytes = 0;
        slot = NULL;
    } else {
        int error = range_of(ns, ring, slot, what, &offset, &bytes);
        if (error) {
            return error;
        }
    }
    fetch->req = (struct hifc_req){.op = HIFC_OP_GET,
                                   .key = key,
                                   .pool = ring->pool,
                                   .buffer_offset = ring->arena_offset +
                                                    (uint64_t)what->place * HIFC_RING_PAGE_BYTES,
                                   .length = bytes,
                                   .value_offset = offset};
    if (slot) {
        if (!hifc_pools_resolve_lent(ns->pools, ring->pool, fetch->req.buffer_offset, bytes)) {
            return -EFAULT; /* it was given back since the ring was opened */
        }
        add_neighbours(ns, fetch, slot);
    }
    ns_op_init(&fetch->op);
    fetch->op.req = &fetch->req;
    fetch->op.fetch = fetch;
    fetch->op.read_done = read_done;
    fetch->op.key = key;
    return ns_get(ns, &fetch->req, NULL, &fetch->op);
}

void ns_fetch_more(struct hifc_ns *ns)
{
    struct ns_prefetch *prefetch = ns->prefetch;
    uint32_t without = 0; /* rings in turn that want nothing */
    for (uint32_t started = 0; prefetch->free_fetches && without < prefetch->driven_count;) {
        if (started == NS_RING_STEP_MAX) {
            atomic_store(&prefetch->changed, true); /* many were answered without a read */
            break;
        }
        struct hifc_ring *ring = prefetch->driven[prefetch->turn++ % prefetch->driven_count];
        if (ring->queue_head == NS_NO_WANT) {
            without++;
            continue;
        }
        without = 0;
        started++;
        struct ns_fetch *fetch = prefetch->free_fetches;
        prefetch->free_fetches = fetch->next_free;
        fetch->ring = ring;
        start_want(ring, &fetch->first);
        int status = plan(ns, fetch);
        if (status == HIFC_IN_FLIGHT) {
            ns->stats.prefetch_reads++;
        } else {
            fetch_completed(ns, fetch, status);
        }
    }
}

/* ---- rings come and go ----------------------------------------------------------------------- */

void ns_ring_end(struct hifc_ns *ns, struct hifc_ring *ring)
{
    hifc_ring_set_state(&ring->memory, HIFC_RING_CLOSING);
    while (ring->queue_head != NS_NO_WANT) {
        uint32_t number = ring->queue_head;
        queue_remove(ring, number);
        answer_want(ns, ring, number, -ESHUTDOWN);
    }
}

void ns_ring_detach(struct hifc_ns *ns, struct hifc_ring *ring)
{
    for (uint32_t i = 0; i < ring->memory.status_count; i++) { /* published, and never taken */
        if (__atomic_load_n(&ring->memory.statuses[i], __ATOMIC_RELAXED) == HIFC_RING_WAITING) {
            hifc_ring_answer(&ring->memory, i, -ESHUTDOWN);
        }
    }
    hifc_ring_set_state(&ring->memory, HIFC_RING_CLOSED);
    wake(ring);
    atomic_store(&ring->detached, true);
    pthread_cond_broadcast(&ns->changed);
}

/* Drops the rings that are closed, takes over those that were opened. Mutex held. */
static void refresh(struct hifc_ns *ns)
{
    struct ns_prefetch *prefetch = ns->prefetch;
    prefetch->driven_count = 0;
    for (uint32_t i = 0; i < prefetch->ring_count; i++) {
        struct hifc_ring *ring = prefetch->rings[i];
        if (atomic_load(&ring->detached)) {
            continue;
        }
        if (atomic_load(&ring->closing)) {
            ns_ring_end(ns, ring);
            if (ring->started == 0) {
                ns_ring_detach(ns, ring);
                continue;
            }
        }
        prefetch->driven[prefetch->driven_count++] = ring;
    }
}

uint32_t ns_rings_gather(void *owner)
{
    struct hifc_ns *ns = owner;
    struct ns_prefetch *prefetch = ns->prefetch;
    bool news = atomic_load_explicit(&prefetch->changed, memory_order_relaxed);
    for (uint32_t i = 0; i < prefetch->driven_count && !news; i++) {
        news = can_take(prefetch->driven[i]);
    }
    if (!news) {
        return 0;
    }
    uint32_t taken = 0;
    ns_lock(ns);
    if (atomic_exchange(&prefetch->changed, false)) {
        refresh(ns);
    }
    for (uint32_t i = 0; i < prefetch->driven_count; i++) {
        if (can_take(prefetch->driven[i])) {
            taken += take(ns, prefetch->driven[i]);
        }
    }
    ns_fetch_more(ns);
    ns_rings_wake(ns);
    ns_unlock_and_issue(ns);
    return taken;
}

uint64_t ns_rings_sleep_max_ns(void *owner)
{
    struct ns_prefetch *prefetch = ((struct hifc_ns *)owner)->prefetch;
    uint64_t most_ns = atomic_load(&prefetch->changed) ? 0 : UINT64_MAX;
    for (uint32_t i = 0; i < prefetch->driven_count && most_ns; i++) {
        const struct hifc_ring *ring = prefetch->driven[i];
        uint64_t ring_ns = can_take(ring) ? 0 : ring->poll_ns;
        most_ns = ring_ns < most_ns ? ring_ns : most_ns;
    }
    return most_ns;
}
