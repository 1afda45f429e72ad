"""The configuration: defaults, a YAML file, and `--set section.key=value`, in that order, later ones winning.

The defaults train the demo: generated shapes, a UNet of scale 0.25, minutes on two CPU cores. Everything that can be
wrong with a configuration is reported at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.models.unet import STRIDE, channel_widths
from fp4deploy.qat import find_recipe
from fp4deploy.runs import atomic_write
from fp4deploy.train.options import AugmentSection, DistillSection, QuantSection, Section


class ModelSection(Section):
    """scale: width of the UNet, channels int(scale * {64, ..., 1024}); digits: the image is read as digits.

    Digits keep a first layer in FP4 from losing the image (`models.digits`): for quant.include: ["*"].
    """

    scale: float = 0.25
    digits: bool = False

    @field_validator("scale")
    @classmethod
    def _has_whole_groups(cls, value: float) -> float:
        return _checked(value, channel_widths)


class DataSection(Section):
    """root: dataset folder; classes: the classes to learn (None: all); height, width: model input in pixels.

    workers: loader processes (None: 0 on a CPU, up to 12 beside a GPU); cache_gib: a set that needs no more memory than
    this when decoded is decoded once.
    """

    root: str | None = None
    classes: list[str] | None = None
    height: int = Field(96, gt=0, multiple_of=STRIDE)
    width: int = Field(96, gt=0, multiple_of=STRIDE)
    workers: int | None = Field(None, ge=0)
    cache_gib: float = Field(1.0, ge=0)


class TrainSection(Section):
    """How long and how fast; the fine-tuning values serve nvfp4 and fp16_control.

    accumulate: batches a step; warmup: share of the steps with a rising learning rate; clip: largest gradient norm;
    dice, cross_entropy: weights of the two losses; class_weights: class name -> weight, others weigh 1; zoom: range of
    the random scale; jitter: strength of the colour augmentation; upside_down: flip top and bottom, too; calibration:
    batches that set the first activation scales; evaluate_every: epochs between validations; save_minutes: longest time
    between two resume states, which matters where an epoch takes longer.

    ema: decay of the average of the weights that is evaluated and kept, 0 for the weights themselves; label_smoothing:
    share of the cross-entropy that all classes have; class_balance: weights of the cross-entropy from the training
    masks, raised to balance_power (`data.balance`); spike: a loss this many times the running mean is reported;
    checkpointing: blocks are computed again in the backward pass, for less memory (not on the fused path).
    """

    epochs: int = Field(14, ge=1)
    finetune_epochs: int = Field(4, ge=1)
    batch_size: int = Field(8, ge=1)
    accumulate: int = Field(1, ge=1)
    lr: float = Field(2e-3, gt=0)
    finetune_lr: float = Field(5e-4, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    warmup: float = Field(0.05, ge=0, lt=1)
    clip: float = Field(1.0, gt=0)
    dice: float = Field(1.0, ge=0)
    cross_entropy: float = Field(1.0, ge=0)
    class_weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    zoom: tuple[float, float] = (0.85, 1.4)
    jitter: float = Field(0.3, ge=0, lt=1)
    upside_down: bool = False
    calibration: int = Field(4, ge=1)
    evaluate_every: int = Field(1, ge=1)
    save_minutes: float = Field(10.0, gt=0)
    channels_last: bool = False
    compile: bool = False
    fused: bool = True
    ema: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    class_balance: Literal["median_frequency", "effective_number"] | None = None
    balance_power: float = Field(1.0, gt=0, le=1)
    spike: float = Field(4.0, gt=1)
    checkpointing: bool = False
    from_scratch: bool = False
    init_checkpoint: str | None = None

    @field_validator("zoom")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("give the smaller zoom first, both above 0, such as [0.75, 1.75]")
        return value


class TelemetrySection(Section):
    """every: optimiser steps between two looks at every layer (0: none); trackers: where what is seen goes.

    plots: heatmaps at the end of a training; project, wandb_mode: of Weights & Biases.
    """

    every: int = Field(200, ge=0)
    trackers: list[Literal["jsonl", "tensorboard", "wandb"]] = Field(["jsonl"])
    plots: bool = True
    project: str = "fp4deploy"
    wandb_mode: Literal["offline", "online"] = "offline"


class InstanceSection(Section):
    """Instance segmentation only (`task: instance`).

    method: "centres" (any number of objects) or "set" (at most `channels`); stuff: classes that are not counted;
    max_detections: most objects of an image, and COCO's maxDets. Centres: weights of the losses `heatmap` and `offset`;
    sigma: width of a peak in square roots of the object's area; nms: odd window in pixels with one centre at most;
    threshold: smallest centre score. Set: weights of the losses `mask_bce` and `mask_dice`, and `empty` of channels
    without an object.
    """

    method: Literal["centres", "set"] = "centres"
    stuff: list[str] = Field([])
    max_detections: int = Field(100, ge=1)
    heatmap: float = Field(1.0, ge=0)
    offset: float = Field(1.0, ge=0)
    sigma: float = Field(0.15, gt=0)
    nms: int = Field(5, ge=3)
    threshold: float = Field(0.1, ge=0, lt=1)
    channels: int = Field(20, ge=1)
    mask_bce: float = Field(5.0, ge=0)
    mask_dice: float = Field(2.0, ge=0)
    empty: float = Field(0.5, ge=0)

    @field_validator("nms")
    @classmethod
    def _is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("a window around a pixel has an odd side, such as 5")
        return value


class Config(Section):
    """A whole training; `seed` fixes initial weights, shuffling and augmentation."""

    seed: int = Field(0, ge=0)
    task: Literal["semantic", "instance"] = "semantic"
    recipe: str = "nvfp4_qat"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    augment: AugmentSection = AugmentSection()
    quant: QuantSection = QuantSection()
    distill: DistillSection = DistillSection()
    telemetry: TelemetrySection = TelemetrySection()
    instance: InstanceSection = InstanceSection()

    @model_validator(mode="after")
    def _can_be_distilled(self) -> Config:
        if self.task == "instance" and self.distill.weight:
            raise ValueError(
                f"distill.weight = {self.distill.weight:g}: distillation compares the softmax over classes, and the "
                "outputs of an instance model are not all of classes; leave it 0, or train with task=semantic"
            )
        return self

    @field_validator("recipe")
    @classmethod
    def _exists(cls, value: str) -> str:
        return _checked(value, find_recipe)


def load_config(file: Path | None = None, sets: Sequence[str] = ()) -> Config:
    """Read a YAML file over the defaults, then apply settings such as "train.lr=0.001".

    Raises:
        InputError: the file is missing or not YAML, or listing every unknown or invalid setting.
    """
    tree = _read(Path(file)) if file is not None else {}
    return _validate(tree, sets, str(file) if file is not None else "The configuration")


def with_settings(config: Config, sets: Sequence[str]) -> Config:
    """A copy of `config` with settings applied."""
    return _validate(config.model_dump(mode="json"), sets, "The configuration")


def save_config(config: Config, path: Path) -> None:
    """Write `config` as YAML; `load_config` reads the same configuration back."""
    with atomic_write(path) as temporary:
        temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def changed_settings(old: Config, new: Config) -> list[str]:
    """Settings that differ and would change what a resumed training computes, as "key: old -> new"."""
    harmless = {"data.workers", "data.cache_gib", "data.root", "train.save_minutes"}
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = list(dict.fromkeys([*before, *after]))  # the names in class_weights may differ
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in keys
        if before.get(key) != after.get(key) and key not in harmless and not key.startswith("telemetry.")
    ]


def _checked(value: Any, check: Any) -> Any:
    try:
        check(value)
    except Fp4DeployError as error:
        raise ValueError(str(error)) from error
    return value


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"There is no configuration file {file}.")
    try:
        tree = yaml.safe_load(file.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{file} holds no settings: it must be a mapping such as 'train: {{epochs: 20}}'.")
    sections = {name for name, field in Config.model_fields.items() if isinstance(field.default, Section)}
    return {key: {} if value is None and key in sections else value for key, value in tree.items()}


def _apply(tree: dict[str, Any], setting: str) -> None:
    """Put one setting into the tree; raises ValueError where it has no place there."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ValueError(f"--set takes section.key=value, such as train.epochs=20, not '{setting}'")
    *sections, last = key.strip().split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ValueError(f"'{section}' in --set {setting} is not a section")
    try:
        tree[last] = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        tree[last] = text
    if isinstance(tree[last], str) and _is_number(tree[last]):  # YAML 1.1 reads 1e-3 as text
        tree[last] = float(tree[last])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _validate(tree: dict[str, Any], sets: Sequence[str], source: str) -> Config:
    problems = []
    for setting in sets:
        try:
            _apply(tree, setting)
        except ValueError as error:
            problems.append(str(error))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(entry) for entry in error.errors()]
    if problems:
        raise InputError(f"{source} is not valid: {'; '.join(problems)}.")
    return config


def _problem(entry: Any) -> str:
    path = [str(part) for part in entry["loc"]]
    key = ".".join(path)
    if entry["type"] == "extra_forbidden":
        valid = _settings()
        near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
        if near:
            return f"unknown setting {key}, did you mean {near[0]}?"
        return f"unknown setting {key}, valid are {', '.join(valid)}"
    if entry["type"] == "model_type":
        return f"{key} is a section; set one of {', '.join(name for name in _settings() if name.startswith(key))}"
    message = entry["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[0].lower() + message[1:]
    return f"{key} = {entry['input']}: {message}" if key else message


def _settings() -> list[str]:
    return list(_flat(Config().model_dump(mode="json")))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
