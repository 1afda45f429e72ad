// Frames resized as by Pillow, padded and normalised: the numbers of `prepare_reference`. Whole numbers until the last
// line, so that sums have no order; the product and the sum of the last line are rounded one by one.
//
// Both axes in one pass: for each source pixel that it needs along the outer axis a thread sums what that needs along the
// inner one, rounds it to 8 bits as Pillow's image between the axes is, and adds it. Neighbours read the same pixels, which
// are in the cache.
//
// Macros: PACKED, written are not images but the operand of a network that reads them as FP4 terms: codes, 8 bytes a pixel,
// and scales, [N, h, w], packed with amax, float [1].
// Launch: block (columns, rows), grid (w / columns, h / rows, N). frames: uint8 [N, H, W, 3]; images: float [N, 3, h, w], of
// which the frame takes [rows, columns]; down, across: int [1 + taps, rows or columns], the first source pixel of each target
// pixel and its weights; scale, offset: float [3]; padding: red + 256 green + 65536 blue; height_first: which axis is inner.
#ifndef PACKED
#define PACKED 0
#endif
#if PACKED
#include "pack_terms.cuh"
#define WRITTEN const float* __restrict__ amax, uint2* __restrict__ codes, uint8_t* __restrict__ scales
#else
#define WRITTEN float* __restrict__ images
#endif

namespace {

constexpr int BITS = 22;  // of a weight below one

struct Axis {
    const int* table;
    int target, taps, at, last, step;  // step: bytes from one source pixel to the next

    __device__ __forceinline__ int weight(int tap) const { return table[(1 + tap) * target + at]; }
    __device__ __forceinline__ int place(int tap) const { return min(table[at] + tap, last) * step; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256) prepare_frames(
    const unsigned char* __restrict__ frames, WRITTEN, const int* __restrict__ down, const int* __restrict__ across,
    const float* __restrict__ scale, const float* __restrict__ offset, int H, int W, int h, int w, int rows, int columns,
    int down_taps, int across_taps, int padding, int height_first) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
#if PACKED
    const input_encoding::Scale& block = input_encoding::shared_scale(amax);
#endif
    if (x >= w || y >= h) return;
    int colour[3] = {padding & 255, padding >> 8 & 255, padding >> 16 & 255};
    if (y < rows && x < columns) {
        const unsigned char* frame = frames + (long long)blockIdx.z * H * W * 3;
        const Axis vertical = {down, rows, down_taps, y, H - 1, 3 * W};
        const Axis horizontal = {across, columns, across_taps, x, W - 1, 3};
        const Axis outer = height_first ? horizontal : vertical, inner = height_first ? vertical : horizontal;
        int total[3] = {1 << BITS - 1, 1 << BITS - 1, 1 << BITS - 1};
        for (int i = 0; i < outer.taps; ++i) {
            int sum[3] = {1 << BITS - 1, 1 << BITS - 1, 1 << BITS - 1};
            for (int j = 0; j < inner.taps; ++j) {
                const unsigned char* pixel = frame + outer.place(i) + inner.place(j);
                const int weight = inner.weight(j);
#pragma unroll
                for (int c = 0; c < 3; ++c) sum[c] += pixel[c] * weight;
            }
            const int weight = outer.weight(i);
#pragma unroll
            for (int c = 0; c < 3; ++c) total[c] += (sum[c] >> BITS) * weight;
        }
#pragma unroll
        for (int c = 0; c < 3; ++c) colour[c] = total[c] >> BITS;
    }
    float value[3];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        value[c] = __fadd_rn(__fmul_rn((float)colour[c], scale[c]), offset[c]);
#if !PACKED
        images[(((long long)blockIdx.z * 3 + c) * h + y) * w + x] = value[c];
#endif
    }
#if PACKED
    const long long number = ((long long)blockIdx.z * h + y) * w + x;
    input_encoding::pack(value, block, codes + number, scales + number);
#endif
}
