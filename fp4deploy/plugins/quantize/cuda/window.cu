// Layers of packed networks that choose among the pixels of a channels_last feature map: maximum pooling over any window, and
// nearest resizing of codes and scales.
//
// Both read and write bytes as they are: no value is rounded. A window that reaches beyond the image has the pixels inside it;
// of equal values the first counts, row by row, and a NaN is larger than everything, as in torch.
//
// Launch: block 256, grid ceil(threads / 256); fewer than 2^31 threads.
#include "channels.cuh"

using channels::VECTOR;

// x: DTYPE [N, H, W, C] and y: DTYPE [N, OH, OW, C], C a multiple of 8. A thread has eight channels of a pixel of y.
extern "C" __global__ void __launch_bounds__(256) max_window(
    const DTYPE* x, DTYPE* y, unsigned threads, int H, int W, int C, int OH, int OW, int kernel_h, int kernel_w,
    int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w) {
    begin_after_primary();
    const unsigned thread = blockIdx.x * 256u + threadIdx.x, lanes = C / VECTOR, line = thread / lanes / OW;
    if (thread >= threads) return;
    const int column = int(thread / lanes % OW) * stride_w - padding_w, row = int(line % OH) * stride_h - padding_h;
    const DTYPE* image = x + (long long)(line / OH) * H * W * C + thread % lanes * VECTOR;
    float best[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) best[i] = -INFINITY;
    for (int i = 0; i < kernel_h; ++i) {
        const int at_row = row + i * dilation_h;
        if (at_row < 0 || at_row >= H) continue;
        for (int j = 0; j < kernel_w; ++j) {
            const int at_column = column + j * dilation_w;
            if (at_column < 0 || at_column >= W) continue;
            float v[VECTOR];
            channels::load(image + ((long long)at_row * W + at_column) * C, v);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k)
                if (v[k] > best[k] || v[k] != v[k]) best[k] = v[k];
        }
    }
    channels::store(y + (long long)thread * VECTOR, best);
}

// The pixel that torch's nearest resizing reads: `scale` pixels of the source lie between two of the result; `half` is 0.5
// for nearest-exact, else 0.
__device__ __forceinline__ int nearest(int at, float scale, float half, int size) {
    return min(int(floorf((float(at) + half) * scale)), size - 1);
}

// codes: 8 bytes and scales: 1 byte for each of G groups of a pixel, [N, H, W, G] and [N, OH, OW, G].
extern "C" __global__ void __launch_bounds__(256) nearest_groups(
    const uint2* codes, const uint8_t* scales, uint2* out_codes, uint8_t* out_scales, unsigned threads, int H, int W,
    int G, int OH, int OW, float scale_h, float scale_w, float half) {
    begin_after_primary();
    const unsigned thread = blockIdx.x * 256u + threadIdx.x, line = thread / G / OW;
    if (thread >= threads) return;
    const int column = nearest(thread / G % OW, scale_w, half, W), row = nearest(line % OH, scale_h, half, H);
    const long long from = (((long long)(line / OH) * H + row) * W + column) * G + thread % G;
    out_codes[thread] = codes[from];
    out_scales[thread] = scales[from];
}
