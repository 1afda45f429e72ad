// 4/6 for one group of 16-bit floats: both candidate scales (amax to 6, amax to 4) at little more than the cost of one.
//
// The contract (`formats/four_over_six.py`) rounds many times on the way to an error, but the errors of the candidates
// are almost always far enough apart that these roundings do not matter. `choose` computes them in few operations and
// reports where it is not sure; the caller then repeats the contract's own sum.
//
// Codes. A scaled element u times 2^-14 is a float16 whose bits count E2M1 steps, 512 units a step, also for subnormal
// codes. The code is in the bits from bit 9 up, after half a step is added. Truncating the float32 product to float16
// towards zero never moves it across the midpoint of two values. So two elements share a register and the code is
// exact, except for ties that should round down (.25, 1.25, 2.5, 5): they are rounded up. There are 126 scales, and an
// element has 8 or 11 significant bits, so for each scale it is known in advance whether an element can be a tie.
// `counting_of` moves the reciprocal of the scale by a unit in the last place where this avoids ties; where it does
// not, ties are corrected.
//
// Errors. q is exact and the product is in float32. Then sum |q - x e| d8 and sum (q - x e)^2 d8^2 differ from the
// contract's sum, in either domain, by at most 5e-6 d8 an element: 2^-24 each for the reciprocal, for its input and for
// the contract's own roundings, times an element of at most 6.9.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

#include "fp4.cuh"

namespace fp4 {

constexpr float COUNTED = 6.103515625e-05f;  // 2^-14
constexpr float LARGEST_COUNTED = 6.9f * COUNTED;
constexpr int SCALES = 128;  // E4M3 bytes without a sign

// For a scale byte: the factor of an element, times 2^-14 (NaN: not for `choose`), and the value of the scale.
struct Counting {
    float encode, d8;
};

// float16 bits of two floats, truncated towards zero, the first in the low half.
FP4_FUNCTION uint32_t truncated_halves(float low, float high) {
#ifdef __CUDA_ARCH__
    uint32_t out;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
#else
    uint32_t out = 0u;
    for (int i = 0; i < 2; ++i) {
        const float x = i ? high : low, size = std::fabs(x);
        uint32_t half = (bits(size) >> 13) - (112u << 10);
        if (size < COUNTED) half = uint32_t(size * 16777216.f);
        if (size >= 65504.f) half = size <= FLOAT_MAX ? 0x7BFFu : 0x7C00u;
        if (x != x) half = 0x7FFFu;
        out |= (half | (bits(x) >> 16 & 0x8000u)) << (16 * i);
    }
    return out;
#endif
}

// One of the two float16 in a word, as float32.
FP4_FUNCTION float widened_half(uint32_t word, int which) {
#ifdef __CUDA_ARCH__
    float out;
    if (which) asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, high;\n\t}" : "=f"(out) : "r"(word));
    else asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, low;\n\t}" : "=f"(out) : "r"(word));
    return out;
#else
    const uint32_t half = word >> (16 * which) & 0xFFFFu, size = half & 0x7FFFu;
    const float value = size < 1024u ? float(size) * 5.9604644775390625e-08f : from_bits((size << 13) + (112u << 23));
    return half >> 15 ? -value : value;
#endif
}

FP4_FUNCTION uint32_t picked_bytes(uint32_t a, uint32_t b, uint32_t which) {
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, which);
#else
    uint32_t out = 0u;
    const uint64_t both = uint64_t(b) << 32 | a;
    for (int i = 0; i < 4; ++i) out |= uint32_t(both >> (8 * (which >> (4 * i) & 7u)) & 0xFFu) << (8 * i);
    return out;
#endif
}

#ifdef __CUDA_ARCH__
// All ones in the halves in which two words of bfloat16 have the same magnitude.
__device__ __forceinline__ uint32_t equal_halves(uint32_t a, uint32_t b) {
    const __nv_bfloat162 size = __habs2(*reinterpret_cast<__nv_bfloat162*>(&a));
    return __heq2_mask(size, *reinterpret_cast<__nv_bfloat162*>(&b));
}
#endif

// Bits of a where the mask is 1, of b where it is 0, in one instruction.
FP4_FUNCTION uint32_t merged(uint32_t a, uint32_t b, uint32_t mask) {
#ifdef __CUDA_ARCH__
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
    return out;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// E4M3 bytes of b and 1.5 b, rounded to nearest even, at most 448: the first in the low byte.
FP4_FUNCTION uint32_t candidate_bytes(float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b * 1.5f), "f"(b));
    return pair;
#else
    return encode_e4m3(round_e4m3(minimum(b, 448.f))) | encode_e4m3(round_e4m3(minimum(b * 1.5f, 448.f))) << 8;
#endif
}

// The steps of two elements rounded stochastically, their remainders cut off, from the magnitudes times 2^-14 and two bytes
// of a word. 1, 2 and 4 times 2^-14 differ in the two lowest bits of their exponents, so that one instruction makes them to
// 2^118, 2^119 and 2^120; a byte in the bits from bit 8 up is a subnormal number, and their product is byte / 512 binades
// times 2^-14.
FP4_FUNCTION float dithered(float magnitude, uint32_t word, int byte) {
    const float unit = from_bits(merged(bits(fmaxf(magnitude, COUNTED)), 0x7A000000u, 0x01800000u));
    return fmaf(from_bits(picked_bytes(word, 0u, 0x4404u + (byte << 4))), unit, magnitude);
}

FP4_FUNCTION uint32_t stochastic_steps(float low, float high, uint32_t word, int byte) {
    const uint32_t steps = truncated_halves(dithered(low, word, byte), dithered(high, word, byte + 1));
#ifdef __CUDA_ARCH__
    return __vminu2(steps, 0x0FFF0FFFu);  // what reaches 8 is 6
#else
    const uint32_t first = steps & 0xFFFFu, second = steps >> 16;
    return (first < 0xFFFu ? first : 0xFFFu) | (second < 0xFFFu ? second : 0xFFFu) << 16;
#endif
}

// True if x * other with ties rounded up has the same codes as x * encode with ties to even, for all x whose float32
// bits are multiples of `unit`; `step` is about 1 / encode. Midpoints of other binades are these times a power of two.
FP4_FUNCTION bool same_codes(float encode, float other, float step, uint32_t unit) {
    bool same = true;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) {
        const float middle = 0.25f + 0.5f * float(i / 2);
        const float x = from_bits((bits(middle * step) & (0u - unit)) + (i & 1 ? unit : 0u)), u = x * encode;
        const bool up = u > middle || (u == middle && (i & 2));  // .75 and 1.75 go up to an even code
        same = same && up == (x * other >= middle);
    }
    return same;
}

// Ties of bfloat16 elements that must round down but were rounded up. `odd`: all ties can be corrected, as odd codes
// whose remainder is zero. `quarter`: only the tie at 0.25 can, the elements with this magnitude; at the other
// midpoints an element may lie above by less than float16 resolves, with the same bits as a tie. `care`: the whole
// group has to be quantised element by element.
struct Ties {
    uint32_t odd, quarter;
    bool care;
};
constexpr uint32_t ALL_ODD = 0x02000200u, NO_ELEMENT = 0x7FFF7FFFu;  // a NaN: equal to no element

// Whether a scaled element can be exactly `middle`, and whether one can be above it by less than float16 resolves.
struct Midpoint {
    bool on, above;
    uint32_t element;  // float32 bits of the element that is exactly `middle`
};

FP4_FUNCTION Midpoint midpoint(float middle, float encode, float step, uint32_t unit) {
    Midpoint found = {false, false, 0u};
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t element = (bits(middle * step) & (0u - unit)) + i * unit;
        const float u = from_bits(element) * encode;
        if (u == middle) found.on = true, found.element = element;
        found.above = found.above || (u > middle && u < middle + 0.0009765625f);
    }
    return found;
}

FP4_FUNCTION Ties ties_of(float encode, float step, uint32_t unit) {
    const Midpoint quarter = midpoint(0.25f, encode, step, unit), other = midpoint(1.25f, encode, step, unit);
    if (unit != 0x10000u || (other.on && quarter.above)) return {0u, NO_ELEMENT, true};
    if (other.on) return {ALL_ODD, NO_ELEMENT, false};
    return {0u, quarter.on ? picked_bytes(quarter.element, 0u, 0x3232) : NO_ELEMENT, !quarter.on || quarter.above};
}

// The factor for the elements of a block with this scale byte, and how to correct ties. `unit`: see `same_codes`.
FP4_FUNCTION Counting counting_of(uint32_t byte, const GlobalScale& global, bool ordinary, uint32_t unit, Ties& ties) {
    const float d8 = decode_e4m3(byte), step = d8 * global.decode, encode = 1.f / step;
    ties = {0u, NO_ELEMENT, false};
    if (byte == 0u && ordinary) return {FLOAT_MAX, 0.f};  // zeros get code 0, anything else fails `sure`
    if (!ordinary || !(encode >= 1.52587890625e-5f)) return {quiet_nan(), d8};  // 2^-16: no product underflows
    for (uint32_t i = 0; i < 4; ++i) {
        const float other = from_bits(bits(encode) + (i & 1u) - (i >> 1) * 2u);  // 0, 1, -2, -1 units
        if (same_codes(encode, other, step, unit)) return {other * COUNTED, d8};
    }
    ties = ties_of(encode, step, unit);
    return {encode * COUNTED, d8};
}

// Ties: odd codes with a zero remainder are made even; `one` as in `choose`. Adding 511 changes bit 9 unless the nine
// bits below it are zero.
FP4_FUNCTION void odd_to_even(uint32_t (&sum)[8], uint32_t odd, uint32_t one) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) {
        const uint32_t reached = sum[i] * one + 0x01FF01FFu;
        sum[i] &= ~(reached & odd);
    }
}

// Ties at 0.25: elements with the magnitude `quarter` (twice in a word) to zero; w: the bfloat16 elements of `sum`.
FP4_FUNCTION void quarter_to_zero(uint32_t (&sum)[8], const uint32_t (&w)[8], uint32_t quarter) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] &= ~(equal_halves(w[i], quarter) & ALL_ODD);
#else
    for (int i = 0; i < 8; ++i)
        for (int shift = 0; shift < 32; shift += 16)
            if ((w[i] >> shift & 0x7FFFu) == (quarter >> shift & 0xFFFFu)) sum[i] &= ~(0x200u << shift);
#endif
}

// For one candidate: steps of two elements a word, and its error divided by d8 (d8^2), times 2^-14 (2^-28).
struct Steps {
    uint32_t sum[8];
    float error;
};

template <bool Squared> FP4_FUNCTION Steps steps_of(const float (&x)[GROUP], float encode, uint32_t one) {
    Steps result;
    float error[2] = {0.f, 0.f};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) {
        const float low = fmaf(x[2 * i], encode, 0.f), high = fmaf(x[2 * i + 1], encode, 0.f);  // + 0 makes -0 to 0
        result.sum[i] = truncated_halves(low, high) * one + 0x01000100u;
        const uint32_t q = result.sum[i] & 0x8E008E00u;
        const float d0 = widened_half(q, 0) - low, d1 = widened_half(q, 1) - high;
        if (Squared) {
            error[0] = fmaf(d0, d0, error[0]), error[1] = fmaf(d1, d1, error[1]);
        } else {
            error[0] += fabsf(d0), error[1] += fabsf(d1);
        }
    }
    result.error = error[0] + error[1];
    return result;
}

// Both candidates, which one is better, and whether that is certain (ties aside). `largest`: the largest magnitude, NaN
// if there is one. `one`: 1, but unknown to the compiler, so that it keeps a multiplication by it. The integer
// multiply-add runs on a pipe that has room; an addition would run on the one that limits this kernel.
struct Choice {
    Steps to_six, to_four;
    bool four, sure;
};

template <bool Squared>
FP4_FUNCTION Choice choose(
    const float (&x)[GROUP], float largest, const Counting& six, const Counting& four, uint32_t one) {
    Choice result;
    result.to_six = steps_of<Squared>(x, six.encode, one), result.to_four = steps_of<Squared>(x, four.encode, one);
    float difference, doubt;
    if (Squared) {  // sum 2 |d| 5e-6 <= 2e-5 (1 + sum d^2), by Cauchy-Schwarz
        const float six_unit = six.d8 * six.d8, four_unit = four.d8 * four.d8;
        const float six_error = result.to_six.error * six_unit, four_error = result.to_four.error * four_unit;
        constexpr float part = 3.0517578125e-05f;  // 2^-15
        difference = four_error - six_error;
        doubt = fmaf(part * COUNTED * COUNTED, six_unit + four_unit, part * (six_error + four_error));
    } else {
        difference = fmaf(result.to_four.error, four.d8, -(result.to_six.error * six.d8));
        doubt = 1.220703125e-4f * COUNTED * (six.d8 + four.d8);  // 2^-13: sixteen times 5e-6, and the sums
    }
    result.four = difference < 0.f;
    result.sure = fabsf(difference) >= doubt && largest * six.encode < LARGEST_COUNTED;
    return result;
}

// The steps alone.
FP4_FUNCTION void count_steps(const float (&x)[GROUP], float encode, uint32_t (&sum)[8]) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i)
        sum[i] = truncated_halves(fmaf(x[2 * i], encode, 0.f), fmaf(x[2 * i + 1], encode, 0.f)) + 0x01000100u;
}

// The error of a candidate with the contract's roundings, from its steps (ties corrected), for an ordinary global
// scale.
template <bool Squared, bool Fast>
FP4_FUNCTION float exact_error(const float (&x)[GROUP], const uint32_t (&sum)[8], float d8, const GlobalScale& global) {
    const float unit = d8 * (1.f / COUNTED);
    float total = 0.f;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < GROUP; ++i) {
        const float q = widened_half(sum[i / 2] & 0x0E000E00u, i % 2), magnitude = fabsf(x[i]);
        const float difference = Fast ? fmaf(q, unit, -(magnitude * global.scale))
                                      : divide_by_range((q * unit) * global.amax, global) - magnitude;
        total += Squared ? difference * difference : fabsf(difference);
    }
    return total;
}

// True if an element was rounded up to an odd code from the midpoint of two values, or from so little above it that
// float16 does not resolve it: the lowest ten bits of its steps are 0x200.
FP4_FUNCTION bool has_middle(const uint32_t (&sum)[8]) {
#ifdef __CUDA_ARCH__
    uint32_t least = 0xFFFFFFFFu;  // minimum of the ten bits, the highest inverted, at the top of each half
#pragma unroll
    for (int i = 0; i < 8; ++i) least = __vminu2(least, sum[i] * 64u + 0x80008000u);
    return least < 0x00400000u || !(least & 0xFFFFu);
#else
    bool found = false;
    for (int i = 0; i < 8; ++i) found = found || (sum[i] & 0x3FFu) == 0x200u || (sum[i] >> 16 & 0x3FFu) == 0x200u;
    return found;
#endif
}

// Eight codes of four words of steps, the first in the lowest nibble.
FP4_FUNCTION uint32_t codes_of_steps(const uint32_t* sum) {
    const uint32_t first = picked_bytes(sum[0], sum[1], 0x7351), second = picked_bytes(sum[2], sum[3], 0x7351);
    const uint32_t even = picked_bytes(first, second, 0x5410), odd = picked_bytes(first, second, 0x7632);
    const uint32_t low = 0x0F0F0F0Fu;  // a byte is a sign, three zeros, the code, and a bit of the remainder
    const uint32_t codes = merged(even, odd * 16u, low), signs = merged(even >> 4, odd, low);
    return ((codes >> 1) & 0x77777777u) | signs;
}

}  // namespace fp4
