// Weight-only linear layer for a few rows, from SM90 on: out = x w^T + bias, w packed, at the speed of reading w.
//
// A block takes OUTPUTS rows of w and moves along them in stages of 256 bytes of codes a row. One warp asks the copy
// engine for all that a stage needs, codes and scales as boxes of matrices and x as runs of its rows, into a ring of
// STAGES slots. TEAMS of four warps take the stages in turn: each warp waits for a slot, takes 64 bytes of all of its
// rows and multiplies. mbarriers say when a slot is full and when it is empty; nothing waits for the whole block before
// the sums meet in shared memory, in a fixed order.
//
// Sixteen rows of x weigh as much as codes and scales of 57 rows of w, and each block wants all of x. So the CLUSTER
// blocks beside each other, which have different rows of w, share its reading: each asks for some rows of x, which the
// hardware writes to the same place in all of them. A place is free once the teams of all blocks have left it. And each
// cluster begins one stage behind the one before it and goes round, so that not all ask for the same part of x at once.
//
// A thread decodes 16 bytes of codes of each row (see gemv.cuh) and is then holding the fragment of a tensor core's
// 16 x 16 operand. The 32 elements of x that face them are its own too; they are put into the order that decoding
// leaves, because the order of a sum is free.
//
// Launched behind the kernel in front (plugins/runtime/pdl.py), the EARLY first stages of w are read before that has ended;
// x, amax and bias are read, and out is written, after it. Memory answers in the order of asking: with more of w asked
// for, the first x would come later. The next kernel is let in before the LAST stages are asked for: sooner, its
// reading would delay this one's.
//
// Macros: DTYPE __half or __nv_bfloat16; ROWS: of x, at most, 1, 8 or 16; OUTPUTS: 16, 32 or 64; TEAMS: 1 to 3; STAGES:
// a multiple of TEAMS, at least 2; CLUSTER: 1 or 2.
// codes: two boxes beside each other of 128 bytes of OUTPUTS rows, swizzled by 128 bytes, of uint8 [n, k / 2]; scales:
// one of 32 bytes, swizzled by 32 bytes, of uint8 [n, k / 16] (plugins/runtime/tma.py); x: DTYPE [m, k], m <= ROWS, k a
// multiple of 256, aligned to 16 bytes; amax float32 [1]; bias float32 [n] or null; out DTYPE [m, n].
// Launch: block 32 (4 TEAMS + 1), grid ceil(n / OUTPUTS) rounded up to a multiple of CLUSTER, shared memory STAGES (SLOT
// + 16) bytes, where SLOT = 288 OUTPUTS + 1040 ROWS, rounded up to a multiple of 1024.
#include <type_traits>

#include "sm90.cuh"

#include "gemv.cuh"

#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef OUTPUTS
#define OUTPUTS 64
#endif
#ifndef TEAMS
#define TEAMS 3
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif

constexpr int WIDE = 256, COLUMNS = 4, BOX = 128;  // COLUMNS: warps of a team, beside each other
constexpr int CONSUMERS = COLUMNS * TEAMS, THREADS = 32 * (CONSUMERS + 1);
constexpr int TILES = (ROWS + 7) / 8, BANDS = OUTPUTS / 16, HELD = 2 * BANDS;  // HELD: rows of w of a thread
// Stages asked for before the kernel in front ends, and behind the letting in of the next.
constexpr int EARLY = ROWS > 8 ? 2 : 3, LAST = 3;
// A slot: codes, scales, x at a pitch at which the eight rows of a fragment lie in different banks.
constexpr int XPITCH = 4 * WIDE + 16, STEPS_AT = OUTPUTS * WIDE, X_AT = STEPS_AT + OUTPUTS * WIDE / 8;
constexpr int SLOT = (X_AT + ROWS * XPITCH + 1023) / 1024 * 1024, BARS_AT = STAGES * SLOT;
constexpr int LINE = ROWS == 1 ? 1 : 8 * TILES + 4;  // floats between the sums of two rows of w
static_assert(BANDS >= 1 && OUTPUTS % 16 == 0 && STAGES >= 2 && STAGES % TEAMS == 0 && ROWS % CLUSTER == 0);
static_assert(BARS_AT >= CONSUMERS * OUTPUTS * LINE * 4, "the sums reuse the ring");

// Two E4M3 bytes as a pair; a scaled element is then its value times UNIT.
constexpr bool HALF = std::is_same<DTYPE, __half>::value;
constexpr float UNIT = HALF ? 1.f / 16384.f : 1.f / 128.f;
__device__ __forceinline__ uint32_t scales_of(uint32_t bytes, __half*) { return halves_of_e4m3(bytes); }
__device__ __forceinline__ uint32_t scales_of(uint32_t bytes, __nv_bfloat16*) {
    const uint32_t placed = __byte_perm(bytes, 0u, 0x1404) >> 4;  // scale * 2^-120
    const __nv_bfloat162 first = __hmul2(brains(placed), brains(0x7B807B80u));  // 2^120
    const uint32_t pair = bits(__hmul2(first, brains(0x7B007B00u)));             // 2^119
    const bool low = (bytes & 0x7Fu) == 0x7Fu, high = (bytes & 0x7F00u) == 0x7F00u;
    return pair | (low ? 0x7FC0u : 0u) | (high ? 0x7FC00000u : 0u);
}

// The place in the ring: its slots are filled and emptied in turn, and the parity of a barrier says which time it is.
struct Place {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void fetch_row(uint32_t to, const DTYPE* from, int bytes, uint32_t bar) {
    if (CLUSTER > 1) fetch_run_for_all<CLUSTER>(to, from, bytes, bar);
    else fetch_run(to, from, bytes, bar);
}

#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemv_tma(
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) gemv_tma(
#endif
    const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales, const DTYPE* x,
    const float* amax, const float* bias, DTYPE* out, int m, int n, int k, float range, int relu) {
    extern __shared__ __align__(1024) uint8_t shared[];
    constexpr DTYPE* tag = nullptr;
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
    const uint32_t full = base + BARS_AT, empty = full + 8 * STAGES;
    const int rank = blockIdx.x % CLUSTER, block = blockIdx.x * OUTPUTS;
    const int pieces = k / 128, stages = (pieces + COLUMNS - 1) / COLUMNS, early = min(min(EARLY, STAGES), stages);
    const int turn = blockIdx.x / CLUSTER % stages;
    auto stage_of = [&](int step) {
        const int stage = step + turn;
        return stage < stages ? stage : stage - stages;
    };
    auto x_bytes = [&](int step) { return 2 * min(2 * WIDE, k - stage_of(step) * 2 * WIDE); };
    if (warp == CONSUMERS) {
        if (elected()) {
            expect_map(codes);
            expect_map(scales);
            for (int i = 0; i < STAGES; ++i) {
                open_barrier(full + 8 * i, 1);
                open_barrier(empty + 8 * i, CLUSTER * COLUMNS);
            }
            barriers_are_open();
        }
        __syncwarp();
    }
    if (CLUSTER > 1) meet_cluster();
    else __syncthreads();

    if (warp == CONSUMERS) {
        auto ask_w = [&](int step, int slot) {
            const int stage = stage_of(step);
            const uint32_t to = base + slot * SLOT, bar = full + 8 * slot;
            arrive_expecting(bar, X_AT + m * x_bytes(step));  // rows of x that the other blocks ask for as well
            fetch_boxes(to, codes, stage * (WIDE / BOX), block, bar);
            fetch_box(to + STEPS_AT, scales, stage * (WIDE / 8), block, bar);
        };
        auto ask_x = [&](int step, int slot) {
            const int at = stage_of(step) * 2 * WIDE;
            const uint32_t to = base + slot * SLOT + X_AT + rank * XPITCH, bar = full + 8 * slot;
            const DTYPE* from = x + (long long)rank * k + at;
            if (m == ROWS && k - at >= 2 * WIDE) {  // a third of the instructions, which one warp waits for
#pragma unroll
                for (int i = 0; i < ROWS / CLUSTER; ++i)
                    fetch_row(to + i * CLUSTER * XPITCH, from + (long long)i * CLUSTER * k, 4 * WIDE, bar);
            } else
                for (int row = rank; row < m; row += CLUSTER)
                    fetch_row(to + (row - rank) * XPITCH, from + (long long)(row - rank) * k, x_bytes(step), bar);
        };
        if (elected())
            for (int step = 0; step < early; ++step) ask_w(step, step);
        __syncwarp();
        wait_for_kernel_in_front();
        const int last = max(early, stages - LAST);
        if (last == stages) let_next_kernel_in();
        Place place;
        for (int step = 0; step < stages; ++step, place.advance()) {
            if (step < early) continue;
            if (step == last) let_next_kernel_in();
            wait(empty + 8 * place.slot, place.parity ^ 1);
            if (elected()) ask_w(step, place.slot), ask_x(step, place.slot);
            __syncwarp();
        }
        return;
    }

    wait_for_kernel_in_front();
    for (int step = 0; step < early; ++step) {  // the first x, by all at once
        const DTYPE* from = x + stage_of(step) * 2 * WIDE;
        if (elected())
            for (int row = rank + CLUSTER * warp; row < m; row += CLUSTER * CONSUMERS)
                fetch_row(
                    base + step * SLOT + X_AT + row * XPITCH, from + (long long)row * k, x_bytes(step), full + 8 * step);
        __syncwarp();
    }
    const int group = lane / 4, part = lane % 4, team = warp / COLUMNS, column = warp % COLUMNS;
    const int line = group / 2 + group % 2 * 4;  // of eight rows of w; four lanes beside each other meet no bank twice
    const int codes_at = column / 2 * (OUTPUTS * BOX) + line * BOX + ((column % 2 * 4 + part) ^ line) * 16;
    const int steps_at = STEPS_AT + line * (WIDE / 8) + ((column / 2) ^ (line / 4)) * 16 + column % 2 * 8 + part * 2;
    const int x_at = X_AT + (ROWS == 1 ? 0 : group) * XPITCH + column * 256 + part * 64;
    const int output = threadIdx.x % OUTPUTS;
    const bool inside = block + output < n;
    const float largest = read_ahead(amax), shift = bias && inside ? read_ahead(bias + block + output) : 0.f;
    float sums[BANDS][TILES][4] = {};
    Place place;
    for (int i = 0; i < team; ++i) place.advance();
    for (int step = team; step < stages; step += TEAMS) {
        wait(full + 8 * place.slot, place.parity);
        const uint8_t* ready = shared + place.slot * SLOT;
        uint4 held[HELD];
        uint32_t steps[HELD];
#pragma unroll
        for (int row = 0; row < HELD; ++row) {
            held[row] = *reinterpret_cast<const uint4*>(ready + codes_at + row * 8 * BOX);
            steps[row] = *reinterpret_cast<const uint16_t*>(ready + steps_at + row * WIDE);
        }
#pragma unroll
        for (int row = 0; row < HELD; ++row) steps[row] = scales_of(steps[row], tag);
        if (stage_of(step) * COLUMNS + column < pieces)
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                uint4 b[TILES];
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    b[tile] = reorder(*reinterpret_cast<const uint4*>(ready + x_at + tile * 8 * XPITCH + word * 16));
#pragma unroll
                for (int band = 0; band < BANDS; ++band) {
                    uint32_t a[2][4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t* four = reinterpret_cast<const uint32_t*>(&held[2 * band + half]);
                        decode<DTYPE>(four[word], steps[2 * band + half], word >= 2, a[half]);
                    }
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        multiply(sums[band][tile], a[0][0], a[1][0], a[0][1], a[1][1], b[tile].x, b[tile].y, tag);
                        multiply(sums[band][tile], a[0][2], a[1][2], a[0][3], a[1][3], b[tile].z, b[tile].w, tag);
                    }
                }
            }
        __syncwarp();
        if (lane < CLUSTER && step + STAGES < stages) {  // what a block is told it waits for, and may end
            if (CLUSTER > 1) arrive_at(empty + 8 * place.slot, lane);
            else arrive(empty + 8 * place.slot);
        }
#pragma unroll
        for (int i = 0; i < TEAMS; ++i) place.advance();
    }
    meet<32 * CONSUMERS>();  // every stage has been read
    float* mine = reinterpret_cast<float*>(shared) + warp * (OUTPUTS * LINE);
#pragma unroll
    for (int row = 0; row < HELD; ++row)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float* two = &sums[row / 2][tile][2 * (row % 2)];
            float* to = mine + (8 * row + line) * LINE;
            if (ROWS > 1) *reinterpret_cast<float2*>(to + 8 * tile + 2 * part) = {two[0], two[1]};
            else if (part == 0) *to = two[0];
        }
    meet<32 * CONSUMERS>();
    constexpr int SIDE = ROWS == 1 ? 1 : 4;  // rows of x that a thread adds at once
    const float factor = largest / range / UNIT;
    for (int first = threadIdx.x / OUTPUTS * SIDE; inside && first < m; first += 32 * CONSUMERS / OUTPUTS * SIDE) {
        const float* from = reinterpret_cast<const float*>(shared) + output * LINE + first;
        float total[SIDE] = {};
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i)
            if (ROWS == 1) total[0] += from[i * OUTPUTS * LINE];
            else {
                const float4 four = *reinterpret_cast<const float4*>(from + i * OUTPUTS * LINE);
                total[0] += four.x, total[1 % SIDE] += four.y, total[2 % SIDE] += four.z, total[3 % SIDE] += four.w;
            }
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            float value = total[i] * factor + shift;
            if (relu && value < 0.f) value = 0.f;
            if (first + i < m) out[(long long)(first + i) * n + block + output] = DTYPE(value);
        }
    }
}
