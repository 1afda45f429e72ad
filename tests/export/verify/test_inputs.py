"""Inputs as people have them: of other types of floating point numbers, one batch or several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4deploy as fd

IMAGES = torch.randn(2, 16, 6, 5, generator=torch.Generator().manual_seed(3)).half().float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_inputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = fd.prepare(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 4, 1)), include="0").eval()
    fd.calibrate(model, IMAGES)
    graph = fd.export_graph(model, (16, 6, 5))
    images = IMAGES.to(dtype)
    for given in (images, [images], [images[:1], images[1:]], iter([images])):
        found = fd.verify(model, graph, given)
        assert found.passed
        assert found.images == 2
