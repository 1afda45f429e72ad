// Quantisation of a tensor seen as (outer, K, inner) in memory, in blocks along K, without a transposed copy.
//
//   INNER 0   inner = 1: K is last in memory (rows of a matrix, channels of a channels_last image)
//   INNER n   K is `inner` elements apart (channels of NCHW, OIHW); a thread has n neighbouring inner positions
//
// A thread holds 16 elements along K, a group, in registers (INNER n: n groups; MXFP4: 32 elements, or with INNER 0 two
// neighbouring lanes). Row r = outer * inner + i in memory order; G groups a row, the K of the last one padded with zeros.
//
// Macros: DTYPE; FORMAT 0 NVFP4, 1 NVFP4 with 4/6, 2 MXFP4 floor, 3 MXFP4 ceil; E 448 or 256; SQUARED and FAST of 4/6;
//   STOCHASTIC; HADAMARD; ROWS (a global amax a row); PACKED 0 fake quantisation, 1 codes and scales, 2 with the scales in
//   the 128x4 layout, 3 the finite amax alone (out: int32 [1], zero before); INSIDE (write the bits |x e| <= 6); ALIGNED (K a multiple of 16, pointers of 16 bytes).
// Arguments: x; amax float32 [1 or rows]; random uint64 {seed, offset}; out DTYPE (outer, K padded to 16 with HADAMARD,
//   inner) or codes uint8 [rows, 8 G]; scales uint8 [rows, G] (MXFP4: [rows, G / 2]); inside uint16 (outer, G, inner);
//   outer, K, inner int64.
// Launch: block 256, grid ceil(threads / 256) with threads = outer * G (INNER 0), outer * blocks * ceil(inner / INNER).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp4.cuh"

#ifndef DTYPE
#define DTYPE __nv_bfloat16
#endif
#ifndef E
#define E 448
#endif

constexpr bool MX = FORMAT >= 2;
constexpr int GROUPS = MX && INNER ? 2 : 1;  // groups of 16 that a thread holds along K
constexpr int WIDTH = INNER ? INNER : 1;     // inner positions that a thread holds
constexpr int LENGTH = 16 * GROUPS;
using fp4::BlockScale;

struct alignas(sizeof(DTYPE) * WIDTH) Neighbours {
    DTYPE value[WIDTH];
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

struct View {
    long long K, inner, groups;
    __device__ long long padded() const { return HADAMARD ? groups * 16 : K; }
};

__device__ __forceinline__ float largest_of(const float (&v)[LENGTH]) {
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) amax = fp4::nan_max(amax, fabsf(v[i]));
    if (MX && !INNER) amax = fp4::nan_max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    return amax;
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
    return row % 32 * 16 + row / 32 % 4 * 4 + k % 4 + k / 4 * 512 + row / 128 * 512 * ((count + 3) / 4);
#else
    return row * count + k;
#endif
}

// The groups of one row: `v` in, fake-quantised values back in `v`, or codes and scales written.
__device__ __forceinline__ void quantize(
    float (&v)[LENGTH], const float* amax, const uint64_t* random, uint8_t* codes, uint8_t* scales, uint16_t* inside,
    const View& view, long long row, long long group, long long inside_index, bool has) {
#if HADAMARD
#pragma unroll
    for (int part = 0; part < GROUPS; ++part) {
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = v[part * 16 + i];
        fp4::hadamard(x);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[part * 16 + i] = x[i];
    }
#endif
#if PACKED == 3
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) largest = fmaxf(largest, fabsf(v[i]) < INFINITY ? fabsf(v[i]) : 0.f);
    for (int offset = 16; offset; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (threadIdx.x % 32 == 0 && largest > 0.f) atomicMax(reinterpret_cast<int*>(codes), __float_as_int(largest));
    return;
#endif
    const fp4::GlobalScale global = MX ? fp4::GlobalScale{} : fp4::global_scale<E>(amax[ROWS && has ? row : 0]);
    const BlockScale block = scale_of(v, global);
    if (!has) return;
#pragma unroll
    for (int part = 0; part < GROUPS; ++part) {
#if STOCHASTIC
        fp4::Words words = fp4::philox(uint64_t(row) * view.groups + group + part, random[0], random[1]);
#endif
        uint32_t packed[2] = {0u, 0u}, bits = 0u;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float u = v[part * 16 + i] * block.encode;
#if STOCHASTIC
            float q = fp4::round_e2m1(u, fp4::byte_of(words, i));
#else
            float q = fp4::round_e2m1(u);
#endif
#if INSIDE
            bits |= (fabsf(u) <= 6.f ? 1u : 0u) << i;
#endif
#if PACKED
            packed[i / 8] |= (q != q ? 0u : fp4::encode_e2m1(q, u)) << (4 * (i % 8));
#else
            v[part * 16 + i] = block.step * q;
#endif
        }
#if PACKED
        reinterpret_cast<uint2*>(codes)[row * view.groups + group + part] = make_uint2(packed[0], packed[1]);
#if FORMAT < 2
        scales[scale_index(row, group + part, view.groups)] = uint8_t(fp4::encode_e4m3(block.d8));
#else
        if ((group + part) % 2 == 0)
            scales[scale_index(row, (group + part) / 2, view.groups / 2)] =
                uint8_t(block.step != block.step ? 0xFFu : fp4::bits(block.step) >> 23);
#endif
#endif
#if INSIDE
        inside[inside_index + part * view.inner] = uint16_t(bits);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(256) quantize_tensor(
    const DTYPE* x, const float* amax, const uint64_t* random, void* out, uint8_t* scales, uint16_t* inside,
    long long outer, long long K, long long inner) {
    const View view{K, inner, MX ? (K + 31) / 32 * 2 : (K + 15) / 16};
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long blocks = view.groups / GROUPS, wide = (inner + WIDTH - 1) / WIDTH;
    bool has = thread < outer * blocks * wide;
    long long in = thread % wide * WIDTH, rest = thread / wide;
    long long group = rest % blocks * GROUPS, o = rest / blocks, k = group * 16;
    float v[WIDTH][LENGTH] = {};
#if !INNER
    const DTYPE* source = x + o * K + k;
    if (has) {
#if ALIGNED
        uint4 raw[sizeof(DTYPE)];
#pragma unroll
        for (int i = 0; i < sizeof(DTYPE); ++i) raw[i] = k < K ? reinterpret_cast<const uint4*>(source)[i] : uint4{};
        const DTYPE* values = reinterpret_cast<const DTYPE*>(raw);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[0][i] = widen(values[i]);
#else
#pragma unroll
        for (int i = 0; i < 16; ++i) v[0][i] = k + i < K ? widen(source[i]) : 0.f;
#endif
    }
#else
    const DTYPE* source = x + (o * K + k) * inner + in;
    if (has) {
        Neighbours raw[LENGTH];
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            raw[i] = Neighbours{};
            if (k + i < K) raw[i] = *reinterpret_cast<const Neighbours*>(source + i * inner);
        }
#pragma unroll
        for (int i = 0; i < LENGTH; ++i)
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) v[w][i] = widen(raw[i].value[w]);
    }
#endif
#pragma unroll
    for (int w = 0; w < WIDTH; ++w)
        quantize(
            v[w], amax, random, static_cast<uint8_t*>(out), scales, inside, view, o * inner + in + w, group,
            (o * view.groups + group) * inner + in + w, has);
#if PACKED == 0
    if (!has) return;
    DTYPE* target = static_cast<DTYPE*>(out) + (o * view.padded() + k) * inner + in;
#if !INNER && ALIGNED
    uint4 raw[sizeof(DTYPE)];
    DTYPE* values = reinterpret_cast<DTYPE*>(raw);
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = narrow<DTYPE>(v[0][i]);
#pragma unroll
    for (int i = 0; i < sizeof(DTYPE); ++i)
        if (k < K) reinterpret_cast<uint4*>(target)[i] = raw[i];
#else
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) {
        Neighbours raw;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) raw.value[w] = narrow<DTYPE>(v[w][i]);
        if (k + i < view.padded()) *reinterpret_cast<Neighbours*>(target + i * inner) = raw;
    }
#endif
#endif
}

// Backward of the clipped straight-through estimator: out = gradient where the bit of `inside` is set, else 0.
extern "C" __global__ void __launch_bounds__(256) mask_gradient(
    const DTYPE* gradient, const uint16_t* inside, DTYPE* out, long long outer, long long K, long long inner,
    long long groups) {
    long long count = outer * K * inner, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) {
        long long in = at % inner, rest = at / inner, k = rest % K, o = rest / K;
        uint16_t bits = inside[(o * groups + k / 16) * inner + in];
        out[at] = bits >> (k % 16) & 1 ? gradient[at] : narrow<DTYPE>(0.f);
    }
}
