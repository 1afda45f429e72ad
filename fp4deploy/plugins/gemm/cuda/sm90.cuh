// What gemv_tma.cu asks of SM90 by name: copies into shared memory, barriers that count their bytes, tensor cores.
//
// Addresses are those of shared memory, 32 bits. A barrier (mbarrier) has phases: one ends when as many arrived as it
// was opened for and all bytes announced are there; `wait` takes the parity of the phase that is to be over. The tests
// run the kernel without a GPU, on tests/plugins/host_sm90.hpp in the place of this header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// A matrix of bytes and the size of its boxes, as the driver describes them (plugins/runtime/tma.py).
struct alignas(64) TensorMap {
    uint64_t words[16];
};
__device__ __forceinline__ void expect_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The box that begins at a column and a row, by the copy engine; what lies outside of the matrix comes as zeros, and the
// barrier counts it as well.
__device__ __forceinline__ void fetch_box(uint32_t to, const TensorMap& map, int column, int row, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(bar)
        : "memory");
}
// Boxes beside each other, one behind the other: `first` is the number of the first.
__device__ __forceinline__ void fetch_boxes(uint32_t to, const TensorMap& map, int first, int row, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(0), "r"(row), "r"(first), "r"(bar)
        : "memory");
}
// A run of 16-byte words, by the copy engine; the barrier counts its bytes.
__device__ __forceinline__ void fetch_run(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void open_barrier(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_are_open() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(bar), "r"(parity)
        : "memory");
}
// One thread of a warp, in the words by which the compiler knows that the others do not take part.
__device__ __forceinline__ bool elected() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }
// So many threads of the block, those that call this.
template <int COUNT>
__device__ __forceinline__ void meet() {
    asm volatile("barrier.sync 1, %0;" ::"n"(COUNT) : "memory");
}
// All threads of the cluster. Nothing but barriers has been written, and those `barriers_are_open` has made visible.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The barrier at this address in another block of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t bar, int block) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(bar), "r"(block));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// To the same place in each of the BLOCKS of the cluster, each one's barrier told.
template <int BLOCKS>
__device__ __forceinline__ void fetch_run_for_all(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar), "h"((uint16_t)((1 << BLOCKS) - 1))
        : "memory");
}
// What the kernel in front has written can be read from here on. Until all blocks let it in, or have ended, the next
// kernel does not begin. Launched in order, without the attribute that asks for it, both do nothing.
__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_in() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A number that nothing waits for before it is used, wherever the compiler would like to use it.
__device__ __forceinline__ float read_ahead(const float* from) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}
// Two E4M3 bytes as halves; NaN stays NaN.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t bytes) {
    uint32_t pair;
    asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}" : "=r"(pair) : "r"(bytes));
    return pair;
}
// c += a b of 16 x 16 and 16 x 8 elements.
__device__ __forceinline__ void multiply(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
