// Packed NVFP4 of rows in memory order, each block mapped to 6 or to 4, whichever errs less (see rows.cuh).
//
// `four_over_six.cuh` has the arithmetic of an ordinary group and says where it is not sure; with a table of all scales,
// which each block of threads makes first, nothing is divided in the loop. One normal group in 1000 to 5000 is not sure.
//
// Macros: DTYPE __half or __nv_bfloat16; E; SQUARED, FAST; for comparison ADD_PRODUCT, TENSOR, TWICE, AHEAD, RESIDENT.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256, four blocks a multiprocessor, or fewer.
#include "four_over_six.cuh"
#include "rows.cuh"

#ifndef SQUARED
#define SQUARED 0
#endif
#ifndef FAST
#define FAST 0
#endif
#ifndef ADD_PRODUCT
#define ADD_PRODUCT 1
#endif
#ifndef TENSOR
#define TENSOR 0
#endif
#ifndef TWICE
#define TWICE 0
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef RESIDENT
#define RESIDENT 4
#endif

__device__ __forceinline__ uint32_t unit_of(__half*) { return 0x2000u; }
__device__ __forceinline__ uint32_t unit_of(__nv_bfloat16*) { return 0x10000u; }

// amax / 6 by a product and its correction, rounded like the division where nothing underflows.
__device__ __forceinline__ float sixth_of(float amax) {
    const float guess = amax * (1.f / 6.f);
    return fmaf(fmaf(-6.f, guess, amax), 1.f / 6.f, guess);
}

#if TENSOR  // sums by the tensor cores: a lane's own elements times 1, those of its three neighbours times 0
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t* a, uint32_t b, __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t* a, uint32_t b, __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
// 1 as an element; 0 where the element belongs to another lane
__device__ __forceinline__ uint32_t ones_of(__half*) { return threadIdx.x % 4 == threadIdx.x % 32 / 8 ? 0x3C003C00u : 0u; }
__device__ __forceinline__ uint32_t ones_of(__nv_bfloat16*) { return threadIdx.x % 4 == threadIdx.x % 32 / 8 ? 0x3F803F80u : 0u; }
__device__ __forceinline__ float one_as_half(__half*) { return 1.f; }
__device__ __forceinline__ float one_as_half(__nv_bfloat16*) { return 1.875f; }
// sum of elements, with a sign for whether they are rounded up; of their values
struct Sums {
    float elements, steps;
};
__device__ __forceinline__ Sums signed_sums(
    const uint32_t (&w)[8], const float (&v)[16], float encode, uint32_t one, uint32_t (&sum)[8], uint32_t ones) {
    constexpr DTYPE* tag = nullptr;
    constexpr __half* half = nullptr;
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        uint32_t element[4], value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float low = fmaf(v[2 * (i + j)], encode, 0.f), high = fmaf(v[2 * (i + j) + 1], encode, 0.f);
            sum[i + j] = fp4::truncated_halves(low, high) * one + 0x01000100u;
            element[j] = fp4::merged(w[i + j], sum[i + j] * 128u, 0x7FFF7FFFu);
            value[j] = fp4::merged(sum[i + j] & 0x0E000E00u, element[j], 0x7FFF7FFFu);
        }
        multiply(c, element, ones, tag);
        multiply(d, value, ones, half);
    }
    return {c[0] + c[2], d[0] + d[2]};
}
#endif

struct Shared {
    GlobalScale global;
    fp4::Counting counting[fp4::SCALES];
    uint2 ties[fp4::SCALES];
    bool care[fp4::SCALES];
};

// What the whole block knows: the products' 1, and whether there are scales with ties.
struct Known {
    float to_scaled;
    uint32_t one;
    bool ties, care;
#if TENSOR
    uint32_t ones;
#endif
};

struct Quick {
    uint2 codes;
    uint32_t scale;
    bool sure;
};

__device__ __forceinline__ Quick pack(const Group& group, const Shared& shared, const Known& known) {
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const uint32_t bytes = fp4::candidate_bytes(sixth_of(largest) * known.to_scaled);
    const fp4::Counting six = shared.counting[bytes & 0xFFu], four = shared.counting[bytes >> 8];
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
#if TENSOR
    fp4::Chosen chosen;
    const Sums of_six = signed_sums(w, v, six.encode, known.one, chosen.to_six.sum, known.ones);
    const Sums of_four = signed_sums(w, v, four.encode, known.one, chosen.to_four.sum, known.ones);
    const float unit = fp4::COUNTED * one_as_half(tag);
    const float difference = fmaf(
        four.d8, of_four.steps, -fmaf(six.d8, of_six.steps, (of_four.elements - of_six.elements) * (known.to_scaled * unit)));
    chosen.four = difference < 0.f;
    chosen.sure = fabsf(difference) >= 2.44140625e-4f * unit * (six.d8 + four.d8) && largest * six.encode < fp4::LARGEST_COUNTED;
#else
    const fp4::Chosen chosen = fp4::choose<SQUARED>(v, largest, six, four, known.one);
#endif
    uint32_t sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = chosen.four ? chosen.to_four.sum[i] : chosen.to_six.sum[i];
    const uint32_t scale = chosen.four ? bytes >> 8 : bytes;
    bool sure = chosen.sure;
    if (known.ties) {
        const uint2 tie = shared.ties[scale & 0xFFu];
        fp4::step_down(sum, tie.x, tie.y);
    }
    if (known.care) sure = sure && !(shared.care[scale & 0xFFu] && fp4::has_middle(sum));
    return {make_uint2(fp4::codes_of_steps(sum), fp4::codes_of_steps(sum + 4)), scale, sure};
}

// A group that `pack` is not sure of, read again. Only the choice is open where nothing saturates and no tie is.
__device__ __noinline__ Packed decide(const uint4* first, const uint4* second, const Shared* shared) {
    const Group group = {*first, *second};
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const uint32_t bytes = fp4::candidate_bytes(sixth_of(largest) * shared->global.scale);
    if (bytes == 0u && is_ordinary(shared->global)) return {make_uint2(0u, 0u), 0.f};  // below the smallest scale
    const bool care = shared->care[bytes & 0xFFu] || shared->care[bytes >> 8];
    const fp4::Counting six = shared->counting[bytes & 0xFFu], four = shared->counting[bytes >> 8];
    if (care || !(largest * six.encode < fp4::LARGEST_COUNTED))
        return with_care<true, SQUARED, FAST>(first, second, &shared->global);
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    uint32_t sum[8];
    float error[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint2 tie = shared->ties[i ? bytes & 0xFFu : bytes >> 8];
        fp4::count_steps(v, (i ? six : four).encode, sum);
        fp4::step_down(sum, tie.x, tie.y);
        error[i] = fp4::exact_error<SQUARED, FAST>(v, sum, (i ? six : four).d8, shared->global);
    }
    if (error[0] < error[1]) {
        const uint2 tie = shared->ties[bytes >> 8];
        fp4::count_steps(v, four.encode, sum);
        fp4::step_down(sum, tie.x, tie.y);
    }
    return {make_uint2(fp4::codes_of_steps(sum), fp4::codes_of_steps(sum + 4)), (error[0] < error[1] ? four : six).d8};
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT) pack_rows_4o6(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups) {
    __shared__ Shared shared;
    const long long first = (long long)blockIdx.x * 256 + threadIdx.x;
    const uint32_t stride = gridDim.x * 256u;
    Group words = load(x, first, groups);
    if (threadIdx.x == 0) shared.global = fp4::global_scale<E>(*amax);
    __syncthreads();
    fp4::Ties found = {};
    if (threadIdx.x < fp4::SCALES) {
        constexpr DTYPE* tag = nullptr;
        const bool ordinary = is_ordinary(shared.global);
        shared.counting[threadIdx.x] = fp4::counting_of(threadIdx.x, shared.global, ordinary, unit_of(tag), found);
        shared.ties[threadIdx.x] = make_uint2(found.mask, found.pattern);
        shared.care[threadIdx.x] = found.care;
    }
    const bool ties = __syncthreads_or(found.any && !found.care), care = __syncthreads_or(found.care);
    Known known;
    known.to_scaled = shared.global.scale;
    known.ties = ties, known.care = care;
    const int lane = TENSOR ? threadIdx.x % 32 : 0;
#if ADD_PRODUCT
    known.one = 1u + uint32_t((unsigned long long)groups >> 63);
#else
    known.one = 1u;
#endif
#if TENSOR
    constexpr DTYPE* tag = nullptr;
    asm volatile("mov.b32 %0, %1;" : "=r"(known.ones) : "r"(ones_of(tag)));
#endif
    // How many groups this thread has (and the first of its warp), which fits 32 bits.
    const uint32_t own = first < groups ? uint32_t((groups - first - 1) / stride) + 1u : 0u;
    const uint32_t most = first - lane < groups ? uint32_t((groups - (first - lane) - 1) / stride) + 1u : 0u;
    x += 2 * first, codes += first, scales += first;
    auto step = [&](const Group& now, uint32_t i) {
        Quick quick = pack(now, shared, known);
        if (TENSOR && i >= own) return;
        const size_t at = size_t(i) * stride;
        if (!quick.sure) {
            const Packed packed = decide(x + 2 * at, x + 2 * at + 1, &shared);
            quick.codes = packed.codes, quick.scale = fp4::encode_e4m3(packed.d8);
        }
        codes[at] = quick.codes;
        scales[at] = uint8_t(quick.scale);
    };
    auto fetch = [&](uint32_t i) -> Group {
        if (i >= own) return {};
        const size_t at = size_t(i) * stride;
        return {x[2 * at], x[2 * at + 1]};
    };
#if TWICE
    for (uint32_t i = 0; i < most; i += 2) {
        const Group next = fetch(i + 1);
        step(words, i);
        words = fetch(i + 2);
        if (i + 1 < most) step(next, i + 1);
    }
#elif AHEAD
    for (uint32_t i = 0; i < most; ++i) {
        const Group next = fetch(i + 1);
        step(words, i);
        words = next;
    }
#else
    for (uint32_t i = 0; i < most; ++i) step(fetch(i), i);
#endif
}
