// Where a kernel on channels_last feature maps writes its result: as codes and scales, as DTYPE values, as both or not at
// all (null pointers).
#pragma once
#include "channels.cuh"

struct Target {
    uint32_t* codes;
    uint8_t* scales;
    DTYPE* values;

    // Eight channels starting at element `at`. All threads of a warp call this (shuffles); `has` says which of them
    // write.
    __device__ __forceinline__ void put(
        const float (&v)[channels::VECTOR], const fp4::GlobalScale& global, long long at, bool has) const {
        if (values && has) channels::store(values + at, v);
        if (!codes) return;
        const fp4::BlockScale block = fp4::block_scale(channels::block_amax(v), global);
        float scaled[channels::VECTOR];
#pragma unroll
        for (int i = 0; i < channels::VECTOR; ++i) scaled[i] = v[i] * block.encode;
        uint32_t packed = fp4::encode_eight(scaled);
        if (block.encode != block.encode) packed = 0u;  // a block with NaN or Inf: codes 0, scale NaN
        if (!has) return;
        const auto place = (unsigned long long)at;  // divided by a shift
        codes[place / channels::VECTOR] = packed;
        // Two adjacent lanes have a block; one of them writes its scale.
        if (threadIdx.x % 2 == 0) scales[place / fp4::GROUP] = uint8_t(fp4::encode_e4m3(block.d8));
    }
    __device__ __forceinline__ fp4::GlobalScale global(const float* amax) const {
        return codes ? fp4::global_scale(*amax) : fp4::GlobalScale{};
    }
};
