// SPDX-License-Identifier: Apache-2.0
//
// numbers.cuh - float32 from and to float16, bfloat16, fp8 E4M3 (one sign, four exponent, three
// mantissa bits, no infinity, as in the OCP specification of 8-bit floats) and int8, by their bits; on
// a GPU float16 by its instruction, which differs in the bits of a NaN alone. To nearest, ties to even.
// Nothing here meets a denormal float32, so flushing them changes nothing.
#ifndef HIFC_NUMBERS_CUH
#define HIFC_NUMBERS_CUH

#include "portable.cuh"

namespace hifc
{

constexpr float E4M3_MAX = 448.0f;
constexpr float INT8_MAX = 127.0f; // symmetric: -128 is not used

// value / 2^shift, to nearest, ties to even. shift: 1 to 31; value + 2^shift fits 32 bits.
HIFC_DEVICE u32 shift_to_even(u32 value, u32 shift)
{
    return (value + (1u << (shift - 1)) - 1 + (value >> shift & 1)) >> shift;
}

// An integer of at most 2^24 as a float, over a power of two.
HIFC_DEVICE float scaled(u32 value, float by)
{
    return float(int(value)) * by;
}

HIFC_DEVICE float half_to_float(u32 half)
{
#if HIFC_GPU
    float converted;
    asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(u16(half)));
    return converted;
#else
    const u32 sign = (half & 0x8000) << 16, size = half & 0x7fff;
    if (size >= 0x7c00) { // infinity or NaN
        return float_of(sign | 0x7f800000 | (size & 0x3ff) << 13);
    }
    const float value = size < 0x400 ? scaled(size, 0x1p-24f) : float_of((size << 13) + (112 << 23));
    return float_of(sign | bits_of(value));
#endif
}

HIFC_DEVICE u32 float_to_half(float value)
{
#if HIFC_GPU
    u16 converted;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(converted) : "f"(value));
    return converted;
#else
    const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        return sign | 0x7e00 | (size >> 13 & 0x1ff);
    }
    if (size >= 0x47800000) { // 65,536; from 65,520 on rounding below ends there
        return sign | 0x7c00;
    }
    if (size >= 0x38800000) {
        return sign | shift_to_even(size - (112 << 23), 13);
    }
    const u32 exponent = size >> 23;
    return exponent < 102 ? sign : sign | shift_to_even((size & 0x7fffff) | 0x800000, 126 - exponent);
#endif
}

HIFC_DEVICE float bfloat_to_float(u32 bfloat)
{
    return float_of(bfloat << 16);
}

HIFC_DEVICE u32 float_to_bfloat(float value)
{
    const u32 bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return bits >> 16 | 0x40; // stays a NaN though its lower bits go
    }
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

HIFC_DEVICE float e4m3_to_float(u32 code)
{
    const u32 sign = (code & 0x80) << 24, size = code & 0x7f;
    if (size == 0x7f) {
        return float_of(sign | 0x7fc00000);
    }
    const float value = size < 8 ? scaled(size, 0x1p-9f) : float_of((size << 20) + (120 << 23));
    return float_of(sign | bits_of(value));
}

// What is too large, infinity included, becomes the largest number; NaN stays NaN.
HIFC_DEVICE u32 float_to_e4m3(float value)
{
    const u32 bits = bits_of(value), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        return sign | 0x7f;
    }
    if (size >= 0x43e00000) {
        return sign | 0x7e;
    }
    if (size >= 0x3c800000) {
        return sign | shift_to_even(size - (120 << 23), 20);
    }
    const u32 exponent = size >> 23;
    return exponent < 117 ? sign : sign | shift_to_even((size & 0x7fffff) | 0x800000, 141 - exponent);
}

// What is too large becomes 127 or -127; NaN, which int8 has not, becomes 0.
HIFC_DEVICE i32 float_to_int8(float value)
{
    if (!(value == value)) {
        return 0;
    }
    const float bounded = min_of(max_of(value, -INT8_MAX), INT8_MAX);
    return i32((bounded + 0x1.8p23f) - 0x1.8p23f); // where floats have no fraction
}

} // namespace hifc

#endif
