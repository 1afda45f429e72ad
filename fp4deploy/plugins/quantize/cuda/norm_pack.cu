// Normalisation + ReLU (+ 2 x 2 maximum pooling) in one pass, output in the form that the next layers read: packed or
// plain.
//
//   y = round(relu(a x + b))        a, b of each batch item and channel, from `combine` of group_norm.cu
//   p = the maximum of y over 2 x 2 pixels
//
// y and p are each written as codes and scales with a global amax of their own (a block is 16 channels of a pixel), as
// DTYPE values, as both or not at all (null pointers). An encoder level of a UNet writes y for the skip connection and
// p for the next level, 0.56 bytes an element each, and no 16-bit feature map. The values are rounded to DTYPE before
// they are quantised, so that a fused layer has the bytes of an unfused one.
//
// Launch: block 256, grid (chunks, N). x, y: DTYPE [N, pixels, C], p: DTYPE [N, pixels / 4, C]; codes: 8 bytes and
// scales: 1 byte for each 16 channels. C is a multiple of 16. norm_pool_pack: chunks of pooled pixels, W of the pooled
// feature map.
#include "pack_pixels.cuh"

struct Affine {
    using Raw = uint4;
    const DTYPE* x;
    float a[VECTOR], b[VECTOR];

    __device__ Affine(const DTYPE* x, const float* ab, const Walk& walk, int C) : x(x) {
        if (!walk.active) return;
        channels::load(ab + blockIdx.y * 2LL * C + walk.channel, a);
        channels::load(ab + (blockIdx.y * 2LL + 1) * C + walk.channel, b);
    }
    __device__ __forceinline__ Raw fetch(long long at) const { return *reinterpret_cast<const uint4*>(x + at); }
    __device__ __forceinline__ void operator()(const Raw& raw, float (&v)[VECTOR]) const {
        channels::widened<DTYPE>(raw, v);
        channels::rounded<DTYPE>(v, [&](int i) { return fp4::nan_max(__fmaf_rn(a[i], v[i], b[i]), 0.f); });
    }
};

extern "C" __global__ void __launch_bounds__(256) norm_pack(
    const DTYPE* x, const float* ab, const float* amax, uint32_t* codes, uint8_t* scales, DTYPE* values,
    long long pixels, int C, long long per_chunk) {
    const Walk walk(pixels, C, per_chunk);
    begin_after_primary();
    const Affine affine(x, ab, walk, C);
    const Target target{codes, scales, values};
    __shared__ GlobalScale shared;
    share_scale(target, amax, &shared);
    __syncthreads();
    put_pixels(affine, target, &shared, walk, (long long)blockIdx.y * pixels * C + walk.channel, C);
}

extern "C" __global__ void __launch_bounds__(256) norm_pool_pack(
    const DTYPE* x, const float* ab, const float* amax, uint32_t* codes, uint8_t* scales, DTYPE* values,
    const float* pooled_amax, uint32_t* pooled_codes, uint8_t* pooled_scales, DTYPE* pooled_values, int W,
    long long pixels, int C, long long per_chunk) {
    const Walk walk(pixels, C, per_chunk);
    begin_after_primary();
    const Affine affine(x, ab, walk, C);
    const PooledTargets targets{{codes, scales, values}, {pooled_codes, pooled_scales, pooled_values}};
    __shared__ GlobalScale shared[2];
    targets.share_scales(amax, pooled_amax, shared);
    const auto join = [](float (&best)[VECTOR], const float (&v)[2][VECTOR], int line) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float larger = fp4::nan_max(v[0][i], v[1][i]);
            best[i] = line ? fp4::nan_max(best[i], larger) : larger;
        }
    };
    targets.put(affine, join, shared, walk, pixels, W, C);
}
