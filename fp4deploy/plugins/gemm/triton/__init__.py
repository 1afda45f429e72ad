"""Triton kernels of products of packed NVFP4 tensors: decoded in registers for SM80 to SM90, native FP4 from SM100 on.

`launch` and `tiles` describe what is compiled, without Triton; `product`, `weight_only`, `epilogue` and `decode` are
device code and import it.
"""
