// The C interface: handles, and exceptions turned into a status and a text of the calling thread.
#include <cstdio>
#include <new>

#include "error.hpp"
#include "network.hpp"

struct fp4d_model {
    fp4d::Model model;
};
struct fp4d_network {
    fp4d::Network network;
};
struct fp4d_run {
    fp4d::Run run;
};

namespace {

thread_local char last_error[1024];

void remember(const char* text) noexcept { std::snprintf(last_error, sizeof last_error, "%s", text); }

template <typename Body>
fp4d_status guarded(const Body& body) noexcept {
    try {
        last_error[0] = '\0';
        body();
        return FP4D_OK;
    } catch (const fp4d::Error& error) {
        remember(error.text.c_str());
        return error.status;
    } catch (const std::bad_alloc&) {
        remember("no memory on the host");
        return FP4D_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        remember(error.what());
        return FP4D_INVALID_FILE;
    } catch (...) {
        remember("an unknown failure");
        return FP4D_INVALID_FILE;
    }
}

void given(bool pointers) {
    if (!pointers) fp4d::refuse_argument("a pointer argument is null");
}

std::vector<uint8_t> content_of(const char* path) {
    struct Close {
        std::FILE* file;
        ~Close() {
            if (file) std::fclose(file);
        }
    } opened{std::fopen(path, "rb")};
    if (!opened.file) fp4d::refuse("the file cannot be opened");
    std::vector<uint8_t> content;
    uint8_t room[1 << 16];
    while (const size_t count = std::fread(room, 1, sizeof room, opened.file)) content.insert(content.end(), room, room + count);
    if (std::ferror(opened.file)) fp4d::refuse("the file cannot be read");
    return content;
}

std::vector<uint8_t> copy_of(const void* content, size_t bytes) {
    const auto* const first = static_cast<const uint8_t*>(content);
    return {first, first + bytes};
}

void write(const fp4d::Shape& shape, fp4d_shape* into) {
    *into = fp4d_shape{};
    into->rank = int32_t(shape.size());
    for (size_t axis = 0; axis < shape.size() && axis < 8; ++axis) into->size[axis] = shape[axis];
}

template <typename Items>
const typename Items::value_type* at(const Items& items, int32_t number) {
    return number >= 0 && size_t(number) < items.size() ? &items[size_t(number)] : nullptr;
}

}  // namespace

extern "C" {

const char* fp4d_version(void) { return FP4D_VERSION; }

const char* fp4d_status_name(int32_t status) {
    static const char* const names[] = {"ok", "invalid file", "invalid argument", "unsupported network", "no GPU", "CUDA error", "out of memory"};
    return status >= 0 && status <= FP4D_OUT_OF_MEMORY ? names[status] : "unknown status";
}

const char* fp4d_last_error(void) { return last_error; }

fp4d_status fp4d_model_open(const char* path, fp4d_model** model) {
    if (model) *model = nullptr;
    return guarded([&] {
        given(path && model);
        *model = new fp4d_model{fp4d::Model(content_of(path))};
    });
}

fp4d_status fp4d_model_open_memory(const void* content, size_t bytes, fp4d_model** model) {
    if (model) *model = nullptr;
    return guarded([&] {
        given(content && model);
        *model = new fp4d_model{fp4d::Model(copy_of(content, bytes))};
    });
}

void fp4d_model_close(fp4d_model* model) { delete model; }

int32_t fp4d_model_inputs(const fp4d_model* model) { return int32_t(model->model.graph.inputs.size()); }
int32_t fp4d_model_outputs(const fp4d_model* model) { return int32_t(model->model.graph.outputs.size()); }

const char* fp4d_model_input_name(const fp4d_model* model, int32_t number) {
    const auto* const input = at(model->model.graph.inputs, number);
    return input ? input->name.c_str() : nullptr;
}

const char* fp4d_model_output_name(const fp4d_model* model, int32_t number) {
    const auto* const output = at(model->model.graph.outputs, number);
    return output ? output->c_str() : nullptr;
}

fp4d_status fp4d_model_input_shape(const fp4d_model* model, int32_t number, fp4d_shape* shape, uint32_t* free_axes) {
    return guarded([&] {
        given(model && shape);
        const auto* const input = at(model->model.graph.inputs, number);
        if (!input) fp4d::refuse_argument("there is no such input");
        write(input->shape, shape);
        if (!free_axes) return;
        *free_axes = 0;
        for (const int64_t axis : input->free) *free_axes |= 1u << axis;
    });
}

int32_t fp4d_model_classes(const fp4d_model* model) { return model->model.card ? int32_t(model->model.card->class_names.size()) : 0; }

const char* fp4d_model_class_name(const fp4d_model* model, int32_t number) {
    const auto* const name = model->model.card ? at(model->model.card->class_names, number) : nullptr;
    return name ? name->c_str() : nullptr;
}

void fp4d_model_image_size(const fp4d_model* model, int32_t* height, int32_t* width) {
    const auto& card = model->model.card;
    const fp4d::Shape& example = model->model.graph.inputs[0].shape;
    *height = int32_t(card ? card->height : example.size() == 4 ? example[2] : 1);
    *width = int32_t(card ? card->width : example.size() == 4 ? example[3] : 1);
}

void fp4d_model_normalisation(const fp4d_model* model, float mean[3], float std[3]) {
    const fp4d::Card plain, &card = model->model.card ? *model->model.card : plain;
    for (int at = 0; at < 3; ++at) mean[at] = float(card.mean[at]), std[at] = float(card.std[at]);
}

const char* fp4d_model_metadata(const fp4d_model* model, const char* key) {
    const std::string wanted = key ? key : "";
    const fp4d::Model& found = model->model;
    if (wanted == "card") return found.card_text.c_str();
    if (wanted == "graph") return found.graph_text.c_str();
    if (wanted == "version") return found.version.c_str();
    return wanted == "sha256" ? found.sha256.c_str() : nullptr;
}

fp4d_status fp4d_network_open(const fp4d_model* model, const char* kernels, int32_t device, fp4d_network** network) {
    if (network) *network = nullptr;
    return guarded([&] {
        given(model && kernels && network);
        *network = new fp4d_network{fp4d::Network(model->model, content_of(kernels), device)};
    });
}

fp4d_status fp4d_network_open_memory(const fp4d_model* model, const void* kernels, size_t bytes, int32_t device, fp4d_network** network) {
    if (network) *network = nullptr;
    return guarded([&] {
        given(model && kernels && network);
        *network = new fp4d_network{fp4d::Network(model->model, copy_of(kernels, bytes), device)};
    });
}

void fp4d_network_close(fp4d_network* network) { delete network; }

int32_t fp4d_network_shapes(const fp4d_network* network) { return int32_t(network->network.plans().size()); }

fp4d_status fp4d_network_shape(const fp4d_network* network, int32_t number, int32_t input, fp4d_shape* shape) {
    return guarded([&] {
        given(network && shape);
        const auto* const plan = at(network->network.plans(), number);
        const auto* const found = plan ? at(plan->inputs, input) : nullptr;
        if (!found) fp4d::refuse_argument("there is no such plan or input");
        write(*found, shape);
    });
}

fp4d_status fp4d_network_output_shape(const fp4d_network* network, const fp4d_shape* inputs, int32_t number, fp4d_shape* shape) {
    return guarded([&] {
        given(network && inputs && shape);
        const auto* const found = at(network->network.plan(inputs).outputs, number);
        if (!found) fp4d::refuse_argument("there is no such output");
        write(*found, shape);
    });
}

size_t fp4d_network_weight_bytes(const fp4d_network* network) { return network->network.weight_bytes(); }

fp4d_status fp4d_network_workspace_bytes(const fp4d_network* network, const fp4d_shape* inputs, size_t* bytes) {
    return guarded([&] {
        given(network && inputs && bytes);
        *bytes = network->network.plan(inputs).arena;
    });
}

fp4d_status fp4d_run_create(fp4d_network* network, const fp4d_shape* inputs, void* workspace, fp4d_run** run) {
    if (run) *run = nullptr;
    return guarded([&] {
        given(network && inputs && run);
        *run = new fp4d_run{fp4d::Run(network->network, inputs, workspace)};
    });
}

void fp4d_run_close(fp4d_run* run) { delete run; }

fp4d_status fp4d_run_enqueue(fp4d_run* run, int32_t input_type, const void* const* inputs, int32_t output_type, void* const* outputs, fp4d_stream stream) {
    return guarded([&] {
        given(run);
        run->run.enqueue(input_type, inputs, output_type, outputs, stream);
    });
}

fp4d_status fp4d_run_host(fp4d_run* run, const float* input, int32_t output_type, void* output) {
    return guarded([&] {
        given(run);
        run->run.host(input, output_type, output);
    });
}

}  // extern "C"
