// Fake quantisation of all weights of a model in two launches: the amax values, then the quantised values.
//
// Weights are many and small, and a launch each would cost more than the work. A table has one row a tensor; a thread
// block finds its tensor by binary search with its block index. float32 in, DTYPE out, in one flat buffer, memory order
// kept.
//
// table: int64 [tensors, 6]: address of the source, first element in `out`, elements, contraction size K, elements
// between neighbours along it, first block. inner = 1: K is last in memory. Otherwise memory is (outer, K, inner).
// Launch: block 256, grid blocks; a block does PER_BLOCK groups of 16 (amax: 16 PER_BLOCK elements).
#include "channels.cuh"

constexpr int PER_BLOCK = 256;

struct Row {
    const float* source;
    long long start, count, K, inner, first;
};

__device__ int tensor_of(const long long* table, int tensors, long long block) {
    int low = 0, high = tensors - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (table[middle * 6 + 5] <= block) low = middle;
        else high = middle - 1;
    }
    return low;
}

__device__ Row row_of(const long long* table, int tensor) {
    const long long* row = table + tensor * 6;
    return {reinterpret_cast<const float*>(row[0]), row[1], row[2], row[3], row[4], row[5]};
}

// amax: float32 [tensors], zero before.
extern "C" __global__ void __launch_bounds__(256) weight_amax(const long long* table, int* amax, int tensors) {
    int tensor = tensor_of(table, tensors, blockIdx.x);
    Row row = row_of(table, tensor);
    long long first = (blockIdx.x - row.first) * PER_BLOCK * 16LL;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        long long at = first + i * 256 + threadIdx.x;
        float v = at < row.count ? fabsf(row.source[at]) : 0.f;
        if (v < INFINITY) largest = fmaxf(largest, v);
    }
    for (int offset = 16; offset; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (threadIdx.x % 32 == 0 && largest > 0.f) atomicMax(amax + tensor, __float_as_int(largest));
}

// A thread has one group of 16 along K; a ragged tail (K not a multiple of 16) counts as zeros.
extern "C" __global__ void __launch_bounds__(256) weight_quantize(
    const long long* table, const float* amax, DTYPE* out, int tensors) {
    int tensor = tensor_of(table, tensors, blockIdx.x);
    Row row = row_of(table, tensor);
    long long groups = (row.K + 15) / 16, lines = row.count / row.K;
    long long group = (blockIdx.x - row.first) * (long long)PER_BLOCK + threadIdx.x;
    if (group >= groups * lines) return;  // the last block of a tensor may be partly empty
    long long k, base;
    if (row.inner == 1) {
        k = group % groups * 16;
        base = group / groups * row.K + k;
    } else {
        long long in = group % row.inner, rest = group / row.inner;
        k = rest % groups * 16;
        base = (rest / groups * row.K + k) * row.inner + in;
    }
    const fp4::GlobalScale scale = fp4::global_scale(amax[tensor]);
    float v[16], largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        v[i] = k + i < row.K ? row.source[base + i * row.inner] : 0.f;
        largest = fp4::nan_max(largest, fabsf(v[i]));
    }
    fp4::BlockScale block = fp4::block_scale(largest, scale);
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (k + i < row.K) out[row.start + base + i * row.inner] = DTYPE(fp4::fake_quantize(v[i], block));
}
