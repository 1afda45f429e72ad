// Programmatic dependent launch for kernels that read nothing early (plugins/runtime/pdl.py).
#pragma once

// In a kernel that `pdl.launch_secondary` launches: executed by every thread, before its first access to global memory.
// What earlier kernels wrote is visible after it, and the next kernel of the stream may start; that one waits here, too.
// Before SM90, and in a launch in stream order, it has no effect.
__device__ __forceinline__ void begin_after_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
