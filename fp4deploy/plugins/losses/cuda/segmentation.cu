// Sums over the pixels of a segmentation map that cross-entropy and Dice are made of, and their gradient.
//
// p = softmax(z) of the logits z of a pixel, y its target, w the weight of class y, e the label smoothing. Pixels whose
// target is `ignored` have no part in any sum. float32 throughout, in an order that is fixed by the grid.
//
//   sums      [2 + 3 C]: w (lse - (1 - e) z_y - e mean(z)), w; then of each class c p_c where y = c, p_c, 1 where y = c
//   gradient  dz_c = p_c (g_c - sum_k g_k p_k) + s w (p_c - (1 - e) [y = c] - e / C)
//             s: upstream of the first sum; g_k: upstream of the sum of p_k, and where y = k of that of p_k there too
//
// Both read the logits once. A block takes PIXELS pixels at a time into shared memory, where LANES threads turn the
// logits of a pixel into probabilities. For the sums a thread then adds one class over the pixels of its slice.
//
// Launch: block 256, any grid. logits, dlogits: DTYPE, [pixels, C] with CHANNELS_LAST, else [N, C, image]; target:
// int64 [pixels]; weight: float [C] or nullptr; partial: float [gridDim.x, 2 + 3 C]; upstream: float [2 + 3 C].
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef CLASSES
#define CLASSES 12
#endif
#ifndef CHANNELS_LAST
#define CHANNELS_LAST 1
#endif

namespace {

constexpr int THREADS = 256, C = CLASSES;
constexpr int ROW = C | 1;              // odd: threads that read a class of consecutive pixels meet all banks
constexpr int TILE = 9 * 1024;          // floats of a tile; with the upstream gradients of classes below 48 KiB

constexpr int pixels_of_tile() {
    int pixels = THREADS;
    while (pixels * ROW > TILE) pixels /= 2;
    return pixels;
}

constexpr int PIXELS = pixels_of_tile(), LANES = THREADS / PIXELS;
constexpr int OF_LANE = (C + LANES - 1) / LANES;              // classes of a lane, in registers
constexpr int AT_ONCE = 4;                                    // pixels of which a thread adds a class
constexpr int SLICES = C < THREADS ? THREADS / C : 1;         // threads that add one class
constexpr int OWN = (C + THREADS - 1) / THREADS;              // classes of a thread
static_assert(LANES <= 32 && PIXELS % AT_ONCE == 0, "the lanes of a pixel are in one warp, a tile has whole groups");

struct __align__(16) Tile {
    int labels[PIXELS];  // -1: ignored; C: no class
    float values[PIXELS * ROW];
};

__device__ __forceinline__ float nan() { return __int_as_float(0x7FFFFFFF); }

// exp(x) for x <= 0 within 1.01 units in the last place, 0 below -87. Additions and multiplications alone, so that every
// GPU gives the same bits; polynomial of S. Moshier's Cephes library, expf.
__device__ __forceinline__ float exponential(float x) {
    constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23: the low bits of a sum with it are an integer
    const float shifted = __fmaf_rn(x, 1.44269504f, ROUNDER), n = __fadd_rn(shifted, -ROUNDER);
    float r = __fmaf_rn(n, -0.693359375f, x);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float y = __fmaf_rn(1.9875691500e-4f, r, 1.3981999507e-3f);
    y = __fmaf_rn(y, r, 8.3334519073e-3f);
    y = __fmaf_rn(y, r, 4.1665795894e-2f);
    y = __fmaf_rn(y, r, 1.6666665459e-1f);
    y = __fmaf_rn(y, r, 5.0000001201e-1f);
    y = __fadd_rn(__fmaf_rn(y, __fmul_rn(r, r), r), 1.f);
    const float scaled = __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
    return x < -87.f ? 0.f : x == x ? scaled : x;
}

// The pixels of a tile.
struct Place {
    long long first;
    int count;

    __device__ Place(long long tile, long long pixels) {
        first = tile * PIXELS;
        count = (int)min((long long)PIXELS, pixels - first);
    }
};

// visit(place in the tile's values, place in the logits) for every number of the tile, by consecutive threads for what
// is consecutive in memory.
template <typename Visit> __device__ __forceinline__ void each(const Place& place, long long image, Visit visit) {
#if CHANNELS_LAST
#pragma unroll 4
    for (int i = threadIdx.x; i < place.count * C; i += THREADS) visit(i + i / C * (ROW - C), place.first * C + i);
#else
    const int pixel = threadIdx.x % PIXELS;
    if (pixel >= place.count) return;
    const long long item = (place.first + pixel) / image, at = item * C * image + (place.first + pixel) % image;
#pragma unroll 4
    for (int c = threadIdx.x / PIXELS; c < C; c += LANES) visit(pixel * ROW + c, at + c * image);
#endif
}

template <typename Combine> __device__ __forceinline__ float over_lanes(float value, Combine combine) {
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2)
        value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }

__device__ void load(Tile& tile, const Place& place, const DTYPE* logits, const long long* target, long long ignored,
                     long long image) {
    each(place, image, [&](int to, long long at) { tile.values[to] = float(logits[at]); });
    if (threadIdx.x < PIXELS) {
        const long long label = threadIdx.x < place.count ? target[place.first + threadIdx.x] : ignored;
        tile.labels[threadIdx.x] = label == ignored ? -1 : label < 0 || label >= C ? C : (int)label;
    }
    __syncthreads();
}

// The softmax of a pixel, of which a lane has the classes lane, lane + LANES, ...
struct Softmax {
    float* values;    // of the pixel, in the tile
    int lane, label;
    float p[OF_LANE];
    float chosen;     // p of the label
    float entropy;    // lse - (1 - e) z_y - e mean(z)

    __device__ bool has(int k) const { return C % LANES == 0 || k < OF_LANE - 1 || lane + k * LANES < C; }

    // All threads call this; beyond the last pixel of a tile they compute with zeros.
    __device__ Softmax(Tile& tile, int count, float smoothing) {
        const int row = threadIdx.x / LANES;
        const bool exists = row < count;
        values = tile.values + row * ROW;
        lane = threadIdx.x % LANES;
        label = tile.labels[row];
        // A class that does not exist gives NaN, which the loss shows; torch's loss would stop the process.
        const float z_y = label >= 0 && label < C ? values[label] : nan();
        if (LANES > 1) __syncwarp();  // read before the lane that has this class writes it
        float highest = -INFINITY, total = 0.f, exponentials = 0.f;
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) {
            p[k] = !has(k) ? -INFINITY : exists ? values[lane + k * LANES] : 0.f;
            highest = fmaxf(highest, p[k]);
            if (has(k)) total += p[k];
        }
        highest = over_lanes(highest, larger);
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) {
            p[k] = exponential(p[k] - highest);
            if (has(k)) exponentials += p[k];
        }
        exponentials = over_lanes(exponentials, add);
        const float scale = 1.f / exponentials;
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) p[k] *= scale;
        chosen = exponential(z_y - highest) * scale;
        // without smoothing a logit of -inf has no part
        const float mean = smoothing != 0.f ? over_lanes(total, add) / C : 0.f;
        entropy = highest + logf(exponentials) - (1.f - smoothing) * z_y - smoothing * mean;
    }
};

// The sum over the threads of the block, in a fixed order, in thread 0.
__device__ float block_sum(float value) {
    __shared__ float warps[THREADS / 32];
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.f;
    for (int warp = 0; warp < THREADS / 32; ++warp) total += warps[warp];
    return total;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) segmentation_sums(
    const DTYPE* logits, const long long* target, const float* weight, float* partial, float smoothing,
    long long ignored, long long image, long long pixels) {
    __shared__ Tile tile;
    float entropy = 0.f, mass = 0.f;
    float overlap[OWN] = {}, probability[OWN] = {}, size[OWN] = {};
    const int slice = threadIdx.x / C;  // 0 where a thread has several classes
    const bool adds = C >= THREADS || slice < SLICES;
    for (long long at = blockIdx.x; at * PIXELS < pixels; at += gridDim.x) {
        const Place place(at, pixels);
        load(tile, place, logits, target, ignored, image);
        const Softmax pixel(tile, place.count, smoothing);
        if (pixel.lane == 0 && pixel.label >= 0) {
            const float w = weight && pixel.label < C ? weight[pixel.label] : 1.f;
            entropy += w * pixel.entropy;
            mass += w;
        }
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k)
            if (pixel.has(k)) pixel.values[pixel.lane + k * LANES] = pixel.label >= 0 ? pixel.p[k] : 0.f;
        __syncthreads();
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int c = C < THREADS ? threadIdx.x % C : threadIdx.x + own * THREADS;
            const int end = adds && c < C ? place.count : 0;
            for (int p = slice * AT_ONCE; p < end; p += SLICES * AT_ONCE) {
                const int4 labels = *reinterpret_cast<const int4*>(tile.labels + p);
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const int label = k == 0 ? labels.x : k == 1 ? labels.y : k == 2 ? labels.z : labels.w;
                    const float value = tile.values[(p + k) * ROW + c];
                    probability[own] += value;
                    overlap[own] += label == c ? value : 0.f;
                    size[own] += label == c ? 1.f : 0.f;
                }
            }
        }
        __syncthreads();
    }
    float* out = partial + (long long)blockIdx.x * (2 + 3 * C);
    entropy = block_sum(entropy);
    mass = block_sum(mass);
    if (threadIdx.x == 0) {
        out[0] = entropy;
        out[1] = mass;
    }
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
        const float(&own)[OWN] = kind == 0 ? overlap : kind == 1 ? probability : size;
#if CLASSES < 256
        __syncthreads();
        if (adds) tile.values[threadIdx.x] = own[0];  // [slice][c]
        __syncthreads();
        if (threadIdx.x < C) {
            float total = 0.f;
            for (int s = 0; s < SLICES; ++s) total += tile.values[s * C + threadIdx.x];
            out[2 + kind * C + threadIdx.x] = total;
        }
#else
        for (int k = 0; k < OWN; ++k)
            if (threadIdx.x + k * THREADS < C) out[2 + kind * C + threadIdx.x + k * THREADS] = own[k];
#endif
    }
}

extern "C" __global__ void __launch_bounds__(256) segmentation_gradient(
    const DTYPE* logits, const long long* target, const float* weight, const float* upstream, DTYPE* dlogits,
    float smoothing, long long ignored, long long image, long long pixels) {
    __shared__ Tile tile;
    __shared__ float of_overlap[C], of_probability[C];
    for (int c = threadIdx.x; c < C; c += THREADS) {
        of_overlap[c] = upstream[2 + c];
        of_probability[c] = upstream[2 + C + c];
    }
    const float of_entropy = upstream[0];
    for (long long at = blockIdx.x; at * PIXELS < pixels; at += gridDim.x) {
        const Place place(at, pixels);
        load(tile, place, logits, target, ignored, image);  // its barrier is that of the upstream gradients, too
        const Softmax pixel(tile, place.count, smoothing);
        const int y = pixel.label;
        float dot = 0.f;
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k)
            if (pixel.has(k)) dot += pixel.p[k] * of_probability[pixel.lane + k * LANES];
        const float of_chosen = y >= 0 && y < C ? pixel.chosen * of_overlap[y] : 0.f;
        dot = over_lanes(dot, add) + of_chosen;
        // NaN also here, so that a loss scaler leaves out the step.
        const float w = y == C ? nan() : of_entropy * (weight && y >= 0 ? weight[y] : 1.f);
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) {
            if (!pixel.has(k)) continue;
            const int c = pixel.lane + k * LANES;
            const float p = pixel.p[k], truth = (c == y ? 1.f - smoothing : 0.f) + smoothing / C;
            const float d = p * (of_probability[c] - dot) + w * (p - truth) + (c == y ? of_chosen : 0.f);
            pixel.values[c] = y < 0 ? 0.f : d;
        }
        __syncthreads();
        // The next tile needs no barrier: a thread loads what it stores here.
        each(place, image, [&](int from, long long to) { dlogits[to] = DTYPE(tile.values[from]); });
    }
}
