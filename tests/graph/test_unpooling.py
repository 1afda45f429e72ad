"""Max unpooling without indices is torch's, to the last bit, and no exported file has indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.graph.replacement import Rewriting
from fp4deploy.graph.unpooling import unpooling
from fp4deploy.qat import deployed
from tests.export.packable_networks import ENet


def unpooled(x: torch.Tensor, kernel: Any, same_size: bool, **options: Any) -> torch.Tensor:
    axes = x.ndim - 2
    y, indices = getattr(F, f"max_pool{axes}d")(x, kernel, return_indices=True, **options)
    new = torch.arange(y.numel()).reshape(y.shape) + 1.0
    size = {"output_size": x.shape} if same_size else {}
    result: torch.Tensor = getattr(F, f"max_unpool{axes}d")(new, indices, kernel, **options, **size)
    return result


@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("kernel", [2, 3, "different"])
@pytest.mark.parametrize("size", [(12,), (13,), (6, 12), (7, 13), (6, 4, 12), (7, 5, 8)])
def test_as_torch_with_equal_elements_in_a_window(size: tuple[int, ...], kernel: Any, same_size: bool) -> None:
    x = torch.randint(-2, 3, (2, 3, *size), generator=torch.Generator().manual_seed(0)).float().relu()
    kernel = tuple(range(2, 2 + len(size))) if kernel == "different" else kernel
    if not same_size:  # of whole windows: torch puts indices of a wider map elsewhere
        steps = _each(kernel, len(size))
        x = x[(..., *(slice(extent // step * step) for extent, step in zip(size, steps, strict=True)))]
    expected = unpooled(x, kernel, same_size)
    with Rewriting(unpooling()):
        assert torch.equal(unpooled(x, kernel, same_size), expected)


def _each(kernel: Any, axes: int) -> tuple[int, ...]:
    return (kernel,) * axes if isinstance(kernel, int) else kernel


@pytest.mark.parametrize("options", [{"stride": 1}, {"padding": 1}])
def test_windows_that_overlap_or_are_padded_stay_torch_calls(options: dict[str, int]) -> None:
    x = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = unpooled(x, 2, True, **options)
    with Rewriting(unpooling()):
        assert torch.equal(unpooled(x, 2, True, **options), expected)


def test_a_map_of_another_width_stays_a_torch_call() -> None:
    """Indices count through rows of 9, and the result has rows of 8."""
    x = torch.zeros(1, 2, 8, 9)
    expected = unpooled(x, 2, False)
    with Rewriting(unpooling()):
        assert torch.equal(unpooled(x, 2, False), expected)


def test_what_is_pooled_may_change_afterwards() -> None:
    x = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    expected = F.max_unpool2d(y, indices, 2)
    with Rewriting(unpooling()):
        z = x.clone()
        y, indices = F.max_pool2d(z, 2, return_indices=True)
        z.zero_()
        assert torch.equal(F.max_unpool2d(y, indices, 2), expected)


@pytest.mark.parametrize("dynamic_size", [pytest.param(False, marks=pytest.mark.variants), True])
def test_onnx_files_have_no_indices(dynamic_size: bool) -> None:
    torch.manual_seed(0)
    model, x = fd.prepare(ENet()), torch.rand(2, 3, 32, 48).half().float()
    fd.calibrate(model, x)
    graph = fd.export_graph(model.eval(), (3, 32, 48), dynamic_size=dynamic_size)
    kinds = [(node.op_type, len(node.output)) for node in graph.graph.node if "ool" in node.op_type]
    assert kinds == [("MaxPool", 1)]
    assert fd.verify(model, graph, x).passed
    if dynamic_size:
        assert fd.verify(model, graph, torch.rand(2, 3, 48, 40).half().float()).passed


def test_kept_results_of_a_step_are_no_obstacle() -> None:
    """`copy.deepcopy` refuses tensors that belong to a graph of gradients."""
    torch.manual_seed(0)
    model, x = fd.prepare(ENet()), torch.rand(2, 3, 32, 48)
    fd.calibrate(model, x)
    model(x).sum().backward()
    assert model.kept[0].requires_grad
    assert torch.isfinite(deployed(model)(x)).all()
    assert model.kept[0].requires_grad


def test_overlapping_windows_have_no_packed_form_and_say_so() -> None:
    class Overlapping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, indices = F.max_pool2d(x, 3, 2, return_indices=True)
            return F.max_unpool2d(y, indices, 3, 2, output_size=x.shape[2:])

    with pytest.raises(InputError, match=r"aten\.max_.*test_unpooling\.py, line .* has no packed form"):
        pack_model(Overlapping(), torch.zeros(1, 3, 9, 9))
