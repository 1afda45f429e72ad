// Sums over the pixels of a segmentation map that cross-entropy and Dice are made of, and their gradient.
//
// p = softmax(z) of the logits z of a pixel, y its target, w the weight of class y, e the label smoothing. Pixels whose
// target is `ignored` have no part in any sum. float32 throughout, in an order that is fixed by the grid.
//
//   sums      [2 + 3 C]: w (lse - (1 - e) z_y - e mean(z)), w, then for each class c: p_c where y = c, p_c, 1 where y = c
//   gradient  dz_c = p_c (g_c - sum_k g_k p_k) + s w (p_c - (1 - e) [y = c] - e / C)
//             s: upstream of the first sum; g_k: upstream of the sum of p_k, and where y = k of that of p_k there too
//
// Both read the logits once. A block takes PIXELS pixels at a time into shared memory, where LANES threads turn the
// logits of a pixel into probabilities. For the sums a thread then adds one class over the pixels of its slice.
//
// Launch: block 256, any grid. logits, dlogits: DTYPE, [pixels, C] with CHANNELS_LAST, else [N, C, image]; target: int64
// [pixels]; weight: float [C] or nullptr; partial: float [gridDim.x, 2 + 3 C]; upstream: float [2 + 3 C].
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
constexpr int SLICES = C < THREADS ? THREADS / C : 1;         // threads that add one class
constexpr int OWN = (C + THREADS - 1) / THREADS;              // classes of a thread
static_assert(LANES <= 32, "the lanes of a pixel are in one warp");

struct Tile {
    float values[PIXELS * ROW];
    int labels[PIXELS];  // -1: ignored; C: no class
};

// Where the logits of a tile are; the tile is within one image if they are not channels_last.
struct Place {
    long long first;  // pixel
    int count;

    __device__ Place(long long tile, long long pixels) {
        first = tile * PIXELS;
        count = (int)min((long long)PIXELS, pixels - first);
    }
};

template <typename Visit> __device__ __forceinline__ void each(const Place& place, long long image, Visit visit) {
#if CHANNELS_LAST
#pragma unroll 4
    for (int i = threadIdx.x; i < place.count * C; i += THREADS) visit(i / C, i % C, place.first * C + i);
#else
    int pixel = threadIdx.x % PIXELS;
    if (pixel >= place.count) return;
    long long item = (place.first + pixel) / image, at = item * C * image + (place.first + pixel) % image;
#pragma unroll 4
    for (int c = threadIdx.x / PIXELS; c < C; c += LANES) visit(pixel, c, at + c * image);
#endif
}

template <typename T, typename Combine> __device__ __forceinline__ T over_lanes(T value, Combine combine) {
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }

// What a thread knows of the pixel that it works on with its neighbours.
struct Pixel {
    float* values;
    int lane, end;  // its classes are lane, lane + LANES, ... before end: C, or 0 beyond the last pixel
    int label;
    float entropy;  // lse - (1 - e) z_y - e mean(z)
};

__device__ void load(Tile& tile, const Place& place, const DTYPE* logits, const long long* target, long long ignored,
                     long long image) {
    each(place, image, [&](int pixel, int c, long long at) { tile.values[pixel * ROW + c] = float(logits[at]); });
    if (threadIdx.x < PIXELS) {
        long long label = threadIdx.x < place.count ? target[place.first + threadIdx.x] : ignored;
        tile.labels[threadIdx.x] = label == ignored ? -1 : label < 0 || label >= C ? C : (int)label;
    }
    __syncthreads();
}

// Turn the logits of the tile into probabilities; all threads call this.
__device__ Pixel softmax(Tile& tile, int count, float smoothing) {
    int row = threadIdx.x / LANES;
    Pixel pixel{tile.values + row * ROW, (int)threadIdx.x % LANES, row < count ? C : 0, tile.labels[row], 0.f};
    // A class that does not exist gives NaN, which the loss shows; torch's loss would stop the process.
    float chosen = pixel.label >= 0 && pixel.label < C ? pixel.values[pixel.label] : __int_as_float(0x7FFFFFFF);
    if (LANES > 1) __syncwarp();  // read before the lane that has this class writes it
    float highest = -INFINITY, total = 0.f, exponentials = 0.f;
    for (int c = pixel.lane; c < pixel.end; c += LANES) {
        highest = fmaxf(highest, pixel.values[c]);
        total += pixel.values[c];
    }
    highest = over_lanes(highest, larger);
    for (int c = pixel.lane; c < pixel.end; c += LANES) {
        float value = expf(pixel.values[c] - highest);
        pixel.values[c] = value;
        exponentials += value;
    }
    exponentials = over_lanes(exponentials, add);
    if (smoothing != 0.f) total = over_lanes(total, add) * smoothing / C;
    else total = 0.f;  // a logit of -inf has no part then
    pixel.entropy = highest + logf(exponentials) - (1.f - smoothing) * chosen - total;
    float scale = 1.f / exponentials;
    for (int c = pixel.lane; c < pixel.end; c += LANES) pixel.values[c] *= scale;
    return pixel;
}

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
        Place place(at, pixels);
        load(tile, place, logits, target, ignored, image);
        Pixel pixel = softmax(tile, place.count, smoothing);
        if (pixel.lane == 0 && pixel.label >= 0) {
            float w = weight && pixel.label < C ? weight[pixel.label] : 1.f;
            entropy += w * pixel.entropy;
            mass += w;
        }
        __syncthreads();
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            int c = C < THREADS ? threadIdx.x % C : threadIdx.x + own * THREADS;
            const int end = adds && c < C ? place.count : 0;
#pragma unroll 4
            for (int p = slice; p < end; p += SLICES) {
                int label = tile.labels[p];
                float value = label < 0 ? 0.f : tile.values[p * ROW + c];
                probability[own] += value;
                overlap[own] += label == c ? value : 0.f;
                size[own] += label == c ? 1.f : 0.f;
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
        Place place(at, pixels);
        load(tile, place, logits, target, ignored, image);  // its barrier is that of the upstream gradients, too
        Pixel pixel = softmax(tile, place.count, smoothing);
        const int y = pixel.label;
        float dot = 0.f;
        for (int c = pixel.lane; c < pixel.end; c += LANES)
            dot += pixel.values[c] * (of_probability[c] + (c == y ? of_overlap[c] : 0.f));
        dot = over_lanes(dot, add);
        // NaN also here, so that a loss scaler leaves out the step.
        const float w = y == C ? __int_as_float(0x7FFFFFFF) : of_entropy * (weight && y >= 0 ? weight[y] : 1.f);
        for (int c = pixel.lane; c < pixel.end; c += LANES) {
            float p = pixel.values[c], g = of_probability[c] + (c == y ? of_overlap[c] : 0.f);
            float d = p * (g - dot) + w * (p - (c == y ? 1.f - smoothing : 0.f) - smoothing / C);
            pixel.values[c] = y < 0 ? 0.f : d;
        }
        __syncthreads();
        each(place, image, [&](int p, int c, long long to) { dlogits[to] = DTYPE(tile.values[p * ROW + c]); });
        __syncthreads();
    }
}
