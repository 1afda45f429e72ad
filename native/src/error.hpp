// One exception type inside the library, caught where the C interface begins.
#pragma once
#include <string>
#include <utility>

#include "fp4deploy.h"

namespace fp4d {

struct Error {
    fp4d_status status;
    std::string text;
};

[[noreturn]] inline void refuse(std::string text) { throw Error{FP4D_INVALID_FILE, std::move(text)}; }
[[noreturn]] inline void refuse_argument(std::string text) { throw Error{FP4D_INVALID_ARGUMENT, std::move(text)}; }
inline void require(bool condition, const char* text) {
    if (!condition) refuse(text);
}

// Text of a file inside a message: short, printable.
inline std::string shown(const std::string& text) {
    std::string found;
    for (char letter : text.substr(0, 60)) found += letter >= ' ' && letter < 127 ? letter : '?';
    return text.size() > 60 ? found + "..." : found;
}

}  // namespace fp4d
