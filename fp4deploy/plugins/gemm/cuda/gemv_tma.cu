// Weight-only GEMM with at most 16 rows of activations (GEMV, small-M GEMM), from SM90 on: out = x w^T + bias, w
// packed.
//
// Reading w takes nearly all of the time, so the design keeps as many of its bytes in flight as shared memory holds.
//
// Pipeline. A thread block computes OUTPUTS columns of out. It walks along K in tiles of 512 elements (256 bytes of
// codes a row of w) through a ring of STAGES stages in shared memory. Warp specialisation: one producer warp issues the
// TMA copies of a stage (codes and scales as boxes of a tensor map, x as runs of its rows); CONSUMERS groups of four
// consumer warps take the stages in turn, each warp of a group a quarter of the tile's K. For each stage an mbarrier
// `full` counts the bytes that arrive (transaction count) and an mbarrier `empty` the consumer warps that have read it.
// No barrier stops the whole block until the partial sums are added through shared memory: a split-K reduction inside
// the block, in a fixed order, so that the same call gives the same bytes.
//
// Clusters. Sixteen rows of x take as many bytes as codes and scales of 57 rows of w, and every block needs all of x.
// So the CLUSTER blocks of a thread-block cluster, which have different rows of w, load x together: each issues the
// copies of some rows, by multicast to the same shared address in all of them. A stage is empty once the consumers of
// all blocks have read it. Each cluster starts at another K tile and wraps around, so that not all read the same part
// of x at once.
//
// Fragments. A thread decodes 16 bytes of codes of each of its rows (decode.cuh); the result is its fragment of the 16
// x 16 operand of mma.m16n8k16. It also reads the 32 elements of x at the same k and permutes them as decoding permuted
// w: the order of a sum is free.
//
// Programmatic dependent launch (plugins/runtime/pdl.py). The EARLY first tiles of w are loaded before the primary
// kernel has finished; x, amax and bias are read, and out is written, after it. EARLY is small because memory answers
// in the order of the requests: more of w first means that x comes later. The secondary kernel is allowed to start
// before the LAST tiles are requested; earlier, its loads would delay this kernel's.
//
// Macros: DTYPE __half or __nv_bfloat16; ROWS 1, 8 or 16, the most rows of x; OUTPUTS 16, 32 or 64; CONSUMERS 1 to 3;
// STAGES a multiple of CONSUMERS, at least 2; CLUSTER 1 or 2.
// codes: tensor map of uint8 [n, k / 2], two adjacent boxes of OUTPUTS rows x 128 bytes, 128-byte swizzle; scales:
// tensor map of uint8 [n, k / 16], one box of OUTPUTS rows x 32 bytes, 32-byte swizzle (plugins/runtime/tma.py); x:
// DTYPE [m, k], m <= ROWS, k a multiple of 256, aligned to 16 bytes; amax float32 [1]; bias float32 [n] or null; out
// DTYPE [m, n].
// Launch: block 32 (4 CONSUMERS + 1), grid ceil(n / OUTPUTS) rounded up to a multiple of CLUSTER, shared memory
// STAGES (STAGE_BYTES + 16), where STAGE_BYTES = 288 OUTPUTS + 1040 ROWS, rounded up to a multiple of 1024.
#include <type_traits>

#include "sm90.cuh"

#include "decode.cuh"

#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef OUTPUTS
#define OUTPUTS 64
#endif
#ifndef CONSUMERS
#define CONSUMERS 3
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif

constexpr int WIDE = 256, BOX = 128;  // bytes of codes of a row in a K tile, in a TMA box
constexpr int GROUP_WARPS = 4;        // warps of a consumer group, each with a quarter of the tile's K
constexpr int CONSUMER_WARPS = GROUP_WARPS * CONSUMERS, THREADS = 32 * (CONSUMER_WARPS + 1);
// Tiles of the tensor core: 8 rows of x, 16 rows of w. A thread has two rows of w in each.
constexpr int X_TILES = (ROWS + 7) / 8, ROW_TILES = OUTPUTS / 16, THREAD_ROWS = 2 * ROW_TILES;
// K tiles requested before the primary kernel has finished, and after the secondary kernel was allowed to start.
constexpr int EARLY = ROWS > 8 ? 2 : 3, LAST = 3;
// A stage holds codes, scales, x. The 16 bytes added to a row of x put the eight rows of a fragment into different
// banks.
constexpr int X_PITCH = 4 * WIDE + 16, SCALES_AT = OUTPUTS * WIDE, X_AT = SCALES_AT + OUTPUTS * WIDE / 8;
constexpr int STAGE_BYTES = (X_AT + ROWS * X_PITCH + 1023) / 1024 * 1024, BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int SUM_PITCH = ROWS == 1 ? 1 : 8 * X_TILES + 4;  // floats between the sums of two rows of w
// The host gives STAGES * (STAGE_BYTES + 16) bytes: the ring, then the mbarriers full[STAGES] and empty[STAGES].
static_assert(ROW_TILES >= 1 && OUTPUTS % 16 == 0 && STAGES >= 2 && STAGES % CONSUMERS == 0 && ROWS % CLUSTER == 0);
static_assert(BARRIERS_AT >= CONSUMER_WARPS * OUTPUTS * SUM_PITCH * 4, "the sums reuse the ring");

// Two E4M3 scales as a pair of DTYPE. A decoded element times its scale is then the value times UNIT.
constexpr bool HALF = std::is_same<DTYPE, __half>::value;
constexpr float UNIT = HALF ? 1.f / 16384.f : 1.f / 128.f;
__device__ __forceinline__ uint32_t scales_of(uint32_t bytes, __half*) { return half2_of_e4m3x2(bytes); }
__device__ __forceinline__ uint32_t scales_of(uint32_t bytes, __nv_bfloat16*) {
    // 2^239 in all exceeds bfloat16's range, so it is multiplied in two exact steps.
    const uint32_t placed = __byte_perm(bytes, 0u, 0x1404) >> 4;                            // scale * 2^-120
    const __nv_bfloat162 first = __hmul2(as_bfloat162(placed), as_bfloat162(0x7B807B80u));  // times 2^120
    const uint32_t pair = as_word(__hmul2(first, as_bfloat162(0x7B007B00u)));               // times 2^119
    const bool low = (bytes & 0x7Fu) == 0x7Fu, high = (bytes & 0x7F00u) == 0x7F00u;
    return pair | (low ? 0x7FC0u : 0u) | (high ? 0x7FC00000u : 0u);
}

// A stage of the ring, and the parity of the phase of its mbarriers, which flips each time around.
struct RingPosition {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void copy_row(uint32_t to, const DTYPE* from, int bytes, uint32_t bar) {
    // To the same address in all blocks of the cluster; each block's own mbarrier counts the bytes.
    if (CLUSTER > 1) bulk_copy_multicast<CLUSTER>(to, from, bytes, bar);
    else bulk_copy(to, from, bytes, bar);
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
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
    const uint32_t full = base + BARRIERS_AT, empty = full + 8 * STAGES;
    const int rank = blockIdx.x % CLUSTER, block = blockIdx.x * OUTPUTS;
    const int quarters = k / 128, k_tiles = (quarters + GROUP_WARPS - 1) / GROUP_WARPS;
    const int early = min(min(EARLY, STAGES), k_tiles);
    const int rotation = blockIdx.x / CLUSTER % k_tiles;  // the K tile this cluster starts with
    auto k_tile_of = [&](int step) {
        const int k_tile = step + rotation;
        return k_tile < k_tiles ? k_tile : k_tile - k_tiles;
    };
    auto x_bytes = [&](int step) { return 2 * min(2 * WIDE, k - k_tile_of(step) * 2 * WIDE); };
    if (warp == CONSUMER_WARPS) {
        if (elect_one()) {
            prefetch_tensor_map(codes);
            prefetch_tensor_map(scales);
            for (int i = 0; i < STAGES; ++i) {
                mbarrier_init(full + 8 * i, 1);                       // the producer, and the bytes it announces
                mbarrier_init(empty + 8 * i, CLUSTER * GROUP_WARPS);  // one consumer group of each block
            }
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    // Nobody may arrive at an mbarrier, in any block of the cluster, before it is initialised.
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warp == CONSUMER_WARPS) {  // the producer warp
        auto load_weight = [&](int step, int stage) {
            const int k_tile = k_tile_of(step);
            const uint32_t to = base + stage * STAGE_BYTES, bar = full + 8 * stage;
            // All rows of x are counted, also those that the other block of the cluster loads. TMA fills a box beyond
            // the end of w with zeros, and counts these bytes as well.
            mbarrier_arrive_expect_tx(bar, X_AT + m * x_bytes(step));
            tma_load_boxes(to, codes, k_tile * (WIDE / BOX), block, bar);
            tma_load_box(to + SCALES_AT, scales, k_tile * (WIDE / 8), block, bar);
        };
        auto load_x = [&](int step, int stage) {
            const int at = k_tile_of(step) * 2 * WIDE;
            const uint32_t to = base + stage * STAGE_BYTES + X_AT + rank * X_PITCH, bar = full + 8 * stage;
            const DTYPE* from = x + (long long)rank * k + at;
            if (m == ROWS && k - at >= 2 * WIDE) {  // unrolled: a third of the instructions of this one warp
#pragma unroll
                for (int i = 0; i < ROWS / CLUSTER; ++i)
                    copy_row(to + i * CLUSTER * X_PITCH, from + (long long)i * CLUSTER * k, 4 * WIDE, bar);
            } else
                for (int row = rank; row < m; row += CLUSTER)
                    copy_row(to + (row - rank) * X_PITCH, from + (long long)(row - rank) * k, x_bytes(step), bar);
        };
        if (elect_one())
            for (int step = 0; step < early; ++step) load_weight(step, step);
        __syncwarp();
        wait_for_primary_kernel();  // from here on x may be read
        const int last = max(early, k_tiles - LAST);
        if (last == k_tiles) launch_dependents();
        RingPosition position;
        for (int step = 0; step < k_tiles; ++step, position.advance()) {
            if (step < early) continue;  // requested above, and its x by the consumer warps
            if (step == last) launch_dependents();
            mbarrier_wait(empty + 8 * position.stage, position.parity ^ 1);  // returns at once for a stage never used
            if (elect_one()) load_weight(step, position.stage), load_x(step, position.stage);
            __syncwarp();
        }
        return;
    }

    wait_for_primary_kernel();
    for (int step = 0; step < early; ++step) {  // x of the early tiles, by all consumer warps: sooner than by one warp
        const DTYPE* from = x + k_tile_of(step) * 2 * WIDE;
        if (elect_one())
            for (int row = rank + CLUSTER * warp; row < m; row += CLUSTER * CONSUMER_WARPS)
                copy_row(base + step * STAGE_BYTES + X_AT + row * X_PITCH, from + (long long)row * k, x_bytes(step),
                         full + 8 * step);
        __syncwarp();
    }
    const int fragment_row = lane / 4, fragment_column = lane % 4;
    const int consumer = warp / GROUP_WARPS, quarter = warp % GROUP_WARPS;
    // Which of eight rows of w a thread has. TMA's swizzle XORs the number of a 16-byte word with the row (128-byte
    // swizzle) or with a quarter of it (32-byte swizzle); with this order of rows the lanes of one access hit different
    // banks.
    const int row_of_eight = fragment_row / 2 + fragment_row % 2 * 4;
    const int codes_at = quarter / 2 * (OUTPUTS * BOX) + row_of_eight * BOX +
                         ((quarter % 2 * 4 + fragment_column) ^ row_of_eight) * 16;
    const int scales_at = SCALES_AT + row_of_eight * (WIDE / 8) + ((quarter / 2) ^ (row_of_eight / 4)) * 16 +
                          quarter % 2 * 8 + fragment_column * 2;
    const int x_at = X_AT + (ROWS == 1 ? 0 : fragment_row) * X_PITCH + quarter * 256 + fragment_column * 64;
    const int output = threadIdx.x % OUTPUTS;
    const bool in_range = block + output < n;
    const float weight_amax = load_early(amax), bias_value = bias && in_range ? load_early(bias + block + output) : 0.f;
    float sums[ROW_TILES][X_TILES][4] = {};
    RingPosition position;
    for (int i = 0; i < consumer; ++i) position.advance();
    for (int step = consumer; step < k_tiles; step += CONSUMERS) {
        mbarrier_wait(full + 8 * position.stage, position.parity);
        // Codes and scales into registers first: 16 bytes, two scales a row.
        const uint8_t* ready = shared + position.stage * STAGE_BYTES;
        uint4 words[THREAD_ROWS];
        uint32_t scale_pairs[THREAD_ROWS];
#pragma unroll
        for (int row = 0; row < THREAD_ROWS; ++row) {
            words[row] = *reinterpret_cast<const uint4*>(ready + codes_at + row * 8 * BOX);
            scale_pairs[row] = *reinterpret_cast<const uint16_t*>(ready + scales_at + row * WIDE);
        }
#pragma unroll
        for (int row = 0; row < THREAD_ROWS; ++row) scale_pairs[row] = scales_of(scale_pairs[row], tag);
        // The last K tile may have fewer than four quarters. Its x beyond k is stale, so the warp must skip it.
        if (k_tile_of(step) * GROUP_WARPS + quarter < quarters)
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                uint4 b[X_TILES];
#pragma unroll
                for (int tile = 0; tile < X_TILES; ++tile)
                    b[tile] = reorder(*reinterpret_cast<const uint4*>(ready + x_at + tile * 8 * X_PITCH + word * 16));
#pragma unroll
                for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                    uint32_t a[2][4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t* four = reinterpret_cast<const uint32_t*>(&words[2 * row_tile + half]);
                        decode<DTYPE>(four[word], scale_pairs[2 * row_tile + half], word >= 2, a[half]);
                    }
#pragma unroll
                    for (int tile = 0; tile < X_TILES; ++tile) {
                        mma(sums[row_tile][tile], a[0][0], a[1][0], a[0][1], a[1][1], b[tile].x, b[tile].y, tag);
                        mma(sums[row_tile][tile], a[0][2], a[1][2], a[0][3], a[1][3], b[tile].z, b[tile].w, tag);
                    }
                }
            }
        __syncwarp();
        // Tell the producers of all blocks that the stage is read, but only where one will wait for it: a block that
        // waits for no more may have ended, and its shared memory must not be accessed then.
        if (lane < CLUSTER && step + STAGES < k_tiles) {
            if (CLUSTER > 1) mbarrier_arrive_remote(empty + 8 * position.stage, lane);
            else mbarrier_arrive(empty + 8 * position.stage);
        }
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) position.advance();
    }
    // A named barrier of the consumer warps; the producer has returned. All stages are read: the sums may overwrite
    // them.
    named_barrier_sync<32 * CONSUMER_WARPS>();
    float* partial = reinterpret_cast<float*>(shared) + warp * (OUTPUTS * SUM_PITCH);
#pragma unroll
    for (int row = 0; row < THREAD_ROWS; ++row)
#pragma unroll
        for (int tile = 0; tile < X_TILES; ++tile) {
            const float* two = &sums[row / 2][tile][2 * (row % 2)];
            float* to = partial + (8 * row + row_of_eight) * SUM_PITCH;
            if (ROWS > 1) *reinterpret_cast<float2*>(to + 8 * tile + 2 * fragment_column) = {two[0], two[1]};
            else if (fragment_column == 0) *to = two[0];
        }
    named_barrier_sync<32 * CONSUMER_WARPS>();  // the partial sums of all warps are there
    // GEMM epilogue: split-K reduction, global scale, bias, ReLU.
    constexpr int ROWS_AT_ONCE = ROWS == 1 ? 1 : 4;  // rows of x that a thread adds at once, one 16-byte load
    const float factor = weight_amax / range / UNIT;
    constexpr int STRIDE = 32 * CONSUMER_WARPS / OUTPUTS * ROWS_AT_ONCE;
    for (int first = threadIdx.x / OUTPUTS * ROWS_AT_ONCE; in_range && first < m; first += STRIDE) {
        const float* from = reinterpret_cast<const float*>(shared) + output * SUM_PITCH + first;
        float total[ROWS_AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; ++i)
            if (ROWS == 1) total[0] += from[i * OUTPUTS * SUM_PITCH];
            else {
                const float4 four = *reinterpret_cast<const float4*>(from + i * OUTPUTS * SUM_PITCH);
                total[0] += four.x, total[1 % ROWS_AT_ONCE] += four.y;
                total[2 % ROWS_AT_ONCE] += four.z, total[3 % ROWS_AT_ONCE] += four.w;
            }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
            float value = total[i] * factor + bias_value;
            if (relu && value < 0.f) value = 0.f;
            if (first + i < m) out[(long long)(first + i) * n + block + output] = DTYPE(value);
        }
    }
}
