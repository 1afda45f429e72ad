"""The model card: what a runtime must know to feed a model and to interpret its output.

It travels inside every artefact (safetensors metadata, ONNX metadata, engine ledger), so that a file on its own can be
evaluated without the run that made it. A file may be anyone's: `from_json` takes a card only if every field has its
type and lies within its limits, and the fields go together. The types of the fields below are these limits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from fp4deploy.errors import InputError
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.heads import MAX_CLASSES, ClassHead, InstanceHead
from fp4deploy.models.spec import KNOWN, ModelSpec, parse_spec
from fp4deploy.models.volumes import MAX_CHANNELS, NetworkInput, Side, Size, VolumeInput
from fp4deploy.precisions import with_formats
from fp4deploy.rest import RestName
from fp4deploy.system.schema import Bool, Float, Name, parse_json, validated

CARD_KEY = "fp4deploy.card"
HEADS = ("centres", "set", "label", "fcos", "fcos_relu", "retinanet")  # `method` of a head
AGAIN = "Export or train the model again."

Channel = Annotated[Float, Field(ge=-100, le=100)]  # a mean, in units of [0, 1] RGB
Spread = Annotated[Float, Field(ge=0.01, le=100)]  # a standard deviation; the largest input still fits FP16
TaskName = Literal["semantic", "instance", "detection", "classification"]
Precision = Literal["fp16", "nvfp4", "unknown"]  # unknown: of an engine without a ledger, never of a file
Patterns = Annotated[tuple[Name, ...], Field(max_length=1000)]


def numbered(count: int) -> tuple[str, ...]:
    """Names of classes that nobody has named.

    >>> numbered(2)
    ('class_0', 'class_1')
    """
    return tuple(f"class_{number}" for number in range(count))


@dataclass(frozen=True)
class ModelCard:
    """Architecture, precision and input contract of one model.

    `height` and `width` are in pixels, `mean` and `std` in units of [0, 1] RGB; `background` says that class 0 stands
    for everything unlabelled (COCO layouts) rather than for a class of its own (semantic masks). `include` and
    `exclude` are the patterns that chose the quantised layers; None for the default choice. `formats` has those of the
    layers in one of `precisions.LAYER_FORMATS`, which in a file are fields of the card. `task` is "semantic",
    "instance", "detection" or "classification", and `head` the layout of the output of all but the first.
    `target`: the engine whose precision each layer has, as `train --for` names it: "rtx sm120".
    `digits`: the model encodes the image in several FP4 terms before its first layer (`models.input_encoding`); its
    input is the same.
    `architecture` is the model spec (`models.spec`), `scale` a UNet's own, `arguments` those of the spec's network, and
    `output` the name or number of the logits where it has several outputs. `rest` is what is not quantised in,
    once the model is deployed (`fp4deploy.rest`). `volume` is there of a network of three spatial axes, and describes
    its input (`models.volumes`), which is normalised by it: `mean` and `std` are then 0 and 1.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    precision: Precision
    scale: Annotated[Float, Field(gt=0, le=4)]
    class_names: Annotated[tuple[Name, ...], Field(max_length=MAX_CLASSES)]
    height: Side
    width: Side
    mean: Annotated[tuple[Channel, ...], Field(min_length=1, max_length=MAX_CHANNELS)]
    std: Annotated[tuple[Spread, ...], Field(min_length=1, max_length=MAX_CHANNELS)]
    background: Bool
    recipe: Name | None = None
    architecture: Name = "unet"
    include: Patterns | None = None
    exclude: Patterns | None = None
    formats: dict[Name, Patterns] = field(default_factory=dict, hash=False)
    target: Name | None = None
    task: TaskName = "semantic"
    head: Annotated[InstanceHead | ClassHead | DetectionHead, Field(discriminator="method")] | None = None
    digits: Bool = False
    arguments: Annotated[dict[Name, Any], Field(max_length=100)] = field(default_factory=dict, hash=False)
    output: Name | None = None
    rest: RestName = "fp16"
    volume: VolumeInput | None = None

    @property
    def size(self) -> Size:
        """The spatial axes of the input: (height, width), or (depth, height, width)."""
        return (self.height, self.width) if self.volume is None else (self.volume.depth, self.height, self.width)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The input without the batch: (channels, *size)."""
        return (len(self.mean), *self.size)

    @property
    def inputs(self) -> NetworkInput:
        """What the network is built for."""
        return NetworkInput(len(self.mean), self.size, self.volume.spacing if self.volume is not None else None)

    def resized(self, size: Size) -> ModelCard:
        """The card of the same network for inputs of another size.

        Raises:
            InputError: `size` has another number of axes.
        """
        if len(size) != len(self.size):
            form = "DxHxW" if self.volume is not None else "HxW"
            raise InputError(f"The network has {len(self.size)} spatial axes, and the size {len(size)}. Give {form}.")
        volume = None if self.volume is None else dataclasses.replace(self.volume, depth=size[0])
        return dataclasses.replace(self, height=size[-2], width=size[-1], volume=volume)

    @property
    def spec(self) -> ModelSpec:
        """The network's spec.

        Raises:
            InputError: `architecture` is none.
        """
        return parse_spec(self.architecture, self.arguments, self.output)

    @property
    def numbered(self) -> bool:
        """Whether its classes are called by their numbers, for want of names (`numbered`)."""
        return self.class_names == numbered(len(self.class_names))

    @property
    def channels(self) -> int:
        """Output channels of the model."""
        return self.head.channels if self.head else len(self.class_names)

    def to_json(self) -> str:
        """Serialise; `from_json` gives the same card back."""
        fields = dataclasses.asdict(self)
        fields |= fields.pop("formats")
        usual = {"arguments": {}, "rest": "fp16"} | dict.fromkeys(("output", "target", "volume"))
        for name in usual:  # older versions do not know them
            if fields[name] == usual[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, source: object = "The model card") -> ModelCard:
        """Parse what `to_json` wrote; `source` begins the message of an error.

        Raises:
            InputError: the text is not a card, or a field is missing, unknown or beyond its limits.
        """
        card = validated(cls, with_formats(parse_json(text, source, AGAIN)), source, AGAIN, HEADS)
        wrong = card._contradictions()
        if wrong:
            raise InputError(f"{source}: {wrong[0]}. {AGAIN}")
        return card

    def _contradictions(self) -> list[str]:
        """Fields that do not go together, each as a clause."""
        head, names = self.head, len(self.class_names)
        checks = [
            (self.precision != "unknown", "precision = 'unknown': known are: fp16, nvfp4"),
            (_names_a_model(self.architecture), f"architecture = '{self.architecture}': {_one_of(KNOWN)}"),
            (len(set(self.class_names)) == names, "class_names: a name is given twice"),
            (self.recipe is None or self.precision != "fp16", f"precision = 'fp16' with recipe = '{self.recipe}'"),
            (
                (self.task == "detection") == isinstance(head, DetectionHead),
                f"task = '{self.task}' {_with(head)} a detection head",
            ),
        ]
        if isinstance(head, ClassHead) or self.task == "classification":
            fits = self.task == "classification" and isinstance(head, ClassHead)
            checks.append((fits, f"task = '{self.task}' {_with(head)} a classifier's head"))
        elif self.task != "detection":
            fits = (self.task == "instance") == isinstance(head, InstanceHead)
            checks.append((fits, f"task = '{self.task}' {_with(head)} an instance head"))
        channels = 3 if self.volume is None else len(self.volume.channels)
        checks.append(
            ({len(self.mean), len(self.std)} == {channels}, f"mean and std: the input has {channels} channels")
        )
        if self.volume is not None:
            alone = self.task == "semantic" and not self.digits
            checks += [
                (alone, "volume: with the task 'semantic' alone, and without digits"),
                (len(self.volume.intensities) == channels, f"volume.intensities: there are {channels} channels"),
            ]
        if isinstance(head, DetectionHead):
            checks += [
                (head.classes == names - 1, f"head.classes = {head.classes}, and there are {names} class_names"),
                (list(head.strides) == sorted(set(head.strides)), "head.strides: they do not ascend"),
            ]
        if isinstance(head, ClassHead):
            checks.append((head.classes == names, f"head.classes = {head.classes}, and there are {names} class_names"))
        if isinstance(head, InstanceHead):
            few = (names,) if head.method == "centres" else (0, names)
            checks += [
                (head.classes in few, f"head.classes = {head.classes}, and there are {names} class_names"),
                ((head.masks > 0) == (head.method == "set"), f"head.masks = {head.masks} with '{head.method}'"),
                (all(number < names for number in head.stuff), "head.stuff: a number is no class"),
            ]
        return [clause for fits, clause in checks if not fits]


def _names_a_model(text: str) -> bool:
    try:
        return parse_spec(text).scale is None
    except InputError:
        return False


def _one_of(known: Sequence[str]) -> str:
    return f"known are: {', '.join(known)}"


def _with(head: object) -> str:
    return "without" if head is None else "with"
