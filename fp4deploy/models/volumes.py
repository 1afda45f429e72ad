"""What a network of three spatial axes reads: the axes, spacing and intensities of its volumes.

The number of spatial axes is a fact of the data. A card without `VolumeInput` is of images, [N, 3, H, W] of RGB; with
it of volumes, [N, C, D, H, W], whose axes are anatomical whatever the file's order is (RAS+, reversed):

    depth   inferior to superior          height   posterior to anterior          width   left to right

Intensities of a channel: clipped to [low, high] where these are given (CT), then (x - mean) / std with the mean and
standard deviation given, or with those of the volume itself (MRI, whose units are the scanner's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from fp4deploy.system.schema import Count, Float, Name

MAX_PIXELS = 16_384  # of a side
MAX_CHANNELS = 64
VOLUME = 3  # spatial axes
Size = tuple[int, ...]  # of the spatial axes: (H, W) or (D, H, W)

Side = Annotated[Count, Field(ge=1, le=MAX_PIXELS)]
Millimetres = Annotated[Float, Field(gt=1e-4, lt=1e4)]
Level = Annotated[Float, Field(ge=-1e9, le=1e9)]


@dataclass(frozen=True)
class Intensity:
    """How the values of one channel are normalised; None: of each volume itself, or not clipped."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    low: Level | None = None
    high: Level | None = None
    mean: Level | None = None
    std: Annotated[Float, Field(gt=0, le=1e9)] | None = None


@dataclass(frozen=True)
class VolumeInput:
    """Input contract of volumes.

    depth: voxels of the network's input along the first axis; the card has height and width.
    spacing: millimetres between the centres of voxels along depth, height and width, to which volumes are resampled.
    channels: names, in the order of the network's channels. intensities: one for each.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    depth: Side
    spacing: tuple[Millimetres, Millimetres, Millimetres]
    channels: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_CHANNELS)]
    intensities: Annotated[tuple[Intensity, ...], Field(min_length=1, max_length=MAX_CHANNELS)]


@dataclass(frozen=True)
class NetworkInput:
    """What a network is built for. channels; size: of the spatial axes; spacing: millimetres along them, of volumes."""

    channels: int = 3
    size: Size = (16, 16)
    spacing: tuple[float, ...] | None = None

    @property
    def axes(self) -> int:
        """Number of spatial axes."""
        return len(self.size)


IMAGES = NetworkInput()  # RGB


def poolings(inputs: NetworkInput, levels: int) -> list[tuple[int, ...]]:
    """Strides (1 or 2 along each axis) of the poolings between the levels of a UNet.

    An axis is halved where it is even and keeps 4 voxels, and where its spacing is less than twice that of the finest
    axis: thick slices are joined when the other axes have become as coarse. Images are halved along both axes each
    time, whatever their size: it is checked where the size is chosen.

    >>> poolings(NetworkInput(1, (16, 64, 64), (4.0, 1.0, 1.0)), 3)
    [(1, 2, 2), (1, 2, 2), (2, 2, 2)]
    """
    if inputs.spacing is None:
        return [(2,) * inputs.axes] * levels
    sides, steps, found = list(inputs.size), list(inputs.spacing), []
    for _ in range(levels):
        even = [side % 2 == 0 and side >= 8 for side in sides]
        finest = min((step for step, open_axis in zip(steps, even, strict=True) if open_axis), default=0.0)
        stride = tuple(2 if open_axis and step < 2 * finest else 1 for step, open_axis in zip(steps, even, strict=True))
        sides = [side // each for side, each in zip(sides, stride, strict=True)]
        steps = [step * each for step, each in zip(steps, stride, strict=True)]
        found.append(stride)
    return found
