// Warpgroup instructions of SM90 (nvcc target sm_90a): wgmma, its matrix descriptors, register reallocation, stmatrix.
//
// wgmma multiplies asynchronously: D [64, N] += A [64, 16] B [N, 16]^T, both from shared memory, D in the registers of
// four warps. Thread t of the warpgroup has rows t / 32 * 16 + t % 32 / 4 (+ 8), columns 8 i + t % 4 * 2 (+ 1): register
// 4 i + 2 row + column. The names follow the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cstdint>

#include "sm90.cuh"

namespace wgmma {

// A matrix in shared memory whose rows lie along K. across: bytes from 16-byte columns to the next ones, without a
// swizzle; down: bytes from 8 rows to the next 8.
constexpr uint64_t SWIZZLE_NONE = 0, SWIZZLE_64 = 2;
__device__ __forceinline__ constexpr uint64_t descriptor(uint64_t swizzle, uint32_t across, uint32_t down) {
    return swizzle << 62 | uint64_t(down >> 4) << 32 | uint64_t(across >> 4) << 16;
}
__device__ __forceinline__ uint64_t at(uint64_t descriptor, uint32_t address) {
    return descriptor | ((address & 0x3FFFFu) >> 4);
}

// Registers written before are visible to the multiplications that follow.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING groups are not complete.
template <int PENDING>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// D = A B^T, plus D if `adds`. An instruction needs the number of registers in its text: one specialisation for every
// multiple of 32 columns, from pieces of 16 registers. Descriptors are operands 0 and 1, so that numbers do not depend
// on N.
template <int ROWS>
struct Multiply;

#define FP4DEPLOY_TEXT_0 "%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17"
#define FP4DEPLOY_TEXT_1 "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33"
#define FP4DEPLOY_TEXT_2 "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49"
#define FP4DEPLOY_TEXT_3 "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65"
#define FP4DEPLOY_TEXT_4 "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81"
#define FP4DEPLOY_TEXT_5 "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97"
#define FP4DEPLOY_ROW(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FP4DEPLOY_ROWS(i) FP4DEPLOY_ROW(4 * i), FP4DEPLOY_ROW(4 * i + 1), FP4DEPLOY_ROW(4 * i + 2), FP4DEPLOY_ROW(4 * i + 3)
#define FP4DEPLOY_MULTIPLY(COUNT, TEXT, ADDS, ...)                                                                       \
    template <>                                                                                                         \
    struct Multiply<COUNT> {                                                                                            \
        static __device__ __forceinline__ void run(float (&d)[COUNT][4], uint64_t a, uint64_t b, int adds) {            \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n"       \
                         FP4DEPLOY_COLUMNS_##COUNT "k16.f32.f16.f16 {" TEXT "}, %0, %1, adds, 1, 1, 0, 0;\n}"            \
                         : "+l"(a), "+l"(b), __VA_ARGS__                                                                \
                         : "r"(adds)                                                                                    \
                         : "memory");                                                                                   \
        }                                                                                                               \
    };
#define FP4DEPLOY_COLUMNS_4 "32"
#define FP4DEPLOY_COLUMNS_8 "64"
#define FP4DEPLOY_COLUMNS_12 "96"
#define FP4DEPLOY_COLUMNS_16 "128"
#define FP4DEPLOY_COLUMNS_20 "160"
#define FP4DEPLOY_COLUMNS_24 "192"
FP4DEPLOY_MULTIPLY(4, FP4DEPLOY_TEXT_0, "18",
                   FP4DEPLOY_ROWS(0))
FP4DEPLOY_MULTIPLY(8, FP4DEPLOY_TEXT_0 "," FP4DEPLOY_TEXT_1, "34",
                   FP4DEPLOY_ROWS(0), FP4DEPLOY_ROWS(1))
FP4DEPLOY_MULTIPLY(12, FP4DEPLOY_TEXT_0 "," FP4DEPLOY_TEXT_1 "," FP4DEPLOY_TEXT_2, "50",
                   FP4DEPLOY_ROWS(0), FP4DEPLOY_ROWS(1), FP4DEPLOY_ROWS(2))
FP4DEPLOY_MULTIPLY(16, FP4DEPLOY_TEXT_0 "," FP4DEPLOY_TEXT_1 "," FP4DEPLOY_TEXT_2 "," FP4DEPLOY_TEXT_3, "66",
                   FP4DEPLOY_ROWS(0), FP4DEPLOY_ROWS(1), FP4DEPLOY_ROWS(2), FP4DEPLOY_ROWS(3))
FP4DEPLOY_MULTIPLY(20, FP4DEPLOY_TEXT_0 "," FP4DEPLOY_TEXT_1 "," FP4DEPLOY_TEXT_2 "," FP4DEPLOY_TEXT_3 "," FP4DEPLOY_TEXT_4, "82",
                   FP4DEPLOY_ROWS(0), FP4DEPLOY_ROWS(1), FP4DEPLOY_ROWS(2), FP4DEPLOY_ROWS(3), FP4DEPLOY_ROWS(4))
FP4DEPLOY_MULTIPLY(24, FP4DEPLOY_TEXT_0 "," FP4DEPLOY_TEXT_1 "," FP4DEPLOY_TEXT_2 "," FP4DEPLOY_TEXT_3 "," FP4DEPLOY_TEXT_4 "," FP4DEPLOY_TEXT_5, "98",
                   FP4DEPLOY_ROWS(0), FP4DEPLOY_ROWS(1), FP4DEPLOY_ROWS(2), FP4DEPLOY_ROWS(3), FP4DEPLOY_ROWS(4), FP4DEPLOY_ROWS(5))
#undef FP4DEPLOY_MULTIPLY

}  // namespace wgmma

// Four 8 x 8 matrices of 16-bit elements, transposed: lane l gives the address of row l % 8 of matrix l / 8, which is a
// column of the registers' fragment.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}
// What this thread wrote to shared memory is visible to wgmma and TMA after the next barrier.
__device__ __forceinline__ void fence_shared_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
