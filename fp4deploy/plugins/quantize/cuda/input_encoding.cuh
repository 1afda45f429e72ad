// The multi-term FP4 encoding of an image (fp4deploy/models/input_encoding.py): products and differences are exact.
#pragma once

#include <cuda_fp16.h>

namespace input_encoding {

constexpr int TERMS = 4, COLOURS = 3, CHANNELS = TERMS * COLOURS + 1;
constexpr float CONSTANT = 6.f;

// The terms of a colour, which is rounded to FP16 first and returned.
__device__ __forceinline__ float terms_of(float colour, float (&term)[TERMS]) {
    const float wide = __half2float(__float2half_rn(colour));
    const float scaled = wide * 1.6875f, v = scaled < -4.5f ? -4.5f : scaled > 4.5f ? 4.5f : scaled;
    const float d1 = rintf(v), second = (v - d1) * 6.f, twice2 = rintf(second);
    const float third = (second - twice2) * 2.f, twice3 = rintf(third), twice4 = rintf((third - twice3) * 2.f);
    term[0] = d1, term[1] = twice2 * 0.5f, term[2] = twice3 * 0.5f, term[3] = twice4 * 0.5f;
    return wide;
}

// NaN where a colour is not finite. total: of the colours.
__device__ __forceinline__ float constant_of(float total) { return (total - total) + CONSTANT; }

}  // namespace input_encoding
