"""GEMM kernels as a caller on a GPU runs them, in Triton's interpreter (`tests.plugins.interpreter`).

`dispatch` is led to its kernels, compiled without inline PTX, for SM90; memory is filled with NaN (255) where nothing
was written. A case is a list of facts with their verdicts: [what, value, limit].
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Facts = list[tuple[str, float, float]]
LIMIT = 6e-4  # float16 rounds to 2^-11; sums are of products that are exact


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the norm; NaN where shapes differ or a NaN is left."""
    if found.shape != expected.shape:
        return float("nan")
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def fused(unfused: torch.Tensor, run: Callable[..., Any]) -> Facts:
    """The bytes of the fused quantisation are those of quantising the unfused output."""
    from fp4deploy.formats import quantize_nvfp4

    amax = unfused.abs().max().float() * 0.75  # some saturate
    got, expected = run(out_amax=amax), quantize_nvfp4(unfused, amax=amax)
    codes = (got.codes != expected.codes).sum()
    scales = (got.scales.view(torch.uint8) != expected.scales.view(torch.uint8)).sum()
    return [("shape", float(got.shape != expected.shape), 0), ("codes", float(codes), 0), ("scales", float(scales), 0)]


def convolution(
    image: tuple[int, ...], outputs: int, size: Any, options: dict[str, Any], second: int = 0, relu: bool = True
) -> Facts:
    """size: of the filter along both axes, or along each."""

    from fp4deploy.formats import FourOverSix, quantize_nvfp4
    from fp4deploy.plugins.gemm.dispatch import conv2d
    from fp4deploy.plugins.gemm.reference import conv2d_reference

    sources = [quantize_nvfp4(torch.randn(image))]
    sources += [quantize_nvfp4(30 * torch.randn(*image[:-1], second))] if second else []
    taps = (size, size) if isinstance(size, int) else size
    w = quantize_nvfp4(torch.randn(outputs, *taps, image[-1] + second), four_over_six=FourOverSix())
    bias = torch.randn(outputs) if relu else None
    run = partial(conv2d, tuple(sources), w, bias, relu=relu, **options)
    exact = {"dtype": torch.float64, "accumulate": torch.float64}
    found = run()
    expected = conv2d_reference(tuple(sources), w, bias, relu=relu, **exact, **options)
    return [("error", error(found, expected), LIMIT), *fused(found, run)]


def transposed(image: tuple[int, ...], outputs: int, taps: tuple[int, ...] = (2, 2)) -> Facts:
    from fp4deploy.formats import quantize_nvfp4
    from fp4deploy.plugins.gemm.dispatch import conv_transpose2d
    from fp4deploy.plugins.gemm.reference import conv_transpose2d_reference

    x, w = quantize_nvfp4(torch.randn(image)), quantize_nvfp4(torch.randn(outputs, *taps, image[-1]))
    bias = torch.randn(outputs)
    run = partial(conv_transpose2d, x, w, bias)
    found = run()
    expected = conv_transpose2d_reference(x, w, bias, dtype=torch.float64, accumulate=torch.float64)
    return [("error", error(found, expected), LIMIT), *fused(found, run)]


def matrices(rows: tuple[int, ...], k: int, n: int, packed: bool) -> Facts:
    from fp4deploy.formats import quantize_nvfp4
    from fp4deploy.plugins.gemm.dispatch import matmul
    from fp4deploy.plugins.gemm.reference import matmul_reference

    plain = torch.randn(*rows, 2 * k).to(torch.float16)[..., ::2]  # holes
    a, b, bias = quantize_nvfp4(plain) if packed else plain, quantize_nvfp4(torch.randn(n, k)), torch.randn(n)
    run = partial(matmul, a, b, bias, relu=True)
    found = run()
    expected = matmul_reference(a, b, bias, True, torch.float64, accumulate=torch.float64)
    return [("error", error(found, expected), LIMIT), *(fused(found, run) if packed else [])]


def grouped(ends: tuple[int, ...], rows: int, k: int, n: int) -> Facts:
    """Rows of experts, two of them with none; the last rows are nobody's."""
    from fp4deploy.plugins.gemm.grouped import fp4_grouped_linear
    from fp4deploy.plugins.gemm.operands import pack
    from fp4deploy.plugins.gemm.reference import matmul_reference
    from fp4deploy.plugins.gemm.weight_cache import fp4_quantize

    x = torch.randn(rows, k).half()
    caches = [fp4_quantize(10.0**i * torch.randn(n, k), torch.randn(n)) for i in range(len(ends))]
    found = fp4_grouped_linear(x, caches, torch.tensor(ends), "dynamic")
    facts = [("rows of nobody", float(found[ends[-1] :].abs().max()), 0.0)]
    for cache, start, stop in zip(caches, (0, *ends), ends, strict=False):
        exact = matmul_reference(pack(x, "dynamic"), cache.weight, cache.bias, accumulate=torch.float64)
        assert isinstance(exact, torch.Tensor)
        facts.append(("error", error(found[start:stop], exact[start:stop]), LIMIT))
    return facts


def broken_block(value: float) -> Facts:
    from fp4deploy.formats import quantize_nvfp4
    from fp4deploy.plugins.gemm.dispatch import conv2d

    x = torch.randn(1, 6, 6, 32)
    x[0, 2, 3, 5] = value
    touched = conv2d((quantize_nvfp4(x),), quantize_nvfp4(torch.randn(16, 3, 3, 32)), padding=1).isnan()
    expected = torch.zeros(1, 6, 6, 16, dtype=torch.bool)
    expected[0, 1:4, 2:5] = True
    return [("pixels", float((touched != expected).sum()), 0)]


def extreme(scale: float) -> Facts:
    from fp4deploy.formats import quantize_nvfp4
    from fp4deploy.plugins.gemm.dispatch import matmul
    from fp4deploy.plugins.gemm.reference import matmul_reference

    a, b = quantize_nvfp4(torch.randn(5, 48) * scale), quantize_nvfp4(torch.randn(9, 48) / scale)
    expected = matmul_reference(a, b, dtype=torch.float64, accumulate=torch.float64)
    return [("error", error(matmul(a, b), expected), LIMIT)]


CASES: dict[str, Callable[[], Facts]] = {
    "conv 3x3": partial(convolution, (1, 5, 7, 32), 20, 3, {"padding": 1}),
    "conv 3x3, stride 2, 17 channels": partial(convolution, (2, 6, 5, 17), 16, 3, {"padding": 1, "stride": 2}),
    "conv 5x5, dilation 2": partial(convolution, (1, 9, 8, 48), 33, 5, {"padding": 4, "dilation": 2}),
    "conv 1x1, one pixel": partial(convolution, (1, 1, 1, 64), 10, 1, {}),
    "conv without bias or ReLU": partial(convolution, (1, 4, 4, 16), 16, 3, {}, relu=False),
    "conv of one channel to one": partial(convolution, (1, 3, 3, 1), 1, 3, {"padding": 1}),
    "conv with padding wider than the feature map": partial(convolution, (1, 2, 1, 16), 8, 3, {"padding": 3}),
    "two sources, the second not whole blocks": partial(convolution, (2, 4, 4, 16), 40, 3, {"padding": 1}, 20),
    "two sources of whole steps": partial(convolution, (1, 4, 5, 64), 16, 1, {}, 128),
    "volume 3x3x3, stride 1x2x2, two sources": partial(
        convolution, (1, 3, 4, 5, 16), 9, (3, 3, 3), {"padding": 1, "stride": (1, 2, 2)}, 20
    ),
    "volume 1x3x3, a batch of planes": partial(convolution, (1, 3, 4, 5, 32), 7, (1, 3, 3), {"padding": (0, 1, 1)}),
    "volume 1x3x3, stride 2x1x1": partial(
        convolution, (2, 3, 2, 5, 16), 7, (1, 3, 3), {"padding": (0, 1, 1), "stride": (2, 1, 1)}
    ),
    "volume of one voxel": partial(convolution, (1, 1, 1, 1, 16), 5, (3, 3, 3), {"padding": 1}),
    "sequence": partial(convolution, (2, 9, 16), 5, (3,), {"padding": 1, "stride": 2}),
    "filter 3x1": partial(convolution, (1, 6, 4, 16), 5, (3, 1), {"padding": (1, 0)}),
    "transposed volume": partial(transposed, (1, 2, 3, 2, 20), 7, (2, 2, 2)),
    "transposed volume, 2x1x2": partial(transposed, (2, 2, 3, 2, 16), 5, (2, 1, 2)),
    "transposed sequence": partial(transposed, (2, 5, 16), 5, (2,)),
    "transposed": partial(transposed, (2, 3, 5, 40), 21),
    "transposed, one pixel": partial(transposed, (1, 1, 1, 16), 16),
    "matmul": partial(matrices, (70,), 100, 33, True),
    "matmul of a vector": partial(matrices, (), 16, 1, True),
    "matmul of three axes": partial(matrices, (2, 3), 17, 40, True),
    "weight-only, one row": partial(matrices, (1,), 64, 40, False),
    "weight-only, 70 rows": partial(matrices, (70,), 100, 33, False),
    "weight-only, odd K, three axes": partial(matrices, (2, 3), 17, 5, False),
    "experts": partial(grouped, (0, 65, 65, 90), 95, 50, 33),
    "NaN": partial(broken_block, float("nan")),
    "infinity": partial(broken_block, float("inf")),
    "operands of 1e-12 and 1e12": partial(extreme, 1e-12),
}


def lead_to_interpreter() -> list[str]:
    """Make `dispatch` take its kernels on the CPU; returns what is launched, as it happens."""
    from fp4deploy.plugins.aot.spec import Call
    from fp4deploy.plugins.gemm import arguments, dispatch

    launched: list[str] = []

    def run(call: Call, device: torch.device) -> None:
        constants = tuple((name, False if name == "ASM" else value) for name, value in call.launch.constants)
        launched.append(call.launch.kernel)
        launch = dataclasses.replace(call.launch, constants=constants)
        arguments.just_in_time(dataclasses.replace(call, launch=launch))

    dispatch.runs_kernels = arguments.runs_kernels = lambda x: True  # type: ignore[assignment]
    arguments.run = run  # type: ignore[assignment]
    arguments.capability_of = lambda device: 90  # type: ignore[assignment]
    return launched


def results() -> dict[str, dict[str, Any]]:
    """Facts and launches of the cases in INTERPRETED_CASES, a list in JSON; of every case if it is empty."""
    names = json.loads(os.environ.get("INTERPRETED_CASES", "[]")) or [*CASES]
    torch.use_deterministic_algorithms(True)  # torch.empty is NaN, or the largest integer
    launched = lead_to_interpreter()
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        if name not in names:
            continue
        torch.manual_seed(number)
        launched.clear()
        facts = case()
        found[name] = {"facts": facts, "launches": len(launched)}
    return found
