#include <algorithm>
#include <cstring>

#include "error.hpp"
#include "model.hpp"

namespace fp4d {
namespace {

constexpr uint64_t MAX_HEADER = 100'000'000;

int64_t size_of(const std::string& dtype) {
    if (dtype == "U8" || dtype == "I8" || dtype == "F8_E4M3") return 1;
    if (dtype == "F16" || dtype == "BF16") return 2;
    if (dtype == "F32") return 4;
    refuse("the file holds a tensor of the type '" + shown(dtype) + "', and a packed network has U8, I8, F8_E4M3, F16, BF16 and F32");
}

uint64_t count(const Value* value) {
    require(value && value->kind == Value::Int && !value->large && value->integer >= 0, "the file's header has a size that is none");
    return uint64_t(value->integer);
}

}  // namespace

Safetensors read_safetensors(const uint8_t* content, size_t bytes) {
    require(bytes >= 8, "the file is no safetensors file: it is too short");
    uint64_t length = 0;
    for (int at = 7; at >= 0; --at) length = length << 8 | content[at];
    require(length <= MAX_HEADER && length <= bytes - 8, "the file is no safetensors file, or not a whole one");
    const std::string_view text(reinterpret_cast<const char*>(content) + 8, size_t(length));
    require(!text.empty() && text[0] == '{', "the file is no safetensors file: its header is no JSON object");
    const Value header = parse_json(text, HEADER, "the file's header");

    Safetensors found;
    std::map<std::string, std::pair<uint64_t, uint64_t>> places;
    for (const auto& [name, about] : header.fields) {
        if (name == "__metadata__") {
            found.metadata.clear();
            if (about.kind == Value::Null) continue;
            require(about.kind == Value::Object, "the file's metadata is no object");
            for (const auto& [key, value] : about.fields) {
                require(value.kind == Value::String, "the file's metadata holds something else than text");
                found.metadata[key] = value.text;
            }
            continue;
        }
        const Value *dtype = about.find("dtype"), *shape = about.find("shape"), *offsets = about.find("data_offsets");
        require(about.kind == Value::Object && dtype && dtype->kind == Value::String && shape && shape->kind == Value::Array && offsets &&
                    offsets->kind == Value::Array && offsets->items.size() == 2,
                "the file's header describes a tensor without type, shape or offsets");
        Tensor tensor;
        tensor.dtype = dtype->text;
        for (const Value& size : shape->items) tensor.shape.push_back(int64_t(count(&size)));
        found.tensors[name] = tensor;
        places[name] = {count(&offsets->items[0]), count(&offsets->items[1])};
    }
    std::vector<std::pair<std::pair<uint64_t, uint64_t>, std::string>> order;
    for (const auto& [name, offsets] : places) order.push_back({offsets, name});
    std::sort(order.begin(), order.end());
    uint64_t next = 0;
    const uint64_t room = bytes - 8 - length;
    for (const auto& [offsets, name] : order) {
        Tensor& tensor = found.tensors[name];
        const auto [first, last] = offsets;
        require(first == next && last >= first && last <= room, "the file's tensors do not lie one after the other");
        int64_t size = size_of(tensor.dtype);
        for (const int64_t each : tensor.shape)
            if (__builtin_mul_overflow(size, each, &size)) refuse("the file holds a tensor that is too large");
        require(uint64_t(size) == last - first, "the file holds a tensor whose shape and bytes differ");
        tensor.content = content + 8 + length + first;
        tensor.bytes = size_t(size);
        next = last;
    }
    require(next == room, "the file is no safetensors file, or not a whole one");
    return found;
}

}  // namespace fp4d
