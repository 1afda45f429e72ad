// Packed weights as operands of tensor cores, for the two kernels of a few rows.
//
// A code on top of a half-precision word is its value times a power of two (plugins/triton/decode.py has the arithmetic).
// Even and odd codes of a word are decoded apart, and x is put into the order that this leaves, because the order of a
// sum is free.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

__device__ __forceinline__ uint32_t bits(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ __half2 halves(uint32_t word) { return *reinterpret_cast<__half2*>(&word); }
__device__ __forceinline__ __nv_bfloat162 brains(uint32_t word) { return *reinterpret_cast<__nv_bfloat162*>(&word); }

// Codes on top of halves, which are their values times 2^-14, times a scale, the low or the high one of a pair.
__device__ __forceinline__ uint32_t scaled(uint32_t code, uint32_t pair, bool high, __half*) {
    const __half2 scale = high ? __high2half2(halves(pair)) : __low2half2(halves(pair));
    return bits(__hmul2(halves(code), scale));
}
// s000eem0 on top of a half is the value times 2^-126 once the three bits stand in bfloat16's exponent and mantissa.
__device__ __forceinline__ uint32_t scaled(uint32_t code, uint32_t pair, bool high, __nv_bfloat16*) {
    const uint32_t moved = (code & 0x80008000u) | ((code >> 3) & 0x01C001C0u);
    const __nv_bfloat162 scale = high ? __high2bfloat162(brains(pair)) : __low2bfloat162(brains(pair));
    return bits(__hmul2(brains(moved), scale));
}

// Eight codes of a word: the fragments of the even elements in [0], [1], of the odd ones in [2], [3].
template <typename T>
__device__ __forceinline__ void decode(uint32_t word, uint32_t pair, bool high, uint32_t (&out)[4]) {
    constexpr T* tag = nullptr;
    const uint32_t odd = ((word >> 3) & 0x0E0E0E0Eu) | (word & 0x80808080u);
    const uint32_t even = ((word << 1) & 0x0E0E0E0Eu) | ((word << 4) & 0x80808080u);
    out[0] = scaled(__byte_perm(even, 0u, 0x1404), pair, high, tag);
    out[1] = scaled(__byte_perm(even, 0u, 0x3424), pair, high, tag);
    out[2] = scaled(__byte_perm(odd, 0u, 0x1404), pair, high, tag);
    out[3] = scaled(__byte_perm(odd, 0u, 0x3424), pair, high, tag);
}

// Eight elements of x in that order: 0 2, 4 6, 1 3, 5 7.
__device__ __forceinline__ uint4 reorder(uint4 v) {
    return {__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
            __byte_perm(v.z, v.w, 0x7632)};
}
