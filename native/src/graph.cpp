#include <cmath>
#include <initializer_list>

#include "error.hpp"
#include "model.hpp"

// The types of fp4deploy/packed/graph.py: no unknown field, no conversion, each number within its limits.
namespace fp4d {
namespace {

constexpr size_t MAX_NODES = 4096, MAX_FORMS = 64, MAX_NAME = 200;
const char* const OTHERS[] = {"conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d", "linear", "affine", "group_norm", "instance_norm",
                              "layer_norm", "activation", "prelu", "add", "sub", "mul", "div", "pow", "maximum", "minimum", "greater",
                              "greater_equal", "less", "less_equal", "equal", "not_equal", "where", "constant", "max_pool", "avg_pool",
                              "adaptive_pool", "reduce", "variance", "cumulative_sum", "argmax", "resize", "pixel_shuffle", "pixel_unshuffle",
                              "unfold", "fold", "reshape", "expand", "permute", "slice", "select", "roll", "flip", "repeat", "take", "pad", "matmul", "softmax",
                              "log_softmax", "attention", "experts", "aten"};

class Fields {
public:
    Fields(const Value& value, std::initializer_list<const char*> known, const char* what) : value_(value), what_(what) {
        if (value.kind != Value::Object) fail("is no object");
        for (const auto& [name, _] : value.fields) {
            bool found = false;
            for (const char* each : known) found = found || name == each;
            if (!found) fail("has the unknown field '" + shown(name) + "'");
        }
    }

    [[noreturn]] void fail(const std::string& cause) const { refuse(std::string("its graph cannot be read: ") + what_ + " " + cause); }

    const Value& get(const char* name) const {
        const Value* found = value_.find(name);
        if (!found) fail(std::string("lacks the field ") + name);
        return *found;
    }
    const Value* maybe(const char* name) const { return value_.find(name); }

    const std::vector<Value>& list(const char* name, size_t least, size_t most) const {
        const Value& value = get(name);
        if (value.kind != Value::Array || value.items.size() < least || value.items.size() > most)
            fail(std::string(name) + " is no list of its length");
        return value.items;
    }

    std::string text(const Value& value, size_t least = 1, size_t most = MAX_NAME) const {
        if (value.kind != Value::String) fail("has a name that is no text");
        const size_t count = characters(value.text);
        if (count < least || count > most) fail("has a name that is empty or too long");
        return value.text;
    }
    std::string name(const char* field) const { return text(get(field)); }
    std::string maybe_name(const char* field) const {
        const Value* value = maybe(field);
        return value && value->kind != Value::Null ? text(*value) : "";
    }
    std::vector<std::string> names(const char* field, size_t least, size_t most) const {
        std::vector<std::string> found;
        for (const Value& each : list(field, least, most)) found.push_back(text(each));
        return found;
    }

    int64_t integer(const Value& value, int64_t least, int64_t most) const {
        if (value.kind != Value::Int || value.large || value.integer < least || value.integer > most)
            fail("has a number that is none, or beyond its limits");
        return value.integer;
    }
    int64_t integer(const char* field, int64_t usual, int64_t least, int64_t most) const {
        const Value* value = maybe(field);
        return value ? integer(*value, least, most) : usual;
    }
    void pair(const char* field, int64_t least, int64_t most, int64_t (&into)[2]) const {
        if (!maybe(field)) return;
        const auto& items = list(field, 2, 2);
        for (int at = 0; at < 2; ++at) into[at] = integer(items[size_t(at)], least, most);
    }
    bool flag(const char* field) const {
        const Value* value = maybe(field);
        if (!value) return false;
        if (value->kind != Value::Bool) fail(std::string(field) + " is neither true nor false");
        return value->truth;
    }

private:
    const Value& value_;
    const char* what_;
};

std::vector<Form> forms(const Fields& owner) {
    std::vector<Form> found;
    for (const Value& each : owner.list("outputs", 1, MAX_FORMS)) {
        const Fields fields(each, {"name", "amax", "axis", "pooled"}, "an activation");
        Form form;
        form.name = fields.name("name");
        form.amax = fields.maybe_name("amax");
        if (const Value* axis = fields.maybe("axis")) {
            if (axis->kind != Value::String || (axis->text != "channels" && axis->text != "last")) fields.fail("has an unknown axis");
            form.along_last = axis->text == "last";
        }
        form.pooled = fields.flag("pooled");
        found.push_back(form);
    }
    return found;
}

void layer(const Fields& fields, Node& node) {
    node.layer = fields.name("layer");
    const Value& precision = fields.get("precision");
    if (precision.kind != Value::String || (precision.text != "nvfp4" && precision.text != "fp16" && precision.text != "bf16")) fields.fail("has an unknown precision");
    node.precision = precision.text;
    node.packed = precision.text == "nvfp4";
    if (const Value* most = fields.maybe("e4m3_max")) {
        const bool number = (most->kind == Value::Int && !most->large) || most->kind == Value::Float;
        if (!number || (most->number != 448 && most->number != 256)) fields.fail("has an e4m3_max that is neither 448 nor 256");
        node.e4m3_max = int64_t(most->number);
    }
    node.bias = fields.maybe_name("bias");
}

Node read_node(const Value& value, size_t number) {
    if (value.kind != Value::Object) refuse("its graph cannot be read: a node is no object");
    const Value* op = value.find("op");
    if (!op || op->kind != Value::String) refuse("its graph cannot be read: a node has no op");
    constexpr int64_t EXTENT = 1 << 12, STEPS = 1 << 10, COUNT = 1 << 16;
    Node node;
    node.name_of_op = op->text;
    if (op->text == "conv2d") {
        const Fields fields(value, {"op", "inputs", "outputs", "layer", "precision", "e4m3_max", "bias", "stride", "padding", "dilation", "groups", "relu"}, "a conv2d");
        node.op = Op::Conv2d;
        node.inputs = fields.names("inputs", 1, 2);
        node.outputs = forms(fields);
        layer(fields, node);
        fields.pair("stride", 1, STEPS, node.stride);
        fields.pair("padding", 0, EXTENT, node.padding);
        fields.pair("dilation", 1, STEPS, node.dilation);
        node.groups = fields.integer("groups", 1, 1, COUNT);
        node.relu = fields.flag("relu");
    } else if (op->text == "conv_transpose2d") {
        const Fields fields(value, {"op", "inputs", "outputs", "layer", "precision", "e4m3_max", "bias", "stride", "padding", "output_padding", "dilation", "groups"}, "a conv_transpose2d");
        node.op = Op::ConvTranspose2d;
        node.inputs = fields.names("inputs", 1, 1);
        node.outputs = forms(fields);
        layer(fields, node);
        node.stride[0] = node.stride[1] = 2;
        fields.pair("stride", 1, STEPS, node.stride);
        fields.pair("padding", 0, EXTENT, node.padding);
        fields.pair("output_padding", 0, EXTENT, node.output_padding);
        fields.pair("dilation", 1, STEPS, node.dilation);
        node.groups = fields.integer("groups", 1, 1, COUNT);
    } else if (op->text == "group_norm_relu") {
        const Fields fields(value, {"op", "inputs", "outputs", "layer", "groups", "eps", "bias"}, "a group_norm_relu");
        node.op = Op::GroupNormReLU;
        node.inputs = fields.names("inputs", 1, 1);
        node.outputs = forms(fields);
        node.layer = fields.name("layer");
        node.groups = fields.integer(fields.get("groups"), 1, COUNT);
        const Value& eps = fields.get("eps");
        if ((eps.kind != Value::Int && eps.kind != Value::Float) || !(eps.number > 1e-12 && eps.number < 1)) fields.fail("has an eps beyond its limits");
        node.bias = fields.maybe_name("bias");
    } else if (op->text == "concat") {
        const Fields fields(value, {"op", "inputs", "outputs", "dim"}, "a concat");
        node.op = Op::Concat;
        node.inputs = fields.names("inputs", 2, 256);
        node.outputs = forms(fields);
        node.dim = fields.integer("dim", 1, 0, 7);
    } else {
        for (const char* other : OTHERS)
            if (op->text == other)
                unsupported("node " + std::to_string(number) + " of the graph is a '" + op->text +
                            "', and this library computes conv2d, conv_transpose2d, group_norm_relu and concat: run the file with Python");
        refuse("its graph cannot be read: there is no node '" + shown(op->text) + "'");
    }
    return node;
}

bool is_digest(const std::string& text) {
    if (text.size() != 64) return false;
    for (const char letter : text)
        if (!((letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'f'))) return false;
    return true;
}

}  // namespace

Graph read_graph(const std::string& text) {
    const Value value = parse_json(text, GRAPH, "its graph");
    const Fields fields(value, {"inputs", "nodes", "outputs", "tensors", "digits", "rest", "wide"}, "the graph");
    Graph graph;
    if (fields.maybe("rest")) graph.rest = fields.text(fields.get("rest"), 0);
    const Value* wide = fields.maybe("wide");
    if (graph.rest == "fp32" || (wide && !(wide->kind == Value::Object && wide->fields.empty()))) unsupported("this library computes networks in FP16 or BF16, and this one, or a part of it, is FP32: run the file with Python");
    if (graph.rest != "fp16" && graph.rest != "bf16") fields.fail("has an unknown rest");
    for (const Value& each : fields.list("inputs", 1, 8)) {
        const Fields about(each, {"name", "shape", "free", "outputs"}, "an input");
        Input input;
        input.name = about.name("name");
        for (const Value& size : about.list("shape", 1, 6)) input.shape.push_back(about.integer(size, 1, 1 << 20));
        for (const Value& axis : about.list("free", 0, SIZE_MAX)) input.free.push_back(about.integer(axis, 0, 7));
        input.outputs = forms(about);
        graph.inputs.push_back(input);
    }
    size_t number = 0;
    for (const Value& each : fields.list("nodes", 1, MAX_NODES)) graph.nodes.push_back(read_node(each, number++));
    for (const Value& each : fields.list("outputs", 1, 64)) {
        const Fields about(each, {"name", "activation"}, "an output");
        graph.outputs.push_back({about.text(about.get("name"), 0), about.name("activation")});
    }
    const Value& tensors = fields.get("tensors");
    if (tensors.kind != Value::Object) fields.fail("has no list of tensors");
    for (const auto& [name, each] : tensors.fields) {
        const Fields about(each, {"dtype", "shape", "sha256"}, "a tensor");
        Value key;
        key.kind = Value::String;
        key.text = name;
        TensorInfo info;
        info.dtype = about.text(about.get("dtype"), 0, SIZE_MAX);
        if (info.dtype != "U8" && info.dtype != "F8_E4M3" && info.dtype != "F16" && info.dtype != "BF16" && info.dtype != "F32") about.fail("has an unknown type");
        for (const Value& size : about.list("shape", 0, SIZE_MAX)) info.shape.push_back(about.integer(size, 0, int64_t(1) << 31));
        info.sha256 = about.text(about.get("sha256"), 0, SIZE_MAX);
        if (!is_digest(info.sha256)) about.fail("has a sha256 that is none");
        graph.tensors[about.text(key)] = info;
    }
    graph.digits = fields.flag("digits");
    return graph;
}

}  // namespace fp4d
