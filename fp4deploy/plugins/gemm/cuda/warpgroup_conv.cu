// Convolution of packed activations with weights decoded to FP16, by wgmma: SM90.
//
//   out[y, x, n] = round(relu(sum over sources, channels, taps of in[y + ky dilation - padding, x + kx dilation - padding, c]
//                             w[n, ky, kx, c] + bias[n]))
//
// A tile of output pixels, 8 wide and HEIGHT high, and 64 or 128 outputs. For each chunk of 64 channels, six warps decode
// the tile's input with its border once into shared memory, and two consumer warpgroups multiply all taps from there. A
// tap is another address: the pixels of a wgmma operand are read through a matrix descriptor whose groups of 8 rows are
// rows of the image. Two more warps load weights by TMA.
//
// The product is transposed. Weights are the operand of 64 rows, pixels the one of N = 8 HEIGHT columns, so that a
// thread has two outputs of many pixels: bias and moments of an output are those of four threads.
//
//   JOINT     both consumers have the same 8 x HEIGHT pixels and 64 of 128 outputs each. The second one begins LAG steps
//             later and stays behind, so that one multiplies while the other writes its outputs
//   not       each consumer has 8 of 16 x HEIGHT pixels, and all of 64 outputs
//
// Shared memory: a ring of STAGES of weights [2 planes, 64 outputs, 32] FP16 for one tap and chunk, with a swizzle of 64
// bytes, for each consumer if JOINT, else for both; BUFFERS of decoded pixels [8 columns of 8 channels, PIXELS] of 16
// bytes; 4 KiB for each consumer, where an output tile is transposed; mbarriers. With RESIDENT all weights of a block of
// outputs stay in the stages.
//
// The order of a sum: chunks of 64 channels ascending, source after source; in a chunk taps ascending; in a tap four
// wgmma of 16 elements: those of the first plane (even channels) at positions 0 to 15 and 16 to 31, then those of the
// second (`decoded_weight`). With SPLIT the chunks are divided among programs, each writes its sums in FP32, and
// `split_sum_kernel` adds them in ascending order.
//
// Two sources are read as their concatenation, one after the other. With UP the weight is that of a transposed
// convolution of kernel and stride 2: a 1 x 1 convolution with four times the outputs, each of which has its place in
// 2 x 2 pixels. With MOMENTS the epilogue writes mean and squared deviations of each channel over the tile of each
// consumer, of the rounded values (norm_statistics.cu).
//
// Volumes are slices: a tile lies in one slice of the output, and a chunk is read once for each of the KD slices that the
// filter spans, as if there were KD times as many. IN_PAIRS, OUT_PAIRS: with 32 channels a chunk is those of two
// neighbouring slices, with 32 outputs the 64 rows of weights are those of two neighbouring slices of the output. The
// weight has zeros where a slice is read that its filter does not span: of 3 slices for each of 2, 4 are read, so that 3
// of 4 products count.
//
// Macros: DTYPE of the output; HEIGHT a multiple of 4 up to 24; KH, KW, DILATION; JOINT, RESIDENT, SPLIT, PACKED,
// MOMENTS, VOLUME, IN_PAIRS, OUT_PAIRS 0 or 1; UP 0, 1, or 2 for 2 x 2 x 2; KD: chunks, or pairs, along the depth; STAGES;
// BUFFERS.
// weights: a tensor map of bytes [2 rows, places, 2 K] in boxes of 64 x 1 x 64 with a swizzle of 64 bytes; rows: O, with
// OUT_PAIRS 2 O; places: 4 with UP, of 2 x 2 x 2 without OUT_PAIRS 8, else 1. chunks, chunks2: times KD. padding_d, D, OD:
// of volumes, [N, D, H, W, C]; steps: slices of the output, or pairs of them. x, x2: codes uint8 [N, H, W, 32 chunks]; their scales: E4M3 uint8 [N, H, W, 4 chunks]; amax:
// float32 []; bias: float32 [O] or null; out: DTYPE [N, OH, OW, O], or codes, with SPLIT float32 [splits, N, OH, OW, O];
// scales: with PACKED those of the output; moments: float32 [N tiles, 2, 2, O].
// begin2: where the second source begins in a row of a plane, in elements. tiles_y, tiles_x: of 8 x HEIGHT pixels.
// Launch: block 512, a grid of any size, with RESIDENT a multiple of all blocks of outputs and splits; dynamic shared
// memory `shared_bytes` of warpgroup.py.
#include "decode.cuh"
#include "pack_target.cuh"
#include "wgmma.cuh"

#ifndef HEIGHT
#define HEIGHT 24
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
#ifndef PACKED
#define PACKED 0
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
#ifndef VOLUME
#define VOLUME 0
#endif
#ifndef KD
#define KD 1
#endif
#ifndef IN_PAIRS
#define IN_PAIRS 0
#endif
#ifndef OUT_PAIRS
#define OUT_PAIRS 0
#endif

namespace {

// Warps 0 and 1 load weights, 2 to 7 decode pixels, 8 to 15 multiply.
constexpr int LOADERS = 64, DECODERS = 192, PRODUCERS = LOADERS + DECODERS, CONSUMER_WARPS = 8;
constexpr int THREADS = PRODUCERS + 32 * CONSUMER_WARPS;
constexpr int OUTPUTS = JOINT ? 128 : 64, WIDTH = JOINT ? 8 : 16;
constexpr int BORDERED = WIDTH + (KW - 1) * DILATION, PIXELS = (HEIGHT + (KH - 1) * DILATION) * BORDERED;
constexpr int TAPS = KH * KW, PLACES = UP == 2 && !OUT_PAIRS ? 8 : UP ? 4 : 1, ROWS = OUT_PAIRS ? 2 : 1;
constexpr int COLUMN = 16 * PIXELS, BUFFER = 8 * COLUMN;           // bytes of 8 and of 64 channels of all pixels
constexpr int PLANE = 64 * 64, STAGE = 2 * PLANE;                  // bytes of weights
constexpr int RINGS = JOINT ? 2 : 1, RING = STAGES * STAGE;        // of weights, in bytes
constexpr int SCRATCH = 4096;                                      // bytes of a consumer warpgroup
constexpr int LOADS = (2 * PIXELS + DECODERS - 1) / DECODERS;      // halves of a pixel's chunk, of a thread
constexpr int AHEAD = LOADS <= 2 ? 3 : LOADS == 3 ? 2 : 1;         // chunks that are loaded before they are decoded
// Steps by which the second consumer of JOINT is behind: one multiplies while the other writes what it has.
constexpr int LAG = JOINT && !SPLIT && TAPS > 1 ? (TAPS < 6 ? TAPS : 6) : 0;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 200;  // together what two threads have at the start

struct Problem {
    int H, W, OH, OW, O, padding_h, padding_w, tiles_y, tiles_x, chunks, chunks2, begin2, splits, works, D, OD,
        padding_d, steps;
};

struct Source {
    const uint8_t *codes, *scales;
    int chunks;
};

// One unit of work of a program: a tile, a block of outputs, and a share of the chunks.
struct Work {
    int index, split, first, position, item, ty, tx, begin, end;  // begin, end: chunks

    __device__ __forceinline__ Work(int index_, const Problem& p) : index(index_) {
        const int blocks = p.O * ROWS / OUTPUTS, across = JOINT ? p.tiles_x : (p.tiles_x + 1) / 2;
        int rest = index;
        split = SPLIT ? rest % p.splits : 0;
        if (SPLIT) rest /= p.splits;
        first = rest % blocks * OUTPUTS;
        rest /= blocks;
        position = UP ? rest % PLACES : 0;
        if (UP) rest /= PLACES;
        tx = rest % across * (JOINT ? 1 : 2);
        rest /= across;
        ty = rest % p.tiles_y;
        item = rest / p.tiles_y;
        const int total = p.chunks + p.chunks2;
        begin = SPLIT ? total * split / p.splits : 0;
        end = SPLIT ? total * (split + 1) / p.splits : total;
    }
    __device__ __forceinline__ bool valid(const Problem& p) const { return index < p.works; }
    // The first slice of the output that this work is of, counted through the batch; a feature map is one slice.
    __device__ __forceinline__ int slice(const Problem& p) const {
        if (UP == 2) return 2 * item + (OUT_PAIRS ? 0 : position / 4);
        return OUT_PAIRS ? item / p.steps * p.OD + 2 * (item % p.steps) : item;
    }
    // Of two slices, whether there is the second one.
    __device__ __forceinline__ bool whole(const Problem& p) const { return UP || 2 * (item % p.steps) + 1 < p.OD; }
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

// The first of each: weights arrived, were read; pixels were decoded, were read; the second consumer may begin.
struct Barriers {
    uint32_t loaded, freed, decoded, read, begin;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// ---- weights ----

// Those of a ring, one step after the other, each a tap of a chunk; all lanes of a warp. With RESIDENT once.
// row: the first of the ring in a block of outputs.
__device__ __forceinline__ void load_weights(
    const TensorMap& weights, uint32_t ring, int row, const Barriers& barriers, const Problem& p) {
    Cursor cursor(p);
    const int steps = RESIDENT ? (cursor.work.end - cursor.work.begin) * TAPS : 0;
    int tap = 0;
#pragma unroll 1
    for (int step = 0; cursor.work.valid(p) && (!RESIDENT || step < steps); ++step) {
        const int stage = step % STAGES;
        if (!RESIDENT) mbarrier_wait(barriers.freed + 8 * stage, (step / STAGES & 1) ^ 1);
        const bool second = cursor.chunk >= p.chunks;
        const int chunks = second ? p.chunks2 : p.chunks, chunk = cursor.chunk - (second ? p.chunks : 0);
        const int depth = chunk % KD * TAPS + tap;  // of KD TAPS
        const int element = (second ? p.begin2 : 0) + 32 * (depth * (chunks / KD) + chunk / KD), first = cursor.work.first + row;
        if (elect_one()) {
            const uint32_t bar = barriers.loaded + 8 * stage, to = ring + STAGE * stage;
            mbarrier_arrive_expect_tx(bar, STAGE);
            tma_load_box(to, weights, 2 * element, cursor.work.position, first, bar);
            tma_load_box(to + PLANE, weights, 2 * element, cursor.work.position, p.O * ROWS + first, bar);
        }
        if (++tap < TAPS) continue;
        tap = 0;
        cursor.next(p);
    }
}

// ---- pixels ----

// Halves of a chunk of some pixels: two neighbouring lanes have a pixel, and read it in one access.
struct Raw {
    uint4 codes[LOADS];
    uint32_t scales[LOADS];  // of the whole chunk
};

// Which pixels this thread decodes: indices in the feature map of the batch, in a slice of a volume, -1 outside of it.
__device__ __forceinline__ void find_pixels(int (&pixels)[LOADS], const Work& work, const Problem& p) {
    const int top = work.ty * HEIGHT - p.padding_h, left = work.tx * 8 - p.padding_w;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int index = (i * DECODERS + threadIdx.x - LOADERS) / 2;
        const int y = top + index / BORDERED, x = left + index % BORDERED;
        const bool has = index < PIXELS && y >= 0 && y < p.H && x >= 0 && x < p.W;
        pixels[i] = !has ? -1 : VOLUME ? y * p.W + x : (work.item * p.H + y) * p.W + x;
    }
}

__device__ __forceinline__ void fetch(
    Raw& raw, const int (&pixels)[LOADS], const Source& source, int chunk, const Work& work, const Problem& p) {
    long long slice = 0;  // its first pixel, with VOLUME
    bool outside = false;
    if (VOLUME) {
        const int z = work.item % p.steps * ROWS - p.padding_d +
                      (IN_PAIRS ? chunk % KD * 2 + threadIdx.x % 2 : chunk % KD);
        slice = (long long)(work.item / p.steps * p.D + z) * p.H * p.W;
        outside = z < 0 || z >= p.D;
        chunk /= KD;
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        raw.codes[i] = make_uint4(0u, 0u, 0u, 0u);
        raw.scales[i] = 0u;
        if (pixels[i] < 0 || outside) continue;
        const long long at = (VOLUME ? slice + pixels[i] : (long long)pixels[i]) * source.chunks + chunk;
        if (IN_PAIRS) {
            raw.codes[i] = reinterpret_cast<const uint4*>(source.codes)[at];
            raw.scales[i] = uint32_t(reinterpret_cast<const uint16_t*>(source.scales)[at]) << (threadIdx.x % 2 * 16);
            continue;
        }
        raw.codes[i] = reinterpret_cast<const uint4*>(source.codes)[2 * at + threadIdx.x % 2];
        raw.scales[i] = reinterpret_cast<const uint32_t*>(source.scales)[at];
    }
}

// The order of elements is that of the weight's planes: column 4 parity + 2 a + b of a pixel has, for t = 0 to 3 and
// c = 0 to 1, channel 16 t + 8 a + 4 b + 2 c + parity, so two elements of each of the four blocks. A thread has the
// blocks t = 0, 1 or 2, 3: one half of each column.
__device__ __forceinline__ void decode(const Raw& raw, uint2* buffer) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int unit = i * DECODERS + threadIdx.x - LOADERS;
        if (2 * PIXELS % DECODERS && unit >= 2 * PIXELS) continue;
        const uint32_t words[4] = {raw.codes[i].x, raw.codes[i].y, raw.codes[i].z, raw.codes[i].w};
        const uint32_t scales = raw.scales[i] >> (threadIdx.x % 2 * 16);
        uint32_t columns[8][2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const __half2 scale = __half2half2(decode_scale((scales >> (8 * t)) & 0xFFu));
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
            buffer[column * 2 * PIXELS + unit] = make_uint2(columns[column][0], columns[column][1]);
    }
}

__device__ __forceinline__ void decode_pixels(
    const Source& x, const Source& x2, uint8_t* buffers, const Barriers& barriers, const Problem& p) {
    Cursor now(p), next(p);
    int pixels[LOADS];
    Raw raw[AHEAD];
    const auto load = [&](Raw& to) {
        if (!next.work.valid(p)) return;
        const bool second = next.chunk >= p.chunks;
        const Source source{second ? x2.codes : x.codes, second ? x2.scales : x.scales, second ? x2.chunks : x.chunks};
        fetch(to, pixels, source, next.chunk - (second ? p.chunks : 0), next.work, p);
        if (next.next(p)) find_pixels(pixels, next.work, p);
    };
    find_pixels(pixels, next.work, p);
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
            decode(raw[i], reinterpret_cast<uint2*>(buffers + BUFFER * buffer));
            fence_shared_for_async();
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.decoded + 8 * buffer);
            load(raw[i]);
            ++count;
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
    Sums& sums, const Work& work, int& step, int& count, float ratio, uint32_t buffers, uint32_t ring,
    const Barriers& barriers, const Problem& p) {
    const int group = warp_uniform(threadIdx.x / 128) - 2;
    constexpr uint64_t WEIGHTS = wgmma::descriptor(wgmma::SWIZZLE_64, 16, 512);
    constexpr uint64_t INPUT = wgmma::descriptor(wgmma::SWIZZLE_NONE, COLUMN, 16 * BORDERED);
    const uint32_t pixels = buffers + (JOINT ? 0 : 16 * 8 * group);
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
                const uint32_t a = ring + STAGE * stage;
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
                if (LAG && group == 0 && count * TAPS + ky * KW + kx + 1 == LAG && threadIdx.x % 128 == 0)
                    mbarrier_arrive(barriers.begin);
            }
        }
        before.buffer = buffer;
    }
    wgmma::wait<0>();
    before.free(barriers);
}

using Pair = channels::Pair<DTYPE>::type;
// The rounded outputs of a thread: of each row of pixels two outputs (lane / 4, and 8 more), each of two pixels.
using Rounded = Pair[HEIGHT][2];

__device__ __forceinline__ void round_sums(
    const Sums& sums, float factor, const float* bias, int output, int relu, Rounded& out) {
    // Neither addition nor maximum is conditional: a branch for each number would cost more.
    const float added[2] = {bias ? bias[output] : 0.f, bias ? bias[output + 8] : 0.f};
    const float lowest = relu ? 0.f : __int_as_float(0xFF800000);
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float v[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) v[j] = fp4::nan_max(sums[i][2 * row + j] * factor + added[row], lowest);
            narrow(make_float2(v[0], v[1]), out[i][row]);
        }
    }
}

// A pair that the compiler does not know to have been widened before: kept for the second sum, what was widened for the
// first one takes twice the registers of the pairs. Measured fact: nvcc 13.0, sm_90a, HEIGHT 24, bfloat16: 568 bytes of
// spills; H200, 2026-12-01, packed_latency.py --rest fp16 bf16, our UNet: BF16 takes 1.03 times as long as FP16 with them
// (1bd83377), 0.99 times without (aeeeda83), +-0.5 %.
__device__ __forceinline__ Pair recomputed(Pair pair) {
    asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(pair)));
    return pair;
}

// Mean and squared deviations of this thread's two outputs over the pixels of the tile, in all four threads that have
// them. rows, columns: of the tile that lie in the image; WHOLE: all of them.
template <bool WHOLE>
__device__ __forceinline__ void measure(
    const Rounded& values, int rows, int columns, float (&mean)[2], float (&square)[2]) {
    const int x = threadIdx.x % 4 * 2;
    // Of both outputs at a time, columns apart: four sums that do not wait for each other.
    const auto total = [&](float (&sum)[2], auto&& term) {
        float parts[2][2] = {};
#pragma unroll
        for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float2 pair = widen(recomputed(values[i][row]));
                if (WHOLE || (i < rows && x < columns)) parts[row][0] = term(parts[row][0], pair.x, row);
                if (WHOLE || (i < rows && x + 1 < columns)) parts[row][1] = term(parts[row][1], pair.y, row);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            sum[row] = parts[row][0] + parts[row][1];
            sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
            sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
        }
    };
    total(mean, [](float sum, float value, int) { return sum + value; });
    const float count = WHOLE ? float(8 * HEIGHT) : float(rows * columns);
#pragma unroll
    for (int row = 0; row < 2; ++row) mean[row] /= count;
    total(square, [&](float sum, float value, int row) {
        const float d = value - mean[row];
        return __fmaf_rn(d, d, sum);
    });
}

struct Epilogue {
    void* out;
    uint8_t* scales;
    const float* bias;
    float* moments;
    int relu;
};

// Sums of a split, unfinished.
__device__ __forceinline__ void write_parts(
    const Sums& sums, const Work& work, int ty, int tx, float factor, float* out, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int output = work.first + (JOINT ? 64 * (threadIdx.x / 128 - 2) : 0) + 16 * warp + lane / 4;
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

// Waits for the threads of a consumer, 2 or 3.
__device__ __forceinline__ void group_sync(int group) {
    if (group == 2) {
        named_barrier_sync<128, 1>();
    } else {
        named_barrier_sync<128, 2>();
    }
}

// Four rows of 8 pixels at a time, by the warpgroup: 64 outputs of a pixel are 128 bytes of scratch, and eight lanes of
// its store. Columns of 8 outputs are permuted by the pixel, so that no two rows of a matrix have the same banks.
__device__ __forceinline__ void store(
    const Rounded& values, const Work& work, int ty, int tx, int first, const fp4::GlobalScale& global,
    const Epilogue& to, uint8_t* scratch, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warp_uniform(threadIdx.x / 128);
    const uint32_t address = shared_address(scratch) + (lane / 16 * 8 + lane % 8) * 128 +
                             ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
    // Where the first row of this warp lies, in eighths of outputs, and how far the next ones are from it.
    const int y = ty * HEIGHT + warp, x = tx * 8 + lane / 8, place = PLACES == 8 ? work.position % 4 : work.position;
    const int back = OUT_PAIRS ? lane % 8 / 4 : 0;  // 1: of the second slice
    const long long pixel = (long long)(work.slice(p) + back) * p.OH * p.OW * (UP ? 4 : 1) +
                            (UP ? (2LL * y + place / 2) * 2 * p.OW + 2 * x + place % 2 : (long long)y * p.OW + x);
    const int eighths = p.O / 8, right = (UP ? 8 : 4) * eighths;
    const long long down = (UP ? 16LL : 4LL) * p.OW * eighths;
    unsigned long long at = pixel * eighths + (OUT_PAIRS ? first / 16 + lane % 4 : first / 8 + lane % 8);
    const bool writes = !back || work.whole(p);
    const Target target{PACKED ? static_cast<uint32_t*>(to.out) : nullptr, PACKED ? to.scales : nullptr,
                        PACKED ? nullptr : static_cast<DTYPE*>(to.out)};
#pragma unroll
    for (int i = 0; i < HEIGHT; i += 4) {
        group_sync(group);  // what lies there was read
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                pairs[j] = *reinterpret_cast<const uint32_t*>(&values[i + 2 * half + j / 2][j % 2]);
            store_transposed(address + 2048 * half, pairs);
        }
        group_sync(group);
        uint4 words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = 4 * half + lane / 8;  // of the row of this warp
            words[half] = reinterpret_cast<const uint4*>(scratch)[64 * warp + 8 * column + ((lane % 8) ^ column)];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool has = y + i < p.OH && x + 4 * half < p.OW && writes;
            const unsigned long long place = 8 * (at + half * right);
            if (PACKED) {
                float v[channels::VECTOR];
                channels::widened<DTYPE>(words[half], v);
                target.put(v, global, place, has);
            } else if (has) {
                *reinterpret_cast<uint4*>(target.values + place) = words[half];
            }
        }
        at += down;
    }
}

__device__ __forceinline__ void finish(
    const Sums& sums, const Work& work, int ty, int tx, float factor, const fp4::GlobalScale& global, const Epilogue& to,
    uint8_t* scratch, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int first = work.first + (JOINT ? 64 * (threadIdx.x / 128 - 2) : 0);
    const int output = (OUT_PAIRS ? first / 2 + 16 * (warp % 2) : first + 16 * warp) + lane / 4;
    Rounded values;
    round_sums(sums, factor, to.bias, output, to.relu, values);
    const int rows = min(HEIGHT, p.OH - ty * HEIGHT), columns = min(8, p.OW - tx * 8);
    if (MOMENTS) {
        float mean[2], square[2];
        if (rows == HEIGHT && columns == 8) {
            measure<true>(values, rows, columns, mean, square);
        } else {
            measure<false>(values, rows, columns, mean, square);
        }
        const int back = OUT_PAIRS ? warp / 2 : 0;
        if (lane % 4 == 0 && (!back || work.whole(p))) {
            const long long part = ((long long)(work.slice(p) + back) * p.tiles_y + ty) * p.tiles_x + tx;
            float* const moments = to.moments + part * 4 * p.O + output;
            moments[0] = mean[0];
            moments[8] = mean[1];
            moments[p.O] = square[0];
            moments[p.O + 8] = square[1];
        }
        __syncwarp();
    }

    store(values, work, ty, tx, first, global, to, scratch, p);
    if (OUT_PAIRS) __syncwarp();  // lanes of a slice that is not there have written nothing
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) warpgroup_conv(
    const __grid_constant__ TensorMap weights, const uint8_t* x, const uint8_t* x_scales, const float* x_amax,
    const uint8_t* x2, const uint8_t* x2_scales, const float* x2_amax, const float* w_amax, const float* bias, void* out,
    uint8_t* scales, const float* out_amax, float* moments, int H, int W, int OH, int OW, int O, int padding_h,
    int padding_w, int relu, int tiles_y, int tiles_x, int chunks, int chunks2, int begin2, int splits, int works,
    float x_range, float x2_range, float w_range
#if VOLUME
    , int D, int OD, int padding_d, int steps
#endif
) {
#if !VOLUME
    constexpr int D = 1, OD = 1, padding_d = 0, steps = 1;
#endif
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* const buffers = shared + RINGS * RING;
    uint8_t* const scratch = buffers + BUFFERS * BUFFER;
    const uint32_t rings = shared_address(shared), bars = shared_address(scratch + 2 * SCRATCH);
    Barriers barriers{bars, bars + 8 * RINGS * STAGES, bars + 16 * RINGS * STAGES};
    barriers.read = barriers.decoded + 8 * BUFFERS;
    barriers.begin = barriers.read + 8 * BUFFERS;
    const Problem p{H, W, OH, OW, O, padding_h, padding_w, tiles_y, tiles_x, chunks, chunks2, begin2, splits, works,
                    D, OD, padding_d, steps};
    if (threadIdx.x == 0) {
        for (int i = 0; i < RINGS * STAGES; ++i) {
            mbarrier_init(barriers.loaded + 8 * i, 1);
            mbarrier_init(barriers.freed + 8 * i, CONSUMER_WARPS / RINGS);
        }
        for (int i = 0; i < BUFFERS; ++i) {
            mbarrier_init(barriers.decoded + 8 * i, DECODERS / 32);
            mbarrier_init(barriers.read + 8 * i, CONSUMER_WARPS);
        }
        mbarrier_init(barriers.begin, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    begin_after_primary();
    const int warp = warp_uniform(threadIdx.x / 32);
    // Each consumer of JOINT has a ring of its own: neither waits for the other.
    const int number = JOINT ? (warp < LOADERS / 32 ? warp : warp / 4 - 2) : 0;
    const uint32_t ring = rings + RING * number;
    barriers.loaded += 8 * STAGES * number;
    barriers.freed += 8 * STAGES * number;
    if (threadIdx.x < PRODUCERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (warp < RINGS) {
            load_weights(weights, ring, 64 * number, barriers, p);
        } else if (warp >= LOADERS / 32) {
            decode_pixels({x, x_scales, chunks / KD}, {x2, x2_scales, chunks2 / KD}, buffers, barriers, p);
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const float first_factor = *x_amax / x_range, second_factor = chunks2 ? *x2_amax / x2_range : first_factor;
        // No division by zero; an amax of 0 means that all values of the source are 0.
        const float divisor = chunks2 && second_factor == 0.f ? 1.f : second_factor;
        const float scale = *w_amax / w_range * 16384.f;  // elements of both operands are times 2^-7
        const fp4::GlobalScale global = PACKED ? fp4::global_scale(*out_amax) : fp4::GlobalScale{};
        const Epilogue to{out, scales, bias, moments, relu};
        const int group = warp / 4 - 2;
        if (LAG && group == 1) mbarrier_wait(barriers.begin, 0);
        int step = 0, count = 0;
#pragma unroll 1
        for (Work work(blockIdx.x, p); work.valid(p); work = Work(work.index + gridDim.x, p)) {
            Sums sums;
            accumulate(sums, work, step, count, first_factor / divisor, shared_address(buffers), ring, barriers, p);
            const float factor = (work.end > chunks ? divisor : first_factor) * scale;
            const int tx = work.tx + (JOINT ? 0 : group);
            if (tx >= tiles_x) continue;
            if (SPLIT) {
                write_parts(sums, work, work.ty, tx, factor, static_cast<float*>(out), p);
            } else {
                finish(sums, work, work.ty, tx, factor, global, to, scratch + SCRATCH * group, p);
            }
        }
        if (LAG && threadIdx.x == PRODUCERS && count * TAPS < LAG) mbarrier_arrive(barriers.begin);
    }
}
