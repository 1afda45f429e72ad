"""scikit-learn's digits as folders of images, one a class, for the task `classification` of the command line.

    python examples/digits_folders.py digits
    fp4deploy sweep configs/sweep_digits.yaml --data digits --jobs 4

The split is that of `digits.py`: DIGITS/train has 1,347 images of 8 x 8 pixels, DIGITS/val the 450 of the test set.
"""

from __future__ import annotations

import sys
from pathlib import Path

from digits import split
from PIL import Image


def main(folder: Path) -> None:
    images, labels, *test = split()
    low = images.min()
    for part, pixels, classes in (("train", images, labels), ("val", *test)):
        grey = ((pixels - low) / (images.max() - low) * 255).round().clamp(0, 255).byte()
        for number, (image, label) in enumerate(zip(grey, classes.tolist(), strict=True)):
            path = folder / part / str(label) / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
