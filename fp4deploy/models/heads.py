"""The output channels of an instance model, or of a classifier, and when two such outputs agree.

A model returns one tensor [N, channels, H, W], a classifier [N, classes], whatever its task, so that quantisation,
export and every runtime treat all tasks alike. The card records which of the two layouts the channels have:

    centres    classes | 1 heatmap | 2 offsets (down, right)      any number of instances
    set        [classes |] K masks                                at most K instances

`classes` are semantic logits, background first. The set layout has them only where there is more than one class to
tell apart: with one, a mask's class is known. An offset points from a pixel to the centre of its instance and is in
units of `OFFSET_UNIT` pixels of the input, so that the channels have similar magnitudes: of all layers the head is the
one that stays in FP16, and its outputs of hundreds of pixels would leave few bits for the small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import AfterValidator, ConfigDict, Field

from fp4deploy.system.schema import Count, Float

MAX_CLASSES = 10_000
MAX_MASKS = 4096
MAX_NMS = 63  # pixels; decoding takes nms x nms comparisons a pixel
MAX_DETECTIONS = 100_000
OFFSET_UNIT = 16.0  # pixels of the input
CLOSE = 0.02  # heatmap, and offset in units: beyond it two outputs disagree


def require_odd(value: int) -> int:
    """A window around a pixel has an odd side; ValueError for another one."""
    if value % 2 == 0:
        raise ValueError("a window around a pixel has an odd side, such as 5")
    return value


class Head(Protocol):
    """Layout of a model's output. unit: what `agreeing` counts; compared: what it compares; both for messages."""

    unit: ClassVar[str]

    @property
    def channels(self) -> int: ...
    @property
    def compared(self) -> str: ...
    @property
    def layout(self) -> str: ...
    def output_size(self, height: int, width: int) -> tuple[int, ...]: ...
    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class InstanceHead:
    """Layout of the channels, and how instances are read from them. The types limit what a card in a file may say.

    Args:
        method: "centres" or "set".
        classes: semantic channels, background included; 0 where there are none.
        masks: mask channels of the set method, 0 for centres.
        stuff: class ids that are regions, not things: they have no instances.
        nms: side of the window, in pixels of the input, in which only the largest centre stays (odd).
        threshold: smallest score of a centre.
        max_detections: most instances of an image, those with the highest scores; also COCO's maxDets.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    unit: ClassVar[str] = "pixels"

    method: Literal["centres", "set"]
    classes: Annotated[Count, Field(le=MAX_CLASSES)]
    masks: Annotated[Count, Field(le=MAX_MASKS)] = 0
    stuff: Annotated[tuple[Count, ...], Field(max_length=MAX_CLASSES)] = ()
    nms: Annotated[Count, Field(ge=1, le=MAX_NMS), AfterValidator(require_odd)] = 5
    threshold: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    max_detections: Annotated[Count, Field(ge=1, le=MAX_DETECTIONS)] = 100

    @property
    def channels(self) -> int:
        """Output channels of the model."""
        return self.classes + (3 if self.method == "centres" else self.masks)

    @property
    def compared(self) -> str:
        """What two outputs agree on, for messages."""
        return "class, centre score and offset" if self.method == "centres" else "class and mask"

    @property
    def layout(self) -> str:
        """The channels, for messages."""
        masks = f" of {self.masks} masks" if self.method == "set" else ""
        stuff = f", {len(self.stuff)} of them stuff" if self.stuff else ""
        return f"'{self.method}'{masks} and {self.classes} semantic channels{stuff}"

    def output_size(self, height: int, width: int) -> tuple[int, ...]:
        """The axes after the channels, for an input of height x width pixels."""
        return height, width

    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Pixels [N, H, W] with the same class and mask, centre score and offset within `CLOSE`."""
        same = given.isfinite().all(1)
        if self.classes:
            same &= self.semantic(expected).argmax(1) == self.semantic(given).argmax(1)
        if self.method == "set":
            return same & (_mask(self.mask_logits(expected)) == _mask(self.mask_logits(given)))
        apart = (expected - given)[:, self.classes :].abs().amax(1)
        return same & (apart <= CLOSE)

    def semantic(self, outputs: torch.Tensor) -> torch.Tensor:
        """Semantic logits [..., classes, H, W] of outputs [..., channels, H, W]."""
        return outputs.narrow(-3, 0, self.classes)

    def heatmap(self, outputs: torch.Tensor) -> torch.Tensor:
        """Centre scores [..., H, W], about 0 to 1."""
        return outputs.select(-3, self.classes)

    def offsets(self, outputs: torch.Tensor) -> torch.Tensor:
        """Offsets [..., 2, H, W], down and right, in units of `OFFSET_UNIT` pixels."""
        return outputs.narrow(-3, self.classes + 1, 2)

    def mask_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Mask logits [..., masks, H, W]."""
        return outputs.narrow(-3, self.classes, self.masks)


@dataclass(frozen=True)
class ClassHead:
    """One class an image: logits [N, classes] without spatial axes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    unit: ClassVar[str] = "images"

    method: Literal["label"]
    classes: Annotated[Count, Field(ge=2, le=MAX_CLASSES)]

    @property
    def channels(self) -> int:
        """Outputs of the model."""
        return self.classes

    @property
    def compared(self) -> str:
        """What two outputs agree on, for messages."""
        return "class"

    @property
    def layout(self) -> str:
        """The outputs, for messages."""
        return f"'label' of {self.classes} classes"

    def output_size(self, height: int, width: int) -> tuple[int, ...]:
        """No axes after the classes."""
        return ()

    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Images [N] of the same class."""
        return given.isfinite().all(1) & (expected.argmax(1) == given.argmax(1))


def _mask(logits: torch.Tensor) -> torch.Tensor:
    """Number of the mask that holds a pixel, -1 for none."""
    best, number = logits.max(1)
    return number.where(best > 0, -1)
