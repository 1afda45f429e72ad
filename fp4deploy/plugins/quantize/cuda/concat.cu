// Concatenation of two channels_last feature maps along the channels, fused with fake quantisation; and its backward.
//
// A concatenation copies its inputs anyway; here the copy also quantises. No block of 16 spans both inputs, because
// both have a multiple of 16 channels. The backward splits the gradient, zero where an element was clipped: the
// in-range mask has a bit an element, a byte for eight channels. `tracked` is the running amax of a static scale; if
// given, it is updated with the largest finite |b| and *other, the amax of a, and *amax is the value before the update.
// cell and counter are scratch, zero before and after.
//
// With NORMALIZED a is what a GroupNorm reads, and relu(scale a + shift) is copied, as `apply` of group_norm.cu writes it;
// ab: float32 [N, 2, CA]. A backward that computes the concatenation again so needs no copy of the first part.
//
// With BIASED b is the output of a convolution whose bias is still to be added, rounded to DTYPE; bias: float32 [CB]. Its
// gradient is the sum of db over the pixels: `separate` writes one partial sum a block, float32 [chunks, CB], in a fixed
// order, and has 4 rows CB bytes of shared memory (rows: pixels that a block handles at once).
//
// Launch: block 256, grid (chunks, 1) with the pixels of all items, (chunks, N) with those of one and NORMALIZED. a: DTYPE
// [pixels, CA]; b: DTYPE [pixels, CB]; out: DTYPE [pixels, CA + CB]; in_range: uint8 [pixels, (CA + CB) / 8].
#include "channels.cuh"

#ifndef NORMALIZED
#define NORMALIZED 0
#endif
#ifndef BIASED
#define BIASED 0
#endif

using channels::VECTOR;
using channels::Walk;

extern "C" __global__ void __launch_bounds__(256) concat(
    const DTYPE* a, const DTYPE* b, const float* ab, const float* bias, const float* amax, DTYPE* out,
    unsigned char* in_range, const float* other, float* tracked, int* cell, unsigned* counter, float decay,
    long long pixels, int CA, int CB, long long per_chunk) {
    int C = CA + CB;
    Walk walk(pixels, C, per_chunk);
    const long long before = blockIdx.y * pixels;  // of other items
    // A thread has the same channels in all its pixels, so it reads one input only.
    bool first = walk.channel < CA;
    const DTYPE* source = first ? a + walk.channel : b + walk.channel - CA;
    int width = first ? CA : CB;
#if NORMALIZED
    channels::Normalized normalized;
    if (first && walk.active) normalized.load(ab, CA, walk.channel);
#endif
#if BIASED
    channels::Biased<DTYPE> biased;
    if (!first && walk.active) biased.set(bias + walk.channel - CA);
#endif
#if QUANTIZE
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
    const bool measures = tracked && !first;
    float largest = 0.f;
#endif
#pragma unroll 4
    for (int trip = 0; trip < walk.trips; ++trip) {
        bool has = walk.has(trip);
        const long long pixel = before + walk.pixel(trip);
        float v[VECTOR] = {};
#if BIASED
        if (has) biased.load(source + pixel * width, v);
#else
        if (has) channels::load(source + pixel * width, v);
#endif
#if NORMALIZED
        if (first) normalized.apply<DTYPE>(v);
#endif
#if QUANTIZE
        if (measures) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) largest = fmaxf(largest, fabsf(v[i]) < INFINITY ? fabsf(v[i]) : 0.f);
        }
        // Threads without a pixel have zeros; they take part because `block_amax` shuffles.
        fp4::BlockScale block = fp4::block_scale(channels::block_amax(v), scale);
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            bits |= (fabsf(v[i]) * block.encode <= 6.f ? 1u : 0u) << i;
            v[i] = fp4::fake_quantize(v[i], block);
        }
        if (has && in_range) in_range[(pixel * C + walk.channel) / VECTOR] = (unsigned char)bits;
#endif
        if (has) channels::store(out + pixel * C + walk.channel, v);
    }
#if QUANTIZE
    if (!tracked) return;
    // The last block to count itself sees the maxima of all blocks; the fence orders them before the count. atomicInc
    // wraps to 0, so the counter is ready for the next launch.
    fp4::raise_to(cell, largest);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1)
            fp4::track_amax(cell, other, tracked, nullptr, decay, true);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(256) separate(
    const DTYPE* gradient, const unsigned char* in_range, DTYPE* da, DTYPE* db, float* partial, long long pixels, int CA,
    int CB, long long per_chunk) {
    int C = CA + CB;
    Walk walk(pixels, C, per_chunk);
    bool first = walk.channel < CA;
    DTYPE* target = first ? da + walk.channel : db + walk.channel - CA;
    int width = first ? CA : CB;
#if BIASED
    float sum[VECTOR] = {};
#endif
#pragma unroll 4
    for (int trip = 0; trip < walk.trips; ++trip) {
        if (!walk.has(trip)) continue;
        float g[VECTOR];
        channels::load(gradient + walk.pixel(trip) * C + walk.channel, g);
        if (in_range) {
            unsigned bits = in_range[(walk.pixel(trip) * C + walk.channel) / VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                if (!(bits >> i & 1)) g[i] = 0.f;
        }
        channels::store(target + walk.pixel(trip) * width, g);
#if BIASED
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += g[i];
#endif
    }
#if BIASED
    extern __shared__ float shared[];
    if (!first && walk.active) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) shared[walk.row * CB + walk.channel - CA + i] = sum[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < CB; c += blockDim.x) {
        float total = shared[c];
        for (int row = 1; row < walk.rows; ++row) total += shared[row * CB + c];
        partial[(long long)blockIdx.x * CB + c] = total;
    }
#endif
}
