// SPDX-License-Identifier: Apache-2.0
//
// portable.cuh - what a kernel is written with, for three compilers: nvcc, NVRTC and a host C++17
// compiler. No standard header is included, since NVRTC has none.
//
// A kernel is a sequence of phases. A phase is what every thread of a block does between two
// barriers, and threads of one phase never wait for each other, so the host build runs it as a loop
// over the threads of a block and the grid as a loop over blocks: no fibers, one stack. State of a
// thread that outlives a phase is declared as PerThread. README.md beside this file has the rules.
#ifndef HIFC_PORTABLE_CUH
#define HIFC_PORTABLE_CUH

#if defined(__CUDACC__)
#define HIFC_GPU 1
#define HIFC_FN static __host__ __device__ __forceinline__
#define HIFC_DEVICE static __device__ __forceinline__
#define HIFC_SHARED __shared__
#define HIFC_TABLE static __device__ constexpr
#define HIFC_UNROLL _Pragma("unroll") // an array indexed by the loop stays in registers
#define HIFC_ROLLED _Pragma("unroll 1") // a loop that is rare, or would take too many registers
#else
#define HIFC_GPU 0
#define HIFC_FN [[maybe_unused]] static inline
#define HIFC_DEVICE [[maybe_unused]] static inline
#define HIFC_SHARED
#define HIFC_TABLE static constexpr
#define HIFC_UNROLL
#define HIFC_ROLLED
#endif

namespace hifc
{

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(void *) == 8,
              "kernels and their callers agree on these sizes");

constexpr u32 WARP_THREADS = 32;

// ---- grid, block, phases -------------------------------------------------------------------------

// What a kernel's body knows as `block`. On the host, a grid may be run backwards: a kernel whose
// result then differs has a race between threads or blocks.
template <u32 THREADS> struct Block {
    static_assert(THREADS % WARP_THREADS == 0 && THREADS <= 1024, "whole warps, at most 1,024 threads");
    static constexpr u32 threads = THREADS;
    u32 index; // of this block
    u32 count; // of blocks in the grid
    u32 backwards;
};

// HIFC_KERNEL(name, threads of a block, type of the arguments) { body }
// A thread gets at most 64 registers, so that 1,024 are at home on a multiprocessor at once.
// The body sees `args`, a constant reference to the arguments, and `block`. The arguments are one
// struct of pointers and numbers that hifc/kernels/backend.py describes as a numpy type.
//
// HIFC_PHASE(t) statement        every thread t of the block, then a barrier
// HIFC_LAST_PHASE(t) statement   the same without the barrier: at the end of a kernel, or where what
//                                follows, like block_reduce, reads only PerThread variables
// `continue` ends a thread's phase; `break` and `return` would skip the barrier.
#if HIFC_GPU
#define HIFC_KERNEL(name, THREADS, Args)                                                           \
    static __device__ __forceinline__ void name##_body(const Args &, const hifc::Block<THREADS> &); \
    extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)                          \
        name(const __grid_constant__ Args args)                                                    \
    {                                                                                              \
        name##_body(args, hifc::Block<THREADS>{blockIdx.x, gridDim.x, 0});                         \
    }                                                                                              \
    static __device__ __forceinline__ void name##_body(                                            \
        [[maybe_unused]] const Args &args, [[maybe_unused]] const hifc::Block<THREADS> &block)
#define HIFC_PHASE(t)                                                                              \
    for (hifc::u32 t = threadIdx.x, t##_runs = 1; t##_runs; t##_runs = 0, __syncthreads())
#define HIFC_LAST_PHASE(t)                                                                         \
    for (hifc::u32 t = threadIdx.x, t##_runs = 1; t##_runs; t##_runs = 0)
#else
// Built twice where the processor may have AVX2, the loader takes the one that it has. Neither fuses
// operations, so both find the same bits.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HIFC_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define HIFC_CLONES
#endif
#define HIFC_KERNEL(name, THREADS, Args)                                                           \
    __attribute__((always_inline)) static inline void name##_body(const Args &,                    \
                                                                  const hifc::Block<THREADS> &);   \
    extern "C" HIFC_CLONES __attribute__((visibility("default"))) void name(                       \
        const Args *args, hifc::u32 blocks, hifc::u32 backwards)                                   \
    {                                                                                              \
        for (hifc::u32 i = 0; i < blocks; i++) {                                                   \
            name##_body(*args, hifc::Block<THREADS>{backwards ? blocks - 1 - i : i, blocks,        \
                                                    backwards});                                   \
        }                                                                                          \
    }                                                                                              \
    extern "C" __attribute__((visibility("default"))) hifc::u64 name##_shape()                     \
    {                                                                                              \
        return hifc::u64(sizeof(Args)) << 32 | THREADS;                                            \
    }                                                                                              \
    __attribute__((always_inline)) static inline void name##_body(                                 \
        [[maybe_unused]] const Args &args, [[maybe_unused]] const hifc::Block<THREADS> &block)
#define HIFC_PHASE(t)                                                                              \
    for (hifc::u32 t##_runs = 0, t = block.backwards ? block.threads - 1 : 0;                      \
         t##_runs < block.threads; t##_runs++, t += block.backwards ? -1u : 1u)
#define HIFC_LAST_PHASE(t) HIFC_PHASE(t)
#endif

// A variable of each thread that lives across phases: `PerThread<float, THREADS> sum;`, `sum[t]`.
// One register on a GPU, an array on the host.
template <typename T, u32 THREADS> struct PerThread {
#if HIFC_GPU
    T value;
    __device__ __forceinline__ T &operator[](u32)
    {
        return value;
    }
#else
    T value[THREADS];
    T &operator[](u32 t)
    {
        return value[t];
    }
#endif
};

// ---- operations of a warp or block, called between phases ----------------------------------------

struct Sum {
    template <typename T> HIFC_FN T join(T a, T b)
    {
        return a + b;
    }
};
struct Max {
    template <typename T> HIFC_FN T join(T a, T b)
    {
        return a > b ? a : b;
    }
};
struct Xor {
    template <typename T> HIFC_FN T join(T a, T b)
    {
        return a ^ b;
    }
};

// Every thread's value becomes its warp's, joined in the same order on both builds, so that sums of
// floats are equal to the bit. T: a 32- or 64-bit number.
template <typename Op, typename T, u32 THREADS>
HIFC_DEVICE void warp_reduce(const Block<THREADS> &, PerThread<T, THREADS> &values)
{
#if HIFC_GPU
    for (u32 step = WARP_THREADS / 2; step; step /= 2) {
        values.value = Op::join(values.value, __shfl_xor_sync(0xffffffffu, values.value, step));
    }
#else
    for (u32 warp = 0; warp < THREADS; warp += WARP_THREADS) {
        T *lane = values.value + warp;
        for (u32 step = WARP_THREADS / 2; step; step /= 2) {
            T before[WARP_THREADS];
            __builtin_memcpy(before, lane, sizeof before);
            for (u32 i = 0; i < WARP_THREADS; i++) {
                lane[i] = Op::join(before[i], before[i ^ step]);
            }
        }
    }
#endif
}

// The join of all threads' values, returned to every thread; the values themselves are used up.
template <typename Op, typename T, u32 THREADS>
HIFC_DEVICE T block_reduce(const Block<THREADS> &block, PerThread<T, THREADS> &values)
{
    HIFC_SHARED T of_warp[THREADS / WARP_THREADS];
    warp_reduce<Op>(block, values);
    HIFC_PHASE (t) {
        if (t % WARP_THREADS == 0) {
            of_warp[t / WARP_THREADS] = values[t];
        }
    }
    T all = of_warp[0];
    for (u32 warp = 1; warp < THREADS / WARP_THREADS; warp++) {
        all = Op::join(all, of_warp[warp]);
    }
#if HIFC_GPU
    __syncthreads(); // of_warp may be written again
#endif
    return all;
}

// Each value becomes the sum of those of the threads before it; returns the sum of all. Integers.
template <typename T, u32 THREADS>
HIFC_DEVICE T block_exclusive_sum(const Block<THREADS> &block, PerThread<T, THREADS> &values)
{
#if HIFC_GPU
    __shared__ T of_warp[THREADS / WARP_THREADS];
    const u32 lane = threadIdx.x % WARP_THREADS, warp = threadIdx.x / WARP_THREADS;
    T sum = values.value;
    for (u32 step = 1; step < WARP_THREADS; step *= 2) {
        T below = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? below : T(0);
    }
    if (lane == WARP_THREADS - 1) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    T before = 0, all = 0;
    for (u32 i = 0; i < THREADS / WARP_THREADS; i++) {
        before += i < warp ? of_warp[i] : T(0);
        all += of_warp[i];
    }
    __syncthreads(); // of_warp may be written again
    values.value = before + sum - values.value;
    (void)block;
    return all;
#else
    T all = 0;
    for (u32 t = 0; t < THREADS; t++) {
        T value = values.value[t];
        values.value[t] = all;
        all += value;
    }
    (void)block;
    return all;
#endif
}

// ---- numbers and bits ----------------------------------------------------------------------------------------

template <typename T> HIFC_FN constexpr T min_of(T a, T b)
{
    return a < b ? a : b;
}

template <typename T> HIFC_FN constexpr T max_of(T a, T b)
{
    return a > b ? a : b;
}

HIFC_DEVICE u32 bits_of(float value)
{
#if HIFC_GPU
    return __float_as_uint(value);
#else
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

HIFC_DEVICE float float_of(u32 bits)
{
#if HIFC_GPU
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// Number of zeros above the highest bit set; 32 for 0.
HIFC_DEVICE u32 leading_zeros(u32 value)
{
#if HIFC_GPU
    return u32(__clz(int(value)));
#else
    return value ? u32(__builtin_clz(value)) : 32;
#endif
}

// Division of any u32 by a divisor that the caller knows before, without a division (Granlund and
// Montgomery, PLDI 1994). hifc.kernels.table.divider makes one.
struct Divider {
    u32 divisor;
    u32 magic;
    u32 shift_once;
    u32 shift_rest;
};

HIFC_DEVICE u32 divide(u32 value, const Divider &by)
{
    const u32 high = u32(u64(value) * by.magic >> 32);
    return (high + ((value - high) >> by.shift_once)) >> by.shift_rest;
}

// One item of type T at an address that is a multiple of its size, whatever it was stored as.
template <typename T> HIFC_DEVICE T load_as(const void *from)
{
#if HIFC_GPU
    return *static_cast<const T *>(from);
#else
    T value;
    __builtin_memcpy(&value, __builtin_assume_aligned(from, sizeof(T)), sizeof value);
    return value;
#endif
}

template <typename T> HIFC_DEVICE void store_as(void *to, T value)
{
#if HIFC_GPU
    *static_cast<T *>(to) = value;
#else
    __builtin_memcpy(__builtin_assume_aligned(to, sizeof(T)), &value, sizeof value);
#endif
}

// ---- 16 bytes at once ----------------------------------------------------------------------------

struct alignas(16) Vec16 {
    u32 word[4];
};

// The address is a multiple of 16, and of global memory, which a compiler cannot know of a pointer
// that came as a number. `_once`: the data is not touched again by this kernel, so it leaves the
// caches to others; a load so marked may not see stores of the same kernel.
HIFC_DEVICE Vec16 load16(const void *from)
{
#if HIFC_GPU
    Vec16 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),
                   "=r"(value.word[3])
                 : "l"(from)
                 : "memory");
    return value;
#else
    return load_as<Vec16>(from);
#endif
}

HIFC_DEVICE void store16(void *to, Vec16 value)
{
#if HIFC_GPU
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]),
                   "r"(value.word[3])
                 : "memory");
#else
    store_as(to, value);
#endif
}

HIFC_DEVICE Vec16 load16_once(const void *from)
{
#if HIFC_GPU
    Vec16 value;
    // volatile: several of them stay together before what uses them, and are in flight together.
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),
                   "=r"(value.word[3])
                 : "l"(from));
    return value;
#else
    return load16(from);
#endif
}

HIFC_DEVICE void store16_once(void *to, Vec16 value)
{
#if HIFC_GPU
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]),
                   "r"(value.word[3])
                 : "memory");
#else
    store16(to, value);
#endif
}

} // namespace hifc

#include "atomics.cuh"

#endif
