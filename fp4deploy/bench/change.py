"""What quantising changed, against the network it was made of, on images that calibration did not see.

That a file equals the quantised module says nothing about the module. Here the source and what was made of it run on
the same images: how many pixels keep their class, and the score before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy.bench.evaluate import Progress, evaluate_task
from fp4deploy.bench.runtimes.like import read_like
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.bench.runtimes.protocol import Array, Runtime
from fp4deploy.data import VAL
from fp4deploy.errors import counted
from fp4deploy.tasks import task_of


@dataclass(frozen=True)
class Change:
    """unchanged: share of the pixels, of a classifier of the images (`unit`), whose class is the source's; None of
    models that find objects.

    before, after: the score of source and result, named by `metric`; None where no label has a class.
    """

    images: int
    unchanged: float | None
    metric: str
    before: float | None
    after: float | None
    unit: str = "pixels"

    def sentence(self, source: str) -> str:
        """In words."""
        parts = []
        if self.unchanged is not None:
            parts.append(f"class unchanged against {source} on {100 * self.unchanged:.2f} % of the {self.unit}")
        if self.before is not None and self.after is not None:
            change = 100 * (self.after - self.before)
            parts.append(f"{self.metric} {100 * self.after:.2f}, {source}'s {100 * self.before:.2f} ({change:+.2f})")
        return f"{'; '.join(parts) or 'nothing to compare'}; {counted(self.images, 'image')}."


def measure_change(source: Path, made: Path, data: Path, limit: int, progress: Progress | None = None) -> Change:
    """`compare` of two artefacts; an ONNX file of another tool is scored as the one that was made of it."""
    like = read_like(made) if source.suffix == ".onnx" else None
    return compare(open_for_images(source, like=like), open_for_images(made), data, limit, progress)


def compare(
    source: Runtime, made: Runtime, data: Path, limit: int, progress: Progress | None = None, split: str = VAL
) -> Change:
    """Compare a model with what it was made of, on so many images of a split, evenly spaced.

    Raises:
        InputError: the data does not fit the models, or cannot be read.
    """
    recorded: list[_Recorded] = []
    scores: list[float | None] = []
    for number, each in enumerate((source, made)):
        runtime = _Recorded(each)

        def tell(done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + done, 2 * total)

        found = evaluate_task(runtime, data, progress=tell, split=split, limit=limit, labelled=False)
        task = task_of(runtime.card)
        score = getattr(found.scores, task.key)
        scores.append(float(score) if np.isfinite(score) else None)
        recorded.append(runtime)
    task = task_of(source.card)
    one, other = recorded
    pairs = [] if task.counts_objects else list(zip(one.classes, other.classes, strict=True))
    same = sum(int((before == after).sum()) for before, after in pairs)
    pixels = sum(before.size for before, _ in pairs)
    unit = "images" if task.whole_images else "pixels"
    return Change(one.images, same / pixels if pixels else None, task.metric, scores[0], scores[1], unit)


class _Recorded:
    """A runtime, how many images it saw, and the class of each pixel that it gave."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.images = runtime, 0
        self.classes: list[NDArray[np.int64]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def infer(self, images: Array) -> Array:
        logits = self.runtime.infer(images)
        self.images += len(images)
        self.classes.append(logits.argmax(1))
        return logits
