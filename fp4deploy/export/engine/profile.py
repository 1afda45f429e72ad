"""Optimisation profiles: the smallest, most frequent and largest batch and image size that an engine takes."""

from __future__ import annotations

from dataclasses import dataclass

from fp4deploy.errors import InputError

Range = tuple[int, int, int]
Sizes = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
WHICH = ("min", "opt", "max")


@dataclass(frozen=True)
class Profile:
    """`batch` as (min, opt, max); `sizes` as three (height, width), None where the image size is fixed.

    Raises:
        InputError: not 1 <= min <= opt <= max, in the batch, the height or the width.
    """

    batch: Range = (1, 1, 8)
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        ranges = {"batch": self.batch}
        if self.sizes is not None:
            heights, widths = zip(*self.sizes, strict=True)
            ranges |= {"height": heights, "width": widths}
        for name, (least, usual, most) in ranges.items():
            if not 1 <= least <= usual <= most:
                options = ", ".join(f"--{which}-{'batch' if name == 'batch' else 'size'}" for which in WHICH)
                raise InputError(
                    f"The {name} range {(least, usual, most)} is not 1 <= min <= opt <= max. Give these in ascending "
                    f"order: {options}."
                )

    def shapes(self, shape: list[int], name: str) -> list[list[int]]:
        """The three shapes of an input whose open extents are -1: the batch first, then height and width.

        Raises:
            InputError: more extents are open than the profile has.
        """
        place = [index for index, extent in enumerate(shape) if extent == -1]
        rest = [index for index in place if index]
        if rest and (self.sizes is None or len(rest) != 2):
            raise InputError(
                f"Input '{name}' has shape {shape}: height and width must be fixed, only the batch may vary. Give "
                "--size HxW, or a range with --min-size, --opt-size and --max-size."
            )
        found = []
        for which in range(3):
            extents = list(shape)
            if 0 in place:
                extents[0] = self.batch[which]
            for index, size in zip(rest, self.sizes[which] if self.sizes else (), strict=True):
                extents[index] = size
            found.append(extents)
        return found
