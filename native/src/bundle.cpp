#include "bundle.hpp"

#include <cmath>

#include "error.hpp"
#include "half.hpp"
#include "sha256.hpp"

namespace fp4d {
namespace {

constexpr char BUNDLE_KEY[] = "fp4deploy.kernels", BUNDLE_FORMAT[] = "kernels/2";
constexpr Dialect BODY{true, false, true, true, 64};
constexpr const char* NAMES[STAGES] = {"input.float32", "input.float16", "body", "output.float32", "output.float16", "output.classes"};
constexpr int64_t MAX_SHARED = 227 << 10, MAX_MEMORY = int64_t(1) << 46;

const Value& field(const Value& value, const char* name, Value::Kind kind) {
    const Value* found = value.kind == Value::Object ? value.find(name) : nullptr;
    if (!found || found->kind != kind) refuse(std::string("the kernel bundle lacks ") + name + ", or it has another type");
    return *found;
}

int64_t whole(const Value& value, int64_t least, int64_t most) {
    if (value.kind != Value::Int || value.large || value.integer < least || value.integer > most) refuse("the kernel bundle has a number beyond its limits");
    return value.integer;
}

int64_t number(const Value& value, const char* name, int64_t least, int64_t most) { return whole(field(value, name, Value::Int), least, most); }

const std::vector<Value>& list(const Value& value, const char* name, size_t most) {
    const auto& items = field(value, name, Value::Array).items;
    if (items.size() > most) refuse(std::string("the kernel bundle has too many ") + name);
    return items;
}

Shape shape(const Value& value) {
    if (value.kind != Value::Array || value.items.size() > 8) refuse("the kernel bundle has a shape that is none");
    Shape found;
    int64_t elements = 1;
    for (const Value& each : value.items) {
        found.push_back(whole(each, 1, int64_t(1) << 31));
        if (__builtin_mul_overflow(elements, found.back(), &elements) || elements > MAX_MEMORY / 8) refuse("the kernel bundle has a tensor that no memory holds");
    }
    return found;
}

// SHA-256 of a graph without the digests of its tensors: networks of one digest launch the same.
std::string graph_digest(const std::string& text) {
    constexpr std::string_view NAME = "\"sha256\":\"";
    std::string kept;
    for (size_t at = 0; at < text.size();) {
        const bool here = text.compare(at, NAME.size(), NAME) == 0 && at + NAME.size() + 64 < text.size() && text[at + NAME.size() + 64] == '"' &&
                          text.find_first_not_of("0123456789abcdef", at + NAME.size()) == at + NAME.size() + 64;
        if (!here) {
            kept += text[at++];
            continue;
        }
        kept += NAME;
        at += NAME.size() + 64;
    }
    return sha256(kept.data(), kept.size());
}

class Reader {
public:
    Reader(const Bundle& bundle, const Model& model) : bundle_(bundle), model_(model) {}

    KernelCode kernel(const Value& value) const {
        KernelCode found;
        found.code = field(value, "code", Value::String).text;
        found.name = field(value, "name", Value::String).text;
        found.parameters = field(value, "parameters", Value::String).text;
        found.shared = int(number(value, "shared", 0, MAX_SHARED));
        const Tensor& cubin = own(found.code, value);
        if (cubin.bytes < 64 || std::memcmp(cubin.content, "\x7f" "ELF\x02", 5) != 0 || cubin.content[18] != 190) refuse("the kernel bundle holds code that is no CUDA machine code");
        if (found.name.empty() || found.name.size() > 200 || found.name.find('\0') != std::string::npos || found.parameters.size() > 256 ||
            found.parameters.find_first_not_of("Pqif") != std::string::npos)
            refuse("the kernel bundle has a kernel without a name, or with parameters of unknown types");
        return found;
    }

    Constant constant(const Value& value) const {
        Constant found;
        const std::string& kind = field(value, "kind", Value::String).text;
        found.tensor = field(value, "tensor", Value::String).text;
        found.up = field(value, "up", Value::Bool).truth;
        for (const Value& each : list(value, "sources", 2)) found.sources.push_back(whole(each, 1, 1 << 20));
        found.bytes = size_t(number(value, "bytes", 1, MAX_MEMORY));
        size_t needed = 0;
        if (kind == "planes") {
            found.kind = Constant::Planes;
            needed = planes(found);
        } else if (kind == "stored") {
            found.kind = Constant::Stored;
            needed = own(found.tensor, value).bytes;
        } else {
            const auto tensor = model_.tensors.find(found.tensor);
            if (tensor == model_.tensors.end() || (kind != "bytes" && kind != "float32")) refuse("the kernel bundle has a constant of an unknown kind or tensor");
            found.kind = kind == "bytes" ? Constant::Bytes : Constant::Float32;
            needed = tensor->second.bytes;
            if (found.kind == Constant::Float32 && tensor->second.dtype != "F32") {
                if (tensor->second.dtype != "F16" && tensor->second.dtype != "BF16") refuse("the kernel bundle widens a tensor of bytes");
                needed *= 2;
            }
        }
        if (needed != found.bytes) refuse("the kernel bundle has a constant of " + std::to_string(found.bytes) + " bytes, and the network gives " + std::to_string(needed));
        return found;
    }

    Plan plan(const Value& value) const {
        Plan found;
        for (const Value& each : list(value, "inputs", MAX_PORTS)) found.inputs.push_back(shape(each));
        for (const Value& each : list(value, "outputs", MAX_PORTS)) found.outputs.push_back(shape(each));
        const Graph& graph = model_.graph;
        bool same = found.inputs.size() == graph.inputs.size() && found.outputs.size() == graph.outputs.size();
        for (size_t at = 0; same && at < found.inputs.size(); ++at) same = fits(graph.inputs[at], found.inputs[at]);
        require(same, "the kernel bundle has a plan with other inputs or outputs than the network");
        found.arena = size_t(number(value, "arena", 0, MAX_MEMORY));
        const Value& stages = field(value, "stages", Value::Object);
        for (int stage = 0; stage < STAGES; ++stage)
            for (const Value& each : list(stages, NAMES[stage], 100'000)) found.stages[stage].push_back(launch(each, found, Stage(stage)));
        return found;
    }

private:
    // A tensor of the bundle, with the digest that `owner` gives.
    const Tensor& own(const std::string& name, const Value& owner) const {
        const auto found = bundle_.file.tensors.find(name);
        if (found == bundle_.file.tensors.end() || found->second.dtype != "U8") refuse("the kernel bundle lacks the tensor " + shown(name));
        const Tensor& tensor = found->second;
        if (sha256(tensor.content, tensor.bytes) != field(owner, "sha256", Value::String).text) refuse("the kernel bundle is damaged: " + shown(name) + " is not what was written");
        return tensor;
    }

    size_t planes(const Constant& wanted) const {
        const auto codes = model_.tensors.find(wanted.tensor + ".weight.codes"), scales = model_.tensors.find(wanted.tensor + ".weight.scales");
        const auto none = model_.tensors.end();
        if (codes != none && scales != none && codes->second.shape.size() == 4 && codes->second.bytes == 8 * scales->second.bytes && codes->second.bytes) {
            const Shape& shape = codes->second.shape;
            int64_t bytes = 0, steps = 0;
            for (const int64_t source : wanted.sources) bytes += (source + 15) / 16 * 8;
            for (const int64_t source : wanted.sources) steps += ((wanted.up ? 1 : shape[1] * shape[2]) * ((source + 15) / 16 * 8) + 63) / 64 * 64;
            if (bytes == shape[3]) return size_t(2 * shape[0] * (wanted.up ? shape[1] * shape[2] : 1) * steps * 2);
        }
        refuse("the kernel bundle decodes a weight that the network has not: '" + shown(wanted.tensor) + "'");
    }

    Launch launch(const Value& value, const Plan& plan, Stage stage) const {
        if (value.kind != Value::Array || value.items.size() != 7 || value.items[6].kind != Value::Array) refuse("the kernel bundle has a launch that is none");
        Launch found;
        found.kernel = size_t(whole(value.items[0], 0, int64_t(bundle_.kernels.size()) - 1));
        for (size_t axis = 0; axis < 3; ++axis) found.grid[axis] = unsigned(whole(value.items[1 + axis], 1, axis ? 65'535 : INT32_MAX));
        found.block = unsigned(whole(value.items[4], 1, 1024));
        const KernelCode& kernel = bundle_.kernels[found.kernel];
        found.shared = unsigned(whole(value.items[5], 0, kernel.shared));
        const auto& values = value.items[6].items;
        require(values.size() == kernel.parameters.size(), "the kernel bundle has a launch with another number of arguments than its kernel");
        for (size_t at = 0; at < values.size(); ++at) found.arguments.push_back(argument(values[at], kernel.parameters[at], plan, stage));
        return found;
    }

    Argument argument(const Value& value, char letter, const Plan& plan, Stage stage) const {
        Argument found;
        if (letter == 'q' || letter == 'i') {
            const int64_t most = letter == 'q' ? INT64_MAX : INT32_MAX;
            found.value = uint64_t(whole(value, -most - 1, most));
        } else if (letter == 'f') {
            if (value.kind != Value::Int && value.kind != Value::Float) refuse("the kernel bundle has an argument that is no number");
            const float narrow = float(value.number);
            require(std::isfinite(narrow), "the kernel bundle has an argument that is no finite number");
            found.value = bits_of(narrow);
        } else if (value.kind != Value::Null) {
            if (value.kind != Value::Array || value.items.size() != 2 || value.items[0].kind != Value::String) refuse("the kernel bundle has a pointer that is none");
            const std::string& kind = value.items[0].text;
            int64_t most = -1;
            if (kind == "constant") found.kind = Argument::ConstantPointer, most = int64_t(bundle_.constants.size()) - 1;
            if (kind == "arena") found.kind = Argument::ArenaPointer, most = int64_t(plan.arena) - 1;
            if (kind == "input" && stage <= InputFloat16) found.kind = Argument::InputPointer, most = int64_t(plan.inputs.size()) - 1;
            if (kind == "output" && stage >= OutputFloat32) found.kind = Argument::OutputPointer, most = stage == OutputClasses ? 0 : int64_t(plan.outputs.size()) - 1;
            found.value = uint64_t(whole(value.items[1], 0, most));
        }
        return found;
    }

    const Bundle& bundle_;
    const Model& model_;
};

}  // namespace

Bundle::Bundle(std::vector<uint8_t> bytes, const Model& model) : content(std::move(bytes)) {
    file = read_safetensors(content.data(), content.size());
    const auto text = file.metadata.find(BUNDLE_KEY);
    if (text == file.metadata.end()) refuse("the kernel bundle is none: write one with fp4deploy kernels --for FILE.fp4");
    const Value metadata = parse_json(text->second, BODY, "the kernel bundle's metadata");
    const std::string& format = field(metadata, "format", Value::String).text;
    if (format != BUNDLE_FORMAT) refuse("the kernel bundle has the format '" + shown(format) + "', and this library reads " + BUNDLE_FORMAT);
    Sha256 sum;
    for (const char* key : {"format", "version", "body"}) {
        const std::string& part = field(metadata, key, Value::String).text;
        uint8_t length[8];
        for (int at = 0; at < 8; ++at) length[at] = uint8_t(uint64_t(part.size()) >> (8 * at));
        sum.update(length, 8);
        sum.update(part.data(), part.size());
    }
    require(sum.hex() == field(metadata, "sha256", Value::String).text, "the kernel bundle was changed after it was written");
    const Value body = parse_json(field(metadata, "body", Value::String).text, BODY, "the kernel bundle");
    // A bundle that holds weights is of one file; one that reads them from the file, of every file with the same graph.
    const bool bound = field(body, "bound", Value::Bool).truth;
    const std::string digest = bound ? sha256(model.graph_text.data(), model.graph_text.size()) : graph_digest(model.graph_text);
    if (field(body, "network", Value::String).text != digest) refuse("the kernel bundle is for another network: write one for this file with fp4deploy kernels --for FILE.fp4");
    arch = int(number(body, "arch", 50, 999));
    const Reader read(*this, model);
    // The limits are those of fp4deploy/native/bundle.py.
    for (const Value& each : list(body, "kernels", 4096)) kernels.push_back(read.kernel(each));
    for (const Value& each : list(body, "constants", 65'536)) constants.push_back(read.constant(each));
    for (const Value& each : list(body, "plans", 256)) plans.push_back(read.plan(each));
    require(!plans.empty(), "the kernel bundle has no plan");
}

}  // namespace fp4d
