// Packs matrices to NVFP4 in 16 x 16 blocks, bound by memory bandwidth (see rows.cuh; quantize_tile.cu has everything else).
//
// A thread has eight adjacent elements of the sixteen rows of a tile, two adjacent lanes a tile: all loads are of 16 bytes,
// sixteen of them are in flight, and a scale is computed once for 128 elements.
//
// Macros: DTYPE __half or __nv_bfloat16; E.
// x: DTYPE [planes, rows, K], K whole blocks, 16-byte aligned; amax float32 [1]; codes uint8 [planes, rows, K / 2]; scales
//   uint8 [planes, rows, K / 16]; vectors: K / 8; tiles: planes * ceil(rows / 16). Fewer than 2^31 threads.
// Launch: block 128, grid ceil(tiles * vectors / 128).
#include "rows.cuh"

constexpr int SIDE = 16;

__device__ __forceinline__ uint32_t codes_of(const uint4& raw, float half_encode) {
    const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
    constexpr DTYPE* tag = nullptr;
    uint32_t signs[4];
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        widen(w[i], v[2 * i], v[2 * i + 1], tag);
        signs[i] = without_negative_zero(w[i], tag);
    }
    return codes_of(v, half_encode, signs_of(signs));
}

// A tile that is not ordinary, element by element: writes the codes of this thread and returns the scale. Read again and not
// inlined, so that the others do not keep registers for it.
__device__ __noinline__ float with_care(
    const uint4* x, uint32_t* codes, int rows, uint32_t vectors, float largest, const GlobalScale* shared) {
    const BlockScale block = fp4::block_scale(largest, *shared);
    for (int row = 0; row < rows; ++row) {
        const uint4 raw = x[row * (size_t)vectors];
        const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
        uint32_t packed = 0u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low, high;
            widen(w[i], low, high, static_cast<DTYPE*>(nullptr));
            packed += fp4::encode_nearest(low * block.encode) << (8 * i);
            packed += fp4::encode_nearest(high * block.encode) << (8 * i + 4);
        }
        codes[row * (size_t)vectors] = block.encode == block.encode ? packed : 0u;
    }
    return block.d8;
}

extern "C" __global__ void __launch_bounds__(128, 4) pack_tiles(
    const uint4* x, const float* amax, uint32_t* codes, uint8_t* scales, int rows, int vectors, int tiles) {
    __shared__ GlobalScale shared;
    const uint32_t thread = blockIdx.x * 128u + threadIdx.x, tile = thread / uint32_t(vectors);
    const uint32_t vector = thread - tile * vectors, high = (rows + SIDE - 1) / SIDE, plane = tile / high;
    const int first = int(tile - plane * high) * SIDE, count = tile < uint32_t(tiles) ? min(rows - first, SIDE) : 0;
    const size_t row = size_t(plane) * rows + first, at = row * vectors + vector;
    x += at;
    uint4 raw[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; ++i) raw[i] = i < count ? x[i * (size_t)vectors] : uint4{};
    if (threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    constexpr DTYPE* tag = nullptr;
    uint32_t most = 0u;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
        most = larger(larger(most, raw[i].x, tag), raw[i].y, tag);
        most = larger(larger(most, raw[i].z, tag), raw[i].w, tag);
    }
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1), tag);
    float low, largest;
    widen(most, low, largest, tag);
    largest = fp4::nan_max(fabsf(low), fabsf(largest));
    __syncthreads();
    if (!count) return;
    const GlobalScale global = shared;
    const BlockScale block = light_scale(largest * global.sixth, global);
    const bool zeros = largest == 0.f;
    float d8 = zeros ? 0.f : block.d8;
    codes += at;
    if (is_ordinary(global) && (zeros || is_ordinary(block, largest))) {
        const float half_encode = zeros ? 0.f : 0.5f * block.encode;
#pragma unroll
        for (int i = 0; i < SIDE; ++i)
            if (i < count) codes[i * (size_t)vectors] = codes_of(raw[i], half_encode);
    } else {
        d8 = with_care(x, codes, count, vectors, largest, &shared);
    }
    // A lane of the two writes the scales of every other row.
    const uint8_t scale = uint8_t(fp4::encode_e4m3(d8));
    const uint32_t groups = vectors / 2;
    scales += row * groups + vector / 2;
#pragma unroll
    for (int i = 0; i < SIDE; i += 2) {
        const int own = i + (vector & 1);
        if (own < count) scales[own * (size_t)groups] = scale;
    }
}
