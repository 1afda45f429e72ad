"""Runtimes behind one Protocol: ONNX Runtime, torch, packed networks, TensorRT, TensorRT-RTX."""
