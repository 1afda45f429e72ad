// Class map of a network that ends in ArgMax, for the nvinfer plugin of DeepStream: INT32 [H, W] -> classificationMap.
//
//     g++ -std=c++17 -shared -fPIC -I /opt/nvidia/deepstream/deepstream/sources/includes -I CUDA/include
//         segmentation_parser.cpp -o libsegmentation_parser.so
//
// nvinfer's own parser takes the largest of C planes of probabilities in FP32 on the host, 4 C bytes a pixel from the
// GPU; this one copies 4 bytes a pixel.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <vector>

#include "nvdsinfer_custom_impl.h"

extern "C" bool Fp4deploySegmentation(std::vector<NvDsInferLayerInfo> const& layers, NvDsInferNetworkInfo const& network,
                                      float, unsigned int, int* classificationMap, float*& classProbabilityMap) {
    const size_t pixels = size_t(network.width) * network.height;
    for (const NvDsInferLayerInfo& layer : layers) {
        if (layer.isInput || layer.dataType != INT32 || layer.inferDims.numElements != pixels) continue;
        std::memcpy(classificationMap, layer.buffer, pixels * sizeof(int32_t));
        classProbabilityMap = nullptr;
        return true;
    }
    std::cerr << "no output is INT32 of " << network.height << " x " << network.width << " pixels\n";
    return false;
}
CHECK_CUSTOM_SEM_SEGMENTATION_PARSE_FUNC_PROTOTYPE(Fp4deploySegmentation);
