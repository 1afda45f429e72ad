"""What is measured: the error of each layer alone in FP4, and the mIoU of whole placements; kept line by line.

The record, `measured.jsonl`, begins with what the numbers depend on: checkpoint, images, method. A search that is given
the same again takes what is there and goes on; with anything else it refuses the folder.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4deploy.bench.detail import SegmentationDetail
from fp4deploy.bench.gate.bootstrap import value
from fp4deploy.errors import InputError
from fp4deploy.files import append_line
from fp4deploy.ptq import quantize
from fp4deploy.ptq.forward import autocast
from fp4deploy.qat.load import round_to_deployed
from fp4deploy.schema import read_lines

Labelled = Sequence[tuple[Tensor, Tensor]]  # batches of images [N, 3, H, W] and labels [N, H, W]


class Record:
    """Measured numbers by name, in a file that grows."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.values: dict[str, float] = {}
        lines = [line for _, line in read_lines(path)]
        if not lines:
            append_line(path, {"identity": identity})
            return
        if not isinstance(lines[0], dict) or lines[0].get("identity") != identity:
            raise InputError(
                f"{path} belongs to a search of another checkpoint, method or choice of images. Give another folder: "
                "--out DIR"
            )
        for line in lines[1:]:
            if isinstance(line, dict) and isinstance(line.get("value"), float) and isinstance(line.get("of"), str):
                self.values[line["of"]] = line["value"]

    def measure(self, of: str, work: Any) -> float:
        """The kept value, or what `work()` gives, which is kept."""
        if of not in self.values:
            self.values[of] = float(work())
            append_line(self.path, {"of": of, "value": self.values[of]})
        return self.values[of]


class Measurements:
    """A full-precision model and its quantised copies on a few images."""

    def __init__(
        self,
        model: nn.Module,
        calibration: Sequence[Tensor],
        labelled: Labelled,
        classes: Sequence[str],
        method: str,
        record: Record,
    ) -> None:
        self.model, self.calibration, self.labelled = model, calibration, labelled
        self.classes, self.method, self.record = tuple(classes), method, record
        self._logits: list[Tensor] | None = None

    def error(self, layer: str) -> float:
        """Squared error of the logits over their power, this layer alone in FP4."""
        return self.record.measure(f"error {layer}", lambda: self._error([layer]))

    def miou(self, layers: Iterable[str]) -> float:
        """mIoU with these layers in FP4; of the model itself where there are none."""
        names = sorted(layers)
        name = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] if names else "fp16"
        return self.record.measure(f"miou {name}", lambda: self._miou(names))

    def _quantized(self, names: Sequence[str]) -> nn.Module:
        found = copy.deepcopy(self.model)
        if names:
            quantize(found, self.calibration, self.method, include=tuple(names), correction="none")
            round_to_deployed(found)
        return found.eval()

    @torch.no_grad()
    def _error(self, names: Sequence[str]) -> float:
        if self._logits is None:
            self._logits = [self._run(self.model, images) for images, _ in self.labelled]
        changed = self._quantized(names)
        error = power = 0.0
        for (images, _), logits in zip(self.labelled, self._logits, strict=True):
            error += float((self._run(changed, images) - logits).double().square().sum())
            power += float(logits.double().square().sum())
        return error / power if power else 0.0

    @torch.no_grad()
    def _miou(self, names: Sequence[str]) -> float:
        model, detail = self._quantized(names), SegmentationDetail(self.classes)
        count = 0
        for images, labels in self.labelled:
            detail.update(self._run(model, images).argmax(1), labels)
            count += len(images)
        return value(detail.counts([str(number) for number in range(count)]))

    def _run(self, model: nn.Module, images: Tensor) -> Tensor:
        with autocast(images):
            logits: Tensor = model(images)
        return logits.float()
