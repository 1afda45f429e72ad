"""What a shell or a notebook shows of public objects is one line; and outputs that `infer` leaves out are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.data.palette import colours
from fp4deploy.export.engine.build import BuildResult
from fp4deploy.export.ledger.ledger import Ledger, LedgerRow
from fp4deploy.predict.prediction import Prediction

ROWS = tuple(
    LedgerRow(f"layer{at}", "Conv2d", "FP4", "FP8", "FP8", "FP8", "fp8", "no FP4 convolution", 9, False, (), ())
    for at in range(40)
)
LEDGER = Ledger(
    "tensorrt-rtx", "1.7", "sm120", "auto", "build log", "two.onnx", "0" * 64, "two.plan", "0" * 64, 1000, 0.5,
    (1, 1, 8), None, ROWS, (),
)  # fmt: skip


class Two(nn.Module):
    """A network of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 2, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x).relu()
        return self.head(y), self.aux(y)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The exported and the packed network."""
    folder, x = tmp_path_factory.mktemp("two"), torch.randn(1, 3, 8, 8)
    model = Two().eval()
    exported = fd.export_onnx(model, x, folder / "two.onnx")
    return exported, fd.pack(model, folder / "two.fp4", example_inputs=x)


def test_reprs_are_one_line(files: tuple[Any, Any]) -> None:
    exported, packed = files
    x = torch.randn(32, 64)
    mask = np.zeros((4, 6), np.uint8)
    shown = {
        repr(each)
        for each in (
            fd.quantize_nvfp4(x),
            fd.quantize_mxfp4(x),
            fd.fp4_quantize(x),
            exported,
            packed,
            fd.open_runtime(exported.path),
            fd.open_runtime(packed.file.path),
            exported.verification,
            LEDGER,
            BuildResult(Path("two.plan"), Path("two.ledger.json"), LEDGER, 0.5, 1000),
            Prediction(mask, ("sky", "road"), colours(("sky", "road"), background=False)),
        )
    }
    assert not [text for text in shown if "\n" in text or " object at 0x" in text or len(text) > 500]
    assert "Nvfp4Tensor((32, 64), 1152 bytes, cpu)" in shown
    assert "Prediction(4 x 6 pixels: sky 24)" in shown


@pytest.mark.parametrize("form", [0, 1])
def test_infer_says_that_there_are_more_outputs(files: tuple[Any, Any], form: int) -> None:
    path: Path = (files[0].path, files[1].file.path)[form]
    runtime, images = fd.open_runtime(path), np.zeros((1, 3, 8, 8), np.float32)
    every = runtime(images)
    assert isinstance(every, dict)
    with pytest.warns(UserWarning, match=f"has 2 outputs .*{next(iter(every))}. All of them.*runtime"):
        first = runtime.infer(images)
    np.testing.assert_array_equal(first, next(iter(every.values())))
