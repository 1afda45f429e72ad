"""Detectors: a pyramid of feature maps, and one head for all of them.

    backbone     f_0, f_1, ... [N, C_l, ceil(H / s_l), ceil(W / s_l)]        strides s_l of the head, shallow to deep
    lateral      conv 1x1 to `width` channels; top-down: + upsample of the next deeper map (FPN)
    deeper       conv 3x3 of stride 2 for each stride that the backbone lacks
    class tower  (conv 3x3, GroupNorm, ReLU) x depth -> conv 3x3 -> class logits
    box tower    the same                            -> conv 3x3 -> four distances and centre-ness

The towers have one set of weights for all strides, and so one activation scale each: distances are in strides, which
makes the maps alike. The outputs of all maps are flattened and joined to one tensor (`models.boxes`).

The UNet gives the feature maps of its bottom (stride 16) and of its first two decoder levels (8 and 4); what would
follow up to full resolution is left out. A backbone of timm has no decoder, so its maps are joined top-down.

Sources: Tian et al., "FCOS", 2019; Lin et al., "Feature Pyramid Networks for Object Detection", 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.graph.modes import evaluating
from fp4deploy.models.boxes import DetectionHead, map_sizes
from fp4deploy.models.unet import STRIDE, UNet

GROUPS = 8
PRIOR = 0.01  # score of every box before training: without it, background drowns the first steps
TYPICAL = math.log(4.0)  # first distance: an object of eight strides
UNET_STRIDES = (4, 8, 16)


class BoxHead(nn.Module):
    """Feature maps -> [N, classes + 5, places].

    Args:
        channels: of the maps, shallow to deep; further strides of the layout are made from the deepest.
        top_down: add deeper maps to shallower ones.
    """

    def __init__(self, channels: Sequence[int], layout: DetectionHead, top_down: bool) -> None:
        super().__init__()
        width, lacking = layout.width, len(layout.strides) - len(channels)
        self.top_down = top_down
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in channels)
        self.deeper = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(lacking))
        self.class_tower = _tower(width, layout.depth)
        self.box_tower = _tower(width, layout.depth)
        self.class_logits = nn.Conv2d(width, layout.classes, 3, padding=1)
        self.distances = nn.Conv2d(width, 5, 3, padding=1)
        for output in (self.class_logits, self.distances):
            nn.init.normal_(output.weight, std=0.01)
        nn.init.constant_(self.class_logits.bias, -math.log((1 - PRIOR) / PRIOR))  # type: ignore[arg-type]
        with torch.no_grad():
            self.distances.bias.copy_(torch.tensor([TYPICAL] * 4 + [0.0]))  # type: ignore[union-attr]

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        found = [lateral(each) for lateral, each in zip(self.lateral, maps, strict=True)]
        if self.top_down:
            for at in range(len(found) - 2, -1, -1):
                found[at] = found[at] + F.interpolate(found[at + 1], found[at].shape[2:], mode="nearest")
        for layer in self.deeper:
            found.append(layer(found[-1]))
        outputs = []
        for each in found:
            boxes = self.distances(self.box_tower(each))
            outputs.append(torch.cat((self.class_logits(self.class_tower(each)), boxes), 1).flatten(2))
        return torch.cat(outputs, 2)


def _tower(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(GROUPS, width), nn.ReLU()]
    return nn.Sequential(*layers)


class UNetDetector(UNet):
    """The UNet down to stride 16 and up to stride 4, under a `BoxHead`; layers have the names of the UNet's.

    Raises:
        InputError: the layout's strides do not begin with 4, 8, 16.
    """

    output_layers = ("head.class_logits", "head.distances")

    def __init__(self, layout: DetectionHead, scale: float = 1.0, digits: bool = False) -> None:
        if layout.strides[: len(UNET_STRIDES)] != UNET_STRIDES:
            raise InputError(f"A unet detects on strides that begin with 4, 8, 16, not on {_listed(layout.strides)}.")
        super().__init__(layout.classes, scale, digits=digits)
        steps = len(UNET_STRIDES) - 1
        self.up, self.decoder = self.up[:steps], self.decoder[:steps]
        channels = [up.in_channels for up in self.up] + [self.up[-1].out_channels]
        self.head = BoxHead(list(reversed(channels)), layout, top_down=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> [N, classes + 5, places]; H and W are multiples of 16."""
        x = self.read_image(x)
        skips: list[Tensor] = []
        for level, block in enumerate(self.encoder):
            x = block(self.pooled(x, level))
            skips.append(x)
        x = skips.pop()
        maps = [x]
        for up, block in zip(self.up, self.decoder, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], dim=1))
            maps.append(x)
        return self.head(maps[::-1])


class PyramidDetector(nn.Module):
    """Any backbone that returns its feature maps, under a `BoxHead` with a top-down path.

    Args:
        backbone: image -> list, tuple or dict of feature maps, shallow to deep.
        channels: of the first maps; of others there are none.

    Raises:
        InputError: there are more maps than strides.
    """

    output_layers = ("head.class_logits", "head.distances")

    def __init__(self, backbone: nn.Module, channels: Sequence[int], layout: DetectionHead, spec: str) -> None:
        super().__init__()
        if len(channels) > len(layout.strides):
            raise InputError(f"{spec} gives {len(channels)} feature maps for the strides {_listed(layout.strides)}.")
        self.backbone = backbone
        self.head = BoxHead(channels, layout, top_down=True)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> [N, classes + 5, places]."""
        found: Tensor = self.head(feature_maps(self.backbone(x)))
        return found


def feature_maps(found: Any) -> list[Tensor]:
    """The feature maps of what a backbone returned."""
    if isinstance(found, Tensor):
        return [found]
    return list(found.values()) if isinstance(found, dict) else list(found)


def pyramid_detector(backbone: nn.Module, layout: DetectionHead, spec: str) -> PyramidDetector:
    """A detector on a backbone whose channels are found by running it once.

    Raises:
        InputError: it returns no feature maps of the layout's strides.
    """
    side = 2 * max(*layout.strides, STRIDE)
    with torch.no_grad(), evaluating(backbone):
        maps = feature_maps(backbone(torch.zeros(1, 3, side, side)))
    sizes = map_sizes(layout.strides, side, side)
    given = [tuple(each.shape[2:]) if isinstance(each, Tensor) else () for each in maps]
    if not given or given != sizes[: len(given)]:
        raise InputError(
            f"{spec} gives feature maps of {given} for an image of {side} x {side}, and the strides "
            f"{_listed(layout.strides)} need {sizes}, of which the last may be left out. Let the backbone return a "
            "list of those maps, shallow to deep."
        )
    return PyramidDetector(backbone, [each.shape[1] for each in maps], layout, spec)


def _listed(strides: Sequence[int]) -> str:
    return ", ".join(map(str, strides))
