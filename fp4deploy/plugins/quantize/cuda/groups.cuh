// What a thread of a quantising kernel does with a group of 16 elements along K (MXFP4: 32, or two adjacent lanes): find
// the scale of its block, quantise, and write values, or codes and scales. Macros as in quantize.cu, which it is for.
#pragma once

#include "fp4.cuh"
#include "scalars.cuh"

#ifndef MEASURE
#define MEASURE 0
#endif

constexpr bool MX = FORMAT >= 2;
constexpr int GROUPS = MX && INNER ? 2 : 1;  // groups of 16 that a thread holds along K
constexpr int WIDTH = INNER ? INNER : 1;     // inner positions that a thread holds
constexpr int LENGTH = 16 * GROUPS;
using fp4::BlockScale;
#if BIG
using Index = long long;
#else
using Index = uint32_t;
#endif

struct alignas(sizeof(DTYPE) * WIDTH) Neighbours {
    DTYPE value[WIDTH];
};

__device__ __forceinline__ float finite_magnitude(float x) { return fabsf(x) < INFINITY ? fabsf(x) : 0.f; }

struct View {
    long long K, inner, groups;
    __device__ long long padded() const { return HADAMARD ? (K + 15) / 16 * 16 : K; }
};

__device__ __forceinline__ float largest_of(const float (&v)[LENGTH]) {
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) amax = fp4::nan_max(amax, fabsf(v[i]));
    // MXFP4 along rows: a block of 32 is in two adjacent lanes.
    if (MX && !INNER) amax = fp4::nan_max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    return amax;
}

// The keys of random bytes, which a block computes once while its loads are under way.
__device__ __forceinline__ const fp4::SharedPhilox& shared_philox(const uint64_t* random) {
    __shared__ fp4::SharedPhilox philox;
#if STOCHASTIC
    philox.set(random);
    __syncthreads();
#endif
    return philox;
}

__device__ __forceinline__ BlockScale scale_of(const float (&v)[LENGTH], const fp4::GlobalScale& global) {
    float amax = largest_of(v);
#if FORMAT == 0
    return fp4::block_scale(amax, global);
#elif FORMAT == 1
    fp4::Candidates candidates = fp4::four_over_six(amax, global);
    float six = fp4::row_error<SQUARED, FAST>(v, candidates.six, global);
    float four = fp4::row_error<SQUARED, FAST>(v, candidates.four, global);
    return four < six ? candidates.four : candidates.six;
#else
    return fp4::mx_scale(amax, FORMAT == 3);
#endif
}

__device__ __forceinline__ long long scale_index(long long row, long long k, long long count) {
#if PACKED == 2
    // The 128x4 layout of cuBLASLt and tcgen05: tiles of 128 rows x 4 scales, rows 32 apart adjacent.
    return row % 32 * 16 + row / 32 % 4 * 4 + k % 4 + k / 4 * 512 + row / 128 * 512 * ((count + 3) / 4);
#else
    return row * count + k;
#endif
}

__device__ __forceinline__ void transform(float (&v)[LENGTH]) {
#if HADAMARD
#pragma unroll
    for (int part = 0; part < GROUPS; ++part) fp4::hadamard(reinterpret_cast<float(&)[16]>(v[part * 16]));
#endif
}

// There is no global scale of MXFP4, nor where only an amax is found.
__device__ __forceinline__ fp4::GlobalScale global_scale(const float* amax, long long row, bool has) {
    return MX || PACKED == 3 ? fp4::GlobalScale{} : fp4::global_scale<E>(amax[ROWS && has ? row : 0]);
}

// One or two groups of a row, transformed. `v` is read, and becomes the fake-quantised values or is written as codes and
// scales. All threads of a warp call this (shuffles); `has` says whether a thread has elements.
__device__ __forceinline__ void quantize(
    float (&v)[LENGTH], const fp4::GlobalScale& global, const fp4::SharedPhilox& philox, uint8_t* codes, uint8_t* scales,
    uint16_t* in_range, const View& view, long long row, long long group, long long mask_index, bool has) {
#if PACKED == 3
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) largest = fmaxf(largest, fabsf(v[i]) < INFINITY ? fabsf(v[i]) : 0.f);
    fp4::raise_to(reinterpret_cast<int*>(codes), largest);
    return;
#endif
    const BlockScale block = scale_of(v, global);
    if (!has) return;  // only now: the shuffles above need all lanes
#pragma unroll
    for (int part = 0; part < GROUPS; ++part) {
#if STOCHASTIC
        fp4::Words words = philox.words(uint64_t(row) * view.groups + group + part);
#endif
        uint32_t bits = 0u;
        float scaled[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float u = scaled[i] = v[part * 16 + i] * block.encode;
#if IN_RANGE
            bits |= (fabsf(u) <= 6.f ? 1u : 0u) << i;
#endif
#if !PACKED
#if STOCHASTIC
            v[part * 16 + i] = block.step * fp4::round_e2m1(u, fp4::part_of(words, i));
#else
            v[part * 16 + i] = block.step * fp4::round_e2m1(u);
#endif
#endif
        }
#if PACKED
#if STOCHASTIC
        uint2 packed = {fp4::encode_eight(scaled, words.w), fp4::encode_eight(scaled + 8, words.w + 2)};
#else
        uint2 packed = {fp4::encode_eight(scaled), fp4::encode_eight(scaled + 8)};
#endif
        if (block.encode != block.encode) packed = {0u, 0u};  // a block with NaN or Inf: codes 0, scale NaN
        reinterpret_cast<uint2*>(codes)[row * view.groups + group + part] = packed;
#if FORMAT < 2
        scales[scale_index(row, group + part, view.groups)] = uint8_t(fp4::encode_e4m3(block.d8));
#else
        if ((group + part) % 2 == 0)
            scales[scale_index(row, (group + part) / 2, view.groups / 2)] =
                uint8_t(block.step != block.step ? 0xFFu : fp4::bits(block.step) >> 23);
#endif
#endif
#if IN_RANGE
        in_range[mask_index + part * view.inner] = uint16_t(bits);
#endif
    }
}
