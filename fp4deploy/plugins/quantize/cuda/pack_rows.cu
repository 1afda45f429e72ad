// Packs contiguous rows to NVFP4, bound by memory bandwidth (see rows.cuh).
//
// Macros: DTYPE __half or __nv_bfloat16; E; STOCHASTIC; SWIZZLED: scales in the 128x4 layout of cuBLASLt and tcgen05.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups], or of whole
//   tiles; random uint64 {seed, offset}; width: groups of a row. STOCHASTIC and SWIZZLED have fewer than 2^31 groups.
// Launch: block 256, persistent: at most four blocks a multiprocessor. HELD: `pack_row_scaled` as well, see below.
#include "rows.cuh"
#include "tensor_core.cuh"

#ifndef STOCHASTIC
#define STOCHASTIC 0
#endif
#ifndef SWIZZLED
#define SWIZZLED 0
#endif

// Where a scale is: in tiles of 128 rows x 4, rows 32 apart adjacent. A thread advances by the same number of groups each
// time, which takes no division, and mostly stays in its column.
struct Place {
    uint32_t row, k, rows, ks, width, pitch;
    size_t column;

    __device__ __forceinline__ Place(uint32_t group, uint32_t step, uint32_t width)
        : row(group / width), k(group % width), rows(step / width), ks(step % width), width(width),
          pitch((width + 3) / 4 * 512), column(k / 4 * 512 + k % 4) {}
    __device__ __forceinline__ void advance() {
        row += rows;
        if (!ks) return;
        k += ks;
        if (k >= width) k -= width, ++row;
        column = k / 4 * 512 + k % 4;
    }
    __device__ __forceinline__ size_t index() const {
        return column + (row % 32 * 16 + row / 32 % 4 * 4) + size_t(row / 128) * pitch;
    }
};

#if STOCHASTIC
// As `with_care`.
__device__ __noinline__ Packed with_care_at_random(
    const uint4* first, const uint4* second, const GlobalScale* shared, const fp4::SharedPhilox* philox, uint32_t group) {
    const fp4::Words random = philox->words(group);
    return each_element<false, false, false>({*first, *second}, *shared, &random);
}
#endif

extern "C" __global__ void __launch_bounds__(256, 4) pack_rows(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups, const uint64_t* random, int width) {
    const long long stride = (long long)gridDim.x * 256;
    long long group = (long long)blockIdx.x * 256 + threadIdx.x;
    Group words = load(x, group, groups);
    // The divisions of the global scale are done once a block, as are the keys of Philox.
    __shared__ GlobalScale shared;
#if STOCHASTIC
    __shared__ fp4::SharedPhilox philox;
    philox.set(random);
#endif
    if (threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    __syncthreads();
    const GlobalScale global = shared;
#if SWIZZLED
    Place place(uint32_t(group), uint32_t(stride), width);
#endif
    for (; group < groups; group += stride) {
        const Group next = load(x, group + stride, groups);  // in flight while this group is computed
        const uint4* again = x + 2 * group;
#if STOCHASTIC
        const auto codes_of_group = [&](const uint32_t (&w)[8], const float (&v)[16], float scale) {
            return encode(w, v, scale, philox.words(uint32_t(group)));
        };
        const auto slow = [&] { return with_care_at_random(again, again + 1, &shared, &philox, uint32_t(group)); };
        const Packed packed = pack(words, global, slow, codes_of_group);
#else
        const Packed packed =
            pack(words, global, [&] { return with_care<false, false, false>(again, again + 1, &shared); });
#endif
        codes[group] = packed.codes;
#if SWIZZLED
        scales[place.index()] = uint8_t(fp4::encode_e4m3(packed.d8));
        place.advance();
#else
        scales[group] = uint8_t(fp4::encode_e4m3(packed.d8));
#endif
        words = next;
    }
}

#ifdef HELD
// Row-scaled: as `quantize_row_scaled` of quantize.cu, which has the launch. A thread finds the amax of what it copied itself.
__device__ __forceinline__ uint32_t place_of(uint32_t vector) { return vector ^ (vector >> 3 & 3u); }

// As `with_care`, with the global scale of a row.
__device__ __noinline__ Packed with_care_of_row(const uint4* first, const uint4* second, float amax) {
    return each_element<false, false, false>({*first, *second}, fp4::global_scale<E>(amax));
}

// The largest finite magnitude of the words joined by `larger`, whose elements are looked at only if one is not finite.
__device__ __forceinline__ float finite_largest(uint32_t most, const uint4* row, uint32_t vectors) {
    constexpr DTYPE* tag = nullptr;
    float low, high, largest;
    widen(most, low, high, tag);
    largest = fp4::nan_max(fabsf(low), fabsf(high));
    if (largest < INFINITY) return largest;
    largest = 0.f;
    for (uint32_t at = threadIdx.x; at < vectors; at += blockDim.x) {
        const uint4 raw = row[place_of(at)];
        const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            widen(w[i], low, high, tag);
            if (fabsf(low) < INFINITY) largest = fmaxf(largest, fabsf(low));
            if (fabsf(high) < INFINITY) largest = fmaxf(largest, fabsf(high));
        }
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(512) pack_row_scaled(
    const uint4* x, float* amax, uint2* codes, uint8_t* scales, long long outer, int groups) {
    extern __shared__ uint4 rows[];
    const uint32_t vectors = 2u * groups, threads = blockDim.x;
    uint4* own = rows + threadIdx.y * ((vectors + 3) / 4 * 4);
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const bool has = row < outer;
    for (uint32_t at = threadIdx.x; has && at < vectors; at += threads)
        copy_16_bytes(shared_address(own + place_of(at)), x + row * vectors + at, true);
    wait_for_copies();
    constexpr DTYPE* tag = nullptr;
    uint32_t most = 0u;
    for (uint32_t at = threadIdx.x; has && at < vectors; at += threads) {
        const uint4 raw = own[place_of(at)];
        most = larger(larger(larger(larger(most, raw.x, tag), raw.y, tag), raw.z, tag), raw.w, tag);
    }
    float largest = has ? finite_largest(most, own, vectors) : 0.f;
    if (threads > 32) {
        largest = fp4::block_max(largest);
    } else {
        __syncwarp();
        largest = fp4::warp_max(largest, threads);
    }
    if (!has) return;
    if (threadIdx.x == 0) amax[row] = largest;
    const GlobalScale global = fp4::global_scale<E>(largest);
    for (uint32_t group = threadIdx.x; group < uint32_t(groups); group += threads) {
        const uint4 *first = own + place_of(2 * group), *second = own + place_of(2 * group + 1);
        const Packed packed = pack({*first, *second}, global, [&] { return with_care_of_row(first, second, largest); });
        codes[row * groups + group] = packed.codes;
        scales[row * groups + group] = uint8_t(fp4::encode_e4m3(packed.d8));
    }
}
#endif
