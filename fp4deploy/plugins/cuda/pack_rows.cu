// Packed NVFP4 of rows in memory order at the speed of memory: plain, or 4/6 with either error.
//
// Arithmetic is what limits this kernel (half the bytes of fake quantisation, the same work), so it does less of it than
// quantize.cu: signs come from the raw words, codes from the bits of the rounded sum, and nothing is clamped. Where that
// would not be exact (a block that saturates, vanishes or is broken, a product that underflows) the block is done
// again, element by element, as in quantize.cu. The bytes are the same.
//
// Macros: DTYPE __half or __nv_bfloat16; FORMAT 0 or 1; E; SQUARED, FAST of 4/6.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256, grid ceil(groups / 256).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp4.cuh"

#ifndef DTYPE
#define DTYPE __nv_bfloat16
#endif
#ifndef E
#define E 448
#endif
#ifndef OCCUPANCY
#define OCCUPANCY 4
#endif

using fp4::BlockScale;
using fp4::GlobalScale;

constexpr float SMALLEST_ENCODE = 1.52587890625e-5f;  // 2^-16: no product of a 16-bit float underflows

__device__ __forceinline__ void widen(uint32_t word, float& low, float& high, __half*) {
    float2 pair = __half22float2(*reinterpret_cast<__half2*>(&word));
    low = pair.x, high = pair.y;
}
__device__ __forceinline__ void widen(uint32_t word, float& low, float& high, __nv_bfloat16*) {
    low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xFFFF0000u);
}

// The larger magnitude of each half, NaN if either is, with a sign that means nothing.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __half*) {
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#else
    __half2 m = __hmax2_nan(__habs2(*reinterpret_cast<__half2*>(&a)), __habs2(*reinterpret_cast<__half2*>(&b)));
    return *reinterpret_cast<uint32_t*>(&m);
#endif
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16*) {
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#else
    using Pair = __nv_bfloat162;
    Pair m = __hmax2_nan(__habs2(*reinterpret_cast<Pair*>(&a)), __habs2(*reinterpret_cast<Pair*>(&b)));
    return *reinterpret_cast<uint32_t*>(&m);
#endif
}

__device__ __forceinline__ float largest_of(const uint32_t (&w)[8]) {
    constexpr DTYPE* tag = nullptr;
    uint32_t m = larger(w[0], w[1], tag);
#pragma unroll
    for (int i = 2; i < 8; ++i) m = larger(m, w[i], tag);
    float low, high;
    widen(m, low, high, tag);
    return fp4::nan_max(fabsf(low), fabsf(high));
}

// -0 becomes 0, everything else stays.
__device__ __forceinline__ uint32_t without_negative_zero(uint32_t word, __half*) {
    __half2 sum = __hadd2_rn(*reinterpret_cast<__half2*>(&word), __half2half2(__ushort_as_half(0)));
    return *reinterpret_cast<uint32_t*>(&sum);
}
__device__ __forceinline__ uint32_t without_negative_zero(uint32_t word, __nv_bfloat16*) {
    __nv_bfloat162 sum = __hadd2_rn(*reinterpret_cast<__nv_bfloat162*>(&word), __bfloat162bfloat162(__ushort_as_bfloat16(0)));
    return *reinterpret_cast<uint32_t*>(&sum);
}

// The signs of eight elements as bit 3 of eight nibbles.
__device__ __forceinline__ uint32_t signs_of(const uint32_t* w) {
    uint32_t even = __byte_perm(__byte_perm(w[0], w[1], 0x0051), __byte_perm(w[2], w[3], 0x0051), 0x5410);
    uint32_t odd = __byte_perm(__byte_perm(w[0], w[1], 0x0073), __byte_perm(w[2], w[3], 0x0073), 0x5410);
    return (odd & 0x80808080u) | ((even & 0x80808080u) >> 4);
}

// The magnitudes of eight codes added to `sum`, the first in the lowest nibble, for 0 <= u < 7. A code is piecewise linear in
// u: 4 steps up to 2, 2 more up to 4, 1 more up to 6. Saturation to [0, 1], which costs nothing, cuts u into these pieces,
// and adding each to 1.5 * 2^23 rounds it to whole steps, ties to even; all of it on the pipe of multiply-adds, which the
// rest of the kernel leaves free.
__device__ __forceinline__ uint32_t codes_of(const float* x, float half_encode, uint32_t sum) {
    constexpr float magic = 12582912.f;  // 0x4B400000
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float half = fabsf(x[i]) * half_encode;
        float steps = fmaf(__saturatef(half), 4.f, magic);
        steps = fmaf(__saturatef(half - 1.f), 2.f, steps);
        steps = steps + __saturatef(half - 2.f);
        sum += __float_as_uint(steps) << (4 * i);
    }
    return sum - 0x4B400000u * 0x11111111u;
}

// The magnitudes of eight codes from rounded sums. A sum has the number of steps in its low half and 0x4AC0 plus 128 times
// the binade in its high half, so that two sums are worked on in one register: halves i and i + 4.
__device__ __forceinline__ uint32_t codes_of_rounded(const float* rounded) {
    uint32_t sum = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t a = __float_as_uint(rounded[i]), b = __float_as_uint(rounded[i + 4]);
        const uint32_t pair = __byte_perm(a, b, 0x5410) + (__byte_perm(a, b, 0x7632) >> 6);
        sum += pair << (4 * i);
    }
    constexpr uint32_t bias = 0x4AC04AC0u >> 6;
    return sum - bias * 0x1111u;
}

// The hardware's reciprocal, within one unit of the last place; one Newton step rounds it like the division, whatever the
// guess, but for a mantissa of all ones (every mantissa checked on sm_90).
__device__ __forceinline__ float approximate_reciprocal(float x) {
    float out;
    asm("rcp.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Rounded sums of a candidate and, with 4/6, its error.
struct Candidate {
    float rounded[16];
    float error;
};

__device__ __forceinline__ Candidate evaluate(const float (&x)[16], const BlockScale& block, const GlobalScale& global) {
    Candidate result;
    result.error = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float u = fabsf(x[i]) * block.encode, rounder = fp4::rounder_of(u);
        result.rounded[i] = fmaf(rounder, 4194304.f, u);
#if FORMAT == 1
        float q = fmaf(rounder, -4194304.f, result.rounded[i]);
#if FAST
        float difference = fmaf(q, block.d8, -(fabsf(x[i]) * global.scale));
#else
        float difference = fp4::divide_by_range((q * block.d8) * global.amax, global) - fabsf(x[i]);
#endif
        float term = SQUARED ? difference * difference : fabsf(difference);
        result.error = i ? result.error + term : term;
#endif
    }
    return result;
}

__device__ __forceinline__ bool is_ordinary(const BlockScale& block, float largest) {
    return block.encode >= SMALLEST_ENCODE && largest * block.encode < 7.f;
}

// The group read again and done element by element.
struct Packed {
    uint2 codes;
    float d8;
};

__device__ __noinline__ Packed with_care(const uint4* source, const GlobalScale* shared) {
    const GlobalScale global = *shared;
    const DTYPE* values = reinterpret_cast<const DTYPE*>(source);
    float v[16], largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        v[i] = float(values[i]);
        largest = fp4::nan_max(largest, fabsf(v[i]));
    }
#if FORMAT == 1
    const fp4::Candidates both = fp4::four_over_six(largest, global);
    float six = fp4::row_error<SQUARED, FAST>(v, both.six, global), four = fp4::row_error<SQUARED, FAST>(v, both.four, global);
    const BlockScale block = four < six ? both.four : both.six;
#else
    const BlockScale block = fp4::block_scale(largest, global);
#endif
    uint32_t packed[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i / 8] += fp4::encode_nearest(v[i] * block.encode) << (4 * (i % 8));
    return {block.encode == block.encode ? make_uint2(packed[0], packed[1]) : make_uint2(0u, 0u), block.d8};
}

// Scale of an ordinary block: no clamp but E4M3's, one division; anything else fails `is_ordinary` and is done with care.
__device__ __forceinline__ BlockScale light_scale(float d, const GlobalScale& global) {
    const float d8 = fp4::round_e4m3(fminf(d, 448.f));
    const float x = d8 * global.decode, guess = approximate_reciprocal(x);
    if ((__float_as_uint(x) & 0x7FFFFFu) == 0x7FFFFFu) return {0.f, 0.f, d8};
    return {fmaf(guess, fmaf(-x, guess, 1.f), guess), 0.f, d8};
}

// The sixteen values of a group in two 16-byte words.
struct Group {
    uint4 first, second;
};

__device__ __forceinline__ Group load(const uint4* x, long long group, long long groups) {
    if (group >= groups) return {};
    return {x[2 * group], x[2 * group + 1]};
}

__device__ __forceinline__ Packed pack(const Group& words, const GlobalScale& global, const uint4* source, const GlobalScale* shared) {
    const uint32_t w[8] = {words.first.x,  words.first.y,  words.first.z,  words.first.w,
                           words.second.x, words.second.y, words.second.z, words.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    // So that no intermediate of an ordinary block overflows or underflows.
    bool ordinary = global.amax > 1e-20f && global.amax < 1e20f;
#if FORMAT == 1
    const float guess = largest * (1.f / 6.f);
    const float b = fmaf(fmaf(-6.f, guess, largest), 1.f / 6.f, guess) * global.scale;
    const BlockScale scale_six = light_scale(b, global), scale_four = light_scale(b * 1.5f, global);
    ordinary = ordinary && is_ordinary(scale_six, largest) && is_ordinary(scale_four, largest);
#else
    const BlockScale block = light_scale(largest * global.sixth, global);
    ordinary = ordinary && is_ordinary(block, largest);
#endif
    if (!ordinary) return with_care(source, shared);
    float v[16];
    uint32_t signs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        widen(w[i], v[2 * i], v[2 * i + 1], tag);
        signs[i] = without_negative_zero(w[i], tag);
    }
    uint2 codes;
#if FORMAT == 1
    const Candidate six = evaluate(v, scale_six, global), four = evaluate(v, scale_four, global);
    const bool use_four = four.error < six.error;
    const float d8 = use_four ? scale_four.d8 : scale_six.d8;
    float rounded[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) rounded[i] = use_four ? four.rounded[i] : six.rounded[i];
    codes = make_uint2(codes_of_rounded(rounded) | signs_of(signs), codes_of_rounded(rounded + 8) | signs_of(signs + 4));
#else
    const float half_encode = 0.5f * block.encode, d8 = block.d8;
    codes = make_uint2(codes_of(v, half_encode, signs_of(signs)), codes_of(v + 8, half_encode, signs_of(signs + 4)));
#endif
    return {codes, d8};
}

extern "C" __global__ void __launch_bounds__(256, OCCUPANCY) pack_rows(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups) {
    const long long stride = (long long)gridDim.x * 256;
    long long group = (long long)blockIdx.x * 256 + threadIdx.x;
    Group words = load(x, group, groups);
    __shared__ GlobalScale shared;
    if (threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    __syncthreads();
    const GlobalScale global = shared;
    while (group < groups) {
        const Group next = load(x, group + stride, groups);
        const Packed packed = pack(words, global, x + 2 * group, &shared);
        codes[group] = packed.codes;
        scales[group] = uint8_t(fp4::encode_e4m3(packed.d8));
        words = next;
        group += stride;
    }
}
