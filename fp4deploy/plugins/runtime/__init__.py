"""Compiling, loading and launching CUDA kernels: nvcc, the cache, contexts, streams, launches, TMA descriptors."""
