"""Running a packed network: one pass over its nodes; an activation is freed after its last reader.

On a GPU activations are FP16 or packed, convolutions come from `plugins.gemm.dispatch` and normalisations from
`plugins.quantize.norm_pack`. On the CPU packed tensors are decoded before each convolution and everything between is
FP32, as in every runtime of this project that computes on a CPU: the numbers are those of the quantised model, the
speed is not.

    network = PackedNetwork(read_packed("unet.fp4"), "cuda")
    logits = network(images)                       [N, 3, H, W] -> [N, classes, H, W]
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import (
    INPUT,
    RGB,
    Concat,
    Conv2d,
    Convolution,
    ConvTranspose2d,
    GroupNormReLU,
    Head,
    Node,
    outputs_of,
)
from fp4deploy.packed.memory import check_size, last_reads
from fp4deploy.plugins.gemm.dispatch import conv2d, conv_transpose2d
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.quantize.norm_pack import FeatureMap, OutputForm, norm_relu_pack


class PackedNetwork:
    """A packed file on a device.

    dtype: of plain activations: float16 on a GPU, float32 on the CPU.
    """

    def __init__(self, file: PackedFile, device: str | torch.device = "cpu") -> None:
        self.file = file
        self.graph = file.graph
        self.device = torch.device(device)
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self._last = last_reads(self.graph)
        self._packed: dict[str, Nvfp4Tensor] = {}
        self._plain: dict[str, torch.Tensor] = {}
        self._vectors: dict[str, torch.Tensor] = {}
        for node in self.graph.steps:
            if isinstance(node, Convolution):
                self._load_weight(node)
        for name, tensor in file.tensors.items():
            if tensor.dtype in (torch.float16, torch.float32) and tensor.ndim <= 1:
                self._vectors[name] = tensor.to(self.device, torch.float32)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [N, classes, H, W] of normalised images [N, 3, H, W].

        Raises:
            InputError: images that are not RGB, or of a size that is not a multiple of its stride.
        """
        if images.ndim != 4 or images.shape[1] != RGB.channels or not len(images):
            raise InputError(f"The network takes RGB images [N, 3, H, W], not {list(images.shape)}.")
        check_size(self.graph, *images.shape[2:])
        results: list[FeatureMap] = []
        with torch.inference_mode():
            live: dict[str, FeatureMap] = {INPUT: self.read(images)}
            for number, node in enumerate(self.graph.steps):
                results = self.run_node(node, [live[name] for name in node.inputs])
                for name in node.inputs:
                    if self._last[name] == number:
                        live.pop(name, None)
                live.update(zip(outputs_of(node), results, strict=False))  # the head names none
        return cast(torch.Tensor, results[0]).permute(0, 3, 1, 2)

    def read(self, images: torch.Tensor) -> FeatureMap:
        """What the first node reads of images [N, 3, H, W]: RGB or multi-term FP4, NHWC, packed or plain."""
        x = images.to(self.device, self.dtype)
        x = (encode_input(x) if self.graph.digits else x).permute(0, 2, 3, 1).contiguous()
        return self.form(x, self.amax(INPUT))

    def run_node(self, node: Node, inputs: list[FeatureMap]) -> list[FeatureMap]:
        """The activations that one node writes, from those it reads; the head's are the logits [N, H, W, classes]."""
        if isinstance(node, GroupNormReLU):
            return self._norm(node, cast(torch.Tensor, inputs[0]))
        if isinstance(node, Concat):
            joined = torch.cat(cast("list[torch.Tensor]", inputs), dim=-1)
            return [self.form(joined, self.amax(node.output))]
        amax = None if isinstance(node, Head) else self.amax(node.output)
        bias = self._vectors[node.bias] if node.bias else None
        if node.precision == "fp16":
            return [self.form(self._fp16_convolution(node, cast(torch.Tensor, inputs[0]), bias), amax)]
        weight, sources = self._packed[node.layer], cast("list[Nvfp4Tensor]", inputs)
        if isinstance(node, ConvTranspose2d):
            return [conv_transpose2d(sources[0], weight, bias, dtype=self.dtype, out_amax=amax)]
        padding = node.padding
        return [conv2d(tuple(sources), weight, bias, padding=padding, dtype=self.dtype, out_amax=amax)]

    def _norm(self, node: GroupNormReLU, x: torch.Tensor) -> list[FeatureMap]:
        bias = self._vectors[node.bias] if node.bias else None
        weight, beta = (self._vectors[f"{node.layer}.{part}"] for part in ("weight", "bias"))
        forms = [OutputForm(self.amax(form.output), form.pooled) for form in node.outputs]
        return norm_relu_pack(x, bias, weight, beta, node.groups, node.eps, forms)

    def _fp16_convolution(
        self, node: Conv2d | ConvTranspose2d | Head, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight, x = self._plain[node.layer], x.permute(0, 3, 1, 2)
        shift = None if bias is None else bias.to(self.dtype)
        if isinstance(node, ConvTranspose2d):
            out = F.conv_transpose2d(x, weight, shift, stride=2)
        else:
            out = F.conv2d(x, weight, shift, padding=node.padding)
        return out.permute(0, 2, 3, 1).contiguous()

    def form(self, x: torch.Tensor, amax: torch.Tensor | None) -> FeatureMap:
        """`x`, or packed with `amax`."""
        return x if amax is None else quantize_nvfp4(x, amax=amax)

    def amax(self, activation: str) -> torch.Tensor | None:
        """The amax that the activation of this name is packed with; None for a plain one."""
        name = self.graph.images[activation].amax
        return self._vectors[name] if name else None

    def _load_weight(self, node: Conv2d | ConvTranspose2d | Head) -> None:
        name, tensors = f"{node.layer}.weight", self.file.tensors
        if node.precision == "fp16":
            order = (3, 0, 1, 2) if isinstance(node, ConvTranspose2d) else (0, 3, 1, 2)
            self._plain[node.layer] = tensors[name].to(self.device, self.dtype).permute(order)
            return
        codes, scales, amax = (tensors[f"{name}.{part}"] for part in ("codes", "scales", "amax"))
        channels = sum(self.graph.images[source].channels for source in node.inputs)
        self._packed[node.layer] = Nvfp4Tensor(
            codes.to(self.device),
            scales.to(self.device),
            amax.to(self.device),
            torch.Size([*codes.shape[:3], channels]),
            node.e4m3_max,
        )
