"""Sections of the configuration that are off until they are asked for: augmentation, quantiser, distillation.

Their defaults are the plain training of `config.TrainSection`; each key says what it does and what it is for.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AugmentSection(Section):
    """Geometry besides `train.zoom`, and colour besides `train.jitter`.

    flip: share of the images mirrored left to right; rotate: largest angle in degrees, corners become void; aspect:
    largest factor between the two sides' zooms; hue: largest rotation of the hue, as a share of the full circle.
    """

    flip: float = Field(0.5, ge=0, le=1)
    rotate: float = Field(0.0, ge=0, le=90)
    aspect: float = Field(1.0, ge=1, le=4)
    hue: float = Field(0.0, ge=0, le=0.5)


class QuantSection(Section):
    """What is quantised besides the recipe, and how its training is steadied; for nvfp4 and nvfp4_ptq.

    include, exclude: glob patterns of layer names. By default the first and the last product stay in FP16;
    include: ["*"] quantises them too. percentile: of the magnitudes that calibration sees, 100 for the largest.
    clip_lr: learning rate of a learned amax (recipe "...+learned") over that of the weights; clip_decay: its weight
    decay. damping: weight of the pull of every weight to its quantised value; damping_start: share of the training
    after which the pull sets in, rising linearly to its weight at the end.
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

    weight: of the divergence between the two softmaxes, 0 for none; task: of the loss against the labels beside it;
    temperature: both softmaxes are taken at logits / temperature; teacher: a checkpoint other than the one that
    fine-tuning starts from; control: whether fp16_control is distilled as well.
    """

    weight: float = Field(0.0, ge=0)
    task: float = Field(1.0, ge=0)
    temperature: float = Field(1.0, gt=0)
    teacher: str | None = None
    control: bool = True
