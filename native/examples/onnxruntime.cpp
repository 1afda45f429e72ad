// Segment an image with ONNX Runtime's C++ API: PPM in, PGM of class numbers out.
//
//     g++ -std=c++17 -I ORT/include onnxruntime.cpp -L ORT/lib -lonnxruntime -o segment-ort
//     segment-ort unet_portable.onnx photo.ppm mask.pgm
//
// The model is what `fp4deploy export --format onnx --portable` writes: its metadata `fp4deploy.card` has mean and std.
// The image must have the model's size.
#include <onnxruntime_cxx_api.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

// Three numbers of a list in the card's JSON, "mean": [0.485, 0.456, 0.406].
static std::array<float, 3> numbers(const std::string& card, const std::string& key) {
    std::array<float, 3> found{};
    const size_t at = card.find("\"" + key + "\": [");
    if (at == std::string::npos || std::sscanf(card.c_str() + card.find('[', at), "[%f, %f, %f", &found[0], &found[1], &found[2]) != 3)
        throw std::runtime_error("the model card has no " + key);
    return found;
}

int main(int count, char** words) try {
    if (count != 4) throw std::runtime_error("usage: segment-ort MODEL.onnx IMAGE.ppm MASK.pgm");
#ifdef _WIN32  // before the environment exists: ONNX Runtime reports to its vendor by default
    _putenv_s("ORT_DISABLE_TELEMETRY", "1");
#else
    setenv("ORT_DISABLE_TELEMETRY", "1", 1);
#endif
    Ort::Env environment(ORT_LOGGING_LEVEL_WARNING, "segment");
    Ort::Session session(environment, words[1], Ort::SessionOptions());
    Ort::AllocatorWithDefaultOptions allocator;
    const auto metadata = session.GetModelMetadata();
    const auto card = metadata.LookupCustomMetadataMapAllocated("fp4deploy.card", allocator);
    if (!card) throw std::runtime_error("the model has no card");
    const auto mean = numbers(card.get(), "mean"), std = numbers(card.get(), "std");

    std::ifstream file(words[2], std::ios::binary);
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
            image[colour * area + pixel] = (float((unsigned char)pixels[3 * pixel + colour]) / 255.f - mean[colour]) / std[colour];

    const std::array<int64_t, 4> shape{1, 3, height, width};
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const Ort::Value input = Ort::Value::CreateTensor<float>(memory, image.data(), image.size(), shape.data(), shape.size());
    const auto input_name = session.GetInputNameAllocated(0, allocator), output_name = session.GetOutputNameAllocated(0, allocator);
    const char *inputs[] = {input_name.get()}, *outputs[] = {output_name.get()};
    const auto results = session.Run(Ort::RunOptions(), inputs, &input, 1, outputs, 1);
    const auto out = results[0].GetTensorTypeAndShapeInfo().GetShape();  // [1, classes, height, width]
    const float* const logits = results[0].GetTensorData<float>();

    std::vector<char> mask(area);
    for (size_t pixel = 0; pixel < area; ++pixel)
        for (size_t channel = 1, best = 0; channel < size_t(out[1]); ++channel)
            if (logits[channel * area + pixel] > logits[best * area + pixel]) mask[pixel] = char(best = channel);
    std::ofstream(words[3], std::ios::binary) << "P5\n" << width << ' ' << height << "\n255\n" << std::string(mask.begin(), mask.end());
    return 0;
} catch (const std::exception& error) {
    std::cerr << "segment-ort: " << error.what() << '\n';
    return 1;
}
