// JSON (RFC 8259) as values, strictly: what a dialect leaves open is decided by `Dialect`.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fp4d {

// How a text is read. The three readers of the Python package differ, and a file should be refused or accepted alike.
struct Dialect {
    bool unique_keys;   // a repeated key is an error; otherwise the last one counts
    bool constants;     // NaN, Infinity and -Infinity are numbers
    bool finite;        // a number beyond the range of a double is an error
    bool bounded;       // so is an integer beyond 64 bits
    int depth;          // of nesting
};
constexpr Dialect HEADER{false, false, true, false, 127};   // serde_json, of safetensors
constexpr Dialect METADATA{true, false, true, true, 64};    // fp4deploy.system.schema.parse_json
constexpr Dialect GRAPH{false, true, false, false, 200};    // pydantic's parser

struct Value {
    enum Kind { Null, Bool, Int, Float, String, Array, Object } kind = Null;
    bool truth = false;
    bool large = false;  // an integer beyond 64 bits; `integer` has its sign, `number` its value
    int64_t integer = 0;
    double number = 0;  // of Int too
    std::string text;
    std::vector<Value> items;
    std::vector<std::pair<std::string, Value>> fields;

    const Value* find(std::string_view key) const;  // nullptr: no such key
};

// Raises Error (FP4D_INVALID_FILE) with `source` at the beginning of its text.
Value parse_json(std::string_view text, const Dialect& dialect, const char* source);

// The number of characters (code points) of UTF-8 text.
size_t characters(std::string_view text);

}  // namespace fp4d
