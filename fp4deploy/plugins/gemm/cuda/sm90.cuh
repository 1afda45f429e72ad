// Instructions of SM90 and later, each as a function: TMA, mbarriers, clusters, dependent launch, registers of
// warpgroups (gemv_tma.cu, warpgroup_conv.cu, block_scaled_conv.cu).
//
// Addresses are 32-bit addresses of shared memory. An mbarrier has phases. A phase completes when the expected number
// of arrivals has come and the transaction count is zero, that is, all announced bytes have arrived; `mbarrier_wait`
// takes the parity of the phase to wait for. The names follow the PTX ISA. Tests run the kernel without a GPU: there
// tests/plugins/gemm/host_sm90.hpp takes the place of this header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// A CUtensorMap: a matrix of bytes and the size of its boxes, encoded by the driver (plugins/runtime/tma.py).
struct alignas(64) TensorMap {
    uint64_t words[16];
};
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The box that begins at a column and a row. Elements outside of the matrix are written as zeros, and counted as well.
__device__ __forceinline__ void tma_load_box(uint32_t to, const TensorMap& map, int column, int row, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(bar)
        : "memory");
}
// Adjacent boxes of the same rows, stored one after the other; `first` is the index of the first box.
__device__ __forceinline__ void tma_load_boxes(uint32_t to, const TensorMap& map, int first, int row, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(0), "r"(row), "r"(first), "r"(bar)
        : "memory");
}
// A box of a tensor of three axes; `x` is the position on the innermost one.
__device__ __forceinline__ void tma_load_box(uint32_t to, const TensorMap& map, int x, int y, int z, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(bar)
        : "memory");
}
// Contiguous bytes, a multiple of 16, without a tensor map.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// Makes initialised mbarriers visible to the other blocks of the cluster and to TMA (the async proxy).
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives, and adds `bytes` to the transaction count of the current phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(bar), "r"(parity)
        : "memory");
}
// More or fewer registers for the threads of this warpgroup, all of which execute it. The kernel must have been compiled
// with a bound on its threads, and what warpgroups take must be what others have given back.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// True in one thread of the warp. With `lane == 0` the compiler would not know that exactly one thread takes the
// branch, and would generate a loop over threads around TMA instructions.
__device__ __forceinline__ bool elect_one() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }
// Named barrier NUMBER: waits for COUNT threads of the block, those that call this. (__syncthreads is barrier 0.)
template <int COUNT, int NUMBER = 1>
__device__ __forceinline__ void named_barrier_sync() {
    asm volatile("barrier.sync %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}
// All threads of the cluster. `relaxed` is enough: only mbarriers were written, and `fence_mbarrier_init` published
// them.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the mbarrier that has this address in another block of the cluster (its rank: `block`).
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t bar, int block) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(bar), "r"(block));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// Multicast: to the same address in each of the BLOCKS of the cluster, counted by the mbarrier of each.
template <int BLOCKS>
__device__ __forceinline__ void bulk_copy_multicast(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar), "h"((uint16_t)((1 << BLOCKS) - 1))
        : "memory");
}
// Programmatic dependent launch. After the first instruction everything that earlier kernels wrote is visible. The
// secondary kernel starts when all blocks have executed the second one or have ended. In a launch without the attribute
// (in stream order) neither has an effect.
__device__ __forceinline__ void wait_for_primary_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A load that stays where it is written, so that its latency overlaps with the main loop: the compiler would otherwise
// move it to its first use. A thread waits for the value only there.
__device__ __forceinline__ float load_early(const float* from) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}
// Two E4M3 bytes as a half2; NaN stays NaN.
__device__ __forceinline__ uint32_t half2_of_e4m3x2(uint32_t bytes) {
    uint32_t pair;
    asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}" : "=r"(pair) : "r"(bytes));
    return pair;
}
// c += a b of 16 x 16 and 16 x 8 elements.
__device__ __forceinline__ void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
