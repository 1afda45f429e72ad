// A convolution of feature maps with weights, both HALF, FP16 or BF16, summed in FP32 in one fixed order: layers that are not quantised,
// where no library of convolutions is at hand.
//
//   y = round(relu(sum over kh, kw, c ascending of x w + bias))
//
// A product of two such values is exact in FP32, so that each step of the sum rounds once, with or without a fused
// multiply-add; taps in the padding add zeros. Any implementation that adds in this order gives the same bytes
// (`plugins.gemm.plain.conv2d_reference`). It runs on the CUDA cores: a first layer of 3 channels and a head of 1 x 1
// are bound by memory, a deep FP16 layer is several times slower than on tensor cores.
//
// A thread computes 16 outputs of a pixel and reads 8 channels at once where C is a multiple of 8. Outputs pass through
// shared memory, so that a warp writes whole sectors.
//
// Launch: block 128, grid (ceil(pixels / 128), ceil(O / 16)). x: [N, H, W, C]; w: [O, KH, KW, C]; bias: float32 [O] or
// null; y: [N, OH, OW, O]; pixels: N OH OW.
#include "sixteen_bits.cuh"

constexpr int PIXELS = 128, OUTPUTS = 16, STEP = 128, VECTOR = 8;  // STEP: elements of K that shared memory holds

__device__ __forceinline__ void add(float (&sums)[OUTPUTS], float value, const float* weights) {
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) sums[o] = __fmaf_rn(value, weights[o], sums[o]);
}

extern "C" __global__ void __launch_bounds__(PIXELS) plain_conv(
    const HALF* x, const HALF* w, const float* bias, HALF* y, int H, int W, int C, int OH, int OW, int O, int KH,
    int KW, int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w, int relu,
    long long pixels) {
    __shared__ __align__(16) float weights[STEP * OUTPUTS];
    const long long corner = (long long)blockIdx.x * PIXELS, pixel = corner + threadIdx.x;
    const bool active = pixel < pixels, wide = C % VECTOR == 0 && reinterpret_cast<size_t>(x) % 16 == 0;
    const long long item = active ? pixel / ((long long)OH * OW) : 0;
    const int place = active ? int(pixel - item * OH * OW) : 0, row = place / OW, column = place - row * OW;
    const int top = row * stride_h - padding_h, left = column * stride_w - padding_w;
    const int first = blockIdx.y * OUTPUTS, deep = KH * KW * C, outputs = min(OUTPUTS, O - first);
    const HALF* const image = x + item * H * W * C;
    float sums[OUTPUTS] = {};
    int tap_row = 0, tap_column = 0, channel = 0;
    for (int begin = 0; begin < deep; begin += STEP) {
        const int count = min(STEP, deep - begin);
        __syncthreads();
        for (int at = threadIdx.x; at < count * OUTPUTS; at += PIXELS) {
            const int k = at % count, o = at / count;
            weights[k * OUTPUTS + o] = o < outputs ? widen(w[(long long)(first + o) * deep + begin + k]) : 0.f;
        }
        __syncthreads();
        for (int k = 0; k < count;) {
            const int h = top + tap_row * dilation_h, v = left + tap_column * dilation_w;
            const bool has = active && h >= 0 && h < H && v >= 0 && v < W;
            const HALF* const from = image + (has ? ((long long)h * W + v) * C + channel : 0);
            int taken = 1;
            if (wide) {
                uint4 raw = make_uint4(0u, 0u, 0u, 0u);
                if (has) raw = *reinterpret_cast<const uint4*>(from);
                const HALF* const values = reinterpret_cast<const HALF*>(&raw);
#pragma unroll
                for (int each = 0; each < VECTOR; ++each) add(sums, widen(values[each]), weights + (k + each) * OUTPUTS);
                taken = VECTOR;
            } else {
                add(sums, has ? widen(*from) : 0.f, weights + k * OUTPUTS);
            }
            k += taken;
            channel += taken;
            if (channel == C) {
                channel = 0;
                if (++tap_column == KW) tap_column = 0, ++tap_row;
            }
        }
    }
    __syncthreads();
    HALF* const tile = reinterpret_cast<HALF*>(weights);
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        float sum = sums[o];
        if (bias && o < outputs) sum = __fadd_rn(sum, bias[first + o]);
        if (relu) sum = sum < 0.f ? 0.f : sum;
        if (o < outputs) narrow(sum, tile[threadIdx.x * outputs + o]);
    }
    __syncthreads();
    const int rows = int(min((long long)PIXELS, pixels - corner));
    for (int at = threadIdx.x; at < rows * outputs; at += PIXELS) {
        const int each = at / outputs;
        y[(corner + each) * O + first + at - each * outputs] = tile[at];
    }
}
