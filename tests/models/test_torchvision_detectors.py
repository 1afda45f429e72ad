"""torchvision's detectors beside torchvision's own anchors, coding of boxes, matching and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.build import build_model
from fp4deploy.models.spec import parse_spec
from fp4deploy.models.torchvision_detectors import METHODS, own_layout
from fp4deploy.train.losses.boxes import assign
from tests.models.libraries import need_library_of

SIZE = (128, 256)


def layout_of(name: str) -> DetectionHead:
    return DetectionHead(classes=3, **own_layout(parse_spec(f"torchvision:{name}")))


def built(name: str) -> Any:
    need_library_of(f"torchvision:{name}")
    layout = layout_of(name)
    torch.manual_seed(0)
    return build_model(parse_spec(f"torchvision:{name}"), layout.channels, head=layout).eval()


def in_torchvision_order(values: torch.Tensor, layout: DetectionHead) -> torch.Tensor:
    """[C, places] -> [places, C], the anchors of a pixel one after the other."""
    parts, start = [], 0
    for stride in layout.strides:
        pixels = -(-SIZE[0] // stride) * -(-SIZE[1] // stride)
        part = values[:, start : start + pixels * layout.anchors]
        parts.append(part.unflatten(1, (layout.anchors, pixels)).permute(2, 1, 0).flatten(0, 1))
        start += pixels * layout.anchors
    return torch.cat(parts)


def edges(priors: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    x, y, width, height = priors
    left, top, right, bottom = distances
    return torch.stack((x - width * left, y - height * top, x + width * right, y + height * bottom))


def anchors_of(network: Any) -> torch.Tensor:
    """Of torchvision's own generator."""
    from torchvision.models.detection.image_list import ImageList  # type: ignore[import-not-found]

    images = torch.zeros(1, 3, *SIZE)
    found: torch.Tensor = network.anchor_generator(ImageList(images, [SIZE]), list(network.backbone(images).values()))[
        0
    ]
    return found


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fcos_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_outputs_and_boxes_are_those_of_torchvision(name: str) -> None:
    network, layout = built(name), layout_of(name)
    for layer in network.output_layers:
        torch.nn.init.normal_(network.get_submodule(layer).weight, std=0.2)
    images = torch.rand(1, 3, *SIZE)
    raw = network(images)[0]
    expected = network.head(list(network.backbone(images).values()))
    anchors, priors = anchors_of(network), layout.priors(*SIZE)
    half = torch.full((4, priors.shape[1]), 0.5)
    torch.testing.assert_close(in_torchvision_order(edges(priors, half), layout), anchors, rtol=0, atol=0)
    logits = in_torchvision_order(layout.class_logits(raw), layout)
    torch.testing.assert_close(logits, expected["cls_logits"][0])
    coder = network.box_coder
    decode = coder.decode if layout.centred else coder.decode_single
    boxes = in_torchvision_order(edges(priors, layout.distances(raw)), layout)
    torch.testing.assert_close(boxes, decode(expected["bbox_regression"][0], anchors), rtol=1e-4, atol=1e-2)
    if layout.centred:
        torch.testing.assert_close(layout.centredness(raw), expected["bbox_ctrness"][0, :, 0])


def test_anchors_take_the_objects_that_torchvision_gives_them() -> None:
    network, layout = built("retinanet_resnet50_fpn_v2"), layout_of("retinanet_resnet50_fpn_v2")
    anchors = anchors_of(network)
    torch.manual_seed(1)
    corner, side = torch.rand(12, 2) * 90, torch.rand(12, 2) * 120 + 2
    boxes = torch.cat((corner, corner + side), 1)
    classes = torch.arange(12) % 3
    found = assign(torch.cat((classes[:, None] + 1.0, boxes), 1)[None], layout, SIZE)

    from torchvision.ops import box_iou

    matched = network.proposal_matcher(box_iou(boxes, anchors))
    expected = classes[matched.clamp(min=0)].where(matched >= 0, -1)
    assert (matched >= 0).sum() > 20
    assert (in_torchvision_order(found.classes.float(), layout)[:, 0] == expected).float().mean() > 0.9999
    assert (in_torchvision_order(found.ignored.float(), layout)[:, 0] == (matched == -2)).float().mean() > 0.9999


@pytest.mark.parametrize("name", METHODS)
def test_any_size_has_the_places_of_the_layout(name: str) -> None:
    layout = layout_of(name)
    with torch.inference_mode():
        assert built(name)(torch.zeros(2, 3, 72, 100)).shape == (2, layout.channels, *layout.output_size(72, 100))


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "which are fcos_resnet50_fpn, retinanet_resnet50_fpn"),
        ("torchvision:deeplabv3_resnet50", {}, "none of torchvision's detectors"),
    ],
)
def test_other_networks_are_refused(text: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(parse_spec(text, arguments), 8, head=DetectionHead("fcos", 3))


@pytest.mark.parametrize("text", ["unet", "timm:resnet18", "torchvision:fcos_resnet50_fpn"])
def test_the_layout_of_another_network_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="has no detection head with"):
        build_model(parse_spec(text), 7, head=DetectionHead("retinanet", 3, (8, 16, 32, 64, 128)))


def test_arguments_that_would_do_nothing_are_refused() -> None:
    name = "fcos_resnet50_fpn"
    need_library_of(f"torchvision:{name}")
    with pytest.raises(InputError, match="takes no model.args \\(min_size\\)"):
        build_model(parse_spec(f"torchvision:{name}", {"min_size": 300}), 8, head=layout_of(name))
    with pytest.raises(InputError, match="is a detector. Add --task detection"):
        build_model(parse_spec(f"torchvision:{name}"), 8)
