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

using channels::Stream;
using channels::VECTOR;
using channels::Walk;

// A norm's coefficients take registers; with fewer pixels at once more warps have room.
constexpr int BATCH = NORMALIZED ? 2 : channels::BATCH;

extern "C" __global__ void __launch_bounds__(256) concat(
    const DTYPE* a, const DTYPE* b, const float* ab, const float* bias, const float* amax, DTYPE* out,
    unsigned char* in_range, const float* other, float* tracked, int* cell, unsigned* counter, float decay,
    long long pixels, int CA, int CB, long long per_chunk) {
    const int C = CA + CB;
    const Walk walk(pixels, CA, CB, per_chunk);
    const long long before = blockIdx.y * pixels;  // of other items
    // A thread has the same channels in all its pixels, so it reads one input only.
    const bool first = walk.channel < CA;
    const int width = first ? CA : CB;
    Stream<const DTYPE> in((first ? a : b) + before * width, walk, width, first ? walk.channel : walk.channel - CA);
    Stream<DTYPE> to(out + before * C, walk, C, walk.channel);
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
    Stream<unsigned char> mask(in_range + before * (C / VECTOR), walk, C / VECTOR, walk.channel / VECTOR);
#endif
    for (int trip = 0; trip < walk.trips; trip += BATCH) {
        uint4 raw[BATCH];
        in.fetch(raw, walk, trip);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (trip + k >= walk.trips) break;
            const bool has = walk.has(trip + k);
            float v[VECTOR];
#if BIASED
            biased.widen(raw[k], v);
#else
            channels::widened<DTYPE>(raw[k], v);
#endif
#if NORMALIZED
            if (first) normalized.apply<DTYPE>(v);
#endif
#if QUANTIZE
            if (measures && has) {
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) largest = fmaxf(largest, fabsf(v[i]) < INFINITY ? fabsf(v[i]) : 0.f);
            }
            // Threads without a pixel take part because `block_amax` shuffles.
            const fp4::BlockScale block = fp4::block_scale(channels::block_amax(v), scale);
            float u[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                u[i] = v[i] * block.encode;
                v[i] = block.step * fp4::round_e2m1(u[i]);
            }
            if (has && in_range) {
                unsigned bits = 0;
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) bits |= (fabsf(u[i]) <= 6.f ? 1u : 0u) << i;
                *mask.ahead(k) = (unsigned char)bits;
            }
#endif
            if (has) channels::store(to.ahead(k), v);
        }
        in.advance(BATCH);
        to.advance(BATCH);
#if QUANTIZE
        mask.advance(BATCH);
#endif
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
    const int C = CA + CB;
    const Walk walk(pixels, CA, CB, per_chunk);
    const bool first = walk.channel < CA;
    const int width = first ? CA : CB;
    Stream<const DTYPE> in(gradient, walk, C, walk.channel);
    Stream<DTYPE> to(first ? da : db, walk, width, first ? walk.channel : walk.channel - CA);
    Stream<const unsigned char> mask(in_range, walk, C / VECTOR, walk.channel / VECTOR);
#if BIASED
    float sum[VECTOR] = {};
#endif
    for (int trip = 0; trip < walk.trips; trip += BATCH) {
        uint4 raw[BATCH];
        unsigned bits[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            raw[k] = channels::load_if(in.ahead(k), walk.has(trip + k));
            bits[k] = in_range && walk.has(trip + k) ? *mask.ahead(k) : 0xFFu;
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (!walk.has(trip + k)) break;
            float g[VECTOR];
            channels::widened<DTYPE>(raw[k], g);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                if (!(bits[k] >> i & 1)) g[i] = 0.f;
            channels::store(to.ahead(k), g);
#if BIASED
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[i] += g[i];
#endif
        }
        in.advance(BATCH);
        to.advance(BATCH);
        mask.advance(BATCH);
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
