// Packed weights as operands of tensor cores, for the two kernels of a few rows.
//
// A code on top of a half-precision word is its value times a power of two (plugins/gemm/triton/decode.py has the arithmetic).
// Codes four apart share a word, and x is put into the order that this leaves, because the order of a sum is free.
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

// Eight codes of a word: the fragments of elements 0 4, 2 6, 1 5, 3 7. A code n in the low bits of a half, times 512 + 4096,
// has its exponent and mantissa at bits 11 to 9 and its sign, once 4096 is taken away again, at bit 15; taking it away
// from a zero borrows from the other half, which has 16 to spare below bit 9, and gives -0. The code 8 bits
// above or below, which is multiplied as well, falls below bit 9 of a half, or out of the word. So four codes need one
// mask before, and multiplications instead of shifts and permutations, which keep another pipe busy.
template <typename T>
__device__ __forceinline__ void decode(uint32_t word, uint32_t pair, bool high, uint32_t (&out)[4]) {
    constexpr T* tag = nullptr;
    constexpr uint32_t KEPT = 0x8E008E00u, LESS = 0xF00FF000u;  // -4096 + 16 and -4096
    const uint32_t even = word & 0x0F0F0F0Fu, odd = (word >> 4) & 0x0F0F0F0Fu;
    out[0] = scaled((even * 4608u + LESS) & KEPT, pair, high, tag);
    out[1] = scaled((even * 18u + LESS) & KEPT, pair, high, tag);
    out[2] = scaled((odd * 4608u + LESS) & KEPT, pair, high, tag);
    out[3] = scaled((odd * 18u + LESS) & KEPT, pair, high, tag);
}

// Eight elements of x in that order.
__device__ __forceinline__ uint4 reorder(uint4 v) {
    return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.x, v.z, 0x7632),
            __byte_perm(v.y, v.w, 0x7632)};
}
