// Packs contiguous rows to NVFP4 with 4/6: each group is scaled to 6 or to 4, whichever has the smaller error (see
// rows.cuh).
//
// `four_over_six.cuh` has the arithmetic of an ordinary group and reports where it is not sure. Each thread block first
// makes a table of all 128 scales in shared memory, so that the loop contains no division. About one group in 1000 to
// 5000 of normally distributed values is not sure.
//
// Macros: DTYPE __half or __nv_bfloat16; E; SQUARED, FAST.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256, persistent: a multiple of three blocks a multiprocessor, or fewer.
#include "four_over_six.cuh"
#include "rows.cuh"

#ifndef SQUARED
#define SQUARED 0
#endif
#ifndef FAST
#define FAST 0
#endif

__device__ __forceinline__ uint32_t unit_of(__half*) { return 0x2000u; }
__device__ __forceinline__ uint32_t unit_of(__nv_bfloat16*) { return 0x10000u; }

struct Shared {
    GlobalScale global;
    fp4::Counting counting[fp4::SCALES];
    uint2 ties[fp4::SCALES];
    bool care[fp4::SCALES];
};

// The same in all threads: the global scale, `one` of `choose`, and whether any scale has ties to correct.
struct Known {
    float to_scaled;
    uint32_t one;
    bool odd, quarter, care;
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
    const uint32_t bytes = fp4::candidate_bytes(fp4::sixth_of(largest) * known.to_scaled);
    const fp4::Counting six = shared.counting[bytes & 0xFFu], four = shared.counting[bytes >> 8];
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    const fp4::Choice chosen = fp4::choose<SQUARED>(v, largest, six, four, known.one);
    uint32_t sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = chosen.four ? chosen.to_four.sum[i] : chosen.to_six.sum[i];
    const uint32_t scale = chosen.four ? bytes >> 8 : bytes;
    bool sure = chosen.sure;
    if (known.odd) fp4::odd_to_even(sum, shared.ties[scale & 0xFFu].x, known.one);
    if (known.quarter) fp4::quarter_to_zero(sum, w, shared.ties[scale & 0xFFu].y);
    if (known.care) sure = sure && !(shared.care[scale & 0xFFu] && fp4::has_middle(sum));
    return {make_uint2(fp4::codes_of_steps(sum), fp4::codes_of_steps(sum + 4)), scale, sure};
}

// The steps of a candidate, ties corrected.
__device__ __forceinline__ void count(
    const float (&v)[16], const uint32_t (&w)[8], float encode, uint2 ties, uint32_t (&sum)[8]) {
    fp4::count_steps(v, encode, sum);
    fp4::odd_to_even(sum, ties.x, 1u);
    fp4::quarter_to_zero(sum, w, ties.y);
}

// A group that `pack` is not sure of, read again, so that its registers need not be kept. If nothing saturates and no
// ties need care, only the choice of the candidate is open: the errors are summed as in the contract. Not inlined: it
// is rare.
__device__ __noinline__ Packed decide(const uint4* first, const uint4* second, const Shared* shared) {
    const Group group = {*first, *second};
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const uint32_t bytes = fp4::candidate_bytes(fp4::sixth_of(largest) * shared->global.scale);
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
        count(v, w, (i ? six : four).encode, shared->ties[i ? bytes & 0xFFu : bytes >> 8], sum);
        error[i] = fp4::exact_error<SQUARED, FAST>(v, sum, (i ? six : four).d8, shared->global);
    }
    if (error[0] < error[1]) count(v, w, four.encode, shared->ties[bytes >> 8], sum);
    return {make_uint2(fp4::codes_of_steps(sum), fp4::codes_of_steps(sum + 4)), (error[0] < error[1] ? four : six).d8};
}

extern "C" __global__ void __launch_bounds__(256, 3) pack_rows_4o6(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups) {
    __shared__ Shared shared;
    const long long first = (long long)blockIdx.x * 256 + threadIdx.x;
    const uint32_t stride = gridDim.x * 256u;
    Group words = load(x, first, groups);
    if (threadIdx.x == 0) shared.global = fp4::global_scale<E>(*amax);
    __syncthreads();
    fp4::Ties found = {0u, fp4::NO_ELEMENT, false};
    if (threadIdx.x < fp4::SCALES) {
        constexpr DTYPE* tag = nullptr;
        const bool ordinary = is_ordinary(shared.global);
        shared.counting[threadIdx.x] = fp4::counting_of(threadIdx.x, shared.global, ordinary, unit_of(tag), found);
        shared.ties[threadIdx.x] = make_uint2(found.odd, found.quarter);
        shared.care[threadIdx.x] = found.care;
    }
    Known known;
    known.to_scaled = shared.global.scale;
    known.odd = __syncthreads_or(found.odd != 0u);
    known.quarter = __syncthreads_or(found.quarter != fp4::NO_ELEMENT);
    known.care = __syncthreads_or(found.care);
    known.one = 1u + uint32_t((unsigned long long)groups >> 63);
    // Groups of this thread; the count fits 32 bits.
    const uint32_t own = first < groups ? uint32_t((groups - first - 1) / stride) + 1u : 0u;
    x += 2 * first, codes += first, scales += first;
    auto fetch = [&](uint32_t i) -> Group {
        if (i >= own) return {};
        const size_t at = size_t(i) * stride;
        return {x[2 * at], x[2 * at + 1]};
    };
    for (uint32_t i = 0; i < own; ++i) {
        const Group next = fetch(i + 1);  // in flight while this group is computed
        const size_t at = size_t(i) * stride;
        Quick quick = pack(words, shared, known);
        if (!quick.sure) {
            const Packed packed = decide(x + 2 * at, x + 2 * at + 1, &shared);
            quick.codes = packed.codes, quick.scale = fp4::encode_e4m3(packed.d8);
        }
        codes[at] = quick.codes;
        scales[at] = uint8_t(quick.scale);
        words = next;
    }
}
