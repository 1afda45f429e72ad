"""Checkpoint -> packed network: the UNet as a flat list of nodes over packed activations.

Each activation is written in the forms that its readers need, found by walking the UNet once:

| activation | read by | form |
|---|---|---|
| after a normalisation inside a block | the block's second convolution | packed with its `input_amax` |
| a level's output | the convolution of the level below | pooled, packed with its `input_amax` |
| | the decoder's concatenation | packed with the `input_amax` of the decoder's convolution |
| a transposed convolution's output | the same concatenation | packed with the same amax, in the GEMM's epilogue |
| the network's input | the first convolution | packed with its `input_amax` where it is quantised |
| what a layer in FP16 reads | | plain |

A skip is therefore packed twice, with two scales: 0.5625 bytes an element for the skip and a quarter of that for the
pooled activation. A plain skip would take 2 bytes an element while all levels below it run, when memory use is highest.

Weights have the bytes of the canonical ONNX file (`layer_constants`); the rest is rounded to FP16 by `qat.load_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import layer_constants
from fp4deploy.export.verify.outputs import check_request, validation_images
from fp4deploy.export.verify.packed import PackedAgreement, require_packed, verify_packed
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.models import UNet
from fp4deploy.packed import PackedFile, packed_file, write_packed
from fp4deploy.packed.file import SUFFIX
from fp4deploy.packed.graph import INPUT, Activation, Concat, Conv2d, ConvTranspose2d, Form, GroupNormReLU, Head, Node
from fp4deploy.qat import load_model
from fp4deploy.qat.layers import QuantizedLayer

FIRST = "encoder.0.conv1"


@dataclass(frozen=True)
class PackedResult:
    """What `pack` wrote, and how far it agrees with torch; None where nothing was verified."""

    file: PackedFile
    verification: PackedAgreement | None


def pack(checkpoint: Path, out: Path, data: Path | None = None, images: int = 16, verify: bool = True) -> PackedResult:
    """Export a checkpoint as a packed network, compared with torch on real images before anything is written.

    Args:
        out: the .fp4 file; an existing one is replaced.
        data: dataset whose validation split is used to verify.
        images: how many of its images.
        verify: False writes without comparing.

    Raises:
        GateError: the packed network computes something else than torch (see `verify.packed`).
        InputError: not a checkpoint of this project, a recipe without packed form, no data, an unwritable target.

    >>> pack(checkpoint, folder / "unet.fp4", verify=False).file.path.name
    'unet.fp4'
    """
    checkpoint, out = Path(checkpoint), Path(out)
    check_request(Path(checkpoint), out, SUFFIX, data, images, verify)
    model, card = load_model(checkpoint)
    file = packed_file(out, card, *pack_unet(model))
    verification = None
    if verify and data is not None:
        verification = verify_packed(model, file, validation_images(Path(data), card, images))
        require_packed(verification, str(checkpoint))
    write_packed(file)
    return PackedResult(file, verification)


def pack_unet(model: nn.Module) -> tuple[dict[str, Activation], list[Node], dict[str, torch.Tensor]]:
    """Activations, nodes and tensors of a UNet, prepared or plain.

    Raises:
        InputError: another network, a layer whose recipe has no packed form, or a value that is not finite.
    """
    if not isinstance(model, UNet):
        raise InputError(f"Only a UNet has a packed form, not {type(model).__name__}. Export it as ONNX.")
    return _Packer(model).pack()


class _Packer:
    def __init__(self, model: UNet) -> None:
        self.model = model
        self.layers = dict(model.named_modules())
        self.activations: dict[str, Activation] = {}
        self.steps: list[Node] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self) -> tuple[dict[str, Activation], list[Node], dict[str, torch.Tensor]]:
        levels, ups = len(self.model.encoder), len(self.model.up)
        first = cast(nn.Conv2d, self.layers[FIRST])
        x, skips = self._activation(INPUT, first.in_channels, 1, FIRST), []
        for level in range(levels):
            block, stride = f"encoder.{level}", 2**level
            if level == levels - 1:
                (x,) = self._block(block, [x], stride, [("out", "up.0" if ups else "head", False)])
                break
            decoder = f"decoder.{ups - 1 - level}"
            skip = ("skip", f"{decoder}.conv1" if self._two_sources(decoder) else None, False)
            skip_name, x = self._block(block, [x], stride, [skip, ("pooled", f"encoder.{level + 1}.conv1", True)])
            skips.append(skip_name)
        for index in range(ups):
            stride = 2 ** (ups - 1 - index)
            after = f"up.{index + 1}" if index + 1 < ups else "head"
            inputs = self._upwards(index, x, skips.pop(), stride)
            (x,) = self._block(f"decoder.{index}", inputs, stride, [("out", after, False)])
        head = cast(nn.Conv2d, self.layers["head"])
        self.steps.append(
            Head(
                inputs=[x],
                padding=cast("tuple[int, int]", head.padding)[0],
                **self._convolution_fields("head", with_bias=True),
            )
        )
        return self.activations, self.steps, self.tensors

    def _block(
        self, name: str, inputs: list[str], stride: int, outputs: list[tuple[str, str | None, bool]]
    ) -> list[str]:
        """Nodes of (conv, norm, ReLU) twice. outputs: (name, layer that reads it or None for plain, pooled)."""
        x = self._convolution(f"{name}.conv1", inputs, stride)
        (x,) = self._norm(name, 1, x, stride, [("out", f"{name}.conv2", False)])
        x = self._convolution(f"{name}.conv2", [x], stride)
        return self._norm(name, 2, x, stride, outputs)

    def _convolution(self, name: str, inputs: list[str], stride: int) -> str:
        layer = cast(nn.Conv2d, self.layers[name])
        output = self._activation(name, layer.out_channels, stride, None)
        padding = cast("tuple[int, int]", layer.padding)[0]
        self.steps.append(
            Conv2d(inputs=inputs, output=output, padding=padding, **self._convolution_fields(name, with_bias=False))
        )
        return output

    def _norm(
        self, block: str, number: int, x: str, stride: int, outputs: list[tuple[str, str | None, bool]]
    ) -> list[str]:
        name, before = f"{block}.norm{number}", f"{block}.conv{number}"
        layer = cast(nn.GroupNorm, self.layers[name])
        for part, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            self._half(f"{name}.{part}", parameter)
        forms = []
        for suffix, reader, pooled in outputs:
            size = 2 * stride if pooled else stride
            output = self._activation(f"{name}.{suffix}", layer.num_channels, size, reader)
            forms.append(Form(output=output, pooled=pooled))
        bias = self._bias(before)
        node = GroupNormReLU(layer=name, inputs=[x], outputs=forms, groups=layer.num_groups, eps=layer.eps, bias=bias)
        self.steps.append(node)
        return [form.output for form in forms]

    def _upwards(self, index: int, x: str, skip: str, stride: int) -> list[str]:
        """The transposed convolution, and what the decoder's block reads."""
        name, decoder = f"up.{index}", f"decoder.{index}"
        layer = cast(nn.ConvTranspose2d, self.layers[name])
        reader = f"{decoder}.conv1"
        two = self._two_sources(decoder)
        output = self._activation(name, layer.out_channels, stride, reader if two else None)
        self.steps.append(ConvTranspose2d(inputs=[x], output=output, **self._convolution_fields(name, with_bias=True)))
        if two:
            return [skip, output]
        channels = self.activations[skip].channels + layer.out_channels
        joined = self._activation(f"{decoder}.concat", channels, stride, reader)
        self.steps.append(Concat(inputs=[skip, output], output=joined))
        return [joined]

    def _two_sources(self, decoder: str) -> bool:
        """The decoder's first convolution takes skip and upsampled activation packed, without concatenating them."""
        layer = cast(nn.Conv2d, self.layers[f"{decoder}.conv1"])
        return isinstance(layer, QuantizedLayer) and (layer.in_channels // 2) % NVFP4_BLOCK == 0

    def _activation(self, name: str, channels: int, stride: int, reader: str | None) -> str:
        """Describe an activation, packed with the amax of the layer `reader`."""
        amax = None
        if reader is not None and isinstance(self.layers[reader], QuantizedLayer):
            amax = f"{reader}.input_amax"
        self.activations[name] = Activation(channels=channels, stride=stride, amax=amax)
        return name

    def _convolution_fields(self, name: str, with_bias: bool) -> dict[str, Any]:
        """Fields of a convolution; its tensors are added to the file."""
        layer, weight = self.layers[name], f"{name}.weight"
        bias = self._bias(name) if with_bias else None
        if not isinstance(layer, QuantizedLayer):
            plain = cast(nn.Conv2d, layer).weight
            order = (1, 2, 3, 0) if isinstance(layer, nn.ConvTranspose2d) else (0, 2, 3, 1)
            self._half(weight, plain.permute(order))
            return {"layer": name, "precision": "fp16", "bias": bias}
        constants = layer_constants(name, layer)
        rows, kernel = constants.shape[0], constants.shape[1:3]
        codes, scales = torch.from_numpy(constants.codes), torch.from_numpy(constants.scales.view("uint8"))
        self.tensors[f"{weight}.codes"] = codes.reshape(rows, *kernel, -1)
        self.tensors[f"{weight}.scales"] = scales.reshape(rows, *kernel, -1).view(torch.float8_e4m3fn)
        self.tensors[f"{weight}.amax"] = torch.tensor(constants.weight_amax)
        self.tensors[f"{name}.input_amax"] = torch.tensor(constants.input_amax)
        return {"layer": name, "precision": "nvfp4", "e4m3_max": constants.e4m3_max, "bias": bias}

    def _bias(self, name: str) -> str | None:
        bias = cast("torch.Tensor | None", self.layers[name].bias)
        if bias is None:
            return None
        self._half(f"{name}.bias", bias)
        return f"{name}.bias"

    def _half(self, name: str, parameter: torch.Tensor) -> None:
        if not torch.isfinite(parameter).all():
            raise InputError(f"{name} holds NaN or Inf. Export an earlier checkpoint.")
        self.tensors[name] = parameter.detach().half()
