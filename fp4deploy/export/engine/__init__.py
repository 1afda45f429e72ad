"""Engines of TensorRT and TensorRT-RTX: backends, the compiler in a process of its own, plan and ledger."""
