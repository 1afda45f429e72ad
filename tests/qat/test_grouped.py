"""A grouped linear layer with both gradients: each expert as a linear layer of its own, on packed operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.qat import RECIPES, QuantSpec, Recipe, grouped_linear
from fp4deploy.qat.fp4_gemms.autograd import packed_gemms
from fp4deploy.qat.operators.gemms import LinearGemms

NV, MX = Recipe("nv", *[QuantSpec()] * 6), Recipe("mx", *[QuantSpec("mxfp4")] * 6)
DOUBLE = Recipe("double", *[QuantSpec()] * 2, *[QuantSpec(block="1d")] * 4, double_quantization=True)
ENDS, ROWS, N, K = (40, 40, 150), 155, 24, 40
Results = dict[str, torch.Tensor]


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    scales = 10.0 ** torch.arange(len(ENDS)).view(-1, 1, 1)  # each expert has an amax of its own
    weight = (scales * torch.randn(len(ENDS), N, K)).requires_grad_()
    return torch.randn(ROWS, K).requires_grad_(), weight, torch.randn(len(ENDS), N).requires_grad_()


def results(y: torch.Tensor, *leaves: Any) -> Results:
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    return {"y": y.detach()} | {str(number): leaf.grad for number, leaf in enumerate(leaves) if leaf is not None}


@pytest.mark.parametrize("recipe", [NV, MX, DOUBLE], ids=lambda recipe: recipe.name)
def test_one_expert_is_a_linear_layer_bit_for_bit(recipe: Recipe) -> None:
    x, weight, _ = operands()  # whole segments: zeros behind them may change the order of torch's sums
    found = results(grouped_linear(x[:128], weight[:1], torch.tensor([128]), None, recipe), x, weight)
    x, weight, _ = operands()
    expected = results(packed_gemms(x[:128], weight[0], None, LinearGemms(), recipe), x, weight)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_under_autocast_codes_are_multiplied_as_a_linear_layer_multiplies_them() -> None:
    """Decoded values in FP32: BF16 holds four bits of a code and four of its scale, but not their product."""
    x, weight, _ = operands()
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_linear(x[:128], weight[:1], torch.tensor([128]), None, NV)
        expected = packed_gemms(x[:128], weight[0], None, LinearGemms(), NV)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_each_expert_is_a_linear_layer_of_its_own_rows() -> None:
    """MXFP4 has no global scale, so that an expert's numbers do not depend on those of the others."""
    x, weight, bias = operands()
    found = results(grouped_linear(x, weight, torch.tensor(ENDS), bias, MX), x, weight, bias)
    x, weight, bias = operands()
    parts = [
        packed_gemms(x[start:stop], weight[expert], bias[expert], LinearGemms(), MX)
        for expert, (start, stop) in enumerate(zip((0, *ENDS), ENDS, strict=False))
        if start < stop
    ]
    expected = results(torch.cat([*parts, torch.zeros(ROWS - ENDS[-1], N)]), x, weight, bias)
    assert all(torch.equal(found[name], expected[name]) for name in ("y", "0", "1"))
    torch.testing.assert_close(found["2"], expected["2"])


@pytest.mark.parametrize("recipe", ["nvfp4_train", "fp4_all_the_way", "tetrajet_v2", "quartet_2"])
def test_gradients_of_every_expert_are_near_those_in_high_precision(recipe: str) -> None:
    x, weight, bias = operands()
    found = results(grouped_linear(x, weight, torch.tensor(ENDS), bias, recipe), x, weight, bias)
    x, weight, bias = operands()
    expert = torch.searchsorted(torch.tensor(ENDS), torch.arange(ENDS[-1]), right=True)
    y = torch.einsum("mk,mnk->mn", x[: ENDS[-1]], weight[expert]) + bias[expert]
    expected = results(torch.cat([y, torch.zeros(ROWS - ENDS[-1], N)]), x, weight, bias)
    for name, exact in expected.items():
        assert (found[name] - exact).norm() < 0.3 * exact.norm(), name
    assert not found["1"][1].any(), "the second expert has no rows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_one_launch_on_a_gpu_computes_what_the_reference_does() -> None:
    parts: dict[str, Results] = {}
    for device in ("cpu", "cuda"):
        leaves = [each.detach().to(device, torch.bfloat16).requires_grad_() for each in operands()]
        y = grouped_linear(leaves[0], leaves[1], torch.tensor(ENDS, device=device), leaves[2], NV)
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape).to(y))
        parts[device] = {"y": y.detach()} | {str(i): leaf.grad for i, leaf in enumerate(leaves)}  # type: ignore[misc]
    for name, exact in parts["cpu"].items():
        error = (parts["cuda"][name].cpu().float() - exact.float()).norm() / exact.float().norm()
        assert error < 1e-2, name


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a recipe for fine-tuning": ({"recipe": "nvfp4_qat"}, "pass straight through"),
    "columns": ({"x": torch.ones(ROWS, K + 1)}, r"x \(155, 41\), weight"),
    "too few ends": ({"ends": torch.tensor([3, 4])}, r"ends \(2,\)"),
    "floating-point ends": ({"ends": torch.ones(3)}, "ends int64"),
    "descending": ({"ends": torch.tensor([5, 4, 12])}, "has to ascend"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_says_what_would(name: str) -> None:
    changed, message = BAD[name]
    x, weight, bias = operands()
    given: dict[str, Any] = {"x": x, "weight": weight, "ends": torch.tensor(ENDS), "bias": bias}
    with pytest.raises(InputError, match=message):
        grouped_linear(**{**given, "recipe": RECIPES["nvfp4_train"], **changed})
