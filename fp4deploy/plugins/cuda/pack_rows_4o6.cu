// Packed NVFP4 of rows in memory order, each block mapped to 6 or to 4, whichever errs less (see rows.cuh).
//
// Which of the two is better is nearly always clear from half precision, where two elements fit a register. An element
// times 2^-14 is a float16 whose bits count E2M1 steps (512 of them to a step, subnormal or not), so that rounding is one
// addition and one mask, and its distance from the value it is rounded to is exact. Only the conversion to float16 errs,
// by 2^-9 at most: sums further apart than that can add up to decide. Where they are closer, and where an element lies
// so close to the middle of two values that half precision cannot tell its side, the guess is stored and the group joins a
// queue of its warp; whenever there are 32 of them they are decided in float32, as the contract says. About one in ten is.
//
// Macros: DTYPE __half or __nv_bfloat16; E; SQUARED, FAST.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256; four blocks (strict: three) fit a multiprocessor, and twice as many balance their queues.
#include "rows.cuh"

#ifndef SQUARED
#define SQUARED 0
#endif
#ifndef FAST
#define FAST 0
#endif

constexpr int LANES = 32;

// 16 elements of float16, at most 7 in size before the scaling by 2^-14: the conversion errs by 2^-9 each, and adding
// four distances of at most 1, two sums of two first, by 2^-10 a chain. The remainder covers float32.
constexpr float ABSOLUTE_ERROR = 16 * 0.001953125f + 4 * 0.0009765625f + 0.001f;
// The same for squares, by Cauchy and Schwarz: 2 sqrt(16) 2^-9 sqrt(E) + 16 * 2^-18, and sqrt(E) <= (1 + E) / 2.
// Summing errs by 2^-11 of the sum each of the five times a value passes through it.
constexpr float SQUARED_ERROR = 0.0085f, SQUARED_SLOPE = 0.0079f + 5 * 0.00048828125f;

__device__ __forceinline__ __half2 halves(uint32_t word) { return *reinterpret_cast<__half2*>(&word); }

// Eight words of two elements each: x * e * 2^-14 + half a step, as float16 bits. Adding 0 turns -0 into 0.
struct Counted {
    uint32_t sum[8];
    float error;
};

__device__ __forceinline__ float error_of(const __half2 (&d)[8]) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
#if SQUARED
        __half2 t[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) t[j] = __hmul2(d[i + j], __float2half2_rn(16384.f));
        __half2 part = __hmul2(t[0], t[0]);
#pragma unroll
        for (int j = 1; j < 4; ++j) part = __hfma2(t[j], t[j], part);
#else
        __half2 part = __hadd2(__hadd2(__habs2(d[i]), __habs2(d[i + 1])), __hadd2(__habs2(d[i + 2]), __habs2(d[i + 3])));
#endif
        total = i ? total + (__low2float(part) + __high2float(part)) : __low2float(part) + __high2float(part);
    }
    return SQUARED ? total : total * 16384.f;
}

__device__ __forceinline__ Counted evaluate(const float (&x)[16], float encode, uint32_t one) {
    Counted result;
    __half2 d[8];
    const float scaled = encode * 6.103515625e-05f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        __half2 y = __floats2half2_rn(fmaf(x[2 * i], scaled, 0.f), fmaf(x[2 * i + 1], scaled, 0.f));
        result.sum[i] = *reinterpret_cast<uint32_t*>(&y) * one + 0x01000100u;
        d[i] = __hsub2(y, halves(result.sum[i] & 0xFE00FE00u));
    }
    result.error = error_of(d);
    return result;
}

// amax / 6 by a product and its correction, rounded like the division where nothing underflows.
__device__ __forceinline__ float sixth_of(float amax) {
    const float guess = amax * (1.f / 6.f);
    return fmaf(fmaf(-6.f, guess, amax), 1.f / 6.f, guess);
}

// Scale and reciprocal of a candidate. The reciprocal may be off by a few units of the last place: that moves no element
// across a middle that half precision can see, and the doubt covers what it does to the sums.
struct Scaled {
    float encode, d8;
};

__device__ __forceinline__ Scaled scale_of(float d, const GlobalScale& global) {
    const float d8 = fp4::round_e4m3(fminf(d, 448.f));
    return {approximate_reciprocal(d8 * global.decode), d8};
}

// Four words of float16 bits, three of a magnitude above the ninth, as eight codes.
__device__ __forceinline__ uint32_t codes_of_sums(const uint32_t* sum) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t code = (sum[i] & 0x0E000E00u) * 8u + (sum[i] & 0x80008000u);  // on top of each half
        pair[i] = code * 4097u;                                                     // both in the highest byte
    }
    return __byte_perm(__byte_perm(pair[0], pair[1], 0x0073), __byte_perm(pair[2], pair[3], 0x0073), 0x5410);
}

struct Quick {
    Packed packed;
    bool sure;
};

// limit: 6.9, or 0 where the global scale is not ordinary. An element that is at most 6.9 times to_six.d8 is also at most
// 6.9 times to_four.d8: both saturate alike, and E4M3's rounding adds at most a half to 4.
__device__ __forceinline__ Quick pack(const Group& group, const GlobalScale& global, float limit, uint32_t one) {
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const float b = sixth_of(largest) * global.scale;
    const Scaled to_six = scale_of(b, global), to_four = scale_of(b * 1.5f, global);
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    const Counted six = evaluate(v, to_six.encode, one), four = evaluate(v, to_four.encode, one);
#if SQUARED
    const float six_unit = to_six.d8 * to_six.d8, four_unit = to_four.d8 * to_four.d8;
    const float doubt = fmaf(fmaf(SQUARED_SLOPE, six.error, SQUARED_ERROR), six_unit,
                             fmaf(SQUARED_SLOPE, four.error, SQUARED_ERROR) * four_unit);
#else
    const float six_unit = to_six.d8, four_unit = to_four.d8, doubt = ABSOLUTE_ERROR * (six_unit + four_unit);
#endif
    const float difference = fmaf(four.error, four_unit, -(six.error * six_unit));
    const bool use_four = difference < 0.f;
    uint32_t sum[8], middle = 0xFFFFFFFFu;  // zero in a half: an element in the middle of two values
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum[i] = use_four ? four.sum[i] : six.sum[i];
        middle = __vminu2(middle, sum[i] & 0x01FF01FFu);
    }
    const bool clear = (middle & 0xFFFFu) != 0u && middle > 0xFFFFu && fabsf(difference) > doubt;
    const bool ordinary = largest * to_six.encode < limit && to_four.encode >= SMALLEST_ENCODE;
    return {{make_uint2(codes_of_sums(sum), codes_of_sums(sum + 4)), use_four ? to_four.d8 : to_six.d8}, clear && ordinary};
}

// The sum of errors of a candidate as the contract takes it, for an ordinary group.
__device__ __forceinline__ float exact_error(const float (&x)[16], const BlockScale& block, const GlobalScale& global) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float u = fabsf(x[i]) * block.encode, rounder = fp4::rounder_of(u);
        const float q = fmaf(rounder, -4194304.f, fmaf(rounder, 4194304.f, u));
#if FAST
        const float difference = fmaf(q, block.d8, -(fabsf(x[i]) * global.scale));
#else
        const float difference = fp4::divide_by_range((q * block.d8) * global.amax, global) - fabsf(x[i]);
#endif
        const float term = SQUARED ? difference * difference : fabsf(difference);
        total = i ? total + term : term;
    }
    return total;
}

__device__ __forceinline__ Packed decide(const uint4* first, const uint4* second, const GlobalScale* shared) {
    const Group group = {*first, *second};
    const GlobalScale global = *shared;
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const float b = sixth_of(largest) * global.scale;
    const BlockScale six = light_scale(b, global), four = light_scale(b * 1.5f, global);
    if (!is_ordinary(global) || !is_ordinary(six, largest) || !is_ordinary(four, largest))
        return with_care<true, SQUARED, FAST>(first, second, shared);
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    const BlockScale better = exact_error(v, four, global) < exact_error(v, six, global) ? four : six;
    return {encode(w, v, better.encode), better.d8};
}

// Groups that wait for their warp to decide them, with what was stored for them already.
struct Queue {
    uint4 first[2 * LANES], second[2 * LANES];
    uint2 codes[2 * LANES];
    long long place[2 * LANES];  // the number of the group, above it the scale
};
constexpr int SCALE_AT = 56;

// Most guesses were right, and writing a part of a sector that has left the cache means to read it again.
__device__ __noinline__ void settle(
    const Queue& queue, int i, const GlobalScale* shared, uint2* codes, uint8_t* scales) {
    const Packed packed = decide(&queue.first[i], &queue.second[i], shared);
    const uint2 guess = queue.codes[i];
    const uint8_t scale = uint8_t(fp4::encode_e4m3(packed.d8));
    const long long group = queue.place[i] & ((1LL << SCALE_AT) - 1);
    if (packed.codes.x != guess.x || packed.codes.y != guess.y) codes[group] = packed.codes;
    if (scale != uint8_t(queue.place[i] >> SCALE_AT)) scales[group] = scale;
}

extern "C" __global__ void __launch_bounds__(256, FAST ? 4 : 3) pack_rows_4o6(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups) {
    __shared__ GlobalScale shared;
    __shared__ uint32_t known_later;  // a product by 1 moves an addition to the pipe that is idle, unless the compiler sees it
    __shared__ Queue queues[256 / LANES];
    const long long stride = (long long)gridDim.x * 256;
    const int lane = threadIdx.x % LANES;
    Queue& queue = queues[threadIdx.x / LANES];
    long long group = (long long)blockIdx.x * 256 + threadIdx.x;
    Group words = load(x, group, groups);
    if (threadIdx.x == 0) {
        shared = fp4::global_scale<E>(*amax);
        known_later = 1u;
    }
    __syncthreads();
    const GlobalScale global = shared;
    const float limit = is_ordinary(global) ? 6.9f : 0.f;
    const uint32_t one = known_later;
    int waiting = 0;
    for (; group - lane < groups; group += stride) {  // a warp stays together
        const Group next = load(x, group + stride, groups);
        const Quick quick = pack(words, global, limit, one);
        const uint32_t scale = __float_as_uint(quick.packed.d8 * 7.52316384526264e-37f) >> 20;  // as encode_e4m3
        if (group < groups) {
            codes[group] = quick.packed.codes;
            scales[group] = uint8_t(scale);
        }
        const uint32_t unsure = __ballot_sync(0xFFFFFFFFu, group < groups && !quick.sure);
        if (unsure >> lane & 1u) {
            const int i = waiting + __popc(unsure & ((1u << lane) - 1u));
            queue.first[i] = words.first, queue.second[i] = words.second;
            queue.codes[i] = quick.packed.codes;
            queue.place[i] = group | (long long)(scale & 0xFFu) << SCALE_AT;
        }
        waiting += __popc(unsure);
        if (waiting >= LANES) {
            __syncwarp();
            waiting -= LANES;
            settle(queue, waiting + lane, &shared, codes, scales);
            __syncwarp();
        }
        words = next;
    }
    __syncwarp();
    if (lane < waiting) settle(queue, lane, &shared, codes, scales);
}
