// Packing the channels of pixels that are computed in registers, with the arithmetic of `rows.cuh`: a thread has a whole group.
//
// A kernel on channels_last feature maps has eight channels a lane, so that two adjacent lanes hold a group. They take two
// pixels at a time and exchange halves: the even lane packs the group of the first pixel, the odd lane that of the second.
// A scale is then computed once a group instead of in both lanes.
#pragma once
#include "pack_target.cuh"
#include "rows.cuh"

using channels::VECTOR;
using channels::Walk;

static __device__ __noinline__ Packed any_group(const Group group, const GlobalScale* shared) {
    return each_element<false, false, false>(group, *shared);
}

__device__ __forceinline__ Packed pack_group(const Group& group, const GlobalScale* shared) {
#ifdef FP4_HARDWARE_CODES  // conversion in hardware instead of `encode`
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const BlockScale block = fp4::block_scale(largest_of(w), *shared);
    float scaled[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        widen(w[i], scaled[2 * i], scaled[2 * i + 1], tag);
        scaled[2 * i] *= block.encode, scaled[2 * i + 1] *= block.encode;
    }
    const uint2 codes = make_uint2(fp4::encode_eight(scaled), fp4::encode_eight(scaled + 8));
    return {block.encode == block.encode ? codes : make_uint2(0u, 0u), block.d8};
#else
    return pack(group, *shared, [&] { return any_group(group, shared); });
#endif
}

// The global scale of a target, computed once a block. Every thread calls this, before a barrier.
__device__ __forceinline__ void share_scale(const Target& target, const float* amax, GlobalScale* shared) {
    if (threadIdx.x == 0) *shared = target.global(amax);
}

// Writes eight channels of two pixels, at elements first_at and second_at. All threads of a warp call this.
__device__ __forceinline__ void put_two(
    const Target& target, const GlobalScale* shared, const float (&first)[VECTOR], long long first_at, bool has_first,
    const float (&second)[VECTOR], long long second_at, bool has_second) {
    const uint4 one = channels::narrowed<DTYPE>(first), two = channels::narrowed<DTYPE>(second);
    if (target.values) {
        if (has_first) *reinterpret_cast<uint4*>(target.values + first_at) = one;
        if (has_second) *reinterpret_cast<uint4*>(target.values + second_at) = two;
    }
    if (!target.codes) return;
    const bool odd = threadIdx.x % 2;
    const uint4 kept = odd ? two : one, sent = odd ? one : two;
    uint4 got;
    got.x = __shfl_xor_sync(0xffffffffu, sent.x, 1), got.y = __shfl_xor_sync(0xffffffffu, sent.y, 1);
    got.z = __shfl_xor_sync(0xffffffffu, sent.z, 1), got.w = __shfl_xor_sync(0xffffffffu, sent.w, 1);
    if (!(odd ? has_second : has_first)) return;
    const Packed packed = pack_group(odd ? Group{got, kept} : Group{kept, got}, shared);
    const long long group = (odd ? second_at : first_at) / fp4::GROUP;
    reinterpret_cast<uint2*>(target.codes)[group] = packed.codes;
    target.scales[group] = uint8_t(fp4::encode_e4m3(packed.d8));
}

// Where 2 x 2 pooling writes: in full resolution and pooled, with the global scales of both (a pair in shared memory).
struct PooledTargets {
    Target full, pooled;

    __device__ __forceinline__ void share_scales(const float* amax, const float* pooled_amax, GlobalScale* shared) const {
        share_scale(full, amax, shared);
        share_scale(pooled, pooled_amax, shared + 1);
        __syncthreads();
    }
    // Every pooled pixel of `walk`, of W a row, and its four inputs; join(best, v, line) takes the pixels of a line in.
    template <typename Values, typename Join>
    __device__ __forceinline__ void put(
        const Values& values, const Join& join, const GlobalScale* shared, const Walk& walk, long long pixels, int W, int C) const {
        const long long out = (long long)blockIdx.y * pixels * C + walk.channel, item = 4 * out - 3 * walk.channel;
        for (int trip = 0; trip < walk.trips; ++trip) {
            const bool has = walk.has(trip);
            const long long pixel = has ? walk.pixel(trip) : 0, row = pixel / W, column = pixel - row * W;
            const long long corner = item + (row * 4 * W + column * 2) * C;
            typename Values::Raw raw[4] = {};
#pragma unroll
            for (int tap = 0; tap < 4; ++tap)
                if (has) raw[tap] = values.fetch(corner + ((tap >> 1) * 2 * W + (tap & 1)) * (long long)C);
            float best[VECTOR];
#pragma unroll
            for (int line = 0; line < 2; ++line) {
                const long long at = corner + line * 2 * W * (long long)C;
                float v[2][VECTOR];
                values(raw[2 * line], v[0]), values(raw[2 * line + 1], v[1]);
                put_two(full, shared, v[0], at, has, v[1], at + C, has);
                join(best, v, line);
            }
            pooled.put(best, shared[1], out + pixel * C, has);
        }
    }
};

// Every pixel of `walk`, from element `item` on, two at a time. `values.fetch(at)` loads what eight channels at an element
// are computed from, and values(raw, v) computes them. The loads of two pixels are in flight while the two before are packed.
template <typename Values>
__device__ __forceinline__ void put_pixels(
    const Values& values, const Target& target, const GlobalScale* shared, const Walk& walk, long long item, int C) {
    using Raw = typename Values::Raw;
    Raw next[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (walk.has(i)) next[i] = values.fetch(item + walk.pixel(i) * C);
    for (int trip = 0; trip < walk.trips; trip += 2) {
        const Raw raw[2] = {next[0], next[1]};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (walk.has(trip + 2 + i)) next[i] = values.fetch(item + walk.pixel(trip + 2 + i) * C);
        float v[2][VECTOR];
        values(raw[0], v[0]), values(raw[1], v[1]);
        const long long at = item + walk.pixel(trip) * C;
        put_two(target, shared, v[0], at, walk.has(trip), v[1], at + (long long)walk.rows * C, walk.has(trip + 1));
    }
}
