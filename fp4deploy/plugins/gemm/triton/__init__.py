"""Triton GEMM kernels for packed NVFP4: decoded in registers on SM80 to SM90, native FP4 instructions from SM100 on.

`tiles` and `variants` choose and list what is compiled, without importing Triton. `gemm` (implicit GEMM),
`weight_only`, `plugin_entries`, `epilogue` and `decode` are device code and import it.
"""
