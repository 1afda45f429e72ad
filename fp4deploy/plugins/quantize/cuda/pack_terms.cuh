// A pixel of an image as a block of its operand: the FP4 terms of its colours, 8 bytes of codes and a scale. Channels 13
// to 15 are zeros.
#pragma once
#include "fp4.cuh"
#include "input_encoding.cuh"

namespace input_encoding {

// Of every block whose colours are finite: its largest number is the constant, since no term is above 4.
struct Scale {
    float encode;
    uint8_t byte;
};

// Computed once for a thread block: all of its threads call this.
__device__ __forceinline__ const Scale& shared_scale(const float* amax) {
    __shared__ Scale shared;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        const fp4::BlockScale block = fp4::block_scale(CONSTANT, fp4::global_scale(*amax));
        shared = {block.encode, uint8_t(fp4::encode_e4m3(block.d8))};
    }
    __syncthreads();
    return shared;
}

__device__ __forceinline__ void pack(const float (&colours)[COLOURS], const Scale& block, uint2* codes, uint8_t* scale) {
    float v[fp4::GROUP] = {}, total = 0.f;
#pragma unroll
    for (int c = 0; c < COLOURS; ++c) {
        float term[TERMS];
        total += terms_of(colours[c], term);
#pragma unroll
        for (int i = 0; i < TERMS; ++i) v[COLOURS * i + c] = term[i];
    }
    v[CHANNELS - 1] = constant_of(total);
    const bool finite = v[CHANNELS - 1] == CONSTANT;
#pragma unroll
    for (int i = 0; i < fp4::GROUP; ++i) v[i] *= block.encode;
    const uint2 packed = make_uint2(fp4::encode_eight(v), fp4::encode_eight(v + fp4::GROUP / 2));
    *codes = finite ? packed : make_uint2(0u, 0u);  // NaN or Inf: codes 0, scale NaN
    *scale = finite ? block.byte : uint8_t(0x7F);
}

}  // namespace input_encoding
