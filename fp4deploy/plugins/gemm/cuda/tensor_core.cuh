// mma.m16n8k16 of FP16 or BF16 with FP32 sums, ldmatrix and copies to shared memory (direct_conv.cu, small_k_conv.cu,
// narrow_wgrad.cu, block_scaled_conv.cu, class_map.cu).
//
// With lane = 4 g + q: registers a0, a1 have elements 2 q, 2 q + 1 of rows g and g + 8 of A, a2, a3 elements 2 q + 8,
// 2 q + 9; b0, b1 the same elements of column g of B; d0, d1 columns 2 q, 2 q + 1 of row g, d2, d3 of row g + 8. Which
// element of K has which place is free, as long as it is the same for A and B.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&a)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

// Each of the four matrices transposed: registers have two elements of a column.
__device__ __forceinline__ void load_transposed(uint32_t address, uint32_t (&a)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

// The first of sixteen bytes to shared memory, and zeros; they are there after `wait_for_copies`.
__device__ __forceinline__ void copy_part_of_16_bytes(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// All of them, or zeros.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, bool has) {
    copy_part_of_16_bytes(to, from, has ? 16 : 0);
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// T: __half or __nv_bfloat16, of both operands.
template <typename T = __half>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (__is_same(T, __half)) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
