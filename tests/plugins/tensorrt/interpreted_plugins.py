"""The plugins' kernels in Triton's interpreter (`tests.plugins.interpreter`), from what plugins hand to TensorRT.

Everything but the compiled code is what TensorRT gets: types and shapes of outputs, the grid and the integers, and
arguments in its order.
"""

from __future__ import annotations

import dataclasses

import torch

from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm.arguments import just_in_time
from fp4deploy.plugins.tensorrt import Plugin
from fp4deploy.plugins.tensorrt.kernels import PluginKernel
from tests.plugins.tensorrt.plugin_cases import CASES, IMAGES, Case, Outputs, check, check_chain, check_quantize
from tests.plugins.tensorrt.tensorrt_offers import stand_in, symbolic

SMALL = ("one pixel, 1x1", "one pixel, 3x3", "17 channels, stride 2", "no padding", "two sources, uneven")
SMALL += ("up, odd channels",)
WHOLE_STEPS = Case((1, 3, 4), (64, 64), 20, relu=True)
CONVOLUTIONS = {**{name: CASES[name] for name in SMALL}, "two sources, whole steps": WHOLE_STEPS}
CHAIN = "chain"
ASKED: list[Launch] = []


def note(launch: Launch, arch: str) -> PluginKernel:
    """Instead of compiling: the variant without inline PTX, which the interpreter cannot run."""
    constants = tuple((name, False if name == "ASM" else value) for name, value in launch.constants)
    ASKED.append(dataclasses.replace(launch, constants=constants))
    return PluginKernel(launch.kernel, "", 32 * launch.num_warps, 0)


def run(
    plugin: Plugin, inputs: list[torch.Tensor], attributes: dict[str, list[int]], tactic: int
) -> list[torch.Tensor]:
    ask = stand_in("sm90", note)
    offer = ask(plugin, symbolic(plugin, [tuple(each.shape) for each in inputs]), attributes, tactic)
    found = offer.launch(batch=inputs[0].shape[0])
    outputs = Outputs(plugin, found.shapes, "cpu")
    flat = [each.view(torch.uint8) if each.dtype == torch.int8 else each for each in (*inputs, *outputs.inner)]
    values = (*flat[: len(inputs)], *found.integers, *flat[len(inputs) :])
    grid = (found.grid[0], found.grid[1], found.grid[2])
    just_in_time(Call(ASKED[-1], values, grid))
    return outputs.checked()


def names() -> list[str]:
    """Of the single nodes."""
    return [*CONVOLUTIONS, *(f"quantise {name}" for name in IMAGES)]


def results() -> dict[str, dict[str, float]]:
    """What was found in every node, and in the chain."""
    found = {name: check(case, run, tactic=2) for name, case in CONVOLUTIONS.items()}
    found |= {f"quantise {name}": check_quantize(shape, run) for name, shape in IMAGES.items()}
    return found | {CHAIN: check_chain(run)}
