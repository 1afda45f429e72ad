"""torchvision's one-stage detectors as networks of raw outputs [N, channels, places] (`models.boxes`).

| name | head | method |
|---|---|---|
| `fcos_resnet50_fpn` | towers with GroupNorm; classes, distances, centre-ness | `fcos_relu` |
| `retinanet_resnet50_fpn` | towers without normalisation; classes and boxes of nine anchors a pixel | `retinanet` |
| `retinanet_resnet50_fpn_v2` | the same, with GroupNorm | `retinanet` |

A ResNet-50 with a feature pyramid gives maps of the strides 8 to 128. torchvision's own forward resizes images, applies
the loss, or decodes and suppresses boxes; here the network ends with the convolutions, as every detector of this
project does: images are letterboxed before it, and loss, decoding and suppression are those of all detectors. Names of
layers and tensors stay torchvision's, so that its trained weights load. Anchors are torchvision's where each side of
the input is a multiple of 128; elsewhere it rounds its strides.

They train with a tenth of the usual learning rates (`LEARNING_RATES`) where none are given. AdamW moves every weight by
about the learning rate, whatever its size, and nothing normalises the pyramid, whose convolutions sum up to 2304
products: at 2e-3 the first convolution of a tower, whose weights begin at 0.01, gives some 30 at first, and after 160
steps more than 65504, the largest FP16 number. The GroupNorm behind it takes the size out again, so that in FP32 the
loss shows nothing. In FP16 it is NaN, and no loss scale helps.

Networks of two stages (Faster R-CNN) and SSD are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.spec import ModelSpec

METHODS = {
    "fcos_resnet50_fpn": "fcos_relu",
    "retinanet_resnet50_fpn": "retinanet",
    "retinanet_resnet50_fpn_v2": "retinanet",
}
LEARNING_RATES = {"lr": 2e-4, "finetune_lr": 5e-5}
STRIDES, WIDTH, DEPTH = (8, 16, 32, 64, 128), 256, 4


def own_layout(spec: ModelSpec) -> Mapping[str, Any]:
    """What the head of a spec's network has by itself, as arguments of `DetectionHead`; else nothing."""
    if spec.source != "torchvision" or spec.name not in METHODS:
        return {}
    return {"method": METHODS[spec.name], "strides": STRIDES, "width": WIDTH, "depth": DEPTH}


def require_layout(spec: ModelSpec, head: DetectionHead) -> None:
    """Refuse the layout of another network's output.

    Raises:
        InputError: a file says that the network has an output which it does not have.
    """
    own = own_layout(spec) or {"method": "fcos"}
    wrong = [name for name, value in own.items() if getattr(head, name) != value]
    if wrong:
        raise InputError(f"{spec.text} has no detection head with {wrong[0]} = {getattr(head, wrong[0])}.")


class RawOutput:
    """Mixed in before the class of torchvision's detector by `with_raw_output`."""

    backbone: nn.Module
    head: Any
    layout: DetectionHead
    output_layers: tuple[str, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> [N, channels, places]."""
        classes, boxes = self.head.classification_head, self.head.regression_head
        found = []
        for each in self.backbone(x).values():
            tower = boxes.conv(each)
            parts = [self._by_class(classes.cls_logits(classes.conv(each))), self._by_class(boxes.bbox_reg(tower))]
            if self.layout.centred:
                parts.append(boxes.bbox_ctrness(tower).flatten(2))
            found.append(torch.cat(parts, 1))
        return torch.cat(found, 2)

    def _by_class(self, x: Tensor) -> Tensor:
        """[N, anchors * C, H, W] -> [N, C, anchors * H * W]."""
        anchors = self.layout.anchors
        if anchors == 1:
            return x.flatten(2)
        return x.unflatten(1, (anchors, x.shape[1] // anchors)).transpose(1, 2).flatten(2)


def with_raw_output(network: nn.Module, layout: DetectionHead) -> nn.Module:
    """Let torchvision's detector, in place, return its raw output; names of layers and tensors stay."""
    kind = type(network)
    network.__class__ = type(kind.__name__, (RawOutput, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    outputs = ["classification_head.cls_logits", "regression_head.bbox_reg"]
    outputs += ["regression_head.bbox_ctrness"] * layout.centred
    network.layout, network.output_layers = layout, tuple(f"head.{name}" for name in outputs)  # type: ignore[assignment]
    return network
