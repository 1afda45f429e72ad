// SHA-256 (FIPS 180-4), as lower-case hexadecimal text.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace fp4d {

class Sha256 {
public:
    void update(const void* content, size_t bytes);
    std::string hex();  // ends the sum

private:
    void block(const uint8_t* content);
    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t rest_[64];
    size_t held_ = 0;
    uint64_t bytes_ = 0;
};

std::string sha256(const void* content, size_t bytes);

}  // namespace fp4d
