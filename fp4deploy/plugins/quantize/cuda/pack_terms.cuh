// A pixel of an image as a block of its operand: the FP4 terms of its colours, 8 bytes of codes and a scale. Channels 13
// to 15 are zeros.
#pragma once
#include "fp4.cuh"
#include "input_encoding.cuh"

namespace input_encoding {

// What an amax makes of a block's largest number, computed once for a thread block: all of its threads call this.
__device__ __forceinline__ const fp4::GlobalScale& shared_scale(const float* amax) {
    __shared__ fp4::GlobalScale shared;
    if (threadIdx.x == 0 && threadIdx.y == 0) shared = fp4::global_scale(*amax);
    __syncthreads();
    return shared;
}

__device__ __forceinline__ void pack(
    const float (&colours)[COLOURS], const fp4::GlobalScale& global, uint2* codes, uint8_t* scale) {
    float v[fp4::GROUP] = {}, total = 0.f;
#pragma unroll
    for (int c = 0; c < COLOURS; ++c) {
        float term[TERMS];
        total += terms_of(colours[c], term);
#pragma unroll
        for (int i = 0; i < TERMS; ++i) v[COLOURS * i + c] = term[i];
    }
    v[CHANNELS - 1] = constant_of(total);
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) largest = fp4::nan_max(largest, fabsf(v[i]));
    const fp4::BlockScale block = fp4::block_scale(largest, global);
#pragma unroll
    for (int i = 0; i < fp4::GROUP; ++i) v[i] *= block.encode;
    const uint2 packed = make_uint2(fp4::encode_eight(v), fp4::encode_eight(v + fp4::GROUP / 2));
    *codes = block.encode == block.encode ? packed : make_uint2(0u, 0u);  // NaN or Inf: codes 0, scale NaN
    *scale = uint8_t(fp4::encode_e4m3(block.d8));
}

}  // namespace input_encoding
