"""Canonical graph -> the forms that a TensorRT compiler recognises, and the planned precision of each layer.

| module | what it does |
|---|---|
| `pattern` | finds and checks the FP4 layers of a graph |
| `lower` | chooses the form of each layer by `--conv` and runs the passes below: `lower` |
| `gemm` | convolution -> FP4 GEMM |
| `plugin`, `plugin_match` | convolution -> plugin of this project (TensorRT only) |
| `scales` | global scales as vectors, so that layers share kernels (TensorRT-RTX only) |
| `plan` | the planned precision of each layer |
"""
