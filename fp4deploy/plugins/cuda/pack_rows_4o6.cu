// Packed NVFP4 of rows in memory order, each block mapped to 6 or to 4, whichever errs less (see rows.cuh).
//
// `four_over_six.cuh` has the arithmetic of an ordinary group and says where it is not sure; with a table of all scales,
// which each block of threads makes first, nothing is divided in the loop. About one group in 5000 is not sure.
//
// Macros: DTYPE __half or __nv_bfloat16; E; SQUARED, FAST.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256, four blocks a multiprocessor, or fewer.
#include "four_over_six.cuh"
#include "rows.cuh"

#ifndef SQUARED
#define SQUARED 0
#endif
#ifndef FAST
#define FAST 0
#endif
#ifndef ADD_PRODUCT
#define ADD_PRODUCT 1
#endif
#ifndef TENSOR
#define TENSOR 0
#endif
#ifndef TWICE
#define TWICE 0
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef RESIDENT
#define RESIDENT 4
#endif

__device__ __forceinline__ uint32_t unit_of(__half*) { return 0x2000u; }
__device__ __forceinline__ uint32_t unit_of(__nv_bfloat16*) { return 0x10000u; }

// amax / 6 by a product and its correction, rounded like the division where nothing underflows.
__device__ __forceinline__ float sixth_of(float amax) {
    const float guess = amax * (1.f / 6.f);
    return fmaf(fmaf(-6.f, guess, amax), 1.f / 6.f, guess);
}

#if TENSOR
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t* a, uint32_t b, __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t* a, uint32_t b, __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
// 1 as an element; 0 where the element belongs to another lane
__device__ __forceinline__ uint32_t ones_of(__half*) { return threadIdx.x % 4 == threadIdx.x % 32 / 8 ? 0x3C003C00u : 0u; }
__device__ __forceinline__ uint32_t ones_of(__nv_bfloat16*) { return threadIdx.x % 4 == threadIdx.x % 32 / 8 ? 0x3F803F80u : 0u; }
__device__ __forceinline__ float one_as_half(__half*) { return 1.f; }
__device__ __forceinline__ float one_as_half(__nv_bfloat16*) { return 1.875f; }
// sum of elements, with a sign for whether they are rounded up; of their values
struct Sums {
    float elements, steps;
};
__device__ __forceinline__ Sums signed_sums(
    const uint32_t (&w)[8], const float (&v)[16], float encode, uint32_t one, uint32_t (&sum)[8], uint32_t ones) {
    constexpr DTYPE* tag = nullptr;
    constexpr __half* half = nullptr;
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        uint32_t element[4], value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float low = fmaf(v[2 * (i + j)], encode, 0.f), high = fmaf(v[2 * (i + j) + 1], encode, 0.f);
            sum[i + j] = fp4::truncated_halves(low, high) * one + 0x01000100u;
            element[j] = fp4::merged(w[i + j], sum[i + j] * 128u, 0x7FFF7FFFu);
            value[j] = fp4::merged(sum[i + j] & 0x0E000E00u, element[j], 0x7FFF7FFFu);
        }
        multiply(c, element, ones, tag);
        multiply(d, value, ones, half);
    }
    return {c[0] + c[2], d[0] + d[2]};
}
#endif

struct Quick {
    Packed packed;  // the scale as its byte
    uint32_t scale;
    bool sure, middle;
    float encode;
};

struct Shared {
    GlobalScale global;
    fp4::Counting counting[fp4::SCALES];
    bool tied[fp4::SCALES];
};

__device__ __forceinline__ Quick choose(
    const Group& group, float to_scaled, const Shared& shared, bool ties, uint32_t one
#if TENSOR
    , uint32_t ones
#endif
) {
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const uint32_t bytes = fp4::candidate_bytes(sixth_of(largest) * to_scaled);
    const fp4::Counting six = shared.counting[bytes & 0xFFu], four = shared.counting[bytes >> 8];
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
#if TENSOR
    struct { uint32_t sum[8]; } to_six, to_four;
    const Sums of_six = signed_sums(w, v, six.encode, one, to_six.sum, ones);
    const Sums of_four = signed_sums(w, v, four.encode, one, to_four.sum, ones);
    const float unit = fp4::COUNTED * one_as_half(tag);
    const float difference = fmaf(four.d8, of_four.steps, -fmaf(six.d8, of_six.steps, (of_four.elements - of_six.elements) * (to_scaled * unit)));
    const float doubt = 2.44140625e-4f * unit * (six.d8 + four.d8);
    fp4::Chosen chosen;
    chosen.four = difference < 0.f;
    chosen.sure = fabsf(difference) >= doubt && largest * six.encode < fp4::LARGEST_COUNTED;
#pragma unroll
    for (int i = 0; i < 8; ++i) chosen.sum[i] = chosen.four ? to_four.sum[i] : to_six.sum[i];
#else
    const fp4::Chosen chosen = fp4::choose<SQUARED>(v, largest, six, four, one);
#endif
    const uint32_t scale = chosen.four ? bytes >> 8 : bytes;
    const bool middle = ties && fp4::has_middle(chosen.sum) && shared.tied[scale & 0xFFu];
    const uint2 codes = make_uint2(fp4::codes_of_steps(chosen.sum), fp4::codes_of_steps(chosen.sum + 4));
    return {{codes, 0.f}, scale, chosen.sure, middle, (chosen.four ? four : six).encode};
}

// Codes with ties to even, the scale known.
__device__ __noinline__ uint2 encode_with_care(const uint4* first, const uint4* second, float encode) {
    const Group group = {*first, *second};
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    uint32_t packed[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float low, high;
        widen(w[i], low, high, tag);
        packed[i / 4] += fp4::encode_nearest(low * encode) << (8 * (i % 4));
        packed[i / 4] += fp4::encode_nearest(high * encode) << (8 * (i % 4) + 4);
    }
    return make_uint2(packed[0], packed[1]);
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT) pack_rows_4o6(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups) {
    __shared__ Shared shared;
    const long long first = (long long)blockIdx.x * 256 + threadIdx.x;
    const uint32_t stride = gridDim.x * 256u;
    Group words = load(x, first, groups);
    if (threadIdx.x == 0) shared.global = fp4::global_scale<E>(*amax);
    __syncthreads();
    bool tied = false;
    if (threadIdx.x < fp4::SCALES) {
        constexpr DTYPE* tag = nullptr;
        const bool ordinary = is_ordinary(shared.global);
        shared.counting[threadIdx.x] = fp4::counting_of(threadIdx.x, shared.global, ordinary, unit_of(tag), tied);
        shared.tied[threadIdx.x] = tied;
    }
    const bool ties = __syncthreads_or(tied);
    const float to_scaled = shared.global.scale;
#if ADD_PRODUCT
    const uint32_t one = 1u + uint32_t((unsigned long long)groups >> 63);  // known too late to be an addition, whose pipe is full
#else
    constexpr uint32_t one = 1u;
#endif
#if TENSOR
    constexpr DTYPE* tag = nullptr;
    uint32_t ones;
    asm volatile("mov.b32 %0, %1;" : "=r"(ones) : "r"(ones_of(tag)));
    const int lane = threadIdx.x % 32;
#else
    constexpr int lane = 0;
#endif
    // How many groups this thread has (and the first of its warp), which fits 32 bits.
    const uint32_t own = first < groups ? uint32_t((groups - first - 1) / stride) + 1u : 0u;
    const uint32_t most = first - lane < groups ? uint32_t((groups - (first - lane) - 1) / stride) + 1u : 0u;
    x += 2 * first, codes += first, scales += first;
    auto step = [&](const Group& now, uint32_t i) {
#if TENSOR
        Quick quick = choose(now, to_scaled, shared, ties, one, ones);
        if (i >= own) return;
#else
        Quick quick = choose(now, to_scaled, shared, ties, one);
#endif
        const size_t at = size_t(i) * stride;
        if (!quick.sure) {
            quick.packed = with_care<true, SQUARED, FAST>(x + 2 * at, x + 2 * at + 1, &shared.global);
            quick.scale = fp4::encode_e4m3(quick.packed.d8);
        } else if (quick.middle) {
            quick.packed.codes = encode_with_care(x + 2 * at, x + 2 * at + 1, quick.encode * (1.f / fp4::COUNTED));
        }
        codes[at] = quick.packed.codes;
        scales[at] = uint8_t(quick.scale);
    };
    auto fetch = [&](uint32_t i) -> Group {
        if (i >= own) return {};
        const size_t at = size_t(i) * stride;
        return {x[2 * at], x[2 * at + 1]};
    };
#if TWICE
    for (uint32_t i = 0; i < most; i += 2) {
        const Group next = fetch(i + 1);
        step(words, i);
        words = fetch(i + 2);
        if (i + 1 < most) step(next, i + 1);
    }
#elif AHEAD
    for (uint32_t i = 0; i < most; ++i) {
        const Group next = fetch(i + 1);
        step(words, i);
        words = next;
    }
#else
    for (uint32_t i = 0; i < most; ++i) step(fetch(i), i);
#endif
}
