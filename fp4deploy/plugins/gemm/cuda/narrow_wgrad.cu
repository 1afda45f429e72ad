// The weight gradient of a convolution of few channels, FP16 or BF16, on tensor cores.
//
//   parts[p, o, ky, kx, c] = sum over images and the pixels of p of g[n, y, x, o] x[n, y STRIDE + ky - pad, x STRIDE + kx - pad, c]
//
// A GEMM of outputs by (taps x channels) that contracts all pixels. With few channels both operands are read once from
// memory and nothing else counts: every tap reads x from shared memory.
//
//   tiles       A thread block goes over tiles blockIdx.x, blockIdx.x + gridDim.x, ... of ROWS x 32 pixels of g. The tile of
//               g and that of x with its border lie in shared memory as they lie in memory, pixel after pixel, channels
//               padded with zeros; the next tiles are copied meanwhile, into the other of two buffers.
//   fragments   ldmatrix.trans takes 8 pixels x 8 channels from 8 addresses of 16 bytes, so that a tap, a shift of x, is
//               another address. 16 pixels of a row are the K of an mma, 16 outputs its M, 8 channels of a tap its N.
//   warps       ACROSS of them divide the outputs, SHARES the blocks of taps and channels, the rest the pixels. Sums stay
//               in registers until all tiles are done; then those of the warps are added in order, in shared memory.
//
// The order of a sum: pixels of a warp by tiles and strips of 16, warps, then thread blocks (the caller adds `parts`).
//
// Macros: HALF __half or __nv_bfloat16; C channels, O outputs; KH, KW, STRIDE; ROWS of a tile; ACROSS, SHARES, see above;
// RESIDENT blocks of a multiprocessor.
// g: HALF [N, OH, OW, O], x: HALF [N, H, W, C], contiguous; parts: float32 [programs, O, KH, KW, C].
// Launch: block 256, grid programs, shared memory `shared_bytes` of narrow_wgrad.py.
#include "channels.cuh"
#include "tensor_core.cuh"

#ifndef HALF
#define HALF __half
#endif
#ifndef C
#define C 16
#endif
#ifndef O
#define O 16
#endif
#ifndef KH
#define KH 3
#endif
#ifndef KW
#define KW 3
#endif
#ifndef STRIDE
#define STRIDE 1
#endif
#ifndef ROWS
#define ROWS 8
#endif
#ifndef ACROSS
#define ACROSS 1
#endif
#ifndef SHARES
#define SHARES 1
#endif
#ifndef RESIDENT
#define RESIDENT 2
#endif

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS, WIDTH = 32;
constexpr int PARTS = WARPS / (ACROSS * SHARES);            // warps across pixels
constexpr int UNITS_X = (C + 7) / 8, UNITS_G = (O + 15) / 16 * 2;  // of 8 channels of a pixel
constexpr int PITCH_X = 8 * (UNITS_X | 1), PITCH_G = 8 * (UNITS_G | 1);  // odd numbers of units: no bank conflicts
constexpr int OUTPUTS = UNITS_G / 2 / ACROSS;               // mma across the outputs of a warp
constexpr int BLOCKS = KH * KW * UNITS_X, COLUMNS = 8 * BLOCKS;
constexpr int PAIRS = ((BLOCKS + SHARES - 1) / SHARES + 1) / 2;  // of blocks of a warp
constexpr int BORDERED = (WIDTH - 1) * STRIDE + KW, DOWN = (ROWS - 1) * STRIDE + KH;
constexpr int ELEMENTS_X = DOWN * BORDERED * PITCH_X, ELEMENTS = ELEMENTS_X + ROWS * WIDTH * PITCH_G;  // of a buffer

static_assert(ACROSS * SHARES * PARTS == WARPS && OUTPUTS * ACROSS * 2 == UNITS_G, "warps");

struct Shape {
    int H, W, OH, OW, padding_h, padding_w, across, per_item;
};

// Eight channels of a pixel to shared memory, or zeros.
template <int CHANNELS>
__device__ __forceinline__ void copy_unit(HALF* to, const HALF* from, int unit, bool has) {
    if constexpr (CHANNELS % 8 == 0) {
        const bool inside = has && 8 * unit < CHANNELS;
        copy_16_bytes(shared_address(to), inside ? from + 8 * unit : from, inside);
    } else {
        alignas(16) HALF v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = has && 8 * unit + i < CHANNELS ? from[8 * unit + i] : HALF(0.f);
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v);
    }
}

__device__ __forceinline__ void copy_tiles(HALF* to, const HALF* g, const HALF* x, int index, const Shape& s) {
    const int item = index / s.per_item, tile = index - item * s.per_item, down = tile / s.across;
    const int y = down * ROWS, left = (tile - down * s.across) * WIDTH;
    const HALF* const image = x + (long long)item * s.H * s.W * C;
    for (int i = threadIdx.x; i < DOWN * BORDERED * UNITS_X; i += THREADS) {
        const int pixel = i / UNITS_X, unit = i % UNITS_X;
        const int row = y * STRIDE - s.padding_h + pixel / BORDERED;
        const int column = left * STRIDE - s.padding_w + pixel % BORDERED;
        const bool has = row >= 0 && row < s.H && column >= 0 && column < s.W;
        copy_unit<C>(to + pixel * PITCH_X + 8 * unit, has ? image + (row * s.W + column) * C : image, unit, has);
    }
    const HALF* const map = g + (long long)item * s.OH * s.OW * O;
    for (int i = threadIdx.x; i < ROWS * WIDTH * UNITS_G; i += THREADS) {
        const int pixel = i / UNITS_G, unit = i % UNITS_G, row = y + pixel / WIDTH, column = left + pixel % WIDTH;
        const bool has = row < s.OH && column < s.OW;
        HALF* const at = to + ELEMENTS_X + pixel * PITCH_G + 8 * unit;
        copy_unit<O>(at, has ? map + (row * s.OW + column) * O : map, unit, has);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) narrow_wgrad(
    const HALF* g, const HALF* x, float* parts, int H, int W, int OH, int OW, int padding_h, int padding_w, int across,
    int per_item, int tiles) {
    extern __shared__ __align__(16) uint8_t shared[];
    HALF* const buffers = reinterpret_cast<HALF*>(shared);
    const Shape shape{H, W, OH, OW, padding_h, padding_w, across, per_item};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp % PARTS, share = warp / PARTS % SHARES, slice = warp / PARTS / SHARES;
    const int matrix = lane / 8, row = lane % 8;  // that this lane gives ldmatrix the address of
    begin_after_primary();

    float d[OUTPUTS][2 * PAIRS][4] = {};
    // Of g: matrices 1 and 3 are the outputs 8 to 15, matrices 2 and 3 the pixels 8 to 15; registers a0 to a3.
    const int of_g = (row + 8 * (matrix / 2)) * PITCH_G + 8 * (matrix % 2) + 16 * OUTPUTS * slice;
    int of_x[PAIRS];  // matrices 1 and 3 are the pixels 8 to 15, matrices 2 and 3 the second block: b0, b1 of both
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const int block = share * 2 * PAIRS + 2 * pair + matrix / 2, tap = block < BLOCKS ? block / UNITS_X : 0;
        const int unit = block < BLOCKS ? block % UNITS_X : 0;
        of_x[pair] = (tap / KW * BORDERED + tap % KW + (row + 8 * (matrix % 2)) * STRIDE) * PITCH_X + 8 * unit;
    }
    if (blockIdx.x < tiles) copy_tiles(buffers, g, x, blockIdx.x, shape);
    wait_for_copies();
    __syncthreads();
    int turn = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, turn ^= 1) {
        const HALF* const tile = buffers + turn * ELEMENTS;
        if (index + gridDim.x < tiles) copy_tiles(buffers + (turn ^ 1) * ELEMENTS, g, x, index + gridDim.x, shape);
#pragma unroll 1
        for (int strip = part; strip < 2 * ROWS; strip += PARTS) {
            const int down = strip / 2, right = 16 * (strip % 2);
            const uint32_t from_g = shared_address(tile + ELEMENTS_X + (down * WIDTH + right) * PITCH_G + of_g);
            const uint32_t from_x = shared_address(tile + (down * BORDERED + right) * STRIDE * PITCH_X);
            uint32_t a[OUTPUTS][4];
#pragma unroll
            for (int m = 0; m < OUTPUTS; ++m) load_transposed(from_g + 32 * m, a[m]);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                uint32_t b[4];
                load_transposed(from_x + 2 * of_x[pair], b);
#pragma unroll
                for (int m = 0; m < OUTPUTS; ++m) {
                    multiply<HALF>(d[m][2 * pair], a[m], b[0], b[1]);
                    multiply<HALF>(d[m][2 * pair + 1], a[m], b[2], b[3]);
                }
            }
        }
        wait_for_copies();
        __syncthreads();
    }

    float* const sums = reinterpret_cast<float*>(shared);  // [outputs, taps, channels padded]
#pragma unroll 1
    for (int turn_of = 0; turn_of < PARTS; ++turn_of) {
        if (part == turn_of) {
#pragma unroll
            for (int m = 0; m < OUTPUTS; ++m)
#pragma unroll
                for (int t = 0; t < 2 * PAIRS; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int output = 16 * (OUTPUTS * slice + m) + lane / 4 + 8 * (i / 2);
                        const int block = share * 2 * PAIRS + t;
                        if (block >= BLOCKS) continue;
                        float& sum = sums[output * COLUMNS + 8 * block + 2 * (lane % 4) + i % 2];
                        sum = turn_of ? sum + d[m][t][i] : d[m][t][i];
                    }
        }
        __syncthreads();
    }
    float* const to = parts + (long long)blockIdx.x * (O * KH * KW * C);
    for (int i = threadIdx.x; i < O * KH * KW * C; i += THREADS)
        to[i] = sums[i / C / (KH * KW) * COLUMNS + i / C % (KH * KW) * (8 * UNITS_X) + i % C];
}
