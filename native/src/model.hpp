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
constexpr int64_t BLOCK = 16;  // elements of an NVFP4 block

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

// One form of an activation; `amax` empty: plain.
struct Form {
    std::string name, amax;
    bool along_last = false, pooled = false;
};

struct Input {
    std::string name;
    Shape shape;
    std::vector<int64_t> free;
    std::vector<Form> outputs;
};

struct Output {
    std::string name, activation;
};

enum class Op { Conv2d, ConvTranspose2d, GroupNormReLU, Concat };

struct Node {
    Op op;
    std::string name_of_op;
    std::vector<std::string> inputs;
    std::vector<Form> outputs;
    std::string layer, bias;  // "": none
    std::string precision;    // "nvfp4", or that of the rest
    bool packed = false;      // precision "nvfp4"
    int64_t e4m3_max = 448, groups = 1, dim = 1;
    int64_t stride[2] = {1, 1}, padding[2] = {0, 0}, output_padding[2] = {0, 0}, dilation[2] = {1, 1};
    bool relu = false;

    bool is_layer() const { return op == Op::Conv2d || op == Op::ConvTranspose2d; }
    const std::string& named() const { return layer.empty() ? outputs.front().name : layer; }
};

struct Graph {
    std::vector<Input> inputs;
    std::vector<Node> nodes;
    std::vector<Output> outputs;
    std::map<std::string, TensorInfo> tensors;
    bool digits = false;
    std::string rest = "fp16";  // or "bf16": what is not packed

    const char* rest_type() const { return rest == "bf16" ? "BF16" : "F16"; }
};

// Raises Error: FP4D_INVALID_FILE for what the format does not allow, FP4D_UNSUPPORTED for nodes this library has not.
Graph read_graph(const std::string& text);

using Shapes = std::map<std::string, Shape>;

// The shape of every activation for a shape of each input (fp4deploy/packed/shapes.py). Raises Error.
Shapes shapes_of(const Graph& graph, const std::vector<Shape>& inputs);

// Layout of a head's output in the card: what the checks need.
struct Head {
    std::string method;
    int64_t channels = 0;
    int64_t anchors = 1;           // of a detector: boxes a pixel of a feature map
    std::vector<int64_t> strides;  // of a detector
    bool finds_boxes() const { return method != "centres" && method != "set"; }
};

struct Card {
    std::vector<std::string> class_names;
    int64_t height = 0, width = 0;
    double mean[3] = {0, 0, 0}, std[3] = {1, 1, 1};
    std::optional<Head> head;

    int64_t channels() const { return head ? head->channels : int64_t(class_names.size()); }
};

// Raises Error (fp4deploy/models/card.py).
Card read_card(const std::string& text);

// fp4deploy/packed/check.py: `check_graph` and `check_values`. Raise Error.
void check_graph(const Graph& graph, const Card* card);
void check_values(const Graph& graph, const std::map<std::string, Tensor>& tensors);

struct Model {
    std::vector<uint8_t> content;
    std::map<std::string, Tensor> tensors;
    Graph graph;
    std::optional<Card> card;
    std::string version, sha256, card_text, graph_text;

    explicit Model(std::vector<uint8_t> file);
    Model(const Model&) = delete;
};

// Whether the network takes a shape of its first input, and the shapes of all activations then. Raises Error.
Shapes fitting(const Graph& graph, const Shape& input);

std::string text_of(const Shape& shape);

}  // namespace fp4d
