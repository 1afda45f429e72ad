"""Quantising an ONNX file of any tool: images of a plain folder, networks that are no segmenters."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
import torch
from PIL import Image

from fp4deploy.experiments.search.run import sqnr
from fp4deploy.interop.quantize_onnx import _sqnr, folder_images, quantize_onnx
from tests.interop.onnx_files import Onnx


def test_a_plain_folder_of_images(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / "in" / "deep").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 30), (25 * number, 0, 0)).save(tmp_path / "in" / "deep" / f"{number}.png")
    found = folder_images(tmp_path / "in", 3, (16, 24), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), batch=2)
    assert [tuple(each.shape) for each in found] == [(2, 3, 16, 24), (1, 3, 16, 24)]
    shades = [round(255 * float(image[0, 0, 0])) // 25 for image in torch.cat(found)]
    assert shades == [0, 2, 6]  # evenly spaced among those that are not left to a comparison


def test_decibels_are_of_powers() -> None:
    expected, given = [{"y": torch.full((4,), 10.0)}] * 2, [{"y": torch.full((4,), 9.0)}, {"y": torch.full((4,), 11.0)}]
    assert _sqnr(expected, given) == {"y": pytest.approx(20)}
    assert _sqnr(expected, expected) == {"y": math.inf}
    assert (sqnr(0.01), sqnr(0.0)) == (pytest.approx(20), math.inf)  # of a relative error


def test_a_classifier_has_no_card(tmp_path: Path) -> None:
    net = Onnx()
    x = net.node("Relu", net.conv("second", net.node("Relu", net.conv("first", "image", 3, 16)), 16, 16))
    x = net.node("Relu", net.conv("features", x, 16, 16))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", x))
    onnx.save(net.model(net.node("MatMul", pooled, net.normal("fc", 16, 4)), x), tmp_path / "net.onnx")
    found = quantize_onnx(tmp_path / "net.onnx", torch.randn(2, 3, 16, 16), tmp_path / "q.onnx", "amax")
    assert found.export.card is None
    assert found.export.fp4_layers == 1
    assert len(found.sqnr) == 2
    assert min(found.sqnr.values()) > 10
