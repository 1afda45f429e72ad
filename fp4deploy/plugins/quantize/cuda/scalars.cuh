// Numbers of a tensor as float and back, rounded to nearest, one or two; DTYPE and E where a kernel is compiled without.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef DTYPE
#define DTYPE __nv_bfloat16
#endif
#ifndef E
#define E 448
#endif

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float2 widen(__half2 x) { return __half22float2(x); }
// By a shift and a mask: __bfloat1622float2 takes the high half out first and shifts it back.
__device__ __forceinline__ float2 widen(__nv_bfloat162 x) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(&x);
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
}
template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <typename T> __device__ __forceinline__ void narrow(float x, T& out) { out = narrow<T>(x); }
__device__ __forceinline__ void narrow(float2 x, __half2& out) { out = __float22half2_rn(x); }
__device__ __forceinline__ void narrow(float2 x, __nv_bfloat162& out) { out = __float22bfloat162_rn(x); }
