"""The sections of the configuration: every key, its default and its valid values.

`Config` (train/config.py) puts them together. The defaults train the demo; augmentation beyond the basics, quantiser
options, distillation and damping are off until they are asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fp4deploy.errors import Fp4DeployError
from fp4deploy.models.card import MOST_PIXELS
from fp4deploy.models.heads import MOST_DETECTIONS, MOST_MASKS, MOST_NMS, require_odd
from fp4deploy.models.spec import UNET, parse_spec
from fp4deploy.models.unet import channel_widths


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """spec: the network (`models.spec`), args: its arguments; output: its logits, where it has several outputs.

    init: file with initial weights (`models.initial`). Of the UNet: scale: channels int(scale * {64, ..., 1024});
    digits: the image is read as digits, which keeps a first layer in FP4 from losing the image
    (`models.input_encoding`): for quant.include: ["*"].
    """

    spec: str = UNET
    args: dict[str, Any] = Field(default_factory=dict)
    output: str | None = None
    init: str | None = None
    scale: float = Field(0.25, le=4)
    digits: bool = False

    @model_validator(mode="before")
    @classmethod
    def _scale_of_the_spec(cls, values: Any) -> Any:
        """unet:0.5 is the spec unet and the scale 0.5."""
        if not isinstance(values, dict) or not isinstance(values.get("spec"), str):
            return values
        spec = checked(values["spec"], parse_spec)
        own = {} if spec.scale is None else {"scale": spec.scale}
        return {**values, **own, "spec": spec.text}

    @field_validator("output", mode="before")
    @classmethod
    def _is_a_name(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("scale")
    @classmethod
    def _has_whole_groups(cls, value: float) -> float:
        checked(value, channel_widths)
        return value


class DataSection(Section):
    """root: dataset folder; classes: the classes to learn (None: all); height, width: model input in pixels.

    workers: loader processes (None: 0 on a CPU, up to 12 with a GPU); cache_gib: a set that needs no more memory than
    this when decoded is decoded once.
    """

    root: str | None = None
    classes: list[str] | None = None
    height: int = Field(96, gt=0, le=MOST_PIXELS)
    width: int = Field(96, gt=0, le=MOST_PIXELS)
    workers: int | None = Field(None, ge=0, le=1024)
    cache_gib: float = Field(1.0, ge=0, le=1e6)


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

    epochs: int = Field(14, ge=1, le=1_000_000)
    finetune_epochs: int = Field(4, ge=1, le=1_000_000)
    batch_size: int = Field(8, ge=1, le=65_536)
    accumulate: int = Field(1, ge=1, le=65_536)
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
    calibration: int = Field(4, ge=1, le=1_000_000)
    evaluate_every: int = Field(1, ge=1, le=1_000_000)
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
    """every: optimiser steps between two samples of every layer (0: none); trackers: where they are written.

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
    max_detections: int = Field(100, ge=1, le=MOST_DETECTIONS)
    heatmap: float = Field(1.0, ge=0)
    offset: float = Field(1.0, ge=0)
    sigma: float = Field(0.15, gt=0)
    nms: int = Field(5, ge=3, le=MOST_NMS)
    threshold: float = Field(0.1, ge=0, lt=1)
    channels: int = Field(20, ge=1, le=MOST_MASKS)
    mask_bce: float = Field(5.0, ge=0)
    mask_dice: float = Field(2.0, ge=0)
    empty: float = Field(0.5, ge=0)

    @field_validator("nms")
    @classmethod
    def _is_odd(cls, value: int) -> int:
        return require_odd(value)


class AugmentSection(Section):
    """Geometry in addition to `train.zoom`, and colour in addition to `train.jitter`.

    flip: share of the images mirrored left to right; rotate: largest angle in degrees, corners become void; aspect:
    largest factor between the two sides' zooms; hue: largest rotation of the hue, as a share of the full circle.
    """

    flip: float = Field(0.5, ge=0, le=1)
    rotate: float = Field(0.0, ge=0, le=90)
    aspect: float = Field(1.0, ge=1, le=4)
    hue: float = Field(0.0, ge=0, le=0.5)


class QuantSection(Section):
    """What is quantised in addition to the recipe, and how its training is stabilised; for nvfp4 and nvfp4_ptq.

    include, exclude: glob patterns of layer names. By default the first and the last product stay in FP16;
    include: ["*"] quantises them too. percentile: of the magnitudes that calibration sees, 100 for the largest.
    clip_lr: learning rate of a learned amax (recipe "...+learned") over that of the weights; clip_decay: its weight
    decay. damping: weight of the dampening loss, the distance of every weight to its quantised value;
    damping_start: share of the training after which it begins, rising linearly to its weight at the end.
    """

    include: list[str] | None = None
    exclude: list[str] | None = None
    percentile: float = Field(100.0, gt=0, le=100)
    clip_lr: float = Field(10.0, gt=0)
    clip_decay: float = Field(0.1, ge=0)
    damping: float = Field(0.0, ge=0)
    damping_start: float = Field(0.5, ge=0, lt=1)


class DistillSection(Section):
    """Distillation from the FP16 checkpoint; for nvfp4 and, so that the comparison is fair, for fp16_control.

    weight: of the divergence between the two softmaxes, 0 for none; task: of the loss against the labels;
    temperature: both softmaxes are taken at logits / temperature; teacher: a checkpoint other than the one that
    fine-tuning starts from; control: whether fp16_control is distilled as well.
    """

    weight: float = Field(0.0, ge=0)
    task: float = Field(1.0, ge=0)
    temperature: float = Field(1.0, gt=0)
    teacher: str | None = None
    control: bool = True


def checked(value: Any, check: Any) -> Any:
    try:
        return check(value)
    except Fp4DeployError as error:
        raise ValueError(str(error)) from error
