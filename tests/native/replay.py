"""A launch plan played in Python: the bytes that the C library gives, by its own launches.

    logits, = replay(plan, file, [image])              tensors on the GPU, by kernels that are compiled there

`play` takes any function as what launches, such as one that emulates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.native.plan import Buffer, Constant, Plan, Recorded
from fp4deploy.packed import PackedFile
from fp4deploy.packed.graph import Layer, weight_names
from fp4deploy.plugins.aot.load import function
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.runtime.launch import kernel

Launcher = Callable[[Recorded, list[Any]], None]


def replay(plan: Plan, file: PackedFile, inputs: Sequence[torch.Tensor], output: str = "float32") -> list[torch.Tensor]:
    """The outputs of a plan on the GPU that it was recorded for; inputs: float32 or float16, whole numbers int64."""
    device = inputs[0].device

    def launch(recorded: Recorded, values: list[object]) -> None:
        made = recorded.kernel
        if isinstance(made, Launch):
            function(made, device).launch(recorded.grid, *values[: len(made.arguments)])
        else:
            loaded = kernel(made.source, made.name, made.signature, dict(made.macros), device)
            loaded.launch(recorded.grid, recorded.block or 1, *values, shared=recorded.shared or 0)

    return play(plan, file, inputs, launch, output)


def play(
    plan: Plan, file: PackedFile, inputs: Sequence[torch.Tensor], launch: Launcher, output: str = "float32"
) -> list[torch.Tensor]:
    """`replay` by what launches; output: "float32", "float16" or "classes", uint8 of the first output."""
    device = inputs[0].device
    arena = torch.zeros(max(1, plan.arena), dtype=torch.uint8, device=device)
    constants = [constant_bytes(plan, file, each).to(device) for each in plan.constants]
    if output == "classes":
        shape = plan.outputs[0]
        outputs = [torch.empty((shape[0], *shape[2:]), dtype=torch.uint8, device=device)]
    else:
        outputs = [torch.empty(shape, dtype=getattr(torch, output), device=device) for shape in plan.outputs]
    memory = {"constant": constants, "input": [x.contiguous() for x in inputs], "output": outputs}
    given = next((str(x.dtype).removeprefix("torch.") for x in inputs if x.is_floating_point()), "float32")
    for stage in (f"input.{given}", "body", f"output.{output}"):
        for recorded in plan.stages[stage]:
            values = [_value(each, arena, memory) for each in recorded.arguments]
            launch(recorded, values)
    return outputs


def _value(argument: object, arena: torch.Tensor, memory: dict[str, list[torch.Tensor]]) -> Any:
    if not isinstance(argument, Buffer):
        return argument
    return arena[argument.at :] if argument.kind == "arena" else memory[argument.kind][argument.at]


def constant_bytes(plan: Plan, file: PackedFile, constant: Constant) -> torch.Tensor:
    """What the library computes for a constant at load, uint8."""
    if constant.kind == "stored":
        return plan.stored[constant.tensor]
    if constant.kind == "planes":
        node = next(node for node in file.graph.nodes if isinstance(node, Layer) and node.layer == constant.tensor)
        codes, scales, amax = (file.tensors[name] for name in weight_names(node))
        shape = torch.Size((*codes.shape[:-1], sum(constant.sources)))
        weight = Nvfp4Tensor(codes, scales, amax, shape, node.e4m3_max)
        found = decode_weight(weight, constant.sources, constant.up).planes
    else:
        found = file.tensors[constant.tensor]
    if constant.kind == "float32":
        found = found.float()
    return found.contiguous().flatten().view(torch.uint8)
