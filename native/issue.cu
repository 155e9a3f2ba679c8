// SPDX-License-Identifier: Apache-2.0
//
// Candidates become descriptors in the request ring, and their answers blocks that have landed.
//
// An item is a block of a row, numbered row * 32 * words + block as its bit. A landing is room for
// one item in the ring's arena, with a status word of its own; `owners` says whose item it is, and
// the item's bit in `in_flight` is set from when its descriptor is written until the landing is
// released, so nothing is asked for twice. Both arrays belong to these kernels, which run on one
// stream and so one after another. None of them waits for an answer: settle looks once.
#include "ring.cuh"

using namespace hifc;

constexpr u32 ISSUE_THREADS = 256;
constexpr u32 NO_OWNER = 0xffffffffu;

enum Total : u32 { TOTAL_ISSUED, TOTAL_OVERFLOWED, TOTAL_NO_LANDING, TOTAL_FAILED };

struct IssueArgs {
    const u32 *candidates; // [rows, degree]: blocks, the most wanted first
    const u32 *counts;     // [rows]: how many there are
    const u8 *keys;        // [blocks, 16], the rows' key_row_stride keys apart
    u32 *in_flight;        // bits [rows, 32 * words]
    u32 *owners;           // [landings]
    u32 *free_landings;    // [landings], for this launch
    hifc_descriptor *slots;
    i32 *statuses;
    const u64 *head;       // of the ring's header
    u64 *tail;
    u64 *overflowed;       // of the ring's header
    u64 *totals;           // by Total; behind them stands what trend.cu counts
    u32 rows;
    u32 degree;
    u32 words;
    u32 key_row_stride;    // 0: the rows share their keys
    u32 landings;
    u32 landing_pages;
    u32 slot_count;
    u32 part_first;        // of row 0
    u32 part_step;         // from row to row
    u32 part_count;
    u32 shares_ring;       // not the ring's only producer: `overflowed` is added to
};

// Lists landings without an owner, the first ones; returns how many, at least `wanted` if there are.
HIFC_DEVICE u32 find_landings(const Block<ISSUE_THREADS> &block, const IssueArgs &args, u32 wanted)
{
    PerThread<u32, ISSUE_THREADS> place;
    u32 count = 0;
    for (u32 first = 0; first < args.landings && count < wanted; first += ISSUE_THREADS) {
        HIFC_PHASE (t) {
            place[t] = first + t < args.landings && args.owners[first + t] == NO_OWNER;
        }
        const u32 here = block_exclusive_sum(block, place);
        HIFC_PHASE (t) {
            if (first + t < args.landings && args.owners[first + t] == NO_OWNER) {
                args.free_landings[count + place[t]] = first + t;
            }
        }
        count += here;
    }
    return count;
}

// One thread, for all: takes room in the ring and counts what finds none.
HIFC_DEVICE Claim claim(const IssueArgs &args, u32 wanted, u32 landings)
{
    const u32 offered = min_of(wanted, landings);
    const Claim claimed = ring_claim(args.head, args.tail, args.slot_count, offered);
    const u32 lost = offered - claimed.count;
    args.totals[TOTAL_ISSUED] += claimed.count;
    args.totals[TOTAL_NO_LANDING] += wanted - offered;
    args.totals[TOTAL_OVERFLOWED] += lost;
    if (args.shares_ring) {
        atomic_add(args.overflowed, u64(lost));
    } else if (lost) {
        *static_cast<volatile u64 *>(args.overflowed) = args.totals[TOTAL_OVERFLOWED];
    }
    return claimed;
}

HIFC_DEVICE void publish(const IssueArgs &args, u32 row, u32 token_block, u32 landing, u64 position)
{
    const u32 item = row * 32 * args.words + token_block;
    const Vec16 key =
        load16(args.keys + (u64(row) * args.key_row_stride + token_block) * sizeof(Vec16));
    const u32 part = (args.part_first + row * args.part_step) | args.part_count << 16;
    args.owners[landing] = item;
    atomic_or(&args.in_flight[item / 32], 1u << item % 32);
    ring_publish(args.slots, args.statuses, args.slot_count, position,
                 {key.word[0], key.word[1], key.word[2], key.word[3],
                  landing * args.landing_pages, part,
                  HIFC_RING_CONTROL(HIFC_RING_OP_READ, landing)});
}

// Grid: 1. The most wanted of every row goes before the second of any.
HIFC_KERNEL(hifc_prefetch_issue, ISSUE_THREADS, IssueArgs)
{
    HIFC_SHARED Claim claimed;
    PerThread<u32, ISSUE_THREADS> number;
    HIFC_PHASE (t) {
        if (t == 0) {
            claimed = Claim{0, 0};
        }
        number[t] = 0;
        for (u32 row = t; row < args.rows; row += ISSUE_THREADS) {
            number[t] += args.counts[row];
        }
    }
    const u32 wanted = block_reduce<Sum>(block, number);
    const u32 landings = find_landings(block, args, wanted);
    HIFC_PHASE (t) {
        if (t == 0) {
            claimed = claim(args, wanted, landings);
        }
    }
    u32 done = 0;
    for (u32 first = 0; done < claimed.count; first += ISSUE_THREADS) {
        HIFC_PHASE (t) {
            const u32 rank = (first + t) / args.rows, row = (first + t) % args.rows;
            number[t] = rank < args.counts[row];
        }
        const u32 here = block_exclusive_sum(block, number);
        HIFC_PHASE (t) {
            const u32 rank = (first + t) / args.rows, row = (first + t) % args.rows;
            const u32 mine = done + number[t];
            if (rank < args.counts[row] && mine < claimed.count) {
                publish(args, row, args.candidates[row * args.degree + rank],
                        args.free_landings[mine], claimed.position + mine);
            }
        }
        done += here;
    }
}

struct SettleArgs {
    u32 *in_flight;
    u32 *owners;
    const i32 *statuses;
    u32 *landed;  // [landings]: those whose bytes are there
    u32 *items;   // [landings]: what they hold
    u32 *counts;  // how many have landed, how many are on their way
    u64 *totals;
    u32 landings;
};

HIFC_DEVICE void toggle(u32 *bits, u32 item)
{
    atomic_xor(&bits[item / 32], 1u << item % 32);
}

// Grid: 1. Lists what has landed and was not released, and gives up what failed.
HIFC_KERNEL(hifc_prefetch_settle, ISSUE_THREADS, SettleArgs)
{
    PerThread<u32, ISSUE_THREADS> owner, place, waiting, failed;
    u32 count = 0;
    HIFC_PHASE (t) {
        waiting[t] = failed[t] = 0;
    }
    for (u32 first = 0; first < args.landings; first += ISSUE_THREADS) {
        HIFC_PHASE (t) {
            owner[t] = first + t < args.landings ? args.owners[first + t] : NO_OWNER;
            place[t] = 0;
            if (owner[t] != NO_OWNER) {
                const u32 *word = reinterpret_cast<const u32 *>(args.statuses + first + t);
                const u32 status = load_acquire_system(word);
                place[t] = status == 0;
                waiting[t] += status == HIFC_RING_WAITING;
                if (status != 0) {
                    if (status != HIFC_RING_WAITING) {
                        failed[t]++;
                        toggle(args.in_flight, owner[t]);
                        args.owners[first + t] = NO_OWNER;
                    }
                    owner[t] = NO_OWNER;
                }
            }
        }
        const u32 here = block_exclusive_sum(block, place);
        HIFC_PHASE (t) {
            if (owner[t] != NO_OWNER) {
                args.landed[count + place[t]] = first + t;
                args.items[count + place[t]] = owner[t];
            }
        }
        count += here;
    }
    const u32 all_waiting = block_reduce<Sum>(block, waiting);
    const u32 all_failed = block_reduce<Sum>(block, failed);
    HIFC_LAST_PHASE (t) {
        if (t == 0) {
            args.counts[0] = count;
            args.counts[1] = all_waiting;
            args.totals[TOTAL_FAILED] += all_failed;
        }
    }
}

struct ReleaseArgs {
    const u32 *released; // [count]: landings
    u32 *in_flight;
    u32 *resident;       // where the items are from now on, or null
    u32 *owners;
    const i32 *statuses;
    u32 count;
    u32 landings;
};

// Grid: count / ISSUE_THREADS, rounded up. Leaves what is on its way, since its bytes are still to come.
HIFC_KERNEL(hifc_prefetch_release, ISSUE_THREADS, ReleaseArgs)
{
    HIFC_LAST_PHASE (t) {
        const u32 i = block.index * ISSUE_THREADS + t;
        const u32 landing = i < args.count ? args.released[i] : args.landings;
        if (landing >= args.landings ||
            load_acquire_system(reinterpret_cast<const u32 *>(args.statuses + landing)) ==
                HIFC_RING_WAITING) {
            continue;
        }
        const u32 item = atomic_exchange(&args.owners[landing], NO_OWNER);
        if (item != NO_OWNER) {
            toggle(args.in_flight, item);
            if (args.resident) {
                atomic_or(&args.resident[item / 32], 1u << item % 32);
            }
        }
    }
}
