// The gradient of a learned amax A, of feature maps that the kernels of group_norm.cu, pool.cu and concat.cu quantised.
//
//   dL/dA = sum over the elements of saturated blocks of g s,   A s = q where |v| > A,   q - v elsewhere
//
// v is the value before quantisation, computed again from what those kernels read, q the value after it, g the upstream
// gradient. A block is saturated if its amax exceeds A. The caller divides by A and by the root of the number of
// elements. If `largest`, an upper bound of all v, does not exceed A, the kernels return without reading a feature map.
//
// Launch: block 256, grid (chunks, N) of pixels, for `joined` (chunks, 1). partial: float [gridDim.y, gridDim.x], one
// sum a block. x, y, a, b, gradients: DTYPE, channels_last; C a multiple of 16.
#include "channels.cuh"

#ifndef BIASED
#define BIASED 0
#endif

using channels::VECTOR;
using channels::Walk;

// The sum of A g s over the eight channels; all lanes of a warp call this.
__device__ __forceinline__ float sum_of(
    const float (&v)[VECTOR], const float (&g)[VECTOR], const fp4::GlobalScale& scale) {
    float amax = channels::block_amax(v), total = 0.f;
    if (!(amax > scale.amax)) return 0.f;
    fp4::BlockScale block = fp4::block_scale(amax, scale);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        float q = float(DTYPE(fp4::fake_quantize(v[i], block)));
        total = __fmaf_rn(g[i], fabsf(v[i]) > scale.amax ? q : q - v[i], total);
    }
    return total;
}

// The sum over the threads of a block, in a fixed order, to its place in `partial`.
__device__ __forceinline__ void write_sum(float value, float* partial) {
    __shared__ float warps[8];
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x) return;
    float total = 0.f;
    for (int warp = 0; warp < 8; ++warp) total += warps[warp];
    partial[blockIdx.y * gridDim.x + blockIdx.x] = total;
}

__device__ __forceinline__ bool nothing_saturates(const float* largest, const float* amax) {
    return largest && *largest <= *amax;
}

// v = relu(a x + b), of `apply` in group_norm.cu.
extern "C" __global__ void __launch_bounds__(256) normalized(
    const DTYPE* x, const DTYPE* dy, const float* ab, const float* amax, const float* largest, float* partial,
    long long pixels, int C, long long per_chunk) {
    if (nothing_saturates(largest, amax)) return write_sum(0.f, partial);
    Walk walk(pixels, C, per_chunk);
    long long item = (long long)blockIdx.y * pixels * C + walk.channel;
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
    float a[VECTOR] = {}, b[VECTOR] = {}, total = 0.f;
    if (walk.active) {
        channels::load(ab + blockIdx.y * 2LL * C + walk.channel, a);
        channels::load(ab + (blockIdx.y * 2LL + 1) * C + walk.channel, b);
    }
#pragma unroll 2
    for (int trip = 0; trip < walk.trips; ++trip) {
        float v[VECTOR] = {}, g[VECTOR] = {};
        if (walk.has(trip)) {
            channels::load(x + item + walk.pixel(trip) * C, v);
            channels::load(dy + item + walk.pixel(trip) * C, g);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) v[i] = fp4::nan_max(__fmaf_rn(a[i], v[i], b[i]), 0.f);
        total += sum_of(v, g, scale);  // g is 0 where there is no pixel
    }
    write_sum(total, partial);
}

// v is the maximum of 2 x 2 pixels of y, of `pool` in pool.cu. W: width of the result; pixels: its pixels.
extern "C" __global__ void __launch_bounds__(256) pooled(
    const DTYPE* y, const DTYPE* gradient, const float* amax, const float* largest, float* partial, int W,
    long long pixels, int C, long long per_chunk) {
    if (nothing_saturates(largest, amax)) return write_sum(0.f, partial);
    Walk walk(pixels, C, per_chunk);
    const DTYPE* item = y + blockIdx.y * pixels * 4 * C + walk.channel;
    const DTYPE* in = gradient + blockIdx.y * pixels * C + walk.channel;
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
    float total = 0.f;
    for (int trip = 0; trip < walk.trips; ++trip) {
        float v[VECTOR] = {}, g[VECTOR] = {};
        if (walk.has(trip)) {
            long long pixel = walk.pixel(trip), row = pixel / W, column = pixel % W;
            const DTYPE* corner = item + ((row * 2) * (2LL * W) + column * 2) * C;
            channels::load(in + pixel * C, g);
            channels::load(corner, v);
#pragma unroll
            for (int tap = 1; tap < 4; ++tap) {
                float other[VECTOR];
                channels::load(corner + ((tap & 1) + (tap >> 1) * 2LL * W) * C, other);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) v[i] = fp4::nan_max(v[i], other[i]);
            }
        }
        total += sum_of(v, g, scale);
    }
    write_sum(total, partial);
}

// v is [a, b], of `concat` in concat.cu, with BIASED [a, b + bias]; `largest` may be null.
extern "C" __global__ void __launch_bounds__(256) joined(
    const DTYPE* a, const DTYPE* b, const DTYPE* gradient, const float* bias, const float* amax, const float* largest,
    float* partial, long long pixels, int CA, int CB, long long per_chunk) {
    if (nothing_saturates(largest, amax)) return write_sum(0.f, partial);
    int C = CA + CB;
    Walk walk(pixels, C, per_chunk);
    bool first = walk.channel < CA;
    const DTYPE* source = first ? a + walk.channel : b + walk.channel - CA;
    int width = first ? CA : CB;
#if BIASED
    channels::Biased<DTYPE> biased;
    if (!first && walk.active) biased.set(bias + walk.channel - CA);
#endif
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
    float total = 0.f;
#pragma unroll 2
    for (int trip = 0; trip < walk.trips; ++trip) {
        float v[VECTOR] = {}, g[VECTOR] = {};
        if (walk.has(trip)) {
#if BIASED
            biased.widen(*reinterpret_cast<const uint4*>(source + walk.pixel(trip) * width), v);
#else
            channels::load(source + walk.pixel(trip) * width, v);
#endif
            channels::load(gradient + walk.pixel(trip) * C + walk.channel, g);
        }
        total += sum_of(v, g, scale);
    }
    write_sum(total, partial);
}
