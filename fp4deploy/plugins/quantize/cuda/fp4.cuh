// The numerics of FP4 for every kernel: E2M1, E4M3, the scales of NVFP4 and MXFP4, 4/6, Philox, the Hadamard transform.
//
// Bitwise equal to `fp4deploy.formats`, with the same order of operations. Each operation of the contract is rounded
// once: compile with -fmad=false (nvcc) or -ffp-contract=off (host compiler). An explicit fma is used only where its
// product is exact, so that it rounds like the addition it replaces. The header also compiles for the host, where tests
// compare it with the reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FP4_FUNCTION __host__ __device__ __forceinline__
#else
#define FP4_FUNCTION inline
#endif

namespace fp4 {

constexpr int GROUP = 16;
constexpr float FLOAT_MAX = 3.402823466e38f;
constexpr uint32_t SIGN_MASK = 0xD7E8;

FP4_FUNCTION uint32_t bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
#endif
}

FP4_FUNCTION float from_bits(uint32_t b) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(b);
#else
    float x;
    std::memcpy(&x, &b, 4);
    return x;
#endif
}

FP4_FUNCTION float quiet_nan() { return from_bits(0x7FC00000u); }
FP4_FUNCTION bool is_finite(float x) { return (bits(x) & 0x7F800000u) != 0x7F800000u; }
FP4_FUNCTION float minimum(float a, float b) { return fminf(a, b); }

// The larger of the two, NaN if either is.
FP4_FUNCTION float nan_max(float a, float b) {
#ifdef __CUDA_ARCH__
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
#else
    return a != a || b != b ? quiet_nan() : (a > b ? a : b);
#endif
}

// ---- E2M1 ----

FP4_FUNCTION float clamp_e2m1(float u) { return fminf(fmaxf(u, -6.f), 6.f); }

// The binade of a magnitude, a power of two from 1 up. Adding ROUNDER times it, and subtracting that, leaves one mantissa
// bit of an E2M1 value: float addition does the rounding, ties to even, without a branch.
constexpr float ROUNDER = 6291456.f;  // 1.5 * 2^22
FP4_FUNCTION float binade_of(float u) { return from_bits(bits(fmaxf(fabsf(u), 1.f)) & 0x7F800000u); }

// Nearest E2M1 value of |u| < 7, ties to even.
FP4_FUNCTION float round_below_7(float u) {
    const float binade = binade_of(u);
    return fmaf(binade, -ROUNDER, fmaf(binade, ROUNDER, u));
}

// Nearest E2M1 value. NaN is left to the caller: the scale of its block is NaN.
FP4_FUNCTION float round_e2m1(float u) { return round_below_7(clamp_e2m1(u)); }

// That of a magnitude.
FP4_FUNCTION float round_magnitude(float u) {
    u = fminf(u, 6.f);
    const float binade = binade_of(u);
    return fmaf(binade, -ROUNDER, fmaf(binade, ROUNDER, u));
}

// Stochastic rounding to one of the two neighbours: up with a probability equal to the distance, in 256ths of a step,
// which is half a binade. `part` is byte / 512: binades of it are added to |u|, and the sum is cut to whole steps: with
// TRUNCATOR binades, rounded towards zero, it has no bits below a step. NaN is left to the caller, as above.
constexpr float TRUNCATOR = 4194304.f;  // 2^22
FP4_FUNCTION float part_of(uint32_t word, int byte) {
#ifdef __CUDA_ARCH__
    return from_bits(__byte_perm(word, 0x46800000u, 0x7650u + byte)) - 16384.f;  // 16384 has steps of 1 / 512
#else
    return float(word >> (8 * byte) & 0xFFu) * (1.f / 512.f);
#endif
}

FP4_FUNCTION float round_e2m1(float u, float part) {
    const float magnitude = fminf(fabsf(u), 6.f), t = fmaf(part, binade_of(magnitude), magnitude);  // below 8
    const float binade = binade_of(t);
#ifdef __CUDA_ARCH__
    const float truncated = __fmaf_rz(binade, TRUNCATOR, t);
#else
    const float truncated = fmaf(binade, TRUNCATOR, floorf(t * (2.f / binade)) * (binade * 0.5f));
#endif
    return copysignf(fmaf(binade, -TRUNCATOR, truncated), u);
}

// For 0 <= u < 7, the float u + 1.5 * 2^22 binades contains the code: its low bits count half binades, its bits from
// bit 22 up are twice the exponent. `code_of` adds both, which is the code plus CODE_BIAS.
constexpr uint32_t CODE_BIAS = 299u;
FP4_FUNCTION uint32_t code_of(float rounded) { return (bits(rounded) & 7u) + (bits(rounded) >> 22); }

// The code of |u| rounded to nearest, plus CODE_BIAS.
FP4_FUNCTION uint32_t biased_code(float u) {
    const float magnitude = fminf(fabsf(u), 6.f);
    return code_of(fmaf(binade_of(magnitude), ROUNDER, magnitude));
}

// The code of a magnitude grows by 4 in a straight line up to 2, by 2 more up to 4 and by 1 more up to 6. These are the
// pieces, each from 0 to 1: half the magnitude less 0, 1 or 2, and saturation is a free instruction modifier. At most one
// is a fraction, so that a sum of them is rounded once. It all runs on the FMA pipe. Measured fact: H200, 2026-11-30, BF16
// 16384 x 6144, old and new kernels in one run of the cases of `benchmarks/kernels.py`, +-0.3 %: stochastic packing 0.90 of
// the time by it and by keys once a block; packing to nearest 1.07 and MXFP4 1.12, so that `biased_code` has no pieces.
FP4_FUNCTION float piece(float magnitude, float from) {
    const float part = fmaf(magnitude, 0.5f, -from);
#ifdef __CUDA_ARCH__
    return __saturatef(part);
#else
    return fminf(fmaxf(part, 0.f), 1.f);
#endif
}

// The code of a magnitude rounded stochastically, plus DOWN, the bits of 2^23. Half the code is added up, so that the sum of
// the first piece and `part` is that of `round_e2m1` and rounded like it; everything else is rounded down.
constexpr uint32_t DOWN = 0x4B000000u;
FP4_FUNCTION uint32_t stochastic_code(float magnitude, float part) {
    const float sum = fmaf(piece(magnitude, 0.f), 2.f, part);
#ifdef __CUDA_ARCH__
    const float all = __fmaf_rz(piece(magnitude, 2.f), 0.5f, __fmaf_rz(piece(magnitude, 1.f), 1.f, sum));
    return bits(__fmaf_rz(all, 2.f, from_bits(DOWN)));
#else
    return DOWN + uint32_t(2. * sum + 2. * piece(magnitude, 1.f) + piece(magnitude, 2.f));
#endif
}

// A negative u that becomes 0 has code 8 (-0); -0 itself has code 0.
FP4_FUNCTION uint32_t sign_of(float u) { return bits(u + 0.f) >> 28 & 8u; }

// The code of u rounded to nearest; NaN is left to the caller.
FP4_FUNCTION uint32_t encode_nearest(float u) { return biased_code(u) - CODE_BIAS + sign_of(u); }

// Blackwell converts in hardware, but the instruction exists only in code for one architecture or family ("sm_100a",
// "sm_120f").
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define FP4_HARDWARE_CODES
#endif
#endif

// Eight codes of magnitudes, with the signs of their elements in bits 3 of nibbles.
FP4_FUNCTION uint32_t with_signs(uint32_t codes, const float* u) {
#ifdef __CUDA_ARCH__
    uint32_t sign[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sign[i] = bits(u[i] + 0.f);
    const auto tops = [&](int i) {
        const uint32_t low = __byte_perm(sign[i], sign[i + 2], 0x73), high = __byte_perm(sign[i + 4], sign[i + 6], 0x73);
        return __byte_perm(low, high, 0x5410) & 0x80808080u;
    };
    return codes + (tops(0) >> 4) + tops(1);
#else
    for (int i = 0; i < 8; ++i) codes += sign_of(u[i]) << (4 * i);
    return codes;
#endif
}

// Eight codes, the first in the lowest nibble, from those of magnitudes plus `bias`.
FP4_FUNCTION uint32_t joined(uint32_t (&code)[8], uint32_t bias) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int step = 1; step < 8; step *= 2)
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int i = 0; i < 8; i += 2 * step) code[i] += code[i + step] << (4 * step);
    return code[0] - bias * 0x11111111u;
}

// The code of an E2M1 value from 0 to 6 is in bits 22 to 24 of it times 2^-126; all others are 0.
FP4_FUNCTION uint32_t code_bits(float q) { return bits(q * from_bits(0x00800000u)); }

// Eight such codes, the first in the lowest nibble.
FP4_FUNCTION uint32_t encode_values(const float* q) {
    uint32_t codes = 0u;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) codes += i < 6 ? code_bits(q[i]) >> (22 - 4 * i) : code_bits(q[i]) << (4 * i - 22);
    return codes;
}

// The codes of eight consecutive elements rounded to nearest; NaN is left to the caller. The instruction keeps the sign
// of a zero, hence u + 0, which makes -0 to 0. The hardware path was compiled, not run.
FP4_FUNCTION uint32_t encode_eight(const float* u) {
    uint32_t code[8];
#ifdef FP4_HARDWARE_CODES
    asm("{\n\t.reg .b8 a, b, c, d;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n\t"
        "mov.b32 %0, {a, b, c, d};\n\t}"
        : "=r"(code[0])
        : "f"(u[0] + 0.f), "f"(u[1] + 0.f), "f"(u[2] + 0.f), "f"(u[3] + 0.f), "f"(u[4] + 0.f), "f"(u[5] + 0.f),
          "f"(u[6] + 0.f), "f"(u[7] + 0.f));
    return code[0];
#else
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) code[i] = biased_code(u[i]);
    return with_signs(joined(code, CODE_BIAS), u);
#endif
}

FP4_FUNCTION float decode_e2m1(uint32_t code) {
    float magnitude = from_bits((code & 7u) << 22) * from_bits(0x7E800000u);  // * 2^126
    return code & 8u ? -magnitude : magnitude;
}

// ---- E4M3 and E8M0 ----

// Nearest E4M3 value of 0 <= d <= 448, ties to even, by the same addition. Below 2^-6 (subnormal) the step is 2^-9.
FP4_FUNCTION float round_e4m3(float d) {
    float rounder = from_bits(bits(fmaxf(d, 0.015625f)) & 0x7F800000u) * 1572864.f;  // 1.5 * 2^23 eighths
    return (d + rounder) - rounder;
}

// Times 2^-120, the bits of an E4M3 value from bit 20 up are its code.
FP4_FUNCTION uint32_t encode_e4m3(float d8) { return d8 != d8 ? 0x7Fu : bits(d8 * from_bits(0x03800000u)) >> 20; }

FP4_FUNCTION float decode_e4m3(uint32_t byte) {
    byte &= 0x7Fu;
    if (byte == 0x7Fu) return quiet_nan();
    return byte < 8u ? float(byte) * 0.001953125f : from_bits((byte + 960u) << 20);
}

// E8M0 byte for a block amax; `up` rounds the scale up (2^ceil(log2(a / 6))), otherwise 2^(floor(log2 a) - 2).
FP4_FUNCTION uint32_t encode_e8m0(float amax, bool up) {
    if (!is_finite(amax)) return 0xFFu;
    int exponent = int(bits(amax) >> 23) - 2 + (up && (bits(amax) & 0x7FFFFFu) > 0x400000u ? 1 : 0);
    return exponent < 0 ? 0u : uint32_t(exponent);
}

FP4_FUNCTION float decode_e8m0(uint32_t byte) {
    return byte == 0xFFu ? quiet_nan() : byte == 0u ? from_bits(0x00400000u) : from_bits(byte << 23);
}

// ---- scales ----

// encode: multiplies an element into E2M1's range; step: the value of one E2M1 unit; d8: the E4M3 block scale. All are
// NaN for a block that contains a NaN or an Inf.
struct BlockScale {
    float encode;
    float step;
    float d8;
};

struct GlobalScale {
    float amax;     // A
    float scale;    // S
    float sixth;    // S * fp32(1/6)
    float decode;   // 1 / S
    float inverse;  // fp32(1 / 6E)
    float range;    // 6E
};

template <int Largest> FP4_FUNCTION GlobalScale global_scale(float amax) {
    constexpr float range = 6.f * Largest;
    float scale = amax != amax ? amax : minimum(range / amax, FLOAT_MAX);
    if (scale == 0.f || amax == 0.f) scale = 1.f;
    return {amax, scale, scale * (1.f / 6.f), 1.f / scale, 1.f / range, range};
}
FP4_FUNCTION GlobalScale global_scale(float amax) { return global_scale<448>(amax); }

// Round an unrounded block scale d; `block_amax` says whether the block is finite.
FP4_FUNCTION BlockScale rounded_scale(float d, float block_amax, const GlobalScale& global) {
    float d8 = global.amax > 0.f ? round_e4m3(minimum(d, 448.f)) : 0.f;
    float encode = d8 > 0.f ? minimum(1.f / (d8 * global.decode), FLOAT_MAX) : 0.f;
    float step = (d8 * global.amax) * global.inverse;
    if (!is_finite(block_amax)) return {quiet_nan(), quiet_nan(), quiet_nan()};
    return {encode, step, d8};
}

FP4_FUNCTION BlockScale block_scale(float block_amax, const GlobalScale& global) {
    return rounded_scale(minimum(block_amax * global.sixth, FLOAT_MAX), block_amax, global);
}

FP4_FUNCTION BlockScale mx_scale(float block_amax, bool up) {
    uint32_t byte = encode_e8m0(block_amax, up);
    if (byte == 0xFFu) return {quiet_nan(), quiet_nan(), quiet_nan()};
    return {from_bits((254u - byte) << 23), decode_e8m0(byte), 0.f};
}

FP4_FUNCTION float fake_quantize(float x, const BlockScale& block) { return block.step * round_e2m1(x * block.encode); }

// ---- four over six ----

struct Candidates {
    BlockScale six, four;
};

// amax / 6 as a multiplication and a correction by fma, which rounds like the division where nothing underflows
// (checked for every mantissa). A division would take many more instructions.
FP4_FUNCTION float sixth_of(float amax) {
    const float guess = amax * (1.f / 6.f);
    return fmaf(fmaf(-6.f, guess, amax), 1.f / 6.f, guess);
}

FP4_FUNCTION Candidates four_over_six(float block_amax, const GlobalScale& global) {
    float b = (block_amax > 1e-30f ? sixth_of(block_amax) : block_amax / 6.f) * global.scale;
    return {rounded_scale(b, block_amax, global), rounded_scale(b * 1.5f, block_amax, global)};
}

// v / 6E as a multiplication and a correction, rounded like the division for 1e-25 < |v| < 1e37 and 0 (every float
// checked).
FP4_FUNCTION float divide_by_range(float v, const GlobalScale& global) {
    float quotient = v * global.inverse;
    return fmaf(fmaf(-global.range, quotient, v), global.inverse, quotient);
}

// The error of one element for a candidate scale, from its magnitude: rounding is symmetric, so the sign does not
// matter. Fast: the difference is taken in the scaled domain, where q * d8 is exact.
template <bool Squared, bool Fast, bool Divide>
FP4_FUNCTION float element_error(float magnitude, const BlockScale& block, const GlobalScale& global) {
    float u = fminf(magnitude * block.encode, 6.f);
    float binade = binade_of(u), q = fmaf(binade, -ROUNDER, fmaf(binade, ROUNDER, u)), difference;
    if (Fast) {
        difference = fmaf(q, block.d8, -(magnitude * global.scale));
    } else {
        float v = (q * block.d8) * global.amax;
        difference = (Divide ? v / global.range : divide_by_range(v, global)) - magnitude;
    }
    return Squared ? difference * difference : fabsf(difference);
}

// The sum over sixteen elements, in order. Values are 0.5 to 6 times d8 A. If that is in the range of
// `divide_by_range`, as nearly always, no division is executed.
template <bool Squared, bool Fast>
FP4_FUNCTION float row_error(const float (&x)[GROUP], const BlockScale& block, const GlobalScale& global) {
    float unit = block.d8 * global.amax, total = 0.f;
    if (Fast || (unit > 1e-24f && unit < 1e36f)) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int i = 0; i < GROUP; ++i) total += element_error<Squared, Fast, false>(fabsf(x[i]), block, global);
    } else {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int i = 0; i < GROUP; ++i) total += element_error<Squared, Fast, true>(fabsf(x[i]), block, global);
    }
    return total;
}

// ---- stochastic rounding, Hadamard transform ----

struct Words {
    uint32_t w[4];
};

// The keys of the ten rounds of Philox, two a round; a kernel may compute them once a block.
constexpr int KEYS = 20;
FP4_FUNCTION uint32_t key_of(uint64_t seed, int i) {
    return uint32_t(seed >> (i % 2 * 32)) + uint32_t(i / 2) * (i % 2 ? 0xBB67AE85u : 0x9E3779B9u);
}

// Philox4x32-10; byte i of the result belongs to element i of group g (see fp4deploy/formats/philox.py).
FP4_FUNCTION Words philox(uint64_t g, const uint32_t (&key)[KEYS], uint64_t offset) {
    uint32_t c0 = uint32_t(g), c1 = uint32_t(g >> 32), c2 = uint32_t(offset), c3 = uint32_t(offset >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < KEYS; i += 2) {
        uint64_t left = uint64_t(0xD2511F53u) * c0, right = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(right >> 32) ^ c1 ^ key[i];
        c1 = uint32_t(right);
        c2 = uint32_t(left >> 32) ^ c3 ^ key[i + 1];
        c3 = uint32_t(left);
    }
    return {{c0, c1, c2, c3}};
}

FP4_FUNCTION Words philox(uint64_t g, uint64_t seed, uint64_t offset) {
    uint32_t key[KEYS];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < KEYS; ++i) key[i] = key_of(seed, i);
    return philox(g, key, offset);
}

#ifdef __CUDACC__
// Philox with a seed and an offset {seed, offset}, whose keys a block of at least KEYS threads computes once into shared
// memory; a barrier follows.
struct alignas(16) SharedPhilox {
    uint4 four[KEYS / 4];
    uint64_t offset;

    __device__ __forceinline__ void set(const uint64_t* random) {
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        if (thread < KEYS) reinterpret_cast<uint32_t*>(four)[thread] = key_of(random[0], thread);
        if (thread == 0) offset = random[1];
    }
    __device__ __forceinline__ Words words(uint64_t g) const {
        uint32_t key[KEYS];
        const uint32_t place = uint32_t(__cvta_generic_to_shared(four));
#pragma unroll
        for (int i = 0; i < KEYS; i += 4)  // volatile: read again by each call, which takes fewer registers than to keep them
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(key[i]), "=r"(key[i + 1]), "=r"(key[i + 2]), "=r"(key[i + 3])
                         : "r"(place + 4 * i));
        return philox(g, key, offset);
    }
};
#endif

// byte / 512 of the element i.
FP4_FUNCTION float part_of(const Words& words, int i) { return part_of(words.w[i / 4], i % 4); }

// As `encode_eight`, rounded stochastically; two words, a byte an element.
FP4_FUNCTION uint32_t encode_eight(const float* u, const uint32_t* words) {
    uint32_t code[8];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) code[i] = stochastic_code(fabsf(u[i]), part_of(words[i / 4], i % 4));
    return with_signs(joined(code, DOWN), u);
}

// The transform times 4, which is exact to take out.
FP4_FUNCTION void hadamard_sums(float (&x)[GROUP]) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < GROUP; ++i)
        if (SIGN_MASK >> i & 1u) x[i] = -x[i];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int stride = 1; stride < GROUP; stride *= 2) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int i = 0; i < GROUP; ++i)
            if (!(i & stride)) {
                float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
    }
}

FP4_FUNCTION void hadamard(float (&x)[GROUP]) {
    hadamard_sums(x);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < GROUP; ++i) x[i] *= 0.25f;
}

#ifdef __CUDACC__
constexpr float ZEROS_AMAX = 6.103515625e-05f;  // formats/scales.py

// The end of an amax reduction, called by one thread of the last block: takes the largest magnitude out of `cell` (and
// zeroes it) and updates the running amax, max(current, decay * running), after zeros alone at least ZEROS_AMAX, because
// a running amax of 0 is one that has seen nothing. *amax becomes the amax to quantise with: the running amax; with
// `delayed` the one before this update, if there was one.
__device__ __forceinline__ void track_amax(
    int* cell, const float* other, float* tracked, float* amax, float decay, bool delayed) {
    float current = __int_as_float(atomicExch(cell, 0));
    if (other) current = fmaxf(current, *other);
    if (tracked) {
        const float previous = *tracked;
        const float floor = current > 0.f ? 0.f : ZEROS_AMAX;
        const float moved = fmaxf(fmaxf(current, previous * decay), floor);
        *tracked = moved;
        current = !delayed ? moved : previous > ZEROS_AMAX ? previous : fmaxf(current, floor);
    }
    if (amax) *amax = current;
}

// The largest of lanes that are adjacent, a power of two of them; all lanes of a warp call this.
__device__ __forceinline__ float warp_max(float value, int lanes = 32) {
    for (int offset = lanes / 2; offset; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// The largest non-negative value of a block of whole warps, in every thread; a block calls it once.
__device__ __forceinline__ float block_max(float value) {
    __shared__ float warps[32];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    value = warp_max(value);
    if (thread % 32 == 0) warps[thread / 32] = value;
    __syncthreads();
    return warp_max(thread % 32 < blockDim.x * blockDim.y / 32 ? warps[thread % 32] : 0.f);
}

// atomicMax of a non-negative float, whose bits order like the number. Most read a larger value and skip the atomic
// operation. The value they read may be outdated, but then it is only too small.
__device__ __forceinline__ void raise(int* cell, float value) {
    if (__float_as_int(value) > *reinterpret_cast<volatile int*>(cell)) atomicMax(cell, __float_as_int(value));
}

// The same of all lanes of a warp; or of a block, which calls it once: warps of all blocks would queue for the cell.
__device__ __forceinline__ void raise_to(int* cell, float value) {
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) raise(cell, value);
}
__device__ __forceinline__ void raise_by_block(int* cell, float value) {
    value = block_max(value);
    if (threadIdx.x == 0) raise(cell, value);
}
#endif

}  // namespace fp4
