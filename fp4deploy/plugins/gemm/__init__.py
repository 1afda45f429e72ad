"""GEMM and implicit-GEMM convolution of packed NVFP4 operands: dispatch, kernels, weight cache, layers by name."""
