#include <algorithm>
#include <initializer_list>

#include "error.hpp"
#include "model.hpp"

// Inputs, outputs and tensors of fp4deploy/packed/graph.py.
namespace fp4d {
namespace {

constexpr size_t MAX_NAME = 200;

const Value& part(const Value& owner, const char* name, Value::Kind kind) {
    const Value* found = owner.kind == Value::Object ? owner.find(name) : nullptr;
    if (!found || found->kind != kind) refuse(std::string("its graph cannot be read: ") + name + " is missing, or has another type");
    return *found;
}

const std::vector<Value>& list(const Value& owner, const char* name, size_t least, size_t most) {
    const auto& items = part(owner, name, Value::Array).items;
    if (items.size() < least || items.size() > most) refuse(std::string("its graph cannot be read: ") + name + " is no list of its length");
    return items;
}

std::string name_of(const std::string& text, size_t least, size_t most = MAX_NAME) {
    const size_t count = characters(text);
    if (count < least || count > most) refuse("its graph cannot be read: a name is empty or too long");
    return text;
}

std::vector<int64_t> numbers(const std::vector<Value>& items, int64_t least, int64_t most) {
    std::vector<int64_t> found;
    for (const Value& each : items) {
        if (each.kind != Value::Int || each.large || each.integer < least || each.integer > most) refuse("its graph cannot be read: a number is none, or beyond its limits");
        found.push_back(each.integer);
    }
    return found;
}

bool is_one_of(const std::string& text, std::initializer_list<const char*> valid) {
    return std::any_of(valid.begin(), valid.end(), [&](const char* each) { return text == each; });
}

bool is_digest(const std::string& text) {
    return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

Graph read_graph(const std::string& text) {
    const Value value = parse_json(text, GRAPH, "its graph");
    Graph graph;
    for (const Value& each : list(value, "inputs", 1, MAX_PORTS)) {
        Input input;
        input.name = name_of(part(each, "name", Value::String).text, 1);
        input.shape = numbers(list(each, "shape", 1, 6), 1, 1 << 20);
        input.free = numbers(list(each, "free", 0, SIZE_MAX), 0, 7);
        if (each.find("dtype")) input.dtype = part(each, "dtype", Value::String).text;
        require(is_one_of(input.dtype, {"float32", "int64", "bool"}), "its graph cannot be read: an input has an unknown type");
        graph.inputs.push_back(input);
    }
    list(value, "nodes", 1, SIZE_MAX);
    for (const Value& each : list(value, "outputs", 1, MAX_PORTS)) graph.outputs.push_back(name_of(part(each, "name", Value::String).text, 0));
    for (const auto& [name, each] : part(value, "tensors", Value::Object).fields) {
        TensorInfo info;
        info.dtype = part(each, "dtype", Value::String).text;
        info.shape = numbers(list(each, "shape", 0, SIZE_MAX), 0, int64_t(1) << 31);
        info.sha256 = part(each, "sha256", Value::String).text;
        require(is_one_of(info.dtype, {"U8", "I8", "F8_E4M3", "F16", "BF16", "F32"}) && is_digest(info.sha256), "its graph cannot be read: a tensor has an unknown type, or no sha256");
        graph.tensors[name_of(name, 1)] = info;
    }
    return graph;
}

bool fits(const Input& input, const Shape& shape) {
    bool same = shape.size() == input.shape.size();
    for (size_t axis = 0; same && axis < shape.size(); ++axis) {
        const bool free = std::find(input.free.begin(), input.free.end(), int64_t(axis)) != input.free.end();
        same = shape[axis] >= 1 && (free || shape[axis] == input.shape[axis]);
    }
    return same;
}

std::string text_of(const Shape& shape) {
    std::string text = "[";
    for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
    return text + "]";
}

}  // namespace fp4d
