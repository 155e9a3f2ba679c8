/* SPDX-License-Identifier: Apache-2.0
 *
 * Buffer pools: no two buffers overlap, everything comes back, bad frees are refused, and huge
 * pages are demanded exactly where the device wants registered memory.
 */
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "check.h"
#include "engine/engine.h"
#include "engine/region.h"
#include "util/error.h"

enum { MIB = 1 << 20, PAGE = 4096, PAGES = 1024 };

/* A device that counts registrations and may refuse them. */
static int register_rc, registered;

static int count_register(struct hifc_device *device, void *base, uint64_t size_bytes)
{
    (void)device;
    CHECK_EQ(((uintptr_t)base | size_bytes) % HIFC_HUGE_PAGE_BYTES, 0);
    registered += register_rc == 0;
    return register_rc;
}

static int count_unregister(struct hifc_device *device, void *base, uint64_t size_bytes)
{
    (void)device, (void)base, (void)size_bytes;
    registered--;
    return 0;
}

static const struct hifc_device_ops plain_ops = {.scheme = "plain"};
static const struct hifc_device_ops registering_ops = {.scheme = "registering",
                                                       .register_memory = count_register,
                                                       .unregister_memory = count_unregister};

static struct hifc_device device_of(const struct hifc_device_ops *ops)
{
    return (struct hifc_device){.ops = ops, .geometry = {.buffer_align_bytes = 4},
                                .uri = "test://"};
}

static uint64_t used_bytes_of(struct hifc_pools *pools)
{
    uint64_t used, peak, size;
    hifc_pools_usage(pools, &used, &peak, &size);
    return used;
}

TEST(buffers_are_aligned_writable_and_never_overlap)
{
    static struct { uint64_t offset, pages; } live[PAGES];
    static uint8_t owner[PAGES];
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    unsigned count = 0, seed = 7;
    uint64_t model_pages = 0, used, peak, size;
    CHECK_EQ(hifc_pools_create(&device, (uint64_t)PAGES * PAGE - 5, &pools), 0);
    for (unsigned step = 0; step < 100000; step++) {
        unsigned r = (unsigned)rand_r(&seed);
        if (r % 5 < 3) {
            uint64_t pages = 1 + r / 5 % (r % 7 ? 8 : 300), offset;
            int rc = hifc_pools_alloc(pools, pages * PAGE - r % PAGE, &offset);
            if (rc) {
                CHECK_EQ(rc, -ENOMEM);
                continue;
            }
            CHECK(offset % PAGE == 0 && offset / PAGE + pages <= PAGES);
            uint8_t *memory = hifc_pools_resolve(pools, 0, offset, pages * PAGE);
            CHECK(memory);
            memory[0] = memory[pages * PAGE - 1] = 1;
            for (uint64_t i = 0; i < pages; i++) {
                CHECK_EQ(owner[offset / PAGE + i]++, 0);
            }
            live[count].offset = offset;
            live[count++].pages = pages;
            model_pages += pages;
        } else if (count) {
            unsigned i = r / 5 % count;
            for (uint64_t k = 0; k < live[i].pages; k++) {
                owner[live[i].offset / PAGE + k] = 0;
            }
            if (live[i].pages > 1) { /* not its first page */
                CHECK_EQ(hifc_pools_free(pools, live[i].offset + PAGE), -EINVAL);
            }
            CHECK_EQ(hifc_pools_free(pools, live[i].offset), 0);
            CHECK_EQ(hifc_pools_free(pools, live[i].offset), -EINVAL);
            model_pages -= live[i].pages;
            live[i] = live[--count];
        }
        CHECK_EQ(used_bytes_of(pools), model_pages * PAGE);
    }
    while (count) {
        CHECK_EQ(hifc_pools_free(pools, live[--count].offset), 0);
    }
    uint64_t offset; /* all of it has grown together again */
    CHECK_EQ(hifc_pools_alloc(pools, (uint64_t)PAGES * PAGE, &offset), 0);
    CHECK_EQ(offset, 0);
    hifc_pools_usage(pools, &used, &peak, &size);
    CHECK(used == size && peak == size && size == (uint64_t)PAGES * PAGE);
    hifc_pools_destroy(pools);
}

TEST(a_buffer_fits_wherever_that_many_pages_are_free_in_a_row)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    uint64_t offsets[40], offset;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0); /* 512 pages */
    for (unsigned i = 0; i < 40; i++) { /* free: holes of 8 pages, one of 12, all of one class */
        uint64_t hole;
        CHECK_EQ(hifc_pools_alloc(pools, (i == 0 ? 12 : 8) * PAGE, &hole), 0);
        CHECK_EQ(hifc_pools_alloc(pools, PAGE, &offset), 0);
        offsets[i] = hole;
    }
    uint64_t left = 512ull * PAGE - used_bytes_of(pools);
    CHECK_EQ(hifc_pools_alloc(pools, left, &offset), 0);
    for (unsigned i = 0; i < 40; i++) {
        CHECK_EQ(hifc_pools_free(pools, offsets[i]), 0);
    }
    CHECK_EQ(hifc_pools_alloc(pools, 13 * PAGE, &offset), -ENOMEM);
    CHECK_EQ(hifc_pools_alloc(pools, 12 * PAGE, &offset), 0); /* the last of its list */
    CHECK_EQ(offset, offsets[0]);
    hifc_pools_destroy(pools);
}

TEST(small_pieces_that_stay_do_not_split_what_large_buffers_need)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    uint64_t large, kept, small, page, offset;
    CHECK_EQ(hifc_pools_create(&device, 322ull * MIB, &pools), 0);
    CHECK_EQ(hifc_pools_keep(pools, 10 * MIB, &kept), 10 * MIB);
    CHECK_EQ(kept, 312ull * MIB);
    CHECK_EQ(used_bytes_of(pools), 0);
    CHECK_EQ(hifc_pools_lend(pools, 250ull * MIB, &large), 0);
    CHECK(hifc_pools_try(pools, 16 * PAGE, &page));
    CHECK_EQ(hifc_pools_lend(pools, 16 * PAGE, &small), 0);
    CHECK_EQ(hifc_pools_take_back(pools, large), 0);
    CHECK_EQ(hifc_pools_lend(pools, 255ull * MIB, &large), 0);
    CHECK_EQ(hifc_pools_take_back(pools, large), 0);
    CHECK_EQ(hifc_pools_alloc(pools, 312ull * MIB - 32 * PAGE, &large), 0);
    CHECK_EQ(large, 0);
    CHECK_EQ(hifc_pools_keep(pools, MIB, &offset), 0); /* there is no room any more */
    hifc_fail(-EPERM, "before");
    CHECK(!hifc_pools_try(pools, PAGE, &offset));
    CHECK(last_error_says("before"));
    CHECK_EQ(hifc_pools_lend(pools, PAGE, &offset), -ENOMEM);
    CHECK_EQ(hifc_pools_free(pools, kept + PAGE), -EINVAL);
    CHECK_EQ(hifc_pools_take_back(pools, kept), -EINVAL); /* nobody was lent it */
    hifc_pools_destroy(pools);
}

TEST(senseless_requests_are_refused)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    uint64_t offset;
    CHECK_EQ(hifc_pools_create(&device, 0, &pools), -EINVAL);
    CHECK_EQ(hifc_pools_create(&device, UINT64_MAX, &pools), -EINVAL);
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    CHECK_EQ(hifc_pools_alloc(pools, 0, &offset), -EINVAL);
    CHECK_EQ(hifc_pools_alloc(pools, 2 * MIB + 1, &offset), -ENOMEM);
    CHECK_EQ(hifc_pools_alloc(pools, UINT64_MAX, &offset), -ENOMEM);
    CHECK_EQ(hifc_pools_free(pools, 0), -EINVAL);
    CHECK_EQ(hifc_pools_alloc(pools, 1, &offset), 0);
    CHECK_EQ(hifc_pools_free(pools, offset + 1), -EINVAL);
    CHECK_EQ(hifc_pools_free(pools, 2 * MIB), -EINVAL);
    CHECK_EQ(hifc_pools_free(pools, UINT64_MAX & ~4095ull), -EINVAL);
    CHECK_EQ(hifc_pools_free(pools, offset), 0);
    hifc_pools_destroy(pools);
}

TEST(lent_memory_stays_mapped_after_the_end)
{
    struct hifc_device device = device_of(&registering_ops);
    struct hifc_pools *pools;
    uint64_t first, second;
    registered = 0;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    CHECK_EQ(hifc_pools_lend(pools, MIB, &first), 0);
    CHECK_EQ(hifc_pools_lend(pools, 1, &second), 0);
    uint8_t *base = hifc_pools_resolve(pools, 0, 0, 0);
    hifc_pools_release(pools);
    CHECK_EQ(registered, 0);
    hifc_pools_end(pools);
    CHECK_EQ(hifc_pools_lend(pools, 1, &first), -ENOMEM);
    memset(base + first, 1, MIB);
    CHECK_EQ(hifc_pools_take_back(pools, first), 0);
    base[second] = 1;
    CHECK(hifc_pools_resolve(pools, 0, second, 1) == base + second);
    CHECK_EQ(hifc_pools_take_back(pools, second), 0);
    CHECK(!hifc_pools_resolve(pools, 0, second, 1));
    CHECK_EQ(hifc_pools_take_back(pools, second), -EINVAL);
    hifc_pools_destroy(pools);
}

TEST(what_is_taken_back_under_a_hold_is_not_lent_again)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    uint64_t offset, other, used, peak, size;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    CHECK_EQ(hifc_pools_lend(pools, MIB, &offset), 0);
    hifc_pools_hold(pools);
    hifc_pools_hold(pools);
    CHECK_EQ(hifc_pools_take_back(pools, offset), 0);
    CHECK_EQ(hifc_pools_take_back(pools, offset), -EINVAL);
    CHECK_EQ(hifc_pools_lend(pools, MIB, &other), -EAGAIN);
    hifc_pools_unhold(pools);
    CHECK_EQ(hifc_pools_lend(pools, MIB, &other), -EAGAIN);
    hifc_pools_usage(pools, &used, &peak, &size);
    CHECK_EQ(used, MIB);
    hifc_pools_unhold(pools);
    hifc_pools_usage(pools, &used, &peak, &size);
    CHECK_EQ(used, 0);
    CHECK_EQ(hifc_pools_lend(pools, MIB, &other), 0);
    CHECK_EQ(hifc_pools_take_back(pools, other), 0);
    hifc_pools_destroy(pools);
}

TEST(a_share_of_the_pool_is_never_lent)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    uint64_t offset;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    CHECK_EQ(hifc_pools_lend(pools, 2 * MIB - 2 * MIB / 16 + 1, &offset), -ENOMEM);
    CHECK_EQ(hifc_pools_lend(pools, 2 * MIB - 2 * MIB / 16, &offset), 0);
    uint64_t own;
    CHECK_EQ(hifc_pools_lend(pools, 1, &own), -ENOMEM);
    CHECK_EQ(hifc_pools_alloc(pools, 2 * MIB / 16, &own), 0);
    hifc_pools_destroy(pools);
}

TEST(resolve_keeps_within_the_pool)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    uint8_t *base = hifc_pools_resolve(pools, 0, 0, 2 * MIB);
    CHECK(base && (uintptr_t)base % HIFC_HUGE_PAGE_BYTES == 0);
    CHECK(hifc_pools_resolve(pools, 0, 2 * MIB - 1, 1) == base + 2 * MIB - 1);
    CHECK(!hifc_pools_resolve(pools, 0, 0, 2 * MIB + 1));
    CHECK(!hifc_pools_resolve(pools, 0, 2 * MIB, 1));
    CHECK(!hifc_pools_resolve(pools, 0, UINT64_MAX, 2));
    CHECK(!hifc_pools_resolve(pools, 0, 1, UINT64_MAX));
    CHECK(!hifc_pools_resolve(pools, 1, 0, 1));
    CHECK(!hifc_pools_resolve(pools, 64, 0, 1));
    CHECK(!hifc_pools_resolve(pools, UINT32_MAX, 0, 1));
    hifc_pools_destroy(pools);
}

TEST(memory_of_the_caller_is_registered_up_to_a_bound)
{
    static _Alignas(4096) uint8_t memory[2 * PAGE];
    struct hifc_device device = device_of(&registering_ops);
    struct hifc_pools *pools;
    uint32_t pool;
    registered = 0;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    CHECK_EQ(registered, 1);
    CHECK_EQ(hifc_pools_register(pools, memory + 1, PAGE, &pool), -EINVAL);
    CHECK_EQ(hifc_pools_register(pools, memory, PAGE + 8, &pool), -EINVAL);
    CHECK_EQ(hifc_pools_register(pools, memory, 0, &pool), -EINVAL);
    CHECK_EQ(hifc_pools_register(pools, NULL, PAGE, &pool), -EINVAL);
    CHECK_EQ(hifc_pools_register(pools, memory, UINT64_MAX & ~4095ull, &pool), -EINVAL);
    for (uint32_t i = 1; i < 64; i++) {
        CHECK_EQ(hifc_pools_register(pools, memory, 2 * PAGE, &pool), 0);
        CHECK_EQ(pool, i);
    }
    CHECK_EQ(hifc_pools_register(pools, memory, PAGE, &pool), -ENOSPC);
    CHECK(hifc_pools_resolve(pools, 9, PAGE, PAGE) == memory + PAGE);
    CHECK_EQ(hifc_pools_unregister(pools, 9), 0);
    CHECK(!hifc_pools_resolve(pools, 9, PAGE, PAGE));
    CHECK_EQ(hifc_pools_unregister(pools, 9), -EINVAL);
    CHECK_EQ(hifc_pools_unregister(pools, 0), -EINVAL);
    CHECK_EQ(hifc_pools_unregister(pools, 64), -EINVAL);
    CHECK_EQ(hifc_pools_register(pools, memory, PAGE, &pool), 0);
    CHECK_EQ(pool, 9);
    CHECK_EQ(registered, 1); /* too small for 2 MiB pages, and this device does not insist */
    hifc_pools_destroy(pools);
    CHECK_EQ(registered, 0);
}

TEST(a_refused_registration_matters_only_where_it_is_needed)
{
    struct hifc_device device = device_of(&registering_ops);
    struct hifc_pools *pools;
    registered = 0;
    register_rc = -EINVAL;
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    hifc_pools_destroy(pools);
    CHECK_EQ(registered, 0);
    device.geometry.registered_only = true;
    int rc = hifc_pools_create(&device, 2 * MIB, &pools);
    CHECK(rc == -EINVAL || rc == -ENOMEM); /* the latter without huge pages */
    register_rc = 0;
}

TEST(missing_huge_pages_are_named_with_the_count_needed)
{
    struct hifc_device device = device_of(&registering_ops);
    struct hifc_pools *pools;
    struct hifc_error error;
    device.geometry.registered_only = true;
    CHECK_EQ(hifc_pools_create(&device, 4ull << 40, &pools), -ENOMEM);
    CHECK_EQ(hifc_last_error(&error), -ENOMEM);
    CHECK(strstr(error.message, "needs 2097152 free huge pages"));
    CHECK(strstr(error.message, "nr_hugepages"));
    device.geometry.registered_only = false; /* ordinary pages, taken as they are touched */
    if (hifc_pools_create(&device, 64ull << 30, &pools) == 0) {
        CHECK(!hifc_pools_huge(pools));
        hifc_pools_destroy(pools);
    }
}

TEST(registered_only_takes_huge_pages_of_the_caller)
{
    struct hifc_device device = device_of(&registering_ops);
    struct hifc_pools *pools;
    uint32_t pool;
    registered = 0;
    device.geometry.registered_only = true;
    if (hifc_pools_create(&device, 2 * MIB, &pools) == -ENOMEM) {
        printf("skipped: no huge page is free\n");
        return;
    }
    CHECK(hifc_pools_huge(pools));
    struct hifc_region region;
    CHECK_EQ(hifc_region_create(&device, 1, "test", &region), 0);
    CHECK_EQ(registered, 2);
    CHECK_EQ(hifc_pools_register(pools, region.base + PAGE, PAGE, &pool), -EINVAL);
    CHECK_EQ(hifc_pools_register(pools, region.base, 2 * MIB, &pool), 0);
    CHECK_EQ(registered, 3);
    hifc_pools_destroy(pools);
    hifc_region_destroy(&device, &region);
    hifc_region_destroy(&device, &region);
    CHECK_EQ(registered, 0);
}

static void *hammer(void *argument)
{
    struct hifc_pools *pools = argument;
    unsigned seed = (unsigned)(uintptr_t)&seed;
    for (int i = 0; i < 5000; i++) {
        uint64_t bytes = 1 + (unsigned)rand_r(&seed) % (16 * PAGE), offset;
        if (hifc_pools_alloc(pools, bytes, &offset) == 0) {
            uint8_t *memory = hifc_pools_resolve(pools, 0, offset, bytes);
            memory[0] = 1;
            memory[bytes - 1] = 2;
            CHECK_EQ(hifc_pools_free(pools, offset), 0);
        }
    }
    return NULL;
}

TEST(threads_share_a_pool)
{
    struct hifc_device device = device_of(&plain_ops);
    struct hifc_pools *pools;
    pthread_t threads[4];
    CHECK_EQ(hifc_pools_create(&device, 2 * MIB, &pools), 0);
    for (unsigned i = 0; i < 4; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, hammer, pools), 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_EQ(used_bytes_of(pools), 0);
    hifc_pools_destroy(pools);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
