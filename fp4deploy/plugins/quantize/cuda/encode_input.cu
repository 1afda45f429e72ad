// The first operand of a network that reads its image as FP4 terms, codes and scales, from the image in one pass.
//
// Macros: VALUE, of the image: float or __half.
// x: VALUE [N, 3, P]; amax float32 [1]; codes: 8 bytes a pixel, [N, P, 16 channels]; scales uint8 [N, P]; P: pixels of an
//   item; count: of all. Channels 13 to 15 are zeros.
// Launch: block 256, grid ceil(count / 256), one pixel a thread.
#include "pack_target.cuh"
#include "input_encoding.cuh"

#ifndef VALUE
#define VALUE float
#endif

using namespace input_encoding;

extern "C" __global__ void __launch_bounds__(256) encode_input(
    const VALUE* x, const float* amax, uint2* codes, uint8_t* scales, long long P, long long count) {
    const long long number = (long long)blockIdx.x * 256 + threadIdx.x, item = number / P;
    begin_after_primary();
    __shared__ fp4::GlobalScale shared;
    if (threadIdx.x == 0) shared = fp4::global_scale(*amax);
    __syncthreads();
    if (number >= count) return;
    const VALUE* const colours = x + item * COLOURS * P + (number - item * P);
    float v[fp4::GROUP] = {}, total = 0.f;
#pragma unroll
    for (int c = 0; c < COLOURS; ++c) {
        float term[TERMS];
        total += terms_of(widen(colours[c * P]), term);
#pragma unroll
        for (int i = 0; i < TERMS; ++i) v[COLOURS * i + c] = term[i];
    }
    v[CHANNELS - 1] = constant_of(total);
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) largest = fp4::nan_max(largest, fabsf(v[i]));
    const fp4::BlockScale block = fp4::block_scale(largest, shared);
#pragma unroll
    for (int i = 0; i < fp4::GROUP; ++i) v[i] *= block.encode;
    const uint2 packed = make_uint2(fp4::encode_eight(v), fp4::encode_eight(v + fp4::GROUP / 2));
    codes[number] = block.encode == block.encode ? packed : make_uint2(0u, 0u);  // NaN or Inf: codes 0, scale NaN
    scales[number] = uint8_t(fp4::encode_e4m3(block.d8));
}
