"""What an ONNX file of another tool takes and gives, where it has no model card: `bench --like FILE`.

FILE is a checkpoint or an ONNX file with a model card, or YAML with fields of one:

    class_names: [background, car, person]     in the order of the network's output channels
    background: true                           class 0 stands for everything unlabelled (COCO layouts); default false
    height: 512                                pixels; may be left out where the ONNX file fixes them
    width: 512
    mean: [0.485, 0.456, 0.406]                in units of [0, 1] RGB; ImageNet's by default
    std: [0.229, 0.224, 0.225]

The file is then scored as ours are: one input float32 or float16 [N, 3, H, W], the first output logits
[N, classes, H, W] at the size of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from fp4deploy.bench.runtimes.ports import Port
from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
from fp4deploy.errors import InputError
from fp4deploy.models import read_card
from fp4deploy.models.card import Channel, ModelCard, Spread, numbered
from fp4deploy.models.heads import MAX_CLASSES
from fp4deploy.models.volumes import Side
from fp4deploy.system.schema import Bool, Name, read_yaml, validated
from fp4deploy.tasks import task_of

YAML = (".yaml", ".yml")
ADVICE = "The fields are in: docs/your-model.md."


@dataclass(frozen=True)
class Like:
    """Classes and input of a semantic network; a size of None is that of the ONNX file, no names numbers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    class_names: Annotated[tuple[Name, ...], Field(min_length=2, max_length=MAX_CLASSES)]
    background: Bool = False
    height: Side | None = None
    width: Side | None = None
    mean: tuple[Channel, Channel, Channel] = IMAGE_MEAN
    std: tuple[Spread, Spread, Spread] = IMAGE_STD

    def card(self, inputs: Sequence[Port], output: tuple[str, Sequence[object]], fp4: bool, source: Path) -> ModelCard:
        """The model card of a file with these inputs and this first output (name, shape with None where open).

        Raises:
            InputError: its input, size or number of classes is another.
        """
        height, width = self._size(inputs, source)
        name, shape = output
        names = self.class_names or self._numbers(shape, source)
        expected = (None, len(names), height, width)
        if shape and (len(shape) != 4 or any(_differ(*pair) for pair in zip(shape, expected, strict=True))):
            raise InputError(
                f"{source}: its first output, {name} {_text(shape)}, is no map of logits [N, {expected[1]}, {height}, "
                f"{width}], which --like asks for with {expected[1]} classes: {', '.join(names[:8])}. Name "
                "the network's own classes, or export it with the resize to its input's size inside."
            )
        precision = "nvfp4" if fp4 else "unknown"
        return ModelCard(precision, 1.0, names, height, width, self.mean, self.std, self.background)  # type: ignore[arg-type]

    @staticmethod
    def _numbers(shape: Sequence[object], source: Path) -> tuple[str, ...]:
        """The classes of an output whose channels nobody has named."""
        if len(shape) != 4 or not isinstance(shape[1], int):
            raise InputError(
                f"{source}: neither --like nor the first output, {_text(shape)}, says how many classes there are. "
                f"Write their names into a YAML file, class_names: [a, b], and give it as --like. {ADVICE}"
            )
        if shape[1] < 2:
            raise InputError(f"{source}: its first output, {_text(shape)}, is no map of two or more classes.")
        return numbered(shape[1])

    def _size(self, inputs: Sequence[Port], source: Path) -> tuple[int, int]:
        given = (self.height, self.width)
        extents = (inputs[0].extents if len(inputs) == 1 else ()) or (None, 3, None, None)
        fits = len(inputs) == 1 and inputs[0].dtype.kind == "f" and len(extents) == 4 and not _differ(extents[1], 3)
        if not fits:
            taken = ", ".join(port.described for port in inputs)
            raise InputError(f"{source} takes {taken}; bench feeds one batch of normalised images, float [N, 3, H, W].")
        if any(_differ(own, wanted) for own, wanted in zip(extents[2:], given, strict=True)):
            raise InputError(
                f"{source} takes images of {inputs[0].form}, and --like says {self.height}x{self.width} (HxW). Export "
                "it for that size, or give --like a file with its own."
            )
        height, width = (own if isinstance(own, int) else size for own, size in zip(extents[2:], given, strict=True))
        if height is None or width is None:
            raise InputError(f"{source} leaves the size of its images open. Add height and width to the --like file.")
        return height, width


def read_like(path: Path) -> Like:
    """Read a card, or YAML with some of its fields.

    Raises:
        InputError: the file is missing, of another kind, has no card, or that of another task; a field is wrong.
    """
    suffix = path.suffix.lower()
    if suffix not in (*YAML, ".safetensors", ".onnx"):
        raise InputError(f"--like is {path}. It takes a checkpoint (.safetensors), an ONNX file of ours, or YAML.")
    if not path.is_file():
        raise InputError(f"There is no file {path}, which --like names.")
    if suffix in YAML:
        found = validated(Like, read_yaml(path, ADVICE), path, ADVICE)
        if len(set(found.class_names)) < len(found.class_names):
            raise InputError(f"{path}: class_names: a name is given twice. {ADVICE}")
        return found
    card = read_card(path) if suffix == ".safetensors" else _onnx_card(path)
    if card.volume is not None:
        raise InputError(f"--like {path} is of volumes; networks of other tools are scored on images alone.")
    if task_of(card).counts_objects:
        raise InputError(f"--like {path} is of the {card.task} task; networks of other tools are scored by mIoU alone.")
    return Like(card.class_names, card.background, card.height, card.width, card.mean, card.std)  # type: ignore[arg-type]


def _onnx_card(path: Path) -> ModelCard:
    from fp4deploy.bench.runtimes.onnx_file import find_card, require_card
    from fp4deploy.export import read_onnx

    return require_card(find_card(read_onnx(path), path), path)


def _differ(own: object, wanted: int | None) -> bool:
    """Whether both are known and another."""
    return isinstance(own, int) and wanted is not None and own != wanted


def _text(shape: Sequence[object]) -> str:
    return f"[{', '.join(str(size) if isinstance(size, int) else '?' for size in shape)}]"
