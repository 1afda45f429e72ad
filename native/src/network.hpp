// A network on a GPU, and runs of it.
#pragma once
#include <vector>

#include "bundle.hpp"
#include "driver.hpp"
#include "fp4deploy.h"
#include "model.hpp"

namespace fp4d {

// The primary context of a device, kept while this lives.
class Device {
public:
    Device(int number, int arch);
    ~Device();
    Device(const Device&) = delete;
    Context context() const { return context_; }

private:
    int number_;
    Context context_ = nullptr;
};

class Network {
public:
    // Raises Error. The model must outlive the network.
    Network(const Model& model, std::vector<uint8_t> bundle, int device);
    ~Network();
    Network(const Network&) = delete;

    const Model& model() const { return model_; }
    const std::vector<Plan>& plans() const { return bundle_.plans; }
    const Plan& plan(const fp4d_shape* inputs) const;  // raises Error: none for these shapes
    size_t weight_bytes() const { return weight_bytes_; }
    Context context() const { return device_.context(); }

private:
    friend class Run;
    void load();
    void upload();
    void unload();

    const Model& model_;
    Bundle bundle_;
    Device device_;
    std::vector<Module> modules_;
    std::vector<Function> functions_;
    std::vector<size_t> offsets_;  // of constants
    size_t weight_bytes_ = 0;
    DeviceMemory weights_;
};

class Run {
public:
    Run(const Network& network, const fp4d_shape* inputs, void* workspace);
    ~Run();
    Run(const Run&) = delete;

    void enqueue(int32_t input_type, const void* const* inputs, int32_t output_type, void* const* outputs, Stream stream);
    void host(const float* input, int32_t output_type, void* output);

private:
    // A launch with its parameters as the kernel reads them; input and output pointers are written at each enqueue.
    struct Ready {
        Function function;
        const Launch* launch;
        std::vector<uint8_t> parameters;
        std::vector<std::pair<size_t, const Argument*>> pointers;
    };
    void submit(std::vector<Ready>& stage, const void* const* inputs, void* const* outputs, Stream stream);

    const Network& network_;
    const Plan& plan_;
    DeviceMemory owned_;
    std::vector<Ready> stages_[STAGES];
};

// The planes of fp4deploy/plugins/gemm/convolution/decoded.py: float16 [2, rows, K] of a packed weight.
void decode_planes(const Model& model, const Constant& constant, uint8_t* into);

}  // namespace fp4d
