#include "network.hpp"

#include <cstring>
#include <map>

#include "error.hpp"
#include "half.hpp"

namespace fp4d {
namespace {

constexpr int MAJOR = 75, MINOR = 76;  // of CUdevice_attribute
constexpr int MAX_DYNAMIC_SHARED = 8;  // of CUfunction_attribute
constexpr unsigned NON_BLOCKING = 1;   // of CUstream_flags
constexpr size_t ALIGNMENT = 256, STATIC_SHARED = 48 << 10;

size_t aligned(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

size_t elements(const Shape& shape) {
    size_t count = 1;
    for (const int64_t size : shape) count *= size_t(size);
    return count;
}

}  // namespace

Device::Device(int number, int arch) : number_(number) {
    int count = 0, major = 0, minor = 0;
    check(driver().device_count(&count), "the GPUs were not counted");
    if (number < 0 || number >= count) throw Error{FP4D_NO_GPU, "there is no CUDA device " + std::to_string(number) + "; there are " + std::to_string(count)};
    check(driver().device_attribute(&major, MAJOR, number), "the GPU does not say its compute capability");
    check(driver().device_attribute(&minor, MINOR, number), "the GPU does not say its compute capability");
    if (10 * major + minor != arch)
        throw Error{FP4D_NO_GPU, "the kernel bundle is for sm" + std::to_string(arch) + ", and CUDA device " + std::to_string(number) + " is sm" + std::to_string(10 * major + minor)};
    check(driver().context_retain(&context_, number), "the GPU's context was not opened");
}

Device::~Device() { driver().context_release(number_); }

Network::Network(const Model& model, std::vector<uint8_t> bundle, int device) : model_(model), bundle_(std::move(bundle), model), device_(device, bundle_.arch) {
    const Current current(context());
    try {
        load();
        upload();
    } catch (...) {
        unload();
        throw;
    }
    bundle_.content.clear();
    bundle_.content.shrink_to_fit();
    bundle_.file.tensors.clear();
}

Network::~Network() {
    if (driver().context_push(context())) return;
    unload();
    Context popped;
    driver().context_pop(&popped);
}

void Network::unload() {
    weights_ = DeviceMemory();
    for (const Module module : modules_) driver().module_unload(module);
    modules_.clear();
}

void Network::load() {
    std::map<std::string, Module> known;
    for (const KernelCode& kernel : bundle_.kernels) {
        Module& module = known[kernel.code];
        if (!module) {
            check(driver().module_load(&module, bundle_.file.tensors.at(kernel.code).content), "a kernel was not loaded");
            modules_.push_back(module);
        }
        Function function;
        check(driver().module_function(&function, module, kernel.name.c_str()), "a kernel was not found in its code");
        if (size_t(kernel.shared) > STATIC_SHARED) check(driver().function_attribute(function, MAX_DYNAMIC_SHARED, kernel.shared), "a kernel needs more shared memory than the GPU has");
        functions_.push_back(function);
    }
}

void Network::upload() {
    for (const Constant& constant : bundle_.constants) {
        offsets_.push_back(weight_bytes_);
        weight_bytes_ += aligned(constant.bytes);
    }
    std::vector<uint8_t> content(weight_bytes_);
    for (size_t number = 0; number < offsets_.size(); ++number) {
        const Constant& constant = bundle_.constants[number];
        uint8_t* const into = content.data() + offsets_[number];
        if (constant.kind == Constant::Planes) {
            decode_planes(model_, constant, into);
            continue;
        }
        const Tensor& tensor = (constant.kind == Constant::Stored ? bundle_.file.tensors : model_.tensors).at(constant.tensor);
        if (constant.kind != Constant::Float32 || tensor.dtype == "F32") {
            std::memcpy(into, tensor.content, tensor.bytes);
            continue;
        }
        for (size_t at = 0; at < tensor.bytes; at += 2) {
            const float value = number_at(tensor, at);
            std::memcpy(into + 2 * at, &value, 4);
        }
    }
    weights_ = DeviceMemory(weight_bytes_);
    if (weight_bytes_) check(driver().to_device(weights_.address(), content.data(), weight_bytes_), "the weights were not copied to the GPU");
}

const Plan& Network::plan(const fp4d_shape* inputs) const {
    std::vector<Shape> wanted;
    for (size_t at = 0; at < model_.graph.inputs.size(); ++at) {
        if (inputs[at].rank < 1 || inputs[at].rank > 8) refuse_argument("a shape has 1 to 8 axes");
        wanted.emplace_back(inputs[at].size, inputs[at].size + inputs[at].rank);
    }
    for (const Plan& plan : bundle_.plans)
        if (plan.inputs == wanted) return plan;
    const auto text = [](const std::vector<Shape>& shapes) {
        std::string found;
        for (const Shape& each : shapes) found += (found.empty() ? "" : " and ") + text_of(each);
        return found;
    };
    std::string known;
    for (const Plan& plan : bundle_.plans) known += (known.empty() ? "" : ", ") + text(plan.inputs);
    refuse_argument("the kernel bundle has no plan for an input of " + text(wanted) + "; it has plans for " + known);
}

Run::Run(const Network& network, const fp4d_shape* inputs, void* workspace) : network_(network), plan_(network.plan(inputs)) {
    const Current current(network_.context());
    const Address given = Address(reinterpret_cast<uintptr_t>(workspace));
    if (given % ALIGNMENT) refuse_argument("the workspace is not aligned to 256 bytes");
    if (!workspace) owned_ = DeviceMemory(plan_.arena);
    const Address arena = workspace ? given : owned_.address();
    for (int stage = 0; stage < STAGES; ++stage) {
        for (const Launch& launch : plan_.stages[stage]) {
            Ready ready{network_.functions_[launch.kernel], &launch, {}, {}};
            const std::string& letters = network_.bundle_.kernels[launch.kernel].parameters;
            for (size_t at = 0; at < letters.size(); ++at) {
                const Argument& argument = launch.arguments[at];
                const size_t width = width_of(letters[at]), begin = (ready.parameters.size() + width - 1) / width * width;
                uint64_t value = argument.value;
                if (argument.kind == Argument::ConstantPointer) value = network_.weights_.address() + network_.offsets_[size_t(value)];
                if (argument.kind == Argument::ArenaPointer) value += arena;
                if (argument.kind == Argument::InputPointer || argument.kind == Argument::OutputPointer) ready.pointers.emplace_back(begin, &argument);
                ready.parameters.resize(begin + width);
                std::memcpy(ready.parameters.data() + begin, &value, width);
            }
            stages_[stage].push_back(std::move(ready));
        }
    }
}

Run::~Run() {
    if (driver().context_push(network_.context())) return;
    if (owned_.address()) driver().context_synchronize();
    owned_ = DeviceMemory();
    Context popped;
    driver().context_pop(&popped);
}

void Run::submit(std::vector<Ready>& stage, const void* const* inputs, void* const* outputs, Stream stream) {
    for (Ready& ready : stage) {
        for (const auto& [at, argument] : ready.pointers) {
            const void* const pointer = argument->kind == Argument::InputPointer ? inputs[argument->value] : outputs[argument->value];
            std::memcpy(ready.parameters.data() + at, &pointer, sizeof pointer);
        }
        size_t size = ready.parameters.size();
        void* extra[] = {reinterpret_cast<void*>(1), ready.parameters.data(), reinterpret_cast<void*>(2), &size, nullptr};
        const Launch& launch = *ready.launch;
        check(driver().launch(ready.function, launch.grid[0], launch.grid[1], launch.grid[2], launch.block, 1, 1, launch.shared, stream, nullptr, extra),
              "a kernel was not launched");
    }
}

void Run::enqueue(int32_t input_type, const void* const* inputs, int32_t output_type, void* const* outputs, Stream stream) {
    if (input_type != FP4D_FLOAT32 && input_type != FP4D_FLOAT16) refuse_argument("the input is float32 or float16");
    if (output_type != FP4D_FLOAT32 && output_type != FP4D_FLOAT16 && output_type != FP4D_CLASSES) refuse_argument("an output is float32, float16 or classes");
    const Stage last = output_type == FP4D_FLOAT32 ? OutputFloat32 : output_type == FP4D_FLOAT16 ? OutputFloat16 : OutputClasses;
    if (stages_[last].empty()) refuse_argument("the first output has no channels, or more than 256, and classes are bytes");
    const size_t count = output_type == FP4D_CLASSES ? 1 : plan_.outputs.size(), widths[] = {4, 2, 1};
    if (!inputs || !outputs) refuse_argument("the inputs or the outputs are a null pointer");
    for (size_t at = 0; at < plan_.inputs.size(); ++at) {
        const std::string& dtype = network_.model().graph.inputs[at].dtype;
        const size_t width = dtype == "int64" ? 8 : dtype == "bool" ? 1 : widths[input_type];
        if (!inputs[at] || reinterpret_cast<uintptr_t>(inputs[at]) % width) refuse_argument("an input is a null pointer, or not aligned to its elements");
    }
    for (size_t at = 0; at < count; ++at)
        if (!outputs[at] || reinterpret_cast<uintptr_t>(outputs[at]) % widths[output_type]) refuse_argument("an output is a null pointer, or not aligned to its elements");
    const Current current(network_.context());
    submit(stages_[input_type == FP4D_FLOAT32 ? InputFloat32 : InputFloat16], inputs, outputs, stream);
    submit(stages_[Body], inputs, outputs, stream);
    submit(stages_[last], inputs, outputs, stream);
}

void Run::host(const float* input, int32_t output_type, void* output) {
    if (!input || !output) refuse_argument("the input or the output is a null pointer");
    if (output_type < FP4D_FLOAT32 || output_type > FP4D_CLASSES) refuse_argument("an output is float32, float16 or classes");
    if (plan_.inputs.size() != 1 || network_.model().graph.inputs[0].dtype != "float32") refuse_argument("the network has other inputs than one image: use fp4d_run_enqueue");
    if (output_type == FP4D_CLASSES && stages_[OutputClasses].empty()) refuse_argument("the first output has no channels, or more than 256, and classes are bytes");
    const Current current(network_.context());
    const size_t widths[] = {4, 2, 1};
    const auto bytes = [&](size_t number) {
        const Shape& shape = plan_.outputs[number];
        return output_type == FP4D_CLASSES ? elements(shape) / size_t(shape.size() > 1 ? shape[1] : 1) : elements(shape) * widths[output_type];
    };
    const size_t given = elements(plan_.inputs[0]) * 4;
    DeviceMemory image(given);
    std::vector<DeviceMemory> results;
    std::vector<void*> pointers;
    for (size_t number = 0; number < plan_.outputs.size(); ++number) {
        results.emplace_back(bytes(number));
        pointers.push_back(reinterpret_cast<void*>(uintptr_t(results.back().address())));
    }
    check(driver().to_device(image.address(), input, given), "the input was not copied to the GPU");
    struct Own {
        Stream stream = nullptr;
        Own() { check(driver().stream_create(&stream, NON_BLOCKING), "no stream was created"); }
        ~Own() { driver().stream_destroy(stream); }
    } own;
    // The copy above is complete when it returns for memory of the host that is not pinned; for pinned memory the default
    // stream is waited for here.
    check(driver().stream_synchronize(nullptr), "the input was not copied to the GPU");
    const void* const images[] = {reinterpret_cast<const void*>(uintptr_t(image.address()))};
    enqueue(FP4D_FLOAT32, images, output_type, pointers.data(), own.stream);
    check(driver().stream_synchronize(own.stream), "the forward pass failed");
    check(driver().to_host(output, results[0].address(), bytes(0)), "the result was not copied from the GPU");
}

}  // namespace fp4d
