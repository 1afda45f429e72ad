// Packs matrices to NVFP4 in 16 x 16 blocks, bound by memory bandwidth (see rows.cuh; quantize_tile.cu has everything else).
//
// A thread has eight adjacent elements of the sixteen rows of a tile, two adjacent lanes a tile: all loads are of 16 bytes,
// sixteen of them are in flight, and a scale is computed once for 128 elements.
//
// Macros: DTYPE __half or __nv_bfloat16; E; STOCHASTIC: random uint64 {seed, offset}.
// x: DTYPE [planes, rows, K], K whole blocks, 16-byte aligned; amax float32 [1]; codes uint8 [planes, rows, K / 2]; scales
//   uint8 [planes, rows, K / 16]; vectors: K / 8; tiles: planes * ceil(rows / 16). Fewer than 2^31 threads.
// Launch: block 128, grid ceil(tiles * vectors / 128).
#include "rows.cuh"

constexpr int SIDE = 16;

// The random words of this lane's elements in an even row and the next one. Of the two lanes of a tile each draws for one of
// both rows, all four words, and gives the other lane its two.
__device__ __forceinline__ void words_of(uint32_t (&out)[2][2], const fp4::Words& own, bool odd) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t kept = odd ? own.w[2 + i] : own.w[i], other = odd ? own.w[i] : own.w[2 + i];
        const uint32_t got = __shfl_xor_sync(0xffffffffu, other, 1);
        out[0][i] = odd ? got : kept, out[1][i] = odd ? kept : got;
    }
}

__device__ __forceinline__ uint32_t codes_of(const uint4& raw, float encode, const uint32_t* random) {
    const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
    constexpr DTYPE* tag = nullptr;
    uint32_t signs[4];
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        widen(w[i], v[2 * i], v[2 * i + 1], tag);
        signs[i] = STOCHASTIC ? 0u : without_negative_zero(w[i], tag);
    }
    return STOCHASTIC ? codes_of(w, v, encode * fp4::COUNTED, random) : codes_of(v, 0.5f * encode, signs_of(signs));
}

// A tile that is not ordinary, element by element: writes the codes of this thread and returns the scale. Read again and not
// inlined, so that the others do not keep registers for it. group: where its first row has its random bytes.
__device__ __noinline__ float with_care(
    const uint4* x, uint32_t* codes, int rows, uint32_t vectors, float largest, const GlobalScale* shared,
    const fp4::SharedPhilox* philox, uint64_t group) {
    const BlockScale block = fp4::block_scale(largest, *shared);
    for (int row = 0; row < rows; ++row) {
        const uint4 raw = x[row * (size_t)vectors];
        const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) widen(w[i], v[2 * i], v[2 * i + 1], static_cast<DTYPE*>(nullptr));
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= block.encode;
        uint32_t packed;
        if (STOCHASTIC) {
            const fp4::Words words = philox->words(group + row * uint64_t(vectors / 2));
            const uint32_t random[2] = {threadIdx.x & 1 ? words.w[2] : words.w[0], threadIdx.x & 1 ? words.w[3] : words.w[1]};
            packed = fp4::encode_eight(v, random);
        } else {
            packed = fp4::encode_eight(v);
        }
        codes[row * (size_t)vectors] = block.encode == block.encode ? packed : 0u;
    }
    return block.d8;
}

extern "C" __global__ void __launch_bounds__(128, 4) pack_tiles(
    const uint4* x, const float* amax, const uint64_t* random, uint32_t* codes, uint8_t* scales, int rows, int vectors,
    int tiles) {
    __shared__ GlobalScale shared;
    __shared__ fp4::SharedPhilox philox;
    const uint32_t thread = blockIdx.x * 128u + threadIdx.x, tile = thread / uint32_t(vectors);
    const uint32_t vector = thread - tile * vectors, high = (rows + SIDE - 1) / SIDE, plane = tile / high;
    const int first = int(tile - plane * high) * SIDE, count = tile < uint32_t(tiles) ? min(rows - first, SIDE) : 0;
    const size_t row = size_t(plane) * rows + first, at = row * vectors + vector;
    x += at;
    uint4 raw[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; ++i) raw[i] = i < count ? x[i * (size_t)vectors] : uint4{};
    if (threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    if (STOCHASTIC) philox.set(random);
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
    const GlobalScale global = shared;
    const BlockScale block = light_scale(largest * global.sixth, global);
    const bool zeros = largest == 0.f, ordinary = is_ordinary(global) && (zeros || is_ordinary(block, largest));
    const float encode = zeros ? 0.f : block.encode;
    float d8 = zeros ? 0.f : block.d8;
    const bool odd = vector & 1;
    const uint64_t groups = vectors / 2, group = row * groups + vector / 2;
    codes += at;
#pragma unroll
    for (int i = 0; i < SIDE; i += 2) {
        uint32_t words[2][2];
        if (STOCHASTIC) words_of(words, philox.words(group + (i + odd) * groups), odd);  // all lanes of a warp
        if (ordinary && i < count) codes[i * (size_t)vectors] = codes_of(raw[i], encode, words[0]);
        if (ordinary && i + 1 < count) codes[(i + 1) * (size_t)vectors] = codes_of(raw[i + 1], encode, words[1]);
    }
    if (!ordinary && count) d8 = with_care(x, codes, count, vectors, largest, &shared, &philox, group);
    // A lane of the two writes the scales of every other row.
    const uint8_t scale = uint8_t(fp4::encode_e4m3(d8));
    scales += group;
#pragma unroll
    for (int i = 0; i < SIDE; i += 2) {
        const int own = i + odd;
        if (own < count) scales[own * groups] = scale;
    }
}
