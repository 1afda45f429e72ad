// LayerNorm of rows, of a sum where there is one, quantised in blocks of 16 along the row and decoded.
//
//     s = x + other,   y = (s - mean) / sqrt(variance + eps) * weight + bias,   values = NVFP4 of y
//
// s and y are rounded to DTYPE before they are read again, as they are where each is an operator of its own. LANES
// threads have a row, each STEPS times eight neighbouring channels; two adjacent threads have one block.
//
// Macros: DTYPE __half or __nv_bfloat16; LANES 2, 4 ... 32; STEPS.
// x, other, sum, plain, values: DTYPE [rows, channels], 16-byte aligned; other (and sum with it) and plain may be null.
// weight, bias: float32 [channels], null for 1 and 0. unit: what one unit of E2M1 times its block scale is written as; 0
// for the contract's d8 A / 6E.
// Launch: block 256, a grid of rows / (256 / LANES).
#include "channels.cuh"

using channels::VECTOR;

__device__ __forceinline__ float sum_of_row(float part) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) part += __shfl_xor_sync(0xFFFFFFFFu, part, step);
    return part;
}

extern "C" __global__ void __launch_bounds__(256) layer_norm(
    const DTYPE* x, const DTYPE* other, const float* weight, const float* bias, const float* amax, DTYPE* sum,
    DTYPE* plain, DTYPE* values, int width, float eps, float unit, long long rows) {
    begin_after_primary();
    const long long row = (long long)blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    const bool inside = row < rows;  // threads without a row take part in the shuffles
    const long long start = row * width;

    // Weights are on their way while the row is summed, if there are registers for them.
    constexpr bool EARLY = STEPS <= 2;
    float w[EARLY ? STEPS : 1][VECTOR], b[EARLY ? STEPS : 1][VECTOR];
    const auto affine = [&](int channel, float (&factor)[VECTOR], float (&offset)[VECTOR]) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) factor[j] = 1.f, offset[j] = 0.f;
        if (weight) channels::load(weight + channel, factor);
        if (bias) channels::load(bias + channel, offset);
    };

    float s[STEPS][VECTOR], total = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int channel = (lane + i * LANES) * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) s[i][j] = 0.f;
        if (!inside || channel >= width) continue;
        channels::load(x + start + channel, s[i]);
        if constexpr (EARLY) affine(channel, w[i], b[i]);
        if (other) {
            float added[VECTOR];
            channels::load(other + start + channel, added);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) s[i][j] += added[j];
            const uint4 rounded = channels::narrowed<DTYPE>(s[i]);
            *reinterpret_cast<uint4*>(sum + start + channel) = rounded;
            channels::widened<DTYPE>(rounded, s[i]);
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) total += s[i][j];
    }
    // The divisions of the global scale are done once a block, while the others sum.
    __shared__ fp4::GlobalScale shared;
    if (threadIdx.x == 0) shared = fp4::global_scale(*amax);
    const float mean = sum_of_row(total) / float(width);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if ((lane + i * LANES) * VECTOR >= width) continue;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) squares = fmaf(s[i][j] - mean, s[i][j] - mean, squares);
    }
    const float factor = rsqrtf(sum_of_row(squares) / float(width) + eps);
    __syncthreads();
    const fp4::GlobalScale global = shared;

#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int channel = (lane + i * LANES) * VECTOR;
        const bool has = inside && channel < width;
        float y[VECTOR], largest = 0.f;
        uint4 rounded = {};
        if (has) {
            const int at = EARLY ? i : 0;
            if constexpr (!EARLY) affine(channel, w[at], b[at]);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) y[j] = fmaf((s[i][j] - mean) * factor, w[at][j], b[at][j]);
            rounded = channels::narrowed<DTYPE>(y);
            if (plain) *reinterpret_cast<uint4*>(plain + start + channel) = rounded;
        }
        channels::widened<DTYPE>(rounded, y);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) largest = fp4::nan_max(largest, fabsf(y[j]));
        largest = fp4::nan_max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        const fp4::BlockScale block = fp4::block_scale(largest, global);
        const float step = unit == 0.f ? block.step : block.d8 * unit;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            const float u = y[j] * block.encode;
            y[j] = copysignf(fp4::round_e2m1(u), u) * step;
        }
        if (has) *reinterpret_cast<uint4*>(values + start + channel) = channels::narrowed<DTYPE>(y);
    }
}
