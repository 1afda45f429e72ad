"""Which kernels a layer is, how many programs and bytes: as the code that launches them says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.peaks import find_gpu
from fp4deploy.plugins.aot.compile import compile_launch, triton_version
from fp4deploy.plugins.aot.spec import Call
from fp4deploy.plugins.gemm.arguments import launch_gemm
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.triton.tiles import Tile
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.runtime import cubin
from fp4deploy.timing import launches
from fp4deploy.timing.launches import Shape, works

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONE, TWO = (1, 1), (2, 2)


def convolution(n: int, size: int, channels: tuple[int, ...], outputs: int, stride: int = 1, taps: int = 3) -> Shape:
    return Shape(n, (size, size), channels, outputs, (taps, taps), (stride, stride), (taps // 2, taps // 2))


UP = Shape(1, (16, 16), (64,), 32, TWO, TWO, (0, 0), 1, True, True)


@pytest.mark.parametrize(
    ("shape", "families"),
    [
        (convolution(4, 64, (64, 64), 64), ["warpgroup"]),
        (convolution(16, 352, (16,), 16), ["direct"]),
        (convolution(1, 32, (16,), 16), ["decoded"]),  # too few tiles for `direct`
        (convolution(4, 64, (64,), 128, stride=2), ["decoded"]),
        (convolution(4, 64, (160,), 256), ["implicit"]),  # no whole steps of decoded weights
        (Shape(4096, (), (256,), 64), ["implicit"]),
        (UP, ["decoded"]),
    ],
)
def test_the_kernels_of_hopper(shape: Shape, families: list[str]) -> None:
    assert [work.family for work in works(shape, find_gpu("sm90"))] == families
    assert [work.family for work in works(shape, find_gpu("sm120"))] == ["implicit"]


def operands(shape: Shape) -> tuple[tuple[Nvfp4Tensor, ...], Nvfp4Tensor]:
    sources = tuple(quantize_nvfp4(torch.zeros(shape.batch, *shape.sizes, count)) for count in shape.channels)
    return sources, quantize_nvfp4(torch.zeros(shape.outputs, *shape.taps, sum(shape.channels)))


@pytest.mark.parametrize("shape", [convolution(2, 12, (64, 64), 130, 2), convolution(1, 9, (32,), 16), UP], ids=str)
@pytest.mark.parametrize("arch", [90, 120])
def test_programs_and_steps_of_an_implicit_gemm(shape: Shape, arch: int) -> None:
    """All bytes that its programs read: of the grid and the main loop that are launched."""
    calls: list[Call] = []
    sources, weight = operands(shape)
    pixels = (shape.batch, *shape.pixels)
    amax = torch.ones(()) if shape.packed else None
    geometry: dict[str, Any] = {"taps": shape.taps, "stride": shape.strides, "padding": shape.paddings}
    if shape.transposed:
        geometry = {"taps": ONE, "transposed": True}
    size = (*pixels, shape.outputs)
    extent = (shape.batch, *shape.sizes)
    launch_gemm(
        *(sources, weight, None, extent, pixels, size, torch.half, amax),
        capability=arch,
        launch=calls.append,
        **geometry,
    )
    facts = dict(calls[0].launch.constants)
    taps = 1 if shape.transposed else facts["KH"] * facts["KW"]
    steps = sum(
        -(-taps // facts["TAPS"]) if facts["TAPS"] > 1 else taps * -(-x.codes.shape[-1] // facts["BK"]) for x in sources
    )
    found = launches.implicit(shape, find_gpu(f"sm{arch}"))
    assert found.cached == calls[0].grid[0] * steps * 2 * facts["BK"] * 0.5625 * (facts["BM"] + facts["BN"])
    assert found.cycles["blocks"] >= 1


def test_a_divided_sum_is_a_second_kernel() -> None:
    shape = convolution(1, 12, (512,), 256, 2)
    first, second = works(shape, find_gpu("sm90"))
    calls: list[Call] = []
    plan = decoded.plan_for("NVIDIA H200", 132, 36, 256, (256,), 9, False)
    assert plan.splits > 1
    (sources, weight) = operands(shape)
    planes = decode_weight(weight, shape.channels)
    decoded.conv2d(sources, planes, stride=2, padding=1, chosen=plan, launch=calls.append)
    assert len(calls) == 2
    written = 4.0 * plan.splits * 36 * 256
    steps = 9 * 256 // plan.tile.bk / plan.splits
    read = 2 * plan.tile.bk * (0.5625 * plan.tile.bm + 2 * plan.tile.bn)
    assert first.cached == pytest.approx(calls[0].grid[0] * steps * read + written)
    assert (second.family, second.moved) == ("moves", written + 2.0 * 36 * 256)


def test_a_kernel_that_nobody_compiled_is_named() -> None:
    with pytest.raises(InputError, match="no machine code of the implicit kernel of 8 x 8 x 8 for sm120.*--loops"):
        launches.code_of("sm120", "implicit", Tile(8, 8, 8, 4, 3), 1)


@pytest.mark.skipif(triton_version() is None, reason="Triton is missing: pip install triton")
def test_machine_code_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction of m16n8k64 multiplies 8192 elements; a program of eight warps has 128 x 128 x 128 a step."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import time_model

    monkeypatch.setitem(sys.modules, "time_model", time_model)
    launch = next(
        each
        for each in time_model.implicit_launches(120)
        if dict(each.constants)["BN"] == 128 and dict(each.constants)["TAPS"] == 1
    )
    kernel = compile_launch(launch, "sm_120")
    loop = cubin.main_loop(kernel.cubin, kernel.name)
    assert loop is not None
    assert loop.matrix == 128**3 // 8192 // 8
    assert loop.issued < loop.stall
    if launches.loops()["triton"] == triton_version():
        known = launches.code_of("sm120", "implicit", Tile(128, 128, 64, 8, 3), 1)
        assert (known.loop, known.registers, known.shared) == (loop, kernel.registers, kernel.shared)
    with pytest.raises(ValueError, match="no section"):
        cubin.main_loop(kernel.cubin, "another_kernel")
