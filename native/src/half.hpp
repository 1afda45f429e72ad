// Numbers of tensors, read from bytes of any alignment, float16 and bfloat16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fp4d {

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of_half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3FF;
    if (exponent == 31) return float_of(sign | 0x7F800000 | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float value = std::ldexp(float(fraction), -24);
    return sign ? -value : value;
}

// A float that a float16 holds exactly.
inline uint16_t half_of_exact(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, exponent = (bits >> 23) & 0xFF;
    if (exponent >= 113) return uint16_t(sign | (exponent - 112) << 10 | ((bits >> 13) & 0x3FF));
    return uint16_t(sign | uint32_t(std::ldexp(std::fabs(value), 24)));
}

inline float half_at(const uint8_t* content) {
    uint16_t bits;
    std::memcpy(&bits, content, 2);
    return float_of_half(bits);
}
inline float float_at(const uint8_t* content) {
    uint32_t bits;
    std::memcpy(&bits, content, 4);
    return float_of(bits);
}

// The number that begins `at` bytes into a tensor of F16, BF16 or F32.
template <class Tensor>
float number_at(const Tensor& tensor, size_t at) {
    if (tensor.dtype == "F32") return float_at(tensor.content + at);
    if (tensor.dtype == "F16") return half_at(tensor.content + at);
    uint16_t bits;
    std::memcpy(&bits, tensor.content + at, 2);
    return float_of(uint32_t(bits) << 16);
}

}  // namespace fp4d
