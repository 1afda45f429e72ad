"""`fp4deploy selftest`: what this machine's GPU and libraries were shown to compute, as one file for an issue.

| module | shows |
|---|---|
| `reference` | the torch reference gives the recorded bytes here too |
| `kernels` | quantisation kernels against the reference, byte by byte; GEMM kernels against float64 |
| `networks` | an exported and a packed network against torch; which kernels ran |
| `engines` | an engine is built and its ledger read; it agrees with ONNX Runtime; its FP4 kernels ran |
| `latency` | the packed network next to FP16 compiled by torch.compile, both in a CUDA graph |

`context` makes the networks and images, `run` judges every check, `records` is the file. A check is a function of the
context: it returns what it has shown (`Proof`), raises `GateError` where something differs, and `UnavailableError`
where this machine lacks what it needs.
"""
