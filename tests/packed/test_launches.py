"""Kernels of a network's packed layers that are compiled ahead of time: all that any size of its input launches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.architecture import Architecture
from fp4deploy.export.to_packed import pack_model
from fp4deploy.native import Gpu, record
from fp4deploy.packed import PackedFile, packed_file, packed_launches
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.convolution import block_scaled
from fp4deploy.qat import calibrate, prepare
from tests.packed.small_networks import packed

SHAPES = ((1, 3, 32, 32), (16, 3, 352, 480))


class Dilated(nn.Module):
    """A strided stem, a dilated convolution of 5 x 3 taps, a residual, a transposed one, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 64, 3, 2, 1)
        self.wide = nn.Conv2d(64, 64, (5, 3), 1, (4, 2), dilation=2)
        self.up, self.head = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(32, 5, 1)
        self.hidden, self.scores = nn.Linear(32, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(self.stem(x).relu()).relu()
        y = self.up(self.wide(y) + y)
        return self.head(y), self.scores(self.hidden(y.mean((2, 3))).relu())


@pytest.fixture(scope="module")
def dilated() -> PackedFile:
    torch.manual_seed(0)
    model, x = Dilated(), torch.randn(1, 3, 32, 32)
    prepare(model, "nvfp4_qat")
    calibrate(model, [x])
    return packed_file(Path("dilated.fp4"), None, *pack_model(model.eval(), x))


@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "sm_121"])
@pytest.mark.parametrize("rest", ["fp16", "bf16"])
def test_every_kernel_of_a_plan_is_listed(arch: str, rest: str) -> None:
    file, architecture = packed("nvfp4_qat", 0.25, rest=rest)[1], Architecture.parse(arch)
    listed = packed_launches(file, arch)
    assert len({*listed}) == len(listed)
    for shape in SHAPES:
        plan = record(file, Gpu(architecture, "", 170), shape, weights="packed")
        launched = {each.kernel for each in plan.stages["body"] if isinstance(each.kernel, Launch)}
        assert launched
        assert launched <= {*listed}


def test_forms_of_layers(dilated: PackedFile) -> None:
    listed = packed_launches(dilated, "sm_120")
    triton = [dict(each.constants) for each in listed if each.compiler == "triton"]
    ours = [dict(each.constants) for each in listed if each.compiler == "nvcc"]
    assert {(each["KH"], each["KW"], each["UP"]) for each in triton if "UP" in each} == {
        (1, 1, False),
        (2, 2, True),
        (3, 3, False),
    }
    forms = {(each["KH"], each["KW"], each["STRIDE"], each["DILATION"], each["TH"] * each["TW"]) for each in ours}
    assert forms == {(3, 3, 2, 1, 64), (3, 3, 2, 1, 256)}  # `wide` is decoded where nothing compiles


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_only_sm120_has_kernels_of_cuda(arch: str, dilated: PackedFile) -> None:
    kernels = {each.kernel for each in packed_launches(dilated, arch)}
    assert (f"{block_scaled.SOURCE}:{block_scaled.NAME}" in kernels) == (arch == "sm_120")


def test_a_rest_in_fp32_has_no_kernels(dilated: PackedFile) -> None:
    graph = dilated.graph.model_copy(update={"rest": "fp32"})
    assert packed_launches(dataclasses.replace(dilated, graph=graph), "sm_120") == []
