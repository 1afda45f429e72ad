"""Axes of open size divided into parts: as torch at every size, in ONNX and in the captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.to_packed import pack_model
from fp4deploy.graph import capture, evaluate
from fp4deploy.graph.open_axes import divided
from fp4deploy.graph.replacement import Rewriting
from fp4deploy.packed import PackedNetwork, packed_file
from tests.samples import sample

SIZES = ((16, 16), (17, 23), (20, 14), (33, 18))
Function = Callable[[torch.Tensor], Any]


class Around(nn.Module):
    """A function behind a convolution."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 1), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.conv(x))


def smoothed(parts: Any) -> torch.Tensor:
    """Each part alone, so that a wrong border shows."""
    return torch.cat([F.avg_pool2d(part, 3, 1, 1) for part in parts], 2)


DIVIDED: dict[str, Function] = {
    "averages": lambda x: F.adaptive_avg_pool2d(x, 3),
    "averages of one axis": lambda x: F.adaptive_avg_pool2d(x, (1, 6)),
    "maxima": lambda x: F.adaptive_max_pool2d(x, (2, 5)),
    "areas": lambda x: F.interpolate(x, (5, 4), mode="area"),
    "tensor_split": lambda x: smoothed(torch.tensor_split(x, 3, 2)),
    "Tensor.tensor_split": lambda x: smoothed(x.tensor_split(sections=2, dim=-2)),
    "chunk": lambda x: smoothed(x.chunk(3, 2)),
    "narrow": lambda x: x.narrow(2, x.shape[2] // 3, -(-2 * x.shape[2] // 3) - x.shape[2] // 3),
}


@pytest.mark.parametrize("name", sample(DIVIDED, every=4))
def test_parts_of_open_axes_follow_the_size(name: str) -> None:
    torch.manual_seed(0)
    model, example = Around(DIVIDED[name]).eval(), torch.randn(2, 3, 16, 16).half().float()
    fd.qat.load.round_to_deployed(model)
    session = portable_session(to_portable(fd.export_graph(model, example, dynamic_size=True)))
    network = PackedNetwork(packed_file("parts.fp4", None, *pack_model(model, example)))
    for size in SIZES:
        x = torch.randn(2, 3, *size).half().float()
        with torch.no_grad():
            expected = model(x)
            packed = network(x)
        (given,) = session.run(None, {"image": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(given), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)


def test_areas_by_a_factor_stay_a_call() -> None:
    x = torch.randn(1, 2, 9, 12)
    with Rewriting(divided()):
        found = F.interpolate(x, scale_factor=0.5, mode="area")
    assert torch.equal(found, F.interpolate(x, scale_factor=0.5, mode="area"))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_maxima_of_fixed_axes_are_torchs(axes: int) -> None:
    x = torch.randn(2, 3, *(7, 9, 5)[:axes])
    pool = getattr(F, f"adaptive_max_pool{axes}d")
    with Rewriting(divided()):
        assert torch.equal(pool(x, 2), pool(x, [2] * axes))
        found, indices = pool(x, 2, return_indices=True)
    expected = pool(x, 2, return_indices=True)
    assert torch.equal(found, expected[0])
    assert torch.equal(indices, expected[1])


def test_a_part_of_free_length_ends_where_its_length_says() -> None:
    graph = capture(Around(DIVIDED["narrow"]), torch.zeros(2, 3, 16, 16), dynamic_size=True)
    (part,) = (node for node in graph.nodes if node.op == "slice")
    assert evaluate(part.attributes["start"], {"x.2": 17}) == 5
    assert evaluate(part.attributes["end"], {"x.2": 17}) == 12
