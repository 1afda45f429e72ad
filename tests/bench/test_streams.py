"""Throughput with several streams: what is refused without a GPU, and what a GPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4deploy.bench.streams import COLUMNS, Throughput, energy_counter, throughputs
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy


def test_a_row() -> None:
    assert Throughput(2, 1, 1234.5, 0.81, 3 << 20, None).cells() == ("2", "1", "1234.5", "0.810", "3", "–")
    assert len(Throughput(2, 1, 1.0, 1.0, 1, 0.25).cells()) == len(COLUMNS)


def test_refusals(untrained: Run) -> None:
    path = untrained.export_dir / "unet.nvfp4.fp4"
    with pytest.raises(InputError, match="throughput measures packed networks"):
        throughputs(Path("unet.nvfp4.onnx"), [1])
    with pytest.raises(InputError, match="at least one stream"):
        throughputs(path, [0])
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="throughput needs a GPU"):
            throughputs(path, [1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_command_and_its_former_option_without_a_gpu(untrained: Run, tmp_path: Path) -> None:
    engine = ("--engine", untrained.export_dir / "unet.nvfp4.fp4")
    for arguments, moved in ((("throughput", *engine), False), (("bench", *engine, "--streams", 2), True)):
        done = fp4deploy(*arguments, "--json", "-", folder=tmp_path)
        assert (done.code, done.stdout) == (3, ""), done.stderr
        assert "throughput needs a GPU" in done.stderr
        assert ("bench --streams is a command of its own now: fp4deploy throughput" in done.stderr) is moved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_streams_on_a_gpu(untrained: Run) -> None:
    found = throughputs(untrained.export_dir / "unet.nvfp4.fp4", [1, 2], batch=2, seconds=0.2)
    assert [row.streams for row in found] == [1, 2]
    assert all(row.images_per_s > 0 and row.bytes > 0 for row in found)
    joules = energy_counter(torch.device("cuda"))()
    assert joules is None or joules > 0
