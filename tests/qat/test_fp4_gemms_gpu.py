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
from fp4deploy.plugins.quantize.unfolded import Unfolding, pack_unfolded
from fp4deploy.qat import QuantSpec, prepare, set_products
from fp4deploy.qat.fp4_gemms.operands import pack_operand
from fp4deploy.qat.operators.gemms import ConvGemms
from fp4deploy.qat.operators.quantizers import quantize_operand, quantize_unfolded, unfolds_by_kernel
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
UNFOLDINGS = {
    "3x3": ((2, 5, 6, 7), ((3, 3), (1, 1), (1, 1), (1, 1))),
    "stride 2": ((3, 4, 9, 8), ((3, 3), (2, 2), (1, 1), (1, 1))),
    "uneven": ((1, 3, 9, 7), ((2, 3), (2, 1), (1, 2), (3, 1))),
    "one pixel": ((2, 1, 1, 1), ((1, 1), (1, 1), (0, 0), (1, 1))),
    "many": ((4, 17, 33, 31), ((3, 3), (1, 1), (1, 1), (1, 1))),
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", UNFOLDINGS)
def test_packing_unfolds_without_memory(name: str, spec: str, dtype: torch.dtype) -> None:
    """The bytes of packing what F.unfold writes, whole and one image at a time."""
    shape, steps = UNFOLDINGS[name]
    x, how = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), SPECS[spec]
    gemms = ConvGemms(*steps[:1], *steps[1:], groups=1)
    y = nn.functional.conv2d(x.float(), torch.ones(1, shape[1], *steps[0]), None, *steps[1:])
    expected = pack_operand(gemms._unfold(x, tuple(y.shape[2:])), how, (-1,)).packed
    rule = how.scale_rule if how.format == "mxfp4" else None
    for most in (1 << 28, 1):
        unfolding = Unfolding(*steps, tuple(y.shape[2:]))
        found = list(pack_unfolded(x.cuda(), unfolding, rule, how.rounding, None, how.hadamard, most))
        assert len(found) == (1 if most > 1 else shape[0])
        for images, packed in found:
            assert torch.equal(packed.codes.cpu(), expected.codes[images])
            assert torch.equal(packed.scales.cpu().view(torch.uint8), expected.scales[images].view(torch.uint8))
            assert packed.shape[1:] == expected.shape[1:]


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float32, torch.float16)])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", UNFOLDINGS)
def test_quantising_unfolds_without_memory(name: str, spec: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The values of quantising what F.unfold writes, in a layout that a matrix product reads without a copy."""
    shape, steps = UNFOLDINGS[name]
    x, how = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtypes[0]), SPECS[spec]
    gemms = ConvGemms(*steps, groups=1)
    grid = nn.functional.conv2d(x.float(), torch.ones(1, shape[1], *steps[0]), None, *steps[1:]).shape[2:]
    expected, _ = quantize_operand(gemms._unfold(x, tuple(grid)), how, (-1,))
    source = x.cuda().to(memory_format=torch.channels_last)
    assert unfolds_by_kernel(source, how)
    found = quantize_unfolded(source, how, gemms.unfolding(grid), dtypes[1])
    assert torch.equal(found.cpu(), expected.to(dtypes[1]))
    assert found.transpose(0, 1).is_contiguous()


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
