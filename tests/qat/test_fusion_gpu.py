"""Compiled by inductor on a GPU: the bits of the kernels, and networks as exact as uncompiled ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.formats import FourOverSix
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.dispatch import fake_quantize_nvfp4, mask_gradient
from fp4deploy.qat import calibrate, prepare
from fp4deploy.qat.fusion import traced
from fp4deploy.qat.fusion.compiler import backend, compile_expanded
from fp4deploy.qat.fusion.fuse import fuse, mark_fusible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def feature_map(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    x = x * torch.logspace(-4, 1, x.shape[1], device="cuda").view(1, -1, 1, 1)
    return x.to(dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("choice", [None, ("mae", 256, False), ("mse", 448, True)])
@pytest.mark.parametrize(
    ("channels", "dtype"), [(64, torch.float16), (40, torch.bfloat16), (48, torch.float32), (16, torch.float16)]
)
def test_the_bits_of_the_kernels(channels: int, dtype: torch.dtype, choice: traced.Choice) -> None:
    x = feature_map((2, channels, 9, 13), dtype)
    x[0, 3, 2, 2], x[1, 5, 4, 4] = float("inf"), float("nan")
    amax = torch.tensor(3.7, device="cuda")

    @torch.compile(fullgraph=True, dynamic=False, backend=compile_expanded)
    def quantize(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return traced.quantize(x, amax, -3, 1, True, choice)

    given = x.clone(memory_format=torch.preserve_format).requires_grad_()
    values = quantize(given, amax)
    upstream = feature_map(tuple(x.shape), dtype, 1)
    values.backward(upstream)
    expected, mask = fake_quantize_nvfp4(x, (1,), amax, four_over_six=FourOverSix(*choice) if choice else None)
    assert torch.equal(values.nan_to_num(9), expected.nan_to_num(9))
    assert mask is not None
    assert torch.equal(given.grad, mask_gradient(upstream, mask, expected.stride(), 1))  # type: ignore[arg-type]


class Residual(nn.Module):
    def __init__(self, before: int, after: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1, bias=False), norm(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1, bias=False), norm(after)
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, bias=False), norm(after))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


class Network(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), norm(32), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(nn.MaxPool2d(3, 2, 1), Residual(32, 48, norm), Residual(48, 40, norm))
        self.up = nn.Upsample(scale_factor=2)
        self.decoder = nn.Sequential(nn.Conv2d(72, 32, 3, padding=1), norm(32), nn.LeakyReLU(0.1))
        self.last = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), norm(32), nn.ReLU())
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.stem(x)
        return self.head(self.last(self.decoder(torch.cat([self.up(self.blocks(skip)), skip], 1))))


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        y = model(x)
    y.float().square().mean().mul(1024).backward()
    return y.detach().float(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_4o6_qat", "nvfp4_qat+learned", "nvfp4_qat_2d"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_a_network_as_exact_as_uncompiled(norm: type[nn.Module], recipe: str) -> None:
    """Both are compared with float32 norms in between: what is compiled keeps more than the uncompiled one rounds."""
    torch.manual_seed(0)
    model = prepare(Network(norm), recipe).cuda().to(memory_format=torch.channels_last).train()  # type: ignore
    images = feature_map((4, 3, 48, 64), torch.float32)
    calibrate(model, images)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model)
    fuse(model)
    found, eager = step(model, images), step(plain, images)
    exact.zero_grad()
    y = exact(images)
    y.square().mean().mul(1024).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])  # type: ignore
    for one, other, reference in zip(found, eager, (y.detach(), gradients), strict=True):
        assert relative(one, reference) < 1.5 * relative(other, reference) + 0.02
    for (name, one), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        allowed = 0.2 if name.endswith("input_amax") else 0.05  # FP4 moves a maximum by more than a mean
        torch.testing.assert_close(one, other, rtol=allowed, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_kept_codes_are_those_of_the_values() -> None:
    """Whatever kernels a norm, the values and the codes end up in, the backward reads what the forward multiplied."""
    ops = torch.ops.fp4deploy

    @torch.compile(fullgraph=True, dynamic=False, backend=compile_expanded)
    def kept(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, amax: torch.Tensor) -> list[torch.Tensor]:
        y = (x.float() * scale + shift).to(x.dtype)
        values, _, codes, scales = ops.traced_keep(y, amax, -3, 1, True, True)
        return [values, codes, scales]

    x, amax = feature_map((4, 64, 96, 128), torch.float16), torch.tensor(3.7, device="cuda")
    scale, shift = (torch.rand(1, 64, 1, 1, device="cuda") + 0.5 for _ in range(2))
    values, codes, scales = kept(x, scale, shift - 1, amax)
    decoded = ops.traced_decode(codes, scales, amax, -3, 64, torch.float16)
    assert values.any()
    assert torch.equal(decoded, values)


def test_codes_are_kept_instead_of_quantised_inputs() -> None:
    """Another graph has other kernels, and so other places where FP32 is rounded to FP16: a few FP4 numbers differ."""
    (peak, *values), (kept_peak, *kept) = (_peak_and_results(keep_codes) for keep_codes in (False, True))
    apart = [relative(one.float(), other.float()) for one, other in zip(kept, values, strict=True)]
    print(f"peak {kept_peak / peak:.2f} of that with values kept, output and gradients {apart} apart")
    assert apart[0] < 0.1
    assert apart[1] < 1e-2
    assert kept_peak < 0.85 * peak


def _peak_and_results(keep_codes: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Peak bytes of a step above what other tests hold, its output and all gradients."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1), *_norm_relu_conv(64), *_norm_relu_conv(64), *_norm_relu_conv(4)]
    model: Any = prepare(nn.Sequential(*layers), "nvfp4_qat").cuda().to(memory_format=torch.channels_last)
    mark_fusible(model)
    forward = torch.compile(model, backend=backend(keep_codes=keep_codes), dynamic=False)
    x = torch.randn(8, 3, 256, 256, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.float16):
            y = forward(x)
        y.float().square().mean().backward()
    gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
    return torch.cuda.max_memory_allocated() - before, y.detach(), gradients


def _norm_relu_conv(after: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, after, 3, padding=1)]
