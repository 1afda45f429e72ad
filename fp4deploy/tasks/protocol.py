"""What every stage asks of a task: labels, images to score on, scores. No stage compares the name of a task.

| stage | asks for |
|---|---|
| train | `unused`: settings of other tasks; `open`: the splits; `evaluation`: what selects the best checkpoint |
| export | `head.agreeing` of the model card (`models.heads`): when two outputs mean the same |
| bench, search, sweep | `for_card`, `transform`, `evaluation`, `counts_objects` |
| predict, serving | `counts_objects`; `untiled`: why an image cannot be cut |
| report | `key`, `metric`, `per_class`, `hub`: names of the scores and of the task; `at_input_size` |
| data check | `boxes`: labels that are enough |
| all that look at pixels | `whole_images`: there are none in outputs and labels |

What a stage has of its own for each task is a table by its name there: losses and heads in `train.tasks`, pictures in
`report.figures.task_pictures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, VAL, SegmentationDataset
from fp4deploy.data.augmentation.transforms import Rgb, Transform
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import Size

Gather = Callable[..., Any]


def readable(outputs: Tensor) -> Tensor:
    """What an evaluation takes: BF16, which numpy does not have, as FP32; any other type as it is."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


class TaskScores(Protocol):
    """Scores of one validation."""

    @property
    def score(self) -> float:
        """The number that selects the best checkpoint: the larger, the better."""
        ...

    @property
    def per_class(self) -> dict[str, float | None]:
        """Score of each class; None where nothing of it is there to be found."""
        ...

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        ...

    def text(self) -> str:
        """For a person."""
        ...

    def to_json(self) -> dict[str, Any]:
        """For `bench --json`; NaN becomes None."""
        ...


class Evaluation(Protocol):
    """Collects the outputs of one validation.

    matches: keep which detection found which object; without, AP comes sooner where faster-coco-eval is installed.
    """

    matches: bool

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather | None = None) -> None:
        """Add a batch: outputs [N, channels, ...], labels as the validation's transform gives them.

        gather: joins what several processes have; None where there is one.
        """
        ...

    def compute(self) -> TaskScores:
        """Scores of everything seen so far."""
        ...

    def details(self) -> dict[str, object]:
        """What bench keeps beside the scores of everything seen so far."""
        ...


class Task(Protocol):
    """One task.

    name: in settings and model cards. key: of its score in files. metric, per_class: titles of its score and of a
    class's. hub: what the Hugging Face hub calls it. counts_objects: its output is a list of objects, scored by COCO's
    AP. at_input_size: scores are of pixels at the size of the network's input. boxes: annotations need no masks.
    whole_images: labels are of images and outputs [N, classes], without pixels. unused: settings that it has no use
    for, as "section.name", and why.
    """

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def per_class(self) -> str: ...
    @property
    def hub(self) -> str: ...
    @property
    def counts_objects(self) -> bool: ...
    @property
    def at_input_size(self) -> bool: ...
    @property
    def boxes(self) -> bool: ...
    @property
    def whole_images(self) -> bool: ...
    @property
    def unused(self) -> Mapping[str, str]: ...
    def transform(self, size: Size, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, whole: bool = False) -> Transform:
        """Sample -> input of a network of this size, and its labels or index.

        whole: as it is scored, with what `evaluation` takes: of a volume all of it, of any size (`volumes.applied`).
        """
        ...

    def augmentation(self, size: Size, seed: int, **options: Any) -> Transform:
        """Sample -> input and labels of a training; options as of the transform of the data's kind."""
        ...

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """Open a split; `labelled`: to train on.

        Raises:
            InputError: the data cannot be read, or does not serve the task.
        """
        ...

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """Open a split with the classes that a model knows.

        Raises:
            InputError: the data lacks one of them, or does not serve the task.
        """
        ...

    def untiled(self, card: ModelCard) -> str | None:
        """Why the outputs of an image's tiles cannot be joined, as a sentence; None where they can be."""
        ...

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, object] | None = None
    ) -> Evaluation:
        """Scores of a model on a split; `ground_truth` of the split where it is known already."""
        ...

    def ground_truth(self, dataset: SegmentationDataset) -> dict[str, Any] | None:
        """What `evaluation` scores against, where that is made once for many validations."""
        ...
