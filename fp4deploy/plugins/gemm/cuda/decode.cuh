// E2M1 codes and E4M3 scales decoded into operands of mma.m16n8k16, in registers (gemv_tma.cu), or halves (`spread`).
//
// The bits of an E2M1 code in the top bits of a half-precision word are its value times a power of two: plugins/gemm/
// triton/decode.py explains the arithmetic. Elements four apart end up in one 32-bit register. x is permuted in the
// same way (`reorder`) instead of moving the weight, because the order of a sum is free.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

__device__ __forceinline__ uint32_t as_word(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ uint32_t as_word(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ __half2 as_half2(uint32_t word) { return *reinterpret_cast<__half2*>(&word); }
__device__ __forceinline__ __nv_bfloat162 as_bfloat162(uint32_t word) { return *reinterpret_cast<__nv_bfloat162*>(&word); }

// Two codes in the top bits of two halves (value times 2^-14), times the low or the high scale of a pair.
__device__ __forceinline__ uint32_t scaled(uint32_t code, uint32_t pair, bool high, __half*) {
    const __half2 scale = high ? __high2half2(as_half2(pair)) : __low2half2(as_half2(pair));
    return as_word(__hmul2(as_half2(code), scale));
}
// bfloat16 has a longer exponent: with the three bits eem moved to its exponent and mantissa, the value is times
// 2^-126.
__device__ __forceinline__ uint32_t scaled(uint32_t code, uint32_t pair, bool high, __nv_bfloat16*) {
    const uint32_t moved = (code & 0x80008000u) | ((code >> 3) & 0x01C001C0u);
    const __nv_bfloat162 scale = high ? __high2bfloat162(as_bfloat162(pair)) : __low2bfloat162(as_bfloat162(pair));
    return as_word(__hmul2(as_bfloat162(moved), scale));
}

// Eight codes of a word into the fragments of elements 0 4, 2 6, 1 5, 3 7.
//
// A code n in the low bits of a half, multiplied by 4608 = 512 + 4096, has its exponent and mantissa at bits 11 to 9
// and, after 4096 is subtracted, its sign at bit 15. For n = 0 the subtraction borrows from the other half, which has
// 16 to spare below bit 9, and gives -0. The code 8 bits above or below is multiplied as well, and ends below bit 9 of
// a half or outside of the word, where the mask removes it. So four codes need one mask first, and then integer
// multiplications instead of shifts and byte permutations: these would compete for the pipe that the rest of the loop
// uses.
template <typename T>
__device__ __forceinline__ void decode(uint32_t word, uint32_t pair, bool high, uint32_t (&out)[4]) {
    constexpr T* tag = nullptr;
    constexpr uint32_t KEPT = 0x8E008E00u, MINUS = 0xF00FF000u;  // -4096 + 16 and -4096
    const uint32_t even = word & 0x0F0F0F0Fu, odd = (word >> 4) & 0x0F0F0F0Fu;
    out[0] = scaled((even * 4608u + MINUS) & KEPT, pair, high, tag);
    out[1] = scaled((even * 18u + MINUS) & KEPT, pair, high, tag);
    out[2] = scaled((odd * 4608u + MINUS) & KEPT, pair, high, tag);
    out[3] = scaled((odd * 18u + MINUS) & KEPT, pair, high, tag);
}

// The same eight codes as four pairs of halves times 2^-14, elements 0 2, 4 6, 1 3, 5 7.
__device__ __forceinline__ void spread(uint32_t word, uint32_t (&out)[4]) {
    const uint32_t high = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
    const uint32_t low = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);
    out[0] = __byte_perm(low, 0u, 0x1404);
    out[1] = __byte_perm(low, 0u, 0x3424);
    out[2] = __byte_perm(high, 0u, 0x1404);
    out[3] = __byte_perm(high, 0u, 0x3424);
}

// An E4M3 scale as a half times 2^7. Its bits as a half are the value times 2^-8; NaN has to be made.
__device__ __forceinline__ __half decode_scale(uint32_t byte) {
    const __half scale = __hmul(__ushort_as_half((unsigned short)(byte << 7)), __float2half_rn(32768.f));
    return byte == 0x7Fu ? __ushort_as_half((unsigned short)0x7FFF) : scale;
}

// Eight elements of x in the order of `decode`.
__device__ __forceinline__ uint4 reorder(uint4 v) {
    return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.x, v.z, 0x7632),
            __byte_perm(v.y, v.w, 0x7632)};
}
