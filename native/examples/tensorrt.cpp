// Segment an image with a plan of TensorRT or TensorRT-RTX: PPM in, PGM of class numbers out.
//
//     g++ -std=c++17 -I TENSORRT/include -I CUDA/include tensorrt.cpp -L TENSORRT/lib -lnvinfer -L CUDA/lib64 -lcudart -o segment-trt
//     segment-trt unet.nvfp4.sm120.plan photo.ppm mask.pgm  MEAN MEAN MEAN  STD STD STD
//
// With TensorRT-RTX: -ltensorrt_rtx. The plan is what `fp4deploy build` writes; mean and std are in its ledger, in
// its card. The image must have a size that the plan takes. Plans run on the GPU generation they were built for.
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Logger : public nvinfer1::ILogger {
    void log(Severity severity, const char* text) noexcept override {
        if (severity <= Severity::kWARNING) std::cerr << text << '\n';
    }
};

void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes));
    return Memory(memory);
}

}  // namespace

int main(int count, char** words) try {
    if (count != 10) throw std::runtime_error("usage: segment-trt PLAN IMAGE.ppm MASK.pgm MEAN MEAN MEAN STD STD STD");
    std::ifstream plan(words[1], std::ios::binary), file(words[2], std::ios::binary);
    const std::vector<char> content{std::istreambuf_iterator<char>(plan), {}};
    std::string magic;
    int64_t width = 0, height = 0, most = 0;
    file >> magic >> width >> height >> most;
    if (magic != "P6" || most != 255 || width < 1 || height < 1 || width > 16384 || height > 16384)
        throw std::runtime_error(std::string(words[2]) + " cannot be read, or is no binary PPM of 8 bits");
    file.get();
    const size_t area = size_t(width) * size_t(height);
    std::vector<char> pixels(3 * area);
    if (!file.read(pixels.data(), std::streamsize(pixels.size()))) throw std::runtime_error("the image ends early");
    std::vector<float> image(3 * area);
    for (size_t pixel = 0; pixel < area; ++pixel)
        for (size_t colour = 0; colour < 3; ++colour)
            image[colour * area + pixel] = (float((unsigned char)pixels[3 * pixel + colour]) / 255.f - std::stof(words[4 + colour])) / std::stof(words[7 + colour]);

    Logger logger;
    const std::unique_ptr<nvinfer1::IRuntime> runtime(nvinfer1::createInferRuntime(logger));
    const std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime ? runtime->deserializeCudaEngine(content.data(), content.size()) : nullptr);
    if (!engine) throw std::runtime_error("the plan is not for this GPU or this version");
    const std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext());
    if (!context || engine->getNbIOTensors() != 2) throw std::runtime_error("the plan has other tensors than an image and logits");
    const char *input = engine->getIOTensorName(0), *output = engine->getIOTensorName(1);
    if (engine->getTensorIOMode(input) != nvinfer1::TensorIOMode::kINPUT) std::swap(input, output);
    if (engine->getTensorDataType(input) != nvinfer1::DataType::kFLOAT || engine->getTensorDataType(output) != nvinfer1::DataType::kFLOAT)
        throw std::runtime_error("the plan takes or gives another type than FP32");
    if (!context->setInputShape(input, nvinfer1::Dims4{1, 3, height, width})) throw std::runtime_error("the plan does not take this size");
    const nvinfer1::Dims out = context->getTensorShape(output);  // [1, classes, height, width]
    if (out.nbDims != 4 || size_t(out.d[2]) * size_t(out.d[3]) != area) throw std::runtime_error("the plan gives no map of the image's size");
    const size_t channels = size_t(out.d[1]);

    std::vector<float> logits(channels * area);
    const Memory from = allocate(image.size() * sizeof(float)), to = allocate(logits.size() * sizeof(float));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    check(cudaMemcpyAsync(from.get(), image.data(), image.size() * sizeof(float), cudaMemcpyHostToDevice, stream));
    if (!context->setTensorAddress(input, from.get()) || !context->setTensorAddress(output, to.get()) || !context->enqueueV3(stream))
        throw std::runtime_error("the forward pass was not started");
    check(cudaMemcpyAsync(logits.data(), to.get(), logits.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    check(cudaStreamDestroy(stream));

    std::vector<char> mask(area);
    for (size_t pixel = 0; pixel < area; ++pixel)
        for (size_t channel = 1, best = 0; channel < channels; ++channel)
            if (logits[channel * area + pixel] > logits[best * area + pixel]) mask[pixel] = char(best = channel);
    std::ofstream(words[3], std::ios::binary) << "P5\n" << width << ' ' << height << "\n255\n" << std::string(mask.begin(), mask.end());
    return 0;
} catch (const std::exception& error) {
    std::cerr << "segment-trt: " << error.what() << '\n';
    return 1;
}
