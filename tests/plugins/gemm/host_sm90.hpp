// What `sm90.cuh` has, on the host: gemv_tma.cu runs as one thread of C++ for each thread of CUDA.
//
// Shared memory begins as NaN. Copies of the copy engine come late and in any order, by a thread of their own for each
// block. What hardware would not forgive ends the process with a message: a copy that is not aligned, that leaves its
// tensor or its ring, too many arrivals, a word to a block that has ended, a wait without end.
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

constexpr int MULTIPLYING = 128 * TEAMS, ALL = MULTIPLYING + 32, MEMORY = 232448;
struct Phases { int count = 0, pending = 0; long expected = 0; uint32_t parity = 0; };
struct Warp { std::barrier<> meeting{32}; uint32_t operands[32][6]; };
struct Block {
    alignas(1024) uint8_t memory[MEMORY];
    std::barrier<> everyone{ALL}, multiplying{MULTIPLYING};
    Warp warps[ALL / 32];
    Phases phases[MEMORY / 8];
    std::mutex mutex;
    std::condition_variable changed, work;
    std::vector<std::function<void()>> copies;
    std::atomic<int> running{MULTIPLYING};
    bool over = false;
    std::thread engine;

    void arrived(uint32_t bar, int threads, long bytes) {  // with the lock held
        Phases& at = phases[bar / 8];
        at.expected += bytes;
        if ((at.pending -= threads) < 0) fail("more arrive than a barrier was opened for");
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
inline thread_local bool waited;  // for the kernel in front
inline const uint8_t *firsts[3], *lasts[3];  // x, codes, scales
inline uint32_t rings_end;

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
    if (to + bytes > rings_end) fail("a copy leaves the rings");
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
inline void fetch_run(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    fetch_into(here, to, from, bytes, bar);
}
// In words: 0 or 1 for codes or scales, bytes of a row, rows, bytes and rows of a box, boxes beside each other.
struct TensorMap {
    uint64_t words[16];
};
inline void expect_map(const TensorMap&) {}
// The driver's swizzle: the number of a 16-byte word, modulo those of a row, is changed by that of the 128 bytes it lies in.
inline uint32_t swizzled(uint32_t at, uint32_t width) { return at ^ (at >> 7 & (width / 16 - 1)) << 4; }
inline void fetch_box(uint32_t to, const TensorMap& map, int column, int row, uint32_t bar) {
    const auto [which, pitch, rows, width, height] = std::array{
        map.words[0], map.words[1], map.words[2], map.words[3], map.words[4]};
    const uint32_t bytes = width * height;
    if (to % (8 * width) || column % 16) fail("a box is not aligned");
    if (to + bytes > rings_end) fail("a copy leaves the ring");
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
inline void fetch_boxes(uint32_t to, const TensorMap& map, int first, int row, uint32_t bar) {
    const int width = map.words[3], bytes = width * map.words[4];
    for (int i = 0; i < (int)map.words[5]; ++i) fetch_box(to + i * bytes, map, (first + i) * width, row, bar);
}
template <int BLOCKS>
void fetch_run_for_all(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    for (auto& block : blocks) fetch_into(block.get(), to, from, bytes, bar);
}
inline void open_barrier(uint32_t bar, int count) {
    if (bar % 8 || bar < rings_end) fail("a barrier inside a ring");
    here->phases[bar / 8] = {count, count, 0, 0};
}
inline void barriers_are_open() {}
inline void arrive_expecting(uint32_t bar, uint32_t bytes) {
    std::lock_guard<std::mutex> lock(here->mutex);
    here->arrived(bar, 1, bytes);
}
inline void arrive(uint32_t bar) { arrive_expecting(bar, 0); }
inline void arrive_at(uint32_t bar, int block) {
    std::lock_guard<std::mutex> lock(blocks[block]->mutex);
    if (blocks[block]->running == 0) fail("a word to a block that has ended");
    blocks[block]->arrived(bar, 1, 0);
}
inline void wait(uint32_t bar, uint32_t parity) {
    std::unique_lock<std::mutex> lock(here->mutex);
    auto over = [&] { return here->phases[bar / 8].parity != parity; };
    if (!here->changed.wait_for(lock, std::chrono::seconds(60), over)) fail("a wait without end");
}
inline bool elected() {
    __syncwarp();
    return threadIdx.x % 32 == 0;
}
inline int uniform(int value) { return value; }
template <int COUNT>
void meet() {
    static_assert(COUNT == MULTIPLYING);
    here->multiplying.arrive_and_wait();
}
inline void meet_cluster() { opening->arrive_and_wait(); }

inline void wait_for_kernel_in_front() { waited = true; }
inline void let_next_kernel_in() {
    if (!waited) fail("the next kernel comes in before the one in front has ended");
}

inline float read_ahead(const float* from) {
    if (!waited) fail("a number is read too early");
    return *from;
}
inline float value_of_e4m3(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 128 ? -size : size;
}
inline uint32_t halves_of_e4m3(uint32_t bytes) {
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
// The operands of a tensor core lie in the threads of a warp as the PTX manual says for m16n8k16.
template <typename T>
void multiply(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, T*) {
    Warp& warp = warp_of_this();
    const int lane = threadIdx.x % 32;
    const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(warp.operands[lane], own, sizeof own);
    warp.meeting.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t left = warp.operands[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const uint32_t right = warp.operands[column * 4 + k % 8 / 2][4 + k / 8];
            c[i] += half_of<T>(left, k % 2) * half_of<T>(right, k % 2);
        }
    }
    warp.meeting.arrive_and_wait();
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
            blocks[i]->engine = std::thread(&Block::copy_until_over, blocks[i].get(), first + i + 1);
        }
        for (int i = 0; i < cluster * ALL; ++i)
            threads.emplace_back([=] {
                here = blocks[i / ALL].get();
                threadIdx.x = i % ALL, blockIdx.x = first + i / ALL;
                kernel();
                if (threadIdx.x < MULTIPLYING && !waited) fail("the output is written too early");
                if (threadIdx.x < MULTIPLYING) --here->running;
            });
        for (auto& thread : threads) thread.join();
        for (auto& block : blocks) {
            {
                std::lock_guard<std::mutex> lock(block->mutex);
                block->over = true;
            }
            block->work.notify_all();
            block->engine.join();
            if (!block->copies.empty()) fail("copies come behind the end");
        }
        blocks.clear();
    }
}
