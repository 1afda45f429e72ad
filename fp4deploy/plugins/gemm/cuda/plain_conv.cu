// A convolution of FP16 feature maps with FP16 weights, summed in FP32 in one fixed order: layers that are not quantised,
// where no library of convolutions is at hand.
//
//   y = round(relu(sum over kh, kw, c ascending of x w + bias))
//
// A product of two FP16 values is exact in FP32, so that each step of the sum rounds once, with or without a fused
// multiply-add; taps in the padding add zeros. Any implementation that adds in this order gives the same bytes
// (`plugins.gemm.plain.conv2d_reference`). It runs on the CUDA cores: a first layer of 3 channels and a head of 1 x 1
// are bound by memory, a deep FP16 layer is several times slower than on tensor cores.
//
// Launch: block 128, grid (ceil(pixels / 128), ceil(O / 16)). x: [N, H, W, C]; w: [O, KH, KW, C]; bias: float32 [O] or
// null; y: [N, OH, OW, O]; pixels: N OH OW.
#include <cuda_fp16.h>

constexpr int PIXELS = 128, OUTPUTS = 16, STEP = 128;  // STEP: elements of K that shared memory holds

extern "C" __global__ void __launch_bounds__(PIXELS) plain_conv(
    const __half* x, const __half* w, const float* bias, __half* y, int H, int W, int C, int OH, int OW, int O, int KH,
    int KW, int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w, int relu,
    long long pixels) {
    __shared__ float weights[STEP][OUTPUTS];
    const long long pixel = (long long)blockIdx.x * PIXELS + threadIdx.x;
    const bool active = pixel < pixels;
    const long long item = active ? pixel / ((long long)OH * OW) : 0;
    const int place = active ? int(pixel - item * OH * OW) : 0, row = place / OW, column = place - row * OW;
    const int top = row * stride_h - padding_h, left = column * stride_w - padding_w;
    const int first = blockIdx.y * OUTPUTS, deep = KH * KW * C;
    const __half* const image = x + item * H * W * C;
    float sums[OUTPUTS] = {};
    int tap_row = 0, tap_column = 0, channel = 0;
    for (int begin = 0; begin < deep; begin += STEP) {
        const int count = min(STEP, deep - begin);
        __syncthreads();
        for (int at = threadIdx.x; at < count * OUTPUTS; at += PIXELS) {
            const int k = at % count, o = at / count;
            weights[k][o] = first + o < O ? __half2float(w[(long long)(first + o) * deep + begin + k]) : 0.f;
        }
        __syncthreads();
        for (int k = 0; k < count; ++k) {
            const int h = top + tap_row * dilation_h, v = left + tap_column * dilation_w;
            float value = 0.f;
            if (active && h >= 0 && h < H && v >= 0 && v < W) value = __half2float(image[((long long)h * W + v) * C + channel]);
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) sums[o] = __fmaf_rn(value, weights[k][o], sums[o]);
            if (++channel == C) {
                channel = 0;
                if (++tap_column == KW) tap_column = 0, ++tap_row;
            }
        }
    }
    if (!active) return;
    __half* const out = y + pixel * O + first;
    for (int o = 0; o < OUTPUTS && first + o < O; ++o) {
        float sum = sums[o];
        if (bias) sum = __fadd_rn(sum, bias[first + o]);
        if (relu) sum = sum < 0.f ? 0.f : sum;
        out[o] = __float2half_rn(sum);
    }
}
