"""The precision that a checkpoint is calibrated for, and says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy.models import ModelCard, build_unet, read_card, save_checkpoint
from fp4deploy.ptq import checkpoint as module
from fp4deploy.ptq.forward import deployed_rest
from fp4deploy.rest import BF16, FP16, FP32


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path, rgb = tmp_path / "fp16.safetensors", ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    save_checkpoint(path, build_unet(3, 0.125), ModelCard("fp16", 0.125, ("a", "b", "c"), 32, 32, *rgb, False))
    return path


@pytest.mark.parametrize(("asked", "expected"), [(None, FP16), ("bf16", BF16), ("fp32", FP32)])
def test_calibrated_for(source: Path, asked: str | None, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, quantize = [], module.quantize

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(deployed_rest())
        return quantize(*arguments, **options)

    monkeypatch.setattr(module, "quantize", watched)
    out = source.with_name("nvfp4.safetensors")
    module.quantize_checkpoint(source, [torch.randn(1, 3, 32, 32)], out, "amax", rest=asked)
    assert seen == [expected]
    assert deployed_rest() is FP16
    assert read_card(out).rest == expected.name
    again = source.with_name("again.safetensors")
    save_checkpoint(source, build_unet(3, 0.125), replace(read_card(source), rest=expected.name))
    module.quantize_checkpoint(source, [torch.randn(1, 3, 32, 32)], again, "amax")
    assert read_card(again).rest == expected.name


def test_what_was_chosen_is_in_the_card(source: Path) -> None:
    out = source.with_name("nvfp4.safetensors")
    chosen: dict[str, Any] = {"include": "encoder.*", "exclude": ("*.0",), "fp8": "*.1", "int8": ()}
    module.quantize_checkpoint(source, [torch.randn(1, 3, 32, 32)], out, "amax", target="rtx sm120", **chosen)
    patterns: dict[str, Any] = {
        "include": ("encoder.*",),
        "exclude": ("*.0",),
        "formats": {"fp8": ("*.1",), "int8": ()},
    }
    expected = replace(read_card(source), precision="nvfp4", recipe="nvfp4_qat", target="rtx sm120", **patterns)
    assert read_card(out) == expected


@pytest.mark.parametrize("percentile", [50.0, 99.0, 100.0])
def test_a_percentile_is_the_one_that_was_asked_for(percentile: float) -> None:
    x = torch.randn(64, 32)
    for chosen in ({"method": "percentile"}, {"method": "amax", "activations": "percentile"}):
        model: Any = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
        module.quantize(model, x, include=["0"], percentile=percentile, correction="none", **chosen)
        assert float(model[0].input_amax) == pytest.approx(float(x.abs().flatten().quantile(percentile / 100)))


def test_autocast_of_a_gpu_alone() -> None:
    assert not BF16.autocast("cpu")._enabled
    assert not FP32.autocast("cuda")._enabled
