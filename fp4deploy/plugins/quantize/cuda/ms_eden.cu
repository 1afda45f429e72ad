// MS-EDEN (formats/ms_eden.py has the formulas): groups along K, of 16 BLOCKS elements, are rotated, quantised and their
// block scales corrected. The tensor is (outer, K, inner) in memory; K is padded with zeros to whole groups.
//
// A thread has 16 elements of a group, a block, and BLOCKS threads a group. The rotation has four stages within a block
// and log2(BLOCKS) among blocks. For these the elements change hands through shared memory, so that a thread has the same
// elements of each block, and back. Without INNER (inner = 1) adjacent lanes have a group, whose blocks are read and written
// by 16-byte words where rows are whole blocks; with it adjacent lanes have the same block of adjacent inner positions.
//
// Macros: DTYPE; BLOCKS (1, 2, 4, 8); INNER; PACKED (codes uint8 [rows, K / 2] and scales uint8 [rows, K / 16] in place
//   of values DTYPE (outer, K, inner)); MEASURE (only the finite amax of what is rotated, into cell, zero before); COLUMNS
//   (INNER: x is (outer, width, channels), and the tensor that which each of `columns` of a filter reads of it, as in
//   quantize_map.cu, with inner = channels * columns, of each group of channels the columns outermost).
// Arguments: amax float32 [1], of what is rotated; rotation, random: uint64 {seed, offset}; middle: rows are numbered
//   with the last `middle` of `outer` innermost; then those of COLUMNS.
// Launch: block 256, which has 256 / BLOCKS slots; any grid up to ceil(outer * groups / slots), with INNER
//   outer * groups * ceil(inner / slots), with COLUMNS outer * groups * columns * ceil(channels / slots) of each group.
#include "channels.cuh"

#ifndef COLUMNS
#define COLUMNS 0
#endif

constexpr int BLOCK = 16, GROUP = BLOCK * BLOCKS, SLOTS = 256 / BLOCKS;
constexpr int SHARE = BLOCK / BLOCKS;  // elements of each block that a thread has for the stages among blocks
constexpr int ADJACENT = SHARE < 4 ? SHARE : 4;  // of these, in a word of shared memory
// Of a block and of a group in shared memory: no bank conflicts.
constexpr int SPREAD = BLOCK + 4, PITCH = BLOCKS * SPREAD + (BLOCKS == 8 ? BLOCK : 0);
constexpr float NORM = BLOCKS == 8 ? 0.08838834764831845f : BLOCKS == 4 ? 0.125f : BLOCKS == 2 ? 0.17677669529663687f : 0.25f;
constexpr float SHRINK = 0.98812500000000003f;

struct alignas(sizeof(float) * ADJACENT) Adjacent {
    float value[ADJACENT];
};

// Where a block of a slot has an element, which is a multiple of ADJACENT: with INNER lanes of a warp are adjacent slots.
__device__ __forceinline__ int place_of(int slot, int block, int element) {
    if (INNER) return ((block * (BLOCK / 4) + element / 4) * SLOTS + slot) * 4 + element % 4;
    return slot * PITCH + block * SPREAD + element;
}

// A number in a mixed radix, the lowest digit first; adding one to it takes no division.
struct Digits {
    using Radix = uint32_t[4];
    uint32_t digit[5];

    __device__ __forceinline__ Digits(uint32_t number, const Radix& radix) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            digit[i] = number % radix[i];
            number /= radix[i];
        }
        digit[4] = number;
    }
    __device__ __forceinline__ void add(const Digits& step, const Radix& radix) {
        uint32_t carry = 0u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            digit[i] += step.digit[i] + carry;
            carry = digit[i] >= radix[i] ? 1u : 0u;
            if (carry) digit[i] -= radix[i];
        }
        digit[4] += step.digit[4] + carry;
    }
};

// Without INNER the lanes of a group are of one warp.
__device__ __forceinline__ void wait_for_group() {
    if (INNER) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

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
    int* cell, long long outer, long long K, long long inner, long long middle, int width, int columns, int stride,
    int padding, int dilation, int group_channels) {
    __shared__ alignas(16) float shared[BLOCKS > 1 ? (INNER ? BLOCK * 256 : SLOTS * PITCH) : 4];
    const int slot = INNER ? threadIdx.x % SLOTS : threadIdx.x / BLOCKS;
    const int block = INNER ? threadIdx.x / SLOTS : threadIdx.x % BLOCKS;
    const long long groups = (K + GROUP - 1) / GROUP, padded = groups * GROUP, count = outer * groups;
#if INNER
    // What reads one position of x: inner, or the channels of a group that a column reads.
    const uint32_t segment = COLUMNS ? uint32_t(group_channels) : uint32_t(inner);
    const Digits::Radix radix = {
        (segment + SLOTS - 1) / SLOTS, COLUMNS ? uint32_t(inner) / segment : 1u, uint32_t(groups), uint32_t(middle)};
    const long long tiles = count * radix[0] * radix[1];
    Digits now(blockIdx.x, radix);
    const Digits step(gridDim.x, radix);
#else
    const long long tiles = (count + SLOTS - 1) / SLOTS;
#endif
    const bool words = !INNER && K % BLOCK == 0 && reinterpret_cast<uint64_t>(x) % 16 == 0;

    // What all groups have: signs, the scales of the whole, the keys of Philox.
    __shared__ alignas(16) float signs[BLOCKS][BLOCK];
    if (threadIdx.x < BLOCKS) {
        const fp4::Words random_signs = fp4::philox(threadIdx.x, rotation[0], rotation[1]);
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            signs[threadIdx.x][i] = random_signs.w[i / 4] >> (8 * (i % 4)) & 1u ? -1.f : 1.f;
    }
#if !MEASURE
    __shared__ fp4::SharedPhilox philox;
    __shared__ float global[2];
    philox.set(random);
    if (threadIdx.x == 32) {
        const float shrunk = *amax * SHRINK;
        global[0] = shrunk, global[1] = shrunk > 0.f ? fminf(256.f / shrunk, fp4::FLOAT_MAX) : 0.f;
    }
#else
    float measured = 0.f;
#endif
    __syncthreads();
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        long long o = 0, group = 0, in = 0;
#if INNER
        const uint32_t slice = now.digit[0] * SLOTS + slot, part = now.digit[1], line = now.digit[3];
        const long long image = now.digit[4];
        const bool has = slice < segment;
        in = part * segment + slice, group = now.digit[2], o = image * middle + line;
        now.add(step, radix);
#else
        const long long at = tile * SLOTS + slot;
        const bool has = at < count;
        if (outer > 1) o = count < 0xFFFFFFFFLL ? uint32_t(at) / uint32_t(groups) : at / groups;
        group = at - o * groups;
#endif
        const long long k = group * GROUP + block * BLOCK;
        float v[BLOCK];
#if COLUMNS
        const int channels_ = int(inner) / columns, column = part % columns;
        const int channel = part / columns * group_channels + slice;
        const int begin = int(k) * stride - padding + column * dilation, left = has ? int(min((long long)BLOCK, K - k)) : 0;
        const bool whole = left >= BLOCK && begin >= 0 && begin + (BLOCK - 1) * stride < width;
        const auto inside = [&](int i) { return i < left && unsigned(begin + i * stride) < unsigned(width); };
        const DTYPE* source = x + (o * width + begin) * channels_ + channel;
        channels::gather_if(source, (long long)stride * channels_, whole, inside, v);
#else
        const DTYPE* source = x + (o * K + k) * inner + in;
        if (words && has && k < K) {
            channels::load(source, channels::halves(v)[0]);
            channels::load(source + BLOCK / 2, channels::halves(v)[1]);
        } else {
            channels::gather(source, inner, has && !words ? int(min((long long)BLOCK, K - k)) : 0, v);
        }
#endif
        // The first stage, with the signs: products are exact, so that an fma rounds like the sum.
#pragma unroll
        for (int i = 0; i < BLOCK; i += 4) {
            const float4 sign = *reinterpret_cast<const float4*>(&signs[block][i]);
            const float a = v[i] * sign.x, b = v[i + 2] * sign.z;
            v[i] = fmaf(v[i + 1], sign.y, a), v[i + 1] = fmaf(-v[i + 1], sign.y, a);
            v[i + 2] = fmaf(v[i + 3], sign.w, b), v[i + 3] = fmaf(-v[i + 3], sign.w, b);
        }
        butterflies<2>(v);
        if (BLOCKS > 1) {
#pragma unroll
            for (int i = 0; i < BLOCK; i += 4)
                *reinterpret_cast<float4*>(shared + place_of(slot, block, i)) =
                    make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
            wait_for_group();
            const auto share = [&](int i) {
                return reinterpret_cast<Adjacent*>(shared + place_of(slot, i / SHARE, SHARE * block + i % SHARE));
            };
#pragma unroll
            for (int i = 0; i < BLOCK; i += ADJACENT) reinterpret_cast<Adjacent&>(v[i]) = *share(i);
            butterflies<SHARE>(v);
#if !MEASURE
#pragma unroll
            for (int i = 0; i < BLOCK; i += ADJACENT) *share(i) = reinterpret_cast<Adjacent&>(v[i]);
            wait_for_group();
#pragma unroll
            for (int i = 0; i < BLOCK; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(shared + place_of(slot, block, i));
                v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
            }
#endif
        }
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            if (!MEASURE) v[i] *= NORM;
            largest = fp4::nan_max(largest, fabsf(v[i]));
        }
#if MEASURE
        if (fp4::is_finite(largest)) {
            measured = fmaxf(measured, largest);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) measured = fmaxf(measured, fp4::is_finite(v[i]) ? fabsf(v[i]) : 0.f);
        }
        if (BLOCKS > 1) wait_for_group();  // before the next group is written
#else
        const float shrunk = global[0], d = largest * SHRINK * global[1], inverse = 1.f / (6.f * 256.f);
        const float d8 = d == d ? fp4::round_e4m3(fminf(d, 448.f)) : d, step = (d8 * shrunk) * inverse;
        const float encode = step > 0.f ? fminf(1.f / step, fp4::FLOAT_MAX) : 0.f;
        float squares = 0.f, projection = 0.f, q[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            q[i] = fp4::round_magnitude(fabsf(v[i] * encode));
            squares += v[i] * v[i];
            projection += (fabsf(v[i]) * q[i]) * step;
            v[i] = v[i] * encode + 0.f;  // + 0 makes -0 to 0, that of a product that underflows, too
        }
        __shared__ float2 sums[256 + SLOTS];  // of squares, of projections
        const auto sums_of = [&](int i) -> float2& { return sums[INNER ? i * SLOTS + slot : slot * (BLOCKS + 1) + i]; };
        sums_of(block) = make_float2(squares, projection);
        wait_for_group();
        if (!has) continue;
        squares = 0.f, projection = 0.f;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) squares += sums_of(i).x, projection += sums_of(i).y;
        const float correction = projection > 0.f ? squares / projection : 1.f;
#if INNER
        const long long row = (image * inner + in) * middle + line;
#else
        const long long row = o;
#endif
        const long long place = row * groups * BLOCKS + group * BLOCKS + block;
        const uint32_t byte = philox.words(place).w[0] & 0xFFu;
        const bool broken = !fp4::is_finite(largest);
        const float rounded = broken ? fp4::quiet_nan() : round_stochastically(d8 * correction, byte);
#if PACKED
        uint2 codes = {fp4::with_signs(fp4::encode_values(q), v), fp4::with_signs(fp4::encode_values(q + 8), v + 8)};
        if (broken) codes = {};
        static_cast<uint2*>(out)[place] = codes;
        scales[place] = fp4::encode_e4m3(rounded);
#else
        const float unit = (rounded * shrunk) * inverse;
        DTYPE* target = static_cast<DTYPE*>(out) + (o * padded + k) * inner + in;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) v[i] = copysignf(q[i], v[i]) * unit;  // all NaN where one is not finite
#if INNER
        channels::scatter(target, inner, BLOCK, v);
#else
        channels::store(target, channels::halves(v)[0]);
        channels::store(target + BLOCK / 2, channels::halves(v)[1]);
#endif
#endif
#endif
    }
#if MEASURE
    fp4::raise_by_block(cell, measured * NORM);  // rounds as every element does
#endif
}
