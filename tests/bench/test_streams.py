"""Throughput with several streams: what is refused without a GPU, and what a GPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4deploy.bench.streams import COLUMNS, Throughput, energy_counter, throughputs
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.runs import Run


def test_a_row() -> None:
    assert Throughput(2, 1, 1234.5, 0.81, 3 << 20, None).cells() == ("2", "1", "1234.5", "0.810", "3", "–")
    assert len(Throughput(2, 1, 1.0, 1.0, 1, 0.25).cells()) == len(COLUMNS)


def test_refusals(untrained: Run) -> None:
    path = untrained.export_dir / "unet.fp4"
    with pytest.raises(InputError, match="--streams measures packed networks"):
        throughputs(Path("unet.onnx"), [1])
    with pytest.raises(InputError, match="at least one stream"):
        throughputs(path, [0])
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="--streams needs a GPU"):
            throughputs(path, [1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_streams_on_a_gpu(untrained: Run) -> None:
    found = throughputs(untrained.export_dir / "unet.fp4", [1, 2], batch=2, seconds=0.2)
    assert [row.streams for row in found] == [1, 2]
    assert all(row.images_per_s > 0 and row.bytes > 0 for row in found)
    joules = energy_counter(torch.device("cuda"))()
    assert joules is None or joules > 0
