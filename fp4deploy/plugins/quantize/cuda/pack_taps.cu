// Packs, or fake-quantises, the unfolded (im2col) feature map that a weight gradient contracts along its pixels, which is
// never written unfolded before. Row (n, channel, tap) has as K the OH * OW output pixels of image n in row-major order,
// and element (oy, ox) is
//
//   x[n, channel, oy * stride - padding + tap_y * dilation, ox * stride - padding + tap_x * dilation]     0 outside
//
// A thread has a group of 16 pixels (MXFP4: two adjacent lanes share a block of 32). The bytes, and the counters of
// Philox, are those of quantising the unfolded tensor [N, channels * taps, OH * OW] along its last axis.
//
// Macros: DTYPE, FORMAT, E, SQUARED, FAST, STOCHASTIC, HADAMARD as of quantize.cu; PACKED 0 fake quantisation, 1 codes
//   and scales, 3 the finite amax alone; OUT, the type of the values; BIG of quantize.cu; ROWS, IN_RANGE, INNER and
//   LINEAR are 0.
// Arguments: x DTYPE [planes, H, W] (planes: images * channels); amax, random, scales as of quantize.cu; out: values OUT
//   [channels * taps, images, OH * OW padded to 16 with HADAMARD], or codes uint8 [rows, 8 G], or int32 [1], zero
//   before; codes and scales are only of the rows of this launch; rows of this launch, and the number of its first row;
//   rows of an image: channels * taps.
// Launch: block 256, grid ceil(rows * G / 256).
#include "groups.cuh"

extern "C" __global__ void __launch_bounds__(256) pack_taps(
    const DTYPE* x, const float* amax, const uint64_t* random, void* out, uint8_t* scales, long long rows,
    long long first, int image_rows, int images, int height, int width, int out_height, int out_width, int taps,
    int taps_x, int stride_y, int stride_x, int padding_y, int padding_x, int dilation_y, int dilation_x) {
    const long long pixels = (long long)out_height * out_width;
    const View view{pixels, 1, MX ? (pixels + 31) / 32 * 2 : (pixels + 15) / 16};
    const Index thread = (Index)blockIdx.x * 256u + threadIdx.x, row = thread / (Index)view.groups;
    const Index number = (Index)first + row, plane = number / (Index)taps;
    const bool has = row < (Index)rows;
    const uint32_t group = uint32_t(thread - row * (Index)view.groups), begin = group * 16;
    const int tap = int(number - plane * (Index)taps), tap_y = tap / taps_x, tap_x = tap - tap_y * taps_x;
    const int left = int(pixels) - int(begin);
    int oy = int(begin / (uint32_t)out_width), ox = int(begin - oy * (uint32_t)out_width);
    const DTYPE* source = x + (long long)plane * height * width;
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int iy = oy * stride_y - padding_y + tap_y * dilation_y;
        const int ix = ox * stride_x - padding_x + tap_x * dilation_x;
        const bool inside = has && i < left && iy >= 0 && iy < height && ix >= 0 && ix < width;
        v[i] = inside ? widen(source[iy * width + ix]) : 0.f;
        if (++ox == out_width) ox = 0, ++oy;
    }
    // `quantize` writes to the place of the row's number.
    const long long blocks = MX ? view.groups / 2 : view.groups;
    uint8_t* codes = static_cast<uint8_t*>(out) - (PACKED == 1 ? first * view.groups * 8 : 0);
    quantize(v, amax, random, codes, scales - first * blocks, nullptr, view, number, group, 0, has);
#if PACKED == 0
    if (!has) return;
    const Index image = number / (Index)image_rows;
    const long long place = (long long)(number - image * (Index)image_rows) * images + image;
    OUT* target = static_cast<OUT*>(out) + place * view.padded() + begin;
    alignas(16) OUT values[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = narrow<OUT>(v[i]);
    if (view.padded() % 16 == 0) {  // then every group begins at a multiple of 16 bytes, and is whole or not there
        if (begin >= view.padded()) return;
#pragma unroll
        for (int i = 0; i < sizeof(OUT); ++i) reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<uint4*>(values)[i];
    } else {
        for (int i = 0; i < 16 && begin + i < view.padded(); ++i) target[i] = values[i];
    }
#endif
}
