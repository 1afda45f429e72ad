// NVFP4 of a block, as the fused kernels need it: scale, fake quantisation, tracked amax.
#pragma once
#include <math.h>

namespace fp4 {

constexpr float FLOAT_MAX = 3.402823466e38f;

__device__ __forceinline__ float nan_max(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

struct GlobalScale {
    float amax;     // A
    float sixth;    // S * fp32(1/6)
    float decode;   // 1 / S
};

__device__ __forceinline__ GlobalScale global_scale(float amax) {
    float scale = fminf(__fdiv_rn(2688.f, amax), FLOAT_MAX);
    if (amax != amax) scale = amax;
    if (scale == 0.f || amax == 0.f) scale = 1.f;
    return {amax, __fmul_rn(scale, 1.f / 6.f), __fdiv_rn(1.f, scale)};
}

struct BlockScale {
    float encode;   // e
    float step;     // (d8 * A) * fp32(1 / 2688)
};

// E4M3 value nearest to 0 <= d <= 448, ties to even.
__device__ __forceinline__ float round_e4m3(float d) {
    float binade = __int_as_float(__float_as_int(fmaxf(d, 0.015625f)) & 0x7F800000);
    float rounder = binade * 1572864.f;  // 1.5 * 2^23 eighths
    return __fsub_rn(__fadd_rn(d, rounder), rounder);
}

__device__ __forceinline__ BlockScale block_scale(float block_amax, const GlobalScale& scale) {
    float d8 = round_e4m3(fminf(fminf(__fmul_rn(block_amax, scale.sixth), FLOAT_MAX), 448.f));
    if (!(scale.amax > 0.f)) d8 = 0.f;
    float encode = d8 > 0.f ? fminf(__fdiv_rn(1.f, __fmul_rn(d8, scale.decode)), FLOAT_MAX) : 0.f;
    float step = __fmul_rn(__fmul_rn(d8, scale.amax), 1.f / 2688.f);
    if (!(block_amax < INFINITY)) encode = step = __int_as_float(0x7FC00000);
    return {encode, step};
}

__device__ __forceinline__ float round_e2m1(float u) {
    u = u < -6.f ? -6.f : u > 6.f ? 6.f : u;
    float rounder = __int_as_float((__float_as_int(fmaxf(fabsf(u), 1.f)) & 0x7F800000) | 0x00400000);
    return __fmaf_rn(rounder, -4194304.f, __fmaf_rn(rounder, 4194304.f, u));
}

__device__ __forceinline__ float fake_quantize(float x, const BlockScale& block) {
    return __fmul_rn(block.step, round_e2m1(__fmul_rn(x, block.encode)));
}

__device__ __forceinline__ void track_amax(int* cell, const float* other, float* tracked, float* amax, float decay) {
    float current = __int_as_float(atomicExch(cell, 0));
    if (other) current = fmaxf(current, *other);
    if (tracked) {
        current = fmaxf(current, __fmul_rn(*tracked, decay));
        *tracked = current;
        if (!(current > 0.f)) current = __int_as_float(0x7FC00000);
    }
    *amax = current;
}

}  // namespace fp4
