// MS-EDEN (formats/ms_eden.py has the formulas): groups along K, of 16 BLOCKS elements, are rotated, quantised and their
// block scales corrected. The tensor is (outer, K, inner) in memory; K is padded with zeros to whole groups.
//
// A thread has 16 elements of a group, a block, and BLOCKS threads a group. The rotation has four stages within a block
// and log2(BLOCKS) among blocks. For these the elements change hands through shared memory, so that a thread has the same
// elements of each block, and back. Without INNER (inner = 1) adjacent lanes have a group, whose blocks are read and written
// by 16-byte words where rows are whole blocks; with it adjacent lanes have the same block of adjacent inner positions.
//
// Macros: DTYPE; BLOCKS (1, 2, 4, 8); INNER; PACKED (codes uint8 [rows, K / 2] and scales uint8 [rows, K / 16] in place
//   of values DTYPE (outer, K, inner)); MEASURE (only the finite amax of what is rotated, into cell, zero before).
// Arguments: amax float32 [1], of what is rotated; rotation, random: uint64 {seed, offset}; middle: rows are numbered
//   with the last `middle` of `outer` innermost.
// Launch: block 256, which has 256 / BLOCKS slots; grid ceil(outer * groups / slots), with INNER
//   outer * groups * ceil(inner / slots).
#include "channels.cuh"

constexpr int BLOCK = 16, GROUP = BLOCK * BLOCKS, SLOTS = 256 / BLOCKS;
constexpr int SHARE = BLOCK / BLOCKS;  // elements of each block that a thread has for the stages among blocks
constexpr int SPREAD = BLOCK + 1;      // of a block in shared memory: no bank conflicts
constexpr int PITCH = BLOCKS * SPREAD + (INNER ? 1 - BLOCKS % 2 : 0);  // of a group; odd with INNER
constexpr float NORM = BLOCKS == 8 ? 0.08838834764831845f : BLOCKS == 4 ? 0.125f : BLOCKS == 2 ? 0.17677669529663687f : 0.25f;
constexpr float SHRINK = 0.98812500000000003f;

// a + b and a - b of elements that are First, 2 First, 4 First ... apart.
template <int First> __device__ __forceinline__ void butterflies(float (&v)[BLOCK]) {
#pragma unroll
    for (int step = First; step < BLOCK; step *= 2)
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
}

// One of the two E4M3 neighbours of d in [0, 448], with the mean d to 1/256 of their distance. NaN stays.
__device__ __forceinline__ float round_stochastically(float d, uint32_t byte) {
    if (d != d) return d;
    const float nearest = fp4::round_e4m3(fminf(d, 448.f));
    const uint32_t code = fp4::encode_e4m3(nearest), low = nearest > d && code ? code - 1 : code;
    const float below = fp4::decode_e4m3(low), above = fp4::decode_e4m3(low + 1 < 0x7Eu ? low + 1 : 0x7Eu);
    // The neighbours are a power of two apart, whose inverse has the bits 0x7F000000 - its own.
    const float inverse = fp4::from_bits(0x7F000000u - fp4::bits(above - below));
    const float distance = above > below ? (d - below) * inverse : 0.f;
    return float(byte) * (1.f / 256.f) < distance ? above : below;
}

extern "C" __global__ void __launch_bounds__(256) ms_eden(
    const DTYPE* x, const float* amax, const uint64_t* rotation, const uint64_t* random, void* out, uint8_t* scales,
    int* cell, long long outer, long long K, long long inner, long long middle) {
    __shared__ float shared[BLOCKS > 1 ? SLOTS * PITCH : 1];
    const int slot = INNER ? threadIdx.x % SLOTS : threadIdx.x / BLOCKS;
    const int block = INNER ? threadIdx.x / SLOTS : threadIdx.x % BLOCKS;
    const long long groups = (K + GROUP - 1) / GROUP;
    long long o, group, in = 0;
    bool has;
#if INNER
    const uint32_t wide = uint32_t((inner + SLOTS - 1) / SLOTS), rest = blockIdx.x / wide;
    in = (long long)(blockIdx.x - rest * wide) * SLOTS + slot;
    o = rest / uint32_t(groups), group = rest - o * groups, has = in < inner;
#else
    const long long at = (long long)blockIdx.x * SLOTS + slot;
    has = at < outer * groups;
    o = outer * groups < 0xFFFFFFFFLL ? uint32_t(at) / uint32_t(groups) : at / groups, group = at - o * groups;
#endif
    const long long k = group * GROUP + block * BLOCK, padded = groups * GROUP;
    const DTYPE* source = x + (o * K + k) * inner + in;
    float v[BLOCK];
    const bool words = !INNER && K % BLOCK == 0 && reinterpret_cast<uint64_t>(x) % 16 == 0;
    if (words && has && k < K) {
        channels::load(source, channels::halves(v)[0]);
        channels::load(source + BLOCK / 2, channels::halves(v)[1]);
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) v[i] = !words && has && k + i < K ? widen(source[i * inner]) : 0.f;
    }

    // What all groups have: the bits of signs, element i's at the place i, and the scales of the whole.
    __shared__ uint32_t signs[BLOCKS];
    __shared__ float global[2];
    if (threadIdx.x < BLOCKS) {
        const fp4::Words words = fp4::philox(threadIdx.x, rotation[0], rotation[1]);
        uint32_t mask = 0;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) mask |= (words.w[i / 4] >> (8 * (i % 4)) & 1u) << i;
        signs[threadIdx.x] = mask;
    }
#if !MEASURE
    if (threadIdx.x == 32) {
        const float shrunk = *amax * SHRINK;
        global[0] = shrunk, global[1] = shrunk > 0.f ? fminf(256.f / shrunk, fp4::FLOAT_MAX) : 0.f;
    }
#endif
    __syncthreads();
    const uint32_t minus = signs[block];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) v[i] = fp4::from_bits(fp4::bits(v[i]) ^ (minus << (31 - i) & 0x80000000u));
    butterflies<1>(v);
    if (BLOCKS > 1) {
        float* own = shared + slot * PITCH;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) own[block * SPREAD + i] = v[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) v[i] = own[i / SHARE * SPREAD + SHARE * block + i % SHARE];
        butterflies<SHARE>(v);
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) own[i / SHARE * SPREAD + SHARE * block + i % SHARE] = v[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) v[i] = own[block * SPREAD + i];
    }
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        v[i] *= NORM;
        largest = fp4::nan_max(largest, fabsf(v[i]));
    }
#if MEASURE
    float measured = largest;
    if (!fp4::is_finite(largest)) {
        measured = 0.f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) measured = fmaxf(measured, fp4::is_finite(v[i]) ? fabsf(v[i]) : 0.f);
    }
    fp4::raise_by_block(cell, measured);
#else
    __shared__ float sums[2][SLOTS][BLOCKS + 1];
    const float shrunk = global[0], d = largest * SHRINK * global[1], inverse = 1.f / (6.f * 256.f);
    const float d8 = d == d ? fp4::round_e4m3(fminf(d, 448.f)) : d, step = (d8 * shrunk) * inverse;
    const float encode = step > 0.f ? fminf(1.f / step, fp4::FLOAT_MAX) : 0.f;
    float squares = 0.f, projection = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        const float u = v[i] * encode, q = fp4::round_e2m1(u);
        squares += v[i] * v[i];
        projection += (v[i] * q) * step;
        v[i] = PACKED ? u : copysignf(q, u + 0.f);
    }
    sums[0][slot][block] = squares, sums[1][slot][block] = projection;
    __syncthreads();
    if (!has) return;
    squares = 0.f, projection = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) squares += sums[0][slot][i], projection += sums[1][slot][i];
    const float correction = projection > 0.f ? squares / projection : 1.f;
    const long long image = middle == 1 ? o : o / middle, row = (image * inner + in) * middle + (o - image * middle);
    const long long place = row * groups * BLOCKS + group * BLOCKS + block;
    const uint32_t byte = fp4::philox(place, random[0], random[1]).w[0] & 0xFFu;
    const bool broken = !fp4::is_finite(largest);
    const float rounded = broken ? fp4::quiet_nan() : round_stochastically(d8 * correction, byte);
#if PACKED
    uint2 codes = broken ? uint2{} : uint2{fp4::encode_eight(v), fp4::encode_eight(v + 8)};
    static_cast<uint2*>(out)[place] = codes;
    scales[place] = fp4::encode_e4m3(rounded);
#else
    const float unit = (rounded * shrunk) * inverse;
    DTYPE* target = static_cast<DTYPE*>(out) + (o * padded + k) * inner + in;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) v[i] *= unit;  // NaN, all of them, where one is not finite
#if INNER
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) narrow(v[i], target[i * inner]);
#else
    channels::store(target, channels::halves(v)[0]);
    channels::store(target + BLOCK / 2, channels::halves(v)[1]);
#endif
#endif
#endif
}
