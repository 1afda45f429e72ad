// Statistics of GroupNorm for inference: moments of parts of a feature map, and the coefficients of y = a x + b.
//
//   a = gamma rstd,   b = a (bias - mean) + beta      of each batch item and channel
//
// A part is a run of pixels. For each part and channel there is the mean and the sum of squared deviations from it;
// `combine_moments` adds them by Chan's formula, so that nothing cancels, whatever the mean. A convolution's epilogue
// writes the moments of its tiles (plugins/gemm/triton/decoded.py); `chunk_moments` finds them for any feature map.
// group_norm.cu does the same for training, where amax and gradients need more than a and b.
//
//   moments [parts, 2, 2, C] float32: (items of the batch that the part touches, (mean, squared deviations))
//
// Sums are added in a fixed order, so that two runs give the same bits.
//
// Launch: chunk_moments: block 256, grid (chunks, N), C a multiple of 8, at most 2048; combine_moments: block 1024, so
// that a thread adds few of the many parts of one image, grid (groups, N), at most 256 channels a group.
#include "channels.cuh"

using channels::VECTOR;
using channels::Walk;

// moments [N * chunks, 2, 2, C]; a chunk belongs to one batch item. Dynamic shared memory: 8 rows C bytes.
extern "C" __global__ void __launch_bounds__(256) chunk_moments(
    const DTYPE* x, float* moments, long long pixels, int C, long long per_chunk) {
    extern __shared__ float shared[];
    const Walk walk(pixels, C, per_chunk);
    const DTYPE* item = x + (long long)blockIdx.y * pixels * C;
    float k[VECTOR] = {}, sum[VECTOR] = {}, square[VECTOR] = {};
    if (walk.active) channels::load(item + walk.first * C + walk.channel, k);
#pragma unroll 4
    for (int trip = 0; trip < walk.trips; ++trip) {
        if (!walk.has(trip)) continue;
        float v[VECTOR];
        channels::load(item + walk.pixel(trip) * C + walk.channel, v);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float d = v[i] - k[i];
            sum[i] += d;
            square[i] = __fmaf_rn(d, d, square[i]);
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

__device__ float block_sum(float value, float* shared) {
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.f;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += shared[warp];
    return total;
}

// ab [N, 2, C] of one (group, batch item). A part has `rows` pixels. With per_item = 0 parts are cut from all pixels of
// the batch, so that one may touch two items; otherwise every item has per_item parts of its own.
extern "C" __global__ void __launch_bounds__(1024) combine_moments(
    const float* moments, const float* bias, const float* gamma, const float* beta, float* ab, float eps,
    long long pixels, int C, int groups, long long rows, int per_item) {
    __shared__ float sums[3][1024], shared[32];
    const int width = C / groups, lanes = blockDim.x / width, lane = threadIdx.x / width;
    const int c = blockIdx.x * width + threadIdx.x % width;
    const long long n = blockIdx.y, begin = n * pixels, end = begin + pixels;
    const long long first = per_item ? n * per_item : begin / rows;
    const long long last = per_item ? first + per_item - 1 : (end - 1) / rows;
    const long long item_of_first = per_item ? n : first * rows / pixels;
    const float k = moments[(first * 2 + (n - item_of_first)) * 2 * C + c];
    float delta = 0.f, square = 0.f, within = 0.f;
    const int trips = int((last - first + lanes) / lanes);  // the same in all threads: no warp is divided at a barrier
#pragma unroll 4
    for (int trip = 0; trip < trips; ++trip) {
        const long long part = first + (long long)trip * lanes + lane;
        const bool has = lane < lanes && part <= last;
        const long long low = per_item ? begin + (part - first) * rows : part * rows;
        const long long high = min(low + rows, end);
        const int index = per_item ? 0 : int(n - low / pixels);
        const float* in = moments + (has ? (part * 2 + index) * 2 * C + c : 0);
        const float count = has ? float(high - max(low, begin)) : 0.f, d = has ? in[0] - k : 0.f;
        delta = __fmaf_rn(count, d, delta);
        square = __fmaf_rn(count * d, d, square);
        within += has ? in[C] : 0.f;
    }
    sums[0][threadIdx.x] = delta;
    sums[1][threadIdx.x] = square;
    sums[2][threadIdx.x] = within;
    __syncthreads();
    const bool has = threadIdx.x < width;
    float own_mean = 0.f, own_m2 = 0.f;
    const float shift = bias ? bias[c] : 0.f;
    if (has) {
        for (int other = 1; other < lanes; ++other) {
            delta += sums[0][other * width + threadIdx.x];
            square += sums[1][other * width + threadIdx.x];
            within += sums[2][other * width + threadIdx.x];
        }
        own_mean = k + delta / float(pixels) + shift;
        own_m2 = within + fmaxf(square - delta * (delta / float(pixels)), 0.f);
    }
    const float mean = block_sum(own_mean, shared) / float(width);
    const float between = has ? (own_mean - mean) * (own_mean - mean) * float(pixels) : 0.f;
    const float variance = block_sum(own_m2 + between, shared) / (float(pixels) * float(width));
    if (has) {
        const float a = gamma[c] * (1.f / sqrtf(variance + eps));
        ab[n * 2 * C + c] = a;
        ab[(n * 2 + 1) * C + c] = a * (shift - mean) + beta[c];
    }
}
