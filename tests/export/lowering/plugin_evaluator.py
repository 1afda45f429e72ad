"""Runs a graph of plugins on the CPU: ONNX's reference evaluator, with the plugins computed in torch by the reference.

Each plugin checks the types and shapes it is given, and reads its operands by the names of its definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.tensorrt import NAMESPACE, PLUGINS, QUANTIZE, Plugin

RANGE = 6 * 448
TYPES = {"FP32": np.float32, "INT8": np.int8}


def evaluate_plugins(model: onnx.ModelProto, image: np.ndarray, wide: bool = False) -> np.ndarray:
    """The output of a lowered model for an image [N, C, H, W].

    wide: FP32 wherever a plugin has FP16, for a model that was `widened`, to tell roundings from mistakes.
    """
    kind = np.float32 if wide else np.float16
    operators = [type(name, (_Plugin,), {"plugin": plugin, "plain": kind}) for name, plugin in PLUGINS.items()]
    (found,) = ReferenceEvaluator(model, new_ops=operators).run(None, {"image": image.astype(kind)})
    return found


def _packed(codes: Any, scales: Any, scale: Any, channels: int) -> Nvfp4Tensor:
    blocks = -(-channels // 16)
    assert codes.shape == (*codes.shape[:-1], 8 * blocks)
    assert scales.shape == (*codes.shape[:-1], blocks)
    assert scale.shape == (1,)
    amax = torch.tensor(np.float32(scale[0]) * np.float32(RANGE))
    found = [torch.tensor(each).view(torch.uint8) for each in (codes, scales)]
    shape = torch.Size((*codes.shape[:-1], channels))
    return Nvfp4Tensor(found[0], found[1].view(torch.float8_e4m3fn), amax, shape)


def _given_back(found: torch.Tensor | Nvfp4Tensor) -> tuple[np.ndarray, ...]:
    if isinstance(found, torch.Tensor):
        return (found.numpy(),)
    return found.codes.view(torch.int8).numpy(), found.scales.view(torch.int8).numpy()


class _Plugin(OpRun):
    op_domain = NAMESPACE
    plugin: Plugin
    plain: Any

    def _run(self, *values: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        plugin = self.plugin
        assert (self.plugin_namespace, self.plugin_version, self.aot) == ("fp4deploy", "1", 1)
        assert len(values) == len(plugin.inputs)
        for name, kind, value in zip(plugin.inputs, plugin.types(), values, strict=False):
            assert value.dtype == TYPES.get(kind, self.plain), f"{plugin.name} got {name} as {value.dtype}"
        numbers = {name: [int(item) for item in getattr(self, name)] for name in plugin.attributes}
        found = self.compute(dict(zip(plugin.inputs, values, strict=True)), numbers)
        assert [each.shape for each in found] == plugin.output_shapes([values[0].shape], numbers)
        return found

    def compute(self, given: dict[str, Any], numbers: dict[str, list[int]]) -> tuple[np.ndarray, ...]:
        if self.plugin is QUANTIZE:
            assert given["x"].shape[1] == numbers["channels"][0]
            x = torch.tensor(given["x"]).permute(0, 2, 3, 1)
            return _given_back(quantize_nvfp4(x, amax=torch.tensor(given["amax"])[0]))
        channels = numbers["channels"]
        x = _packed(given["x"], given["x_scales"], given["x_scale"], channels[0])
        sources = (x,)
        if self.plugin.sources == 2:
            sources = (x, _packed(given["x2"], given["x2_scales"], given["x2_scale"], channels[1]))
        w = _packed(given["w"], given["w_scales"], given["w_scale"], sum(channels))
        assert w.shape[:3] == (numbers["out_channels"][0], *numbers["kernel"])
        bias = torch.tensor(given["bias"])
        amax = torch.tensor(given["out_amax"])[0] if self.plugin.packed else None
        relu = bool(numbers["relu"][0])
        dtype = torch.float32 if self.plain is np.float32 else torch.float16
        exact: Any = {"dtype": dtype, "out_amax": amax, "accumulate": torch.float64}
        if self.plugin.transposed:
            return _given_back(conv_transpose2d_reference(x, w, bias, relu, **exact))
        geometry = [numbers[name][0] for name in ("stride", "padding", "dilation")]
        return _given_back(conv2d_reference(sources, w, bias, *geometry, relu, **exact))
