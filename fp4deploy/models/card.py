"""The model card: what a runtime must know to feed a model and to interpret its output.

It travels inside every artefact (safetensors metadata, ONNX metadata, engine ledger), so that a file on its own can be
evaluated without the run that made it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from fp4deploy.errors import InputError
from fp4deploy.models.heads import InstanceHead, head_from_json

CARD_KEY = "fp4deploy.card"


@dataclass(frozen=True)
class ModelCard:
    """Architecture, precision and input contract of one model.

    `height` and `width` are in pixels, `mean` and `std` in units of [0, 1] RGB; `background` says that class 0 stands
    for everything unlabelled (COCO layouts) rather than for a class of its own (semantic masks). `include` and
    `exclude` are the patterns that chose the quantised layers; None for the default choice. `task` is "semantic" or
    "instance", and `head` the layout of an instance model's channels. `digits`: the model
    encodes the image in several FP4 terms before its first layer (`models.input_encoding`); its input is the same.
    """

    precision: str
    scale: float
    class_names: tuple[str, ...]
    height: int
    width: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    background: bool
    recipe: str | None = None
    architecture: str = "unet"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    task: str = "semantic"
    head: InstanceHead | None = None
    digits: bool = False

    @property
    def channels(self) -> int:
        """Output channels of the model."""
        return self.head.channels if self.head else len(self.class_names)

    def to_json(self) -> str:
        """Serialise; `from_json` gives the same card back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelCard:
        """Parse what `to_json` wrote.

        Raises:
            InputError: the text is not a card.
        """
        try:
            fields = json.loads(text)
            for name in ("class_names", "mean", "std"):
                fields[name] = tuple(fields[name])
            for name in ("include", "exclude"):
                fields[name] = None if fields.get(name) is None else tuple(fields[name])
            if fields.get("head") is not None:
                fields["head"] = head_from_json(fields["head"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"The model card cannot be read ({error}); export the model again.") from error
