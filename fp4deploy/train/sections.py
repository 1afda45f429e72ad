"""The sections of the configuration: every key, its default and its valid values.

`Config` (train/config.py) puts them together. The defaults train the demo; augmentation beyond the basics, quantiser
options, distillation and damping are off until they are asked for.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from fp4deploy.errors import Fp4DeployError
from fp4deploy.models.boxes import MAX_DEPTH, MAX_WIDTH
from fp4deploy.models.detector import GROUPS
from fp4deploy.models.heads import MAX_DETECTIONS, MAX_MASKS, MAX_NMS, require_odd
from fp4deploy.models.spec import UNET, parse_spec
from fp4deploy.models.unet import channel_widths
from fp4deploy.models.volumes import MAX_PIXELS, Size
from fp4deploy.precisions import LAYER_FORMATS, shares_by_error


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The network and where its weights begin."""

    spec: str = Field(
        UNET,
        description="unet, smp:Unet/resnet34, torchvision:NAME, timm:NAME, monai:NAME, or your own as FILE.py:factory",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the network's constructor")
    output: str | None = Field(None, description="name or index of the logits, where the network has several outputs")
    init: str | None = Field(None, description="file with initial weights: .safetensors, or .pth of tensors")
    scale: float = Field(0.25, le=4, description="channels of the UNet are int(scale * {64, 128, 256, 512, 1024})")
    digits: bool = Field(
        False,
        description="encode the image as several FP4 terms, for a first layer in FP4: quant.include ['*']",
    )

    @model_validator(mode="before")
    @classmethod
    def _scale_of_the_spec(cls, values: object) -> object:
        """unet:0.5 is the spec unet and the scale 0.5."""
        if not isinstance(values, dict) or not isinstance(values.get("spec"), str):
            return values
        spec = checked(values["spec"], parse_spec)
        own = {} if spec.scale is None else {"scale": spec.scale}
        return {**values, **own, "spec": spec.text}

    @field_validator("output", mode="before")
    @classmethod
    def _is_a_name(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("scale")
    @classmethod
    def _has_whole_groups(cls, value: float) -> float:
        checked(value, channel_widths)
        return value


class DataSection(Section):
    """What is learned, and at which size."""

    root: str | None = Field(None, description="dataset folder")
    classes: list[str] | None = Field(None, description="classes to learn; none: all")
    height: int = Field(96, gt=0, le=MAX_PIXELS, description="model input in pixels")
    width: int = Field(96, gt=0, le=MAX_PIXELS, description="model input in pixels")
    depth: int | None = Field(
        None, gt=0, le=MAX_PIXELS, description="volumes: slices of the model input; none: input sized by the set"
    )
    spacing: tuple[float, float, float] | None = Field(
        None, description="volumes: mm between slices, rows and columns of the model input; none: by the set"
    )
    repeat: int = Field(
        1, ge=1, le=1_000_000, description="times that an epoch has each training image, with other augmentation"
    )
    workers: int | None = Field(
        None, ge=0, le=1024, description="processes that load images; none: 0 on a CPU, up to 12 with a GPU"
    )
    cache_gib: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="a dataset that needs no more memory than this when decoded is decoded once, in GiB",
    )

    @property
    def size(self) -> Size:
        """The spatial axes of the model input."""
        return (self.height, self.width) if self.depth is None else (self.depth, self.height, self.width)

    @field_validator("spacing")
    @classmethod
    def _is_a_spacing(cls, value: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
        if value is not None and not all(1e-4 < step < 1e4 for step in value):
            raise ValueError("give three spacings in mm, all above 0, such as [3.0, 1.0, 1.0]")
        return value


class TrainSection(Section):
    """How long and how fast; the fine-tuning values serve nvfp4 and fp16_control."""

    epochs: int = Field(14, ge=1, le=1_000_000, description="epochs of fp16, and of others trained from random weights")
    finetune_epochs: int = Field(4, ge=1, le=1_000_000, description="epochs of nvfp4 and fp16_control")
    batch_size: int = Field(8, ge=1, le=65_536, description="images a batch, of each process")
    accumulate: int = Field(1, ge=1, le=65_536, description="batches a step")
    lr: float = Field(2e-3, gt=0, le=1e3, description="largest learning rate; of torchvision's detectors 2e-4")
    finetune_lr: float = Field(
        5e-4, gt=0, le=1e3, description="largest learning rate of fine-tuning; of torchvision's detectors 5e-5"
    )
    optimizer: Literal["adamw", "adamax"] = Field("adamw", description="torch.optim.AdamW or torch.optim.Adamax")
    weight_decay: float = Field(1e-4, ge=0, description="of the optimizer; of adamax an L2 penalty")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps with a rising learning rate")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    dice: float = Field(1.0, ge=0, description="weight of the Dice loss")
    tversky: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        (0.5, 0.5), description="weights of false positives and false negatives in the Dice loss; [0.5, 0.5] is Dice"
    )
    cross_entropy: float = Field(1.0, ge=0, description="weight of the cross-entropy")
    class_weights: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None, description="class name: its weight in cross-entropy and Dice loss; other classes weigh 1"
    )
    zoom: tuple[float, float] = Field((0.85, 1.4), description="range of the random scale")
    jitter: float = Field(0.3, ge=0, lt=1, description="strength of the colour augmentation")
    upside_down: bool = Field(False, description="flip top and bottom as well")
    calibration: int = Field(4, ge=1, le=1_000_000, description="batches that set the first activation scales")
    evaluate_every: int = Field(1, ge=1, le=1_000_000, description="epochs between validations")
    auprc: bool = Field(
        False,
        description="validations also measure the mean area under the precision-recall curves of the classes but the "
        "background, over all pixels: at least 12 bytes of memory for each pixel and class",
    )
    save_minutes: float = Field(
        10.0, gt=0, description="longest time between two resume states; matters where an epoch takes longer"
    )
    precision: Literal["auto", "fp16", "bf16", "fp32"] = Field(
        "auto",
        description="autocast; auto: that of the checkpoint which fine-tuning starts from, without one fp16, and fp32 "
        "on a CPU; bf16: of the range of fp32, the models are also deployed in it",
    )
    channels_last: bool = Field(False, description="NHWC memory format")
    compile: bool = Field(False, description="torch.compile the network")
    fused: bool | Literal["auto"] = Field(
        True, description="use the fused kernels where they apply; auto: also torch.compile other quantised networks"
    )
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of the averaged weights that are evaluated and kept; 0: the weights themselves",
    )
    norm_batches: int = Field(
        0,
        ge=0,
        le=65_536,
        description="training batches on which batch norms measure their statistics again before a validation; "
        "0: those that training tracks",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the cross-entropy that all classes have")
    class_balance: Literal["median_frequency", "effective_number"] | None = Field(
        None, description="weights of the cross-entropy from the training masks"
    )
    balance_power: float = Field(1.0, gt=0, le=1, description="power of these weights")
    spike: float = Field(4.0, gt=1, description="a loss this many times the running mean is reported")
    checkpointing: bool = Field(
        False, description="compute blocks again in the backward pass, for less memory; not on the fused path"
    )
    recompute: bool | Literal["auto"] = Field(
        "auto",
        description="on the fused path, keep few 16-bit inputs of convolutions for the backward: less memory, "
        "a longer step, numbers as exact; auto: FP4 codes of a quarter of them where torch.compile fuses",
    )
    cuda_graph: bool = Field(True, description="replay the whole step as one CUDA graph where possible")
    products: Literal["emulated", "fp4"] = Field(
        "emulated",
        description="fp4: forward, dgrad and wgrad multiply packed FP4; for recipes that quantise gradients",
    )
    from_scratch: bool = Field(False, description="do not start nvfp4 from the fp16 checkpoint")
    init_checkpoint: str | None = Field(None, description="checkpoint that fine-tuning starts from")

    @field_validator("zoom")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("give the smaller zoom first, both above 0, such as [0.75, 1.75]")
        return value


class TelemetrySection(Section):
    """Statistics of every layer during the training."""

    every: int = Field(200, ge=0, description="optimiser steps between two samples; 0: none")
    trackers: list[Literal["jsonl", "tensorboard", "wandb", "mlflow"]] = Field(
        ["jsonl"], description="where they are written"
    )
    plots: bool = Field(True, description="draw heatmaps at the end")
    project: str = Field("fp4deploy", description="project of Weights & Biases, experiment of MLflow")
    wandb_mode: Literal["offline", "online"] = Field("offline", description="of Weights & Biases")


class InstanceSection(Section):
    """Instance segmentation only (`task: instance`): objects by their centres, or by a fixed set of masks."""

    method: Literal["centres", "set"] = Field(
        "centres", description="centres: any number of objects; set: at most `channels`"
    )
    stuff: list[str] = Field([], description="classes that are not counted")
    max_detections: int = Field(
        100, ge=1, le=MAX_DETECTIONS, description="most objects of an image, and COCO's maxDets"
    )
    heatmap: float = Field(1.0, ge=0, description="centres: weight of the loss of the heatmap")
    offset: float = Field(1.0, ge=0, description="centres: weight of the loss of the offsets")
    sigma: float = Field(0.15, gt=0, description="centres: width of a peak in square roots of the object's area")
    nms: int = Field(5, ge=3, le=MAX_NMS, description="centres: odd window in pixels with one centre at most")
    threshold: float = Field(0.1, ge=0, lt=1, description="centres: smallest score")
    channels: int = Field(20, ge=1, le=MAX_MASKS, description="set: number of masks")
    mask_bce: float = Field(5.0, ge=0, description="set: weight of the binary cross-entropy")
    mask_dice: float = Field(2.0, ge=0, description="set: weight of the Dice loss")
    empty: float = Field(0.5, ge=0, description="set: weight of channels without an object")

    @field_validator("nms")
    @classmethod
    def _is_odd(cls, value: int) -> int:
        return require_odd(value)


class DetectionSection(Section):
    """Object detection only (`task: detection`)."""

    width: int = Field(128, ge=16, le=MAX_WIDTH, description="channels of the towers of the head")
    depth: int = Field(2, ge=1, le=MAX_DEPTH, description="convolutions of each tower")
    max_detections: int = Field(100, ge=1, le=MAX_DETECTIONS, description="most boxes of an image, and COCO's maxDets")
    threshold: float = Field(0.05, ge=0, lt=1, description="smallest score of a box")
    nms: float = Field(0.6, gt=0, le=1, description="IoU above which the box with the lower score is left out")
    class_loss: float = Field(1.0, ge=0, description="weight of the focal loss")
    box_loss: float = Field(1.0, ge=0, description="weight of the GIoU loss")
    centre_loss: float = Field(1.0, ge=0, description="weight of the loss of centre-ness")
    alpha: float = Field(0.25, ge=0, le=1, description="weight of objects in the focal loss")
    gamma: float = Field(2.0, ge=0, description="exponent of the focal loss")

    @field_validator("width")
    @classmethod
    def _has_whole_groups(cls, value: int) -> int:
        if value % GROUPS:
            raise ValueError(f"GroupNorm has {GROUPS} groups: give a multiple of {GROUPS}, such as 128")
        return value


class AugmentSection(Section):
    """Geometry in addition to `train.zoom`, and colour in addition to `train.jitter`."""

    flip: float = Field(0.5, ge=0, le=1, description="share of the images mirrored left to right")
    rotate: float = Field(0.0, ge=0, le=90, description="largest angle in degrees; corners become void")
    aspect: float = Field(1.0, ge=1, le=4, description="largest factor between the zooms of the two sides")
    hue: float = Field(0.0, ge=0, le=0.5, description="largest rotation of the hue, as a share of the full circle")
    foreground: float = Field(
        0.33,
        ge=0,
        le=1,
        description="volumes: share of the windows that lie around a voxel that is no background",
    )
    mosaic: float = Field(0.0, ge=0, le=1, description="detection: share of the images that are joined of four")


class LayerSection(Section):
    """Which layers are quantised."""

    include: list[str] | None = Field(
        None,
        description="glob patterns of layer names; default: all but the first and last; ['*']: all",
    )
    exclude: list[str] | None = Field(None, description="glob patterns of layers that stay in FP16")


_USUAL = "; default: as the recipe has it"
_FORMATS: dict[str, Any] = {
    name: (list[str] | None, Field(None, description=f"glob patterns of layers quantised to {form.described}{_USUAL}"))
    for name, form in LAYER_FORMATS.items()
}


class QuantSection(create_model("LayerSection", __base__=LayerSection, **_FORMATS)):  # type: ignore[misc]
    """What is quantised in addition to the recipe, and how its training is stabilised; for nvfp4 and nvfp4_ptq."""

    fp8_macs: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the multiply-accumulates of quantised layers that goes to FP8 as well: the layers that "
        "lose most in FP4, measured on the images of the calibration",
    )
    fp16_macs: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="likewise, of layers that stay in FP16; chosen before fp8_macs",
    )
    fp4_macs: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="least share of the multiply-accumulates of the whole network, layers that are not quantised "
        "included, that stays in FP4; with neither of the two, the rest goes to FP8 in the same order",
    )
    target: str | None = Field(None, description="the engine that fp8 was chosen for; train --for sets both")
    equalize: bool = Field(
        False,
        description="first scale channels between norms and the layers that read them, by powers of two: the same "
        "network in full precision",
    )
    percentile: float = Field(
        100.0, gt=0, le=100, description="of the magnitudes that calibration sees; 100: the largest"
    )
    start: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training before which steps are not quantised; validations always are",
    )
    clip_lr: float = Field(
        10.0, gt=0, description="learning rate of a learned amax (recipe NAME+learned) over that of the weights"
    )
    clip_decay: float = Field(0.1, ge=0, description="weight decay of a learned amax")
    damping: float = Field(
        0.0, ge=0, description="weight of the dampening loss: distance of the weights to their quantised values"
    )
    damping_start: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of the training after which dampening begins to rise, linearly",
    )

    @property
    def selections(self) -> dict[str, list[str]]:
        """`include`, `exclude` and formats, those that are given."""
        chosen = {name: getattr(self, name) for name in ("include", "exclude", *LAYER_FORMATS)}
        return {name: patterns for name, patterns in chosen.items() if patterns is not None}

    @property
    def by_error(self) -> dict[str, float]:
        """As of `precisions.shares_by_error`."""
        return shares_by_error(self.fp16_macs, self.fp8_macs, self.fp4_macs)


class DistillSection(Section):
    """Distillation from the FP16 checkpoint; for nvfp4 and, so that the comparison is fair, for fp16_control."""

    weight: float = Field(0.0, ge=0, description="of the divergence between the outputs of the two; 0: none")
    features: float = Field(
        0.0, ge=0, description="of the relative error of every layer's output; 0: none. No fused kernels"
    )
    task: float = Field(1.0, ge=0, description="weight of the loss against the labels")
    temperature: float = Field(1.0, gt=0, description="probabilities of both are taken at logits / temperature")
    teacher: str | None = Field(None, description="checkpoint other than the one that fine-tuning starts from")
    control: bool = Field(True, description="distil fp16_control as well")

    @property
    def teaches(self) -> bool:
        """There is something to be learned of a teacher."""
        return self.weight > 0 or self.features > 0


def checked(value: Any, check: Any) -> Any:
    try:
        return check(value)
    except Fp4DeployError as error:
        raise ValueError(str(error)) from error


def valid_text(field: FieldInfo) -> str:
    """Type and range of a setting: "int >= 1, <= 65536", "centres or set", "true or false"."""
    kind = _kind(field.annotation)
    bounds = [
        f"{sign} {value:g}" if abs(value := getattr(bound, name)) < 1e9 else f"{sign} {value:.3g}"
        for bound in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(bound, name)
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join("none" if part is type(None) else _kind(part) for part in inner)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is list:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return f"[{', '.join(_kind(part) for part in inner)}]"
    names = {str: "text", bool: "true or false", float: "number", int: "int"}
    return names.get(annotation, str(annotation))
