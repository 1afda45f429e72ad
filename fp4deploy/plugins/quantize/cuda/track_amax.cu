// Amax of a tensor (largest finite magnitude) and the running amax of a static scale, in one launch.
//
// track_amax: amax[0] becomes the largest finite |x|, at least *other if given. With `tracked` (the running amax) it is
//   max(that, decay * tracked), written to both; without a finite |x| above 0, at least fp4::ZEROS_AMAX. With `delayed`,
//   amax[0] is the running amax before this update if that was not of zeros.
// previous_amax: amax[0] becomes *tracked; if that is of zeros, the largest finite |x|, at least *other, or ZEROS_AMAX.
//   Only then x is read; the decision is made on the device, so the host does not synchronise.
// With BIASED x is the output of a convolution whose bias is still to be added: x + bias, rounded to DTYPE, counts.
// cell and counter are scratch, zero before and after.
// Launch: block 256, any grid; x: DTYPE [count], count a multiple of 8, 16-byte aligned. With BIASED x is channels_last,
// bias: float32 [C], and 8 times the threads of the grid are a multiple of C, so that a thread keeps its eight channels.
#include "channels.cuh"

#ifndef BIASED
#define BIASED 0
#endif

__device__ __forceinline__ void find_largest(const DTYPE* x, long long count, const float* bias, int C, int* cell) {
    float largest = 0.f;
    long long stride = (long long)gridDim.x * blockDim.x * channels::VECTOR;
#if BIASED
    channels::Biased<DTYPE> biased;
    biased.set(bias + (blockIdx.x * blockDim.x + threadIdx.x) % (C / channels::VECTOR) * channels::VECTOR);
#endif
#pragma unroll 4
    for (long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * channels::VECTOR; at < count; at += stride) {
        float v[channels::VECTOR];
#if BIASED
        biased.widen(*reinterpret_cast<const uint4*>(x + at), v);
#else
        channels::load(x + at, v);
#endif
#pragma unroll
        for (int i = 0; i < channels::VECTOR; ++i) {
            float magnitude = fabsf(v[i]);
            if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
        }
    }
    for (int offset = 16; offset; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (threadIdx.x % 32 == 0) atomicMax(cell, __float_as_int(largest));
    __syncthreads();  // all warps of the block have done so before thread 0 counts the block
}

extern "C" __global__ void __launch_bounds__(256) track_amax(
    const DTYPE* x, long long count, const float* bias, int C, const float* other, float* tracked, float* amax, int* cell,
    unsigned* counter, float decay, int delayed) {
    find_largest(x, count, bias, C, cell);
    // The last block to count itself finishes. atomicInc wraps to 0, so the counter is ready for the next launch.
    if (threadIdx.x == 0) {
        __threadfence();  // this block's maximum is visible before its count
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1)
            fp4::track_amax(cell, other, tracked, amax, decay, delayed);
    }
}

extern "C" __global__ void __launch_bounds__(256) previous_amax(
    const DTYPE* x, long long count, const float* bias, int C, const float* other, const float* tracked, float* amax,
    int* cell, unsigned* counter) {
    // The usual case: there is a running amax, and x is not read.
    const float previous = *tracked;
    if (previous > fp4::ZEROS_AMAX) {
        if (blockIdx.x == 0 && threadIdx.x == 0) *amax = previous;
        return;
    }
    find_largest(x, count, bias, C, cell);
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1) {
            fp4::track_amax(cell, other, nullptr, amax, 0.f, false);
            if (!(*amax > 0.f)) *amax = fp4::ZEROS_AMAX;
        }
    }
}
