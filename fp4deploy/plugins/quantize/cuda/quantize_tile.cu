// NVFP4 in 16 x 16 blocks over two axes of a tensor, so that a matrix and its transpose are quantised to the same
// values.
//
// The tensor is (A, B, R, K) by sizes and strides, K the contraction axis, R the other axis of the tiles. Sixteen lanes
// hold a tile, one row each, with its sixteen elements along K in order. The errors of 4/6 are added over the rows as a
// tree.
//
// Macros: DTYPE; FORMAT 0 NVFP4, 1 with 4/6; E; SQUARED, FAST; STOCHASTIC; PACKED 0 or 1; IN_RANGE as in quantize.cu,
//   but in_range: bool with the strides of x.
// Arguments: x; amax float32 [1]; random uint64 {seed, offset}; out DTYPE with the strides of x, or codes uint8
//   [A, B, R, 8 G]; scales uint8 [A, B, R, G], G = ceil(K / 16); in_range; sizes and strides.
// Launch: block 256, grid ceil(tiles * 16 / 256).
#include "fp4.cuh"
#include "scalars.cuh"

__device__ __forceinline__ float tree(float value) {
    for (int offset = 8; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

extern "C" __global__ void __launch_bounds__(256) quantize_tiles(
    const DTYPE* x, const float* amax, const uint64_t* random, void* out, uint8_t* scales, bool* in_range, long long A,
    long long B, long long R, long long K, long long stride_a, long long stride_b, long long stride_r,
    long long stride_k) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, tile = thread / 16;
    long long groups = (K + 15) / 16, tile_rows = (R + 15) / 16;
    bool has = tile < A * B * tile_rows * groups;
    long long g = tile % groups, rest = tile / groups, r = rest % tile_rows * 16 + thread % 16, plane = rest / tile_rows;
    has = has && r < R;
    long long base = plane / B * stride_a + plane % B * stride_b + r * stride_r + g * 16 * stride_k;
    float v[16], largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        v[i] = has && g * 16 + i < K ? widen(x[base + i * stride_k]) : 0.f;
        largest = fp4::nan_max(largest, fabsf(v[i]));
    }
    for (int offset = 8; offset; offset /= 2)
        largest = fp4::nan_max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const fp4::GlobalScale global = fp4::global_scale<E>(*amax);
#if FORMAT == 1
    fp4::Candidates candidates = fp4::four_over_six(largest, global);
    // Sums over the sixteen rows of the tile, in the order of the reference.
    float six = tree(fp4::row_error<SQUARED, FAST>(v, candidates.six, global));
    float four = tree(fp4::row_error<SQUARED, FAST>(v, candidates.four, global));
    const fp4::BlockScale block = four < six ? candidates.four : candidates.six;
#else
    const fp4::BlockScale block = fp4::block_scale(largest, global);
#endif
    if (!has) return;  // only now: the shuffles above need all lanes
    long long row = plane * R + r;
#if STOCHASTIC
    fp4::Words words = fp4::philox(uint64_t(row) * groups + g, random[0], random[1]);
#endif
    uint32_t packed[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float u = v[i] * block.encode;
#if STOCHASTIC
        float q = fp4::round_e2m1(u, fp4::byte_of(words, i));
        packed[i / 8] += fp4::encode_e2m1(q, u) << (4 * (i % 8));
#else
        float q = fp4::round_e2m1(u);
        packed[i / 8] += fp4::encode_nearest(u) << (4 * (i % 8));
#endif
#if !PACKED
        if (g * 16 + i < K) static_cast<DTYPE*>(out)[base + i * stride_k] = DTYPE(block.step * q);
#endif
#if IN_RANGE
        if (g * 16 + i < K) in_range[base + i * stride_k] = fabsf(u) <= 6.f;
#endif
    }
#if PACKED
    if (block.encode != block.encode) packed[0] = packed[1] = 0u;  // a block with NaN or Inf: codes 0, scale NaN
    static_cast<uint2*>(out)[row * groups + g] = make_uint2(packed[0], packed[1]);
    scales[row * groups + g] = uint8_t(fp4::encode_e4m3(block.d8));
#endif
}
