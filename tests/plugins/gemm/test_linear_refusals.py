"""What NVFP4 layers by name refuse, and that the words say what would fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins import FP4WeightCache, fp4_cached_linear, fp4_linear, fp4_matmul, fp4_quantize

CACHE = fp4_quantize(torch.randn(6, 32), torch.randn(6))
FILTER = fp4_quantize(torch.randn(6, 16, 3, 3))
X = torch.randn(4, 32, dtype=torch.float16)
PACKED = quantize_nvfp4(X)
W = CACHE.weight
ROWS = quantize_nvfp4(X, row_scaled=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fp4_quantize(torch.zeros(6)), ["(6,)", "[N, K] or [O, I, KH, KW]"]),
        (lambda: fp4_quantize(torch.zeros(6, 32, dtype=torch.int8)), ["torch.int8", "floating-point"]),
        (lambda: fp4_quantize([1.0]), ["list"]),  # type: ignore[arg-type]
        (lambda: fp4_quantize(torch.zeros(6, 32), torch.zeros(5)), ["bias is (5,)", "[6]"]),
        (lambda: fp4_quantize(torch.zeros(6, 32), torch.zeros(6, 1)), ["bias is (6, 1)", "[6]"]),
        (lambda: fp4_quantize(torch.zeros(6, 32), torch.zeros(6, dtype=torch.int64)), ["torch.int64", "floating"]),
        (lambda: fp4_quantize(torch.zeros(6, 32), 1.0), ["bias is float"]),  # type: ignore[arg-type]
        (lambda: fp4_quantize(torch.zeros(6, 32), torch.zeros(6, device="meta")), ["bias", "on meta", "on cpu"]),
        (lambda: FP4WeightCache(ROWS, None), ["one amax", "fp4_quantize"]),
        (
            lambda: FP4WeightCache(Nvfp4Tensor(W.codes[:5], W.scales, W.amax, W.shape), None),
            ["codes (6, 16)", "(5, 16)"],
        ),
        (
            lambda: FP4WeightCache(Nvfp4Tensor(W.codes, W.scales.view(torch.uint8), W.amax, W.shape), None),
            ["codes, scales and amax", "float8_e4m3fn"],
        ),
        (lambda: CACHE.forward(X[:, :31]), ["(4, 31)", "(6, 32)", "end with 32"]),
        (lambda: CACHE.forward(torch.zeros((), dtype=torch.float16)), ["x is ()", "end with 32"]),
        (lambda: CACHE.forward([1.0]), ["x is list"]),  # type: ignore[arg-type]
        (lambda: CACHE.forward(X.float()), ["float16 or bfloat16", "torch.float32"]),
        (lambda: CACHE.forward(X, dtype=torch.bfloat16), ["torch.float16", "torch.bfloat16", "input_amax"]),
        (lambda: CACHE.forward(X, "dynamic", dtype=torch.float64), ["torch.float16 or torch.bfloat16"]),
        (lambda: CACHE.forward(X, out_amax=1.0), ["weight-only", "input_amax"]),
        (lambda: CACHE.forward(X, "static"), ["'static'", "'dynamic'", "positive number"]),  # type: ignore[arg-type]
        (lambda: CACHE.forward(X, 0.0), ["input_amax is 0.0", "positive and finite"]),
        (lambda: CACHE.forward(X, -1.0), ["input_amax is -1.0"]),
        (lambda: CACHE.forward(X, float("nan")), ["input_amax is nan"]),
        (lambda: CACHE.forward(X, float("inf")), ["input_amax is inf"]),
        (lambda: CACHE.forward(X, True), ["input_amax is True"]),
        (lambda: CACHE.forward(X, torch.ones(2)), ["(2,)", "one float32"]),
        (lambda: CACHE.forward(X, torch.ones((), dtype=torch.float64)), ["torch.float64", "one float32"]),
        (lambda: CACHE.forward(X, torch.ones((), device="meta")), ["on meta", "on cpu"]),
        (lambda: CACHE.forward(X, 1.0, out_amax=0), ["out_amax is 0"]),
        (lambda: CACHE.forward(X, 1.0, out_amax=torch.ones(3)), ["out_amax", "(3,)"]),
        (lambda: CACHE.forward(PACKED, "dynamic"), ["packed already", "leave input_amax out"]),
        (lambda: CACHE.forward(ROWS), ["row-scaled"]),
        (lambda: CACHE.forward(X.int(), "dynamic"), ["torch.int32", "floating-point"]),
        (lambda: CACHE.forward(X, backend="scaled_mm"), ["two packed operands", "input_amax"]),
        (lambda: CACHE.forward(X, backend="cublas"), ["'cublas'", "auto, kernels, scaled_mm"]),
        (lambda: CACHE.forward(X, "dynamic", backend="cublas"), ["'cublas'", "auto, kernels, scaled_mm"]),
        (lambda: FILTER.forward(X), ["filter (6, 3, 3, 16)", "fp4_conv2d"]),
        (lambda: fp4_cached_linear(X, W), ["Nvfp4Tensor", "fp4_quantize"]),  # type: ignore[arg-type]
        (lambda: fp4_linear(X, torch.zeros(6, 33)), ["(4, 32)", "(6, 33)"]),
        (lambda: fp4_matmul(X, torch.zeros(32, 6)), ["a b^T", "b.mT"]),
        (lambda: fp4_matmul(X, torch.zeros(2, 6, 32)), ["b is (2, 6, 32)", "[N, K]"]),
        (lambda: fp4_matmul(torch.zeros(()), X), ["a is ()", "[..., K]"]),
        (lambda: fp4_matmul(None, X), ["a is NoneType"]),  # type: ignore[arg-type]
        (lambda: fp4_matmul(X, X, torch.zeros(5)), ["(5,)", "[4]"]),
        (lambda: fp4_matmul(X.int(), X), ["torch.int32"]),
    ],
)
def test_refusals(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
