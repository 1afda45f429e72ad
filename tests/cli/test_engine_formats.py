"""`--for rtx`: layers in the precision that check forecasts, in settings, checkpoints and pages."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp4deploy.errors import InputError
from fp4deploy.models import read_card
from fp4deploy.report import html
from fp4deploy.train import load_config
from fp4deploy.train.models import model_card, open_splits
from tests.cli.command_line import PACKAGE, Invoke

formats: Any = importlib.import_module(f"{PACKAGE}.commands.stages.engine_formats")


def layers(invoke: Invoke, model: object) -> list[dict[str, str]]:
    result = invoke("check", model, "--json")
    assert result.exit_code == 0, result.stderr
    return [layer for layer in json.loads(result.stdout)["layers"] if layer["precision"] != "FP16"]


@pytest.mark.usefixtures("whole_unets")
def test_a_training_has_the_layers_that_check_forecasts(invoke: Invoke, shapes: Path) -> None:
    small = ["model.scale=0.125", "data.height=32", "data.width=32", f"data.root={shapes}"]
    config = formats.with_formats(load_config(None, small), "rtx sm120")
    forecast = [layer["name"] for layer in layers(invoke, "unet:0.125") if layer["engine"] == "FP8"]
    assert config.quant.fp8 == forecast
    assert (len(forecast), config.quant.target) == (17, "rtx sm120")
    assert formats.with_formats(config, "rtx sm120") is formats.with_formats(config, None) is config  # as --resume does
    data, _ = open_splits(config)
    assert [model_card(config, model, data).target for model in ("fp16", "nvfp4")] == [None, "rtx sm120"]
    with pytest.raises(InputError, match="begun for rtx sm120"):
        formats.with_formats(config, "rtx sm121")
    with pytest.raises(InputError, match=r"quant\.fp8 names some too"):
        formats.with_formats(load_config(None, [*small, "quant.fp8=[up.0]"]), "rtx sm120")
    in_bf16 = formats.with_formats(load_config(None, [*small, "train.precision=bf16"]), "rtx sm120")
    assert in_bf16.quant.fp8 == []  # convolutions stay FP4 there, as the engine keeps their numbers


def test_quantize_writes_what_the_engine_multiplies(invoke: Invoke, checkpoint: Path, shapes: Path) -> None:
    few = ("--data", shapes, "--images", 1, "--compare", 0, "--method", "amax", "--correction", "none")
    result = invoke("quantize", checkpoint, *few, "--for", "rtx", "--out", "q.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "For rtx sm120, --conv auto: 9 layers in FP8, 2 in NVFP4." in result.stderr
    assert read_card(Path("q.safetensors")).target == "rtx sm120"
    found = layers(invoke, "q.safetensors")
    assert {layer["precision"] for layer in found} == {"FP4", "FP8"}
    assert all(layer["precision"] == layer["engine"] for layer in found)
    result = invoke("quantize", checkpoint, *few, "--for", "rtx", "--fp8", "up.0")
    assert (result.exit_code, "--for chooses the layers in FP8" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--for", "rtx", "--arch", "sm89"),
            "multiplies no FP4 on sm89. Valid --arch values of --for rtx: sm120, sm121",
        ),
        (("--for", "rtx", "--arch", "sm100"), "--arch sm100 is unknown to TensorRT-RTX"),
        (("--arch", "sm120"), "Give both: --for rtx --arch sm120"),
    ],
)
def test_an_engine_without_fp4_is_refused(invoke: Invoke, options: tuple[str, ...], said: str) -> None:
    result = invoke("train", *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not Path("runs").exists()


def test_the_page_names_what_was_trained_for() -> None:
    model = {"scale": 0.25, "digits": False, "architecture": "unet", "width": 32, "height": 16}
    models = {name: SimpleNamespace(**model, target=target) for name, target in (("a", None), ("b", "rtx sm120"))}
    report: Any = SimpleNamespace(models=models)
    assert "32 x 16 pixels · trained for rtx sm120 · " in html._network(report)
