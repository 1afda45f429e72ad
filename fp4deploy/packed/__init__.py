"""Packed networks: NVFP4 codes and a flat list of nodes in one file, checked before it runs, and the code that runs it.

    export.to_packed  --write_packed-->  unet.fp4  --read_packed-->  PackedFile  -->  PackedNetwork(images) = logits

| module | what it holds |
|---|---|
| `graph` | nodes and forms of activations: the JSON of the file as pydantic models |
| `operators`, `shapes` | what each node computes in torch; the same on tensors without data gives all shapes |
| `check` | names, shapes, types and values of a graph fit together |
| `file` | reading, writing, digests |
| `network` | running the nodes, on a GPU by kernels, on a CPU by decoding |
| `writer`, `program` | the nodes as operators on decoded values, and these compiled by Inductor |
| `capture`, `module` | either form as a CUDA graph; and as a torch module |
| `launches` | the kernels of its packed layers, to be compiled ahead of time |
| `memory`, `describe` | bytes of weights and activations; the table of `fp4deploy inspect` |

Nothing in the file is code: tensors as safetensors, the network as JSON. This room knows tensors and nodes, not models;
which layer of a checkpoint becomes which node is decided in `export.to_packed`.
"""

from fp4deploy.packed.file import PackedFile, packed_file, read_packed, write_packed
from fp4deploy.packed.graph import Graph
from fp4deploy.packed.launches import packed_launches
from fp4deploy.packed.memory import activation_bytes, full_precision, plain_bytes
from fp4deploy.packed.module import PackedModule
from fp4deploy.packed.network import PackedNetwork

__all__ = [
    "Graph",
    "PackedFile",
    "PackedModule",
    "PackedNetwork",
    "activation_bytes",
    "full_precision",
    "packed_file",
    "packed_launches",
    "plain_bytes",
    "read_packed",
    "write_packed",
]
