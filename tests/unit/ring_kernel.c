/* SPDX-License-Identifier: Apache-2.0
 *
 * ring_kernel.c - descriptors that kernels publish (native/ring.cuh) and the reactor's side of the
 * ring takes: several threads launch at once, and every descriptor tells the position that it was
 * written for. Under the thread sanitizer it finds one that is read before it was published, or
 * written before it was taken.
 */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "engine/ring.h"

/* As in native/litmus.cu. */
struct litmus_args {
    struct hifc_descriptor *slots;
    int32_t *statuses;
    uint64_t *head, *tail, *results;
    uint32_t slot_count, status_count, wanted;
};
void hifc_litmus_produce(const struct litmus_args *args, uint32_t blocks, uint32_t backwards);
uint64_t hifc_litmus_produce_shape(void);

#define PRODUCERS 3u
#define COUNT 200000u
#define BLOCKS 4u
#define SLOTS 64u

static struct hifc_ring_memory ring;
static uint64_t produced;
static atomic_bool enough;

static uint32_t word_of(uint64_t position, uint32_t word)
{
    uint64_t mixed = (position + word) * 0x9e3779b97f4a7c15ull;
    return word == 6 ? HIFC_RING_CONTROL(HIFC_RING_OP_READ, position % SLOTS)
                     : (uint32_t)(mixed >> 32) ^ (uint32_t)mixed;
}

static void *produce(void *arg)
{
    uint32_t backwards = (uint32_t)(uintptr_t)arg & 1;
    struct litmus_args args = {ring.slots, ring.statuses, &ring.header->head, &ring.header->tail,
                               &produced, SLOTS, SLOTS, 7};
    while (!atomic_load(&enough)) {
        hifc_litmus_produce(&args, BLOCKS, backwards);
        sched_yield();
    }
    return NULL;
}

TEST(the_struct_is_the_kernels)
{
    CHECK_EQ(hifc_litmus_produce_shape() >> 32, sizeof(struct litmus_args));
}

TEST(what_kernels_publish_is_whole_and_in_order)
{
    CHECK_EQ(hifc_ring_memory_create(SLOTS, SLOTS, 1u << 20, 65536, &ring), 0);
    pthread_t threads[PRODUCERS];
    for (uintptr_t i = 0; i < PRODUCERS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, produce, (void *)i), 0);
    }
    for (uint64_t position = 0; position < COUNT;) {
        struct hifc_descriptor taken;
        enum hifc_ring_took took = hifc_ring_take(&ring, &taken);
        if (took == HIFC_RING_EMPTY) {
            sched_yield();
            continue;
        }
        CHECK_EQ(took, HIFC_RING_TOOK);
        uint32_t words[8];
        memcpy(words, &taken, sizeof words);
        for (uint32_t word = 0; word < 7; word++) {
            CHECK_EQ(words[word], word_of(position, word));
        }
        uint32_t index = position % SLOTS;
        CHECK_EQ(__atomic_load_n(&ring.statuses[index], __ATOMIC_RELAXED), HIFC_RING_WAITING);
        hifc_ring_answer(&ring, index, 0);
        hifc_ring_credit(&ring);
        position++;
    }
    atomic_store(&enough, true);
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(produced, ring.header->tail);
    CHECK(produced >= COUNT && produced <= COUNT + SLOTS);
    hifc_ring_memory_destroy(&ring);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
