// What lies between a caller's tensors and packed kernels: images to channels-last HALF, copies of channels, and the
// last feature map to logits or to class numbers. Elements are moved or rounded once; nothing else is computed but the
// multi-term FP4 input encoding (fp4deploy/models/input_encoding.py), whose products and differences are exact.
//
// Macros: VALUE, the caller's type: float or __half; HALF, the network's: __half or __nv_bfloat16.
// Launch: block 256, grid ceil(pixels of all items / 256), one pixel a thread. P: pixels of an item; count: of all.
#include "input_encoding.cuh"
#include "sixteen_bits.cuh"

struct Pixel {
    long long number, item, place;
    bool active;
    __device__ Pixel(long long P, long long count)
        : number((long long)blockIdx.x * 256 + threadIdx.x), item(number / P), place(number - item * P), active(number < count) {}
};

// x: VALUE [N, C, P] -> y: HALF [N, P, C]
extern "C" __global__ void __launch_bounds__(256) read_image(const VALUE* x, HALF* y, int C, long long P, long long count) {
    const Pixel at(P, count);
    if (!at.active) return;
    for (int c = 0; c < C; ++c) {
        HALF& to = y[at.number * C + c];
        narrow(widen(x[(at.item * C + c) * P + at.place]), to);
    }
}

// x: VALUE [N, 3, P], rounded to FP16 first -> y: HALF [N, P, 13], which holds every term
extern "C" __global__ void __launch_bounds__(256) encode_image(const VALUE* x, HALF* y, long long P, long long count) {
    const Pixel at(P, count);
    if (!at.active) return;
    using namespace input_encoding;
    HALF* const out = y + at.number * CHANNELS;
    float total = 0.f;
    for (int c = 0; c < COLOURS; ++c) {
        float term[TERMS];
        total += terms_of(widen(x[(at.item * COLOURS + c) * P + at.place]), term);
        for (int i = 0; i < TERMS; ++i) narrow(term[i], out[COLOURS * i + c]);
    }
    narrow(constant_of(total), out[CHANNELS - 1]);
}

// x: HALF [pixels, C] -> channels [first, first + C) of y: HALF [pixels, stride]
extern "C" __global__ void __launch_bounds__(256) copy_channels(
    const HALF* x, HALF* y, int C, int first, int stride, long long count) {
    const long long pixel = (long long)blockIdx.x * 256 + threadIdx.x;
    if (pixel >= count) return;
    for (int c = 0; c < C; ++c) y[pixel * stride + first + c] = x[pixel * C + c];
}

// x: HALF [N, P, C] -> y: VALUE [N, C, P]
extern "C" __global__ void __launch_bounds__(256) write_planes(const HALF* x, VALUE* y, int C, long long P, long long count) {
    const Pixel at(P, count);
    if (!at.active) return;
    for (int c = 0; c < C; ++c) {
        VALUE& to = y[(at.item * C + c) * P + at.place];
        narrow(widen(x[at.number * C + c]), to);
    }
}

// x: HALF [pixels, C] -> y: uint8 [pixels], the first of the largest channels; NaN is larger than any number
extern "C" __global__ void __launch_bounds__(256) class_map(const HALF* x, unsigned char* y, int C, long long count) {
    const long long pixel = (long long)blockIdx.x * 256 + threadIdx.x;
    if (pixel >= count) return;
    float best = widen(x[pixel * C]);
    int found = 0;
    for (int c = 1; c < C && best == best; ++c) {
        const float value = widen(x[pixel * C + c]);
        if (value > best || value != value) best = value, found = c;
    }
    y[pixel] = (unsigned char)found;
}
