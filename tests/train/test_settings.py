"""Every key of the configuration changes what a training gives, or is said here to change nothing, and then does not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import generate_shapes
from fp4deploy.models import name_model, read_card
from fp4deploy.runs import create_run
from fp4deploy.train import Config, load_config, train_models
from tests.samples import sample
from tests.train.small_network import NORMED

BASE = {"data.height": 16, "data.width": 24, "train.batch_size": 2, "train.epochs": 1, "train.finetune_epochs": 1,
        "train.calibration": 1, "telemetry.every": 0}  # fmt: skip
SECTIONS = {
    name: field.annotation for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
}
KEYS = [name for name in Config.model_fields if name not in SECTIONS]
KEYS += [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]  # type: ignore[union-attr]
NO_EFFECT = (
    "data.workers", "data.cache_gib", "train.save_minutes", "train.spike", "train.checkpointing", "train.cuda_graph",
    "train.recompute", "telemetry.every", "telemetry.trackers", "telemetry.plots", "telemetry.project",
    "telemetry.wandb_mode", "train.fused", "distill.control",
)  # fmt: skip
ELSEWHERE = {  # what other tests show: another network, another kind of data, another machine
    "task", "data.root", "data.depth", "data.spacing", "model.init", "model.output", "model.args", "model.digits",
    "train.compile", "train.channels_last", "train.products", "augment.foreground", "train.init_checkpoint", "quant.target", "data.classes",
    "distill.teacher", "quant.fp16_macs", "quant.fp8_macs", "quant.fp4_macs", "model.spec", "model.scale", "train.from_scratch", "quant.include", "quant.exclude",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "recipe": "nvfp4_4o6_qat", "train.warmup": 0.6, "train.clip": 0.01, "train.zoom": [0.3, 0.4], "train.precision": "bf16",
    "train.class_weights": {"circle": 9}, "train.class_balance": "median_frequency", "quant.fp8": ["*"], "quant.int8": ["*"],
    "quant.w4a8": ["*"],
    "quant.percentile": 60.0, "augment.aspect": 4.0, "instance.stuff": ["circle"], "instance.nms": 9, "train.evaluate_every": 2,
    "detection.nms": 0.01, "detection.threshold": 0.0, "instance.threshold": 0.0, "detection.max_detections": 1, "train.ema": 0.9, "train.tversky": [0.2, 0.8],
    "instance.method": "set", "telemetry.trackers": [], "data.workers": 1, "train.recompute": False, "telemetry.project": "x",
    "augment.flip": 1.0, "detection.width": 24, "detection.depth": 1, "telemetry.every": 1,
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {  # what a key needs
    "train.balance_power": {"train.class_balance": "median_frequency"}, "distill.temperature": {"distill.weight": 1},
    "distill.task": {"distill.weight": 1}, "quant.damping_start": {"quant.damping": 5}, "quant.clip_lr": {"recipe": "nvfp4_qat+learned"},
    "quant.clip_decay": {"recipe": "nvfp4_qat+learned"}, "augment.rotate": {}, "instance.channels": {"instance.method": "set"},
    "instance.mask_bce": {"instance.method": "set"}, "instance.mask_dice": {"instance.method": "set"}, "instance.empty": {"instance.method": "set"},
}  # fmt: skip
BESIDE |= {
    "train.evaluate_every": {"train.epochs": 2}, "quant.damping_start": {"quant.damping": 5, "train.finetune_epochs": 2},
    "train.warmup": {"train.epochs": 3}, "train.upside_down": {"train.epochs": 3}, "quant.damping": {"train.finetune_epochs": 3},
    "train.calibration": {"train.batch_size": 1, "seed": 3}, "quant.equalize": {"quant.include": ["*"]}, "quant.start": {"train.finetune_epochs": 2}, "train.ema": {"train.epochs": 2},
}  # fmt: skip
DETECTOR = {
    "task": "detection",
    "model.spec": "unet",
    "model.scale": 0.125,
    "data.height": 32,
    "data.width": 64,
    "detection.width": 16,
}
CALIBRATED = ("train.calibration", "quant.percentile", "quant.equalize")  # of what no training moves afterwards
OF_THE_MACHINE = ("seconds", "images_per_s", "peak_memory_bytes", "kernels")
TUNED = ("recipe", "train.finetune_epochs", "train.finetune_lr", "train.calibration")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name_model(NORMED)
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=4, val=2, size=32, seed=0)
    return folder


def another(key: str) -> Any:
    """A valid value other than the default."""
    if key in VALUES:
        return VALUES[key]
    section, _, name = key.rpartition(".")
    field = (SECTIONS[section] if section else Config).model_fields[name]  # type: ignore[union-attr]
    value = field.default
    if isinstance(value, bool):
        return not value
    if get_origin(field.annotation) is Literal:
        return next(each for each in get_args(field.annotation) if each != value)
    if isinstance(value, int):
        return value + 1
    return 0.4 if value == 0 else value / 2


def trained(settings: dict[str, Any], model: str, out: Path, data: Path) -> Any:
    """What a training leaves, without times: scores, losses, the card, and the weights."""
    torch.manual_seed(0)
    run = create_run(out)
    every = {"data.root": str(data), "model.spec": NORMED, **BASE, **settings}
    train_models(load_config(None, [f"{key}={json.dumps(value)}" for key, value in every.items()]), run, (model,))
    lines = (run.model_dir(model) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [{key: value for key, value in json.loads(line).items() if key not in OF_THE_MACHINE} for line in lines]
    weights = load_file(run.checkpoint(model))
    return (
        kept,
        read_card(run.checkpoint(model)),
        {name: value for name, value in weights.items() if value.is_floating_point()},
    )


def alike(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two trainings are the same, numbers within a tolerance."""
    if isinstance(one, dict | list | tuple):
        if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
            return False
        pairs = [(one[key], other[key]) for key in one] if isinstance(one, dict) else zip(one, other, strict=True)
        return all(alike(*pair, tolerance) for pair in pairs)
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance / 100)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * abs(one)
    return bool(one == other)


@pytest.fixture(scope="module")
def before(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The training of a key's companions alone, made once."""

    @cache
    def of(text: str, model: str) -> Any:
        folder = tmp_path_factory.mktemp("before")
        return trained(json.loads(text), model, folder / "run", data)

    return of


@pytest.fixture(scope="module")
def start(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("start") / "run"
    trained({}, "fp16", out, data)
    return out / "fp16" / "best.safetensors"


@pytest.mark.parametrize("key", sample((key for key in KEYS if key not in ELSEWHERE), every=2))
def test_every_key_counts(key: str, data: Path, start: Path, before: Any, tmp_path: Path) -> None:
    section = key.partition(".")[0]
    tuned = key in TUNED or section in ("quant", "distill")
    model = "nvfp4_ptq" if key in CALIBRATED else "nvfp4" if tuned else "fp16"
    beside = {"task": "instance"} if section == "instance" else {}
    beside |= DETECTOR if section == "detection" or key == "augment.mosaic" else {}
    beside |= BESIDE.get(key, {}) | ({"train.init_checkpoint": str(start)} if tuned else {})
    changed = trained({**beside, key: another(key)}, model, tmp_path / "run", data)
    expected = key in NO_EFFECT
    assert alike(before(json.dumps(beside, sort_keys=True), model), changed, 1e-2 if expected else 0.0) == expected
