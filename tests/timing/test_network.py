"""Times of packed networks: every step, on a GPU that is not here, and what the command prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.experiments.search.costs import measured_layers
from fp4deploy.packed import PackedFile, read_packed
from fp4deploy.packed.producers import label, plan
from fp4deploy.peaks import find_gpu
from fp4deploy.runs import Run
from fp4deploy.timing.network import estimate_network
from tests.contract.invoke import fp4deploy, must


@pytest.fixture(scope="module")
def file(untrained: Run) -> PackedFile:
    return read_packed(untrained.export_dir / "unet.nvfp4.fp4")


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_every_step_has_a_time(file: PackedFile, arch: str) -> None:
    found = estimate_network(file, find_gpu(arch), (512, 512))
    assert [row.layer for row in found.layers] == [label(step) for step in plan(file.graph)[1]]
    assert found.label == ("estimated" if arch == "sm90" else "projected")
    assert found.total.ms == pytest.approx(sum(row.ms for row in found.layers))
    assert all(0 < row.low_ms < row.ms < row.high_ms for row in found.layers)
    more = estimate_network(file, find_gpu(arch), (512, 512), batch=8)
    assert all(one.ms <= other.ms for one, other in zip(found.layers, more.layers, strict=True))
    assert 1 < more.total.ms / found.total.ms < 16
    assert {row.precision for row in found.layers if "conv" in row.op} == {"FP4", "FP16"}


def test_the_command(untrained: Run, tmp_path: Path) -> None:
    path = untrained.export_dir / "unet.nvfp4.fp4"
    printed = " ".join(must("estimate", "--engine", path, "--arch", "sm120", folder=tmp_path).stdout.split())
    assert "on RTX 5090" in printed
    assert "ms projected" in printed
    done = must("estimate", "--engine", path, "--arch", "sm90", "--json", folder=tmp_path)
    (network,) = json.loads(done.stdout)["layers"]
    assert (network["device"], network["label"], network["batch"]) == ("H200", "estimated", 1)
    assert network["total"]["low"] < network["total"]["ms"] < network["total"]["high"]
    (tmp_path / "times.json").write_text(done.stdout)
    with pytest.raises(InputError, match="estimated times, none that were measured"):
        measured_layers(tmp_path / "times.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arch", "sm120"), "--arch is of a packed network"),
        (("--engine", "unet.fp4", "--data", "shapes"), "--data is of a training"),
        (("--engine", "unet.fp4", "--set", "train.lr=1"), "--set is of a training"),
        (("--engine", "unet.fp4", "--batch-size", "2", "--steps", "30"), "--steps is of a training"),
    ],
)
def test_a_training_and_a_network_are_not_estimated_together(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = fp4deploy("estimate", *arguments, folder=tmp_path)
    assert done.code == 2
    assert words in " ".join(done.stderr.split())
