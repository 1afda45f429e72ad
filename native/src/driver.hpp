// The part of the CUDA driver API that this library calls, loaded from libcuda.so.1 when it is first needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "fp4deploy.h"

namespace fp4d {

using Result = int;                   // CUresult
using Address = unsigned long long;   // CUdeviceptr
using Context = struct CUctx_st*;     // CUcontext
using Module = struct CUmod_st*;      // CUmodule
using Function = struct CUfunc_st*;   // CUfunction
using Stream = fp4d_stream;            // CUstream

struct Driver {
    Result (*init)(unsigned);
    Result (*error_text)(Result, const char**);
    Result (*device_count)(int*);
    Result (*device_attribute)(int*, int, int);
    Result (*context_retain)(Context*, int);
    Result (*context_release)(int);
    Result (*context_push)(Context);
    Result (*context_pop)(Context*);
    Result (*context_synchronize)();
    Result (*module_load)(Module*, const void*);
    Result (*module_unload)(Module);
    Result (*module_function)(Function*, Module, const char*);
    Result (*function_attribute)(Function, int, int);
    Result (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);
    Result (*allocate)(Address*, size_t);
    Result (*release)(Address);
    Result (*to_device)(Address, const void*, size_t);
    Result (*to_host)(void*, Address, size_t);
    Result (*stream_create)(Stream*, unsigned);
    Result (*stream_destroy)(Stream);
    Result (*stream_synchronize)(Stream);
};

// Loaded once for the process, and never unloaded. Raises Error (FP4D_NO_GPU).
const Driver& driver();

// Raises Error (FP4D_CUDA_ERROR, or FP4D_OUT_OF_MEMORY) unless the result is success.
void check(Result result, const char* what);

// The primary context of a device is the calling thread's current context while this lives.
class Current {
public:
    explicit Current(Context context);
    ~Current();
    Current(const Current&) = delete;
};

// Memory of a device, freed with its owner; the owner's context is current then.
class DeviceMemory {
public:
    DeviceMemory() = default;
    explicit DeviceMemory(size_t bytes);
    DeviceMemory(DeviceMemory&& other) noexcept : address_(other.address_) { other.address_ = 0; }
    DeviceMemory& operator=(DeviceMemory&& other) noexcept;
    ~DeviceMemory();
    Address address() const { return address_; }

private:
    Address address_ = 0;
};

}  // namespace fp4d
