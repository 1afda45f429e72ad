#include <array>

#include "half.hpp"
#include "network.hpp"

namespace fp4d {
namespace {

constexpr float E2M1[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};

float of_e4m3(unsigned bits) {
    const int exponent = int(bits >> 3) & 15, fraction = int(bits & 7);
    return exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
}

// scale and code -> the float16 of their product times 2^-7, which is exact.
std::array<uint16_t, 128 * 16> products() {
    std::array<uint16_t, 128 * 16> found;
    for (unsigned scale = 0; scale < 128; ++scale)
        for (unsigned code = 0; code < 16; ++code) {
            const float value = E2M1[code & 7] * of_e4m3(scale == 127 ? 0 : scale) / 128.f;
            found[scale * 16 + code] = half_of_exact(code & 8 ? -value : value);
        }
    return found;
}

}  // namespace

void decode_planes(const Model& model, const Constant& constant, uint8_t* into) {
    static const auto table = products();
    const Tensor &codes = model.tensors.at(constant.tensor + ".weight.codes"), &scales = model.tensors.at(constant.tensor + ".weight.scales");
    const int64_t taps_in_all = codes.shape[1] * codes.shape[2], taps = constant.up ? 1 : taps_in_all;
    const int64_t rows = codes.shape[0] * (constant.up ? taps_in_all : 1), deep = codes.shape[3];
    const size_t plane = constant.bytes / 2;
    std::memset(into, 0, constant.bytes);
    const int64_t steps = int64_t(plane) / 2 / rows;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t begin = row * steps, first = 0;
        for (const int64_t source : constant.sources) {
            const int64_t width = (source + 15) / 16 * 8;
            for (int64_t at = 0; at < taps * width; ++at) {
                const int64_t tap = at / width, place = (row * taps + tap) * deep + first + at % width;
                const uint8_t pair = codes.content[place];
                const uint16_t* const values = &table[(scales.content[place / 8] & 127) * 16];
                // The order of a tensor core's fragment within 32 bytes: bits 43210 of a place become 21430.
                const int64_t to = begin + (at & ~int64_t(31)) + (((at >> 1) & 3) << 3 | ((at >> 3) & 3) << 1 | (at & 1));
                std::memcpy(into + 2 * to, &values[pair & 15], 2);
                std::memcpy(into + plane + 2 * to, &values[pair >> 4], 2);
            }
            begin += (taps * width + 63) / 64 * 64;
            first += width;
        }
    }
}

}  // namespace fp4d
