// Amax (largest finite magnitude) of a tensor, or of each row, without a transposed copy.
//
// finite_amax: amax int32 [1], zero before (the bits of non-negative floats order like the numbers). Any grid, block
// 256.
//   If *previous is given and not that of zeros, amax becomes that, and x is not read.
// row_amax: the tensor seen as (outer, K, inner); amax float32 [outer * inner]. Block 256; grid ceil(outer / 8) for
//   inner = 1 (a warp has a row), ceil(outer * inner / 256) otherwise (a thread has one).
#include "fp4.cuh"
#include "scalars.cuh"

__device__ __forceinline__ float finite_magnitude(DTYPE x) {
    float magnitude = fabsf(widen(x));
    return magnitude < INFINITY ? magnitude : 0.f;
}

extern "C" __global__ void __launch_bounds__(256) finite_amax(
    const DTYPE* x, int* amax, const float* previous, long long count) {
    if (previous && *previous > fp4::ZEROS_AMAX) {
        if (blockIdx.x == 0 && threadIdx.x == 0) *amax = __float_as_int(*previous);
        return;
    }
    constexpr int PER_LOAD = 16 / sizeof(DTYPE);
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, stride = (long long)gridDim.x * blockDim.x;
    // Elements before the first 16-byte boundary, then 16-byte loads, then the rest.
    long long head = (16 - reinterpret_cast<uint64_t>(x) % 16) % 16 / sizeof(DTYPE);
    if (head > count) head = count;
    const uint4* loads = reinterpret_cast<const uint4*>(x + head);
    long long whole = (count - head) / PER_LOAD, tail = head + whole * PER_LOAD;
    float largest = 0.f;
#pragma unroll 8
    for (long long at = thread; at < whole; at += stride) {
        uint4 raw = loads[at];
        const DTYPE* values = reinterpret_cast<const DTYPE*>(&raw);
#pragma unroll
        for (int i = 0; i < PER_LOAD; ++i) largest = fmaxf(largest, finite_magnitude(values[i]));
    }
    if (thread < head) largest = fmaxf(largest, finite_magnitude(x[thread]));
    if (thread < count - tail) largest = fmaxf(largest, finite_magnitude(x[tail + thread]));
    largest = fp4::block_max(largest);
    if (threadIdx.x == 0 && largest > 0.f) atomicMax(amax, __float_as_int(largest));
}

extern "C" __global__ void __launch_bounds__(256) row_amax(
    const DTYPE* x, float* amax, long long outer, long long K, long long inner) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float largest = 0.f;
    if (inner == 1) {
        long long row = thread / 32;
        if (row >= outer) return;
        constexpr int PER_LOAD = 16 / sizeof(DTYPE);
        const DTYPE* source = x + row * K;
        // Every row must start at a 16-byte boundary for wide loads.
        if (K % PER_LOAD == 0 && reinterpret_cast<uint64_t>(x) % 16 == 0) {
#pragma unroll 4
            for (long long at = threadIdx.x % 32; at < K / PER_LOAD; at += 32) {
                uint4 raw = reinterpret_cast<const uint4*>(source)[at];
                const DTYPE* values = reinterpret_cast<const DTYPE*>(&raw);
#pragma unroll
                for (int i = 0; i < PER_LOAD; ++i) largest = fmaxf(largest, finite_magnitude(values[i]));
            }
        } else {
#pragma unroll 4
            for (long long k = threadIdx.x % 32; k < K; k += 32)
                largest = fmaxf(largest, finite_magnitude(source[k]));
        }
        largest = fp4::warp_max(largest);
        if (threadIdx.x % 32 == 0) amax[row] = largest;
        return;
    }
    if (thread >= outer * inner) return;
    const DTYPE* source = x + thread / inner * K * inner + thread % inner;
#pragma unroll 4
    for (long long k = 0; k < K; ++k) largest = fmaxf(largest, finite_magnitude(source[k * inner]));
    amax[thread] = largest;
}
