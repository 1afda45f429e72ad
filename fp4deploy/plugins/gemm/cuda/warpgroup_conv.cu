// Convolution of packed activations with weights decoded to FP16, by wgmma: SM90.
//
//   out[y, x, n] = round(relu(sum over sources, channels, taps of in[y + ky dilation - padding, x + kx dilation - padding, c]
//                             w[n, ky, kx, c] + bias[n]))
//
// A tile of output pixels, 8 wide and HEIGHT high, and 64 or 128 outputs. For each chunk of 64 channels, four producer
// warps decode the tile's input with its border once into shared memory, and two consumer warpgroups multiply all taps
// from there. A tap is another address: the pixels of a wgmma operand are read through a matrix descriptor whose groups
// of 8 rows are rows of the image.
//
// The product is transposed. Weights are the operand of 64 rows, pixels the one of N = 8 HEIGHT columns, so that a
// thread has two outputs of many pixels: bias and moments of an output are those of four threads.
//
//   JOINT     both consumers have the same 8 x HEIGHT pixels and 64 of 128 outputs each
//   not       each consumer has 8 of 16 x HEIGHT pixels, and all of 64 outputs
//
// Shared memory: STAGES of weights [2 planes, OUTPUTS, 32] FP16 for one tap and chunk, by TMA with a swizzle of 64
// bytes; BUFFERS of decoded pixels [8 columns of 8 channels, PIXELS] of 16 bytes; 1 KiB for each consumer warp, where an
// output tile is transposed; mbarriers. With RESIDENT all weights of a block of outputs stay in the stages.
//
// The order of a sum: chunks of 64 channels ascending, source after source; in a chunk taps ascending; in a tap four
// wgmma of 16 elements: those of the first plane (even channels) at positions 0 to 15 and 16 to 31, then those of the
// second (`decoded_weight`). With SPLIT the chunks are divided among programs, each writes its sums in FP32, and
// `split_sum_kernel` adds them in ascending order.
//
// Two sources are read as their concatenation, one after the other. With UP the weight is that of a transposed
// convolution of kernel and stride 2: a 1 x 1 convolution with four times the outputs, each of which has its place in
// 2 x 2 pixels. With MOMENTS the epilogue writes mean and squared deviations of each channel over the tile of each
// consumer, of the rounded values (norm_statistics.cu). With `scales` the output is packed.
//
// Macros: DTYPE of the output; HEIGHT a multiple of 4 up to 32; KH, KW, DILATION; JOINT, RESIDENT, UP, SPLIT, MOMENTS 0
// or 1; STAGES; BUFFERS.
// weights: a tensor map of bytes [2 O, places, 2 K] in boxes of OUTPUTS x 1 x 64 with a swizzle of 64 bytes; places: 4
// with UP, else 1. x, x2: codes uint8 [N, H, W, 32 chunks]; their scales: E4M3 uint8 [N, H, W, 4 chunks]; amax:
// float32 []; bias: float32 [O] or null; out: DTYPE [N, OH, OW, O], or codes, with SPLIT float32 [splits, N, OH, OW, O];
// scales: of a packed output, or null; moments: float32 [N tiles, 2, 2, O].
// begin2: where the second source begins in a row of a plane, in elements. tiles_y, tiles_x: of 8 x HEIGHT pixels.
// Launch: block 384, a grid of any size, with RESIDENT a multiple of all blocks of outputs and splits; dynamic shared
// memory `shared_bytes` of warpgroup.py.
#include "pack_target.cuh"
#include "wgmma.cuh"

#ifndef HEIGHT
#define HEIGHT 32
#endif
#ifndef KH
#define KH 3
#endif
#ifndef KW
#define KW 3
#endif
#ifndef DILATION
#define DILATION 1
#endif
#ifndef JOINT
#define JOINT 1
#endif
#ifndef RESIDENT
#define RESIDENT 0
#endif
#ifndef UP
#define UP 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef MOMENTS
#define MOMENTS 0
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif

namespace {

constexpr int PRODUCERS = 128, CONSUMER_WARPS = 8, THREADS = PRODUCERS + 32 * CONSUMER_WARPS;
constexpr int OUTPUTS = JOINT ? 128 : 64, WIDTH = JOINT ? 8 : 16;
constexpr int BORDERED = WIDTH + (KW - 1) * DILATION, PIXELS = (HEIGHT + (KH - 1) * DILATION) * BORDERED;
constexpr int TAPS = KH * KW, PLACES = UP ? 4 : 1;
constexpr int COLUMN = 16 * PIXELS, BUFFER = 8 * COLUMN;           // bytes of 8 and of 64 channels of all pixels
constexpr int PLANE = 64 * OUTPUTS, STAGE = 2 * PLANE;             // bytes of weights
constexpr int SCRATCH = 1024;                                      // bytes of a consumer warp
constexpr int LOADS = (PIXELS + PRODUCERS - 1) / PRODUCERS;        // pixels of a producer
constexpr int AHEAD = LOADS <= 4 ? 2 : 1;                          // chunks that are loaded before they are decoded
// 120 + 2 * 192 = 3 * 168, what 384 threads of a kernel with a bound of one block have at its start.
constexpr bool MOVES_REGISTERS = HEIGHT > 16;
constexpr int PRODUCER_REGISTERS = 120, CONSUMER_REGISTERS = 192;

struct Problem {
    int H, W, OH, OW, O, padding_h, padding_w, tiles_y, tiles_x, chunks, chunks2, begin2, splits, works;
};

struct Source {
    const uint8_t *codes, *scales;
    int chunks;
};

// One unit of work of a program: a tile, a block of outputs, and a share of the chunks.
struct Work {
    int index, split, first, position, item, ty, tx, begin, end;  // begin, end: chunks

    __device__ __forceinline__ Work(int index_, const Problem& p) : index(index_) {
        const int blocks = p.O / OUTPUTS, across = JOINT ? p.tiles_x : (p.tiles_x + 1) / 2;
        int rest = index;
        split = SPLIT ? rest % p.splits : 0;
        if (SPLIT) rest /= p.splits;
        first = rest % blocks * OUTPUTS;
        rest /= blocks;
        position = UP ? rest % 4 : 0;
        if (UP) rest /= 4;
        tx = rest % across * (JOINT ? 1 : 2);
        rest /= across;
        ty = rest % p.tiles_y;
        item = rest / p.tiles_y;
        const int total = p.chunks + p.chunks2;
        begin = SPLIT ? total * split / p.splits : 0;
        end = SPLIT ? total * (split + 1) / p.splits : total;
    }
    __device__ __forceinline__ bool valid(const Problem& p) const { return index < p.works; }
};

// A chunk of a work; `next` goes on to the next work of this program.
struct Cursor {
    Work work;
    int chunk;

    __device__ __forceinline__ explicit Cursor(const Problem& p) : work(blockIdx.x, p), chunk(work.begin) {}
    __device__ __forceinline__ bool next(const Problem& p) {  // whether a new work begins
        if (++chunk < work.end) return false;
        work = Work(work.index + gridDim.x, p);
        chunk = work.begin;
        return true;
    }
};

struct Barriers {
    uint32_t loaded, freed, decoded, read;  // the first of each: weights arrived, were read; pixels decoded, were read
};

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// ---- producers ----

struct Raw {
    uint4 low[LOADS], high[LOADS];
    uint32_t scales[LOADS];
};

// Which pixels this thread decodes: indices in the feature map of the batch, -1 outside of the image.
__device__ __forceinline__ void find_pixels(int (&pixels)[LOADS], const Work& work, const Problem& p) {
    const int top = work.ty * HEIGHT - p.padding_h, left = work.tx * 8 - p.padding_w;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int index = i * PRODUCERS + threadIdx.x, y = top + index / BORDERED, x = left + index % BORDERED;
        const bool has = index < PIXELS && y >= 0 && y < p.H && x >= 0 && x < p.W;
        pixels[i] = has ? (work.item * p.H + y) * p.W + x : -1;
    }
}

__device__ __forceinline__ void fetch(Raw& raw, const int (&pixels)[LOADS], const Source& source, int chunk) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        raw.low[i] = raw.high[i] = make_uint4(0u, 0u, 0u, 0u);
        raw.scales[i] = 0u;
        if (pixels[i] < 0) continue;
        const long long at = (long long)pixels[i] * source.chunks + chunk;
        const uint4* from = reinterpret_cast<const uint4*>(source.codes) + 2 * at;
        raw.low[i] = from[0];
        raw.high[i] = from[1];
        raw.scales[i] = reinterpret_cast<const uint32_t*>(source.scales)[at];
    }
}

// Two E4M3 scales as halves times 2^7; NaN stays NaN.
__device__ __forceinline__ __half scale_of(uint32_t scales, int block) {
    const uint32_t byte = (scales >> (8 * block)) & 0xFFu;
    // The bits of an E4M3 value as a half are the value times 2^-8; NaN has to be made.
    const __half scale = __hmul(__ushort_as_half((unsigned short)(byte << 7)), __float2half_rn(32768.f));
    return byte == 0x7Fu ? __ushort_as_half((unsigned short)0x7FFF) : scale;
}

// Eight codes of a word as four pairs of halves times 2^-14: elements 0 2, 4 6, 1 3, 5 7 (triton/decode.py).
__device__ __forceinline__ void spread(uint32_t word, uint32_t (&out)[4]) {
    const uint32_t high = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
    const uint32_t low = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);
    out[0] = __byte_perm(low, 0u, 0x1404);
    out[1] = __byte_perm(low, 0u, 0x3424);
    out[2] = __byte_perm(high, 0u, 0x1404);
    out[3] = __byte_perm(high, 0u, 0x3424);
}

// The order of elements is that of the weight's planes: column 4 parity + 2 a + b of a pixel has, for t = 0 to 3 and
// c = 0 to 1, channel 16 t + 8 a + 4 b + 2 c + parity, so two elements of each of the four blocks.
__device__ __forceinline__ void decode(const Raw& raw, uint4* buffer) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int pixel = i * PRODUCERS + threadIdx.x;
        if (PIXELS % PRODUCERS && pixel >= PIXELS) continue;
        const uint32_t words[8] = {raw.low[i].x,  raw.low[i].y,  raw.low[i].z,  raw.low[i].w,
                                   raw.high[i].x, raw.high[i].y, raw.high[i].z, raw.high[i].w};
        uint32_t columns[8][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const __half2 scale = __half2half2(scale_of(raw.scales[i], t));
#pragma unroll
            for (int a = 0; a < 2; ++a) {
                uint32_t pairs[4];
                spread(words[2 * t + a], pairs);
#pragma unroll
                for (int each = 0; each < 4; ++each) {
                    const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&pairs[each]), scale);
                    columns[each / 2 * 4 + 2 * a + each % 2][t] = *reinterpret_cast<const uint32_t*>(&pair);
                }
            }
        }
#pragma unroll
        for (int column = 0; column < 8; ++column)
            buffer[column * PIXELS + pixel] =
                make_uint4(columns[column][0], columns[column][1], columns[column][2], columns[column][3]);
    }
}

// Weights of one step after the other, each a tap of a chunk. All lanes of a warp keep it.
struct WeightLoader {
    Cursor cursor;
    int tap = 0, issued = 0;

    __device__ __forceinline__ explicit WeightLoader(const Problem& p) : cursor(p) {}
    __device__ __forceinline__ void load_until(
        int steps, const TensorMap& weights, uint32_t stages, const Barriers& barriers, const Problem& p) {
#pragma unroll 1
        for (; issued < steps && cursor.work.valid(p); ++issued) {
            const int stage = issued % STAGES;
            if (!RESIDENT) mbarrier_wait(barriers.freed + 8 * stage, (issued / STAGES & 1) ^ 1);
            const bool second = cursor.chunk >= p.chunks;
            const int chunks = second ? p.chunks2 : p.chunks, chunk = cursor.chunk - (second ? p.chunks : 0);
            const int element = (second ? p.begin2 : 0) + 32 * (tap * chunks + chunk);
            if (elect_one()) {
                const uint32_t bar = barriers.loaded + 8 * stage, to = stages + STAGE * stage;
                mbarrier_arrive_expect_tx(bar, STAGE);
                tma_load_box(to, weights, 2 * element, cursor.work.position, cursor.work.first, bar);
                tma_load_box(to + PLANE, weights, 2 * element, cursor.work.position, p.O + cursor.work.first, bar);
            }
            if (++tap < TAPS) continue;
            tap = 0;
            cursor.next(p);
        }
    }
};

__device__ __forceinline__ void produce(
    const Source& x, const Source& x2, const TensorMap& weights, uint8_t* buffers, uint32_t stages,
    const Barriers& barriers, const Problem& p) {
    const int warp = warp_uniform(threadIdx.x / 32);
    Cursor now(p), next(p);
    WeightLoader loader(p);
    const int steps = (now.work.end - now.work.begin) * TAPS;  // of a work, with RESIDENT
    int pixels[LOADS];
    Raw raw[AHEAD];
    const auto load = [&](Raw& to) {
        if (!next.work.valid(p)) return;
        const bool second = next.chunk >= p.chunks;
        const Source source{second ? x2.codes : x.codes, second ? x2.scales : x.scales, second ? x2.chunks : x.chunks};
        fetch(to, pixels, source, next.chunk - (second ? p.chunks : 0));
        if (next.next(p)) find_pixels(pixels, next.work, p);
    };
    find_pixels(pixels, next.work, p);
    if (warp == 0) loader.load_until(RESIDENT ? steps : STAGES, weights, stages, barriers, p);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(raw[i]);
    int count = 0;
#pragma unroll 1
    while (now.work.valid(p)) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (!now.work.valid(p)) break;
            const int buffer = count % BUFFERS;
            mbarrier_wait(barriers.read + 8 * buffer, (count / BUFFERS & 1) ^ 1);
            decode(raw[i], reinterpret_cast<uint4*>(buffers + BUFFER * buffer));
            load(raw[i]);
            fence_shared_for_async();
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.decoded + 8 * buffer);
            ++count;
            if (!RESIDENT && warp == 0) loader.load_until(count * TAPS, weights, stages, barriers, p);
            now.next(p);
        }
    }
}

// ---- consumers ----

using Sums = float[HEIGHT][4];

// What a consumer has read, and frees when the multiplications are complete.
struct Reading {
    int stage = -1, buffer = -1;

    __device__ __forceinline__ void free(const Barriers& barriers) {
        if (threadIdx.x % 32 == 0) {
            if (!RESIDENT && stage >= 0) mbarrier_arrive(barriers.freed + 8 * stage);
            if (buffer >= 0) mbarrier_arrive(barriers.read + 8 * buffer);
        }
        stage = buffer = -1;
    }
};

// The sum of a work's chunks. step, count: steps and chunks that this program has had; `ratio`: what sums of the first
// source are multiplied by before those of the second are added.
__device__ __forceinline__ void accumulate(
    Sums& sums, const Work& work, int& step, int& count, float ratio, uint32_t buffers, uint32_t stages,
    const Barriers& barriers, const Problem& p) {
    const int group = warp_uniform(threadIdx.x / 128) - 1;
    constexpr uint64_t WEIGHTS = wgmma::descriptor(wgmma::SWIZZLE_64, 16, 512);
    constexpr uint64_t INPUT = wgmma::descriptor(wgmma::SWIZZLE_NONE, COLUMN, 16 * BORDERED);
    const uint32_t rows = stages + (JOINT ? 64 * 64 * group : 0), pixels = buffers + (JOINT ? 0 : 16 * 8 * group);
    Reading before;
    int adds = 0;
    if (RESIDENT) step = 0;
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk, ++count) {
        if (chunk == p.chunks && chunk > work.begin) {
            wgmma::wait<0>();
            before.free(barriers);
#pragma unroll
            for (int i = 0; i < HEIGHT; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] *= ratio;
        }
        const int buffer = count % BUFFERS;
        mbarrier_wait(barriers.decoded + 8 * buffer, count / BUFFERS & 1);
#pragma unroll 1
        for (int ky = 0; ky < KH; ++ky) {
#pragma unroll 1
            for (int kx = 0; kx < KW; ++kx, ++step) {
                const int stage = step % STAGES;
                mbarrier_wait(barriers.loaded + 8 * stage, RESIDENT ? 0 : step / STAGES & 1);
                const uint32_t a = rows + STAGE * stage;
                const uint32_t b = pixels + BUFFER * buffer + 16 * DILATION * (ky * BORDERED + kx);
                wgmma::fence();
#pragma unroll
                for (int part = 0; part < 4; ++part) {  // two halves of a plane, two planes
                    wgmma::Multiply<HEIGHT>::run(
                        sums, wgmma::at(WEIGHTS, a + PLANE * (part / 2) + 32 * (part % 2)),
                        wgmma::at(INPUT, b + 2 * COLUMN * part), adds);
                    adds = 1;
                }
                wgmma::commit();
                wgmma::wait<1>();
                before.free(barriers);
                before.stage = stage;
            }
        }
        before.buffer = buffer;
    }
    wgmma::wait<0>();
    before.free(barriers);
}

// Mean and squared deviations of this thread's two outputs over the pixels of the tile, in all four threads that have
// them. rows, columns: of the tile that lie in the image; WHOLE: all of them.
template <bool WHOLE>
__device__ __forceinline__ void measure(const Sums& sums, int rows, int columns, float (&mean)[2], float (&square)[2]) {
    const int x = threadIdx.x % 4 * 2;
    const auto total = [&](auto&& value) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < HEIGHT; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (WHOLE || (i < rows && x + j < columns)) sum = value(sum, i, j);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    };
    const float count = WHOLE ? float(8 * HEIGHT) : float(rows * columns);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        mean[row] = total([&](float sum, int i, int j) { return sum + sums[i][2 * row + j]; }) / count;
        square[row] = total([&](float sum, int i, int j) {
            const float d = sums[i][2 * row + j] - mean[row];
            return __fmaf_rn(d, d, sum);
        });
    }
}

struct Epilogue {
    void* out;
    uint8_t* scales;
    const float *bias, *out_amax;
    float* moments;
    int relu;
};

// Sums of a split, unfinished.
__device__ __forceinline__ void write_parts(
    const Sums& sums, const Work& work, int ty, int tx, float factor, float* out, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int output = work.first + (JOINT ? 64 * (threadIdx.x / 128 - 1) : 0) + 16 * warp + lane / 4;
    const long long per_item = (long long)p.OH * p.OW, items = p.works / p.splits / (p.O / OUTPUTS) / p.tiles_y /
                                                              (JOINT ? p.tiles_x : (p.tiles_x + 1) / 2);
    const long long base = (work.split * items + work.item) * per_item;
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
        const int y = ty * HEIGHT + i;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int x = tx * 8 + lane % 4 * 2 + j;
            if (y >= p.OH || x >= p.OW) continue;
            float* const to = out + (base + (long long)y * p.OW + x) * p.O + output;
            to[0] = sums[i][j] * factor;
            to[8] = sums[i][2 + j] * factor;
        }
    }
}

__device__ __forceinline__ void finish(
    Sums& sums, const Work& work, int ty, int tx, float factor, const fp4::GlobalScale& global, const Epilogue& to,
    uint8_t* scratch, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int first = work.first + (JOINT ? 64 * (threadIdx.x / 128 - 1) : 0) + 16 * warp, output = first + lane / 4;
    const float low = to.bias ? to.bias[output] : 0.f, high = to.bias ? to.bias[output + 8] : 0.f;
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float value = sums[i][j] * factor;
            if (to.bias) value += j < 2 ? low : high;
            if (to.relu) value = value > 0.f ? value : value != value ? value : 0.f;
            sums[i][j] = float(DTYPE(value));
        }
    }
    const int rows = min(HEIGHT, p.OH - ty * HEIGHT), columns = min(8, p.OW - tx * 8);
    if (MOMENTS) {
        float mean[2], square[2];
        if (rows == HEIGHT && columns == 8) {
            measure<true>(sums, rows, columns, mean, square);
        } else {
            measure<false>(sums, rows, columns, mean, square);
        }
        if (lane % 4 == 0) {
            const long long part = ((long long)work.item * p.tiles_y + ty) * p.tiles_x + tx;
            float* const moments = to.moments + part * 4 * p.O + output;
            moments[0] = mean[0];
            moments[8] = mean[1];
            moments[p.O] = square[0];
            moments[p.O + 8] = square[1];
        }
        __syncwarp();
    }

    // Four rows of 8 pixels at a time: 16 outputs of a pixel are 32 bytes of scratch, and two lanes of its store.
    using Pair = channels::Pair<DTYPE>::type;
    const uint32_t address = shared_address(scratch) + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
    const int x = tx * 8 + lane % 16 / 2;
    const long long base = (long long)work.item * p.OH * p.OW * PLACES;
    const Target target{static_cast<uint32_t*>(to.scales ? to.out : nullptr), to.scales,
                        static_cast<DTYPE*>(to.scales ? nullptr : to.out)};
#pragma unroll
    for (int i = 0; i < HEIGHT; i += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const two = &sums[i + 2 * half + j / 2][j % 2 * 2];
                Pair pair;
                channels::narrow(make_float2(two[0], two[1]), pair);
                pairs[j] = *reinterpret_cast<const uint32_t*>(&pair);
            }
            store_transposed(address + 512 * half, pairs);
        }
        __syncwarp();
        uint4 words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) words[half] = reinterpret_cast<const uint4*>(scratch)[32 * half + lane];
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int y = ty * HEIGHT + i + 2 * half + lane / 16;
            long long pixel = (long long)y * p.OW + x;
            if (UP) pixel = (2LL * y + work.position / 2) * 2 * p.OW + 2 * x + work.position % 2;
            const long long at = (base + pixel) * p.O + first + 8 * (lane % 2);
            const bool has = y < p.OH && x < p.OW;
            if (!to.scales) {
                if (has) *reinterpret_cast<uint4*>(static_cast<DTYPE*>(to.out) + at) = words[half];
                continue;
            }
            float v[channels::VECTOR];
            const Pair* const pairs = reinterpret_cast<const Pair*>(&words[half]);
#pragma unroll
            for (int j = 0; j < channels::VECTOR / 2; ++j) {
                const float2 pair = channels::widen(pairs[j]);
                v[2 * j] = pair.x;
                v[2 * j + 1] = pair.y;
            }
            target.put(v, global, at, has);
        }
    }
    __syncwarp();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) warpgroup_conv(
    const __grid_constant__ TensorMap weights, const uint8_t* x, const uint8_t* x_scales, const float* x_amax,
    const uint8_t* x2, const uint8_t* x2_scales, const float* x2_amax, const float* w_amax, const float* bias, void* out,
    uint8_t* scales, const float* out_amax, float* moments, int H, int W, int OH, int OW, int O, int padding_h,
    int padding_w, int relu, int tiles_y, int tiles_x, int chunks, int chunks2, int begin2, int splits, int works,
    float x_range, float x2_range, float w_range) {
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* const buffers = shared + STAGES * STAGE;
    uint8_t* const scratch = buffers + BUFFERS * BUFFER;
    const uint32_t stages = shared_address(shared), bars = shared_address(scratch + CONSUMER_WARPS * SCRATCH);
    const Barriers barriers{bars, bars + 8 * STAGES, bars + 16 * STAGES, bars + 16 * STAGES + 8 * BUFFERS};
    const Problem p{H, W, OH, OW, O, padding_h, padding_w, tiles_y, tiles_x, chunks, chunks2, begin2, splits, works};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(barriers.loaded + 8 * i, 1);
            mbarrier_init(barriers.freed + 8 * i, CONSUMER_WARPS);
        }
        for (int i = 0; i < BUFFERS; ++i) {
            mbarrier_init(barriers.decoded + 8 * i, PRODUCERS / 32);
            mbarrier_init(barriers.read + 8 * i, CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    begin_after_primary();
    if (threadIdx.x < PRODUCERS) {
        if (MOVES_REGISTERS) give_registers<PRODUCER_REGISTERS>();
        produce({x, x_scales, chunks}, {x2, x2_scales, chunks2}, weights, buffers, stages, barriers, p);
    } else {
        if (MOVES_REGISTERS) take_registers<CONSUMER_REGISTERS>();
        const float first_factor = *x_amax / x_range, second_factor = chunks2 ? *x2_amax / x2_range : first_factor;
        // No division by zero; an amax of 0 means that all values of the source are 0.
        const float divisor = chunks2 && second_factor == 0.f ? 1.f : second_factor;
        const float scale = *w_amax / w_range * 16384.f;  // elements of both operands are times 2^-7
        const fp4::GlobalScale global = scales ? fp4::global_scale(*out_amax) : fp4::GlobalScale{};
        const Epilogue to{out, scales, bias, out_amax, moments, relu};
        const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - PRODUCERS / 32;
        int step = 0, count = 0;
#pragma unroll 1
        for (Work work(blockIdx.x, p); work.valid(p); work = Work(work.index + gridDim.x, p)) {
            Sums sums;
            accumulate(sums, work, step, count, first_factor / divisor, shared_address(buffers), stages, barriers, p);
            const float factor = (work.end > chunks ? divisor : first_factor) * scale;
            const int tx = work.tx + (JOINT ? 0 : group);
            if (tx >= tiles_x) continue;
            if (SPLIT) {
                write_parts(sums, work, work.ty, tx, factor, static_cast<float*>(out), p);
            } else {
                finish(sums, work, work.ty, tx, factor, global, to, scratch + SCRATCH * warp, p);
            }
        }
    }
}
