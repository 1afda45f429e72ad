"""GEMMs of packed operands on a GPU: the reference's bytes, and its results up to the order of a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.formats import Nvfp4Tensor, philox
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.gemm import training
from fp4deploy.plugins.quantize import dispatch as quantize
from fp4deploy.qat import QuantSpec, Recipe, prepare, set_products
from fp4deploy.qat.fp4_gemms.operands import pack_operand
from fp4deploy.qat.operators import wgrad_operands
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms
from tests.qat.layer_cases import LAYERS, make
from tests.qat.reference_gemms import Gradients
from tests.qat.test_fp4_gemms import FEW, RECIPES_HERE, operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not aot.available(), reason="no NVIDIA GPU that kernels run on"
    ),
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
]
SPECS = {
    "nearest": QuantSpec(),
    "stochastic": QuantSpec(rounding="stochastic"),
    "stochastic, transformed": QuantSpec(rounding="stochastic", hadamard=True),
    "transformed": QuantSpec(hadamard=True),
    "MX": QuantSpec("mxfp4"),
    "MX up, stochastic": QuantSpec("mxfp4", scale_rule="ceil", rounding="stochastic"),
    "MX transformed": QuantSpec("mxfp4", hadamard=True),
}
MAPS: dict[str, tuple[tuple[int, ...], Any]] = {
    "same": ((2, 32, 6, 21), ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "stride 2, groups": ((3, 64, 9, 40), ConvGemms((3, 3), (2, 2), (1, 1), (1, 1), 2)),
    "uneven": ((1, 32, 9, 37), ConvGemms((2, 3), (2, 1), (1, 2), (3, 1), 1)),
    "pointwise": ((2, 96, 5, 7), ConvGemms((1, 1), (1, 1), (0, 0), (1, 1), 1)),
    "transposed": ((2, 32, 5, 17), ConvGemms((2, 2), (2, 2), (0, 0), (1, 1), 1, transposed=True)),
    "volume": ((2, 32, 3, 4, 18), ConvGemms((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)),
    "sequence": ((2, 32, 70), ConvGemms((5,), (1,), (2,), (1,), 1)),
    "tokens": ((3, 35, 64), LinearGemms()),
    "many tokens": ((4099, 160), LinearGemms()),
}


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both devices draw the same seed; MS-EDEN's sums have another order, and there some scales would differ."""

    def seed(device: torch.device) -> torch.Tensor:
        return torch.tensor(0x1234567, device=device)

    monkeypatch.setattr(philox, "draw_seed", seed)
    monkeypatch.setattr(quantize, "draw_seed", seed)


def same_bytes(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.scales.cpu().view(torch.uint8), expected.scales.view(torch.uint8))
    if isinstance(expected, Nvfp4Tensor):
        assert torch.equal(found.amax.cpu(), expected.amax)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", [name for name in RECIPES_HERE if name not in ("quartet_2", "MS-EDEN")])
def test_packed_bytes_are_the_references(recipe: str, name: str) -> None:
    for x, spec, axes, groups in operands(name, RECIPES_HERE[recipe]):
        amax = torch.tensor(2.0) if spec.scale == "static" else None
        expected = pack_operand(x, spec, axes, amax, groups).packed
        found = pack_operand(x.cuda(), spec, axes, None if amax is None else amax.cuda(), groups).packed
        same_bytes(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", MAPS)
def test_operands_of_the_backward_are_the_references(
    name: str, spec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit, of the kernel that writes both operands of a gradient and of the one that shifts an activation."""
    shape, gemms = MAPS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    linear = isinstance(gemms, LinearGemms)
    outputs = 64
    weight = (
        torch.zeros(outputs, shape[-1])
        if linear
        else torch.zeros(
            (shape[1], outputs, *gemms.kernel)
            if gemms.transposed
            else (outputs, shape[1] // gemms.groups, *gemms.kernel)
        )
    )
    gradient = torch.randn(gemms.forward(x, weight, None).shape, generator=generator).to(dtype)
    x = x.to(dtype)
    recipe = Recipe("both", *[SPECS[spec]] * 6)
    launched: list[int] = []
    run = wgrad_operands.fake_quantize_map
    monkeypatch.setattr(wgrad_operands, "fake_quantize_map", lambda *a: (launched.append(1), run(*a))[1])

    def operands(device: str) -> list[torch.Tensor]:
        g, a = gradient.to(device), x.to(device)
        if g.ndim == 4:
            g, a = (t.contiguous(memory_format=torch.channels_last) for t in (g, a))
        both = wgrad_operands.gradient_operands(g, a.shape, gemms, recipe, True, True, (None, None))
        return [*both, wgrad_operands.activation_operand(a, g, gemms, recipe, None)]

    expected, found = operands("cpu"), operands("cuda")
    assert len(launched) == (3 if not linear and gemms.transposed else 2)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


def test_a_map_with_what_is_not_finite() -> None:
    x = torch.randn(2, 32, 4, 33).half()
    x[0, 3, 1, 5], x[1, 20, 2, 20] = float("nan"), float("inf")
    recipe, gemms = Recipe("both", *[QuantSpec()] * 6), ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 1)
    g = x.contiguous(memory_format=torch.channels_last)
    expected = wgrad_operands.gradient_operands(g, g.shape, gemms, recipe, True, True, (None, None))
    found = wgrad_operands.gradient_operands(g.cuda(), g.shape, gemms, recipe, True, True, (None, None))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu().nan_to_num(99.0), other.nan_to_num(99.0))
        assert torch.equal(one.cpu().isnan(), other.isnan())


def step(products: str, recipe: str, name: str, device: str, half: bool = False) -> Gradients:
    layer, x = make(name)
    model = prepare(nn.Sequential(layer), RECIPES_HERE[recipe], include=["0"]).to(device).train()
    set_products(model, products)
    x = x.detach().to(device).requires_grad_()
    with torch.autocast("cuda", torch.float16, enabled=half):
        found, _ = one_step_on(model, x)
    return found


def one_step_on(model: nn.Module, x: torch.Tensor) -> tuple[Gradients, torch.Tensor]:
    y = model(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    y.backward(upstream)
    layer: Any = model[0]  # type: ignore[index]
    bias = None if layer.bias is None else layer.bias.grad
    return Gradients(y.detach(), x.grad, layer.weight.grad, bias), upstream


def compare(found: Gradients, expected: Gradients, limit: float) -> None:
    for part in ("y", "dx", "dw", "db"):
        left, right = getattr(found, part), getattr(expected, part)
        if left is not None:
            assert left.shape == right.shape, part
            difference = (left.cpu().double() - right.cpu().double()).norm() / right.cpu().double().norm()
            assert difference <= limit, f"{part} is off by {difference:.2e}"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", ["nvfp4_train", "tetrajet", "fp4_all_the_way", "mx_baseline", "tetrajet_v2"])
def test_a_step_is_the_references(recipe: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 on both devices: what differs is the order of the sums. Where kernels run they did."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    launched: list[int] = []
    for kernel in ("gather_call", "rows_call"):
        before = getattr(training, kernel)
        monkeypatch.setattr(training, kernel, lambda *a, _f=before, **k: (launched.append(1), _f(*a, **k))[1])
    found = step("fp4", recipe, name, "cuda")
    assert len(launched) >= (0 if "groups" in name else 3)
    compare(found, step("fp4", recipe, name, "cpu"), 3e-6)


@pytest.mark.parametrize("name", [*FEW, "conv", "conv stride 2, dilation 2", "transposed"])
@pytest.mark.parametrize("recipe", ["nvfp4_train", "tetrajet", "quartet_2"])
def test_in_half_precision(recipe: str, name: str) -> None:
    """Under autocast the same step as emulated, up to the rounding of operands and results to FP16."""
    compare(step("fp4", recipe, name, "cuda", True), step("emulated", recipe, name, "cuda", True), 3e-3)


def test_sums_are_deterministic() -> None:
    a, b = (quantize.quantize_nvfp4(torch.randn(3, rows, 5000, device="cuda")) for rows in (100, 90))
    assert torch.equal(training.rows_gemm(a, b), training.rows_gemm(a, b))
