// Direct convolution of packed activations with few channels, for GPUs without FP4 tensor cores (SM80 to SM90).
//
//   out[y, x, n] = round(relu(sum over taps and channels of in[y + ky - padding, x + kx - padding, c] w[n, ky, kx, c]
//                             + bias[n]))
//
// An implicit GEMM reads and decodes a pixel once for every tap. With 16 to 64 channels that, and not the tensor cores,
// takes its time. Here a thread block decodes a tile of the input, with its border, once into shared memory, and every
// tap multiplies from there: mma.m16n8k16 of 16 neighbouring pixels of a row, the same rows of shared memory shifted by
// the tap. Weights (planes of FP16, `decoded.decode_weight`) are read once by a block, which goes over many tiles; the
// codes of the next tile are loaded while this one is multiplied.
//
//   tile            HEIGHT = WARPS ROWS by WIDTH = 32 pixels; a warp has ROWS rows of it
//   shared memory   weights in the order of fragments, then [(HEIGHT + KH - 1)(WIDTH + KW - 1), C] FP16, a multiple of
//                   16 bytes for 8 channels; which one is exchanged by the pixel, so that 8 neighbouring pixels lie in
//                   different banks
//
// Two sources are read as their concatenation, one after the other.
//
// The order of a sum: for each source, tap and block of 16 channels one mma. Within a block of 16, elements are in the
// order in which decoding leaves them, the same for both operands.
//
// With MOMENTS the epilogue also writes mean and squared deviations of each channel over the tile, of the rounded
// values, for a GroupNorm behind (norm_statistics.cu). With `scales` the output is packed: a block of 16 channels lies
// in four adjacent lanes.
//
// Macros: DTYPE of the output; C channels of a source: 16, 32 or 64; SOURCES 1 or 2; KH, KW; OUTPUTS of a block, a
// multiple of 16; ROWS; MOMENTS 0 or 1.
// x, x2: codes uint8 [N, H, W, C / 2]; their scales: E4M3 uint8 [N, H, W, C / 16]; amax: float32 []; w: float16 planes
// [2, rows, K]; bias: float32 [O] or null; out: DTYPE [N, OH, OW, O], or codes; scales: of a packed output, or null;
// moments: float32 [N tiles, 2, 2, O].
// Launch: block 32 WARPS, grid (programs, O / OUTPUTS), shared memory `shared_bytes` of direct.py. A program computes
// tiles blockIdx.x, blockIdx.x + gridDim.x, ...
#include "decode.cuh"
#include "pack_target.cuh"
#include "tensor_core.cuh"

#ifndef C
#define C 16
#endif
#ifndef SOURCES
#define SOURCES 1
#endif
#ifndef KH
#define KH 3
#endif
#ifndef KW
#define KW 3
#endif
#ifndef OUTPUTS
#define OUTPUTS 16
#endif
#ifndef ROWS
#define ROWS 2
#endif
#ifndef MOMENTS
#define MOMENTS 0
#endif

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS, WIDTH = 32, HEIGHT = WARPS * ROWS;
constexpr int BLOCKS = C / 16;                              // of 16 channels, in a pixel of a source
constexpr int BORDERED = WIDTH + KW - 1, PIXELS = (HEIGHT + KH - 1) * BORDERED;
constexpr int LOADS = (PIXELS * BLOCKS + THREADS - 1) / THREADS;  // of a thread
constexpr int GROUPS = OUTPUTS / 16;                        // of 16 columns
constexpr int STEPS = KH * KW * BLOCKS;                     // mma of a source
constexpr int STRIPS = 2 * ROWS;                            // of 16 pixels, of a warp
constexpr int CHUNKS = C / 8;                               // of 16 bytes, in a decoded pixel

// Codes and scales of a tile as they come from memory.
struct Raw {
    uint2 codes[LOADS];
    uint8_t scales[LOADS];
};

struct Source {
    const uint8_t *codes, *scales;
};

// Where 16 bytes of a pixel are: chunk `at` of its channels.
__device__ __forceinline__ int place(int pixel, int at) {
    return pixel * CHUNKS + (at ^ ((pixel / (8 / CHUNKS)) & (CHUNKS - 1)));
}

__device__ __forceinline__ void load_tile(Raw& raw, const Source& source, int top, int left, int H, int W) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int index = i * THREADS + threadIdx.x, pixel = index / BLOCKS, block = index % BLOCKS;
        const int y = top + pixel / BORDERED, x = left + pixel % BORDERED;
        const bool has = pixel < PIXELS && y >= 0 && y < H && x >= 0 && x < W;
        const long long at = has ? ((long long)y * W + x) * BLOCKS + block : 0;
        raw.codes[i] = has ? reinterpret_cast<const uint2*>(source.codes)[at] : make_uint2(0u, 0u);
        raw.scales[i] = has ? source.scales[at] : uint8_t(0);
    }
}

__device__ __forceinline__ void decode_tile(const Raw& raw, uint4* tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int index = i * THREADS + threadIdx.x, pixel = index / BLOCKS, block = index % BLOCKS;
        if (pixel >= PIXELS) continue;
        const __half2 wide = __half2half2(decode_scale(raw.scales[i]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[4];
            spread(half ? raw.codes[i].y : raw.codes[i].x, words);
            uint4 elements;
            elements.x = as_word(__hmul2(as_half2(words[0]), wide));
            elements.y = as_word(__hmul2(as_half2(words[1]), wide));
            elements.z = as_word(__hmul2(as_half2(words[2]), wide));
            elements.w = as_word(__hmul2(as_half2(words[3]), wide));
            tile[place(pixel, 2 * block + half)] = elements;
        }
    }
}

// All weights of this block's columns, as fragments: [source, tap, block of channels, group of 16 columns, lane] has the
// registers b0, b1 of columns 0 to 7 and those of columns 8 to 15. Column n of the eight columns t of a group is output
// 4 (n / 2) + 2 t + n % 2 of it, so that a lane has four neighbouring outputs of a pixel.
//
// A plane has the even or the odd elements of a row of the weight; byte 8 t + 4 a + 2 b + c of each 32 bytes of codes
// has its elements at 16 a + 8 b + 2 t + c.
__device__ void load_weights(const __half* w, long long rows, int K, int first, uint32_t* fragments) {
    constexpr int TAP = 8 * BLOCKS, PADDED = (KH * KW * TAP + 63) / 64 * 64;
    constexpr int WORDS = SOURCES * STEPS * GROUPS * 128;
    for (int index = threadIdx.x; index < WORDS; index += THREADS) {
        const int part = index % 4, lane = index / 4 % 32, group = index / 128 % GROUPS, step = index / (128 * GROUPS);
        const int source = step / STEPS, t = part / 2, a = part % 2, n = lane / 4, q = lane % 4;
        const int byte = 8 * (step % STEPS), column = first + 16 * group + 4 * (n / 2) + 2 * t + n % 2;
        const int at = source * PADDED + byte / 32 * 32 + 16 * a + 8 * (q % 2) + byte % 32 / 8 * 2;
        fragments[index] = *reinterpret_cast<const uint32_t*>(w + (q / 2) * rows * K + (long long)column * K + at);
    }
}

using Sums = float[STRIPS][2 * GROUPS][4];

// sums + all taps of one source.
__device__ __forceinline__ void accumulate(Sums& sums, uint32_t tile, const uint4* fragments) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp * ROWS, column = lane % 16, chunk = lane / 16;  // of ldmatrix: lane / 8 is the matrix
#pragma unroll 1  // unrolled as well, loads move so far ahead that registers spill
    for (int ky = 0; ky < KH; ++ky) {
#pragma unroll
        for (int kx = 0; kx < KW; ++kx) {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                uint4 b[GROUPS];
#pragma unroll
                for (int group = 0; group < GROUPS; ++group)
                    b[group] = fragments[(((ky * KW + kx) * BLOCKS + block) * GROUPS + group) * 32 + lane];
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) {
                    const int pixel = (row + strip / 2 + ky) * BORDERED + 16 * (strip % 2) + kx + column;
                    uint32_t a[4];
                    load_matrices(tile + 16 * place(pixel, 2 * block + chunk), a);
#pragma unroll
                    for (int group = 0; group < GROUPS; ++group) {
                        multiply(sums[strip][2 * group], a, b[group].x, b[group].y);
                        multiply(sums[strip][2 * group + 1], a, b[group].z, b[group].w);
                    }
                }
            }
        }
    }
}

// Four outputs of a pixel, rounded: stored, or packed together with those of the other three lanes of its block. All
// lanes of a warp call this; `has` says which of them write. at: the first of the four, in elements of the output.
__device__ __forceinline__ void write(
    const float (&v)[4], void* out, uint8_t* scales, const fp4::GlobalScale& global, long long at, bool has) {
    if (!scales) {
        if (!has) return;
        channels::Pair<DTYPE>::type pairs[2];
        narrow(make_float2(v[0], v[1]), pairs[0]);
        narrow(make_float2(v[2], v[3]), pairs[1]);
        *reinterpret_cast<uint2*>(static_cast<DTYPE*>(out) + at) = *reinterpret_cast<const uint2*>(pairs);
        return;
    }
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = fp4::nan_max(amax, fabsf(v[i]));
    amax = fp4::nan_max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fp4::nan_max(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    const fp4::BlockScale block = fp4::block_scale(amax, global);
    uint32_t codes = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= fp4::encode_nearest(v[i] * block.encode) << (4 * i);
    if (block.encode != block.encode) codes = 0u;  // a block with NaN or Inf: codes 0, scale NaN
    if (!has) return;
    static_cast<uint16_t*>(out)[at / 4] = uint16_t(codes);
    if (threadIdx.x % 4 == 0) scales[at / fp4::GROUP] = uint8_t(fp4::encode_e4m3(block.d8));
}

// The sum of each of this thread's outputs over its pixels, in `totals` [WARPS, OUTPUTS] of shared memory.
__device__ __forceinline__ void add_up(const float (&own)[GROUPS][4], float* totals) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = own[group][i];
            for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (threadIdx.x % 32 < 4)
                totals[threadIdx.x / 32 * OUTPUTS + 16 * group + 4 * (threadIdx.x % 4) + i] = sum;
        }
    }
}

__device__ __forceinline__ float total(const float* totals, int output) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += totals[warp * OUTPUTS + output];
    return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) direct_conv(
    const uint8_t* x, const uint8_t* x_scales, const float* x_amax, const uint8_t* x2, const uint8_t* x2_scales,
    const float* x2_amax, const __half* w, const float* w_amax, const float* bias, void* out, uint8_t* scales,
    const float* out_amax, float* moments, int H, int W, int OH, int OW, int O, int K, int padding_h, int padding_w,
    int relu, int tiles_y, int tiles_x, int tiles, float x_range, float x2_range, float w_range) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float totals[MOMENTS ? WARPS * OUTPUTS : 1], means[MOMENTS ? OUTPUTS : 1];
    uint4* const fragments = reinterpret_cast<uint4*>(shared);
    uint4* const tile = fragments + SOURCES * STEPS * GROUPS * 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * OUTPUTS;
    begin_after_primary();
    load_weights(w, O, K, first, reinterpret_cast<uint32_t*>(fragments));

    const float last_factor = SOURCES == 2 ? *x2_amax / x2_range : *x_amax / x_range;
    // No division by zero; an amax of 0 means that all values of the source are 0.
    const float divisor = SOURCES == 2 && last_factor == 0.f ? 1.f : last_factor;
    const float ratio = SOURCES == 2 ? *x_amax / x_range / divisor : 1.f;
    const float factor = divisor * (*w_amax / w_range * 16384.f);  // elements of both operands are times 2^-7
    const fp4::GlobalScale global = scales ? fp4::global_scale(*out_amax) : fp4::GlobalScale{};
    const long long depth = (long long)H * W * BLOCKS;
    const int per_item = tiles_y * tiles_x;

    Raw raw;
    const auto fetch = [&](int index, int source) {
        const int item = index / per_item, ty = index % per_item / tiles_x, tx = index % tiles_x;
        const Source from = {(source ? x2 : x) + 8 * depth * item, (source ? x2_scales : x_scales) + depth * item};
        load_tile(raw, from, ty * HEIGHT - padding_h, tx * WIDTH - padding_w, H, W);
    };
    if (blockIdx.x < tiles) fetch(blockIdx.x, 0);
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        Sums sums = {};
#pragma unroll
        for (int source = 0; source < SOURCES; ++source) {
            __syncthreads();  // nobody reads the tile before any more; of the first one: weights are complete
            decode_tile(raw, tile);
            if (source + 1 < SOURCES) {
                fetch(index, source + 1);
            } else if (index + gridDim.x < tiles) {
                fetch(index + gridDim.x, 0);
            }
            __syncthreads();
            accumulate(sums, shared_address(tile), fragments + source * STEPS * GROUPS * 32);
            if (SOURCES == 2 && source == 0) {
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
                    for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[strip][n][i] *= ratio;
            }
        }

        const int item = index / per_item, ty = index % per_item / tiles_x, tx = index % tiles_x;
        const long long base = (long long)item * OH * OW;
        float own[GROUPS][4] = {};
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // registers of an accumulator have rows lane / 4 and lane / 4 + 8
                const int y = ty * HEIGHT + warp * ROWS + strip / 2;
                const int at_x = tx * WIDTH + 16 * (strip % 2) + 8 * half + lane / 4;
                const bool has = y < OH && at_x < OW;
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const int output = first + 16 * group + 4 * (lane % 4);
                    float v[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float value = sums[strip][2 * group + i / 2][2 * half + i % 2] * factor;
                        if (bias) value += bias[output + i];
                        if (relu) value = value > 0.f ? value : value != value ? value : 0.f;
                        v[i] = value;
                    }
                    channels::rounded<DTYPE>(v);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sums[strip][2 * group + i / 2][2 * half + i % 2] = v[i];
                        if (MOMENTS && has) own[group][i] += v[i];
                    }
                    write(v, out, scales, global, (base + (long long)y * OW + at_x) * O + output, has);
                }
            }
        }
        __syncwarp();  // lanes outside of the image have written nothing: together again before the next barrier
        if (!MOMENTS) continue;
        const int count = min(HEIGHT, OH - ty * HEIGHT) * min(WIDTH, OW - tx * WIDTH);
        add_up(own, totals);
        __syncthreads();
        if (threadIdx.x < OUTPUTS) means[threadIdx.x] = total(totals, threadIdx.x) / float(count);
        __syncthreads();
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                own[group][i] = 0.f;
                const float mean = means[16 * group + 4 * (lane % 4) + i];
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int y = ty * HEIGHT + warp * ROWS + strip / 2;
                        const int at_x = tx * WIDTH + 16 * (strip % 2) + 8 * half + lane / 4;
                        const float d = sums[strip][2 * group + i / 2][2 * half + i % 2] - mean;
                        if (y < OH && at_x < OW) own[group][i] = __fmaf_rn(d, d, own[group][i]);
                    }
                }
            }
        }
        add_up(own, totals);
        __syncthreads();
        if (threadIdx.x < OUTPUTS) {
            float* const to = moments + (long long)index * 4 * O + first + threadIdx.x;
            to[0] = means[threadIdx.x];
            to[O] = total(totals, threadIdx.x);
        }
    }
}
