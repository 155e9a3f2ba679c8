// SPDX-License-Identifier: Apache-2.0
//
// atomics.cuh - how threads of different blocks, and a GPU and a CPU, meet in memory. A part of
// portable.cuh, which includes it.
#ifndef HIFC_ATOMICS_CUH
#define HIFC_ATOMICS_CUH

namespace hifc
{

// ---- relaxed, seen by the whole device -----------------------------------------------------------

// T: i32, u32, u64, and float for atomic_add. Each returns the value before.
template <typename T> HIFC_DEVICE T atomic_add(T *at, T value)
{
#if HIFC_GPU
    return atomicAdd(at, value);
#else
    T before, after;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    do {
        after = before + value;
    } while (!__atomic_compare_exchange(at, &before, &after, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
    return before;
#endif
}

// T: i32, u32, u64, as in all that follow.
template <typename T> HIFC_DEVICE T atomic_exchange(T *at, T value)
{
#if HIFC_GPU
    return atomicExch(at, value);
#else
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
#endif
}

// Writes value if `expected` is there.
template <typename T> HIFC_DEVICE T atomic_compare_exchange(T *at, T expected, T value)
{
#if HIFC_GPU
    return atomicCAS(at, expected, value);
#else
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
#endif
}

template <typename T> HIFC_DEVICE T atomic_or(T *at, T value)
{
#if HIFC_GPU
    return atomicOr(at, value);
#else
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
#endif
}

template <typename T> HIFC_DEVICE T atomic_xor(T *at, T value)
{
#if HIFC_GPU
    return atomicXor(at, value);
#else
    return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED);
#endif
}

// ---- between GPU and CPU -------------------------------------------------------------------------

// All that this thread wrote before is seen by whoever, on any processor, acquires this value.
HIFC_DEVICE void store_release_system(u32 *at, u32 value)
{
#if HIFC_GPU
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

HIFC_DEVICE void store_release_system(u64 *at, u64 value)
{
#if HIFC_GPU
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

HIFC_DEVICE u32 load_acquire_system(const u32 *at)
{
#if HIFC_GPU
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

HIFC_DEVICE u64 load_acquire_system(const u64 *at)
{
#if HIFC_GPU
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

} // namespace hifc

#endif
