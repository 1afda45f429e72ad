// What lies between a caller's tensors and packed kernels: images to channels-last FP16, copies of channels, and the
// last feature map to logits or to class numbers. Elements are moved or rounded once; nothing else is computed but the
// multi-term FP4 input encoding (fp4deploy/models/input_encoding.py), whose products and differences are exact.
//
// Macros: VALUE, the caller's type: float or __half.
// Launch: block 256, grid ceil(pixels of all items / 256), one pixel a thread. P: pixels of an item; count: of all.
#include <cuda_fp16.h>

__device__ __forceinline__ float widen(float value) { return __half2float(__float2half_rn(value)); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ void narrow(float& to, __half value) { to = __half2float(value); }
__device__ __forceinline__ void narrow(__half& to, __half value) { to = value; }

struct Pixel {
    long long number, item, place;
    bool active;
    __device__ Pixel(long long P, long long count)
        : number((long long)blockIdx.x * 256 + threadIdx.x), item(number / P), place(number - item * P), active(number < count) {}
};

// x: VALUE [N, C, P] -> y: FP16 [N, P, C]
extern "C" __global__ void __launch_bounds__(256) read_image(const VALUE* x, __half* y, int C, long long P, long long count) {
    const Pixel at(P, count);
    if (!at.active) return;
    for (int c = 0; c < C; ++c) y[at.number * C + c] = __float2half_rn(widen(x[(at.item * C + c) * P + at.place]));
}

// x: VALUE [N, 3, P] -> y: FP16 [N, P, 13]
extern "C" __global__ void __launch_bounds__(256) encode_image(const VALUE* x, __half* y, long long P, long long count) {
    const Pixel at(P, count);
    if (!at.active) return;
    __half* const out = y + at.number * 13;
    float total = 0.f;
    for (int c = 0; c < 3; ++c) {
        const float wide = widen(x[(at.item * 3 + c) * P + at.place]);
        const float scaled = wide * 1.6875f, v = scaled < -4.5f ? -4.5f : scaled > 4.5f ? 4.5f : scaled;
        const float d1 = rintf(v), second = (v - d1) * 6.f, twice2 = rintf(second);
        const float third = (second - twice2) * 2.f, twice3 = rintf(third), twice4 = rintf((third - twice3) * 2.f);
        out[c] = __float2half_rn(d1);
        out[3 + c] = __float2half_rn(twice2 * 0.5f);
        out[6 + c] = __float2half_rn(twice3 * 0.5f);
        out[9 + c] = __float2half_rn(twice4 * 0.5f);
        total += wide;
    }
    out[12] = __float2half_rn((total - total) + 6.f);
}

// x: FP16 [pixels, C] -> channels [first, first + C) of y: FP16 [pixels, stride]
extern "C" __global__ void __launch_bounds__(256) copy_channels(
    const __half* x, __half* y, int C, int first, int stride, long long count) {
    const long long pixel = (long long)blockIdx.x * 256 + threadIdx.x;
    if (pixel >= count) return;
    for (int c = 0; c < C; ++c) y[pixel * stride + first + c] = x[pixel * C + c];
}

// x: FP16 [N, P, C] -> y: VALUE [N, C, P]
extern "C" __global__ void __launch_bounds__(256) write_planes(const __half* x, VALUE* y, int C, long long P, long long count) {
    const Pixel at(P, count);
    if (!at.active) return;
    for (int c = 0; c < C; ++c) narrow(y[(at.item * C + c) * P + at.place], x[at.number * C + c]);
}

// x: FP16 [pixels, C] -> y: uint8 [pixels], the first of the largest channels; NaN is larger than any number
extern "C" __global__ void __launch_bounds__(256) class_map(const __half* x, unsigned char* y, int C, long long count) {
    const long long pixel = (long long)blockIdx.x * 256 + threadIdx.x;
    if (pixel >= count) return;
    float best = __half2float(x[pixel * C]);
    int found = 0;
    for (int c = 1; c < C && best == best; ++c) {
        const float value = __half2float(x[pixel * C + c]);
        if (value > best || value != value) best = value, found = c;
    }
    y[pixel] = (unsigned char)found;
}
