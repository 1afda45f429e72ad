// 2 x 2 maximum pooling of channels_last feature maps, its output fake-quantised for the convolution that reads it.
//
// In a UNet two layers read y: the pooling and the skip connection. The backward adds both gradients in one pass: dy =
// dskip, plus dpooled at the position of the maximum (the first of equals, row by row), unless quantisation clipped it.
//
// With NORMALIZED `pool_gradient` reads what a GroupNorm reads instead of y = relu(scale x + shift), and computes y again,
// as `apply` of group_norm.cu rounds it; ab: float32 [N, 2, C].
//
// Launch: block 256, grid (chunks of output pixels, N). y: DTYPE [N, 2 H, 2 W, C]; pooled: DTYPE [N, H, W, C]; C a
// multiple of 8, of 16 with quantisation.
#include "channels.cuh"

#ifndef NORMALIZED
#define NORMALIZED 0
#endif

using channels::VECTOR;
using channels::Walk;

struct Corner {
    long long base, right, below;
    __device__ Corner(long long pixel, int W, int C) {
        long long row = pixel / W, column = pixel % W;
        base = ((row * 2) * (2LL * W) + column * 2) * C;
        right = C;
        below = 2LL * W * C;
    }
};

extern "C" __global__ void __launch_bounds__(256) pool(
    const DTYPE* y, const float* amax, DTYPE* pooled, int W, long long pixels, int C, long long per_chunk) {
    Walk walk(pixels, C, per_chunk);
    const DTYPE* item = y + blockIdx.y * pixels * 4 * C + walk.channel;
    DTYPE* out = pooled + blockIdx.y * pixels * C + walk.channel;
#if QUANTIZE
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
#endif
#pragma unroll 2
    for (int trip = 0; trip < walk.trips; ++trip) {
        bool has = walk.has(trip);
        float best[VECTOR] = {};  // a NaN wins, as in torch's max_pool2d
        if (has) {
            Corner corner(walk.pixel(trip), W, C);
            channels::load(item + corner.base, best);
#pragma unroll
            for (int tap = 1; tap < 4; ++tap) {
                float v[VECTOR];
                channels::load(item + corner.base + (tap & 1) * corner.right + (tap >> 1) * corner.below, v);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) best[i] = v[i] > best[i] || v[i] != v[i] ? v[i] : best[i];
            }
        }
#if QUANTIZE
        fp4::BlockScale block = fp4::block_scale(channels::block_amax(best), scale);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) best[i] = fp4::fake_quantize(best[i], block);
#endif
        if (has) channels::store(out + walk.pixel(trip) * C, best);
    }
}

extern "C" __global__ void __launch_bounds__(256) pool_gradient(
    const DTYPE* y, const float* ab, const DTYPE* dskip, const DTYPE* dpooled, const float* amax, DTYPE* dy, int W,
    long long pixels, int C, long long per_chunk) {
    Walk walk(pixels, C, per_chunk);
#if NORMALIZED
    channels::Normalized normalized;
    if (walk.active) normalized.load(ab, C, walk.channel);
#endif
    const auto widen = [&](uint4 raw, float (&v)[VECTOR]) {
        channels::widened<DTYPE>(raw, v);
#if NORMALIZED
        normalized.apply<DTYPE>(v);
#endif
    };
    long long item = blockIdx.y * pixels * 4 * C + walk.channel;
    const DTYPE* in = dpooled + blockIdx.y * pixels * C + walk.channel;
#if QUANTIZE
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
#endif
    for (int trip = 0; trip < walk.trips; ++trip) {
        bool has = walk.has(trip);
        float best[VECTOR], g[VECTOR];
        int from[VECTOR] = {};  // which of the four pixels was the maximum; found again instead of stored
        Corner corner(has ? walk.pixel(trip) : 0, W, C);
        uint4 taps[4], skips[4];  // all on their way before the first is needed
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            const long long at = item + corner.base + (tap & 1) * corner.right + (tap >> 1) * corner.below;
            taps[tap] = channels::load_if(y + at, has);
            skips[tap] = channels::load_if(dskip + at, has && dskip);
        }
        channels::widened<DTYPE>(channels::load_if(in + walk.pixel(trip) * C, has), g);
        widen(taps[0], best);
#pragma unroll
        for (int tap = 1; tap < 4; ++tap) {
            float v[VECTOR];
            widen(taps[tap], v);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                if (v[i] > best[i] || v[i] != v[i]) {
                    best[i] = v[i];
                    from[i] = tap;
                }
        }
#if QUANTIZE
        // Straight-through estimator: no gradient where the pooled value was clipped.
        float encode = fp4::block_scale(channels::block_amax(best), scale).encode;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (!(fabsf(best[i]) * encode <= 6.f)) g[i] = 0.f;
#endif
        if (!has) continue;  // only now: the shuffles above need all lanes
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            long long at = item + corner.base + (tap & 1) * corner.right + (tap >> 1) * corner.below;
            float d[VECTOR];
            channels::widened<DTYPE>(skips[tap], d);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                if (from[i] == tap) d[i] += g[i];
            channels::store(dy + at, d);
        }
    }
}
