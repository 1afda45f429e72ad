"""The fused UNet's order of operations on a CPU, its kernels written in torch: the gradients of the plain UNet."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.models import build_unet
from fp4deploy.qat import prepare, quantized_layers
from fp4deploy.qat.fused_unet import fuse_unet, has_kernels


def clipped(y: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fake_quantize_nvfp4(y, (1,), amax.reshape(()))


def follow(largest: torch.Tensor, tracked: torch.Tensor | None, decay: float, delayed: bool) -> torch.Tensor:
    """What `track_amax` of the kernels does."""
    before = None if tracked is None else tracked.clone()
    moved = largest if before is None else torch.maximum(largest, before * decay)
    if tracked is not None:
        tracked.copy_(moved)
    return (before if delayed and before is not None and before > 0 else moved).reshape(1)


def normalized(x: torch.Tensor, bias: Any, weight: Any, beta: Any, groups: int, eps: float) -> torch.Tensor:
    return F.group_norm(x if bias is None else x + bias.view(1, -1, 1, 1), groups, weight, beta, eps).relu()


def group_norm_relu(
    x: Any, bias: Any, weight: Any, beta: Any, groups: Any, eps: Any, amax: Any, tracked: Any, decay: Any,
    quantize: Any, delayed: Any = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    y = normalized(x, bias, weight, beta, groups, eps)
    largest = follow(y.amax(), tracked, decay, delayed)
    shapes = torch.stack([beta, beta]), torch.tensor([groups, eps]), torch.zeros(0)
    return clipped(y, largest if amax is None else amax)[0] if quantize else y, *shapes, largest


def group_norm_relu_backward(
    x: Any, dy: Any, ab: Any, settings: Any, _: Any, bias: Any, weight: Any, amax: Any, quantize: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        given = [None if each is None else each.detach().requires_grad_() for each in (x, bias, weight, ab[0])]
        y = normalized(*given, int(settings[0]), float(settings[1]))
        found = torch.autograd.grad(
            y, [each for each in given if each is not None], dy * (clipped(y.detach(), amax)[1] if quantize else 1)
        )
    dx, *others = found
    dbias = others.pop(0) if bias is not None else torch.zeros_like(weight)
    return dx, torch.stack([*others, dbias])


def pool(y: Any, amax: Any) -> torch.Tensor:
    pooled = F.max_pool2d(y, 2)
    return pooled if amax is None else clipped(pooled, amax)[0]


def pool_backward(y: Any, dskip: Any, dpooled: Any, amax: Any) -> torch.Tensor:
    with torch.enable_grad():
        given = y.detach().requires_grad_()
        pooled = F.max_pool2d(given, 2)
        mask = 1 if amax is None else clipped(pooled.detach(), amax)[1]
        (dy,) = torch.autograd.grad(pooled, given, dpooled * mask)
    return dy if dskip is None else dy + dskip


def track_amax(x: Any, other: Any, tracked: Any, decay: Any, read: Any, delayed: Any = False) -> torch.Tensor:
    largest = torch.maximum(x.abs().amax(), other) if read else other.clone()
    return follow(largest.reshape(()), tracked, decay, delayed)


def previous_amax(x: Any, other: Any, tracked: Any) -> torch.Tensor:
    return (tracked if tracked > 0 else torch.maximum(x.abs().amax(), other)).reshape(1).clone()


def concat(a: Any, b: Any, amax: Any, other: Any = None, tracked: Any = None, decay: Any = 0.0) -> Any:
    out = torch.cat([a, b], 1)
    if tracked is not None:
        follow(torch.maximum(b.abs().amax(), other).reshape(()), tracked, decay, False)
    return (out, torch.zeros(0, dtype=torch.uint8)) if amax is None else clipped(out, amax)


def separate(gradient: Any, inside: Any, first: Any) -> tuple[torch.Tensor, torch.Tensor]:
    masked = gradient if inside is None else gradient * inside
    return masked[:, :first].clone(), masked[:, first:].clone()


def fake_quantize_weights(weights: Any, axes: Any, dtype: Any) -> torch.Tensor:
    found = [fake_quantize_nvfp4(weight, (axis,))[0] for weight, axis in zip(weights, axes, strict=True)]
    flat = [F.pad(each.permute(_order(each)).flatten(), (0, -each.numel() % 16)) for each in found]
    return torch.cat(flat).to(dtype)


def _order(weight: torch.Tensor) -> tuple[int, ...]:
    """Its axes in the order of memory."""
    return (0, 1, 2, 3) if weight.is_contiguous() else (0, 2, 3, 1)


KERNELS = (
    *(group_norm_relu, group_norm_relu_backward, pool, pool_backward, track_amax, previous_amax, concat, separate),
    fake_quantize_weights,
)


@pytest.fixture(autouse=True)
def _kernels_in_torch() -> Iterator[None]:
    library = torch.library.Library("fp4deploy", "IMPL")
    for kernel in KERNELS:
        library.impl(kernel.__name__, kernel, "CPU")
    yield
    library._destroy()


RECIPES = ["nvfp4_qat_delayed", "nvfp4_qat+dynamic", "nvfp4_qat_2d", "nvfp4_4o6_qat", "nvfp4_4o6_qat+delayed"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_of_every_recipe_with_kernels(recipe: str) -> None:
    """Two steps, since the amax of a delayed scale is another one from the second on.

    In float64, so that the orders of sums do not decide how an element is rounded to FP4.
    """
    torch.manual_seed(0)
    plain = prepare(build_unet(3, 0.25), recipe).train()
    assert has_kernels(plain)
    plain = plain.double()
    fused: Any = fuse_unet(copy.deepcopy(plain))
    for seed in range(2 if "delayed" in recipe else 1):
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).double()
        results = []
        for model, y in ((plain, plain(x)), (fused, fused._fused(fused.read_image(x)))):
            model.zero_grad()
            y.square().mean().backward()
            results.append(
                (y.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            )
        for one, other in zip(*results, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-3
    for one, other in zip(quantized_layers(plain).values(), quantized_layers(fused).values(), strict=True):
        if one.input_amax is not None and other.input_amax is not None:
            torch.testing.assert_close(one.input_amax, other.input_amax, rtol=1e-3, atol=0)


def test_quantised_gradients_have_no_kernels() -> None:
    assert has_kernels(prepare(build_unet(3, 0.25), "nvfp4_qat+learned"))
    assert not has_kernels(prepare(build_unet(3, 0.25), "nvfp4_train"))
