// Shared by the kernels that pack rows: a thread has a group of 16 consecutive elements.
//
// They are bound by arithmetic (half the bytes of fake quantisation, the same work). So there is a fast path for
// ordinary groups without clamps, divisions and special cases, and `with_care` for all others (the scale saturates, NaN
// or Inf, a product underflows), element by element as in quantize.cu. Both give the bytes of the reference.
//
// Thread blocks are persistent and prefetch the next group, so that loads overlap with arithmetic.
#pragma once

#include "four_over_six.cuh"
#include "scalars.cuh"

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

// The larger magnitude of each half, NaN if either is NaN. The sign of the result has no meaning (xorsign).
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

// The hardware's approximate reciprocal, within one unit in the last place. One Newton step then rounds it like the
// division, except for a mantissa of all ones (every mantissa checked on sm_90).
__device__ __forceinline__ float approximate_reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// The scale of an ordinary block: no clamp but that of E4M3, and no division. Any other block fails `is_ordinary`.
__device__ __forceinline__ BlockScale light_scale(float d, const GlobalScale& global) {
    const float d8 = fp4::round_e4m3(fminf(d, 448.f));
    const float x = d8 * global.decode, guess = approximate_reciprocal(x);
    if ((__float_as_uint(x) & 0x7FFFFFu) == 0x7FFFFFu) return {0.f, 0.f, d8};
    return {fmaf(guess, fmaf(-x, guess, 1.f), guess), 0.f, d8};
}

// No overflow or underflow on the way to the codes.
__device__ __forceinline__ bool is_ordinary(const GlobalScale& global) { return global.amax > 1e-20f && global.amax < 1e20f; }
__device__ __forceinline__ bool is_ordinary(const BlockScale& block, float largest) {
    return block.encode >= SMALLEST_ENCODE && largest * block.encode < 7.f;
}

// The sixteen values of a group, two 16-byte loads.
struct Group {
    uint4 first, second;
};

__device__ __forceinline__ Group load(const uint4* x, long long group, long long groups) {
    if (group >= groups) return {};
    return {x[2 * group], x[2 * group + 1]};
}

struct Packed {
    uint2 codes;
    float d8;
};

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

// The magnitudes of eight codes added to `sum`, the first in the lowest nibble, for 0 <= u < 7. The code is piecewise
// linear in u: 4 steps up to 2, 2 more up to 4, 1 more up to 6. Saturation to [0, 1], a free instruction modifier, cuts
// u into these pieces. Adding each to 1.5 * 2^23 rounds to whole steps, ties to even. All of it runs on the FMA pipe,
// which the rest of the kernel leaves free.
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

// The codes of an ordinary group, eight a word.
__device__ __forceinline__ uint2 encode(const uint32_t (&w)[8], const float (&v)[16], float encode) {
    constexpr DTYPE* tag = nullptr;
    uint32_t signs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) signs[i] = without_negative_zero(w[i], tag);
    return make_uint2(codes_of(v, 0.5f * encode, signs_of(signs)), codes_of(v + 8, 0.5f * encode, signs_of(signs + 4)));
}

// Eight codes rounded stochastically, of four words of elements and two of random bytes; `scale` times COUNTED.
__device__ __forceinline__ uint32_t codes_of(const uint32_t* w, const float* v, float scale, const uint32_t* random) {
    constexpr DTYPE* tag = nullptr;
    uint32_t steps[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        steps[i] = fp4::stochastic_steps(fabsf(v[2 * i]) * scale, fabsf(v[2 * i + 1]) * scale, random[i / 2], i % 2 * 2) |
                   (without_negative_zero(w[i], tag) & 0x80008000u);
    return fp4::codes_of_steps(steps);
}

__device__ __forceinline__ uint2 encode(
    const uint32_t (&w)[8], const float (&v)[16], float encode, const fp4::Words& random) {
    const float scale = encode * fp4::COUNTED;
    return make_uint2(codes_of(w, v, scale, random.w), codes_of(w + 4, v + 8, scale, random.w + 2));
}

// Any group, element by element; `random` is null for rounding to nearest.
template <bool FourOverSix, bool Squared, bool Fast>
__device__ __forceinline__ Packed each_element(
    const Group& group, const GlobalScale& global, const fp4::Words* random = nullptr) {
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    const float largest = largest_of(w);
    BlockScale block;
    if constexpr (FourOverSix) {
        const fp4::Candidates both = fp4::four_over_six(largest, global);
        const float six = fp4::row_error<Squared, Fast>(v, both.six, global);
        const float four = fp4::row_error<Squared, Fast>(v, both.four, global);
        block = four < six ? both.four : both.six;
    } else {
        block = fp4::block_scale(largest, global);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= block.encode;
    uint2 packed = {0u, 0u};
    if (random) {
        packed = make_uint2(fp4::encode_eight(v, random->w), fp4::encode_eight(v + 8, random->w + 2));
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) (i < 8 ? packed.x : packed.y) += fp4::encode_nearest(v[i]) << (4 * (i % 8));
    }
    return {block.encode == block.encode ? packed : make_uint2(0u, 0u), block.d8};
}

// Read again and not inlined, so that the fast path does not keep registers for it.
template <bool FourOverSix, bool Squared, bool Fast>
__device__ __noinline__ Packed with_care(const uint4* first, const uint4* second, const GlobalScale* shared) {
    return each_element<FourOverSix, Squared, Fast>({*first, *second}, *shared);
}

struct ToNearest {
    __device__ __forceinline__ uint2 operator()(const uint32_t (&w)[8], const float (&v)[16], float scale) const {
        return encode(w, v, scale);
    }
};

// A group of NVFP4; `slow` gives what is not ordinary, `codes` those of an ordinary group.
template <typename Slow, typename Codes = ToNearest>
__device__ __forceinline__ Packed pack(const Group& group, const GlobalScale& global, Slow slow, Codes codes = {}) {
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const BlockScale block = light_scale(largest * global.sixth, global);
    // All zeros are common (padding, ReLU) and need no codes. Everything unusual takes the slow path.
    if (largest == 0.f && is_ordinary(global)) return {make_uint2(0u, 0u), 0.f};
    if (!is_ordinary(global) || !is_ordinary(block, largest)) return slow();
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    return {codes(w, v, block.encode), block.d8};
}
