#include "model.hpp"

#include <algorithm>
#include <iterator>

#include "error.hpp"
#include "sha256.hpp"

namespace fp4d {
namespace {

constexpr char KEY[] = "fp4deploy.packed", FORMATS[9][10] = {"packed/11", "packed/10", "packed/9", "packed/8", "packed/7", "packed/6", "packed/5", "packed/4", "packed/3"}, AGAIN[] = ". Write it again with: fp4deploy export --format packed";

const std::string& entry(const Value& metadata, const char* key) {
    const Value* found = metadata.find(key);
    if (!found) refuse(std::string("the file lacks ") + key + " in its metadata" + AGAIN);
    return found->text;
}

}  // namespace

Model::Model(std::vector<uint8_t> file) : content(std::move(file)) {
    Safetensors read = read_safetensors(content.data(), content.size());
    const auto text = read.metadata.find(KEY);
    if (text == read.metadata.end()) refuse("the file is safetensors, but not a packed network");
    const Value metadata = parse_json(text->second, METADATA, "its metadata");
    require(metadata.kind == Value::Object, "its metadata cannot be read");
    const Value* format = metadata.find("format");
    if (!format || format->kind != Value::String || std::find(std::begin(FORMATS), std::end(FORMATS), format->text) == std::end(FORMATS))
        refuse("the file has the format '" + shown(format ? format->text : "") + "', and this library reads " + std::end(FORMATS)[-1] + " to " + FORMATS[0] + AGAIN);
    for (const auto& [name, value] : metadata.fields)
        if (value.kind != Value::String) refuse("its metadata holds something else than text");
    Sha256 sum;
    for (const char* key : {"format", "version", "card", "graph"}) {
        const std::string& part = entry(metadata, key);
        uint8_t length[8];
        for (int at = 0; at < 8; ++at) length[at] = uint8_t(uint64_t(part.size()) >> (8 * at));
        sum.update(length, 8);
        sum.update(part.data(), part.size());
    }
    sha256 = entry(metadata, "sha256");
    if (sum.hex() != sha256) refuse(std::string("its graph or model card was changed after it was written") + AGAIN);
    version = entry(metadata, "version");
    card_text = entry(metadata, "card");
    graph_text = entry(metadata, "graph");
    if (!card_text.empty()) card = read_card(card_text);
    graph = read_graph(graph_text);
    for (const auto& [name, tensor] : read.tensors)
        if (!graph.tensors.count(name)) refuse("the tensor '" + shown(name) + "' is none that the graph lists");
    for (const auto& [name, info] : graph.tensors) {
        const auto found = read.tensors.find(name);
        if (found == read.tensors.end()) refuse("the file lacks the tensor '" + shown(name) + "'");
        const Tensor& tensor = found->second;
        if (tensor.dtype != info.dtype || tensor.shape != info.shape || fp4d::sha256(tensor.content, tensor.bytes) != info.sha256)
            refuse("the file is damaged: the tensor '" + shown(name) + "' is not the one that was written");
    }
    tensors = std::move(read.tensors);
}

}  // namespace fp4d
