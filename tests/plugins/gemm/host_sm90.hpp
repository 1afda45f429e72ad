// The functions of `sm90.cuh` on the host: gemv_tma.cu runs as one C++ thread for each CUDA thread.
//
// Shared memory begins as NaN. TMA copies complete late and in any order, made by a thread of their own for each block.
// Undefined behaviour of the hardware ends the process with a message: a copy that is not aligned or leaves its tensor or
// its ring, too many arrivals at an mbarrier, an access to a block that has ended, a deadlock.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#undef __device__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#undef __cluster_dims__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
using std::max;
using std::min;

struct Index { int x; };
inline thread_local Index threadIdx, blockIdx;

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "gemv_tma: %s\n", what);
    abort();
}

constexpr int CONSUMER_THREADS = 128 * CONSUMERS, ALL = CONSUMER_THREADS + 32, MEMORY = 232448;
struct Phases { int count = 0, pending = 0; long expected = 0; uint32_t parity = 0; };
struct Warp { std::barrier<> meeting{32}; uint32_t operands[2][32][6]; };
struct Block {
    alignas(1024) uint8_t memory[MEMORY];
    std::barrier<> everyone{ALL}, multiplying{CONSUMER_THREADS};
    Warp warps[ALL / 32];
    Phases phases[MEMORY / 8];
    std::mutex mutex;
    std::condition_variable changed, work;
    std::vector<std::function<void()>> copies;
    std::atomic<int> running{CONSUMER_THREADS};
    bool over = false;
    std::thread tma;

    void arrived(uint32_t bar, int threads, long bytes) {  // with the lock held
        Phases& at = phases[bar / 8];
        at.expected += bytes;
        if ((at.pending -= threads) < 0) fail("more arrivals than the mbarrier was initialised for");
        if (at.pending == 0 && at.expected == 0) {
            at.parity ^= 1, at.pending = at.count;
            changed.notify_all();
        }
    }
    void later(std::function<void()> copy) {
        std::lock_guard<std::mutex> lock(mutex);
        copies.push_back(std::move(copy));
        work.notify_one();
    }
    void copy_until_over(int seed) {
        std::mt19937 random(seed);
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            work.wait(lock, [&] { return over || !copies.empty(); });
            if (copies.empty()) return;
            if (random() % 4 == 0) {
                lock.unlock();
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
                lock.lock();
            }
            const size_t chosen = random() % copies.size();
            auto copy = std::move(copies[chosen]);
            copies.erase(copies.begin() + chosen);
            copy();
        }
    }
};
inline std::vector<std::unique_ptr<Block>> blocks;  // of the cluster that runs
inline std::unique_ptr<std::barrier<>> opening;  // of the whole cluster
inline thread_local Block* here;
inline thread_local bool waited;  // for the primary kernel
inline const uint8_t *firsts[3], *lasts[3];  // x, codes, scales
inline uint32_t ring_end;

inline Warp& warp_of_this() { return here->warps[threadIdx.x / 32]; }
inline void __syncthreads() { here->everyone.arrive_and_wait(); }
inline void __syncwarp() { warp_of_this().meeting.arrive_and_wait(); }
inline size_t __cvta_generic_to_shared(const void* p) { return (const uint8_t*)p - here->memory; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i) found |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

inline void check_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t unit) {
    if (to % unit || bytes % unit || bytes == 0 || (size_t)from % unit) fail("a copy is not aligned");
    if (to + bytes > ring_end) fail("a copy leaves the ring");
    for (int i = 0; i < 3; ++i)
        if ((const uint8_t*)from >= firsts[i] && (const uint8_t*)from + bytes <= lasts[i]) return;
    fail("a copy leaves its tensor");
}
inline void fetch_into(Block* block, uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    check_copy(to, from, bytes, 16);
    if (!waited && (const uint8_t*)from >= firsts[0] && (const uint8_t*)from < lasts[0]) fail("x is read too early");
    block->later([=] {
        if (block->running == 0) fail("a copy into a block that has ended");
        memcpy(block->memory + to, from, bytes);
        block->arrived(bar, 0, -(long)bytes);
    });
}
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    fetch_into(here, to, from, bytes, bar);
}
// In words: 0 or 1 for codes or scales, bytes of a row, rows, bytes and rows of a box, adjacent boxes.
struct TensorMap {
    uint64_t words[16];
};
inline void prefetch_tensor_map(const TensorMap&) {}
// The driver's swizzle: the number of a 16-byte word, modulo those of a row, is changed by that of the 128 bytes it lies in.
inline uint32_t swizzled(uint32_t at, uint32_t width) { return at ^ (at >> 7 & (width / 16 - 1)) << 4; }
inline void tma_load_box(uint32_t to, const TensorMap& map, int column, int row, uint32_t bar) {
    const auto [which, pitch, rows, width, height] = std::array{
        map.words[0], map.words[1], map.words[2], map.words[3], map.words[4]};
    const uint32_t bytes = width * height;
    if (to % (8 * width) || column % 16) fail("a box is not aligned");
    if (to + bytes > ring_end) fail("a copy leaves the ring");
    here->later([=, block = here] {
        if (block->running == 0) fail("a copy into a block that has ended");
        for (uint32_t i = 0; i < bytes; ++i) {
            const uint64_t y = row + i / width, x = column + i % width;
            const uint8_t byte = y < rows && x < pitch ? firsts[1 + which][y * pitch + x] : 0;
            block->memory[swizzled(to + i, width)] = byte;
        }
        block->arrived(bar, 0, -(long)bytes);
    });
}
inline void tma_load_boxes(uint32_t to, const TensorMap& map, int first, int row, uint32_t bar) {
    const int width = map.words[3], bytes = width * map.words[4];
    for (int i = 0; i < (int)map.words[5]; ++i) tma_load_box(to + i * bytes, map, (first + i) * width, row, bar);
}
template <int BLOCKS>
void bulk_copy_multicast(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    for (auto& block : blocks) fetch_into(block.get(), to, from, bytes, bar);
}
inline void mbarrier_init(uint32_t bar, int count) {
    if (bar % 8 || bar < ring_end) fail("an mbarrier inside the ring");
    here->phases[bar / 8] = {count, count, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    std::lock_guard<std::mutex> lock(here->mutex);
    here->arrived(bar, 1, bytes);
}
inline void mbarrier_arrive(uint32_t bar) { mbarrier_arrive_expect_tx(bar, 0); }
inline void mbarrier_arrive_remote(uint32_t bar, int block) {
    std::lock_guard<std::mutex> lock(blocks[block]->mutex);
    if (blocks[block]->running == 0) fail("an arrival at a block that has ended");
    blocks[block]->arrived(bar, 1, 0);
}
inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
    std::unique_lock<std::mutex> lock(here->mutex);
    auto over = [&] { return here->phases[bar / 8].parity != parity; };
    if (!here->changed.wait_for(lock, std::chrono::seconds(60), over)) fail("a deadlock at an mbarrier");
}
inline bool elect_one() {
    __syncwarp();
    return threadIdx.x % 32 == 0;
}
inline int warp_uniform(int value) { return value; }
template <int COUNT>
void named_barrier_sync() {
    static_assert(COUNT == CONSUMER_THREADS);
    here->multiplying.arrive_and_wait();
}
inline void cluster_sync() { opening->arrive_and_wait(); }

inline void wait_for_primary_kernel() { waited = true; }
inline void launch_dependents() {
    if (!waited) fail("the secondary kernel starts before the primary one has finished");
}

inline float load_early(const float* from) {
    if (!waited) fail("a number is read too early");
    return *from;
}
inline float value_of_e4m3(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 128 ? -size : size;
}
inline uint32_t half2_of_e4m3x2(uint32_t bytes) {
    const __half2 pair = __floats2half2_rn(value_of_e4m3(bytes & 255), value_of_e4m3(bytes >> 8 & 255));
    uint32_t found;
    memcpy(&found, &pair, 4);
    return found;
}
template <typename T>
float half_of(uint32_t pair, int which) {
    const uint16_t bits = pair >> 16 * which;
    T value;
    memcpy(&value, &bits, 2);
    return (float)value;
}
// The operands of a tensor core lie in the threads of a warp as the PTX manual says for m16n8k16. Two places for them, in
// turn: who writes the next ones has met all who read those before the last.
inline thread_local int place;
template <typename T>
void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, T*) {
    Warp& warp = warp_of_this();
    const int lane = threadIdx.x % 32;
    const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
    auto& operands = warp.operands[place ^= 1];
    memcpy(operands[lane], own, sizeof own);
    warp.meeting.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t left = operands[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const uint32_t right = operands[column * 4 + k % 8 / 2][4 + k / 8];
            c[i] += half_of<T>(left, k % 2) * half_of<T>(right, k % 2);
        }
    }
}

// Runs `kernel` for all threads of a grid, one cluster after the other.
template <typename Kernel>
void run_grid(int grid, int cluster, Kernel kernel) {
    for (int first = 0; first < grid; first += cluster) {
        opening = std::make_unique<std::barrier<>>(cluster * ALL);
        std::vector<std::thread> threads;
        for (int i = 0; i < cluster; ++i) {
            blocks.push_back(std::make_unique<Block>());
            memset(blocks[i]->memory, 0x7F, MEMORY);
            blocks[i]->tma = std::thread(&Block::copy_until_over, blocks[i].get(), first + i + 1);
        }
        for (int i = 0; i < cluster * ALL; ++i)
            threads.emplace_back([=] {
                here = blocks[i / ALL].get();
                threadIdx.x = i % ALL, blockIdx.x = first + i / ALL;
                kernel();
                if (threadIdx.x < CONSUMER_THREADS && !waited) fail("the output is written too early");
                if (threadIdx.x < CONSUMER_THREADS) --here->running;
            });
        for (auto& thread : threads) thread.join();
        for (auto& block : blocks) {
            {
                std::lock_guard<std::mutex> lock(block->mutex);
                block->over = true;
            }
            block->work.notify_all();
            block->tma.join();
            if (!block->copies.empty()) fail("copies complete after the end of the kernel");
        }
        blocks.clear();
    }
}
