// A kernel bundle: launch plans and machine code (fp4deploy/native/bundle.py), checked.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model.hpp"

namespace fp4d {

struct KernelCode {
    std::string code, name, parameters;  // code: a tensor of the bundle; parameters: letters P, q, i, f
    int shared = 0;                      // largest dynamic shared memory of a launch, bytes
};

struct Constant {
    enum Kind { Bytes, Float32, Planes, Stored } kind;
    std::string tensor;  // of Planes: the layer; of Stored: a tensor of the bundle
    size_t bytes = 0;
    std::vector<int64_t> sources;
    bool up = false;
};

struct Argument {
    enum Kind { Number, ConstantPointer, ArenaPointer, InputPointer, OutputPointer } kind = Number;
    uint64_t value = 0;  // the bits of a number; the number of a constant, input or output; an offset
};

struct Launch {
    size_t kernel;
    unsigned grid[3], block, shared;
    std::vector<Argument> arguments;
};

enum Stage { InputFloat32, InputFloat16, Body, OutputFloat32, OutputFloat16, OutputClasses, STAGES };

struct Plan {
    std::vector<Shape> inputs, outputs;
    size_t arena = 0;
    std::vector<Launch> stages[STAGES];
};

struct Bundle {
    std::vector<uint8_t> content;
    Safetensors file;
    int arch = 0;
    std::vector<KernelCode> kernels;
    std::vector<Constant> constants;
    std::vector<Plan> plans;

    // Raises Error: damaged, of another network, or an argument that points beyond its buffer.
    Bundle(std::vector<uint8_t> file, const Model& model);
};

// Bytes of a parameter: 8 for P and q, 4 for i and f.
inline size_t width_of(char letter) { return letter == 'P' || letter == 'q' ? 8 : 4; }

}  // namespace fp4d
