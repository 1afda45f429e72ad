// The most likely class of each pixel of a frame, from logits of another size that are enlarged bilinearly: the numbers of
// `class_map_reference`, in its order and without a fused multiply-add, so that ties are decided alike on every machine.
//
//   v = (1 - d) ((1 - a) x[top, left] + a x[top, right]) + d ((1 - a) x[bottom, left] + a x[bottom, right])
//
// A thread goes down `rows` pixels of one column of the frame. Between two rows it keeps what it has interpolated along
// the rows of the logits that lie above and below; where a frame is larger than its logits, that is most of the work.
// With STAGED the block first copies the part of each row that it reads into shared memory: in channels_last a thread's
// logits lie in a row, and those of neighbouring threads one pixel apart, so that global loads would waste 7 of 8 cycles.
//
// Launch: block of up to 256 columns, grid (columns, rows, N). logits: DTYPE [N, h, w, C] with LAST, else [N, C, h, w],
// from an address that is a multiple of 16 with STAGED; classes: OUT [N, H, W]; down, across: h / H, w / W; pitch: bytes
// from a row to the next in shared memory, which is dynamic, w C sizeof(DTYPE) modulo 16. SAME: (h, w) = (H, W), and nothing is interpolated.
#include "scalars.cuh"
#include "tensor_core.cuh"

#ifndef OUT
#define OUT unsigned char
#endif
#ifndef CLASSES
#define CLASSES 20
#endif
#ifndef LAST
#define LAST 1
#endif
#ifndef SAME
#define SAME 0
#endif
#ifndef STAGED
#define STAGED 0
#endif

namespace {

constexpr int C = CLASSES, PIXEL = C * (int)sizeof(DTYPE);  // bytes of a pixel in channels_last
constexpr int KEPT = C <= 32 ? C : 16;                      // classes in registers: all, or those of a step
constexpr int BYTES = !LAST ? sizeof(DTYPE) : PIXEL % 8 == 0 ? 8 : PIXEL % 4 == 0 ? 4 : 2;
constexpr int VECTOR = BYTES / sizeof(DTYPE);               // classes of a load
static_assert(KEPT % VECTOR == 0 && C % VECTOR == 0, "whole loads");

struct __align__(BYTES) Vector {
    DTYPE values[VECTOR];
};

// Where a pixel of a frame lies between two of the logits.
struct Place {
    int first, second;
    float share, rest;  // of the second, of the first

    __device__ __forceinline__ Place(int at, float ratio, int size) {
        const float source = __fsub_rn(__fmul_rn((float)at + 0.5f, ratio), 0.5f);
        const float inside = fminf(fmaxf(source, 0.f), (float)(size - 1)), whole = floorf(inside);
        first = (int)whole, second = min(first + 1, size - 1);
        share = __fsub_rn(inside, whole), rest = __fsub_rn(1.f, share);
    }

    __device__ __forceinline__ float mix(float a, float b) const {
        return __fadd_rn(__fmul_rn(a, rest), __fmul_rn(b, share));
    }
};

// Logits of one image: class c of a pixel lies `c * plane` elements behind it.
struct Map {
    const unsigned char* from;
    int row, pixel, plane;  // bytes from one to the next, elements
    int top, left;          // of what is there

    __device__ __forceinline__ const DTYPE* at(int y, int x) const {
        return (const DTYPE*)(from + (long long)(y - top) * row + (x - left) * pixel);
    }
};

__device__ __forceinline__ void read(float (&into)[KEPT], const Map& map, int y, const Place& x, int c) {
    const DTYPE *left = map.at(y, x.first) + c * (long long)map.plane, *right = left + (x.second - x.first) * (map.pixel / (int)sizeof(DTYPE));
#pragma unroll
    for (int i = 0; i < KEPT; i += VECTOR) {
        if (KEPT < C && c + i >= C) break;
        const Vector a = *(const Vector*)(left + i * (long long)map.plane);
#if SAME
        const Vector b = a;
#else
        const Vector b = *(const Vector*)(right + i * (long long)map.plane);
#endif
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
            into[i + j] = SAME ? widen(a.values[j]) : x.mix(widen(a.values[j]), widen(b.values[j]));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) class_map_of_frames(
    const DTYPE* __restrict__ logits, OUT* __restrict__ classes, int h, int w, int H, int W, float down, float across,
    int rows, int pitch) {
    const int from = blockIdx.y * rows, end = min(from + rows, H);
    const int start = blockIdx.x * blockDim.x, x = start + threadIdx.x;
    const unsigned char* image = (const unsigned char*)(logits + (long long)blockIdx.z * C * h * w);
    Map map = {image, LAST ? w * PIXEL : w * (int)sizeof(DTYPE), LAST ? PIXEL : (int)sizeof(DTYPE), LAST ? 1 : h * w, 0, 0};
#if STAGED
    extern __shared__ __align__(16) unsigned char staged[];
    const unsigned char* line = (const unsigned char*)map.at(Place(from, down, h).first, Place(start, across, w).first);
    map.top = Place(from, down, h).first, map.left = Place(start, across, w).first;
    const int bottom = Place(end - 1, down, h).second;
    const int bytes = (Place(min(start + (int)blockDim.x, W) - 1, across, w).second - map.left + 1) * PIXEL;
    const unsigned char* const last = (const unsigned char*)(logits + (long long)gridDim.z * C * h * w);
    // From a multiple of 16 to the next: a row lies at the address modulo 16 that it has in memory, since the pitch does.
    const int shift = (int)((unsigned long long)line % 16);
    for (int y = map.top, to = shift; y <= bottom; ++y, line += map.row, to += pitch) {
        for (int at = 16 * threadIdx.x - to % 16; at < bytes; at += 16 * blockDim.x)
            copy_part_of_16_bytes(shared_address(staged + to + at), line + at, (int)min(16LL, (long long)(last - (line + at))));
    }
    wait_for_copies();
    __syncthreads();
    map.from = staged + shift, map.row = pitch;
#endif
    if (x >= W) return;
    const Place column(x, across, w);
    float upper[KEPT], lower[KEPT];
    int held = -2;  // the row in `upper`
#pragma unroll 1
    for (int y = from; y < end; ++y) {
        const Place row(y, down, h);
        float best = 0.f;
        int found = 0;
        bool numbers = true;
        for (int c = 0; c < C; c += KEPT) {
            if (SAME) {
                read(upper, map, y, column, c);
            } else if (KEPT < C || row.first != held) {
                if (KEPT == C && row.first == held + 1) {
#pragma unroll
                    for (int i = 0; i < KEPT; ++i) upper[i] = lower[i];
                } else {
                    read(upper, map, row.first, column, c);
                }
                read(lower, map, row.second, column, c);
            }
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                if (KEPT < C && c + i >= C) break;
                const float value = SAME ? upper[i] : row.mix(upper[i], lower[i]);
                // The first NaN is above all: `numbers`, whether there was none.
                const bool more = c + i == 0 || (!(value <= best) && numbers);
                if (more) best = value, found = c + i;
                numbers = numbers && value == value;
            }
        }
        held = row.first;
        classes[((long long)blockIdx.z * H + y) * W + x] = (OUT)found;
    }
}
