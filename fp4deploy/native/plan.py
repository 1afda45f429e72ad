"""What a launch plan holds: kernels, arguments, buffers and constants, for one shape of a network's input and one GPU.

A plan has three stages. `input` and `output` exist once for each type that the caller may use, `body` once:

    input.float32 | input.float16  ->  body  ->  output.float32 | output.float16 | output.classes
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.packed.shapes import Shape
from fp4deploy.plugins.aot.spec import Launch

STAGES = ("input.float32", "input.float16", "body", "output.float32", "output.float16", "output.classes")
MAX_CLASSES = 256  # of a class map of bytes


@dataclass(frozen=True)
class Gpu:
    """What launches depend on: the architecture, the name under which plans were measured, and the multiprocessors."""

    arch: Architecture
    name: str
    processors: int


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a CUDA source; macros: (name, value)."""

    source: str
    name: str
    signature: str
    macros: tuple[tuple[str, str | int | None], ...]


@dataclass(frozen=True)
class Constant:
    """What the library computes from tensors of the file, once, when a network is loaded.

    kind: "bytes" as stored; "float32", widened; "planes", a weight decoded by `decoded_weight.decode_weight`;
        "stored", made when the plan was recorded.
    tensor: its name; of planes the layer's; of a stored one the digest of its bytes.
    sources, up: of planes: channels of each source; of a transposed convolution.
    size: bytes on the GPU.
    """

    kind: str
    tensor: str
    size: int
    sources: tuple[int, ...] = ()
    up: bool = False


@dataclass(frozen=True)
class Buffer:
    """A pointer: `kind` "constant" (number of the constant), "input", "output" or "arena" (offset in bytes)."""

    kind: str
    at: int


Argument = int | float | None | Buffer


@dataclass(frozen=True)
class Recorded:
    """A launch. block, shared: None where Triton's compiler decides."""

    kernel: Launch | CudaKernel
    grid: tuple[int, int, int]
    block: int | None
    shared: int | None
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Plan:
    """All launches for one shape of each input; `arena`: bytes of memory for activations.

    stored: tensors that constants of the kind "stored" name; a plan that has some is of one file, with its weights.
    generated: why kernels of this package do not compute every node; "" where they do.
    """

    gpu: Gpu
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    arena: int
    constants: tuple[Constant, ...]
    stages: dict[str, tuple[Recorded, ...]]
    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    generated: str = ""
