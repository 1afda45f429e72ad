"""torch -> the canonical ONNX file, and the same file in standard operators.

| module | what it does |
|---|---|
| `canonical` | opset, metadata keys, GEMM operators; reading a file |
| `layer_constants` | FP32 weight and static amax -> codes, block scales, global amax |
| `graph` | tracing a module with markers where it quantises: `export_graph` |
| `naming` | nodes and values named after torch modules |
| `qdq` | markers -> Q/DQ nodes |
| `quantize_function` | what `TRT_FP4DynamicQuantize` computes, as an ONNX function |
| `writer` | nodes and constants with names: what `qdq`, `decomposed` and the lowering write graphs with |
| `decomposed`, `decomposed_quantize` | Q/DQ nodes -> standard FP32 operators: `to_portable` |
| `session` | running the decomposed graph in ONNX Runtime |
| `layers` | listing the layers of any ONNX file |
"""
