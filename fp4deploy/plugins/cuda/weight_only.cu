// Weight-only linear layer for a few rows: out = x w^T + bias, w packed, at the speed of reading w.
//
// A block takes 16 BANDS rows of w, and each of its warps every WARPS-th piece of 128 elements; sums meet in shared
// memory, in a fixed order. What limits the time is how much of w is on its way at once, so each warp keeps a ring of
// STAGES pieces in shared memory that copies fill asynchronously, without any barrier between warps.
//
// A thread decodes 16 bytes of codes of each row (see plugins/triton/decode.py for the arithmetic: even and odd elements
// apart, in any order both operands share) and is then holding the fragment of a tensor core's 16 x 16 operand. The 32
// elements of x that face them are its own too.
//
// Macros: DTYPE __half or __nv_bfloat16; TILES: rows of x in eights, 1 or 2; BANDS: 1, 2 or 4; STAGES; WARPS.
// x: DTYPE [m, k], aligned to 16 bytes, m <= 8 TILES, k a multiple of 128; codes uint8 [n, k / 2], aligned to 16 bytes,
// scales uint8 [n, k / 16], aligned to 8; amax float32 [1]; bias float32 [n] or null; out DTYPE [m, n].
// Launch: block 32 WARPS, grid ceil(n / (16 BANDS)), shared memory STAGES WARPS (1152 BANDS + 2048 TILES) bytes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef BANDS
#define BANDS 4
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS
#define WARPS 8
#endif

constexpr int PIECE = 64;       // bytes of a row that the four threads of a row take at once
constexpr int HELD = 2 * BANDS;  // rows of w that a thread holds a part of
constexpr int CODES = 512 * HELD, SCALES = 64 * HELD, FACING = 2048 * TILES;  // bytes of a warp's piece
constexpr int SLOT = CODES + FACING + SCALES;
static_assert(STAGES * SLOT >= 8 * TILES * (16 * BANDS + 1) * 4, "the sums of a warp reuse its ring");

__device__ __forceinline__ uint32_t bits(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ __half2 halves(uint32_t word) { return *reinterpret_cast<__half2*>(&word); }
__device__ __forceinline__ __nv_bfloat162 brains(uint32_t word) { return *reinterpret_cast<__nv_bfloat162*>(&word); }

// Copies 16 or 8 bytes into shared memory when they come; zeros where `inside` is false.
__device__ __forceinline__ void fetch16(uint32_t to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
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

// Codes on top of halves times a scale, which is the low or the high one of a pair.
__device__ __forceinline__ uint32_t scaled(uint32_t code, uint32_t pair, bool high, __half*) {
    const __half2 scale = high ? __high2half2(halves(pair)) : __low2half2(halves(pair));
    return bits(__hmul2(halves(code), scale));
}
// s000eem0 on top of a half is the value times 2^-126 once the three bits stand in bfloat16's exponent and mantissa.
__device__ __forceinline__ uint32_t scaled(uint32_t code, uint32_t pair, bool high, __nv_bfloat16*) {
    const uint32_t moved = (code & 0x80008000u) | ((code >> 3) & 0x01C001C0u);
    const __nv_bfloat162 scale = high ? __high2bfloat162(brains(pair)) : __low2bfloat162(brains(pair));
    return bits(__hmul2(brains(moved), scale));
}

// Eight codes of a word: the fragments of the even elements in [0], [1], of the odd ones in [2], [3].
__device__ __forceinline__ void decode(uint32_t word, uint32_t pair, bool high, uint32_t (&out)[4]) {
    constexpr DTYPE* tag = nullptr;
    const uint32_t odd = ((word >> 3) & 0x0E0E0E0Eu) | (word & 0x80808080u);
    const uint32_t even = ((word << 1) & 0x0E0E0E0Eu) | ((word << 4) & 0x80808080u);
    out[0] = scaled(__byte_perm(even, 0u, 0x1404), pair, high, tag);
    out[1] = scaled(__byte_perm(even, 0u, 0x3424), pair, high, tag);
    out[2] = scaled(__byte_perm(odd, 0u, 0x1404), pair, high, tag);
    out[3] = scaled(__byte_perm(odd, 0u, 0x3424), pair, high, tag);
}

__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same<DTYPE, __half>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where the 16 bytes `word` of what a thread faces lie in the 256 bytes of its four threads: a place that both the copies,
// which go along x, and the reads, which go along threads, reach without two of a quarter warp in the same banks.
__device__ __forceinline__ int place(int group, int part, int word) {
    return group * 256 + (((part ^ (group & 1)) << 2) | (word ^ part)) * 16;
}

struct Warp {
    const DTYPE* x;
    const uint8_t *codes, *scales;  // of the block's first row
    int m, rows, k;                 // rows: of w from the block's first one on
    uint32_t ring;

    // Piece number `piece` of the row into slot `slot` of the ring.
    __device__ __forceinline__ void start(int piece, int slot) const {
        const int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4, bytes = k / 2;
        const uint32_t to = ring + slot * SLOT;
        const uint8_t* from = codes + (long long)group * bytes + piece * PIECE + part * 16;
#pragma unroll
        for (int held = 0; held < HELD; ++held)
            fetch16(to + held * 512 + lane * 16, from + (long long)(8 * held) * bytes, group + 8 * held < rows);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int row = group + 8 * tile;
            const DTYPE* facing = x + (row < m ? (long long)row * k : 0) + piece * 2 * PIECE;
#pragma unroll
            for (int word = 0; word < 4; ++word)
                fetch16(to + CODES + tile * 2048 + place(group, word, part), facing + (word * 4 + part) * 8, row < m);
        }
        const int at = piece * (PIECE / 8), stride = k / 16;
#pragma unroll
        for (int i = 0; i < (SCALES / 8 + 31) / 32; ++i) {
            const int row = lane + 32 * i;
            if (row < 8 * HELD) fetch8(to + CODES + FACING + row * 8, scales + (long long)row * stride + at, row < rows);
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) weight_only(
    const DTYPE* x, const uint8_t* codes, const uint8_t* scales, const float* amax, const float* bias, DTYPE* out, int m,
    int n, int k, float range, int relu) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr DTYPE* tag = nullptr;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, part = lane % 4;
    const int first = blockIdx.x * 16 * BANDS, pieces = k / 2 / PIECE;
    // Read before the loop, so that nothing waits for it behind.
    const int column = threadIdx.x % (16 * BANDS);
    const bool inside = first + column < n;
    const float factor = amax[0] / range * 128.f, shift = bias && inside ? bias[first + column] : 0.f;
    uint8_t* mine = shared + warp * STAGES * SLOT;
    const Warp piece{x, codes + (long long)first * (k / 2), scales + (long long)first * (k / 16), m, n - first, k,
                     (uint32_t)__cvta_generic_to_shared(mine)};
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (warp + stage * WARPS < pieces) piece.start(warp + stage * WARPS, stage);
        close_group();
    }
    float sums[BANDS][TILES][4] = {};
    uint32_t odd_ones[HELD] = {};
    int slot = 0;
    for (int at = warp; at < pieces; at += WARPS) {
        wait_until_open<STAGES - 1>();
        __syncwarp();
        const uint8_t* from = mine + slot * SLOT;
        uint4 held[HELD], facing[TILES][4];
        uint32_t steps[HELD];
#pragma unroll
        for (int row = 0; row < HELD; ++row) {
            held[row] = *reinterpret_cast<const uint4*>(from + row * 512 + lane * 16);
            steps[row] = *reinterpret_cast<const uint16_t*>(from + CODES + FACING + (row * 8 + group) * 8 + part * 2);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int word = 0; word < 4; ++word)
                facing[tile][word] = *reinterpret_cast<const uint4*>(from + CODES + tile * 2048 + place(group, part, word));
        __syncwarp();
        if (at + STAGES * WARPS < pieces) piece.start(at + STAGES * WARPS, slot);
        close_group();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
        for (int row = 0; row < HELD; ++row) {
            odd_ones[row] |= steps[row] + 0x0101u;  // NaN, 0x7F, shows in a byte's top bit
            steps[row] = scales_of(steps[row], tag);
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            uint32_t b[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 v = facing[tile][word];
                b[tile][0] = __byte_perm(v.x, v.y, 0x5410), b[tile][1] = __byte_perm(v.z, v.w, 0x5410);
                b[tile][2] = __byte_perm(v.x, v.y, 0x7632), b[tile][3] = __byte_perm(v.z, v.w, 0x7632);
            }
#pragma unroll
            for (int band = 0; band < BANDS; ++band) {
                uint32_t a[2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t* four = reinterpret_cast<const uint32_t*>(&held[2 * band + half]);
                    decode(four[word], steps[2 * band + half], word >= 2, a[half]);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    multiply(sums[band][tile], a[0][0], a[1][0], a[0][1], a[1][1], b[tile][0], b[tile][1]);
                    multiply(sums[band][tile], a[0][2], a[1][2], a[0][3], a[1][3], b[tile][2], b[tile][3]);
                }
            }
        }
    }
    wait_until_open<0>();
    __syncwarp();
    constexpr int ROW = 16 * BANDS + 1;
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
    if (!inside) return;
    for (int row = threadIdx.x / (16 * BANDS); row < m; row += 32 * WARPS / (16 * BANDS)) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i)
            total += reinterpret_cast<const float*>(shared + i * STAGES * SLOT)[row * ROW + column];
        total = total * factor + shift;
        if (relu && total < 0.f) total = 0.f;
        out[(long long)row * n + first + column] = DTYPE(total);
    }
}
