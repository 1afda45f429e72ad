// Statistics of GroupNorm for inference: moments of parts of a feature map, and the coefficients of y = a x + b.
//
//   a = gamma rstd,   b = a (bias - mean) + beta      of each batch item and channel
//
// A part is a run of pixels, or a tile of a feature map. For each part and channel there is the mean and the sum of squared deviations from it;
// `combine_moments` adds them by Chan's formula, so that nothing cancels, whatever the mean. A convolution's epilogue
// writes the moments of its tiles (plugins/gemm/triton/decoded.py, plugins/gemm/cuda/direct_conv.cu); `chunk_moments`
// finds them for any feature map.
// group_norm.cu does the same for training, where amax and gradients need more than a and b.
//
//   moments [parts, 2, 2, C] float32: (items of the batch that the part touches, (mean, squared deviations))
//
// Sums are added in a fixed order, so that two runs give the same bits.
//
// Launch: chunk_moments: block 256, grid (chunks, N), C a multiple of 8, at most 2048; combine_moments: block up to 1024, so
// that a thread adds few of the many parts of one image, grid (C / span, N), at most 256 channels a group; `span` channels
// of a block are whole groups, no more than it has threads, and where there are as many a sector of memory or more.
#include "channels.cuh"

#ifndef VOLUME
#define VOLUME 0
#endif

using channels::BATCH;
using channels::VECTOR;
using channels::Walk;

// moments [N * chunks, 2, 2, C]; a chunk belongs to one batch item. Dynamic shared memory: 8 rows C bytes.
extern "C" __global__ void __launch_bounds__(256) chunk_moments(
    const DTYPE* x, float* moments, long long pixels, int C, long long per_chunk) {
    extern __shared__ float shared[];
    const Walk walk(pixels, C, per_chunk);
    begin_after_primary();
    const DTYPE* item = x + (long long)blockIdx.y * pixels * C;
    float k[VECTOR] = {}, sum[VECTOR] = {}, square[VECTOR] = {};
    if (walk.active) channels::load(item + walk.first * C + walk.channel, k);
    channels::Stream<const DTYPE> in(item, walk, C, walk.channel);
    for (int trip = 0; trip < walk.own; trip += BATCH, in.advance(BATCH)) {
        uint4 raw[BATCH];
        in.fetch(raw, walk, trip);
#pragma unroll
        for (int at = 0; at < BATCH; ++at) {
            if (!walk.has(trip + at)) break;
            float v[VECTOR];
            channels::widened<DTYPE>(raw[at], v);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float d = v[i] - k[i];
                sum[i] += d;
                square[i] = __fmaf_rn(d, d, square[i]);
            }
        }
    }
    float* sums = shared;
    float* squares = shared + walk.rows * C;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if (!walk.active) continue;
        sums[walk.row * C + walk.channel + i] = sum[i];
        squares[walk.row * C + walk.channel + i] = square[i];
    }
    __syncthreads();
    const float count = float(walk.last - walk.first);
    float* out = moments + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 4 * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float delta = 0.f, deviation = 0.f;
        for (int row = 0; row < walk.rows; ++row) {
            delta += sums[row * C + c];
            deviation += squares[row * C + c];
        }
        out[c] = float(item[walk.first * C + c]) + delta / count;
        out[C + c] = fmaxf(deviation - delta * (delta / count), 0.f);
    }
}

// The sum of a group's `width` threads, in each of them; `has`: threads that are of a group, from the first one on.
__device__ float group_sum(float value, int width, bool has, float* shared) {
    const int within = threadIdx.x % width;
    int step = 1;
    while (2 * step < width) step *= 2;
    __syncthreads();
    if (has) shared[threadIdx.x] = value;
    for (; width > 1 && step; step /= 2) {
        __syncthreads();
        if (has && within < step && within + step < width) shared[threadIdx.x] += shared[threadIdx.x + step];
    }
    __syncthreads();
    return has ? shared[threadIdx.x - within] : 0.f;
}

constexpr int AT_ONCE = 8;  // parts whose loads a thread has in flight

// How the pixels of one batch item are divided into parts.
struct Division {
    long long begin, end, rows;  // pixels of the item in the batch; pixels of a run
    int tile_h, tile_w, H, W, across, per_slice;

    // Pixels of the item in its part `index`, which as a run of pixels begins at `low`.
    __device__ float count(int index, long long low) const {
        if (!tile_w) return float(min(low + rows, end) - max(low, begin));
        if (VOLUME) index %= per_slice;
        const int y = index / across * tile_h, x = index % across * tile_w;
        return float(min(tile_h, H - y) * min(tile_w, W - x));
    }
};

// ab [N, 2, C] of `span` channels of one batch item. Without tile_w, a part is a run of `rows` pixels: with per_item = 0 of the
// pixels of the whole batch, so that one may touch two items; otherwise every item has per_item parts of its own. With
// tile_w, the per_item parts of an item are tiles of tile_h x tile_w pixels of its feature map, whose width is W; with
// VOLUME of its slices, whose height is `slice`.
extern "C" __global__ void __launch_bounds__(1024) combine_moments(
    const float* moments, const float* bias, const float* gamma, const float* beta, float* ab, float eps,
    long long pixels, int C, int groups, long long rows, int per_item, int tile_h, int tile_w, int W, int span
#if VOLUME
    , int slice
#endif
) {
#if !VOLUME
    constexpr int slice = 0;
#endif
    __shared__ float sums[3][1024];
    const int width = C / groups, lanes = blockDim.x / span, lane = threadIdx.x / span;
    const int c = blockIdx.x * span + threadIdx.x % span;
    const long long n = blockIdx.y, begin = n * pixels, end = begin + pixels;
    const long long first = per_item ? n * per_item : begin / rows;
    const int parts = per_item ? per_item : int((end - 1) / rows - first) + 1;
    const int H = VOLUME ? slice : tile_w ? int(pixels / W) : 0, across = tile_w ? (W + tile_w - 1) / tile_w : 1;
    const int per_slice = VOLUME ? (H + tile_h - 1) / tile_h * across : 1;
    const Division division{begin, end, rows, tile_h, tile_w, H, W, across, per_slice};
    // Where a run begins before this item, it has the previous item's pixels first.
    const auto before = [&](int part) { return !per_item && (first + part) * rows < begin; };
    begin_after_primary();
    const float k = moments[(first * 2 + before(0)) * 2 * C + c];
    const float shift = bias ? bias[c] : 0.f, scale = gamma[c], offset = beta[c];
    float delta = 0.f, square = 0.f, within = 0.f;
    for (int base = lane; base < (lane < lanes ? parts : 0); base += AT_ONCE * lanes) {
        float means[AT_ONCE], deviations[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int part = min(base + i * lanes, parts - 1);
            const float* in = moments + ((first + part) * 2 + before(part)) * 2 * C + c;
            means[i] = in[0];
            deviations[i] = in[C];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int part = base + i * lanes;
            if (part >= parts) continue;
            const long long low = per_item ? begin + part * rows : (first + part) * rows;
            const float count = division.count(part, low), d = means[i] - k;
            delta = __fmaf_rn(count, d, delta);
            square = __fmaf_rn(count * d, d, square);
            within += deviations[i];
        }
    }
    sums[0][threadIdx.x] = delta;
    sums[1][threadIdx.x] = square;
    sums[2][threadIdx.x] = within;
    int step = 1;
    while (2 * step < lanes) step *= 2;
    for (; lanes > 1 && step; step /= 2) {  // the upper lanes to the lower ones: a fixed order for a number of lanes
        __syncthreads();
        if (lane >= step || lane + step >= lanes) continue;
#pragma unroll
        for (int i = 0; i < 3; ++i) sums[i][threadIdx.x] += sums[i][threadIdx.x + step * span];
    }
    const bool has = threadIdx.x < span;
    float own_mean = 0.f, own_m2 = 0.f;
    if (has) {
        delta = sums[0][threadIdx.x], square = sums[1][threadIdx.x], within = sums[2][threadIdx.x];
        own_mean = k + delta / float(pixels) + shift;
        own_m2 = within + fmaxf(square - delta * (delta / float(pixels)), 0.f);
    }
    const float mean = group_sum(own_mean, width, has, sums[0]) / float(width);
    const float between = has ? (own_mean - mean) * (own_mean - mean) * float(pixels) : 0.f;
    const float variance = group_sum(own_m2 + between, width, has, sums[0]) / (float(pixels) * float(width));
    if (has) {
        const float a = scale * (1.f / sqrtf(variance + eps));
        ab[n * 2 * C + c] = a;
        ab[(n * 2 + 1) * C + c] = a * (shift - mean) + offset;
    }
}
