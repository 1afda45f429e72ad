"""Packed networks: a file of NVFP4 codes and a flat list of steps, checked before it runs, and what runs it.

    export.packed  --write_packed-->  unet.fp4  --read_packed-->  PackedFile  -->  PackedNetwork(images) = logits

Nothing in the file is code: tensors as safetensors, the network as JSON whose every field has one meaning. This room
knows images and tensors, not models; which layer of a checkpoint becomes which step is decided in `export.to_packed`.
"""

from fp4deploy.packed.file import PackedFile, packed_file, read_packed, write_packed
from fp4deploy.packed.graph import Graph
from fp4deploy.packed.memory import activation_bytes, full_precision, plain_bytes
from fp4deploy.packed.network import PackedNetwork

__all__ = [
    "Graph",
    "PackedFile",
    "PackedNetwork",
    "activation_bytes",
    "full_precision",
    "packed_file",
    "plain_bytes",
    "read_packed",
    "write_packed",
]
