"""What an output of a network means, and where two runtimes' outputs mean the same.

| meaning | two outputs agree where | whose outputs |
|---|---|---|
| `Classes` | the largest value along the class axis has one place | a semantic model's; "classes", "classes:AXIS" |
| `Values` | they differ by a share of the range at most | "values", "values:BOUND"; those without a class axis |
| `ClassesAndValues` | both | floating point, and nobody said what they are |
| `Whole` | they are equal | whole numbers and bools |
| a head | objects and boxes are the same | an instance model's or a detector's (`heads`, `boxes`) |

A class map and a picture have the same shape, and only one of them may be doubled without a change of its meaning. What
nobody has described is therefore compared as both.

The class axis follows from the rank: the last of [N, V] and of tokens [N, T, V], the first after the batch of
[N, C, H, W] and [N, C, D, H, W]. Whoever has classes on another axis says so.

The range, largest minus smallest, is that of a channel where a channel has enough values to have one: a depth of
100 metres beside a normal vector would hide any error of the latter. Values far from zero have FP16's precision there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fp4deploy.errors import InputError
from fp4deploy.models.card import ModelCard

CLOSE = 0.01  # of the range
FP16_EPSILON = 2.0**-10  # of the largest value
ENOUGH = 16  # values of a channel that has a range of its own
UNITS = {1: "samples", 2: "positions", 3: "pixels", 4: "voxels"}  # by the number of axes of a class map

Outputs = str | Sequence[str] | Mapping[str, str] | None  # what a caller says of a network's outputs


class Meaning(Protocol):
    """unit: what `agreeing` counts; compared: what it compares; both for messages."""

    @property
    def unit(self) -> str: ...
    @property
    def compared(self) -> str: ...
    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """bool, one value for each unit, of two outputs of one shape; NaN and Inf agree with nothing."""
        ...


@dataclass(frozen=True)
class Classes:
    """The class is the place of the largest value along `axis`, whose rest has the shape of what is counted."""

    axis: int
    unit: str = "pixels"

    @property
    def compared(self) -> str:
        """For messages."""
        return f"argmax over axis {self.axis}"

    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Where the class is the same, without the class axis."""
        finite = given.isfinite().all(self.axis) & expected.isfinite().all(self.axis)
        return finite & (expected.argmax(self.axis) == given.argmax(self.axis))


@dataclass(frozen=True)
class Values:
    """Numbers, in channels along `axis` where there is one; `bound` is the share of the range that they may differ."""

    bound: float = CLOSE
    axis: int | None = None
    unit: str = "values"

    @property
    def compared(self) -> str:
        """For messages."""
        return f"values (within {self.bound:g} of the range)"

    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Where the value is the same, in the shape of the output."""
        if not expected.numel():
            return torch.zeros_like(expected, dtype=torch.bool)
        allowed = self.bound * _range(expected, self.axis) + FP16_EPSILON * expected.abs().max()
        return given.isfinite() & expected.isfinite() & ((expected - given).abs() <= allowed)


@dataclass(frozen=True)
class ClassesAndValues:
    """What may be either: the class is the same, and so is each value along the axis."""

    classes: Classes
    values: Values

    @property
    def unit(self) -> str:
        """For messages."""
        return self.classes.unit

    @property
    def compared(self) -> str:
        """For messages."""
        return f"{self.classes.compared} and {self.values.compared}"

    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Where all of it is the same, without the class axis."""
        return self.classes.agreeing(expected, given) & self.values.agreeing(expected, given).all(self.classes.axis)


@dataclass(frozen=True)
class Whole:
    """Whole numbers, such as ids of classes, or bools; a runtime may give them as floating point numbers."""

    unit: str = "values"
    compared: str = "whole numbers"

    def agreeing(self, expected: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Where they are equal."""
        if given.is_floating_point():
            return expected.double() == given.double()
        return expected == given


@dataclass(frozen=True)
class OutputMeanings:
    """What is known of a network's outputs before it runs.

    first: of the first output, as a model card says; None where there is none.
    said: "classes", "classes:AXIS", "values" or "values:BOUND", of all outputs, of each in order, or by their names.
    """

    first: Meaning | None = None
    said: Outputs = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for text in self._texts():
            _parsed(text)

    def of(self, outputs: Sequence[torch.Tensor], names: Sequence[str]) -> list[Meaning]:
        """The meaning of each output; `outputs` are read for their ranks, extents and types.

        Raises:
            InputError: a name or number of outputs that the network does not have, an axis that an output does not.
        """
        said = self._by_name(names)
        found = [_meaning(each, name, said.get(name)) for each, name in zip(outputs, names, strict=True)]
        if self.first is not None and found and names[0] not in said and not _is_empty(self.first, outputs[0]):
            found[0] = self.first
        return found

    def _texts(self) -> Sequence[str]:
        if self.said is None:
            return ()
        if isinstance(self.said, str):
            return (self.said,)
        return tuple(self.said.values() if isinstance(self.said, Mapping) else self.said)

    def _by_name(self, names: Sequence[str]) -> Mapping[str, str]:
        said, listed = self.said, ", ".join(names)
        if said is None or isinstance(said, str):
            return dict.fromkeys(names, said) if said is not None else {}
        if isinstance(said, Mapping):
            if unknown := set(said) - set(names):
                raise InputError(f"The network has no output '{min(unknown)}'. It has: {listed}.")
            return said
        if len(said) != len(names):
            raise InputError(f"The network has {len(names)} outputs ({listed}), and {len(said)} are described.")
        return dict(zip(names, said, strict=True))


UNKNOWN = OutputMeanings()


def known_outputs(card: ModelCard | None = None, head: Meaning | None = None, said: Outputs = None) -> OutputMeanings:
    """What a card, a head or the caller (`OutputMeanings.said`) says of a network's outputs; the caller comes first.

    Raises:
        InputError: a word that is unknown.

    >>> known_outputs(said="classes:1").of([torch.zeros(2, 3, 8)], ["logits"])[0].compared
    'argmax over axis 1'
    """
    if head is None and card is not None:
        head = card.head or (Classes(1, UNITS[1 + len(card.size)]) if card.class_names else None)
    return OutputMeanings(head, said)


def class_axis(rank: int) -> int | None:
    """The axis of the classes in an output of so many axes; None where it has none."""
    if rank < 2:
        return None
    return 1 if rank != 3 else 2


def _meaning(output: torch.Tensor, name: str, said: str | None) -> Meaning:
    if not output.is_floating_point():
        return Whole()
    usual = class_axis(output.ndim)
    word, number = _parsed(said) if said is not None else (None, None)
    if word == "values":
        return Values(CLOSE if number is None else number, usual)
    axis = usual if word is None or number is None else int(number)
    if axis is None or not -output.ndim <= axis < output.ndim:
        if word is None:
            return Values()
        raise InputError(f"The output '{name}' {list(output.shape)} has no axis {axis} for classes. Say 'values'.")
    axis %= output.ndim
    if word == "classes" and output.shape[axis] == 1:
        raise InputError(f"The output '{name}' {list(output.shape)} has one class on axis {axis}. Say 'values'.")
    unit = UNITS.get(output.ndim - 1, "positions")
    classes = Classes(axis, "tokens" if output.ndim == 3 and axis == 2 else unit)
    if word == "classes":
        return classes
    values = Values(axis=axis)
    return ClassesAndValues(classes, values) if output.shape[axis] > 1 else replace(values, axis=None)


def _is_empty(meaning: Meaning, output: torch.Tensor) -> bool:
    """Whether nothing could differ: of one class, the largest value is that of the class wherever it lies."""
    return isinstance(meaning, Classes) and output.shape[meaning.axis] == 1


def _parsed(text: str) -> tuple[str, float | None]:
    word, colon, rest = text.partition(":")
    number: float | None = None
    try:
        if colon:
            number = int(rest) if word == "classes" else float(rest)
    except ValueError:
        word = ""
    if word not in ("classes", "values") or (word == "values" and number is not None and not 0 < number < 1):
        raise InputError(
            f"'{text}' says nothing of an output. Valid: classes, classes:AXIS, values, values:BOUND, with a bound "
            "between 0 and 1 of the range."
        )
    return word, number


def _range(x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Largest minus smallest value, of a channel or, where that has few values, of all."""
    if axis is None or x.numel() < ENOUGH * x.shape[axis]:
        return x.max() - x.min()
    others = [other for other in range(x.ndim) if other != axis]
    return x.amax(others, keepdim=True) - x.amin(others, keepdim=True)
