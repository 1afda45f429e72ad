// The layers between two convolutions that work on each element alone, in one pass: an affine map of each channel, the
// addition of a residual branch with an affine map of its own, an activation function. The output is written packed,
// plain or both (`pack_target.cuh`), and so is its maximum over 2 x 2 pixels.
//
//   v = round(a x + b)                          FIRST 1; FIRST 0: v = x
//   v = round(v + r), r = other                 SECOND 1; SECOND 2: r = round(c other + d); SECOND 0: nothing
//   y = round(f(v))                             ACTIVATION 0 none, 1 relu, 2 leaky_relu, 3 silu, 4 hardswish, 5 gelu,
//                                               6 relu6
//   p = the maximum of y over 2 x 2 pixels      pointwise_pool_pack
//
// Every operation is in float32 and every line is rounded to DTYPE, so that the bytes are those of the layers one by
// one. a and b are float32 [items, 2, C] with items 1 or N: `ab_item` floats lie between two items of a batch.
//
// Launch: block 256, grid (chunks, N). x, other, values: DTYPE [N, pixels, C]; codes: 8 bytes and scales: 1 byte for
// each 16 channels. C is a multiple of 16. pointwise_pool_pack: x, other, values: DTYPE [N, 4 pixels, C], chunks of pooled
// pixels, W of the pooled feature map; outputs that are not written are null pointers.
#include "pack_pixels.cuh"

struct Affine {
    float a[VECTOR], b[VECTOR];

    __device__ Affine(const float* ab, long long ab_item, const Walk& walk, int C) {
        if (!walk.active) return;
        channels::load(ab + blockIdx.y * ab_item + walk.channel, a);
        channels::load(ab + blockIdx.y * ab_item + C + walk.channel, b);
    }
    __device__ __forceinline__ void operator()(float (&v)[VECTOR]) const {
        channels::rounded<DTYPE>(v, [&](int i) { return a[i] * v[i] + b[i]; });
    }
};

__device__ __forceinline__ float activation(float v, float slope) {
#if ACTIVATION == 1
    return fp4::nan_max(v, 0.f);
#elif ACTIVATION == 2
    return v > 0.f ? v : v * slope;
#elif ACTIVATION == 3
    return v / (1.f + expf(-v));
#elif ACTIVATION == 4
    return v * fminf(fmaxf(v + 3.f, 0.f), 6.f) * (1.f / 6.f);
#elif ACTIVATION == 5
    return v * 0.5f * (1.f + erff(v * 0.70710678118654752f));
#elif ACTIVATION == 6
    v = fp4::nan_max(v, 0.f);
    return v > 6.f ? 6.f : v;
#else
    return v;
#endif
}

// y of 8 channels of a pixel.
struct Pointwise {
    struct Raw {
        uint4 x;
#if SECOND
        uint4 other;
#endif
    };
    const DTYPE *x, *other;
    float slope;
#if FIRST
    Affine first;
#endif
#if SECOND == 2
    Affine second;
#endif

    __device__ Pointwise(
        const DTYPE* x, const float* ab, long long ab_item, const DTYPE* other, const float* other_ab,
        long long other_ab_item, float slope, const Walk& walk, int C)
        : x(x),
          other(other),
          slope(slope)
#if FIRST
          ,
          first(ab, ab_item, walk, C)
#endif
#if SECOND == 2
          ,
          second(other_ab, other_ab_item, walk, C)
#endif
    {
    }

    __device__ __forceinline__ Raw fetch(long long at) const {
        Raw raw;
        raw.x = *reinterpret_cast<const uint4*>(x + at);
#if SECOND
        raw.other = *reinterpret_cast<const uint4*>(other + at);
#endif
        return raw;
    }
    __device__ __forceinline__ void operator()(const Raw& raw, float (&v)[VECTOR]) const {
        channels::widened<DTYPE>(raw.x, v);
#if FIRST
        first(v);
#endif
#if SECOND
        float r[VECTOR];
        channels::widened<DTYPE>(raw.other, r);
#if SECOND == 2
        second(r);
#endif
        channels::rounded<DTYPE>(v, [&](int i) { return v[i] + r[i]; });
#endif
        channels::rounded<DTYPE>(v, [&](int i) { return activation(v[i], slope); });
    }
};

extern "C" __global__ void __launch_bounds__(256) pointwise_pack(
    const DTYPE* x, const float* ab, long long ab_item, const DTYPE* other, const float* other_ab,
    long long other_ab_item, float slope, const float* amax, uint32_t* codes, uint8_t* scales, DTYPE* values,
    long long pixels, int C, long long per_chunk) {
    const Walk walk(pixels, C, per_chunk);
    begin_after_primary();
    const Pointwise pointwise(x, ab, ab_item, other, other_ab, other_ab_item, slope, walk, C);
    const Target target{codes, scales, values};
    __shared__ GlobalScale shared;
    share_scale(target, amax, &shared);
    __syncthreads();
    put_pixels(pointwise, target, &shared, walk, (long long)blockIdx.y * pixels * C + walk.channel, C);
}

extern "C" __global__ void __launch_bounds__(256) pointwise_pool_pack(
    const DTYPE* x, const float* ab, long long ab_item, const DTYPE* other, const float* other_ab,
    long long other_ab_item, float slope, const float* amax, uint32_t* codes, uint8_t* scales, DTYPE* values,
    const float* pooled_amax, uint32_t* pooled_codes, uint8_t* pooled_scales, DTYPE* pooled_values, int W,
    long long pixels, int C, long long per_chunk) {
    const Walk walk(pixels, C, per_chunk);
    begin_after_primary();
    const Pointwise pointwise(x, ab, ab_item, other, other_ab, other_ab_item, slope, walk, C);
    const PooledTargets targets{{codes, scales, values}, {pooled_codes, pooled_scales, pooled_values}};
    __shared__ GlobalScale shared[2];
    targets.share_scales(amax, pooled_amax, shared);
    const auto join = [](float (&best)[VECTOR], const float (&v)[2][VECTOR], int line) {
#pragma unroll
        for (int tap = 0; tap < 2; ++tap) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)  // of -0 and 0 the first, as torch
                best[i] = (!line && !tap) || v[tap][i] > best[i] || v[tap][i] != v[tap][i] ? v[tap][i] : best[i];
        }
    };
    targets.put(pointwise, join, shared, walk, pixels, W, C);
}
