// A packed network as it is in memory: tensors, graph and card, checked.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "json.hpp"

namespace fp4d {

using Shape = std::vector<int64_t>;
constexpr size_t MAX_PORTS = 512;  // inputs, or outputs

// A tensor of a safetensors file; `content` points into the file's bytes.
struct Tensor {
    std::string dtype;
    Shape shape;
    const uint8_t* content = nullptr;
    size_t bytes = 0;
};

struct Safetensors {
    std::map<std::string, Tensor> tensors;
    std::map<std::string, std::string> metadata;
};

// Raises Error where the safetensors library would refuse the file, or where a tensor has another type than those of
// packed networks (U8, F8_E4M3, F16, BF16, F32).
Safetensors read_safetensors(const uint8_t* content, size_t bytes);

struct TensorInfo {
    std::string dtype;
    Shape shape;
    std::string sha256;
};

struct Input {
    std::string name;
    Shape shape;
    std::vector<int64_t> free;
    std::string dtype = "float32";  // or "int64", "bool"
};

// What a caller and a bundle need of a graph. Its nodes are Python's: it checked them when it recorded the bundle, which
// names the digest of the whole text.
struct Graph {
    std::vector<Input> inputs;
    std::vector<std::string> outputs;
    std::map<std::string, TensorInfo> tensors;
};

// Raises Error.
Graph read_graph(const std::string& text);

struct Card {
    std::vector<std::string> class_names;
    int64_t height = 0, width = 0;
    double mean[3] = {0, 0, 0}, std[3] = {1, 1, 1};
};

// Raises Error (fp4deploy/models/card.py).
Card read_card(const std::string& text);

struct Model {
    std::vector<uint8_t> content;
    std::map<std::string, Tensor> tensors;
    Graph graph;
    std::optional<Card> card;
    std::string version, sha256, card_text, graph_text;

    explicit Model(std::vector<uint8_t> file);
    Model(const Model&) = delete;
};

// Whether an input takes a shape.
bool fits(const Input& input, const Shape& shape);

std::string text_of(const Shape& shape);

}  // namespace fp4d
