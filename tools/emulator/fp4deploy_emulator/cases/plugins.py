"""Cases of the TensorRT plugins: the PTX, grid and integers that `aot_impl` gives to TensorRT, in TensorRT's order.

    inputs (pointers) ... , 32-bit integers ... , outputs (pointers) ...

Shapes are integers here, where TensorRT has symbolic expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.tensorrt import QUANTIZE, Plugin, convolution_plugin
from fp4deploy.plugins.tensorrt.definitions import Attributes
from fp4deploy.plugins.tensorrt.kernels import compile_plugin, grid, integers, plugin_launch, tactics
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, normal
from fp4deploy_emulator.cases.gemms import Gemm, Operands
from fp4deploy_emulator.launch import parsed, run

FAMILY = "plugins"


def launch(
    setting: Setting,
    outcome: Outcome,
    plugin: Plugin,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    attributes: Attributes,
    tactic: int = 0,
) -> None:
    """As TensorRT does for a node; `tactic`: from 0, an index of the tiles."""
    tile = tactics(plugin, setting.arch)[tactic]
    kernel = compile_plugin(plugin_launch(plugin, attributes, tile, setting.arch), setting.arch)
    shapes = [tuple(each.shape) for each in inputs]
    columns, rows = grid(plugin, shapes, attributes, tile, lambda a, b: -(-a // b))
    values = [*inputs, *integers(plugin, shapes, attributes), *outputs]
    entry = parsed(setting.edit(kernel.ptx) if setting.edit else kernel.ptx, kernel.name)
    blocks = setting.grid or (columns, rows, 1)
    how = (blocks, (kernel.threads, 1, 1), kernel.shared, values, outputs, setting.capability, setting.model)
    outcome.add(run(entry, *how, gpu=setting.gpu))


@dataclass(frozen=True)
class Convolution(Gemm):
    """A node of a convolution plugin."""

    tactic: int = 0

    def launch(self, setting: Setting, outcome: Outcome, of: Operands) -> None:
        """With global scales in the place of amax and range."""
        plugin = convolution_plugin(len(of.sources), of.amax is not None, self.transposed)
        assert of.bias is not None
        tensors = [part for each in (*of.sources, of.weight) for part in _parts(each)]
        amax = [] if of.amax is None else [of.amax.reshape(1)]
        attributes: Attributes = {
            "kernel": list(self.taps),
            "channels": list(self.channels),
            "out_channels": [self.outputs],
            "stride": list(each(self.stride, 1)),
            "padding": list(each(self.padding, 1)),
            "dilation": [self.dilation],
            "relu": [int(self.relu)],
        }
        launch(setting, outcome, plugin, [*tensors, of.bias, *amax], of.outputs, attributes, self.tactic)


def _parts(x: Nvfp4Tensor) -> list[torch.Tensor]:
    """Codes, block scales, and the global scale."""
    return [x.codes, x.scales.view(torch.uint8), (x.amax / (6 * x.e4m3_max)).reshape(1)]


def quantizer(setting: Setting, outcome: Outcome) -> None:
    """FP16 NCHW to packed NHWC."""
    x, amax = (4 * normal(setting, 2, 24, 3, 5)).half(), torch.tensor([6.0])
    x[0, :, 0, 0] = 0
    expected = quantize_nvfp4(x.permute(0, 2, 3, 1).contiguous(), amax=amax[0])
    codes, scales = torch.empty_like(expected.codes), torch.empty(expected.scales.shape, dtype=torch.uint8)
    launch(setting, outcome, QUANTIZE, [x, amax], [codes, scales], {"channels": [24]})
    outcome.compare(codes, expected.codes)
    outcome.compare(scales, expected.scales.view(torch.uint8))


CASES = (
    Case("plugin, 3x3", FAMILY, Convolution()),
    Case("plugin, 3x3, stride 2, second tactic", FAMILY, Convolution(stride=2, channels=(32,), tactic=1)),
    Case("plugin, 3x3, packed output", FAMILY, Convolution(amax=24.0)),
    Case("plugin, two sources", FAMILY, Convolution(channels=(64, 32), image=(1, 5, 7))),
    Case("plugin, two sources, packed output", FAMILY, Convolution(channels=(64, 64), image=(1, 5, 7), amax=24.0)),
    Case("plugin, transposed 2x2", FAMILY, Convolution(transposed=True, size=2, image=(1, 5, 7))),
    Case(
        "plugin, transposed 2x2, packed output", FAMILY, Convolution(transposed=True, size=2, image=(1, 4, 4), amax=9.0)
    ),
    Case("plugin, quantiser", FAMILY, quantizer),
)
