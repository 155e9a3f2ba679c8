// SPDX-License-Identifier: Apache-2.0
//
// items.cuh - the items of tensors as 32-bit floats, half precision both ways, rounding, keys that
// order as floats do, and e^x.
#ifndef HIFC_ITEMS_CUH
#define HIFC_ITEMS_CUH

#include "numbers.cuh"

namespace hifc
{

// Equal to DTYPES in hifc/kernels/.
enum ItemType : u32 { ITEM_F32 = 0, ITEM_F16 = 1, ITEM_BF16 = 2 };

constexpr float HALF_MAX = 65504.0f;

// To the nearest, ties to even; beyond the range the largest there is.
HIFC_DEVICE u16 half_of(float value)
{
    return u16(float_to_half(value > HALF_MAX ? HALF_MAX : value < -HALF_MAX ? -HALF_MAX : value));
}

HIFC_DEVICE float load_item(const void *items, i64 at, u32 type)
{
    if (type == ITEM_F32) {
        return static_cast<const float *>(items)[at];
    }
    const u16 bits = static_cast<const u16 *>(items)[at];
    return type == ITEM_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// The value has to be one of the type, as the least or greatest of some items is.
HIFC_DEVICE void store_item(void *items, i64 at, u32 type, float value)
{
    if (type == ITEM_F32) {
        static_cast<float *>(items)[at] = value;
    } else {
        static_cast<u16 *>(items)[at] =
            type == ITEM_F16 ? half_of(value) : u16(bits_of(value) >> 16);
    }
}

HIFC_DEVICE double round_even(double value)
{
#if HIFC_GPU
    return rint(value);
#else
    return __builtin_rint(value);
#endif
}

HIFC_DEVICE float round_even(float value)
{
#if HIFC_GPU
    return rintf(value);
#else
    return __builtin_rintf(value);
#endif
}

// Orders as the floats do; both zeros are one.
HIFC_DEVICE u32 key_of(float value)
{
    const u32 bits = bits_of(value + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// e^x for x <= 0, 0 below -87; relative error under 1e-7. Plain arithmetic, so that a compiler takes
// several at once on the host, and both builds find the same bits.
HIFC_DEVICE float exponential(float x)
{
    const float clipped = max_of(x, -87.0f);
    const float shifted = clipped * 1.44269504f + 12582912.0f; // its last bits are round(x / ln 2)
    const float power = shifted - 12582912.0f;
    const float rest = clipped - power * 0.693359375f + power * 2.12194440e-4f;
    float sum = 1.9841270e-4f;
    sum = sum * rest + 1.3888889e-3f;
    sum = sum * rest + 8.3333333e-3f;
    sum = sum * rest + 4.1666667e-2f;
    sum = sum * rest + 1.6666667e-1f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const float value = sum * float_of((bits_of(shifted) << 23) + 0x3f800000u);
    return x < -87.0f ? 0.0f : value;
}

} // namespace hifc

#endif
