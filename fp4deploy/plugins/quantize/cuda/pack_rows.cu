// Packs contiguous rows to NVFP4, bound by memory bandwidth (see rows.cuh).
//
// Macros: DTYPE __half or __nv_bfloat16; E.
// x: DTYPE [groups, 16], 16-byte aligned; amax float32 [1]; codes uint8 [groups, 8]; scales uint8 [groups].
// Launch: block 256, persistent: at most four blocks a multiprocessor.
#include "rows.cuh"

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
        const uint4* again = x + 2 * group;
        const Packed packed =
            pack(words, global, [&] { return with_care<false, false, false>(again, again + 1, &shared); });
        codes[group] = packed.codes;
        scales[group] = uint8_t(fp4::encode_e4m3(packed.d8));
        words = next;
    }
}
