// Convolutions of FP16 or BF16 feature maps whose sum has few elements (K = taps x channels up to some 200) on tensor cores: the
// first layer of a network and its last one, which stay in 16 bits.
//
//   y = round(relu(bias + sum over taps and channels of x w))           and optionally moments of y for a GroupNorm
//
// With so few multiplications an output is bound by memory: by writing 64 channels of a pixel of which 3 were read, or by
// reading 64 of which 12 are written. So nothing but x, w, bias and y moves, each element once, and the kernel is about
// keeping loads and stores wide and under way.
//
//   tiles           A thread block goes over tiles blockIdx.x, blockIdx.x + gridDim.x, ... of HEIGHT x 32 outputs. Its
//                   weights are B fragments in registers, or in shared memory if they are more than HELD allows.
//   input           A tile with its border lies in shared memory, pixel after pixel, channels padded with zeros to a
//                   multiple of 4. The next tile is read while this one is multiplied, into the other of two buffers.
//                   x has any strides, so that images in NCHW, FP32 or FP16, need no pass of their own.
//   POINT           A filter of 1 x 1 shares no pixels: A fragments are loaded from global memory, 16 bytes a lane. A
//                   tile is a run of pixels then, and there is no shared memory and no barrier.
//   fragments       A lane has four neighbouring elements of K in each mma of 16: one 8-byte load for registers a0, a2.
//                   Columns are permuted, so that a lane has LANE neighbouring outputs of a pixel: one 16-byte store.
//   outputs         of a pixel that are no multiple of 4 go through shared memory, from where the row of a strip of 16
//                   pixels is stored in 16-byte words, whatever its alignment (STORE 0).
//
// The order of a sum: bias, then one mma for each 16 elements of K. K runs over rows and columns of the filter and
// channels, padded to a multiple of 4; with POINT over channels. Within an mma the order is the tensor core's.
//
// Moments: mean and squared deviations of each channel over a tile, of the rounded values (norm_statistics.cu). A warp
// adds deviations from its first pixel, and warps are combined by Chan's formula. As the first pixel is one of the values,
// squared deviations of n pixels cancel by n at most.
//
// Macros: HALF __half or __nv_bfloat16, of w and out; VALUE float or HALF, of x; C channels; KH, KW, STRIDE; COLUMNS 16, 32 or 64 outputs of a block; ROWS of the
// tile that a warp computes, 32 pixels each; STORE outputs of a store, 8, 4, 2, 1 or 0, see above; MOMENTS, POINT 0 or 1;
// RESIDENT blocks of a multiprocessor.
// x: VALUE, pixel (y, x) of channel c at y row + x column + c plane, items `item` elements apart; where C is a multiple of
// 8, and with POINT: HALF [N, H, W, C], contiguous. w: HALF [O, KH, KW, C]; bias: float32 [O] or null; out: HALF
// [N, OH, OW, O]; moments: float32 [N tiles, 2, 2, O]. With POINT OH is 1 and OW the pixels of an item.
// Launch: block 256, grid (programs, ceil(O / COLUMNS)), shared memory `shared_bytes` of small_k.py.
#include "channels.cuh"
#include "tensor_core.cuh"

#ifndef HALF
#define HALF __half
#endif
#ifndef VALUE
#define VALUE HALF
#endif
#ifndef C
#define C 3
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
#ifndef COLUMNS
#define COLUMNS 64
#endif
#ifndef ROWS
#define ROWS 4
#endif
#ifndef STORE
#define STORE 8
#endif
#ifndef MOMENTS
#define MOMENTS 0
#endif
#ifndef POINT
#define POINT 0
#endif
#ifndef RESIDENT
#define RESIDENT 2
#endif

namespace {

using Two = channels::Pair<HALF>::type;

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int WIDE = COLUMNS < 32 ? COLUMNS : 32;        // outputs of a warp
constexpr int SLICES = COLUMNS / WIDE, PARTS = WARPS / SLICES;  // warps across outputs, and across pixels
constexpr int LANE = WIDE / 4, BLOCKS = WIDE / 8;        // outputs of a lane; mma across the outputs of a warp
constexpr int STRIPS = 2 * ROWS;                         // of 16 pixels, of a warp
constexpr int HEIGHT = POINT ? 1 : PARTS * ROWS, WIDTH = POINT ? PARTS * STRIPS * 16 : 32;

constexpr int PADDED = (C + 3) / 4 * 4, K = KH * KW * PADDED, STEPS = (K + 15) / 16;
constexpr bool PAIRED = C % 32 == 0;                     // with POINT: a lane's 16 bytes are elements of two steps
constexpr bool HELD = STEPS * BLOCKS <= 16;              // 32 registers
constexpr int AT_ONCE = !POINT && HELD ? 1 : 2;          // strips whose mma share the fragments of weights

constexpr int UNIT = C % 8 == 0 ? 8 : 4, UNITS = PADDED / UNIT;  // channels that a thread copies at once; of a pixel
constexpr int PITCH = PADDED % 16 == 0 && PADDED % 32 != 16 ? PADDED + 16 : PADDED;  // of pixels: no bank conflicts
constexpr int BORDERED = (WIDTH - 1) * STRIDE + KW, PIXELS = ((HEIGHT - 1) * STRIDE + KH) * BORDERED;
constexpr int LOADS = POINT ? 1 : (PIXELS * UNITS + THREADS - 1) / THREADS;  // of a thread
constexpr int PER_LOAD = C < 4 ? C : 4;
constexpr int FRAGMENTS = HELD ? 0 : STEPS * SLICES * BLOCKS / 2 * 32;  // of 16 bytes: those of two blocks of outputs
constexpr int STAGED = STORE ? 8 : 16 * WIDE + 8;        // halves of a strip's outputs, and room for alignment

static_assert(!POINT || (C % 16 == 0 && KH == 1 && KW == 1 && STRIDE == 1), "POINT");
static_assert(STORE <= LANE && (STORE || SLICES == 1), "STORE");

struct Shape {
    int H, W, OH, OW, O, padding_h, padding_w, across, per_item;
};

// Where a tile is.
struct Place {
    int item, y, x;

    __device__ Place(int index, const Shape& shape) {
        item = index / shape.per_item;
        const int tile = index - item * shape.per_item, down = tile / shape.across;
        y = down * HEIGHT, x = (tile - down * shape.across) * WIDTH;
    }
};

// Pixels of the output that a part of a tile has: rows of a tile with POINT 0, else a piece of the run.
__device__ __forceinline__ int pixels(const Place& place, const Shape& shape, int part) {
    if (POINT) return min(max(shape.OW - place.x - part * STRIPS * 16, 0), STRIPS * 16);
    return min(max(shape.OH - place.y - part * ROWS, 0), ROWS) * min(shape.OW - place.x, WIDTH);
}

struct Strides {
    int row, column, plane;
};

// The part of a tile that a thread loads, as it comes from memory.
struct Raw {
    VALUE values[UNIT == 8 ? 1 : LOADS][PER_LOAD];
};

// A tile begins to be read: into registers, or where channels are a multiple of 8 by asynchronous copies to `tile`.
__device__ __forceinline__ void load_tile(
    Raw& raw, HALF* tile, const VALUE* x, long long item_stride, const Strides& strides, const Place& place,
    const Shape& shape) {
    const VALUE* const item = x + place.item * item_stride;
    const int top = place.y * STRIDE - shape.padding_h, left = place.x * STRIDE - shape.padding_w;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int index = i * THREADS + threadIdx.x, pixel = index / UNITS, unit = index % UNITS;
        const int y = top + pixel / BORDERED, x = left + pixel % BORDERED;
        const bool has = pixel < PIXELS && y >= 0 && y < shape.H && x >= 0 && x < shape.W;
        if constexpr (UNIT == 8) {
            const VALUE* const from = has ? item + y * strides.row + x * C + 8 * unit : item;
            if (pixel < PIXELS) copy_16_bytes(shared_address(tile + pixel * PITCH + 8 * unit), from, has);
        } else {
            const VALUE* const from = item + y * strides.row + x * strides.column + 4 * unit * strides.plane;
#pragma unroll
            for (int c = 0; c < PER_LOAD; ++c)
                raw.values[i][c] = has && 4 * unit + c < C ? from[c * strides.plane] : VALUE(0.f);
        }
    }
}

__device__ __forceinline__ uint32_t pair(HALF low, HALF high) {
    const auto bits = [](HALF x) { return uint32_t(*reinterpret_cast<const unsigned short*>(&x)); };
    return bits(low) | bits(high) << 16;
}

// The tile is in shared memory after it and a barrier.
__device__ __forceinline__ void store_tile(const Raw& raw, HALF* tile) {
    if constexpr (UNIT == 8) {
        wait_for_copies();
    } else {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int index = i * THREADS + threadIdx.x, pixel = index / UNITS, unit = index % UNITS;
            if (pixel >= PIXELS) continue;
            HALF v[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) v[c] = c < PER_LOAD ? HALF(raw.values[i][c]) : HALF(0.f);
            uint2* const to = reinterpret_cast<uint2*>(tile + pixel * PITCH + 4 * unit);
            *to = make_uint2(pair(v[0], v[1]), pair(v[2], v[3]));
        }
    }
}

// The first of the four elements of K that lane q of its group has in a step.
__device__ __forceinline__ int element(int step, int q) {
    if (POINT && PAIRED) return step / 2 * 32 + 8 * q + step % 2 * 4;
    return 16 * step + 4 * q;
}

// Registers b0, b1 of an output.
__device__ __forceinline__ uint2 weights(const HALF* w, int output, int O, int step, int q) {
    const int k = element(step, q), tap = k / PADDED, c = k % PADDED;
    if (output >= O || k >= K) return make_uint2(0u, 0u);
    const HALF* const from = w + ((long long)output * KH * KW + tap) * C + c;
    if constexpr (C % 4 == 0) {
        return *reinterpret_cast<const uint2*>(from);
    } else {
        HALF v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = c + i < C ? from[i] : HALF(0.f);
        return make_uint2(pair(v[0], v[1]), pair(v[2], v[3]));
    }
}

using A = uint32_t[4];

// A fragments of all steps of 16 pixels of a run, from memory.
__device__ __forceinline__ void load_pixels(A (&a)[STEPS], const HALF* item, int first, int count, int lane) {
    const int q = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int pixel = min(first + 8 * half + lane / 4, count - 1);  // past the end: one that nobody writes
        const HALF* const from = item + (long long)pixel * C;
#pragma unroll
        for (int step = 0; step < STEPS; step += 1 + PAIRED) {
            if constexpr (PAIRED) {
                const uint4 v = *reinterpret_cast<const uint4*>(from + element(step, q));
                a[step][half] = v.x, a[step][2 + half] = v.y;
                a[step + 1][half] = v.z, a[step + 1][2 + half] = v.w;
            } else {
                const uint2 v = *reinterpret_cast<const uint2*>(from + element(step, q));
                a[step][half] = v.x, a[step][2 + half] = v.y;
            }
        }
    }
}

// The A fragment of one step of 16 neighbouring pixels in shared memory. from: the first pixel of this lane, with the
// offset of the step.
__device__ __forceinline__ void gather(A& a, const HALF* from, int step, int q) {
    const uint2 low = *reinterpret_cast<const uint2*>(from);
    const uint2 high = *reinterpret_cast<const uint2*>(from + 8 * STRIDE * PITCH);
    a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
    if (K % 16 && step == STEPS - 1 && element(step, q) >= K) a[0] = a[1] = a[2] = a[3] = 0u;  // Inf times 0 is NaN
}

// Sums over the pixels of one lane, of each of its outputs: deviations from `first` and their squares.
struct Sums {
    float first[LANE], delta[LANE], square[LANE];

    // Add up over the lanes of a warp that have the same outputs. Lanes exchange halves of what they have: at the end
    // each has one output, number lane / 4 of LANE = 8, or lane / 8 of 4, in element 0.
    __device__ __forceinline__ void reduce(int lane) {
        int count = LANE;
#pragma unroll
        for (int offset = 16; offset >= 4; offset /= 2) {
            if (count == 1) {
                delta[0] += __shfl_xor_sync(0xffffffffu, delta[0], offset);
                square[0] += __shfl_xor_sync(0xffffffffu, square[0], offset);
                continue;
            }
            count /= 2;
            const bool upper = lane & offset;
#pragma unroll
            for (int i = 0; i < LANE / 2; ++i) {
                if (i >= count) continue;
                const float other = upper ? delta[i] : delta[count + i], more = upper ? square[i] : square[count + i];
                delta[i] = (upper ? delta[count + i] : delta[i]) + __shfl_xor_sync(0xffffffffu, other, offset);
                square[i] = (upper ? square[count + i] : square[i]) + __shfl_xor_sync(0xffffffffu, more, offset);
                first[i] = upper ? first[count + i] : first[i];
            }
        }
    }
};

// One strip's row of outputs in shared memory, `count` of them, to `at` of the output: 16 bytes at a time where they are
// aligned. In shared memory it begins at at % 8.
__device__ __forceinline__ void copy_row(const HALF* staged, HALF* out, long long at, int count, int lane) {
    const int shift = int(at % 8);
    for (int chunk = lane; chunk * 8 < shift + count; chunk += 32) {
        const int begin = chunk * 8 - shift;
        if (begin >= 0 && begin + 8 <= count) {
            *reinterpret_cast<uint4*>(out + at + begin) = *reinterpret_cast<const uint4*>(staged + chunk * 8);
        } else {
            for (int i = max(begin, 0); i < min(begin + 8, count); ++i) out[at + i] = staged[shift + i];
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) small_k_conv(
    const VALUE* x, const HALF* w, const float* bias, HALF* out, float* moments, long long item_stride, int row,
    int column, int plane, int H, int W, int OH, int OW, int O, int padding_h, int padding_w, int relu, int across,
    int per_item, int tiles) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float2 partial[MOMENTS ? 2 : 1][MOMENTS ? PARTS * COLUMNS : 1];  // mean, squared deviations
    __shared__ __align__(16) float begin[COLUMNS];
    __shared__ __align__(16) HALF stage[WARPS][STAGED];
    uint4* const fragments = reinterpret_cast<uint4*>(shared);
    HALF* const buffer = reinterpret_cast<HALF*>(fragments + FRAGMENTS);
    const Shape shape{H, W, OH, OW, O, padding_h, padding_w, across, per_item};
    const Strides strides{row, column, plane};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int part = warp % PARTS, slice = warp / PARTS, first = blockIdx.y * COLUMNS;
    const int output = first + slice * WIDE + LANE * q;  // the first of this lane's
    begin_after_primary();

    Raw raw;
    if (!POINT && blockIdx.x < tiles) {
        const Place place(blockIdx.x, shape);
        load_tile(raw, buffer, x, item_stride, strides, place, shape);
    }
    // Output 2 t + j of a lane is column 2 q + j of block t.
    const int column_output = LANE * (g / 2) + g % 2;
    uint2 held[HELD ? STEPS : 1][BLOCKS];
    if (HELD) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int t = 0; t < BLOCKS; ++t)
                held[step][t] = weights(w, first + slice * WIDE + column_output + 2 * t, O, step, q);
    } else {
        for (int index = warp; index < STEPS * SLICES * (BLOCKS / 2); index += WARPS) {
            const int t = index % (BLOCKS / 2) * 2, group = index / (BLOCKS / 2), step = group / SLICES;
            const int from = first + group % SLICES * WIDE + column_output + 2 * t;
            const uint2 low = weights(w, from, O, step, q), high = weights(w, from + 2, O, step, q);
            fragments[index * 32 + lane] = make_uint4(low.x, low.y, high.x, high.y);
        }
    }
    if (threadIdx.x < COLUMNS)
        begin[threadIdx.x] = bias && first + threadIdx.x < O ? bias[first + threadIdx.x] : 0.f;
    int offsets[POINT ? 1 : STEPS];  // of a step's elements in the tile
#pragma unroll
    for (int step = 0; step < (POINT ? 0 : STEPS); ++step) {
        const int k = element(step, q), tap = PADDED % 16 ? k / PADDED : 16 * step / PADDED;
        offsets[step] = k < K ? (tap / KW * BORDERED + tap % KW) * PITCH + k - tap * PADDED : 0;
    }
    if (!POINT && blockIdx.x < tiles) store_tile(raw, buffer);
    __syncthreads();

    int turn = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, turn ^= 1) {
        const Place place(index, shape);
        const int next = index + gridDim.x;
        const HALF* const tile = buffer + turn * (PIXELS * PITCH);
        HALF* const other = buffer + (turn ^ 1) * (PIXELS * PITCH);
        if (!POINT && next < tiles) load_tile(raw, other, x, item_stride, strides, Place(next, shape), shape);
        const VALUE* const item = x + place.item * item_stride;
        Sums sums = {};
#pragma unroll 1
        for (int strip = 0; strip < STRIPS; strip += AT_ONCE) {
            __syncwarp();  // lanes outside of the image have read or written nothing: together again before mma
            float d[AT_ONCE][BLOCKS][4];
            A point[POINT ? AT_ONCE : 1][STEPS];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
                for (int t = 0; t < BLOCKS; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i) d[u][t][i] = begin[slice * WIDE + LANE * q + 2 * t + i % 2];
                if constexpr (POINT)
                    load_pixels(point[u], reinterpret_cast<const HALF*>(item), place.x + 16 * (part * STRIPS + strip + u), OW, lane);
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                uint2 b[BLOCKS];
#pragma unroll
                for (int t = 0; t < BLOCKS; t += 2) {
                    if (HELD) {
                        b[t] = held[HELD ? step : 0][t], b[t + 1] = held[HELD ? step : 0][t + 1];
                    } else {
                        const uint4 two = fragments[((step * SLICES + slice) * (BLOCKS / 2) + t / 2) * 32 + lane];
                        b[t] = make_uint2(two.x, two.y), b[t + 1] = make_uint2(two.z, two.w);
                    }
                }
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) {
                    A a;
                    if constexpr (POINT) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[i] = point[u][step][i];
                    } else {
                        const int down = part * ROWS + (strip + u) / 2, right = 16 * ((strip + u) % 2) + g;
                        const int corner = (down * BORDERED + right) * STRIDE * PITCH;
                        gather(a, tile + corner + offsets[POINT ? 0 : step], step, q);
                    }
#pragma unroll
                    for (int t = 0; t < BLOCKS; ++t) multiply<HALF>(d[u][t], a, b[t].x, b[t].y);
                }
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int run = part * STRIPS + strip + u;
                const int y = POINT ? 0 : place.y + part * ROWS + (strip + u) / 2;
                const int left = place.x + (POINT ? 16 * run : 16 * ((strip + u) % 2));
                const long long at = ((long long)place.item * OH + y) * OW + left;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pixel = 8 * half + g;
                    const bool has = y < OH && left + pixel < OW;
                    Two v[BLOCKS];
#pragma unroll
                    for (int t = 0; t < BLOCKS; ++t) {
                        narrow(make_float2(d[u][t][2 * half], d[u][t][2 * half + 1]), v[t]);
                        if (relu) v[t] = __hmax2_nan(v[t], Two(HALF(0.f), HALF(0.f)));
                    }
                    if constexpr (MOMENTS) {
                        if (half == 0 && strip + u == 0) {  // the warp's first pixel: it has one, or no pixel at all
#pragma unroll
                            for (int t = 0; t < BLOCKS; ++t) {
                                const float2 wide = widen(v[t]);
                                sums.first[2 * t] = __shfl_sync(0xffffffffu, wide.x, q);
                                sums.first[2 * t + 1] = __shfl_sync(0xffffffffu, wide.y, q);
                            }
                        }
                        if (has) {
#pragma unroll
                            for (int t = 0; t < BLOCKS; ++t) {
                                const float2 wide = widen(v[t]);
                                const float a = wide.x - sums.first[2 * t], b = wide.y - sums.first[2 * t + 1];
                                sums.delta[2 * t] += a, sums.delta[2 * t + 1] += b;
                                sums.square[2 * t] = __fmaf_rn(a, a, sums.square[2 * t]);
                                sums.square[2 * t + 1] = __fmaf_rn(b, b, sums.square[2 * t + 1]);
                            }
                        }
                    }
                    const HALF* const own = reinterpret_cast<const HALF*>(v);
                    if constexpr (STORE == 0) {
                        HALF* const to = stage[warp] + int(at * O % 8) + pixel * O;
#pragma unroll
                        for (int i = 0; i < LANE; ++i)
                            if (output + i < O) to[output + i] = own[i];
                    } else {
                        HALF* const to = out + (at + pixel) * O + output;
#pragma unroll
                        for (int i = 0; i < LANE; i += STORE) {
                            if (!has || output + i >= O) continue;
                            if constexpr (STORE == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v);
                            if constexpr (STORE == 4)
                                *reinterpret_cast<uint2*>(to + i) = reinterpret_cast<const uint2*>(v)[i / 4];
                            if constexpr (STORE == 2) *reinterpret_cast<Two*>(to + i) = v[i / 2];
                            if constexpr (STORE == 1) to[i] = own[i];
                        }
                    }
                }
                if constexpr (STORE == 0) {
                    __syncwarp();
                    if (y < OH) copy_row(stage[warp], out, at * O, min(max(OW - left, 0), 16) * O, lane);
                    __syncwarp();
                }
            }
        }
        if (!POINT && next < tiles) store_tile(raw, other);
        if constexpr (MOMENTS) {
            __syncwarp();
            const float count = float(pixels(place, shape, part));
            sums.reduce(lane);
            const float mean = sums.first[0] + sums.delta[0] / count;
            const float rest = fmaxf(sums.square[0] - sums.delta[0] * (sums.delta[0] / count), 0.f);
            const int own = slice * WIDE + LANE * q + lane / (LANE == 8 ? 4 : 8);
            if (LANE == 8 || g % 2 == 0) partial[turn][part * COLUMNS + own] = make_float2(mean, rest);
        }
        if (!POINT || MOMENTS) __syncthreads();
        if (MOMENTS && threadIdx.x < COLUMNS && first + threadIdx.x < O) {
            float count = 0.f, mean = 0.f, square = 0.f;
            for (int i = 0; i < PARTS; ++i) {
                const float more = float(pixels(place, shape, i));
                if (more == 0.f) continue;
                const float2 other = partial[turn][i * COLUMNS + threadIdx.x];
                const float total = count + more, apart = other.x - mean;
                mean += apart * (more / total);
                square += other.y + apart * apart * (count * more / total);
                count = total;
            }
            float* const to = moments + (long long)index * 4 * O + first + threadIdx.x;
            to[0] = mean;
            to[O] = square;
        }
    }
}
