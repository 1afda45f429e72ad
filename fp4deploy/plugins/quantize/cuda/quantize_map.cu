// Fake-quantises a feature map twice from one read: in blocks along its channels, and in blocks along the width of its
// rows, there once for each column of a filter, shifted to where that column reads it. The operands of a convolution's
// gradients; a matrix [tokens, features] is a map of one row.
//
//   x             [rows, W, C]                                       channels last in memory; rows: images * height
//   by_channels   [rows, W, C]
//   by_width      [rows, OW (padded to 16 with W_HADAMARD), groups * columns * C / groups]
//                 element ow of column k is x[ow * stride - padding + k * dilation], 0 outside
//
// A thread has BLOCK positions of a row times LANES channels, in registers: a block along the width for each
// channel. The channels of a block lie in BLOCK / LANES adjacent threads. The factor 1/4 of a transform is left to the
// amax and to what elements are multiplied with, which is exact for an ordinary global scale. The numbers, and the counters
// of Philox, are those of quantising [N, C, H, W] along axis 1 and the shifted maps [N, columns * C, H, OW] along axis 3.
//
// Macros: DTYPE, OUT (DTYPE, or anything where DTYPE is float); MX (1: MXFP4, blocks of 32) and UP, the rule of its
//   scales; BY_CHANNELS, BY_WIDTH; of each C_HADAMARD, C_STOCHASTIC, W_HADAMARD, W_STOCHASTIC; MEASURE (only the finite
//   amaxes, into cells [2], zero before).
// Arguments: amaxes float32 [1] each; randoms uint64 {seed, offset}.
// Launch: block 128, grid ceil(rows * ceil(OW / BLOCK) * C / LANES / 128).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "four_over_six.cuh"

constexpr int BLOCK = MX ? 32 : 16;
#ifndef LANES
#define LANES (MX ? 2 : 4)
#endif
constexpr int PAIRS = LANES / 2;
using fp4::BlockScale;
using fp4::GlobalScale;

__device__ __forceinline__ float finite(float x) { return fabsf(x) < INFINITY ? fabsf(x) : 0.f; }

// Two adjacent channels of a position.
struct alignas(2 * sizeof(DTYPE)) Pair {
    DTYPE low, high;
};
struct alignas(sizeof(DTYPE) * LANES) Position {
    Pair pair[PAIRS];
};
struct alignas(2 * sizeof(OUT)) OutPair {
    OUT low, high;
};
struct alignas(sizeof(OUT) * LANES) OutPosition {
    OutPair pair[PAIRS];
};

// One store of all bytes, where the compiler would take one a pair.
template <int Bytes> struct Chunk;
template <> struct Chunk<16> { using type = uint4; };
template <> struct Chunk<8> { using type = uint2; };
template <> struct Chunk<4> { using type = uint32_t; };
__device__ __forceinline__ void store(OUT* target, const OutPosition& values) {
    using Whole = Chunk<sizeof(OutPosition)>::type;
    *reinterpret_cast<Whole*>(target) = *reinterpret_cast<const Whole*>(&values);
}

__device__ __forceinline__ float2 widen(const Pair& x, float*) { return make_float2(x.low, x.high); }
__device__ __forceinline__ float2 widen(const Pair& x, __half*) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
__device__ __forceinline__ float2 widen(const Pair& x, __nv_bfloat16*) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
}
__device__ __forceinline__ float2 widen(const Pair& x) { return widen(x, static_cast<DTYPE*>(nullptr)); }

template <typename To> __device__ __forceinline__ To narrow(float2 x, float*) { return {x.x, x.y}; }
template <typename To> __device__ __forceinline__ To narrow(float2 x, __half*) {
    const __half2 both = __float22half2_rn(x);
    return *reinterpret_cast<const To*>(&both);
}
template <typename To> __device__ __forceinline__ To narrow(float2 x, __nv_bfloat16*) {
    const __nv_bfloat162 both = __float22bfloat162_rn(x);
    return *reinterpret_cast<const To*>(&both);
}

// The larger magnitudes of both, NaN where one is. The sign of the result has no meaning.
__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b, float*) {
    return {fp4::nan_max(fabsf(float(a.low)), fabsf(float(b.low))), fp4::nan_max(fabsf(float(a.high)), fabsf(float(b.high)))};
}
#if __CUDA_ARCH__ < 860
__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b, __half*) {
    const __half2 m = __hmax2_nan(
        __habs2(*reinterpret_cast<const __half2*>(&a)), __habs2(*reinterpret_cast<const __half2*>(&b)));
    return *reinterpret_cast<const Pair*>(&m);
}
__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b, __nv_bfloat16*) {
    using Two = __nv_bfloat162;
    const Two m =
        __hmax2_nan(__habs2(*reinterpret_cast<const Two*>(&a)), __habs2(*reinterpret_cast<const Two*>(&b)));
    return *reinterpret_cast<const Pair*>(&m);
}
#else
__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b, __half*) {
    uint32_t x = *reinterpret_cast<const uint32_t*>(&a);
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(x) : "r"(*reinterpret_cast<const uint32_t*>(&b)));
    return *reinterpret_cast<const Pair*>(&x);
}
__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b, __nv_bfloat16*) {
    uint32_t x = *reinterpret_cast<const uint32_t*>(&a);
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(*reinterpret_cast<const uint32_t*>(&b)));
    return *reinterpret_cast<const Pair*>(&x);
}
#endif
__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b) {
    return larger(a, b, static_cast<DTYPE*>(nullptr));
}

// The scale of a block that is not ordinary; not inlined, so that the others do not keep registers for it.
__device__ __noinline__ BlockScale any_scale(float largest, const GlobalScale* global) {
    return fp4::block_scale(largest, *global);
}

// The scale of a block by an approximate reciprocal, which one Newton step rounds like the division unless the mantissa
// is all ones (every mantissa checked on sm_90).
__device__ __forceinline__ BlockScale scale_of(float largest, const GlobalScale& global, bool ordinary) {
    if (MX) return fp4::mx_scale(largest, UP);
    const float d8 = fp4::round_e4m3(fminf(largest * global.sixth, 448.f)), x = d8 * global.decode;
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
    if (!ordinary || !(largest < INFINITY) || (fp4::bits(x) & 0x7FFFFFu) == 0x7FFFFFu) return any_scale(largest, &global);
    const float encode = d8 > 0.f ? fmaf(guess, fmaf(-x, guess, 1.f), guess) : 0.f;
    return {encode, (d8 * global.amax) * global.inverse, d8};
}

// step * E2M1(x * encode), to nearest.
__device__ __forceinline__ float quantized(float x, const BlockScale& block) { return fp4::fake_quantize(x, block); }

// The same of two elements, stochastically by two bytes of `word`; `encode` times COUNTED, 2^-14. Their steps are float16
// numbers, times 2^-14 as well.
__device__ __forceinline__ float2 quantized(float low, float high, const BlockScale& block, uint32_t word, int byte) {
    const uint32_t steps =
        fp4::stochastic_steps(fabsf(low * block.encode), fabsf(high * block.encode), word, byte) & 0x0E000E00u;
    const uint32_t upper = __byte_perm(fp4::bits(low), fp4::bits(high), 0x7632);
    const uint32_t unit = fp4::merged(upper, 0x74007400u, 0x80008000u);  // 2^14 with their signs
    const float2 q = __half22float2(__hmul2(*reinterpret_cast<const __half2*>(&steps), *reinterpret_cast<const __half2*>(&unit)));
    return make_float2(block.step * q.x, block.step * q.y);
}

// What values and encode are multiplied with: 1/4 of a transform and COUNTED of stochastic rounding, all in encode where the
// product of both is exact, which it is for an ordinary global scale.
struct Factors {
    float values, encode;
    bool ordinary;

    __device__ __forceinline__ Factors(const GlobalScale& global, bool hadamard, bool stochastic)
        : ordinary(global.amax > 1e-20f && global.amax < 1e20f) {
        const bool folds = hadamard && !MX && ordinary, counts = MX || global.amax < 1e20f;
        values = (hadamard && !folds ? 0.25f : 1.f) * (stochastic && !counts ? fp4::COUNTED : 1.f);
        encode = (folds ? 0.25f : 1.f) * (stochastic && counts ? fp4::COUNTED : 1.f);
    }
};

// The transform of groups of 16 channels, times 4, LANES of them here and the others in the next threads.
__device__ __forceinline__ void hadamard_of_channels(float (&v)[LANES], int first) {
#pragma unroll
    for (int i = 0; i < LANES; ++i)
        if (fp4::SIGN_MASK >> (first + i) & 1u) v[i] = -v[i];
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
#pragma unroll
        for (int i = 0; i < LANES; ++i)
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
#pragma unroll
    for (int step = LANES; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], step / LANES);
            v[i] = first & step ? other - v[i] : v[i] + other;
        }
}

// The scales of the blocks of four positions, from the largest magnitudes of the channels here; `factor` is of what they
// multiply. Four threads that share these blocks each find the scale of one, and tell the others.
__device__ __forceinline__ void scales_of(
    BlockScale (&block)[4], float (&largest)[4], int channel, const GlobalScale& global, bool ordinary, float factor) {
    if (LANES == 4 && !MX) {
        const bool odd = channel & 4, upper = channel & 8;
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float own = odd ? largest[2 * i + 1] : largest[2 * i], other = odd ? largest[2 * i] : largest[2 * i + 1];
            pair[i] = fp4::nan_max(own, __shfl_xor_sync(0xffffffffu, other, 1));
        }
        const float other = __shfl_xor_sync(0xffffffffu, upper ? pair[0] : pair[1], 2);
        BlockScale own = scale_of(fp4::nan_max(upper ? pair[1] : pair[0], other), global, ordinary);
        own.encode *= factor;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            block[i] = {__shfl_sync(0xffffffffu, own.encode, i, 4), __shfl_sync(0xffffffffu, own.step, i, 4), 0.f};
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int step = 1; step < BLOCK / LANES; step *= 2)
            largest[i] = fp4::nan_max(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], step));
        block[i] = scale_of(largest[i], global, ordinary);
        block[i].encode *= factor;
    }
}

// The word with the bytes of the channels from `first` on, without an index that is not known when this is compiled.
__device__ __forceinline__ uint32_t word_of(const fp4::Words& words, int first) {
    const uint32_t low = first & 8 ? words.w[2] : words.w[0], high = first & 8 ? words.w[3] : words.w[1];
    return (first & 4 ? high : low) >> (8 * (first & 3));
}

// The bytes of four positions. Where four threads share their blocks each draws for one position, and they exchange the
// words that the others need: a transposition of 4 x 4.
__device__ __forceinline__ void bytes_of(
    uint32_t (&out)[4], uint64_t number, uint64_t step, int first, const fp4::SharedPhilox& philox) {
    if (LANES == 4) {
        const bool odd = first & 4, upper = first & 8;
        const fp4::Words own = philox.words(number + step * (first / 4));
        uint32_t half[4];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {  // words i, i + 1 of two neighbours
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? own.w[i] : own.w[i + 1], 1);
            half[i] = odd ? other : own.w[i], half[i + 1] = odd ? own.w[i + 1] : other;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? half[i] : half[i + 2], 2);
            out[i] = upper ? other : half[i], out[i + 2] = upper ? half[i + 2] : other;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = word_of(philox.words(number + i * step), first);
    }
}

// Blocks of a multiprocessor that registers are kept for: as many as need no spills.
constexpr int RESIDENT = sizeof(DTYPE) > 2 ? 1 : MX ? 3 : 4;

extern "C" __global__ void __launch_bounds__(128, RESIDENT) quantize_map(
    const DTYPE* x, const float* c_amax, const float* w_amax, const uint64_t* c_random, const uint64_t* w_random,
    OUT* by_channels, OUT* by_width, int* cells, long long rows, int height, int width, int channels, int columns,
    int stride, int padding, int dilation, int out_width, int group_channels) {
    __shared__ GlobalScale shared[2];
    __shared__ fp4::SharedPhilox philox[2];
    if (C_STOCHASTIC) philox[0].set(c_random);
    if (W_STOCHASTIC) philox[1].set(w_random);
    if (!MX && !MEASURE && threadIdx.x < 2) {
        const float* amax = threadIdx.x ? w_amax : c_amax;
        if (amax) shared[threadIdx.x] = fp4::global_scale(*amax);
    }
    const int vectors = channels / LANES, tiles = (out_width + BLOCK - 1) / BLOCK;
    const long long thread = (long long)blockIdx.x * 128 + threadIdx.x, count = rows * tiles * vectors;
    const bool has = thread < count;
    long long row;
    int tile, vector;
    if (count < 0x7FFFFFFFLL) {  // a division of 64 bits takes as many instructions as the rest of a block
        const uint32_t rest = uint32_t(thread) / uint32_t(vectors), at = rest / uint32_t(tiles);
        vector = int(uint32_t(thread) - rest * vectors), tile = int(rest - at * tiles), row = at;
    } else {
        const long long rest = thread / vectors;
        vector = int(thread - rest * vectors), row = rest / tiles, tile = int(rest - row * tiles);
    }
    const int channel = vector * LANES, begin = tile * BLOCK;
    const DTYPE* source = x + row * width * channels + channel;
    Position raw[BLOCK];
    const auto load = [&](int shift) {
        const int left = has ? out_width - begin : 0, at = begin * stride - padding + shift;
        const long long pitch = (long long)stride * channels;
        const DTYPE* from = source + (long long)at * channels;
        if (left >= BLOCK && at >= 0 && at + (BLOCK - 1) * stride < width) {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i, from += pitch) raw[i] = *reinterpret_cast<const Position*>(from);
            return;
        }
#pragma unroll
        for (int i = 0; i < BLOCK; ++i, from += pitch) {
            raw[i] = Position{};
            if (i < left && unsigned(at + i * stride) < unsigned(width)) raw[i] = *reinterpret_cast<const Position*>(from);
        }
    };
    load(0);
    if (C_STOCHASTIC || W_STOCHASTIC || (!MX && !MEASURE)) __syncthreads();
    float measured[2] = {0.f, 0.f};
#if BY_CHANNELS
    // Here columns is 1, and positions are those of x.
    const Factors c_factors(shared[0], C_HADAMARD, C_STOCHASTIC);
    const uint64_t c_groups = channels / 16, pixel = (uint64_t)row * width + begin;
#pragma unroll
    for (int four = 0; four < BLOCK; four += 4) {
        float v[4][LANES], largest[4];
        BlockScale block[4];
        uint32_t bytes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Position& at = raw[four + i];
            Pair most{};
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const float2 both = widen(at.pair[p]);
                v[i][2 * p] = both.x, v[i][2 * p + 1] = both.y;
                most = larger(most, at.pair[p]);
            }
            const float2 both = widen(most);
            largest[i] = fp4::nan_max(fabsf(both.x), fabsf(both.y));
            if (C_HADAMARD) {
                hadamard_of_channels(v[i], channel % 16);
                largest[i] = 0.f;
#pragma unroll
                for (int j = 0; j < LANES; ++j) largest[i] = fp4::nan_max(largest[i], fabsf(v[i][j]));
            }
            if (!MEASURE) continue;
            if (largest[i] < INFINITY)
                measured[0] = fmaxf(measured[0], largest[i]);
            else
#pragma unroll
                for (int j = 0; j < LANES; ++j) measured[0] = fmaxf(measured[0], finite(v[i][j]));
        }
        if (MEASURE) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (C_HADAMARD) largest[i] *= 0.25f;
            if ((C_HADAMARD || C_STOCHASTIC) && c_factors.values != 1.f)
#pragma unroll
                for (int j = 0; j < LANES; ++j) v[i][j] *= c_factors.values;
        }
        scales_of(block, largest, channel, shared[0], c_factors.ordinary, c_factors.encode);
        if (C_STOCHASTIC) bytes_of(bytes, (pixel + four) * c_groups + channel / 16, c_groups, channel % 16, philox[0]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            OutPosition values;
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const float low = v[i][2 * p], high = v[i][2 * p + 1];
                const float2 out = C_STOCHASTIC ? quantized(low, high, block[i], bytes[i], 2 * p)
                                                : make_float2(quantized(low, block[i]), quantized(high, block[i]));
                values.pair[p] = narrow<OutPair>(out, static_cast<OUT*>(nullptr));
            }
            if (has && begin + four + i < width) store(by_channels + (pixel + four + i) * channels + channel, values);
        }
    }
#endif
#if BY_WIDTH
    constexpr int PARTS = BLOCK / 16;  // groups of 16 of a block
    const Factors w_factors(shared[1], W_HADAMARD, W_STOCHASTIC);
    const int padded = W_HADAMARD ? (out_width + 15) / 16 * 16 : out_width;
    const int group = channel / group_channels, inside = channel - group * group_channels;
    const long long w_groups = (long long)tiles * PARTS, wide = (long long)channels * columns, image = row / height;
    for (int k = 0; k < columns; ++k) {
        if (k) load(k * dilation);
        const long long place = (long long)(group * columns + k) * group_channels + inside;  // of the first channel
        const uint64_t first = ((image * wide + place) * height + (row - image * height)) * w_groups + tile * PARTS;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            float v[2][BLOCK], largest[2];
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) {
                const float2 both = widen(raw[i].pair[p]);
                v[0][i] = both.x, v[1][i] = both.y;
            }
#if W_HADAMARD
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                largest[j] = 0.f;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    float turned[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) turned[i] = v[j][part * 16 + i];
                    fp4::hadamard_sums(turned);
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        v[j][part * 16 + i] = turned[i];
                        largest[j] = fp4::nan_max(largest[j], fabsf(turned[i]));
                    }
                }
            }
#else
            Pair most = larger(raw[0].pair[p], Pair{});
#pragma unroll
            for (int i = 1; i < BLOCK; ++i) most = larger(most, raw[i].pair[p]);
            const float2 both = widen(most);
            largest[0] = fabsf(both.x), largest[1] = fabsf(both.y);
#endif
            if (!MEASURE && (W_HADAMARD || W_STOCHASTIC) && w_factors.values != 1.f)
#pragma unroll
                for (int i = 0; i < 2 * BLOCK; ++i) v[i / BLOCK][i % BLOCK] *= w_factors.values;
            if (MEASURE) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (largest[j] < INFINITY) {
                        measured[1] = fmaxf(measured[1], largest[j]);
                        continue;
                    }
#pragma unroll
                    for (int i = 0; i < BLOCK; ++i) measured[1] = fmaxf(measured[1], finite(v[j][i]));
                }
                continue;
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                BlockScale block = scale_of(W_HADAMARD ? 0.25f * largest[j] : largest[j], shared[1], w_factors.ordinary);
                block.encode *= w_factors.encode;
                if (!W_STOCHASTIC && !(largest[j] * block.encode < 7.f)) {  // what exceeds 6.5 becomes 6 as well
                    const float limit = 6.5f / block.encode;
#pragma unroll
                    for (int i = 0; i < BLOCK; ++i) v[j][i] = fminf(fmaxf(v[j][i], -limit), limit);
                }
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    fp4::Words words;
                    if (W_STOCHASTIC)
                        words = philox[1].words(first + (uint64_t)(2 * p + j) * height * w_groups + part);
#pragma unroll
                    for (int i = 0; i < 16; i += 2) {
                        float *value = v[j] + part * 16 + i;
                        const float2 both = W_STOCHASTIC
                            ? quantized(value[0], value[1], block, words.w[i / 4], i % 4)
                            : make_float2(block.step * fp4::round_below_7(value[0] * block.encode),
                                          block.step * fp4::round_below_7(value[1] * block.encode));
                        value[0] = both.x, value[1] = both.y;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < BLOCK; ++i)
                raw[i].pair[p] = narrow<Pair>(make_float2(v[0][i], v[1][i]), static_cast<DTYPE*>(nullptr));
        }
        if (MEASURE) continue;
        OUT* target = by_width + (row * padded + begin) * wide + place;
        const int left = has ? padded - begin : 0;
        const bool whole = left >= BLOCK;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i, target += wide) {
            OutPosition values;
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                if (sizeof(DTYPE) == 2)
                    values.pair[p] = *reinterpret_cast<const OutPair*>(&raw[i].pair[p]);
                else
                    values.pair[p] = narrow<OutPair>(widen(raw[i].pair[p]), static_cast<OUT*>(nullptr));
            }
            if (whole || i < left) store(target, values);
        }
    }
#endif
#if MEASURE
    if (BY_CHANNELS) fp4::raise_to(cells, C_HADAMARD ? 0.25f * measured[0] : measured[0]);
    if (BY_WIDTH) fp4::raise_to(cells + 1, W_HADAMARD ? 0.25f * measured[1] : measured[1]);
#endif
}
