#include <algorithm>
#include <cmath>
#include <set>

#include "error.hpp"
#include "half.hpp"
#include "model.hpp"

// fp4deploy/packed/check.py, whose rules and limits these are.
namespace fp4d {
namespace {

constexpr float LARGEST_FP16 = 65504.f, LARGEST_BF16 = 0x1.FEp127f, SMALLEST_AMAX = 0x1p-100f;

using Forms = std::map<std::string, Form>;

void check_inputs(const Graph& graph) {
    std::set<std::string> names;
    for (const Input& each : graph.inputs) {
        require(names.insert(each.name).second, "two inputs of the graph have one name");
        bool batch = false, kept = true;
        for (const int64_t axis : each.free) batch = batch || axis == 0, kept = kept && axis != 1 && axis < int64_t(each.shape.size());
        require(batch && kept && each.shape[0] == 1, "an input needs a free batch of 1 as its first axis, and fixed channels");
    }
    if (graph.digits) {
        const Shape& shape = graph.inputs[0].shape;
        require(graph.inputs.size() == 1 && shape.size() == 4 && shape[1] == 3, "only an RGB image is encoded as multi-term FP4");
    }
}

void tensor(const Graph& graph, const std::string& name, const char* dtype, const Shape& shape) {
    const auto found = graph.tensors.find(name);
    if (found == graph.tensors.end()) refuse("the tensor '" + shown(name) + "' is missing");
    if (found->second.dtype != dtype || found->second.shape != shape)
        refuse("the tensor '" + shown(name) + "' is " + found->second.dtype + " " + text_of(found->second.shape) + ", and " + dtype + " " + text_of(shape) + " is needed");
}

void check_forms(const Graph& graph, const std::vector<Form>& outputs, bool pools, Forms& forms) {
    for (const Form& form : outputs) {
        if (forms.count(form.name)) refuse("it writes '" + shown(form.name) + "' a second time");
        require(!form.pooled || pools, "only group_norm_relu pools");
        if (!form.amax.empty()) tensor(graph, form.amax, "F32", {});
        forms[form.name] = form;
    }
}

std::vector<std::string> tensors_of(const Node& node) {
    std::vector<std::string> names;
    if (!node.bias.empty()) names.push_back(node.bias);
    if (node.is_layer() && node.packed)
        for (const char* part : {".weight.codes", ".weight.scales", ".weight.amax"}) names.push_back(node.layer + part);
    if ((node.is_layer() && !node.packed) || node.op == Op::GroupNormReLU) names.push_back(node.layer + ".weight");
    if (node.op == Op::GroupNormReLU) names.push_back(node.layer + ".bias");
    for (const Form& form : node.outputs)
        if (!form.amax.empty()) names.push_back(form.amax);
    return names;
}

void check_names(const Graph& graph, const Node& node, const Forms& forms) {
    for (const std::string& name : node.inputs)
        if (!forms.count(name)) refuse("it reads '" + shown(name) + "', which no node before it writes");
    for (const std::string& name : tensors_of(node))
        if (!graph.tensors.count(name)) refuse("the tensor '" + shown(name) + "' is missing");
    for (const std::string& name : node.inputs) {
        const Form& form = forms.at(name);
        const bool packed = !form.amax.empty();
        if (!node.is_layer()) {
            require(!packed, "its input is packed");
            continue;
        }
        require(packed == node.packed, "its input has not its precision");
        require(!packed || !form.along_last, "its input is not packed along its channels");
    }
}

void check_node(const Graph& graph, const Node& node) {
    require(!node.is_layer() || node.packed || node.precision == graph.rest, "its precision is not that of the rest");
    if (node.op == Op::ConvTranspose2d)
        for (int axis = 0; axis < 2; ++axis)
            require(node.output_padding[axis] < std::max(node.stride[axis], node.dilation[axis]), "its output padding is not below its stride or dilation");
    if (node.op == Op::Conv2d && node.inputs.size() == 2) require(node.packed && node.groups == 1, "only a packed convolution of one group has two inputs");
}

void check_used(const Graph& graph, const Forms& forms) {
    std::set<std::string> read, names, tensors;
    for (const Node& node : graph.nodes) {
        read.insert(node.inputs.begin(), node.inputs.end());
        for (const std::string& name : tensors_of(node)) tensors.insert(name);
    }
    for (const Input& each : graph.inputs)
        for (const Form& form : each.outputs)
            if (!form.amax.empty()) tensors.insert(form.amax);
    for (const Output& each : graph.outputs) {
        const auto form = forms.find(each.activation);
        if (form == forms.end() || !form->second.amax.empty()) refuse("the output '" + shown(each.activation) + "' of the graph is no plain activation that a node writes");
        require(names.insert(each.name).second && (!each.name.empty() || graph.outputs.size() == 1), "outputs of the graph share a name");
        read.insert(each.activation);
    }
    for (const Input& each : graph.inputs) read.insert(each.name);
    for (const auto& [name, _] : forms)
        if (!read.count(name)) refuse("the activation '" + shown(name) + "' is never used");
    for (const auto& [name, _] : graph.tensors)
        if (!tensors.count(name)) refuse("the tensor '" + shown(name) + "' is never used");
}

// What a layer is: nodes that read one layer agree on it.
struct Known {
    Op op;
    bool packed;
    int64_t e4m3_max;
    Shape weight;
    size_t inputs;
    bool operator==(const Known& other) const {
        return op == other.op && packed == other.packed && e4m3_max == other.e4m3_max && weight == other.weight && inputs == other.inputs;
    }
};

void check_tensors(const Graph& graph, const Node& node, const Shapes& shapes, std::map<std::string, Known>& layers) {
    if (node.op == Op::GroupNormReLU) {
        const Shape channels{shapes.at(node.inputs[0])[1]};
        for (const char* part : {".weight", ".bias"}) tensor(graph, node.layer + part, graph.rest_type(), channels);
        if (!node.bias.empty()) tensor(graph, node.bias, graph.rest_type(), channels);
        return;
    }
    if (!node.is_layer()) return;
    const bool up = node.op == Op::ConvTranspose2d;
    int64_t channels = 0;
    for (const std::string& name : node.inputs) channels += shapes.at(name)[1];
    Shape weight = graph.tensors.at(node.layer + (node.packed ? ".weight.codes" : ".weight")).shape;
    weight.back() = channels / (up ? 1 : node.groups);
    if (!node.bias.empty()) tensor(graph, node.bias, graph.rest_type(), {weight[0] * (up ? node.groups : 1)});
    if (!node.packed) {
        tensor(graph, node.layer + ".weight", graph.rest_type(), weight);
    } else {
        const int64_t blocks = (weight.back() + BLOCK - 1) / BLOCK;
        Shape codes = weight, scales = weight;
        codes.back() = blocks * BLOCK / 2, scales.back() = blocks;
        tensor(graph, node.layer + ".weight.codes", "U8", codes);
        tensor(graph, node.layer + ".weight.scales", "F8_E4M3", scales);
        tensor(graph, node.layer + ".weight.amax", "F32", {});
        require(up || node.groups == 1 || weight.back() % BLOCK == 0, "a block of 16 would cross its groups");
    }
    const Known known{node.op, node.packed, node.e4m3_max, weight, node.inputs.size()};
    require(layers.emplace(node.layer, known).first->second == known, "another node reads this layer as one of another shape or kind");
    require(node.inputs.size() < 2 || shapes.at(node.inputs[0])[1] % BLOCK == 0, "its first input is not a multiple of 16 channels");
}

void check_logits(const Graph& graph, const Shapes& shapes, const Card& card) {
    const Shape &logits = shapes.at(graph.outputs[0].activation), &image = graph.inputs[0].shape;
    bool fits = card.channels() >= 1 && image.size() == 4;
    if (fits) {
        Shape wanted{image[0], card.channels(), image[2], image[3]};
        if (card.head && card.head->finds_boxes()) {
            int64_t places = 0;
            for (const int64_t stride : card.head->strides) places += ((image[2] + stride - 1) / stride) * ((image[3] + stride - 1) / stride);
            wanted = {image[0], card.channels(), card.head->anchors * places};
        }
        fits = logits == wanted;
    }
    if (!fits)
        refuse("the first output of the graph is " + text_of(logits) + " for an input " + text_of(image) + ", and the model card has " +
               std::to_string(card.channels()) + " channels of the input's size");
}

}  // namespace

void check_graph(const Graph& graph, const Card* card) {
    check_inputs(graph);
    Forms forms;
    for (const Input& each : graph.inputs) check_forms(graph, each.outputs, false, forms);
    size_t number = 0;
    const auto named = [&](const Node& node, Error error) {
        error.text = "node " + std::to_string(number) + " of the graph (" + node.name_of_op + " '" + shown(node.named()) + "'): " + error.text;
        return error;
    };
    for (const Node& node : graph.nodes) {
        try {
            check_names(graph, node, forms);
            check_node(graph, node);
            check_forms(graph, node.outputs, node.op == Op::GroupNormReLU, forms);
        } catch (const Error& error) {
            throw named(node, error);
        }
        ++number;
    }
    check_used(graph, forms);
    std::vector<Shape> examples;
    for (const Input& each : graph.inputs) examples.push_back(each.shape);
    const Shapes shapes = shapes_of(graph, examples);
    std::map<std::string, Known> layers;
    number = 0;
    for (const Node& node : graph.nodes) {
        try {
            check_tensors(graph, node, shapes, layers);
        } catch (const Error& error) {
            throw named(node, error);
        }
        ++number;
    }
    if (card) check_logits(graph, shapes, *card);
}

void check_values(const Graph& graph, const std::map<std::string, Tensor>& tensors) {
    std::set<std::string> amaxes;
    for (const Input& each : graph.inputs)
        for (const Form& form : each.outputs) amaxes.insert(form.amax);
    for (const Node& node : graph.nodes)
        for (const Form& form : node.outputs) amaxes.insert(form.amax);
    constexpr char WEIGHT[] = ".weight.amax";
    const float largest = graph.rest == "bf16" ? LARGEST_BF16 : LARGEST_FP16;
    for (const auto& [name, tensor] : tensors) {
        if (tensor.dtype == "U8") continue;
        const bool amax = amaxes.count(name) != 0;
        const bool weight = name.size() >= sizeof WEIGHT - 1 && name.compare(name.size() - (sizeof WEIGHT - 1), std::string::npos, WEIGHT) == 0;
        if (tensor.dtype == "F8_E4M3") {
            for (size_t at = 0; at < tensor.bytes; ++at)
                if (tensor.content[at] > 0x7E) refuse("the block scales '" + shown(name) + "' hold NaN or a negative number");
            continue;
        }
        const size_t width = tensor.dtype == "F32" ? 4 : 2;
        for (size_t at = 0; at < tensor.bytes; at += width) {
            const float value = number_at(tensor, at);
            if (!(std::fabs(value) <= largest)) refuse("the tensor '" + shown(name) + "' holds NaN, Inf, or a number beyond the rest, " + graph.rest);
            if (amax && !(value >= SMALLEST_AMAX)) refuse("'" + shown(name) + "' is below 2^-100, and a scale needs a larger amax");
            if (weight && !(value >= 0)) refuse("'" + shown(name) + "' is negative, and an amax is not");
        }
    }
}

}  // namespace fp4d
