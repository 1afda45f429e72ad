"""Kernel bundles: launch plans of one network and the machine code of their kernels, as one file for `libfp4deploy`.

safetensors with the suffix `.kernels`: each kernel's cubin is a tensor of bytes, and the metadata entry
`fp4deploy.kernels` is a JSON object of strings: `format` (`kernels/2`), `version`, `body` and the `sha256` over these
three. `body` is JSON:

| key | what it is |
|---|---|
| `arch`, `gpu`, `processors` | the architecture that the code is for; the GPU that the plans are for |
| `network` | SHA-256 of the graph that the plans launch: the library refuses another network |
| `bound` | whether that is with the digests of its tensors, of which the bundle then holds what was made |
| `kernels` | `code` (a tensor) and its `sha256`, entry point `name`, `parameters`, most dynamic `shared` memory |
| `constants` | what is made from tensors of the `.fp4` file at load, or held here, with its bytes (`plan.Constant`) |
| `plans` | for each set of input shapes: output shapes, bytes of the arena, and the launches of each stage |

A launch is [kernel, grid x, grid y, grid z, block, shared, arguments]. Parameters are letters, one an argument: `P` a
pointer, `q` and `i` integers of 64 and 32 bits, `f` a float. A pointer is null or [kind, number]: of a constant, the
input or output, or a byte of the arena.

**Trust.** The library checks a bundle as it checks a network: digests, limits, every pointer inside its buffer. It
cannot check what machine code does: a kernel runs with all rights of a GPU process, so take bundles from those you
trust, as you would a shared library.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp4deploy import __version__
from fp4deploy.errors import InputError
from fp4deploy.models.checkpoint import write_tensors
from fp4deploy.native.plan import Argument, Buffer, Constant, CudaKernel, Plan, Recorded
from fp4deploy.packed import Graph, PackedFile
from fp4deploy.plugins.aot.build import build
from fp4deploy.plugins.aot.compile import signature
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.runtime.nvcc import KernelError, compile_cubin
from fp4deploy.system.files import digest_of
from fp4deploy.system.processors import cores

SUFFIX = ".kernels"
LIMITS = {"plans": 256, "kernels": 4096, "constants": 65_536}  # of the library
FORMAT = "kernels/2"
KEY = "fp4deploy.kernels"
SIGNED = ("format", "version", "body")


@dataclass(frozen=True)
class Code:
    """A compiled kernel; block: threads, where the compiler decides; shared: bytes that each launch needs."""

    cubin: bytes
    name: str
    parameters: str
    block: int | None = None
    shared: int | None = None


def graph_digest(graph: Graph) -> str:
    """SHA-256 of a graph without the digests of its tensors: equal for networks that launch the same."""
    text = re.sub(r'"sha256":"[0-9a-f]{64}"', '"sha256":""', graph.to_json())
    return hashlib.sha256(text.encode()).hexdigest()


def write_bundle(path: Path, file: PackedFile, plans: Sequence[Plan], jobs: int | None = None) -> int:
    """Compile the kernels of plans of one network for one GPU, and write all to a file; how many kernels there are.

    Raises:
        InputError: no plan or too many, plans for different GPUs, or the file cannot be written.
        UnavailableError: Triton or nvcc is missing.
        KernelError: a kernel does not compile for the architecture.
    """
    if not plans or any(plan.gpu != plans[0].gpu for plan in plans):
        raise InputError("A bundle holds plans for one GPU, and at least one.")
    launches = [launch for plan in plans for stage in plan.stages.values() for launch in stage]
    kernels = list(dict.fromkeys(launch.kernel for launch in launches))
    constants = list(dict.fromkeys(constant for plan in plans for constant in plan.constants))
    for name, count in {"plans": len(plans), "kernels": len(kernels), "constants": len(constants)}.items():
        if count > LIMITS[name]:
            raise InputError(
                f"A bundle holds at most {LIMITS[name]} {name}, and here are {count}. Write several, each of fewer "
                "--size and --batch, with --out."
            )
    codes = compiled(kernels, plans[0], jobs)
    held = {name: memory for plan in plans for name, memory in plan.stored.items()}
    distinct = list(dict.fromkeys(code.cubin for code in codes))
    tensors = {f"code.{number:03}": _bytes(cubin) for number, cubin in enumerate(distinct)} | held
    most = dict.fromkeys(range(len(kernels)), 0)
    written = []
    for plan in plans:
        renumbered = {at: constants.index(constant) for at, constant in enumerate(plan.constants)}
        stages = {}
        for stage, recorded in plan.stages.items():
            rows = [_row(each, kernels.index(each.kernel), codes, renumbered) for each in recorded]
            for row in rows:
                most[row[0]] = max(most[row[0]], row[5])
            stages[stage] = rows
        outputs = [list(shape) for shape in plan.outputs]
        inputs = [list(shape) for shape in plan.inputs]
        written.append({"inputs": inputs, "outputs": outputs, "arena": plan.arena, "stages": stages})
    gpu = plans[0].gpu
    body = {
        "arch": gpu.arch.number,
        "gpu": gpu.name,
        "processors": gpu.processors,
        "network": hashlib.sha256(file.graph.to_json().encode()).hexdigest() if held else graph_digest(file.graph),
        "bound": bool(held),
        "kernels": [
            {
                "code": f"code.{distinct.index(code.cubin):03}",
                "sha256": hashlib.sha256(code.cubin).hexdigest(),
                "name": code.name,
                "parameters": code.parameters,
                "shared": most[number],
            }
            for number, code in enumerate(codes)
        ],
        "constants": [_constant(each) for each in constants],
        "plans": written,
    }
    metadata = {"format": FORMAT, "version": __version__, "body": json.dumps(body, separators=(",", ":"))}
    metadata["sha256"] = digest_of(metadata[key].encode() for key in SIGNED)
    write_tensors(path, tensors, {KEY: json.dumps(metadata)})
    return len(kernels)


def compiled(kernels: Sequence[Launch | CudaKernel], plan: Plan, jobs: int | None = None) -> list[Code]:
    """The machine code of each kernel for the plan's architecture.

    Raises:
        UnavailableError: Triton or nvcc is missing.
        KernelError: one does not compile; the message has the compiler's reason.
    """
    arch = plan.gpu.arch
    triton = [kernel for kernel in kernels if isinstance(kernel, Launch)]
    found: dict[Launch | CudaKernel, Code] = {}
    for _, result in build([(kernel, arch.triton_name) for kernel in triton], jobs) if triton else ():
        if result.compiled is None:
            raise KernelError(result.failure)
        code = result.compiled
        found[result.launch] = Code(code.cubin, code.name, signature(code.parameters), 32 * code.num_warps, code.shared)
    cuda = [kernel for kernel in kernels if isinstance(kernel, CudaKernel)]
    with ThreadPoolExecutor(jobs or cores()) as pool:
        cubins = pool.map(lambda each: compile_cubin(each.source, arch.nvcc_target, dict(each.macros)), cuda)
        for kernel, cubin in zip(cuda, cubins, strict=True):
            found[kernel] = Code(cubin, kernel.name, kernel.signature)
    return [found[kernel] for kernel in kernels]


def _row(launch: Recorded, kernel: int, codes: Sequence[Code], constants: dict[int, int]) -> list[Any]:
    code = codes[kernel]
    block, shared = code.block or launch.block, code.shared if code.shared is not None else launch.shared
    return [kernel, *launch.grid, block, shared, [_argument(each, constants) for each in launch.arguments]]


def _constant(each: Constant) -> dict[str, Any]:
    about = {"kind": each.kind, "tensor": each.tensor, "bytes": each.size, "sources": list(each.sources), "up": each.up}
    return about | ({"sha256": each.tensor} if each.kind == "stored" else {})


def _argument(value: Argument, constants: dict[int, int]) -> Any:
    if not isinstance(value, Buffer):
        return int(value) if isinstance(value, bool) else value
    return [value.kind, constants[value.at] if value.kind == "constant" else value.at]


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
