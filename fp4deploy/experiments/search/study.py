"""What is measured: the error of each layer alone in a precision, and the score of whole placements; kept line by line.

The record, `measured.jsonl`, begins with what the numbers depend on: checkpoint, images, method. A search that is given
the same again takes what is there and goes on; with anything else it refuses the folder.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fp4deploy.bench.records import Record as Line
from fp4deploy.errors import InputError
from fp4deploy.experiments.search.choose import Option
from fp4deploy.metrics import LabelScore, SegmentationScore
from fp4deploy.precisions import LAYER_FORMATS
from fp4deploy.ptq import quantize
from fp4deploy.ptq.forward import deployed_in
from fp4deploy.qat.load import round_to_deployed
from fp4deploy.rest import FP16, Rest
from fp4deploy.system.files import append_line
from fp4deploy.system.schema import MAX_BYTES, Name, records, whole_lines

Labelled = Sequence[tuple[Tensor, Tensor]]  # batches of images [N, 3, H, W] and labels [N, H, W], of classifiers [N]


class Measured(Line):
    """One line of the record: an error (relative, squared) or a score."""

    of: Name
    value: Annotated[float, Field(strict=True, ge=0, le=1e30, allow_inf_nan=False)]


class Record:
    """Measured numbers by name, in a file that grows."""

    def __init__(self, path: Path, identity: dict[str, object]) -> None:
        self.path = path
        self.values: dict[str, float] = {}
        lines = list(whole_lines(path, MAX_BYTES))
        if not path.exists():
            append_line(path, {"identity": identity})
            return
        if not lines or not isinstance(lines[0], dict) or lines[0].get("identity") != identity:
            raise InputError(
                f"{path} belongs to a search of another checkpoint, method or choice of images. Give another folder: "
                "--out DIR"
            )
        self.values |= {kept.of: kept.value for kept in records(Measured, lines[1:])}

    def measure(self, of: str, work: Callable[[], float]) -> float:
        """The kept value, or what `work()` gives, which is kept.

        Raises:
            InputError: it is not finite: the model answers NaN or infinity.
        """
        if of not in self.values:
            measured = float(work())
            if not math.isfinite(measured):
                raise InputError(f"{of} is {measured}: the checkpoint answers NaN or infinity. Train it again.")
            self.values[of] = measured
            append_line(self.path, {"of": of, "value": measured})
        return self.values[of]


class Measurements:
    """A full-precision model and its quantised copies on a few images."""

    def __init__(
        self,
        model: nn.Module,
        calibration: Sequence[Tensor],
        labelled: Labelled,
        scorer: Callable[[], SegmentationScore | LabelScore],
        key: str,
        method: str,
        record: Record,
        rest: Rest = FP16,
    ) -> None:
        self.rest = rest
        self.model, self.calibration, self.labelled = model, calibration, labelled
        self.scorer, self.key, self.method, self.record = scorer, key, method, record
        self._logits: list[Tensor] | None = None

    def error(self, option: Option) -> float:
        """Squared error of the logits over their power, one layer alone in one precision."""
        layer, precision = option
        return self.record.measure(f"error {precision} {layer}", lambda: self._error([option]))

    def score(self, placement: Iterable[Option]) -> float:
        """mIoU or top-1 with these layers in their precisions; of the model itself where there are none."""
        options = sorted(placement)
        text = "\n".join(f"{precision} {layer}" for layer, precision in options)
        name = hashlib.sha256(text.encode()).hexdigest()[:16] if options else "fp16"
        return self.record.measure(f"{self.key} {name}", lambda: self._score(options))

    def _quantized(self, options: Sequence[Option]) -> nn.Module:
        found = copy.deepcopy(self.model)
        if options:
            names = tuple(layer for layer, _ in options)
            eight = {form: tuple(layer for layer, each in options if each == form.upper()) for form in LAYER_FORMATS}
            chosen: dict[str, Any] = {"include": names, **eight, "correction": "none"}
            with deployed_in(self.rest):
                quantize(found, self.calibration, self.method, **chosen, progress=lambda *_: None)
            round_to_deployed(found, self.rest)
        return found.eval()

    @torch.no_grad()
    def _error(self, options: Sequence[Option]) -> float:
        if self._logits is None:
            self._logits = [self._run(self.model, images) for images, _ in self.labelled]
        changed = self._quantized(options)
        error = power = 0.0
        for (images, _), logits in zip(self.labelled, self._logits, strict=True):
            error += float((self._run(changed, images) - logits).double().square().sum())
            power += float(logits.double().square().sum())
        return error / power if power else 0.0

    @torch.no_grad()
    def _score(self, options: Sequence[Option]) -> float:
        model, scorer = self._quantized(options), self.scorer()
        for images, labels in self.labelled:
            scorer.update(self._run(model, images).argmax(1), labels)
        return scorer.compute().score

    def _run(self, model: nn.Module, images: Tensor) -> Tensor:
        with self.rest.autocast(images.device.type):
            logits: Tensor = model(images)
        return logits.float()
