// GroupNorm + ReLU (+ NVFP4 fake quantisation) of channels_last feature maps, forward and backward.
//
//   y = relu(a x + b),   a = gamma rstd,   b = a (bias - mean) + beta      a, b for each batch item and channel
//
// `bias` is that of the convolution before, added here instead of in a pass of its own. The forward reads x twice
// (moments, then y), the backward reads x and dy twice (sums, then dx). y is quantised before it is written: in each
// channel y is monotonic in x, so its amax follows from the minimum and maximum of x, which the first pass finds.
//
// Moments are sums of x - k and (x - k)^2, where k is the channel's first pixel, combined by Chan's formula: no
// cancellation, whatever the mean. Sums are added in a fixed order, so that two runs give the same bits.
//
// With AGAIN `gradient` also writes y, which the gradient of the weight of the convolution behind it reads: as it is (1) or
// quantised (2). Both outputs may overwrite the inputs, y that of x and dx that of dy.
//
// Where another kernel quantised y (4/6), `sums` and `gradient` read its in-range mask: uint8 [N, pixels, C / 8], a bit an
// element, nullptr if nothing is clipped.
//
// Launch: block 256; moments, apply, sums, gradient: grid (chunks, N); combine, coefficients: grid (groups, N);
// parameters: grid ceil(C / 256). C is a multiple of 8, of 16 with quantisation; x, y, dy, dx: DTYPE [N, pixels, C].
#include "channels.cuh"

#ifndef AGAIN
#define AGAIN 0
#endif

using channels::BATCH;
using channels::Stream;
using channels::VECTOR;
using channels::Walk;

// partial [N, chunks, 4, C]: sum of x - k, sum of (x - k)^2, max, min.
extern "C" __global__ void __launch_bounds__(256) moments(
    const DTYPE* x, float* partial, long long pixels, int C, long long per_chunk) {
    extern __shared__ float shared[];
    Walk walk(pixels, C, per_chunk);
    const DTYPE* item = x + (long long)blockIdx.y * pixels * C + walk.channel;
    float k[VECTOR], sum[VECTOR], square[VECTOR];
    channels::Range<DTYPE> range;
    if (walk.active) channels::load(item, k);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] = square[i] = 0.f;
    Stream<const DTYPE> in(x + (long long)blockIdx.y * pixels * C, walk, C, walk.channel);
    for (int trip = 0; trip < walk.own; trip += BATCH, in.advance(BATCH)) {
        uint4 raw[BATCH];
        in.fetch(raw, walk, trip);
#pragma unroll
        for (int at = 0; at < BATCH; ++at) {
            if (!walk.has(trip + at)) break;
            range.add(raw[at]);
            float v[VECTOR];
            channels::widened<DTYPE>(raw[at], v);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                float d = v[i] - k[i];
                sum[i] += d;
                square[i] = __fmaf_rn(d, d, square[i]);
            }
        }
    }
    float high[VECTOR], low[VECTOR];
    channels::widened<DTYPE>(range.high, high);
    channels::widened<DTYPE>(range.low, low);
    float* out = partial + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 4 * C;
#pragma unroll
    for (int kind = 0; kind < 4; ++kind) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (walk.active)
                shared[walk.row * C + walk.channel + i] =
                    kind == 0 ? sum[i] : kind == 1 ? square[i] : kind == 2 ? high[i] : low[i];
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float value = shared[c];
            for (int row = 1; row < walk.rows; ++row) {
                float other = shared[row * C + c];
                value = kind < 2 ? value + other : kind == 2 ? fmaxf(value, other) : fminf(value, other);
            }
            out[kind * C + c] = value;
        }
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

// The chunks of a channel that a thread adds: where a group has fewer channels than a block has threads, `parts` threads
// share them. `whole` sums up in a fixed order; the result is that of the first `width` threads.
struct Parts {
    int width, part, parts, channel;

    __device__ explicit Parts(int width_) : width(width_) {
        parts = blockDim.x / width;
        part = threadIdx.x / width;
        channel = threadIdx.x % width;
    }
    __device__ bool active() const { return part < parts; }
    template <typename Combine> __device__ float whole(float value, float* shared, Combine combine) const {
        __syncthreads();
        shared[threadIdx.x] = value;
        __syncthreads();
        if (part == 0)
            for (int other = 1; other < parts; ++other) value = combine(value, shared[other * width + channel]);
        return value;
    }
};

__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float smaller(float a, float b) { return fminf(a, b); }

// From the partial moments of one (group, batch item): ab [N, 2, C]; mean_rstd [N, groups, 2]; channel_mean [N, C] (of
// x + bias). amax[0] becomes the largest y of the batch; with `tracked` (the running amax) it is max(that, decay *
// tracked), written to both; with `delayed`, amax[0] is the running amax before this update if that is not 0. cell and
// counter are scratch, zero before and after.
extern "C" __global__ void __launch_bounds__(256) combine(
    const DTYPE* x, const float* partial, const float* bias, const float* gamma, const float* beta, float* ab,
    float* mean_rstd, float* channel_mean, float* tracked, float* amax, int* cell, unsigned* counter, float decay,
    float eps, long long pixels, int C, int groups, int chunks, int delayed) {
    __shared__ float shared[256];
    int group = blockIdx.x, width = C / groups;
    long long n = blockIdx.y;
    float own_mean = 0.f, own_m2 = 0.f;
    const Parts of(width);
    const int c = group * width + of.channel;
    const bool has = of.part == 0;
    float sum = 0.f, square = 0.f, high = -INFINITY, low = INFINITY;
    if (of.active()) {
        const float* in = partial + (n * chunks + of.part) * 4 * C + c;
#pragma unroll 4
        for (int chunk = of.part; chunk < chunks; chunk += of.parts, in += of.parts * 4LL * C) {
            sum += in[0];
            square += in[C];
            high = fmaxf(high, in[2 * C]);
            low = fminf(low, in[3 * C]);
        }
    }
    sum = of.whole(sum, shared, add);
    square = of.whole(square, shared, add);
    high = of.whole(high, shared, larger);
    low = of.whole(low, shared, smaller);
    if (has) {
        float k = float(x[n * pixels * C + c]), shift = bias ? bias[c] : 0.f;
        own_mean = k + sum / float(pixels) + shift;
        own_m2 = fmaxf(square - sum * (sum / float(pixels)), 0.f);
        channel_mean[n * C + c] = own_mean;
    }
    float mean = block_sum(has ? own_mean : 0.f, shared) / float(width);
    float between = has ? (own_mean - mean) * (own_mean - mean) * float(pixels) : 0.f;
    float variance = block_sum(own_m2 + between, shared) / (float(pixels) * float(width));
    float rstd = 1.f / sqrtf(variance + eps);
    float top = 0.f;
    if (has) {
        float a = gamma[c] * rstd, b = a * ((bias ? bias[c] : 0.f) - mean) + beta[c];
        ab[n * 2 * C + c] = a;
        ab[(n * 2 + 1) * C + c] = b;
        top = fmaxf(fmaxf(__fmaf_rn(a, high, b), __fmaf_rn(a, low, b)), 0.f);
#if !QUANTIZE
        top = float(DTYPE(top));  // the amax of y as it is stored
#endif
        if (!isfinite(top)) top = 0.f;
    }
    if (threadIdx.x == 0) {
        mean_rstd[(n * groups + group) * 2] = mean;
        mean_rstd[(n * groups + group) * 2 + 1] = rstd;
    }
    for (int offset = 16; offset; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    if (threadIdx.x % 32 == 0) atomicMax(cell, __float_as_int(top));
    __syncthreads();
    // The last block of the grid to arrive takes the maximum; the fence orders its atomicMax before the count.
    if (threadIdx.x == 0) {
        __threadfence();
        unsigned blocks = gridDim.x * gridDim.y;
        if (atomicInc(counter, blocks - 1) == blocks - 1)
            fp4::track_amax(cell, nullptr, tracked, amax, decay, delayed);
    }
}

// y = relu(a x + b), quantised with the global amax *amax where QUANTIZE is 1.
extern "C" __global__ void __launch_bounds__(256) apply(
    const DTYPE* x, const float* ab, const float* amax, DTYPE* y, long long pixels, int C, long long per_chunk) {
    Walk walk(pixels, C, per_chunk);
    const long long item = (long long)blockIdx.y * pixels * C;
    Stream<const DTYPE> in(x + item, walk, C, walk.channel);
    Stream<DTYPE> to(y + item, walk, C, walk.channel);
    float a[VECTOR], b[VECTOR];
    if (walk.active) {
        channels::load(ab + blockIdx.y * 2LL * C + walk.channel, a);
        channels::load(ab + (blockIdx.y * 2LL + 1) * C + walk.channel, b);
    }
#if QUANTIZE
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
#endif
    for (int trip = 0; trip < walk.trips; trip += BATCH, in.advance(BATCH), to.advance(BATCH)) {
        uint4 raw[BATCH];
        in.fetch(raw, walk, trip);
#pragma unroll
        for (int at = 0; at < BATCH; ++at) {
            if (trip + at >= walk.trips) break;
            float v[VECTOR];
            channels::widened<DTYPE>(raw[at], v);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) v[i] = fp4::nan_max(__fmaf_rn(a[i], v[i], b[i]), 0.f);
#if QUANTIZE
            fp4::BlockScale block = fp4::block_scale(channels::block_amax(v), scale);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) v[i] = fp4::fake_quantize(v[i], block);
#endif
            if (walk.has(trip + at)) channels::store(to.ahead(at), v);
        }
    }
}

// y of one pixel, computed again, and with QUANTIZE or AGAIN how its blocks are quantised.
struct Output {
    float y[VECTOR];
    fp4::BlockScale block;

    __device__ __forceinline__ Output(
        const float (&x)[VECTOR], const float (&a)[VECTOR], const float (&b)[VECTOR], const fp4::GlobalScale& scale) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) y[i] = fp4::nan_max(__fmaf_rn(a[i], x[i], b[i]), 0.f);
        if (QUANTIZE || AGAIN == 2) block = fp4::block_scale(channels::block_amax(y), scale);
    }
    // dy where the gradient passes: y > 0 and not clipped (straight-through estimator). What is clipped is found again with
    // QUANTIZE, otherwise `bits` say it.
    __device__ __forceinline__ void pass_gradient(float (&dy)[VECTOR], unsigned bits) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const bool in_range = QUANTIZE ? y[i] * block.encode <= 6.f : (bits >> i & 1) != 0;
            if (!(y[i] > 0.f) || !in_range) dy[i] = 0.f;
        }
    }
    // As `apply` writes it.
    __device__ __forceinline__ void write(DTYPE* to) const {
        float out[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) out[i] = AGAIN == 2 ? fp4::fake_quantize(y[i], block) : y[i];
        channels::store(to, out);
    }
};

// What the backward reads: x, dy and, of what another kernel quantised, the in-range mask.
struct Gradients {
    Stream<const DTYPE> x, dy;
    Stream<const unsigned char> in_range;
    uint4 values[BATCH], gradients[BATCH];
    unsigned bits[BATCH];

    __device__ Gradients(const DTYPE* x_, const DTYPE* dy_, const unsigned char* in_range_, const Walk& walk, int C)
        : x(x_, walk, C, walk.channel), dy(dy_, walk, C, walk.channel),
          in_range(in_range_, walk, C / VECTOR, walk.channel / VECTOR) {}
    __device__ __forceinline__ void fetch(const Walk& walk, int trip, bool masked) {
#pragma unroll
        for (int at = 0; at < BATCH; ++at) {
            const bool has = walk.has(trip + at);
            values[at] = channels::load_if(x.ahead(at), has);
            gradients[at] = channels::load_if(dy.ahead(at), has);
            bits[at] = masked && has ? *in_range.ahead(at) : 0xFFu;
        }
    }
    __device__ __forceinline__ void widen(int at, float (&v)[VECTOR], float (&g)[VECTOR]) const {
        channels::widened<DTYPE>(values[at], v);
        channels::widened<DTYPE>(gradients[at], g);
    }
    __device__ __forceinline__ void advance() {
        x.advance(BATCH);
        dy.advance(BATCH);
        in_range.advance(BATCH);
    }
};

// partial [N, chunks, 2, C]: sums of dy and of dy * xhat over the pixels where the gradient passes.
extern "C" __global__ void __launch_bounds__(256) sums(
    const DTYPE* x, const DTYPE* dy, const float* ab, const float* mean_rstd, const float* bias, const float* amax,
    const unsigned char* in_range, float* partial, long long pixels, int C, int groups, long long per_chunk) {
    extern __shared__ float shared[];
    Walk walk(pixels, C, per_chunk);
    const long long item = (long long)blockIdx.y * pixels * C;
    Gradients in(x + item, dy + item, in_range + item / VECTOR, walk, C);
    float a[VECTOR], b[VECTOR], rstd[VECTOR], offset[VECTOR], one[VECTOR], two[VECTOR];
    if (walk.active) {
        channels::load(ab + blockIdx.y * 2LL * C + walk.channel, a);
        channels::load(ab + (blockIdx.y * 2LL + 1) * C + walk.channel, b);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        one[i] = two[i] = 0.f;
        if (!walk.active) continue;
        int c = walk.channel + i;
        const float* moments_of = mean_rstd + (blockIdx.y * (long long)groups + c / (C / groups)) * 2;
        rstd[i] = moments_of[1];
        offset[i] = ((bias ? bias[c] : 0.f) - moments_of[0]) * rstd[i];
    }
#if QUANTIZE
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
#else
    const fp4::GlobalScale scale{};
#endif
    for (int trip = 0; trip < walk.trips; trip += BATCH, in.advance()) {
        in.fetch(walk, trip, !QUANTIZE && in_range);
#pragma unroll
        for (int at = 0; at < BATCH; ++at) {
            if (trip + at >= walk.trips) break;
            float v[VECTOR], g[VECTOR];
            in.widen(at, v, g);
            Output(v, a, b, scale).pass_gradient(g, in.bits[at]);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                one[i] += g[i];
                two[i] = __fmaf_rn(g[i], __fmaf_rn(v[i], rstd[i], offset[i]), two[i]);
            }
        }
    }
    float* out = partial + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 2 * C;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (walk.active) shared[walk.row * C + walk.channel + i] = kind ? two[i] : one[i];
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float value = 0.f;
            for (int row = 0; row < walk.rows; ++row) value += shared[row * C + c];
            out[kind * C + c] = value;
        }
    }
}

// From the partial sums of one (group, batch item): pqr [N, 3, C] with dx = p dy + q x + r, and channel_sums [N, 3, C]:
// its terms of dgamma, dbeta and dbias.
extern "C" __global__ void __launch_bounds__(256) coefficients(
    const float* partial, const float* mean_rstd, const float* channel_mean, const float* bias, const float* gamma,
    float* pqr, float* channel_sums, long long pixels, int C, int groups, int chunks) {
    __shared__ float shared[256];
    int group = blockIdx.x, width = C / groups;
    long long n = blockIdx.y;
    const Parts of(width);
    const int c = group * width + of.channel;
    const bool has = of.part == 0;
    float mean = mean_rstd[(n * groups + group) * 2], rstd = mean_rstd[(n * groups + group) * 2 + 1];
    const float weight = has ? gamma[c] : 0.f;
    float one = 0.f, two = 0.f;
    if (of.active()) {
        const float* in = partial + (n * chunks + of.part) * 2 * C + c;
#pragma unroll 4
        for (int chunk = of.part; chunk < chunks; chunk += of.parts, in += of.parts * 2LL * C) {
            one += in[0];
            two += in[C];
        }
    }
    one = of.whole(one, shared, add);
    two = of.whole(two, shared, add);
    float count = float(pixels) * float(width);
    float c1 = block_sum(has ? weight * one : 0.f, shared) / count;
    float c2 = block_sum(has ? weight * two : 0.f, shared) / count;
    if (!has) return;
    float offset = ((bias ? bias[c] : 0.f) - mean) * rstd;
    pqr[n * 3 * C + c] = rstd * weight;
    pqr[(n * 3 + 1) * C + c] = -rstd * c2 * rstd;
    pqr[(n * 3 + 2) * C + c] = -rstd * (c1 + c2 * offset);
    channel_sums[n * 3 * C + c] = two;
    channel_sums[(n * 3 + 1) * C + c] = one;
    float centred = (channel_mean[n * C + c] - mean) * rstd;
    channel_sums[(n * 3 + 2) * C + c] = rstd * (weight * one - float(pixels) * (c1 + c2 * centred));
}

// dgamma, dbeta, dbias [3, C] from channel_sums [N, 3, C].
extern "C" __global__ void __launch_bounds__(256) parameters(const float* channel_sums, float* out, int N, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= 3 * C) return;
    float total = 0.f;
    for (int n = 0; n < N; ++n) total += channel_sums[(long long)n * 3 * C + c];
    out[c] = total;
}

// dx = p dy + q x + r, with dy only where the gradient passes.
extern "C" __global__ void __launch_bounds__(256) gradient(
    const DTYPE* x, const DTYPE* dy, const float* ab, const float* pqr, const float* amax,
    const unsigned char* in_range, DTYPE* dx, DTYPE* again, long long pixels, int C, long long per_chunk) {
    Walk walk(pixels, C, per_chunk);
    const long long item = (long long)blockIdx.y * pixels * C;
    Gradients in(x + item, dy + item, in_range + item / VECTOR, walk, C);
    Stream<DTYPE> to(dx + item, walk, C, walk.channel), to_again(again + item, walk, C, walk.channel);
    float a[VECTOR], b[VECTOR], p[VECTOR], q[VECTOR], r[VECTOR];
    if (walk.active) {
        channels::load(ab + blockIdx.y * 2LL * C + walk.channel, a);
        channels::load(ab + (blockIdx.y * 2LL + 1) * C + walk.channel, b);
        channels::load(pqr + blockIdx.y * 3LL * C + walk.channel, p);
        channels::load(pqr + (blockIdx.y * 3LL + 1) * C + walk.channel, q);
        channels::load(pqr + (blockIdx.y * 3LL + 2) * C + walk.channel, r);
    }
#if QUANTIZE || AGAIN == 2
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
#else
    const fp4::GlobalScale scale{};
#endif
    for (int trip = 0; trip < walk.trips; trip += BATCH) {
        in.fetch(walk, trip, !QUANTIZE && in_range);
#pragma unroll
        for (int at = 0; at < BATCH; ++at) {
            if (trip + at >= walk.trips) break;
            const bool has = walk.has(trip + at);
            float v[VECTOR], g[VECTOR];
            in.widen(at, v, g);
            const Output output(v, a, b, scale);
            if (AGAIN && has) output.write(to_again.ahead(at));
            output.pass_gradient(g, in.bits[at]);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) g[i] = __fmaf_rn(p[i], g[i], __fmaf_rn(q[i], v[i], r[i]));
            if (has) channels::store(to.ahead(at), g);
        }
        in.advance();
        to.advance(BATCH);
        to_again.advance(BATCH);
    }
}
