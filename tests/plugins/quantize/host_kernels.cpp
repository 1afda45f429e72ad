// The kernels' header on the host: plain loops over its functions, which test_device_header.py calls through ctypes.
//
// The loops stand where kernels have threads: a "tile" is one row of 16 (1-D blocks) or sixteen of them (2-D blocks).
// Compile with -ffp-contract=off, as the kernels with -fmad=false.
#include "four_over_six.cuh"

namespace {

struct Outputs {
    uint8_t* codes;   // [tiles, rows, 8]
    uint8_t* scales;  // [tiles]
    float* values;    // [tiles, rows, 16]
    uint16_t* in_range; // [tiles, rows], bit i: element i is in range
};

// One row of 16 with the scale of its block; `random` is null for rounding to nearest.
void quantize_row(
    const float* x, const fp4::BlockScale& block, const fp4::Words* random, const Outputs& out, int64_t row) {
    uint16_t in_range = 0u;
    float scaled[fp4::GROUP];
    for (int i = 0; i < fp4::GROUP; ++i) {
        float u = scaled[i] = x[i] * block.encode;
        float q = random ? fp4::round_e2m1(u, fp4::part_of(*random, i)) : fp4::round_e2m1(u);
        out.values[row * fp4::GROUP + i] = block.step * q;
        in_range |= uint16_t((std::fabs(u) <= 6.f ? 1u : 0u) << i);
    }
    uint32_t packed[2];
    for (int i = 0; i < 2; ++i)
        packed[i] = random ? fp4::encode_eight(scaled + 8 * i, random->w + 2 * i) : fp4::encode_eight(scaled + 8 * i);
    if (block.encode != block.encode) packed[0] = packed[1] = 0u;
    for (int i = 0; i < 8; ++i) out.codes[row * 8 + i] = uint8_t(packed[i / 4] >> (8 * (i % 4)));
    out.in_range[row] = in_range;
}

template <bool Squared, bool Fast>
float tile_error(const float (*x)[fp4::GROUP], int rows, const fp4::BlockScale& block, const fp4::GlobalScale& global) {
    float sums[fp4::GROUP] = {};
    for (int row = 0; row < rows; ++row) sums[row] = fp4::row_error<Squared, Fast>(x[row], block, global);
    for (int half = rows / 2; half; half /= 2)
        for (int row = 0; row < half; ++row) sums[row] += sums[row + half];
    return sums[0];
}

template <bool Squared, bool Fast>
fp4::BlockScale choose(const float (*x)[fp4::GROUP], int rows, float largest, const fp4::GlobalScale& global) {
    fp4::Candidates candidates = fp4::four_over_six(largest, global);
    float six = tile_error<Squared, Fast>(x, rows, candidates.six, global);
    float four = tile_error<Squared, Fast>(x, rows, candidates.four, global);
    return four < six ? candidates.four : candidates.six;
}

template <int E>
void nvfp4_tiles(
    const float* x, int64_t tiles, int rows, const float* amax, int four_over_six, const uint64_t* random,
    const uint64_t* numbers, const Outputs& out) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
        float v[fp4::GROUP][fp4::GROUP], largest = 0.f;
        for (int i = 0; i < rows * fp4::GROUP; ++i) {
            v[i / fp4::GROUP][i % fp4::GROUP] = x[tile * rows * fp4::GROUP + i];
            largest = fp4::nan_max(largest, std::fabs(v[i / fp4::GROUP][i % fp4::GROUP]));
        }
        const fp4::GlobalScale global = fp4::global_scale<E>(amax[tile]);
        fp4::BlockScale block = fp4::block_scale(largest, global);
        if (four_over_six == 1) block = choose<false, false>(v, rows, largest, global);
        if (four_over_six == 2) block = choose<false, true>(v, rows, largest, global);
        if (four_over_six == 3) block = choose<true, false>(v, rows, largest, global);
        if (four_over_six == 4) block = choose<true, true>(v, rows, largest, global);
        for (int row = 0; row < rows; ++row) {
            fp4::Words words{};
            if (random) words = fp4::philox(numbers[tile * rows + row], random[0], random[1]);
            quantize_row(v[row], block, random ? &words : nullptr, out, tile * rows + row);
        }
        out.scales[tile] = uint8_t(fp4::encode_e4m3(block.d8));
    }
}

// Groups as pack_rows_4o6.cu decides them; `path`: 0 quickly, 1 by the contract's sums, 2 not here (element by element).
template <bool Squared, bool Fast>
void choose_groups(
    const float* x, int64_t groups, const fp4::GlobalScale& global, uint32_t unit, uint8_t* codes, uint8_t* scales, uint8_t* path) {
    fp4::Counting counting[fp4::SCALES];
    fp4::Ties ties[fp4::SCALES];
    const bool ordinary = global.amax > 1e-20f && global.amax < 1e20f;
    for (uint32_t byte = 0; byte < fp4::SCALES; ++byte)
        counting[byte] = fp4::counting_of(byte, global, ordinary, unit, ties[byte]);
    for (int64_t group = 0; group < groups; ++group) {
        float v[fp4::GROUP], largest = 0.f;
        uint32_t w[8];
        for (int i = 0; i < fp4::GROUP; ++i) {
            v[i] = x[group * fp4::GROUP + i];
            largest = fp4::nan_max(largest, std::fabs(v[i]));
            w[i / 2] = i % 2 ? w[i / 2] | (fp4::bits(v[i]) & 0xFFFF0000u) : fp4::bits(v[i]) >> 16;
        }
        const uint32_t bytes = fp4::candidate_bytes(fp4::sixth_of(largest) * global.scale), byte[2] = {bytes & 0xFFu, bytes >> 8};
        const fp4::Counting six = counting[byte[0]], four = counting[byte[1]];
        const fp4::Choice chosen = fp4::choose<Squared>(v, largest, six, four, 1u);
        uint32_t sum[2][8];
        float error[2];
        for (int i = 0; i < 2; ++i) {
            fp4::count_steps(v, (i ? four : six).encode, sum[i]);
            fp4::odd_to_even(sum[i], ties[byte[i]].odd, 1u);
            fp4::quarter_to_zero(sum[i], w, ties[byte[i]].quarter);
            error[i] = fp4::exact_error<Squared, Fast>(v, sum[i], (i ? four : six).d8, global);
        }
        bool better = chosen.four;
        path[group] = 0;
        if (ties[byte[better]].care && fp4::has_middle((better ? chosen.to_four : chosen.to_six).sum)) path[group] = 2;
        if (!chosen.sure) {
            const bool care = ties[byte[0]].care || ties[byte[1]].care;
            path[group] = care || !(largest * six.encode < fp4::LARGEST_COUNTED) ? 2 : 1;
            better = error[1] < error[0];
        }
        const uint32_t words[2] = {fp4::codes_of_steps(sum[better]), fp4::codes_of_steps(sum[better] + 4)};
        for (int i = 0; i < 8; ++i) codes[group * 8 + i] = uint8_t(words[i / 4] >> (8 * (i % 4)));
        scales[group] = uint8_t(byte[better]);
    }
}

}  // namespace

extern "C" {

void round_nearest(const float* u, int64_t count, float* q, uint8_t* direct) {
    for (int64_t i = 0; i < count; ++i) {
        q[i] = fp4::round_e2m1(u[i]);
        direct[i] = uint8_t(fp4::encode_nearest(u[i]));
    }
}

// Codes of 0 <= u < 7 without a clamp, as the packing kernel takes them from the rounded sum.
void codes_of_sums(const float* u, int64_t count, uint8_t* codes) {
    for (int64_t i = 0; i < count; ++i)
        codes[i] = uint8_t(fp4::code_of(std::fmaf(fp4::binade_of(u[i]), fp4::ROUNDER, u[i])) - fp4::CODE_BIAS);
}

void divide_by_range(const float* v, int64_t count, int largest, float* quotient, float* expected) {
    const fp4::GlobalScale global = largest == 256 ? fp4::global_scale<256>(1.f) : fp4::global_scale<448>(1.f);
    for (int64_t i = 0; i < count; ++i) {
        quotient[i] = fp4::divide_by_range(v[i], global);
        expected[i] = v[i] / global.range;
    }
}

void round_stochastic(const float* u, const uint8_t* random, int64_t count, float* q, uint8_t* codes) {
    for (int64_t i = 0; i < count; ++i) {
        q[i] = fp4::round_e2m1(u[i], fp4::part_of(random[i], 0));
        const float part = fp4::part_of(random[i], 0);
        codes[i] = uint8_t(fp4::stochastic_code(std::fabs(u[i]), part) - fp4::DOWN + fp4::sign_of(u[i]));
    }
}

// Eight numbers below 7 at a time, a byte each, as rows that are packed have them; signs are not looked at.
void stochastic_steps(const float* u, const uint8_t* random, int64_t count, uint8_t* codes) {
    for (int64_t at = 0; at < count; at += 8) {
        uint32_t steps[4];
        for (int i = 0; i < 4; ++i) {
            uint32_t word = 0u;
            for (int byte = 0; byte < 4; ++byte) word |= uint32_t(random[at + i / 2 * 4 + byte]) << (8 * byte);
            const float low = std::fabs(u[at + 2 * i]) * fp4::COUNTED, high = std::fabs(u[at + 2 * i + 1]) * fp4::COUNTED;
            steps[i] = fp4::stochastic_steps(low, high, word, i % 2 * 2);
        }
        for (int i = 0; i < 8; ++i) codes[at + i] = uint8_t(fp4::codes_of_steps(steps) >> (4 * i) & 15u);
    }
}

void decode_codes(const uint8_t* codes, int64_t count, float* values) {
    for (int64_t i = 0; i < count; ++i) values[i] = fp4::decode_e2m1(codes[i]);
}

void round_scales(const float* d, int64_t count, float* rounded, uint8_t* bytes) {
    for (int64_t i = 0; i < count; ++i) bytes[i] = uint8_t(fp4::encode_e4m3(rounded[i] = fp4::round_e4m3(d[i])));
}

void decode_scales(const uint8_t* bytes, int64_t count, float* values) {
    for (int64_t i = 0; i < count; ++i) values[i] = fp4::decode_e4m3(bytes[i]);
}

void power_scales(const float* amax, int64_t count, int up, uint8_t* bytes, float* values) {
    for (int64_t i = 0; i < count; ++i) values[i] = fp4::decode_e8m0(bytes[i] = uint8_t(fp4::encode_e8m0(amax[i], up)));
}

// What one unit of E2M1 stands for, and what multiplies an element, for blocks whose scale byte is given.
void steps(const uint8_t* bytes, int64_t count, float amax, int largest, float* step, float* encode) {
    const fp4::GlobalScale global = largest == 256 ? fp4::global_scale<256>(amax) : fp4::global_scale<448>(amax);
    for (int64_t i = 0; i < count; ++i) {
        float d8 = fp4::decode_e4m3(bytes[i]);
        fp4::BlockScale block = fp4::rounded_scale(d8, d8, global);
        step[i] = block.step;
        encode[i] = block.encode;
    }
}

void philox(const uint64_t* numbers, int64_t count, uint64_t seed, uint64_t offset, uint32_t* words) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(words + 4 * i, fp4::philox(numbers[i], seed, offset).w, 16);
}

void hadamard(float* x, int64_t groups) {
    for (int64_t i = 0; i < groups; ++i) fp4::hadamard(*reinterpret_cast<float(*)[fp4::GROUP]>(x + i * fp4::GROUP));
}

// x [tiles, rows, 16], amax [tiles]; four_over_six 0 none, 1 mae strict, 2 mae fast, 3 mse strict, 4 mse fast; random
// null or {seed, offset}, then numbers [tiles, rows]: the group that each row is for Philox.
void nvfp4(
    const float* x, int64_t tiles, int rows, const float* amax, int largest, int four_over_six, const uint64_t* random,
    const uint64_t* numbers, uint8_t* codes, uint8_t* scales, float* values, uint16_t* in_range) {
    const Outputs out{codes, scales, values, in_range};
    if (largest == 256) nvfp4_tiles<256>(x, tiles, rows, amax, four_over_six, random, numbers, out);
    else nvfp4_tiles<448>(x, tiles, rows, amax, four_over_six, random, numbers, out);
}

// x [groups, 16]; how: 1 squared + 2 fast; unit: what float32 bits of the elements are multiples of. Codes [groups, 8],
// scales [groups], path [groups].
void choose_rows(
    const float* x, int64_t groups, const float* amax, int64_t largest, int64_t how, int64_t unit, uint8_t* codes,
    uint8_t* scales, uint8_t* path) {
    const fp4::GlobalScale global = largest == 256 ? fp4::global_scale<256>(*amax) : fp4::global_scale<448>(*amax);
    if (how == 0) choose_groups<false, false>(x, groups, global, uint32_t(unit), codes, scales, path);
    if (how == 1) choose_groups<true, false>(x, groups, global, uint32_t(unit), codes, scales, path);
    if (how == 2) choose_groups<false, true>(x, groups, global, uint32_t(unit), codes, scales, path);
    if (how == 3) choose_groups<true, true>(x, groups, global, uint32_t(unit), codes, scales, path);
}

// x [blocks, 2, 16].
void mxfp4(
    const float* x, int64_t blocks, int up, const uint64_t* random, const uint64_t* numbers, uint8_t* codes,
    uint8_t* scales, float* values, uint16_t* in_range) {
    const Outputs out{codes, scales, values, in_range};
    for (int64_t at = 0; at < blocks; ++at) {
        float largest = 0.f;
        for (int i = 0; i < 2 * fp4::GROUP; ++i) largest = fp4::nan_max(largest, std::fabs(x[at * 2 * fp4::GROUP + i]));
        const fp4::BlockScale block = fp4::mx_scale(largest, up);
        for (int64_t row = 2 * at; row < 2 * at + 2; ++row) {
            fp4::Words words{};
            if (random) words = fp4::philox(numbers[row], random[0], random[1]);
            quantize_row(x + row * fp4::GROUP, block, random ? &words : nullptr, out, row);
        }
        scales[at] = uint8_t(block.step != block.step ? 0xFFu : fp4::bits(block.step) >> 23);
    }
}

}  // extern "C"
