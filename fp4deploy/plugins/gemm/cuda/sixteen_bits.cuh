// Numbers of 16 bits, of the type HALF: __half, or __nv_bfloat16 where a network's rest is BF16.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef HALF
#define HALF __half
#endif

__device__ __forceinline__ float number(float value) { return value; }
__device__ __forceinline__ float number(__half value) { return __half2float(value); }
__device__ __forceinline__ float number(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void round_to(float& to, float value) { to = value; }
__device__ __forceinline__ void round_to(__half& to, float value) { to = __float2half_rn(value); }
__device__ __forceinline__ void round_to(__nv_bfloat16& to, float value) { to = __float2bfloat16_rn(value); }
