"""Engines of TensorRT and TensorRT-RTX.

| module | what it does |
|---|---|
| `build` | ONNX file -> plan and ledger: `build_engine`; opening a plan |
| `forms` | engines of every form of a model for one GPU |
| `compile` | the compiler in a child process |
| `backend`, `backends` | what both libraries have in common, and the table of them |
| `rtx`, `tensorrt` | what is different |
| `plugin_nodes` | the plugins of a lowered file |
"""
