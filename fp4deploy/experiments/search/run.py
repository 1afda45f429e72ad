"""The search: errors of all layers, a frontier of placements with their score, and the choice under a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fp4deploy.data import VAL
from fp4deploy.data.sample import evenly
from fp4deploy.errors import InputError
from fp4deploy.experiments.search.choose import Option, Placement, least_cost, least_error
from fp4deploy.experiments.search.costs import (
    MEASURED,
    LayerCost,
    layer_costs,
    measured_layers,
    projected,
    with_measured,
)
from fp4deploy.experiments.search.study import Labelled, Measurements, Record
from fp4deploy.metrics import LabelScore, SegmentationScore
from fp4deploy.models import read_card
from fp4deploy.peaks import find_gpu
from fp4deploy.precisions import PRECISIONS
from fp4deploy.ptq.checkpoint import calibration_images
from fp4deploy.qat import layer_plan, load_model
from fp4deploy.rest import rest_of
from fp4deploy.runs import hold
from fp4deploy.system.files import file_digest
from fp4deploy.tasks import task_of

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase

KINDS = ("drop", "bytes", "ms")
POINTS = 10
Say = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """drop: points of mIoU or top-1 below FP16; bytes: of weights; ms: for one image."""

    kind: str
    most: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """ "drop=0.3", "bytes=5e6" or "ms=1.5".

        Raises:
            InputError: another form, or not a positive number.
        """
        kind, equals, number = text.partition("=")
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if kind not in KINDS or not equals or not (math.isfinite(most) and most >= 0):
            raise InputError(f"--budget is '{text}'. It takes drop=POINTS, bytes=COUNT or ms=MILLISECONDS.")
        return cls(kind, most)


@dataclass(frozen=True)
class Point:
    """A placement: layers of each of `PRECISIONS`, in that order, estimated error, cost, and its measured score."""

    placed: dict[str, tuple[str, ...]] = field(hash=False)
    error: float
    bytes: float
    ms: float
    score: float

    @property
    def quantized(self) -> tuple[str, ...]:
        """All layers that are not FP16."""
        return tuple(layer for layers in self.placed.values() for layer in layers)

    def counts(self, among: str = "") -> str:
        """ "3 layers in FP4, 0 in W4A8, 2 in FP8, 1 in INT8"; among: what stands behind the first number."""
        (first, four), *others = self.placed.items()
        rest = "".join(f", {len(layers)} in {precision}" for precision, layers in others)
        return f"{len(four)}{among} layers in {first}{rest}"


@dataclass(frozen=True)
class Found:
    """The result: `chosen` is one of `points` or lies between them; `fp16` is the model without FP4."""

    budget: Budget
    chosen: Point
    fp16: Point
    points: tuple[Point, ...]
    errors: dict[str, dict[str, float]]  # layer -> its precisions -> relative squared error of the logits
    costs: dict[str, LayerCost]
    gpu: str
    latency: str  # what the times are: `costs.projected` or `costs.MEASURED`
    method: str
    images: int
    metric: str  # of the task: "mIoU" or "top-1"

    @property
    def timed(self) -> str:
        """ "projected" or "measured"."""
        return self.latency.partition(":")[0]

    @property
    def drop(self) -> float:
        """Points of the score below FP16."""
        return 100 * (self.fp16.score - self.chosen.score)


def search(
    checkpoint: Path,
    data: Path,
    budget: Budget,
    out: Path,
    *,
    images: int = 32,
    batch: int = 4,
    method: str = "amax",
    arch: str = "sm120",
    conv: str = "auto",
    measured: Path | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
    progress: Phase = lambda phase, done, of: None,
) -> Found:
    """Choose the layers of an FP16 checkpoint that go to FP4, W4A8, FP8 and INT8.

    Args:
        images: of the training split to calibrate on, and of the validation split to measure on.
        method: of `ptq.METHODS`, how a layer is quantised while it is measured.
        arch, conv: GPU and form of convolutions of the projected time.
        measured: times of `profile --json` instead, see `costs`.
        say: gets a line for each layer and placement.
        progress: is called with the running phase, what is done of it, and all of it.

    Raises:
        InputError: not an FP16 checkpoint, no layer for FP4, a budget that no placement meets or that FP16 meets,
            times of other layers, a folder of another search, or one that another process uses.
    """
    gpu = find_gpu(arch)
    times, timed_on = measured_layers(measured) if measured is not None else (None, gpu.name)
    card = read_card(checkpoint)
    task = task_of(card)
    if card.precision != "fp16" or task.counts_objects:
        raise InputError(
            f"search takes the FP16 checkpoint of a semantic model or of a classifier, and {checkpoint} is another one."
        )
    classes = card.class_names
    scorer: Callable[[], LabelScore | SegmentationScore] = partial(SegmentationScore, len(classes), classes)
    if task.whole_images:
        scorer = partial(LabelScore, classes)
    with hold(out):
        model, _ = load_model(checkpoint, device)
        names = [plan.name for plan in layer_plan(model, include="*") if plan.precision == "FP4"]
        calibration = [each.to(device) for each in calibration_images(checkpoint, data, images, batch)]
        labelled = _labelled(checkpoint, data, images, batch, device)
        identity = {
            "checkpoint": file_digest(checkpoint),
            "data": _digest(labelled),
            "method": method,
            "images": images,
        }
        record = Record(out / "measured.jsonl", identity)
        rest = rest_of(card)
        measure = Measurements(model, calibration, labelled, scorer, task.key, method, record, rest)
        costs = layer_costs(model, {name: model.get_submodule(name) for name in names}, calibration[0], gpu, conv)
        costs = costs if times is None else with_measured(costs, times)
        errors: dict[Option, float] = {}
        for number, name in enumerate(names):
            progress("layers alone", number, len(names))
            for precision in costs[name].precisions:
                errors[name, precision] = measure.error((name, precision))
                say(f"  {name}: SQNR of the logits {sqnr(errors[name, precision]):.1f} dB in {precision}")
        fixed = _fixed_bytes(model, names)

        def point(placement: Placement) -> Point:
            chosen = dict(placement)
            parts = [(costs[name], chosen.get(name, "FP16")) for name in names]
            return Point(
                {each: tuple(name for name in names if chosen.get(name) == each) for each in PRECISIONS},
                sum(errors[option] for option in placement),
                fixed + sum(cost.of(precision, "bytes") for cost, precision in parts),
                sum(cost.of(precision, "ms") for cost, precision in parts),
                measure.score(placement),
            )

        fp16 = point(frozenset())
        saved = _saved(costs, "ms" if budget.kind == "ms" else "bytes")
        points = []
        placements = list(dict.fromkeys(least_cost(errors, saved, bound) for bound in _bounds(errors)))
        for number, placement in enumerate(placements):
            progress("placements", number, len(placements))
            points.append(point(placement))
            last = points[-1]
            say(f"  {last.counts()}: {task.metric} {100 * last.score:.2f} %, {last.bytes / 1e6:.2f} MB")
        chosen = _choose(budget, task.metric, fp16, points, errors, saved, point)
        by_layer = {name: {each: errors[name, each] for each in costs[name].precisions} for name in names}
        latency = projected() if times is None else MEASURED
        return Found(
            budget, chosen, fp16, tuple(points), by_layer, costs, timed_on, latency, method, images, task.metric
        )


def sqnr(error: float) -> float:
    """Decibels of a relative squared error."""
    return -10 * math.log10(error) if error > 0 else math.inf


def _choose(
    budget: Budget,
    metric: str,
    fp16: Point,
    points: Sequence[Point],
    errors: dict[Option, float],
    saved: dict[Option, float],
    point: Callable[[Placement], Point],
) -> Point:
    if budget.kind == "drop":
        fitting = [each for each in points if 100 * (fp16.score - each.score) <= budget.most and each.quantized]
        if not fitting:
            raise InputError(
                f"No placement of the frontier loses at most {budget.most:g} points of {metric}. Allow more, or "
                "quantise by a better method: --method gptq"
            )
        return min(fitting, key=lambda each: each.bytes)
    now = fp16.bytes if budget.kind == "bytes" else fp16.ms
    if now <= budget.most:
        raise InputError(
            f"FP16 needs {budget.kind}={now:g}, which the budget of {budget.most:g} allows: nothing has to be "
            "quantised. Give a smaller budget."
        )
    placement = least_error(errors, saved, now - budget.most)
    if placement is None:
        least = min(getattr(each, budget.kind) for each in points)
        raise InputError(f"No placement needs at most {budget.kind}={budget.most:g}; the least is {least:g}.")
    return point(placement)


def _bounds(errors: Mapping[Option, float]) -> list[float]:
    """Error bounds of the frontier: from the best layer alone to all layers in their worst precision."""
    worst: dict[str, float] = {}
    for (layer, _), error in errors.items():
        worst[layer] = max(worst.get(layer, 0.0), error)
    values = [min(errors.values()), *worst.values()]
    low, high = max(values[0], 1e-12), max(sum(values[1:]), 1e-12) * (1 + 1e-9)
    return [float(bound) for bound in np.geomspace(low, high, POINTS)]


def _saved(costs: dict[str, LayerCost], kind: str) -> dict[Option, float]:
    return {
        (name, precision): cost.of("FP16", kind) - cost.of(precision, kind)
        for name, cost in costs.items()
        for precision in cost.precisions
    }


def _fixed_bytes(model: nn.Module, names: Sequence[str]) -> float:
    """Parameters that are FP16 in every placement."""
    weights = {f"{name}.weight" for name in names}
    return 2.0 * sum(value.numel() for name, value in model.named_parameters() if name not in weights)


def _labelled(checkpoint: Path, data: Path, count: int, batch: int, device: str) -> Labelled:
    card = read_card(checkpoint)
    dataset = task_of(card).for_card(card, data, VAL)
    transform = task_of(card).transform(card.size, card.mean, card.std)
    samples = [transform(dataset.load(at)) for at in evenly(len(dataset), count)]
    parts = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    return [
        (torch.stack([x for x, _ in part]).to(device), torch.stack([torch.as_tensor(y) for _, y in part]))
        for part in parts
    ]


def _digest(labelled: Labelled) -> str:
    import hashlib

    found = hashlib.sha256()
    for images, labels in labelled:
        for tensor in (images.cpu(), labels.cpu()):
            found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
