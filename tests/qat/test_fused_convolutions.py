"""The pass that gives a compiled step the fastest convolutions: what is replaced, and the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fp4deploy.plugins.gemm.convolution import fastest
from fp4deploy.qat.fusion import convolutions
from fp4deploy.qat.fusion.convolutions import FastestConvolutions
from tests.plugins.gemm.test_fastest import Kernels


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    """A first layer, one that no kernel takes, a head with a bias, and a layer with groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.deep = nn.Conv2d(16, 80, 5, padding=2, stride=2)
        self.grouped = nn.Conv2d(80, 16, 1, groups=2)
        self.head = nn.Conv2d(16, 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.grouped(self.deep(self.first(x).relu()).relu()).relu()
        return self.head(y)  # type: ignore[no-any-return]


def step(model: nn.Module, seen: Counter[str] | None = None) -> list[torch.Tensor]:
    """Output and gradients of one step in BF16; compiled where `seen` counts its nodes."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, 12, 10).bfloat16().contiguous(memory_format=torch.channels_last)
    y = (model if seen is None else compiled(model, seen))(x)
    y.float().square().sum().backward()
    return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def compiled(model: nn.Module, seen: Counter[str]) -> Any:
    """The model through the pass, its graphs executed as they are."""

    def compiler(module: fx.GraphModule, inputs: Any) -> Any:
        FastestConvolutions()(module.graph)
        module.graph.lint()
        module.recompile()
        seen.update(str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module)

    return torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))


def made() -> nn.Module:
    torch.manual_seed(0)
    return Network().bfloat16().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("choice", [fastest.OWN, fastest.TORCH])
def test_values_of_a_step(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(made())
    kernels = Kernels(monkeypatch, choice)
    monkeypatch.setattr(convolutions, "LARGE", 0)
    seen: Counter[str] = Counter()
    for own, torchs in zip(step(made(), seen), expected, strict=True):
        assert own.stride() == torchs.stride()
        assert (own.float() - torchs.float()).norm() <= 2e-2 * torchs.float().norm()  # BF16, four layers deep
    assert seen["fp4deploy.fastest_convolution.default"] == seen["fp4deploy.fastest_gradients.default"] == 2
    assert seen["aten.convolution.default"] == seen["aten.convolution_backward.default"] == 2
    assert bool(kernels.calls) == (choice == fastest.OWN)


@pytest.mark.parametrize("large", [0, convolutions.LARGE])
def test_without_a_gpu_or_on_small_maps_nothing_is_replaced(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        Kernels(monkeypatch, fastest.OWN)
    monkeypatch.setattr(convolutions, "LARGE", large)
    seen: Counter[str] = Counter()
    step(made(), seen)
    assert seen["aten.convolution.default"] == 4
    assert not any(name.startswith("fp4deploy") for name in seen)
