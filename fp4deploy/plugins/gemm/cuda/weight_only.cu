// Weight-only linear layer for a few rows, before SM90: out = x w^T + bias, w packed, at the speed of reading w.
//
// A block takes 16 BANDS WARPS / SPLIT rows of w; SPLIT of its warps share the same rows and take pieces of 128 DEPTH
// elements in turn. x stays in shared memory, `room` pieces at a time where it is too large. All sums meet in shared
// memory, in a fixed order.
//
// Two things limit the time: how much of w is on its way at once, and the instructions that decode it. So each warp
// keeps a ring of STAGES pieces in shared memory that copies fill asynchronously, without any barrier between warps,
// and there are four warps for each scheduler.
//
// A thread decodes 16 bytes of codes of each row (see plugins/gemm/triton/decode.py for the arithmetic) and is then holding
// the fragment of a tensor core's 16 x 16 operand. The 32 elements of x that face them are its own too; they are put
// into the order that decoding leaves, because the order of a sum is free.
//
// Macros: DTYPE __half or __nv_bfloat16; ROWS: of x that are held, 1, 8 or 16; BANDS: 1, 2 or 4; DEPTH: 1, 2 or 4;
// STAGES; WARPS: 8 or 16; SPLIT divides WARPS.
// x: DTYPE [m, k], aligned to 16 bytes, m <= ROWS, k a multiple of 128 DEPTH; codes uint8 [n, k / 2], aligned to 16
// bytes, scales uint8 [n, k / 16], aligned to 16 (8 where DEPTH is 1); amax float32 [1]; bias float32 [n] or null;
// out DTYPE [m, n]. room: a multiple of SPLIT.
// Launch: block 32 WARPS, grid ceil(n / rows of a block), shared memory STAGES WARPS 1152 BANDS DEPTH + room DEPTH 256
// ROWS bytes.
#include <type_traits>

#include "gemv.cuh"

#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef BANDS
#define BANDS 2
#endif
#ifndef DEPTH
#define DEPTH 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef SPLIT
#define SPLIT 2
#endif

constexpr int TILES = (ROWS + 7) / 8;
constexpr int HELD = 2 * BANDS;                           // rows of w that a thread holds a part of
constexpr int CODES = 512 * HELD * DEPTH, SLOT = CODES + 64 * HELD * DEPTH;  // bytes of a warp's piece
constexpr int FACING = 256 * ROWS * DEPTH;                // bytes of x that face a piece
constexpr int OWN = 16 * BANDS, OUTPUTS = OWN * WARPS / SPLIT;  // rows of w of a warp, of a block
constexpr int THREADS = 32 * WARPS, AHEAD = 4;
static_assert(STAGES * SLOT >= 8 * TILES * (OWN + 1) * 4, "the sums of a warp reuse its ring");
static_assert(WARPS % SPLIT == 0 && THREADS % (16 * ROWS) == 0);

// Copies 16 or 8 bytes into shared memory when they come; zeros where `inside` is false.
__device__ __forceinline__ void fetch16(uint32_t to, const void* from, bool inside) {
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void fetch8(uint32_t to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(inside ? 8 : 0) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN>
__device__ __forceinline__ void wait_until_open() {
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
}

// Two E4M3 bytes as a pair, so that a scaled element is its value times 2^-7.
__device__ __forceinline__ uint32_t scales_of(uint32_t bytes, __half*) {
    const uint32_t placed = __byte_perm(bytes, 0u, 0x1404) >> 1;  // scale * 2^-8
    return bits(__hmul2(halves(placed), halves(0x78007800u)));    // 2^15
}
__device__ __forceinline__ uint32_t scales_of(uint32_t bytes, __nv_bfloat16*) {
    const uint32_t placed = __byte_perm(bytes, 0u, 0x1404) >> 4;  // scale * 2^-120
    return bits(__hmul2(__hmul2(brains(placed), brains(0x7B807B80u)), brains(0x7B007B00u)));  // 2^120, 2^119
}

__device__ __forceinline__ void multiply(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same<DTYPE, __half>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where the 16 bytes `word` of what a thread faces lie in the 256 bytes of its four threads: a place that both the
// writes, which go along x, and the reads, which go along threads, reach without two of a quarter warp in the same
// banks.
__device__ __forceinline__ int place(int group, int part, int word) {
    return group * 256 + (((part ^ (group & 1)) << 2) | (word ^ part)) * 16;
}

struct Warp {
    const uint8_t *codes, *scales;  // of the warp's first row
    int rows, k;                    // rows: of w from there on
    uint32_t ring;

    // Piece number `piece` of the row into slot `slot` of the ring.
    __device__ __forceinline__ void start(int piece, int slot) const {
        const int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4, bytes = k / 2;
        const uint32_t to = ring + slot * SLOT;
        const int at = piece * DEPTH * 64;
        const uint8_t* from = codes + (long long)group * bytes + at + part * 16;
#pragma unroll
        for (int held = 0; held < HELD; ++held) {
            const bool inside = group + 8 * held < rows;
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                fetch16(to + (held * DEPTH + d) * 512 + lane * 16, from + d * 64, inside);
            from += 8 * (long long)bytes;
        }
        const int stride = k / 16;
#pragma unroll
        for (int i = 0; i < (OWN + 31) / 32; ++i) {
            const int row = lane + 32 * i;
            const uint8_t* steps = scales + (long long)row * stride + piece * DEPTH * 8;
            if (row >= OWN) break;
            const uint32_t target = to + CODES + row * 8 * DEPTH;
            if constexpr (DEPTH == 1) fetch8(target, steps, row < rows);
            else
#pragma unroll
                for (int d = 0; d < DEPTH; d += 2) fetch16(target + 8 * d, steps + 8 * d, row < rows);
        }
    }
};

// Steps of 128 elements of x through registers into their places; of each, a thread has the same row and word.
struct Facing {
    static constexpr int STRIDE = THREADS / (16 * ROWS);
    const uint4* from;  // of step 0
    uint8_t* to;
    int first, count;
    uint4 taken[AHEAD];

    __device__ __forceinline__ Facing(const DTYPE* x, uint8_t* held, int m, int k) {
        const int row = threadIdx.x / 16 % ROWS, word = threadIdx.x % 16;
        first = threadIdx.x / (16 * ROWS);
        from = reinterpret_cast<const uint4*>(x + (long long)(row < m ? row : 0) * k) + first * 16 + word;
        to = held + first * (256 * ROWS) + place(row, word / 4, word % 4);
    }
    __device__ __forceinline__ void load(int done, int step) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (first + done + i * STRIDE < count) taken[i] = __ldg(from + (step + done + i * STRIDE) * 16);
    }
    __device__ __forceinline__ void keep(int done) const {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (first + done + i * STRIDE < count)
                *reinterpret_cast<uint4*>(to + (done + i * STRIDE) * (256 * ROWS)) = reorder(taken[i]);
    }
};

// A float of shared memory.
__device__ __forceinline__ float sum_at(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) weight_only(
    const DTYPE* x, const uint8_t* codes, const uint8_t* scales, const float* amax, const float* bias, DTYPE* out,
    int m, int n, int k, int room, float range, int relu) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr DTYPE* tag = nullptr;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, part = lane % 4;
    const int turn = warp % SPLIT, block = blockIdx.x * OUTPUTS, first = block + warp / SPLIT * OWN;
    const int pieces = k / (128 * DEPTH);
    uint8_t *mine = shared + warp * STAGES * SLOT, *facing = shared + WARPS * STAGES * SLOT;
    const Warp piece{codes + (long long)first * (k / 2), scales + (long long)first * (k / 16), n - first, k,
                     (uint32_t)__cvta_generic_to_shared(mine)};
    Facing near(x, facing, m, k);
    near.count = min(room, pieces) * DEPTH;
    near.load(0, 0);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (turn + stage * SPLIT < pieces) piece.start(turn + stage * SPLIT, stage);
        close_group();
    }
    float sums[BANDS][TILES][4] = {};
    uint32_t odd_ones[HELD] = {};
    int slot = 0;
    for (int from = 0; from < pieces; from += room) {
        if (from != 0) {
            __syncthreads();
            near.count = min(room, pieces - from) * DEPTH;
            near.load(0, from * DEPTH);
        }
        near.keep(0);
        for (int done = AHEAD * near.STRIDE; done < near.count; done += AHEAD * near.STRIDE)
            near.load(done, from * DEPTH), near.keep(done);
        __syncthreads();
        const int until = min(from + room, pieces);
        for (int at = from + turn; at < until; at += SPLIT) {
            wait_until_open<STAGES - 1>();
            __syncwarp();
            const uint8_t* ready = mine + slot * SLOT;
            uint4 held[DEPTH][HELD];
            uint32_t steps[DEPTH][HELD];
#pragma unroll
            for (int row = 0; row < HELD; ++row)
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    held[d][row] = *reinterpret_cast<const uint4*>(ready + (row * DEPTH + d) * 512 + lane * 16);
                    const int at_steps = ((row * 8 + group) * DEPTH + d) * 8 + part * 2;
                    steps[d][row] = *reinterpret_cast<const uint16_t*>(ready + CODES + at_steps);
                }
            __syncwarp();
            if (at + STAGES * SPLIT < pieces) piece.start(at + STAGES * SPLIT, slot);
            close_group();
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            const uint8_t* beside = facing + (at - from) * FACING;
            const int beside_row = ROWS == 1 ? 0 : group;
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
                for (int row = 0; row < HELD; ++row) {
                    odd_ones[row] |= steps[d][row] + 0x0101u;  // NaN, 0x7F, shows in a byte's top bit
                    steps[d][row] = scales_of(steps[d][row], tag);
                }
#pragma unroll
                for (int word = 0; word < 4; ++word) {
                    uint4 b[TILES];
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        b[tile] = *reinterpret_cast<const uint4*>(
                            beside + d * (256 * ROWS) + tile * 2048 + place(beside_row, part, word));
#pragma unroll
                    for (int band = 0; band < BANDS; ++band) {
                        uint32_t a[2][4];
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const uint32_t* four = reinterpret_cast<const uint32_t*>(&held[d][2 * band + half]);
                            decode<DTYPE>(four[word], steps[d][2 * band + half], word >= 2, a[half]);
                        }
#pragma unroll
                        for (int tile = 0; tile < TILES; ++tile) {
                            multiply(sums[band][tile], a[0][0], a[1][0], a[0][1], a[1][1], b[tile].x, b[tile].y);
                            multiply(sums[band][tile], a[0][2], a[1][2], a[0][3], a[1][3], b[tile].z, b[tile].w);
                        }
                    }
                }
            }
        }
    }
    // Read before the sums are there, so that nothing waits for it behind.
    const int column = threadIdx.x % OUTPUTS;
    const bool inside = block + column < n;
    const float factor = amax[0] / range * 128.f, shift = bias && inside ? bias[block + column] : 0.f;
    wait_until_open<0>();
    __syncwarp();
    constexpr int ROW = OWN + 1;
    float* own = reinterpret_cast<float*>(mine);  // [8 TILES][ROW]
#pragma unroll
    for (int row = 0; row < HELD; ++row) {
        uint32_t seen = odd_ones[row];
        seen |= __shfl_xor_sync(0xFFFFFFFFu, seen, 1);
        seen |= __shfl_xor_sync(0xFFFFFFFFu, seen, 2);
        const bool nan = (seen & 0x8080u) != 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                own[(8 * tile + 2 * part + i) * ROW + 8 * row + group] =
                    nan ? __int_as_float(0x7FC00000) : sums[row / 2][tile][2 * (row % 2) + i];
    }
    __syncthreads();
    const uint32_t sums_of = (uint32_t)__cvta_generic_to_shared(shared) + column / OWN * (SPLIT * STAGES * SLOT) +
                             column % OWN * 4;
    for (int row = threadIdx.x / OUTPUTS; row < m && inside; row += THREADS / OUTPUTS) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) total += sum_at(sums_of + i * (STAGES * SLOT) + row * (ROW * 4));
        total = total * factor + shift;
        if (relu && total < 0.f) total = 0.f;
        out[(long long)row * n + block + column] = DTYPE(total);
    }
}
