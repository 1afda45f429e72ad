"""The format of a layer, its kernel and the type of the rest are those of the packed file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack
from fp4deploy.packed import PackedFile, read_packed
from fp4deploy.peaks import find_gpu
from fp4deploy.qat import calibrate, prepare
from fp4deploy.timing import launches
from fp4deploy.timing.launches import Shape, eight_bits, works
from fp4deploy.timing.model import time_of
from fp4deploy.timing.network import StepTime, estimate_network

LAYERS = ["1", "2", "3"]


def packed(folder: Path, form: str, rest: str = "fp16", groups: int = 1) -> PackedFile:
    """Five convolutions, the first and the last not quantised; form: of the second and third, "" for none of them."""
    torch.manual_seed(0)
    between = [nn.Conv2d(64, 64, 3, padding=1, groups=groups), nn.Conv2d(64, 64, 3, padding=1)]
    up = nn.ConvTranspose2d(64, 64, 2, stride=2)
    model, x = nn.Sequential(nn.Conv2d(3, 64, 1), *between, up, nn.Conv2d(64, 2, 1)), torch.randn(1, 3, 16, 16)
    if form:
        others = {} if form == "nvfp4" else {form: LAYERS}
        prepare(model, "nvfp4_qat", include=LAYERS, **others)
        calibrate(model, [x])
    pack(model.eval(), folder / "own.fp4", example_inputs=x, rest=rest, verify=False)
    return read_packed(folder / "own.fp4")


def layers(file: PackedFile, arch: str) -> dict[str, StepTime]:
    return {row.layer: row for row in estimate_network(file, find_gpu(arch), (16, 16)).layers}


@pytest.mark.parametrize(
    ("form", "rest", "arch", "precision", "kernel"),
    [
        ("nvfp4", "fp16", "sm120", "FP4", "implicit"),
        ("fp8", "fp16", "sm120", "FP8", "implicit"),
        ("fp8", "bf16", "sm100", "FP8", "implicit"),
        ("fp8", "fp16", "sm90", "FP8 as TF32", "library"),
        ("fp8", "fp32", "sm120", "FP8 as TF32", "library"),
        ("w4a8", "fp16", "sm100", "W4A8", "implicit"),
        ("int8", "fp16", "sm120", "INT8 as TF32", "library"),
        ("nvfp4", "fp32", "sm90", "FP4 as FP32", "library"),
        ("", "bf16", "sm90", "BF16", "library"),
        ("", "fp32", "sm90", "FP32", "library"),
    ],
)
def test_a_layer_has_its_own_format(
    tmp_path: Path, form: str, rest: str, arch: str, precision: str, kernel: str
) -> None:
    found = layers(packed(tmp_path, form, rest), arch)
    for name in LAYERS:
        assert (found[name].precision, found[name].kernels[-1]) == (precision, kernel), name
        assert found[name].low_ms < found[name].ms < found[name].high_ms
    assert found["0"].precision == rest.upper()


def test_groups_have_no_kernel_of_eight_bits(tmp_path: Path) -> None:
    found = layers(packed(tmp_path, "fp8", groups=2), "sm120")
    assert (found["1"].precision, found["2"].precision) == ("FP8 as TF32", "FP8")
    assert "decoded to TF32" in found["1"].outside
    assert "the FP8 kernel was not timed" in found["2"].outside


def test_a_wider_rest_takes_longer(tmp_path: Path) -> None:
    times = {}
    for rest in ("fp16", "bf16", "fp32"):
        (tmp_path / rest).mkdir()
        row = estimate_network(packed(tmp_path / rest, "", rest), find_gpu("sm90"), (512, 512)).layers[1]
        times[rest] = row.ms
    assert times["fp16"] == times["bf16"] < times["fp32"] / 8  # FP32 is multiplied by no tensor core


def test_fp8_by_its_kernel_is_faster_than_decoded(tmp_path: Path) -> None:
    file = packed(tmp_path, "fp8")
    kernel, decoded = (
        estimate_network(each, find_gpu("sm120"), (512, 512)).layers[2]
        for each in (file, packed(tmp_path, "fp8", "fp32"))
    )
    assert kernel.ms < decoded.ms


def test_the_steps_of_a_kernel_of_eight_bits() -> None:
    """64 elements a step, 128 x 128 outputs a program, one byte an element of FP8."""
    gpu = find_gpu("sm120")
    shape = Shape(2, (34, 34), (96,), 130, (3, 3), (1, 1), (0, 0))
    found = eight_bits("FP8", shape, 1e6, gpu)
    programs, steps = -(-2 * 32 * 32 // 128) * 2, 9 * 2
    assert found.cached == programs * steps * 64 * (128 + 128)
    assert found.moved == 1e6
    mixed = eight_bits("W4A8", shape, 1e6, gpu)
    assert mixed.cached == pytest.approx(programs * steps * 64 * 128 * (8.25 + 4.25) / 8)
    large = Shape(16, (258, 258), (256,), 256, (3, 3), (1, 1), (0, 0))
    macs = large.rows * 256 * 256 * 9
    assert 1 < time_of(eight_bits("FP8", large, 0.0, gpu), gpu).ms / 1e3 / (2 * macs / gpu.rate("MXFP8")) < 2.5
    assert gpu.rate("BF16") == gpu.rate("FP16") == 2 * gpu.rate("TF32")
    with pytest.raises(InputError, match="no machine code of the FP8 kernel"):
        launches.code_of("sm90", "FP8", launches.training.WIDE, 1)


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_a_volume_with_a_filter_of_depth_1_is_as_many_images(arch: str) -> None:
    """As `plugins.gemm` launches it; one of depth 3 is a volume, which nobody has timed."""
    gpu = find_gpu(arch)
    slices = Shape(4, (12, 64, 64), (64,), 64, (1, 3, 3), (1, 1, 1), (0, 1, 1))
    assert works(slices, gpu) == works(Shape(48, (64, 64), (64,), 64, (3, 3), (1, 1), (1, 1)), gpu)
    up = Shape(1, (12, 16, 16), (64,), 32, (1, 2, 2), (1, 2, 2), (0, 0, 0), 1, True)
    assert works(up, gpu) == works(Shape(12, (16, 16), (64,), 32, (2, 2), (2, 2), (0, 0), 1, True), gpu)
    (deep, *_) = works(Shape(4, (12, 64, 64), (64,), 64, (3, 3, 3), (1, 1, 1), (1, 1, 1)), gpu)
    assert deep.outside == "volumes and sequences were not timed"
    strided = Shape(4, (12, 64, 64), (64,), 64, (1, 3, 3), (2, 1, 1), (0, 1, 1))
    assert works(strided, gpu)[0].outside
