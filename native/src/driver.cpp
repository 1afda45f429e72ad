#include "driver.hpp"

#include <dlfcn.h>

#include "error.hpp"

namespace fp4d {
namespace {

constexpr Result OUT_OF_MEMORY = 2;

template <typename Pointer>
void find(void* library, const char* name, Pointer& into) {
    void* const symbol = dlsym(library, name);
    if (!symbol) throw Error{FP4D_NO_GPU, std::string("the driver lacks ") + name + ": update it"};
    into = reinterpret_cast<Pointer>(symbol);
}

Driver load() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw Error{FP4D_NO_GPU, std::string("the CUDA driver was not loaded: ") + dlerror()};
    Driver found;
    find(library, "cuInit", found.init);
    find(library, "cuGetErrorString", found.error_text);
    find(library, "cuDeviceGetCount", found.device_count);
    find(library, "cuDeviceGetAttribute", found.device_attribute);
    find(library, "cuDevicePrimaryCtxRetain", found.context_retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", found.context_release);
    find(library, "cuCtxPushCurrent_v2", found.context_push);
    find(library, "cuCtxPopCurrent_v2", found.context_pop);
    find(library, "cuCtxSynchronize", found.context_synchronize);
    find(library, "cuModuleLoadData", found.module_load);
    find(library, "cuModuleUnload", found.module_unload);
    find(library, "cuModuleGetFunction", found.module_function);
    find(library, "cuFuncSetAttribute", found.function_attribute);
    find(library, "cuLaunchKernel", found.launch);
    find(library, "cuMemAlloc_v2", found.allocate);
    find(library, "cuMemFree_v2", found.release);
    find(library, "cuMemcpyHtoD_v2", found.to_device);
    find(library, "cuMemcpyDtoH_v2", found.to_host);
    find(library, "cuStreamCreate", found.stream_create);
    find(library, "cuStreamDestroy_v2", found.stream_destroy);
    find(library, "cuStreamSynchronize", found.stream_synchronize);
    if (const Result result = found.init(0)) {
        const char* text = nullptr;
        found.error_text(result, &text);
        throw Error{FP4D_NO_GPU, std::string("the CUDA driver does not start: ") + (text ? text : "no text")};
    }
    return found;
}

}  // namespace

const Driver& driver() {
    static const Driver loaded = load();  // tried again where it failed
    return loaded;
}

void check(Result result, const char* what) {
    if (result == 0) return;
    const char* text = nullptr;
    driver().error_text(result, &text);
    throw Error{result == OUT_OF_MEMORY ? FP4D_OUT_OF_MEMORY : FP4D_CUDA_ERROR,
                std::string(what) + ": CUDA error " + std::to_string(result) + ", " + (text ? text : "no text")};
}

Current::Current(Context context) { check(driver().context_push(context), "the device's context was not made current"); }

Current::~Current() {
    Context popped;
    driver().context_pop(&popped);
}

DeviceMemory::DeviceMemory(size_t bytes) {
    if (bytes) check(driver().allocate(&address_, bytes), "no memory on the GPU");
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
    std::swap(address_, other.address_);
    return *this;
}

DeviceMemory::~DeviceMemory() {
    if (address_) driver().release(address_);
}

}  // namespace fp4d
