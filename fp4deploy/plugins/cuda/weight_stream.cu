// Weight-only linear layer for a few rows, from SM90 on: out = x w^T + bias, w packed, at the speed of reading w.
//
// A block takes OUTPUTS rows of w and moves along them in stages of WIDE bytes of codes a row. Copies have warps of
// their own: PRODUCERS fill a ring of STAGES stages with codes and scales, and one more a ring of XSTAGES with the part
// of x that faces them. One instruction asks for a whole run of WIDE bytes of a row, so that little of a warp's time
// goes into copies and no sector of 32 bytes is read twice, scales' least of all. The other warps, CONSUMERS of them,
// wait for a stage, take 64 bytes of 16 BANDS of its rows and multiply. mbarriers say when a stage is full and when it
// is empty; nothing waits for the whole block before the sums meet in shared memory, in a fixed order.
//
// Sixteen rows of x weigh as much as codes and scales of 57 rows of w, and each block wants all of x. So the CLUSTER
// blocks beside each other, which have different rows of w, share its reading: each asks for some rows of x, which the
// hardware writes to the same place in all of them. A place is free once the consumers of all blocks have left it. And
// each cluster begins one stage behind the one before it and goes round, so that not all ask for the same part of x at
// once.
//
// A thread decodes 16 bytes of codes of each row (see plugins/triton/decode.py for the arithmetic) and is then holding
// the fragment of a tensor core's 16 x 16 operand. The 32 elements of x that face them are its own too; they are put
// into the order that decoding leaves, because the order of a sum is free.
//
// Launched behind the kernel in front (plugins/behind.py), codes and scales are read before that has ended; x, amax and
// bias are read, and out is written, after it. The next kernel is let in when the one in front has ended.
//
// Macros: DTYPE __half or __nv_bfloat16; ROWS: of x, at most, 1, 8 or 16; WIDE: 256 or 512; OUTPUTS: 16, 32 or 64, and
// WIDE OUTPUTS at least 8192; STAGES: at least 2; CLUSTER: 1 or 2.
// x: DTYPE [m, k], m <= ROWS, k a multiple of 128; codes uint8 [n, k / 2], scales uint8 [n, k / 16]; all three aligned
// to 16 bytes; amax float32 [1]; bias float32 [n] or null; out DTYPE [m, n].
// Launch: block THREADS = 416, grid ceil(n / OUTPUTS) rounded up to a multiple of CLUSTER, shared memory STAGES (SLOT +
// 16) + 2 (XSLOT + 16) bytes, where SLOT = OUTPUTS (9 WIDE / 8 + 80) and XSLOT = ROWS (4 WIDE + 16).
#include <type_traits>

#include "stream.cuh"

#include "few_rows.cuh"

#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef WIDE
#define WIDE 512
#endif
#ifndef OUTPUTS
#define OUTPUTS 64
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif

constexpr int CONSUMERS = 8, PRODUCERS = 4, THREADS = 32 * (CONSUMERS + PRODUCERS + 1), XSTAGES = 2;
constexpr int TILES = (ROWS + 7) / 8, COLUMNS = WIDE / 64;  // COLUMNS: consumers beside each other
constexpr int BANDS = OUTPUTS * COLUMNS / (16 * CONSUMERS);
constexpr int HELD = 2 * BANDS, OWN = 16 * BANDS;           // rows of w of a thread, of a warp
// Pitches in bytes at which the eight rows of a fragment lie in different banks.
constexpr int PITCH = WIDE + 64, STEPS = WIDE / 8 + 16, XPITCH = 4 * WIDE + 16;
constexpr int STEPS_AT = OUTPUTS * PITCH, SLOT = STEPS_AT + OUTPUTS * STEPS, XSLOT = ROWS * XPITCH;
constexpr int X_AT = STAGES * SLOT, BARS_AT = X_AT + XSTAGES * XSLOT;
constexpr int ROW = OWN + 4;  // floats: the four pairs of rows that a warp writes at once lie 8 banks apart
static_assert(WIDE % 256 == 0 && BANDS >= 1 && OUTPUTS == CONSUMERS / COLUMNS * OWN && OUTPUTS % PRODUCERS == 0);
static_assert(STAGES >= 2 && BARS_AT >= CONSUMERS * 8 * TILES * ROW * 4, "the sums reuse the rings");

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

// The place in a ring: its slots are filled and emptied in turn, and the parity of a barrier says which time it is.
template <int SLOTS>
struct Place {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) weight_stream(
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) weight_stream(
#endif
    const DTYPE* x, const uint8_t* codes, const uint8_t* scales, const float* amax, const float* bias, DTYPE* out,
    int m, int n, int k, float range, int relu) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr DTYPE* tag = nullptr;
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
    const uint32_t full = base + BARS_AT, empty = full + 8 * STAGES;
    const uint32_t xfull = empty + 8 * STAGES, xempty = xfull + 8 * XSTAGES;
    const int rank = blockIdx.x % CLUSTER, block = blockIdx.x * OUTPUTS;
    const int pieces = k / 128, stages = (pieces + COLUMNS - 1) / COLUMNS;
    const int turn = blockIdx.x / CLUSTER % stages;
    auto stage_of = [&](int step) {
        const int stage = step + turn;
        return stage < stages ? stage : stage - stages;
    };
    const bool ragged = k % 256 != 0;  // rows of scales are aligned to 8 bytes only, bulk copies want 16
    if (threadIdx.x == 32 * CONSUMERS) {
        for (int i = 0; i < STAGES; ++i) {
            open_barrier(full + 8 * i, ragged ? 33 * PRODUCERS : PRODUCERS);
            open_barrier(empty + 8 * i, CONSUMERS);
        }
        for (int i = 0; i < XSTAGES; ++i) {
            open_barrier(xfull + 8 * i, 1);
            open_barrier(xempty + 8 * i, CLUSTER * CONSUMERS);
        }
        barriers_are_open();
    }
    if (CLUSTER > 1) meet_cluster();
    else __syncthreads();

    if (warp >= CONSUMERS + PRODUCERS) {  // x
        wait_for_kernel_in_front();
        let_next_kernel_in();
        Place<XSTAGES> place;
        for (int step = 0; step < stages; ++step, place.advance()) {
            const int stage = stage_of(step);
            wait(xempty + 8 * place.slot, place.parity ^ 1);
            const int at = stage * 2 * WIDE, bytes = 2 * min(2 * WIDE, k - at);
            const uint32_t to = base + X_AT + place.slot * XSLOT, bar = xfull + 8 * place.slot;
            if (elected()) {
                arrive_expecting(bar, m * bytes);  // those that the other blocks ask for as well
                for (int row = rank; row < m; row += CLUSTER) {
                    const DTYPE* from = x + (long long)row * k + at;
                    if (CLUSTER > 1) fetch_run_for_all<CLUSTER>(to + row * XPITCH, from, bytes, bar);
                    else fetch_run(to + row * XPITCH, from, bytes, bar);
                }
            }
            __syncwarp();
        }
        return;
    }
    if (warp >= CONSUMERS) {  // w
        constexpr int PART = OUTPUTS / PRODUCERS;
        const int first = (warp - CONSUMERS) * PART;
        // OUTPUTS - first bounds nothing; without it the copies below are unrolled too far.
        const int rows = max(0, min(min(PART, OUTPUTS - first), n - block - first));
        const long long line = k / 2, steps_line = k / 16;
        const uint8_t *from = codes + (block + first) * line, *steps = scales + (block + first) * steps_line;
        Place<STAGES> place;
        for (int step = 0; step < stages; ++step, place.advance()) {
            const int stage = stage_of(step);
            wait(empty + 8 * place.slot, place.parity ^ 1);
            const int at = stage * WIDE, bytes = min(WIDE, k / 2 - at);
            const uint32_t slot = base + place.slot * SLOT, bar = full + 8 * place.slot;
            const uint32_t to = slot + first * PITCH, to_steps = slot + STEPS_AT + first * STEPS;
            if (elected()) {
                arrive_expecting(bar, rows * (bytes + (ragged ? 0 : bytes / 8)));
                const uint8_t *run = from + at, *few = steps + at / 8;
                uint32_t into = to, into_steps = to_steps;
#pragma unroll 4
                for (int row = 0; row < rows; ++row) {
                    fetch_run(into, run, bytes, bar);
                    if (!ragged) fetch_run(into_steps, few, bytes / 8, bar);
                    run += line, few += steps_line, into += PITCH, into_steps += STEPS;
                }
            }
            __syncwarp();
            if (ragged) {
                for (int i = lane; i < rows * COLUMNS; i += 32) {
                    const int row = i / COLUMNS, byte = i % COLUMNS * 8;
                    if (8 * byte < bytes)
                        fetch8(to_steps + row * STEPS + byte, steps + row * steps_line + at / 8 + byte);
                }
                arrive_behind_copies(bar);
            }
        }
        finish_copies();
        return;
    }

    wait_for_kernel_in_front();
    const int group = lane / 4, part = lane % 4, column = warp % COLUMNS, own = warp / COLUMNS * OWN;
    // Read before the sums are there, so that nothing waits for it behind.
    const int output = threadIdx.x % OUTPUTS;
    const bool inside = block + output < n;
    const float factor = amax[0] / range / UNIT, shift = bias && inside ? bias[block + output] : 0.f;
    float sums[BANDS][TILES][4] = {};
    Place<STAGES> place;
    Place<XSTAGES> xplace;
    for (int step = 0; step < stages; ++step) {
        wait(full + 8 * place.slot, place.parity);
        const uint8_t* ready = shared + place.slot * SLOT;
        uint4 held[HELD];
        uint32_t steps[HELD];
#pragma unroll
        for (int row = 0; row < HELD; ++row) {
            const int line = own + 8 * row + group;
            held[row] = *reinterpret_cast<const uint4*>(ready + line * PITCH + column * 64 + part * 16);
            steps[row] = *reinterpret_cast<const uint16_t*>(ready + STEPS_AT + line * STEPS + column * 8 + part * 2);
        }
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * place.slot);
        place.advance();
        const bool whole = stage_of(step) * COLUMNS + column < pieces;
        wait(xfull + 8 * xplace.slot, xplace.parity);
        const uint8_t* facing = shared + X_AT + xplace.slot * XSLOT;
        facing += (ROWS == 1 ? 0 : group) * XPITCH + column * 256 + part * 64;
#pragma unroll
        for (int row = 0; row < HELD; ++row) steps[row] = scales_of(steps[row], tag);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            if (!whole) break;
            uint4 b[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                b[tile] = reorder(*reinterpret_cast<const uint4*>(facing + tile * 8 * XPITCH + word * 16));
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
        if (lane < CLUSTER && step + XSTAGES < stages) {  // what a block is told it waits for, and may end
            if (CLUSTER > 1) arrive_at(xempty + 8 * xplace.slot, lane);
            else arrive(xempty + 8 * xplace.slot);
        }
        xplace.advance();
    }
    meet<32 * CONSUMERS>();  // every stage has been read
    float* mine = reinterpret_cast<float*>(shared) + warp * (8 * TILES * ROW);
#pragma unroll
    for (int row = 0; row < HELD; ++row)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                mine[(8 * tile + 2 * part + i) * ROW + 8 * row + group] = sums[row / 2][tile][2 * (row % 2) + i];
    meet<32 * CONSUMERS>();
    const float* sums_of = reinterpret_cast<const float*>(shared);
    sums_of += output / OWN * (COLUMNS * 8 * TILES * ROW) + output % OWN;
    for (int row = threadIdx.x / OUTPUTS; row < m && inside; row += 32 * CONSUMERS / OUTPUTS) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) total += sums_of[i * (8 * TILES * ROW) + row * ROW];
        total = total * factor + shift;
        if (relu && total < 0.f) total = 0.f;
        out[(long long)row * n + block + output] = DTYPE(total);
    }
}
