"""The GEMMs of a training step compiled for Hopper and Blackwell: which instructions multiply."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp4deploy.formats import quantize_fp8, quantize_mxfp4, quantize_nvfp4
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.gemm.training import Window, gather_call, gather_tile, rows_call, rows_tile
from fp4deploy.plugins.runtime import cubin

pytestmark = pytest.mark.skipif(aot_compile.triton_version() is None, reason="Triton is missing: pip install triton")
WINDOW = Window((3, 3), (2, 2), (1, 1), (1, 1))


def _rare(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.variants)


@pytest.mark.parametrize(
    ("kernel", "form", "capability", "instruction"),
    [
        ("rows", "mxfp4", 90, "wgmma.mma_async m64n128k16 bf16"),
        ("rows", "nvfp4", 120, "mma.sync m16n8k64 kind::mxf4nvf4"),
        _rare("gather", "nvfp4", 90, "wgmma.mma_async m64n128k16 f16"),
        _rare("gather", "mxfp4", 120, "mma.sync m16n8k64 kind::mxf4nvf4"),
        _rare("gather", "nvfp4", 100, "tcgen05.mma kind::mxf4nvf4"),
        _rare("rows", "mxfp4", 100, "tcgen05.mma kind::mxf4"),
        ("gather", "fp8", 120, "mma.sync m16n8k32 kind::mxf8f6f4"),
        *(_rare("gather", "fp8", arch, "tcgen05.mma kind::mxf8f6f4") for arch in (100, 103, 110)),
        _rare("gather", "fp8", 121, "mma.sync m16n8k32 kind::mxf8f6f4"),
        _rare("gather", "fp8", 90, "wgmma.mma_async m64n128k16 f16"),
    ],
)
def test_instructions(kernel: str, form: str, capability: int, instruction: str) -> None:
    pack = {"nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4, "fp8": partial(quantize_fp8, axis=0)}[form]
    a = pack(torch.ones(1, 2, 2, 64) if kernel == "gather" else torch.ones(2, 128, 640))
    if kernel == "gather":
        out = torch.empty(1000, 20, 20, 128, dtype=torch.float16)
        call = gather_call(a, pack(torch.ones(128, 3, 3, 64)), WINDOW, out, None, True, capability)
    else:
        call = rows_call(a, a, torch.empty(4, 128, 128), capability)
    arch = f"sm_{capability}"
    if aot_compile.too_old(arch, native=capability >= 100):
        pytest.skip(aot_compile.too_old(arch, native=capability >= 100))
    compiled = aot_compile.compile_launch(call.launch, arch)
    assert compiled.instructions == (instruction,)
    assert compiled.spills <= 16  # bytes: none or four registers, by the version of ptxas
    assert cubin.main_loop(compiled.cubin, compiled.name) is not None  # and the machine code has one that multiplies


def test_every_tile_for_sm100_has_the_rows_that_fp4_instructions_need() -> None:
    """With fewer Triton multiplies in FP16, silently."""
    for rows, outputs in ((1, 1), (100, 64), (1 << 20, 65)):
        assert gather_tile(rows, outputs, 100).bm == 128
    assert rows_tile(quantize_nvfp4(torch.ones(1, 3, 16)), 100).bm == 128
