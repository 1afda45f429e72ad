"""Grouped GEMM of packed experts: the definition, and both forms against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.plugins.gemm.grouped import fp4_grouped_linear
from fp4deploy.plugins.gemm.linear import fp4_cached_linear
from fp4deploy.plugins.gemm.operands import pack
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache, fp4_quantize

ENDS = (5, 5, 12, 15)  # the second expert has no row, and two rows no expert
ROWS, K, N = 17, 48, 24


def experts(bias: bool) -> list[FP4WeightCache]:
    torch.manual_seed(0)
    scales = (0.1, 1.0, 3.0, 30.0)
    return [fp4_quantize(scale * torch.randn(N, K), torch.randn(N) if bias else None) for scale in scales]


@pytest.mark.parametrize("amax", [None, "dynamic", 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_both_forms_multiply_each_row_by_its_experts_weight(amax: Any, bias: bool) -> None:
    caches, ends = experts(bias), torch.tensor(ENDS)
    x = torch.randn(ROWS, K).half()
    packed = fp4_grouped_linear(x, caches, ends, amax)
    operand = x if amax is None else pack(x, amax)
    start = 0
    for cache, stop in zip(caches, ENDS, strict=True):
        exact = matmul_reference(operand, cache.weight, cache.bias, accumulate=torch.float64)
        assert isinstance(exact, torch.Tensor)
        torch.testing.assert_close(packed[start:stop], exact[start:stop], rtol=2e-3, atol=2e-3)
        start = stop
    assert not packed[ENDS[-1] :].any()
    decoded = fp4_grouped_linear(x, caches, ends.int(), amax, form="decoded")
    torch.testing.assert_close(decoded, packed, rtol=4e-3, atol=float(packed.abs().max()) * 2e-3)
    assert not decoded[ENDS[-1] :].any()


def test_one_expert_is_a_linear_layer_bit_for_bit() -> None:
    cache, x = experts(True)[2], torch.randn(ROWS, K).bfloat16()
    found = fp4_grouped_linear(x, [cache], torch.tensor([ROWS]), "dynamic")
    assert torch.equal(found, fp4_cached_linear(x, cache, "dynamic"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "form": ({"form": "fused"}, "Valid: packed, decoded"),
    "no expert": ({"caches": []}, "one fp4_quantize"),
    "other widths": ({"caches": [*experts(False)[:3], fp4_quantize(torch.ones(N, 32))]}, "alike"),
    "half a bias": ({"caches": [*experts(False)[:3], experts(True)[0]]}, "Some experts have a bias"),
    "columns": ({"x": torch.ones(ROWS, K + 1).half()}, r"rows \[M, 48\] sorted by expert"),
    "too few ends": ({"ends": torch.tensor([3, 4])}, r"int64 \(4,\) on cpu fits"),
    "floating-point ends": ({"ends": torch.tensor([1.0, 2.0, 3.0, 4.0])}, "the end of each expert's rows"),
    "descending": ({"ends": torch.tensor([5, 4, 12, 15])}, "has to ascend"),
    "beyond the rows": ({"ends": torch.tensor([5, 5, 12, 18])}, "up to 17 rows"),
    "a dtype": ({"dtype": torch.bfloat16}, "with input_amax it can"),
    "a gradient": ({"x": torch.ones(ROWS, K).half().requires_grad_()}, "has no gradient"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_says_what_would(name: str) -> None:
    changed, message = BAD[name]
    given: dict[str, Any] = {"x": torch.ones(ROWS, K).half(), "caches": experts(False), "ends": torch.tensor(ENDS)}
    with pytest.raises(InputError, match=message):
        fp4_grouped_linear(**{**given, **changed})
