// NVFP4 in 16 x 16 blocks over two axes of a tensor, so that a matrix and its transpose are quantised to the same
// values.
//
// The tensor is (A, B, R, K) by sizes and strides, K the contraction axis, R the other axis of the tiles. A thread has
// the sixteen elements of a row of a tile, along K in order. The errors of 4/6 are added over the rows as a tree.
//
// Macros: DTYPE; ALONG: elements are adjacent along K, so that adjacent lanes have adjacent tiles, and a block 16 of
//   them (else adjacent lanes have the rows of one); FORMAT 0 NVFP4, 1 with 4/6; E; SQUARED, FAST; STOCHASTIC; PACKED 0
//   or 1; IN_RANGE as in quantize.cu, but in_range: bool with the strides of x.
// Arguments: x; amax float32 [1]; random uint64 {seed, offset}; out DTYPE with the strides of x, or codes uint8
//   [A, B, R, 8 G]; scales uint8 [A, B, R, G], G = ceil(K / 16); in_range; sizes and strides.
// Launch: block 256, which has 16 tiles of A B ceil(R / 16) rows of G; with ALONG each row has whole blocks.
#include "channels.cuh"

#if ALONG
// Of the sixteen rows of a tile, of which a warp has two, eight apart; `rows` is of this call alone.
template <typename Join> __device__ __forceinline__ float over_rows(float value, float (&rows)[8][16], Join join) {
    value = join(value, __shfl_xor_sync(0xffffffffu, value, 16));
    const int warp = threadIdx.x / 32, tile = threadIdx.x % 16;
    if (threadIdx.x % 32 < 16) rows[warp][tile] = value;
    __syncthreads();
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = rows[i][tile];
#pragma unroll
    for (int half = 4; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) v[i] = join(v[i], v[i + half]);
    return v[0];
}
#else
template <typename Join> __device__ __forceinline__ float over_rows(float value, float (&)[8][16], Join join) {
    for (int offset = 8; offset; offset /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}
#endif

extern "C" __global__ void __launch_bounds__(256) quantize_tiles(
    const DTYPE* x, const float* amax, const uint64_t* random, void* out, uint8_t* scales, bool* in_range, long long A,
    long long B, long long R, long long K, long long stride_a, long long stride_b, long long stride_r,
    long long stride_k) {
    const long long groups = (K + 15) / 16;
    // Tiles are fewer than 2^32, so that divisions have 32 bits; a matrix needs one.
    const uint32_t tile_rows = uint32_t((R + 15) / 16), planes = uint32_t(A * B);
#if ALONG
    const uint32_t chunks = uint32_t((groups + 15) / 16), above = blockIdx.x / chunks;
    const long long g = (long long)(blockIdx.x - above * chunks) * 16 + threadIdx.x % 16;
    const int row_of_tile = threadIdx.x / 32 + threadIdx.x % 32 / 16 * 8;
#else
    const uint32_t tile = blockIdx.x * 16u + threadIdx.x / 16u, above = tile / uint32_t(groups);
    const long long g = tile - above * uint32_t(groups);
    const int row_of_tile = threadIdx.x % 16;
#endif
    const uint32_t plane = planes > 1 ? above / tile_rows : 0u, a = B > 1 ? plane / uint32_t(B) : plane;
    const long long r = (long long)(above - plane * tile_rows) * 16 + row_of_tile;
    const bool has = r < R && g < groups && above < planes * tile_rows;
    const long long base = a * stride_a + (plane - a * uint32_t(B)) * stride_b + r * stride_r + g * 16 * stride_k;
    const int elements = has ? int(min(16LL, K - g * 16)) : 0;
    const uint64_t places = reinterpret_cast<uint64_t>(x) | reinterpret_cast<uint64_t>(out) | reinterpret_cast<uint64_t>(in_range);
    const bool words = ALONG && K % 16 == 0 && ((places | stride_a | stride_b | stride_r) & 15) == 0;
    __shared__ fp4::GlobalScale global_scale;
    __shared__ float rows[FORMAT == 1 ? 3 : 1][8][16];
    if (threadIdx.x == 0) global_scale = fp4::global_scale<E>(*amax);
#if STOCHASTIC
    __shared__ fp4::SharedPhilox philox;
    philox.set(random);
#endif
    float v[16], largest = 0.f;
    if (words && has) {
        channels::load(x + base, channels::halves(v)[0]);
        channels::load(x + base + 8, channels::halves(v)[1]);
    } else {
        channels::gather(x + base, stride_k, elements, v);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fp4::nan_max(largest, fabsf(v[i]));
    __syncthreads();
    const fp4::GlobalScale global = global_scale;
    largest = over_rows(largest, rows[0], [](float a, float b) { return fp4::nan_max(a, b); });
#if FORMAT == 1
    const auto sum = [](float a, float b) { return a + b; };
    const fp4::Candidates candidates = fp4::four_over_six(largest, global);
    const float six = over_rows(fp4::row_error<SQUARED, FAST>(v, candidates.six, global), rows[1], sum);
    const float four = over_rows(fp4::row_error<SQUARED, FAST>(v, candidates.four, global), rows[2], sum);
    const fp4::BlockScale block = four < six ? candidates.four : candidates.six;
#else
    const fp4::BlockScale block = fp4::block_scale(largest, global);
#endif
    if (!has) return;  // only now: the shuffles above need all lanes
    const long long row = plane * R + r;
#if STOCHASTIC
    const fp4::Words words_of_row = philox.words(uint64_t(row) * groups + g);
#endif
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= block.encode;
#if IN_RANGE
    union {
        uint4 word;
        bool each[16];
    } inside;
#pragma unroll
    for (int i = 0; i < 16; ++i) inside.each[i] = fabsf(v[i]) <= 6.f;
    if (words) {
        *reinterpret_cast<uint4*>(in_range + base) = inside.word;
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < elements) in_range[base + i * stride_k] = inside.each[i];
    }
#endif
#if PACKED
#if STOCHASTIC
    uint2 packed = {fp4::encode_eight(v, words_of_row.w), fp4::encode_eight(v + 8, words_of_row.w + 2)};
#else
    uint2 packed = {fp4::encode_eight(v), fp4::encode_eight(v + 8)};
#endif
    if (block.encode != block.encode) packed = {0u, 0u};  // a block with NaN or Inf: codes 0, scale NaN
    static_cast<uint2*>(out)[row * groups + g] = packed;
    scales[row * groups + g] = uint8_t(fp4::encode_e4m3(block.d8));
#else
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#if STOCHASTIC
        v[i] = block.step * fp4::round_e2m1(v[i], fp4::part_of(words_of_row, i));
#else
        v[i] = block.step * fp4::round_e2m1(v[i]);
#endif
    }
    DTYPE* target = static_cast<DTYPE*>(out) + base;
    if (words) {
        channels::store(target, channels::halves(v)[0]);
        channels::store(target + 8, channels::halves(v)[1]);
    } else {
        channels::scatter(target, stride_k, elements, v);
    }
#endif
}
