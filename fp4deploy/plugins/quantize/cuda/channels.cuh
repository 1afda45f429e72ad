// Eight consecutive channels of a pixel: the unit of work of all kernels on channels_last feature maps.
//
// A thread keeps its eight channels and walks over pixels. So what belongs to a channel (scales, sums) stays in
// registers, the 16-byte loads of a warp are coalesced, and two adjacent lanes hold one block of 16. The grid is
// (chunks, N): blockIdx.x is the chunk of pixels, blockIdx.y the item of the batch.
#pragma once
#ifndef DTYPE
#define DTYPE __half
#endif
#include <type_traits>

#include "dependent_launch.cuh"
#include "fp4.cuh"
#include "scalars.cuh"

namespace channels {

constexpr int VECTOR = 8;
constexpr int BATCH = 4;  // pixels of a thread whose loads are on their way at once

template <typename T> struct Pair;
template <> struct Pair<__half> {
    using type = __half2;
    static constexpr unsigned INFINITE = 0x7C007C00u;
};
template <> struct Pair<__nv_bfloat16> {
    using type = __nv_bfloat162;
    static constexpr unsigned INFINITE = 0x7F807F80u;
};

template <typename T> __device__ __forceinline__ void widened(uint4 raw, float (&values)[VECTOR]) {
    using P = typename Pair<T>::type;
    const P* pairs = reinterpret_cast<const P*>(&raw);
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
        float2 pair = widen(pairs[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

template <typename T> __device__ __forceinline__ void load(const T* source, float (&values)[VECTOR]) {
    widened<T>(*reinterpret_cast<const uint4*>(source), values);
}

__device__ __forceinline__ void load(const float* source, float (&values)[VECTOR]) {
    float4 low = reinterpret_cast<const float4*>(source)[0], high = reinterpret_cast<const float4*>(source)[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

template <typename T> __device__ __forceinline__ uint4 narrowed(const float (&values)[VECTOR]) {
    using P = typename Pair<T>::type;
    uint4 raw;
    P* pairs = reinterpret_cast<P*>(&raw);
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) narrow(make_float2(values[2 * i], values[2 * i + 1]), pairs[i]);
    return raw;
}

// Rounded to T, as if they had been written: bfloat16 two at a time, because alone it is converted at a quarter of the rate.
// FP16 is not, and a pair takes registers that some kernels do not have.
// values[i] becomes value(i).
template <typename T, int Count, typename Value>
__device__ __forceinline__ void rounded(float (&values)[Count], const Value& value) {
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
        for (int i = 0; i < Count; ++i) values[i] = float(T(value(i)));
    } else {
#pragma unroll
        for (int i = 0; i < Count; i += 2) {
            typename Pair<T>::type pair;
            narrow(make_float2(value(i), value(i + 1)), pair);
            const float2 both = widen(pair);
            values[i] = both.x, values[i + 1] = both.y;
        }
    }
}

template <typename T, int Count> __device__ __forceinline__ void rounded(float (&values)[Count]) {
    rounded<T>(values, [&](int i) { return values[i]; });
}

template <typename T> __device__ __forceinline__ void store(T* target, const float (&values)[VECTOR]) {
    *reinterpret_cast<uint4*>(target) = narrowed<T>(values);
}

__device__ __forceinline__ void store(float* target, const float (&values)[VECTOR]) {
    reinterpret_cast<float4*>(target)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(target)[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// A block of 16 as two vectors.
using Halves = float[2][VECTOR];
__device__ __forceinline__ Halves& halves(float (&block)[2 * VECTOR]) { return reinterpret_cast<Halves&>(block); }

// Those elements of a block of 16 that has(i) says there are, `stride` apart, and zeros; `whole`: all. All loads are under way
// before the first is needed, and pointers advance by bytes, because a 64-bit index an element costs more than what is done
// with it.
template <typename T, typename Has>
__device__ __forceinline__ void gather_if(
    const T* source, long long stride, bool whole, Has has, float (&values)[2 * VECTOR]) {
    const long long step = stride * (long long)sizeof(T);
    const char* place = reinterpret_cast<const char*>(source);
    T raw[2 * VECTOR];
    if (whole) {
#pragma unroll
        for (int i = 0; i < 2 * VECTOR; ++i, place += step) raw[i] = *reinterpret_cast<const T*>(place);
    } else {
#pragma unroll
        for (int i = 0; i < 2 * VECTOR; ++i, place += step) {
            raw[i] = narrow<T>(0.f);
            if (has(i)) raw[i] = *reinterpret_cast<const T*>(place);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * VECTOR; ++i) values[i] = widen(raw[i]);
}

// The first `elements`.
template <typename T>
__device__ __forceinline__ void gather(const T* source, long long stride, int elements, float (&values)[2 * VECTOR]) {
    gather_if(source, stride, elements >= 2 * VECTOR, [&](int i) { return i < elements; }, values);
}

template <typename T>
__device__ __forceinline__ void scatter(T* target, long long stride, int elements, const float (&values)[2 * VECTOR]) {
    const long long step = stride * (long long)sizeof(T);
    char* place = reinterpret_cast<char*>(target);
#pragma unroll
    for (int i = 0; i < 2 * VECTOR; ++i, place += step)
        if (i < elements) *reinterpret_cast<T*>(place) = narrow<T>(values[i]);
}

// Zeros where there is no pixel: a predicated load, no branch, so that several are on their way before the first is needed.
template <typename T> __device__ __forceinline__ uint4 load_if(const T* source, bool has) {
    uint4 raw = {0u, 0u, 0u, 0u};
    if (has) raw = *reinterpret_cast<const uint4*>(source);
    return raw;
}

// The channels of this thread, and its pixels in the chunk.
struct Walk {
    int channel;    // first of the eight
    int row;        // which of the `rows` pixels that a block handles at once
    int rows;
    long long first, last;  // pixels of the chunk
    int trips;      // the same in all threads of the block, because shuffles need all lanes
    int own;        // those in which this thread has a pixel, the first ones
    bool active;

    __device__ Walk(long long pixels, int channels_, long long per_chunk) {
        int lanes = channels_ / VECTOR;
        rows = blockDim.x / lanes;
        row = threadIdx.x / lanes;
        channel = (threadIdx.x % lanes) * VECTOR;
        divide(pixels, per_chunk);
    }
    // Of two maps whose channels follow each other: the threads of the first come before those of the second, so that no
    // warp but one does the work of both.
    __device__ Walk(long long pixels, int first_channels, int second_channels, long long per_chunk) {
        const int lanes = first_channels / VECTOR, others = second_channels / VECTOR;
        rows = blockDim.x / (lanes + others);
        const int thread = threadIdx.x < rows * lanes ? threadIdx.x : threadIdx.x - rows * lanes;
        const bool second = threadIdx.x >= rows * lanes;
        row = thread / (second ? others : lanes);
        channel = second ? first_channels + thread % others * VECTOR : thread % lanes * VECTOR;
        divide(pixels, per_chunk);
    }
    __device__ void divide(long long pixels, long long per_chunk) {
        active = row < rows;
        first = (long long)blockIdx.x * per_chunk;
        last = min(first + per_chunk, pixels);
        const int count = (int)(last - first);
        trips = (count + rows - 1) / rows;
        own = active && row < count ? (count - row + rows - 1) / rows : 0;
    }
    __device__ long long pixel(int trip) const { return first + (long long)trip * rows + row; }
    __device__ bool has(int trip) const { return trip < own; }
};

// Eight channels of one pixel after the other, as a thread walks over a map.
template <typename T> struct Stream {
    T* at;     // in the current pixel
    int step;  // to the next, at most 8 blockDim.x

    // channel: of the map, which has `width` of them.
    __device__ Stream(T* map, const Walk& walk, int width, int channel)
        : at(map + (walk.first + walk.row) * width + channel), step(walk.rows * width) {}
    __device__ T* ahead(int trips) const { return at + trips * step; }
    // The current pixel and those behind it, of this trip of the walk and the next ones.
    template <int Count> __device__ __forceinline__ void fetch(uint4 (&raw)[Count], const Walk& walk, int trip) const {
#pragma unroll
        for (int k = 0; k < Count; ++k) raw[k] = load_if(ahead(k), walk.has(trip + k));
    }
    __device__ void advance(int trips) { at += trips * step; }
};

// relu(scale x + shift) of this thread's channels in the batch item blockIdx.y: what a GroupNorm with ReLU gives.
struct Normalized {
    float scale[VECTOR] = {}, shift[VECTOR] = {};

    __device__ __forceinline__ void load(const float* ab, int channels_, int channel) {  // ab: [N, 2, channels]
        channels::load(ab + blockIdx.y * 2LL * channels_ + channel, scale);
        channels::load(ab + (blockIdx.y * 2LL + 1) * channels_ + channel, shift);
    }
    template <typename T> __device__ __forceinline__ void apply(float (&x)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[i] = fp4::nan_max(__fmaf_rn(scale[i], x[i], shift[i]), 0.f);
        widened<T>(narrowed<T>(x), x);
    }
};

// The largest and the smallest value of each of this thread's channels; NaN does not count.
template <typename T> struct Range {
    static constexpr unsigned TOP = Pair<T>::INFINITE, BOTTOM = TOP | 0x80008000u;
    uint4 high = {BOTTOM, BOTTOM, BOTTOM, BOTTOM}, low = {TOP, TOP, TOP, TOP};

    __device__ __forceinline__ void add(uint4 raw) {
        using P = typename Pair<T>::type;
        const P* values = reinterpret_cast<const P*>(&raw);
        P *highest = reinterpret_cast<P*>(&high), *lowest = reinterpret_cast<P*>(&low);
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i) {
            highest[i] = __hmax2(highest[i], values[i]);
            lowest[i] = __hmin2(lowest[i], values[i]);
        }
    }
};

// x + bias of this thread's channels, where a convolution left out its bias. In T as the convolution adds it: two values of
// T summed in float32 and rounded to T have the bits of one addition in T, since float32 has over twice the digits.
template <typename T> struct Biased {
    uint4 bias = {0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u};  // -0, which changes nothing

    __device__ __forceinline__ void set(const float* source) {  // 16-byte aligned
        float values[VECTOR];
        channels::load(source, values);
        bias = narrowed<T>(values);
    }
    __device__ __forceinline__ void widen(uint4 raw, float (&values)[VECTOR]) const {
        using P = typename Pair<T>::type;
        P* pairs = reinterpret_cast<P*>(&raw);
        const P* added = reinterpret_cast<const P*>(&bias);
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i) pairs[i] = __hadd2(pairs[i], added[i]);
        channels::widened<T>(raw, values);
    }
};

// The largest magnitude of the block of 16 in this lane and its neighbour.
__device__ __forceinline__ float block_amax(const float (&values)[VECTOR]) {
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) amax = fp4::nan_max(amax, fabsf(values[i]));
    return fp4::nan_max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
}

}  // namespace channels
