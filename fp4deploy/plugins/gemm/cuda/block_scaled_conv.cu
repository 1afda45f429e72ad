// Convolution of packed NVFP4 by block-scaled mma.sync, for SM120 and SM121.
//
//   out[y, x, n] = round(relu(sum over taps and channels of in[y S + ky D - padding, x S + kx D - padding, c]
//                             w[n, ky, kx, c] + bias[n]))
//
// Triton's implicit GEMM (triton/gemm.py) loads the pixels of a tile again for every tap, and all its warps wait for each
// other in each step. Here producer warps copy and consumer warps multiply, and with HALO a tile of pixels lies in shared
// memory with its border, once for all taps: a tap is another address. Of 8 x 16 pixels, 128 outputs and 3 x 3 taps a
// block then reads 48 KB for 64 channels instead of 83 KB.
//
//   work          a block computes TH x TW pixels of OUTPUTS outputs; a consumer warp 64 x 64 of them: 4 x 8 mma.m16n8k64
//   chunk         64 channels of a source, K of one mma: 32 bytes of codes and 4 scales of a pixel, or of an output
//   weights       STAGES stages of [OUTPUTS, 32] codes and [OUTPUTS, 4] scales: one tap of one chunk; without HALO with
//                 the pixels of the tap
//   pixels        with HALO, which is for STRIDE 1, BUFFERS buffers of one chunk: [DOWN, ACROSS], codes and scales
//   banks         16 bytes of a row exchange places with the other 16 by bit 2 of its index: eight rows in sequence, which
//                 ldmatrix reads at a time, lie in different banks
//   mbarriers     full: all copies of a stage have come (cp.async.mbarrier.arrive); empty: every consumer warp has read it
//
// The instruction takes the four scales of a row from one register of one lane. A register of A serves 32 rows (thread-id
// 0 and 1), one of B 32 columns (thread-id 0 to 3), so that a step of 32 mma needs 4 loads of scales.
//
// Which output is which column is free. Of each 32 outputs, 8 a + 2 j + b is column 2 a + b of the mma number j: a lane has
// eight neighbouring outputs of a pixel, half a block of a packed output.
//
// Registers are reallocated where consumers and producers are warpgroups: sums alone are 128 of a thread's.
//
// The order of a sum: for each source, chunk and tap one mma. Channels, pixels and outputs that are not there are zeros.
//
// Macros: DTYPE of the output; KH, KW, STRIDE, DILATION; TH, TW, whose product is a multiple of 64, TW of 8; OUTPUTS, a
// multiple of 64; HALO; WHOLE: sources have whole chunks; SOURCES 1 or 2; PACKED: whether the output is; EIGHTS: O is a
// multiple of 8; STAGES, BUFFERS; PRODUCERS: warps; RESIDENT: blocks of a multiprocessor.
// x, x2: codes uint8 [N, H, W, CB]; their scales: E4M3 uint8 [N, H, W, CB / 8]; amax: float32 []; w: uint8
// [O, KH, KW, CB + CB2], w_scales; bias: float32 [O] or null; out: DTYPE [N, OH, OW, O], or codes of whole blocks, with
// scales.
// Launch: block 32 (consumers + PRODUCERS), grid: tiles x blocks of outputs, the outputs first; shared memory
// `shared_bytes` of block_scaled.py.
#include "pack_target.cuh"
#include "sm90.cuh"
#include "tensor_core.cuh"


namespace {

constexpr int ALONG_M = TH * TW / 64, CONSUMERS = ALONG_M * (OUTPUTS / 64), THREADS = 32 * (CONSUMERS + PRODUCERS);
constexpr int CODES = 32, SCALES = 4;                     // bytes of a chunk
constexpr int PIECE = WHOLE ? 16 : 8, PIECES = CODES / PIECE;  // that one copy has, and copies of a row
constexpr int AT_A_TIME = WHOLE ? 2 : 1;  // copies of pixels, as many as producers have registers for
constexpr int ACROSS = TW + (HALO ? (KW - 1) * DILATION : 0), DOWN = TH + (HALO ? (KH - 1) * DILATION : 0);
constexpr int PIXELS = DOWN * ACROSS;
constexpr int PIXEL_BYTES = (PIXELS * (CODES + SCALES) + 127) / 128 * 128, WEIGHT_BYTES = OUTPUTS * (CODES + SCALES);
constexpr int STAGE_BYTES = WEIGHT_BYTES + (HALO ? 0 : PIXEL_BYTES);
constexpr int BARRIERS = STAGES * STAGE_BYTES + (HALO ? BUFFERS * PIXEL_BYTES : 0);  // where they begin
constexpr bool REALLOCATES = CONSUMERS == 4 && PRODUCERS == 4;
constexpr int PRODUCER_REGISTERS = 48, CONSUMER_REGISTERS = 208;  // together what two threads have at the start
// Copies arrive for each producer thread; scales that are stored by the threads themselves arrive with them.
constexpr int COPYING = 32 * PRODUCERS, ARRIVALS = COPYING * (WHOLE ? 1 : 2);

static_assert(!HALO || STRIDE == 1, "a step copies what its tap reads of a larger stride");
static_assert(TH * TW % 64 == 0 && TW % 8 == 0 && OUTPUTS % 64 == 0, "consumer warps have 64 pixels and 64 outputs");

// A ring of COUNT slots, each with an mbarrier `full` and one `empty`.
template <int COUNT>
struct Ring {
    uint32_t full;
    int slot = 0;
    uint32_t phase = 0;

    __device__ explicit Ring(uint32_t barriers) : full(barriers) {}
    __device__ uint32_t empty() const { return full + 8 * COUNT; }
    __device__ void initialise() const {
        for (int i = 0; i < COUNT; ++i) {
            mbarrier_init(full + 8 * i, ARRIVALS);
            mbarrier_init(empty() + 8 * i, CONSUMERS);
        }
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * slot, phase); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty() + 8 * slot, phase ^ 1u); }
    __device__ __forceinline__ void fill() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * slot) : "memory");
        if (!WHOLE) mbarrier_arrive(full + 8 * slot);
    }
    __device__ __forceinline__ void release() const {  // called by a warp
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty() + 8 * slot);
    }
    __device__ __forceinline__ void next() {
        if (++slot == COUNT) slot = 0, phase ^= 1u;
    }
};
using Stages = Ring<STAGES>;
using Buffers = Ring<BUFFERS>;

struct Source {
    const uint8_t *codes, *scales;  // of the item
    int bytes;                      // of a pixel
    int first;                      // where its channels begin in the bytes of a tap
    __device__ int chunks() const { return (bytes + CODES - 1) / CODES; }
};

// Where byte `at` of a row is.
__device__ __forceinline__ uint32_t place(int row, int at) { return row * CODES + (at ^ (row * 4 & 16)); }

__device__ __forceinline__ void copy_codes(uint32_t to, const uint8_t* from, bool has) {
    if (WHOLE) {
        copy_16_bytes(to, from, has);
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(has ? 8 : 0) : "memory");
    }
}

// count: scales that are there, of four.
__device__ __forceinline__ void copy_scales(uint32_t to, const uint8_t* from, int count) {
    if (WHOLE) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(count > 0 ? 4 : 0)
                     : "memory");
        return;
    }
    uint32_t word = 0u;
#pragma unroll
    for (int i = 0; i < SCALES; ++i)
        if (i < count) word |= uint32_t(from[i]) << (8 * i);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// The pixels of a chunk, from row `top` and column `left` on; without HALO those that one tap reads.
__device__ __forceinline__ void load_pixels(
    uint32_t to, const Source& source, int chunk, int top, int left, int H, int W, int thread) {
    const auto pixel = [&](int position, long long& at) {
        const int y = top + position / ACROSS * STRIDE, x = left + position % ACROSS * STRIDE;
        at = (long long)y * W + x;
        return y >= 0 && y < H && x >= 0 && x < W;
    };
    const int blocks = source.bytes / 8;
#pragma unroll AT_A_TIME
    for (int more = 0; more < PIXELS * PIECES; more += COPYING) {
        const int index = more + thread;
        if (PIXELS * PIECES % COPYING && index >= PIXELS * PIECES) break;
        const int byte = chunk * CODES + index % PIECES * PIECE;
        long long at;
        const bool has = pixel(index / PIECES, at) && (WHOLE || byte < source.bytes);
        copy_codes(to + place(index / PIECES, index % PIECES * PIECE), source.codes + at * source.bytes + byte, has);
    }
#pragma unroll AT_A_TIME
    for (int more = 0; more < PIXELS; more += COPYING) {
        const int index = more + thread;
        if (PIXELS % COPYING && index >= PIXELS) break;
        long long at;
        const bool has = pixel(index, at);
        copy_scales(to + PIXELS * CODES + index * SCALES, source.scales + at * blocks + chunk * SCALES,
                    has ? blocks - chunk * SCALES : 0);
    }
}

// The output, of OUTPUTS, whose weights are in row `position` of a stage: bits of the position in another order, so that
// that of a sum of positions with different bits is the sum.
__device__ __forceinline__ constexpr int output_of(int position) {
    return position / 32 * 32 + position % 8 / 2 * 8 + position % 32 / 8 * 2 + position % 2;
}

// w, w_scales: those of the tap and chunk in the first of the block's outputs; has: bytes that the source has from there;
// left: outputs from there; pitch: bytes of an output.
__device__ __forceinline__ void load_weights(
    uint32_t to, const uint8_t* w, const uint8_t* w_scales, int has, int left, long long pitch, int thread) {
    const int row = thread / PIECES, byte = thread % PIECES * PIECE, output = output_of(row), of_scale = output_of(thread);
    const uint8_t *const codes = w + output * pitch + byte, *const scales = w_scales + of_scale * (pitch / 8);
#pragma unroll
    for (int more = 0; more < OUTPUTS; more += COPYING / PIECES) {
        const bool there = output + output_of(more) < left && (WHOLE || byte < has);
        copy_codes(to + place(row, byte) + more * CODES, codes + output_of(more) * pitch, there);
    }
#pragma unroll
    for (int more = 0; more < OUTPUTS; more += COPYING) {
        if (OUTPUTS % COPYING && more + thread >= OUTPUTS) break;
        const int count = of_scale + output_of(more) < left ? has / 8 : 0;
        copy_scales(to + OUTPUTS * CODES + (more + thread) * SCALES, scales + output_of(more) * (pitch / 8), count);
    }
}

template <int OF_A, int OF_B>
__device__ __forceinline__ void multiply_scaled(
    float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, uint32_t scales_a, uint32_t scales_b) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, %12}, %11, {0, %13};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scales_a), "r"(scales_b), "n"(OF_A),
          "n"(OF_B));
}

using Sums = float[4][8][4];

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

// What a consumer warp multiplies in a step.
struct Fragments {
    uint32_t a[4][4], b[4][4], scales_a[2], scales_b[2];

    // pixels, weights: their addresses; rows, scale_rows: where this lane's pixels are, without the tap, which is `tap`
    // rows later; first: of the warp's outputs.
    __device__ __forceinline__ void load(
        uint32_t pixels, uint32_t weights, const int (&rows)[4], const int (&scale_rows)[2], int tap, int first) {
        const int lane = threadIdx.x % 32, of_scale = lane % 4 * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scales_a[i] = load_word(pixels + PIXELS * CODES + (scale_rows[i] + tap) * SCALES);
            scales_b[i] = load_word(weights + OUTPUTS * CODES + (first + 32 * i + of_scale) * SCALES);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            load_matrices(pixels + place(rows[i] + tap, lane / 16 * 16), a[i]);
            load_matrices(weights + place(first + 16 * i + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16), b[i]);
        }
    }
    __device__ __forceinline__ void multiply(Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
#pragma unroll
            for (int n = 0; n < 8; n += 4) {
                const uint32_t of_a = scales_a[i / 2], of_b = scales_b[n / 4];
                multiply_scaled<0, 0>(sums[i][n], a[i], b[n / 2], of_a, of_b);
                multiply_scaled<0, 1>(sums[i][n + 1], a[i], b[n / 2] + 2, of_a, of_b);
                multiply_scaled<0, 2>(sums[i][n + 2], a[i], b[n / 2 + 1], of_a, of_b);
                multiply_scaled<0, 3>(sums[i][n + 3], a[i], b[n / 2 + 1] + 2, of_a, of_b);
                multiply_scaled<1, 0>(sums[i + 1][n], a[i + 1], b[n / 2], of_a, of_b);
                multiply_scaled<1, 1>(sums[i + 1][n + 1], a[i + 1], b[n / 2] + 2, of_a, of_b);
                multiply_scaled<1, 2>(sums[i + 1][n + 2], a[i + 1], b[n / 2 + 1], of_a, of_b);
                multiply_scaled<1, 3>(sums[i + 1][n + 3], a[i + 1], b[n / 2 + 1] + 2, of_a, of_b);
            }
        }
    }
};

// Where pixel m of the tile is in shared memory, for the first tap.
__device__ __forceinline__ int row_of(int m) { return m / TW * ACROSS + m % TW; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) block_scaled_conv(
    const uint8_t* x, const uint8_t* x_scales, const float* x_amax, const uint8_t* x2, const uint8_t* x2_scales,
    const float* x2_amax, const uint8_t* w, const uint8_t* w_scales, const float* w_amax, const float* bias, void* out,
    uint8_t* out_scales, const float* out_amax, int H, int W, int CB, int CB2, int OH, int OW, int O, int padding_y,
    int padding_x, int relu, int tiles_y, int tiles_x, float x_range, float x2_range, float w_range) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t memory = shared_address(shared);
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    Stages stages(memory + BARRIERS);
    Buffers buffers(memory + BARRIERS + 16 * STAGES);
    if (threadIdx.x == 0) {
        stages.initialise();
        if (HALO) buffers.initialise();
    }
    const int parts = (O + OUTPUTS - 1) / OUTPUTS, first = int(blockIdx.x) % parts * OUTPUTS, tile = blockIdx.x / parts;
    const int item = tile / (tiles_y * tiles_x), y0 = tile / tiles_x % tiles_y * TH, x0 = tile % tiles_x * TW;
    begin_after_primary();
    __syncthreads();  // mbarriers are initialised

    if (warp >= CONSUMERS) {
        if (REALLOCATES) give_registers<PRODUCER_REGISTERS>();
        const int thread = threadIdx.x - 32 * CONSUMERS, tap_bytes = CB + CB2;
        const int top = y0 * STRIDE - padding_y, left = x0 * STRIDE - padding_x;
        const long long pitch = (long long)KH * KW * tap_bytes, image = (long long)item * H * W;
        w += first * pitch;
        w_scales += first * (pitch / 8);
#pragma unroll 1
        for (int s = 0; s < SOURCES; ++s) {
            Source source = {x + image * CB, x_scales + image * (CB / 8), CB, 0};
            if (s == 1) source = {x2 + image * CB2, x2_scales + image * (CB2 / 8), CB2, CB};
#pragma unroll 1
            for (int chunk = 0; chunk < source.chunks(); ++chunk) {
                if (HALO) {
                    buffers.wait_empty();
                    load_pixels(memory + STAGES * STAGE_BYTES + buffers.slot * PIXEL_BYTES, source, chunk, top, left, H, W,
                                thread);
                    buffers.fill();
                    buffers.next();
                }
                const int byte = source.first + chunk * CODES, has = source.bytes - chunk * CODES;
#pragma unroll 1
                for (int tap = 0; tap < KH * KW; ++tap) {
                    const uint32_t stage = memory + stages.slot * STAGE_BYTES;
                    const int at = tap * tap_bytes + byte;
                    stages.wait_empty();
                    load_weights(stage, w + at, w_scales + at / 8, has, O - first, pitch, thread);
                    if (!HALO)
                        load_pixels(stage + WEIGHT_BYTES, source, chunk, top + tap / KW * DILATION,
                                    left + tap % KW * DILATION, H, W, thread);
                    stages.fill();
                    stages.next();
                }
            }
        }
        for (int i = 0; i < STAGES; ++i, stages.next()) stages.wait_empty();  // no thread exits with copies under way
        return;
    }

    if (REALLOCATES) take_registers<CONSUMER_REGISTERS>();
    const int first_pixel = warp % ALONG_M * 64, first_row = warp / ALONG_M * 64;
    int rows[4], scale_rows[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = row_of(first_pixel + 16 * i + lane % 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) scale_rows[i] = row_of(first_pixel + 32 * i + lane % 4 * 8 + lane / 4);
    const float first_factor = *x_amax / x_range, second = SOURCES == 2 ? *x2_amax / x2_range : first_factor;
    // No division by zero; an amax of 0 means that all values of the source are 0.
    const float last_factor = SOURCES == 2 && second == 0.f ? 1.f : second;
    const float factor = last_factor * (*w_amax / w_range);

    Sums sums = {};
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
        const int chunks = ((s == 0 ? CB : CB2) + CODES - 1) / CODES;
        if (s == 1) {
            const float ratio = first_factor / last_factor;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums[i][n][k] *= ratio;
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (HALO) buffers.wait_full();
#pragma unroll 1
            for (int ky = 0; ky < KH; ++ky) {
#pragma unroll 1
                for (int kx = 0; kx < KW; ++kx) {
                    const uint32_t stage = memory + stages.slot * STAGE_BYTES;
                    const uint32_t pixels = HALO ? memory + STAGES * STAGE_BYTES + buffers.slot * PIXEL_BYTES
                                                 : stage + WEIGHT_BYTES;
                    const int tap = HALO ? (ky * ACROSS + kx) * DILATION : 0;
                    Fragments fragments;
                    stages.wait_full();
                    fragments.load(pixels, stage, rows, scale_rows, tap, first_row);
                    stages.release();
                    stages.next();
                    fragments.multiply(sums);
                }
            }
            if (HALO) {
                buffers.release();
                buffers.next();
            }
        }
    }

    const int width = PACKED ? (O + 15) / 16 * 16 : O;  // elements of a pixel of the output
    const Target target = {static_cast<uint32_t*>(PACKED ? out : nullptr), out_scales,
                           static_cast<DTYPE*>(PACKED ? nullptr : out)};
    const float least = relu ? 0.f : -INFINITY;
    const fp4::GlobalScale global = PACKED ? fp4::global_scale(*out_amax) : fp4::GlobalScale{};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const int output = first + first_row + 32 * part + lane % 4 * 8;
        float added[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) added[i] = bias && output + i < O ? bias[output + i] : 0.f;
#pragma unroll
        for (int half = 0; half < 8; ++half) {
            const int m = first_pixel + 8 * half + lane / 4, y = y0 + m / TW, at_x = x0 + m % TW;
            const bool has = y < OH && at_x < OW && output < width;
            const long long at = ((long long)item * OH * OW + (long long)y * OW + at_x) * width + output;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v[i] = fp4::nan_max(sums[half / 2][4 * part + i / 2][half % 2 * 2 + i % 2] * factor + added[i], least);
            if (PACKED) {
                channels::rounded<DTYPE>(v, [&](int i) { return output + i < O ? v[i] : 0.f; });
                target.put(v, global, at, has);
            } else if (EIGHTS && has) {
                channels::store(target.values + at, v);
            } else if (has) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (output + i < O) target.values[at + i] = narrow<DTYPE>(v[i]);
            }
        }
    }
}
