// Quantisation of a tensor seen as (outer, K, inner) in memory, in blocks along K, without a transposed copy.
//
//   INNER 0   inner = 1: K is last in memory (rows of a matrix, channels of a channels_last feature map)
//   INNER n   elements of K are `inner` apart (channels of NCHW, OIHW); a thread has n adjacent inner positions
//
// A thread holds 16 elements along K, a group, in registers (INNER n: n groups; MXFP4: 32 elements, or with INNER 0 two
// adjacent lanes). Row r = outer * inner + i in memory order; G groups a row, the K of the last one padded with zeros.
//
// Macros: DTYPE; FORMAT 0 NVFP4, 1 NVFP4 with 4/6, 2 MXFP4 floor, 3 MXFP4 ceil; E 448 or 256; SQUARED and FAST of 4/6;
//   LINEAR (inner = 1, K whole blocks, 16-byte alignment: a group is found without a division); BIG (2^31 threads or
//   more); STOCHASTIC; HADAMARD; ROWS (a global amax a row); PACKED 0 fake quantisation, 1 codes and scales, 2 with the
//   scales in the 128x4 layout, 3 only the finite amax (out: int32 [1], zero before); IN_RANGE (write the in-range mask,
//   a bit |x e| <= 6 an element: 0 where the element was clipped and the straight-through estimator has no gradient).
// Arguments: x; amax float32 [1 or rows]; random uint64 {seed, offset}; out DTYPE (outer, K padded to 16 with HADAMARD,
//   inner) or codes uint8 [rows, 8 G]; scales uint8 [rows, G] (MXFP4: [rows, G / 2]); in_range uint16 (outer, G,
//   inner); outer, K, inner int64.
// Launch: block 256, grid ceil(threads / 256) with threads = outer * G (INNER 0), outer * blocks * ceil(inner / INNER).
#include "channels.cuh"
#include "groups.cuh"
#include "tensor_core.cuh"

extern "C" __global__ void __launch_bounds__(256) quantize_tensor(
    const DTYPE* x, const float* amax, const uint64_t* random, void* out, uint8_t* scales, uint16_t* in_range,
    long long outer, long long K, long long inner) {
    const View view{K, inner, MX ? (K + 31) / 32 * 2 : (K + 15) / 16};
    const Index thread = (Index)blockIdx.x * 256u + threadIdx.x;
#if LINEAR
    const bool has = thread < (Index)(outer * view.groups);
    const Index o = ROWS || PACKED == 2 ? thread / (Index)view.groups : 0;
    const long long group = (long long)(thread - o * (Index)view.groups), k = group * 16, in = 0;
#else
    const Index blocks = (Index)(view.groups / GROUPS), wide = (Index)((inner + WIDTH - 1) / WIDTH);
    const bool has = thread < (Index)outer * blocks * wide;
    const Index rest = INNER ? thread / wide : thread, o = rest / blocks;
    const long long in = (long long)(INNER ? thread - rest * wide : 0) * WIDTH;
    const long long group = (long long)(rest - o * blocks) * GROUPS, k = group * 16;
#endif
#if INNER
    const DTYPE* source = x + ((long long)o * K + k) * inner + in;
    Neighbours raw[LENGTH];
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) {
        raw[i] = Neighbours{};
        if (has && k + i < K) raw[i] = *reinterpret_cast<const Neighbours*>(source + i * inner);
    }
    const fp4::SharedPhilox& philox = shared_philox(random);
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
        float v[LENGTH];
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) v[i] = widen(raw[i].value[w]);
        const long long row = (long long)o * inner + in + w;
        transform(v);
        quantize(
            v, global_scale(amax, row, has), philox, static_cast<uint8_t*>(out), scales, in_range, view, row, group,
            ((long long)o * view.groups + group) * inner + in + w, has);
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) raw[i].value[w] = narrow<DTYPE>(v[i]);
    }
#if PACKED == 0
    DTYPE* target = static_cast<DTYPE*>(out) + ((long long)o * view.padded() + k) * inner + in;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i)
        if (has && k + i < view.padded()) *reinterpret_cast<Neighbours*>(target + i * inner) = raw[i];
#endif
#else
    float v[LENGTH] = {};
#if LINEAR
    uint4 raw[sizeof(DTYPE)];
    DTYPE* values = reinterpret_cast<DTYPE*>(raw);
#pragma unroll
    for (int i = 0; i < sizeof(DTYPE); ++i)
        raw[i] = has ? reinterpret_cast<const uint4*>(x)[(long long)thread * sizeof(DTYPE) + i] : uint4{};
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = widen(values[i]);
#else
    const DTYPE* source = x + (long long)o * K + k;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = has && k + i < K ? widen(source[i]) : 0.f;
#endif
    const fp4::SharedPhilox& philox = shared_philox(random);
    transform(v);
    quantize(
        v, global_scale(amax, o, has), philox, static_cast<uint8_t*>(out), scales, in_range, view, o, group,
        (long long)o * view.groups + group, has);
#if PACKED == 0
    if (!has) return;
#if LINEAR
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = narrow<DTYPE>(v[i]);
#pragma unroll
    for (int i = 0; i < sizeof(DTYPE); ++i)
        static_cast<uint4*>(out)[(long long)thread * sizeof(DTYPE) + i] = raw[i];
#else
    DTYPE* target = static_cast<DTYPE*>(out) + (long long)o * view.padded() + k;
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (k + i < view.padded()) target[i] = narrow<DTYPE>(v[i]);
#endif
#endif
#endif
}

#ifdef VECTORS
// The plain case, bound by memory bandwidth. A block of 16 is spread over adjacent lanes, 16 bytes each, so that the
// loads and stores of a warp are coalesced. A thread has VECTORS of these, all loaded before the first is used (loads
// in flight). With MEASURE, `own` int32 [1], zero before, becomes the bits of the finite amax of x.
// Launch: block 256, grid ceil(outer * K * sizeof(DTYPE) / (16 * 256 * VECTORS)).
constexpr int PER_LANE = 16 / sizeof(DTYPE);
constexpr int LANES = (MX ? 32 : 16) / PER_LANE;

extern "C" __global__ void __launch_bounds__(256) fake_quantize_rows(
    const DTYPE* x, const float* amax, void* out, uint8_t* in_range, int* own, long long vectors) {
    const long long first = (long long)blockIdx.x * 256 * VECTORS + threadIdx.x;
    uint4 raw[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        raw[j] = first + j * 256 < vectors ? reinterpret_cast<const uint4*>(x)[first + j * 256] : uint4{};
    // The divisions of the global scale are done once a block, while the loads are in flight.
    __shared__ fp4::GlobalScale shared;
    if (!MX && threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    __syncthreads();
    const fp4::GlobalScale global = shared;
#if MEASURE
    float measured = 0.f;
#endif
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const DTYPE* in = reinterpret_cast<const DTYPE*>(raw + j);
        float v[PER_LANE], largest = 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            v[i] = widen(in[i]);
            largest = fp4::nan_max(largest, fabsf(v[i]));
        }
#if MEASURE
        // NaN and Inf do not count; only then elements are looked at one by one.
        if (largest < INFINITY) {
            measured = fmaxf(measured, largest);
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) measured = fmaxf(measured, finite_magnitude(v[i]));
        }
#endif
#pragma unroll
        for (int offset = 1; offset < LANES; offset *= 2)
            largest = fp4::nan_max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        const BlockScale block = MX ? fp4::mx_scale(largest, FORMAT == 3) : fp4::block_scale(largest, global);
        uint32_t bits = 0u;
        uint4 packed;
        DTYPE* values = reinterpret_cast<DTYPE*>(&packed);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            float u = v[i] * block.encode;
            bits |= (fabsf(u) <= 6.f ? 1u : 0u) << i;
            values[i] = narrow<DTYPE>(block.step * fp4::round_e2m1(u));
        }
        if (first + j * 256 < vectors) static_cast<uint4*>(out)[first + j * 256] = packed;
#if IN_RANGE
        // A byte of the mask has eight elements: with float32, those of two lanes.
        if (PER_LANE == 4) bits |= __shfl_xor_sync(0xffffffffu, bits, 1) << 4;
        if (first + j * 256 < vectors && (PER_LANE == 8 || threadIdx.x % 2 == 0))
            in_range[(first + j * 256) / (8 / PER_LANE)] = uint8_t(bits);
#endif
    }
#if MEASURE
    fp4::raise_by_block(own, measured);
#endif
}
#endif

#ifdef HELD
// Row-scaled: the threads of one threadIdx.y copy a row to shared memory, find its amax and quantise it, so that x is
// read once. Vectors of 16 bytes change places there, so that threads that read whole groups meet in no bank. LINEAR.
// amax float32 [outer] becomes that of each row.
// Launch: block (threads, rows), the threads of a row a power of two or, with one row, any multiple of 32, in all at
//   least 32 and at most 512; grid ceil(outer / rows); shared memory rows * pitch(K), see `operators`.
constexpr int PIECES = sizeof(DTYPE);  // vectors of a group
__device__ __forceinline__ uint32_t place_of(uint32_t vector) { return vector ^ (vector >> 3 & 3u); }

__device__ __forceinline__ void load_group(const uint4* row, uint32_t group, float (&v)[16]) {
    uint4 raw[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) raw[i] = row[place_of(group * PIECES + i)];
    const DTYPE* values = reinterpret_cast<const DTYPE*>(raw);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = widen(values[i]);
    transform(v);
}

extern "C" __global__ void __launch_bounds__(512) quantize_row_scaled(
    const DTYPE* x, float* amax, const uint64_t* random, void* out, uint8_t* scales, uint16_t* in_range,
    long long outer, long long K) {
    extern __shared__ uint4 rows[];
    const fp4::SharedPhilox& philox = shared_philox(random);
    const View view{K, 1, K / 16};
    const uint32_t groups = uint32_t(view.groups), vectors = groups * PIECES, threads = blockDim.x;
    uint4* own = rows + threadIdx.y * ((vectors + 3) / 4 * 4);
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const bool has = row < outer;
    const uint4* source = reinterpret_cast<const uint4*>(x + row * K);
    for (uint32_t at = threadIdx.x; has && at < vectors; at += threads)
        copy_16_bytes(shared_address(own + place_of(at)), source + at, true);
    wait_for_copies();
    __syncthreads();
    float largest = 0.f, v[16];
    for (uint32_t group = threadIdx.x; has && group < groups; group += threads) {
        load_group(own, group, v);
        const float of_group = largest_of(v);
        // NaN and Inf do not count; only then elements are looked at one by one.
        if (of_group < INFINITY) {
            largest = fmaxf(largest, of_group);
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) largest = fmaxf(largest, finite_magnitude(v[i]));
        }
    }
    largest = threads > 32 ? fp4::block_max(largest) : fp4::warp_max(largest, threads);
    if (has && threadIdx.x == 0) amax[row] = largest;
    const fp4::GlobalScale global = fp4::global_scale<E>(largest);
    for (uint32_t group = threadIdx.x; has && group < groups; group += threads) {
        const long long place = row * view.groups + group;
        load_group(own, group, v);
        quantize(v, global, philox, static_cast<uint8_t*>(out), scales, in_range, view, row, group, place, true);
#if PACKED == 0
        channels::store(static_cast<DTYPE*>(out) + place * 16, channels::halves(v)[0]);
        channels::store(static_cast<DTYPE*>(out) + place * 16 + 8, channels::halves(v)[1]);
#endif
    }
}
#endif

#ifdef PAIR
// The same for elements of K that are `inner` apart, inner even and K whole blocks. A thread has two adjacent
// positions: their 16-bit values share a register, which keeps the register count low and enough loads in flight.
// Launch: block 256, grid ceil(outer * K / 16 * inner / 2 / 256).
__device__ __forceinline__ __half2 magnitude_max(__half2 a, __half2 b) { return __hmax2_nan(a, __habs2(b)); }
__device__ __forceinline__ __nv_bfloat162 magnitude_max(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __hmax2_nan(a, __habs2(b));
}
__device__ __forceinline__ PAIR largest_of(const PAIR (&values)[16]) {
    PAIR largest = magnitude_max(__habs2(values[0]), values[1]);
#pragma unroll
    for (int i = 2; i < 16; ++i) largest = magnitude_max(largest, values[i]);
    return largest;
}

extern "C" __global__ void __launch_bounds__(256) fake_quantize_columns(
    const PAIR* x, const float* amax, PAIR* out, uint16_t* in_range, int* own, long long outer, long long K,
    long long inner) {
    const Index wide = (Index)(inner / 2), thread = (Index)blockIdx.x * 256u + threadIdx.x, row = thread / wide;
    const bool has = row < (Index)(outer * (K / 16));
    const long long first = (long long)row * 16 * wide + (thread - row * wide);
    __shared__ fp4::GlobalScale shared;
    PAIR values[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (has) values[i] = x[first + i * (long long)wide];
    if (threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    __syncthreads();
    const float2 both = has ? widen(largest_of(values)) : float2{};
#if MEASURE
    float measured = fmaxf(both.x, both.y);
    if (!(both.x < INFINITY && both.y < INFINITY)) {
        measured = 0.f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float2 v = widen(values[i]);
            measured = fmaxf(measured, fmaxf(finite_magnitude(v.x), finite_magnitude(v.y)));
        }
    }
    fp4::raise_by_block(own, measured);
#endif
    if (!has) return;
    const fp4::GlobalScale global = shared;
    const BlockScale low = fp4::block_scale(both.x, global), high = fp4::block_scale(both.y, global);
    uint32_t bits[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float2 v = widen(values[i]);
        v.x *= low.encode, v.y *= high.encode;
        bits[0] |= (fabsf(v.x) <= 6.f ? 1u : 0u) << i;
        bits[1] |= (fabsf(v.y) <= 6.f ? 1u : 0u) << i;
        v = make_float2(low.step * fp4::round_e2m1(v.x), high.step * fp4::round_e2m1(v.y));
        PAIR pair;
        narrow(v, pair);
        out[first + i * (long long)wide] = pair;
    }
#if IN_RANGE
    reinterpret_cast<uint32_t*>(in_range)[(long long)row * wide + (thread - row * wide)] = bits[0] | bits[1] << 16;
#endif
}
#endif

// Backward of the clipped straight-through estimator: out = gradient where the bit of the in-range mask is set, else 0.
// A thread has a group of 16 along K, so that it computes its index once and reads its mask once.
// Launch: block 256, any grid.
extern "C" __global__ void __launch_bounds__(256) mask_gradient(
    const DTYPE* gradient, const uint16_t* in_range, DTYPE* out, long long outer, long long K, long long inner,
    long long groups) {
    const long long count = outer * groups * inner, stride = (long long)gridDim.x * blockDim.x;
    const bool aligned = ((reinterpret_cast<uint64_t>(gradient) | reinterpret_cast<uint64_t>(out)) & 15) == 0;
    const bool vectors = inner == 1 && K % 16 == 0 && aligned;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) {
        if (vectors) {
            const uint32_t bits = in_range[at];
            uint4 raw[sizeof(DTYPE)];
#pragma unroll
            for (int i = 0; i < (int)sizeof(DTYPE); ++i)
                raw[i] = reinterpret_cast<const uint4*>(gradient)[at * (int)sizeof(DTYPE) + i];
            DTYPE* values = reinterpret_cast<DTYPE*>(raw);
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (!(bits >> i & 1u)) values[i] = narrow<DTYPE>(0.f);
#pragma unroll
            for (int i = 0; i < (int)sizeof(DTYPE); ++i)
                reinterpret_cast<uint4*>(out)[at * (int)sizeof(DTYPE) + i] = raw[i];
            continue;
        }
        long long row, in;  // row: of groups; 32-bit divisions where they suffice, because a 64-bit one costs as much as the rest
        if (count <= 0xFFFFFFFFLL) {
            row = (uint32_t)at / (uint32_t)inner, in = (uint32_t)at % (uint32_t)inner;
        } else {
            row = at / inner, in = at % inner;
        }
        const long long o = count <= 0xFFFFFFFFLL ? (uint32_t)row / (uint32_t)groups : row / groups;
        const long long k = (row - o * groups) * 16, first = (o * K + k) * inner + in;
        const uint32_t bits = in_range[at];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (k + i < K)
                out[first + i * inner] = bits >> i & 1u ? gradient[first + i * inner] : narrow<DTYPE>(0.f);
    }
}
