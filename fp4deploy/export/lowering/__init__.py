"""Canonical graph -> the forms a TensorRT compiler recognises, and the planned precision of each layer."""
