#include <algorithm>

#include "error.hpp"
#include "model.hpp"

namespace fp4d {
namespace {

constexpr int64_t MAX_ELEMENTS = int64_t(1) << 28, KERNEL_ELEMENTS = (int64_t(1) << 31) - 1, ENCODED = 13;

[[noreturn]] void odd(const std::string& cause) { refuse(cause); }

void add(Shapes& found, const std::vector<Form>& forms, const Shape& shape, int64_t batch, bool pools) {
    int64_t elements = 1;
    for (const int64_t size : shape) {
        if (size < 1) odd("its result " + text_of(shape) + " is empty");
        if (__builtin_mul_overflow(elements, size, &elements)) odd("its result is too large");
    }
    int64_t most;
    if (!__builtin_mul_overflow(MAX_ELEMENTS, std::max<int64_t>(1, batch), &most) && elements > most)
        odd("its result " + text_of(shape) + " has more than 2^28 elements an item");
    for (const Form& form : forms) {
        Shape pooled = shape;
        if (form.pooled) {
            if (!pools) odd("only group_norm_relu pools");
            const size_t rank = pooled.size();
            if (rank < 2 || std::min(pooled[rank - 1], pooled[rank - 2]) < 2) odd("its result is too small to be pooled");
            pooled[rank - 1] /= 2, pooled[rank - 2] /= 2;
        }
        found[form.name] = pooled;
    }
}

Shape convolved(const Graph& graph, const Node& node, const std::vector<Shape>& inputs) {
    int64_t channels = 0;
    for (const Shape& shape : inputs) {
        if (shape.size() != 4) odd("it reads feature maps [N, C, H, W]");
        channels += shape[1];
        if (shape[0] != inputs[0][0] || shape[2] != inputs[0][2] || shape[3] != inputs[0][3]) odd("its inputs differ in size");
    }
    const Shape& stored = graph.tensors.at(node.layer + (node.packed ? ".weight.codes" : ".weight")).shape;
    if (stored.size() != 4) odd("its weight has " + std::to_string(stored.size()) + " axes");
    if (channels % node.groups) odd("its groups do not divide its channels");
    const int64_t outputs = stored[0];
    if (node.packed) {
        const int64_t deep = (channels + BLOCK - 1) / BLOCK * BLOCK;
        if (int64_t elements; __builtin_mul_overflow(inputs[0][3] * deep, stored[1], &elements) || elements > KERNEL_ELEMENTS)
            odd("a row of its input is beyond 2^31 elements");
    }
    if (outputs < 1 || stored[1] < 1 || stored[2] < 1) odd("its weight is empty");
    Shape result{inputs[0][0], outputs, 0, 0};
    const bool up = node.op == Op::ConvTranspose2d;
    if (!up && outputs % node.groups) odd("its groups do not divide its outputs");
    if (up) result[1] = outputs * node.groups;
    for (size_t axis = 0; axis < 2; ++axis) {
        const int64_t size = inputs[0][2 + axis], reach = node.dilation[axis] * (stored[1 + axis] - 1);
        if (up) {
            result[2 + axis] = (size - 1) * node.stride[axis] - 2 * node.padding[axis] + reach + node.output_padding[axis] + 1;
        } else {
            const int64_t room = size + 2 * node.padding[axis] - reach - 1;
            if (room < 0) odd("its filter is larger than its padded input");
            result[2 + axis] = room / node.stride[axis] + 1;
        }
    }
    return result;
}

Shape result_of(const Graph& graph, const Node& node, const std::vector<Shape>& inputs) {
    switch (node.op) {
        case Op::Conv2d:
        case Op::ConvTranspose2d: return convolved(graph, node, inputs);
        case Op::GroupNormReLU: {
            const Shape& x = inputs[0];
            if (x.size() != 4) odd("it reads feature maps [N, C, H, W]");
            if (x[1] % node.groups) odd("its groups do not divide its channels");
            if (x[0] * x[1] / node.groups * x[2] * x[3] == 1) odd("a group of one value has no variance");
            return x;
        }
        case Op::Concat: {
            Shape joined = inputs[0];
            const size_t dim = size_t(node.dim);
            if (dim >= joined.size()) odd("its axis is beyond its inputs");
            for (size_t number = 1; number < inputs.size(); ++number) {
                Shape next = inputs[number];
                if (next.size() != joined.size()) odd("its inputs have different axes");
                const int64_t size = next[dim];
                next[dim] = joined[dim];
                if (next != joined) odd("its inputs differ in size");
                joined[dim] += size;
            }
            return joined;
        }
    }
    odd("there is no such node");
}

}  // namespace

std::string text_of(const Shape& shape) {
    std::string text = "[";
    for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
    return text + "]";
}

Shapes shapes_of(const Graph& graph, const std::vector<Shape>& inputs) {
    Shapes found;
    const int64_t batch = inputs[0][0];
    for (size_t number = 0; number < graph.inputs.size(); ++number) {
        Shape read = inputs[number];
        if (graph.digits && read.size() > 1) read[1] = ENCODED;
        add(found, graph.inputs[number].outputs, read, batch, false);
    }
    size_t number = 0;
    for (const Node& node : graph.nodes) {
        try {
            std::vector<Shape> read;
            for (const std::string& name : node.inputs) read.push_back(found.at(name));
            add(found, node.outputs, result_of(graph, node, read), batch, node.op == Op::GroupNormReLU);
        } catch (Error& error) {
            error.text = "node " + std::to_string(number) + " of the graph (" + node.name_of_op + " '" + shown(node.named()) + "'): " + error.text;
            throw;
        }
        ++number;
    }
    return found;
}

Shapes fitting(const Graph& graph, const Shape& input) {
    if (graph.inputs.size() != 1) unsupported("the network has several inputs, and this library runs networks of one");
    const Input& wanted = graph.inputs[0];
    bool fits = input.size() == wanted.shape.size();
    for (size_t axis = 0; fits && axis < input.size(); ++axis) {
        const bool free = std::find(wanted.free.begin(), wanted.free.end(), int64_t(axis)) != wanted.free.end();
        fits = input[axis] >= 1 && input[axis] <= (int64_t(1) << 31) && (free || input[axis] == wanted.shape[axis]);
    }
    if (!fits) refuse_argument("the network's input is like " + text_of(wanted.shape) + ", not " + text_of(input));
    try {
        return shapes_of(graph, {input});
    } catch (Error& error) {
        error.status = FP4D_INVALID_ARGUMENT;
        throw;
    }
}

}  // namespace fp4d
