"""Kernels on the GPU under test: quantisation against the reference byte by byte, GEMMs against float64.

The reference computes on the CPU, so that nothing of the GPU under test is on both sides. Outputs of GEMMs are FP16:
rounding alone gives a relative error of about 3e-4, and `LIMIT` allows 1e-3, as the tests of the kernels do. A packed
output has to have the bytes of quantising the kernel's own unpacked output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp4deploy import formats
from fp4deploy.errors import GateError, UnavailableError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor
from fp4deploy.plugins import why_unavailable
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.gemm import dispatch as gemm
from fp4deploy.plugins.gemm import reference
from fp4deploy.plugins.gemm.convolution import block_scaled
from fp4deploy.plugins.quantize import dispatch as quantize
from fp4deploy.selftest.context import Context
from fp4deploy.selftest.proof import Proof, relative_error, require_same_bytes

LIMIT = 1e-3
NO_GPU = "there is no CUDA GPU that torch can use"
NVFP4: list[dict[str, Any]] = [
    {},
    {"block": "2d"},
    {"row_scaled": True},
    {"rounding": "stochastic", "seed": 2**63 + 12345, "offset": 7},
    {"four_over_six": FourOverSix()},
    {"four_over_six": FourOverSix("mse", fast=True)},
]
MXFP4: list[dict[str, Any]] = [{"scale_rule": "floor"}, {"scale_rule": "ceil"}]


def sample(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Normal numbers; "ties": halfway between two codes; "broken": with NaN and infinity; "wide": six decades."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator)
    if kind == "ties":
        values = torch.tensor([0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 448, -0.25, -5])
        x = values[torch.randint(len(values), shape, generator=generator)]
    elif kind == "broken":
        x.view(-1)[:: max(1, x.numel() // 5)] = torch.nan
        x.view(-1)[x.numel() // 2] = torch.inf
    elif kind == "wide":
        x = x * torch.logspace(-4, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return x.to(dtype)


def require_kernels(device: torch.device) -> None:
    """Pass where CUDA kernels run.

    Raises:
        UnavailableError: they do not, and what is missing.
    """
    why = why_unavailable(device)
    if why:
        raise UnavailableError(NO_GPU if device.type == "cpu" else why)


def require_gemm_kernels(device: torch.device) -> None:
    """Pass where Triton's kernels run as well.

    Raises:
        UnavailableError: they do not, and what is missing.
    """
    require_kernels(device)
    why = aot.why_unavailable(device)
    if why:
        raise UnavailableError(why)


def quantisation(context: Context) -> Proof:
    """Packed tensors of every format and rounding, and fake quantisation.

    Raises:
        GateError: a byte differs from the reference.
        UnavailableError: kernels do not run here.
    """
    require_kernels(context.device)
    compared = cases = 0
    shapes = [((33, 48), -1), ((2, 40, 5, 6), 1), ((64, 256), -1)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for kind in ("normal", "ties", "broken", "wide"):
            for shape, axis in shapes:
                x = sample(shape, dtype, kind)
                for variant in NVFP4 if dtype == torch.float16 else NVFP4[:1]:
                    if variant.get("block") == "2d" and axis != -1:
                        continue
                    compared += _packed(context.device, x, axis, variant, f"{dtype}, {kind}, {list(shape)}, {variant}")
                    cases += 1
                compared += _fake(context.device, x, axis, f"fake quantisation, {dtype}, {kind}, {list(shape)}")
                cases += 1
    for variant in MXFP4:
        x = sample((33, 96), torch.float16, "wide")
        found = quantize.quantize_mxfp4(x.to(context.device), **variant)
        expected = formats.quantize_mxfp4(x, **variant)
        compared += require_same_bytes(found.codes, expected.codes, f"MXFP4 {variant}, codes")
        compared += require_same_bytes(found.scales, expected.scales, f"MXFP4 {variant}, scales")
        cases += 1
    return Proof(f"{cases} cases, {compared} bytes and values equal", {"cases": cases, "compared": compared})


def _packed(device: torch.device, x: torch.Tensor, axis: int, variant: dict[str, Any], what: str) -> int:
    found = quantize.quantize_nvfp4(x.to(device), axis=axis, **variant)
    return same_packed(found, formats.quantize_nvfp4(x.movedim(axis, -1), **variant), what)


def _fake(device: torch.device, x: torch.Tensor, axis: int, what: str) -> int:
    found, _ = quantize.fake_quantize_nvfp4(x.to(device), (axis,), 1.5)
    expected, _ = formats.fake_quantize_nvfp4(x, (axis,), 1.5)
    return require_same_bytes(found, expected, what)


def same_packed(found: Nvfp4Tensor, expected: Nvfp4Tensor, what: str) -> int:
    """The number of bytes, if codes, scales and amax are equal.

    Raises:
        GateError: they are not.
    """
    count = require_same_bytes(found.codes, expected.codes, f"{what}, codes")
    count += require_same_bytes(found.scales.view(torch.uint8), expected.scales.view(torch.uint8), f"{what}, scales")
    return count + require_same_bytes(found.amax, expected.amax, f"{what}, amax")


Operation = Callable[..., "torch.Tensor | Nvfp4Tensor"]


@dataclass(frozen=True)
class Case:
    """A GEMM, by what launches it and what computes it in float64.

    operands: shapes of packed operands; of the weight-only GEMM the first is plain.
    """

    name: str
    kernel: Operation
    exact: Operation
    operands: tuple[tuple[int, ...], ...]
    options: dict[str, object]


def one(function: Operation) -> Operation:
    """A convolution of one source."""
    return lambda x, weight, *rest, **options: function((x,), weight, *rest, **options)


def two(function: Operation) -> Operation:
    """A convolution of two."""
    return lambda x, y, weight, *rest, **options: function((x, y), weight, *rest, **options)


def cases() -> list[Case]:
    """Every kind of GEMM, with sizes that are no multiples of a tile."""

    conv, conv_exact = gemm.conv2d, reference.conv2d_reference
    up, up_exact = gemm.conv_transpose2d, reference.conv_transpose2d_reference
    linear = (gemm.matmul, reference.matmul_reference)
    return [
        Case("matrix, W4A4", *linear, ((130, 272), (200, 272)), {}),
        Case("W4A16, 3 rows", *linear, ((3, 512), (136, 512)), {"plain": True}),
        Case("W4A16, 100 rows", *linear, ((100, 320), (136, 320)), {"plain": True}),
        Case("3 x 3", one(conv), one(conv_exact), ((2, 19, 21, 64), (72, 3, 3, 64)), {"padding": 1, "relu": True}),
        Case(
            "3 x 3, stride and dilation 2",
            one(conv),
            one(conv_exact),
            ((1, 24, 17, 48), (40, 3, 3, 48)),
            {"stride": 2, "dilation": 2, "padding": 2},
        ),
        Case(
            "two sources",
            two(conv),
            two(conv_exact),
            ((1, 18, 13, 32), (1, 18, 13, 64), (64, 3, 3, 96)),
            {"padding": 1},
        ),
        Case("transposed", up, up_exact, ((2, 9, 11, 64), (32, 2, 2, 64)), {}),
    ]


def cases_beside(device: torch.device) -> list[Case]:
    """Kernels that a device has beside those of `cases`, whichever was measured to be faster.

    They are compiled here: a folder of compiled kernels has the variants of other layers.
    """
    if why_unavailable(device) or not block_scaled.is_available(device):
        return []
    place: dict[str, object] = {"padding": (1, 1), "relu": True}
    conv, exact = block_scaled.conv2d, reference.conv2d_reference
    return [
        Case(f"{name}, block-scaled mma", of(conv), of(exact), operands, place | options)
        for name, of, operands, options in (
            ("3 x 3", one, ((2, 19, 21, 128), (136, 3, 3, 128)), {}),
            ("3 x 3, stride 2", one, ((1, 24, 17, 48), (40, 3, 3, 48)), {"stride": 2}),
            ("two sources", two, ((1, 18, 13, 32), (1, 18, 13, 64), (64, 3, 3, 96)), {}),
            ("1 x 1", one, ((2, 9, 11, 320), (72, 1, 1, 320)), {"padding": (0, 0)}),
        )
    ]


def gemms(context: Context) -> Proof:
    """Every kind of GEMM against float64.

    Raises:
        GateError: an error is larger than rounding the output explains.
        UnavailableError: kernels do not run here.
    """
    require_gemm_kernels(context.device)
    errors = {case.name: error_of(case, context.device) for case in (*cases(), *cases_beside(context.device))}
    wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
    if wrong:
        listed = ", ".join(f"{name}: {error:.3g}" for name, error in wrong.items())
        raise GateError(f"relative errors above {LIMIT:g} against float64: {listed}")
    return Proof(
        f"{len(errors)} kinds of GEMM, the largest relative error {max(errors.values()):.2g}; {LIMIT:g} is allowed",
        {name: round(error, 9) for name, error in errors.items()},
    )


def error_of(case: Case, device: torch.device) -> float:
    """Relative error of one kind of GEMM."""
    options, plain = dict(case.options), case.options.get("plain", False)
    options.pop("plain", None)
    torch_seed = torch.Generator().manual_seed(len(case.name))
    values = [torch.randn(shape, generator=torch_seed).half() for shape in case.operands]
    operands = [x if plain and place == 0 else formats.quantize_nvfp4(x) for place, x in enumerate(values)]
    bias = torch.randn(case.operands[-1][0], generator=torch_seed)
    exact = case.exact(*operands, bias, dtype=torch.float64, accumulate=torch.float64, **options)
    found = case.kernel(*(moved(x, device) for x in operands), bias.to(device), **options)
    assert isinstance(found, torch.Tensor)
    assert isinstance(exact, torch.Tensor)
    return relative_error(found, exact) if found.shape == exact.shape else float("inf")


def moved(x: Any, device: torch.device) -> Any:
    """A plain or packed tensor on a device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    return Nvfp4Tensor(x.codes.to(device), x.scales.to(device), x.amax.to(device), x.shape, x.e4m3_max)


def packed_outputs(context: Context) -> Proof:
    """Convolutions that write packed output, against quantising what they write unpacked.

    Raises:
        GateError: a byte differs.
        UnavailableError: kernels do not run here.
    """
    require_gemm_kernels(context.device)
    compared = 0
    for name, shapes, call in (
        ("3 x 3", ((2, 19, 21, 64), (40, 3, 3, 64)), lambda x, w, **o: gemm.conv2d((x,), w, padding=1, relu=True, **o)),
        ("transposed", ((2, 9, 11, 64), (32, 2, 2, 64)), gemm.conv_transpose2d),
    ):
        generator = torch.Generator().manual_seed(5)
        packed = [formats.quantize_nvfp4(torch.randn(shape, generator=generator).half()) for shape in shapes]
        x, weight = (moved(each, context.device) for each in packed)
        plain = call(x, weight)
        assert isinstance(plain, torch.Tensor)
        amax = plain.abs().max().float() * 0.75  # some elements saturate
        found = call(x, weight, out_amax=amax)
        assert isinstance(found, Nvfp4Tensor)
        compared += same_packed(found, formats.quantize_nvfp4(plain.cpu(), amax=amax.cpu()), f"{name}, packed output")
    return Proof(f"{compared} bytes equal to those of quantising the unpacked output", {"compared": compared})
