// The first operand of a network that reads its image as FP4 terms, codes and scales, from the image in one pass.
//
// Macros: VALUE, of the image: float or __half.
// x: VALUE [N, 3, P]; amax float32 [1]; codes: 8 bytes a pixel, [N, P, 16 channels]; scales uint8 [N, P]; P: pixels of an
//   item; count: of all.
// Launch: block 256, grid ceil(count / 256), one pixel a thread.
#include "dependent_launch.cuh"
#include "pack_terms.cuh"
#include "scalars.cuh"

#ifndef VALUE
#define VALUE float
#endif

using namespace input_encoding;

extern "C" __global__ void __launch_bounds__(256) encode_input(
    const VALUE* x, const float* amax, uint2* codes, uint8_t* scales, long long P, long long count) {
    const long long number = (long long)blockIdx.x * 256 + threadIdx.x, item = number / P;
    begin_after_primary();
    const Scale& block = shared_scale(amax);
    if (number >= count) return;
    const VALUE* const planes = x + item * COLOURS * P + (number - item * P);
    float colours[COLOURS];
#pragma unroll
    for (int c = 0; c < COLOURS; ++c) colours[c] = widen(planes[c * P]);
    pack(colours, block, codes + number, scales + number);
}
