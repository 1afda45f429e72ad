"""How far the outputs of an exported file and of torch agree, each in what it means (`models.meaning`).

Every output has to agree by itself, on 99.9 % of its units, and so has most of every sample and of every place along an
axis: one wrong token of a sequence of 2048, or one wrong channel of as many, is less than a thousandth of the whole.
NaN or Inf in either output agrees with nothing, whatever the other has. What differs where last bits of float32 decide
about torch's own results (`last_bits`) is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fp4deploy.errors import InputError
from fp4deploy.export.verify.last_bits import MOST, settled
from fp4deploy.models.meaning import Meaning, OutputMeanings, Values, Whole, class_axis
from fp4deploy.rest import FP16, Rest

REQUIRED_AGREEMENT = 0.999  # of the units of each output
MAX_LOST = 0.5  # of one sample or place
FEW = 16  # units that may be ties, whatever share of an output they are


@dataclass(frozen=True)
class OutputAgreement:
    """How far one output of two runtimes agrees.

    name: of the output. meaning: what was compared. count, differing: in its units. lost: the largest share, 0..1, that
    differs of one sample, or of one place along any other axis: a wrong token is a small part of a long sequence.
    broken: whose output holds NaN or Inf; None where both are finite. undecided: how many units differ besides where
    last bits of float32 decide (`last_bits`).
    """

    name: str
    meaning: Meaning
    count: int = 0
    differing: int = 0
    lost: float = 0.0
    broken: str | None = None
    undecided: int = 0

    @property
    def share(self) -> float:
        """Share of the units on which both agree, 0..1; 0 where nothing was compared, and with NaN or Inf."""
        return 1 - (self.differing + self.undecided) / self.count if self.count and self.broken is None else 0.0

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limits of this module."""
        return self.reaches(REQUIRED_AGREEMENT)

    def reaches(self, enough: float) -> bool:
        """Whether a share of at least `enough` agrees, and of every sample and place most of it."""
        if not self.count or self.broken is not None or self.lost > MAX_LOST:
            return False
        return 1 - self.differing / self.count >= enough

    @property
    def is_near(self) -> bool:
        """Whether so little differs that last bits may be the reason."""
        return self.broken is None and self.differing <= max(MOST * self.count, FEW)

    def sentence(self) -> str:
        """What agrees, as a clause."""
        if self.broken is not None:
            return f"NaN or Inf in {self.broken}"
        text = f"{self.meaning.compared} equal to torch on {100 * self.share:.3f} % of {self.count} {self.meaning.unit}"
        return f"{text} ({self.undecided} where last bits of float32 decide)" if self.undecided else text

    def difference(self) -> str:
        """What differs, as a clause."""
        if self.broken is not None:
            return self.sentence()
        if not self.count:
            return "there was nothing to compare"
        text = (
            f"{100 * self.differing / self.count:.3f} % of {self.count} {self.meaning.unit} by {self.meaning.compared}"
        )
        return f"{text}, {100 * self.lost:.3g} % at one place" if self.lost > MAX_LOST else text


@dataclass(frozen=True)
class Comparison:
    """How far an exported network and torch agree on the same inputs.

    images: how many were compared. outputs: the agreement of each output, end to end. flat: how they differ on a black,
    a white or a constant image (`flat`); "" where they do not. ranges: the largest magnitude of what is computed in
    `rest`, by place (`qat.ranges`).
    """

    images: int
    outputs: tuple[OutputAgreement, ...]
    flat: str = field(default="", kw_only=True)
    ranges: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    rest: Rest = field(default=FP16, kw_only=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sentence()})"

    def sentence(self) -> str:
        """The agreement as a sentence: what was compared, and on how much of it both agree."""
        return described(self.outputs, OutputAgreement.sentence)

    @property
    def pixels(self) -> int:
        """What was compared, in the units of the outputs: pixels, tokens, values."""
        return sum(each.count for each in self.outputs)

    @property
    def share(self) -> float:
        """Share on which both agree, 0..1, of the output that agrees least; 0 where nothing was compared."""
        return least_share(self.outputs)

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limits of this module, or with reference inputs within theirs."""
        if self.flat or self.rest.beyond(self.ranges) or not self.outputs or any(each.broken for each in self.outputs):
            return False
        return all(each.passed for each in self.outputs) or self.passed_with_references

    @property
    def passed_with_references(self) -> bool:
        """Whether layers agree where each is given reference inputs; FP4 alone explains the rest then."""
        return False

    @property
    def place(self) -> str:
        """What differs with reference inputs, as a clause that names the layer; "" where that was not compared."""
        return ""


def compare_outputs(
    expected: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    names: Sequence[str],
    meanings: OutputMeanings,
    before: Sequence[OutputAgreement] = (),
    moved: Sequence[torch.Tensor] | None = None,
) -> tuple[OutputAgreement, ...]:
    """Compare the outputs of one batch by what they mean, and add what earlier batches gave (`before`).

    moved: how far torch's own elements move by last bits (`last_bits.movements`), where that counts.

    Raises:
        InputError: another number of outputs, or `meanings` of other outputs.
    """
    if len(expected) != len(given):
        raise InputError(f"The file gives {len(given)} outputs, and the model {len(expected)}.")
    moves = [None] * len(expected) if moved is None else moved
    of_each = zip(expected, given, names, meanings.of(expected, names), moves, strict=True)
    found = [_compared(*each) for each in of_each]
    return tuple(map(_added, before, found)) if before else tuple(found)


def unsettled(expected: Sequence[torch.Tensor], moved: Sequence[torch.Tensor]) -> list[float]:
    """The share, 0..1, of each output that moves by more than values may differ; of whole numbers that moves at all."""
    pairs = zip(expected, moved, strict=True)
    return [
        1 - float((Values(axis=class_axis(x.ndim)) if x.is_floating_point() else Whole()).agreeing(x, y).float().mean())
        for x, y in pairs
    ]


def described(found: Sequence[OutputAgreement], clause: Callable[[OutputAgreement], str]) -> str:
    """A clause for each output, by its name where there are several."""
    if not found:
        return "there was nothing to compare"
    return "; ".join(clause(each) if len(found) == 1 else f"{each.name}: {clause(each)}" for each in found)


def least_share(found: Sequence[OutputAgreement]) -> float:
    """The share of the output that agrees least, 0..1; 0 of none."""
    return min((each.share for each in found), default=0.0)


def largest_difference(expected: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference of two values; NaN where one is."""
    apart = [
        float((one.double() - other.double()).abs().max())
        for one, other in zip(expected, given, strict=True)
        if one.numel() and one.shape == other.shape
    ]
    return float(np.max(apart)) if apart else 0.0


def _compared(
    expected: torch.Tensor, given: torch.Tensor, name: str, meaning: Meaning, moved: torch.Tensor | None
) -> OutputAgreement:
    broken = [whose for whose, x in (("torch", expected), ("the file", given)) if not bool(x.isfinite().all())]
    if expected.shape != given.shape:
        return OutputAgreement(name, meaning, max(1, expected.numel()), max(1, expected.numel()), 1.0)
    differs, undecided = ~meaning.agreeing(expected, given), 0
    if moved is not None:
        decided = ~meaning.agreeing(expected, settled(expected, given, moved))
        differs, undecided = decided, max(0, int(differs.sum() - decided.sum()))
    whose = " and ".join(broken) or None
    return OutputAgreement(name, meaning, differs.numel(), int(differs.sum()), _most_lost(differs), whose, undecided)


def _most_lost(differs: torch.Tensor) -> float:
    """The largest share of one index of any axis; an index of one unit says nothing beside the whole."""
    if not differs.numel():
        return 0.0
    shares = [
        float(differs.movedim(axis, 0).flatten(1).float().mean(1).max())
        for axis, size in enumerate(differs.shape)
        if size < differs.numel()
    ]
    return max(shares, default=0.0)


def _added(before: OutputAgreement, found: OutputAgreement) -> OutputAgreement:
    return replace(
        found,
        count=before.count + found.count,
        differing=before.differing + found.differing,
        lost=max(before.lost, found.lost),
        broken=before.broken or found.broken,
        undecided=before.undecided + found.undecided,
    )
