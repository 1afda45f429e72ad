// Packs contiguous rows to NVFP4, bound by memory bandwidth (see rows.cuh).
//
// Macros: DTYPE __half or __nv_bfloat16; E.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256, persistent: at most four blocks a multiprocessor.
#include "rows.cuh"

__device__ __forceinline__ Packed pack(const Group& group, const uint4* x, const GlobalScale& global, const GlobalScale* shared) {
    const uint32_t w[8] = {group.first.x,  group.first.y,  group.first.z,  group.first.w,
                           group.second.x, group.second.y, group.second.z, group.second.w};
    constexpr DTYPE* tag = nullptr;
    const float largest = largest_of(w);
    const BlockScale block = light_scale(largest * global.sixth, global);
    // All zeros are common (padding, ReLU) and need no codes. Everything unusual takes the slow path.
    if (largest == 0.f && is_ordinary(global)) return {make_uint2(0u, 0u), 0.f};
    if (!is_ordinary(global) || !is_ordinary(block, largest)) return with_care<false, false, false>(x, x + 1, shared);
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) widen(w[i], v[2 * i], v[2 * i + 1], tag);
    return {encode(w, v, block.encode), block.d8};
}

extern "C" __global__ void __launch_bounds__(256, 4) pack_rows(
    const uint4* x, const float* amax, uint2* codes, uint8_t* scales, long long groups) {
    const long long stride = (long long)gridDim.x * 256;
    long long group = (long long)blockIdx.x * 256 + threadIdx.x;
    Group words = load(x, group, groups);
    // The divisions of the global scale are done once a block.
    __shared__ GlobalScale shared;
    if (threadIdx.x == 0) shared = fp4::global_scale<E>(*amax);
    __syncthreads();
    const GlobalScale global = shared;
    for (; group < groups; group += stride) {
        const Group next = load(x, group + stride, groups);  // in flight while this group is computed
        const Packed packed = pack(words, x + 2 * group, global, &shared);
        codes[group] = packed.codes;
        scales[group] = uint8_t(fp4::encode_e4m3(packed.d8));
        words = next;
    }
}
