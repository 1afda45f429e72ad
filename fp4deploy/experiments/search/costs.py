"""What a layer costs in FP4, W4A8, FP8, INT8 and FP16: bytes of its weights, and its time, from one of two sources.

**The time model** (`timing.library`): a projection, not a measurement. FP4 tensor cores count only where the engine
multiplies in FP4 (`lowering.forecast`): in TensorRT-RTX's default form a 3x3 convolution of FP4 weights is multiplied
in FP8, and FP4 saves bytes in the file alone. W4A8 saves them as well and nothing else: no kernel of an engine
multiplies it, and its time is that of the decoded product in FP16.

**Layers measured** by `profile` in packed networks (`measured_layers`): the model packed in FP16, and quantised and
packed in FP4 and in other formats that a kernel of the GPU multiplies, each layer as the step that runs. A layer that
was not timed in a format is not put into it. Norms and poolings, which also write the packed activations, are the same
in every placement and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from fp4deploy.bench.records import Record
from fp4deploy.errors import InputError
from fp4deploy.export.lowering.forecast import forecast, forecast_other
from fp4deploy.graph.costs import Work, work_of_layers
from fp4deploy.peaks import Gpu
from fp4deploy.precisions import ELEMENT_BYTES, LAYER_FORMATS, PRECISIONS
from fp4deploy.qat.plan import crossed_groups
from fp4deploy.qat.recipes import RECIPES, QuantSpec
from fp4deploy.qat.telemetry.collect import contracted_axis
from fp4deploy.system.schema import Count, Float, Name, read_json, validated
from fp4deploy.timing.library import BYTES, library_time
from fp4deploy.timing.model import error_bar

PROJECTED = "projected: time model"
MEASURED = "measured: layers of packed networks"
MAX_MS = 1e9  # of one layer


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes of its weights, and milliseconds for one image, in each precision; no ms: not measured."""

    bytes: Mapping[str, float]
    ms: Mapping[str, float]

    def of(self, precision: str, kind: str) -> float:
        """Bytes or ms (`kind`) in "FP16" or one of `precisions`."""
        return (self.ms if kind == "ms" else self.bytes)[precision]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Of the quantised precisions those whose time is known."""
        return tuple(each for each in PRECISIONS if each in self.ms)

    @property
    def flat(self) -> dict[str, float | None]:
        """As fields "bytes_fp4" .. "ms_fp16"."""
        kinds: dict[str, Mapping[str, float]] = {"bytes": self.bytes, "ms": self.ms}
        names = (*PRECISIONS, "FP16")
        return {f"{kind}_{name.lower()}": given.get(name) for kind, given in kinds.items() for name in names}


class TimedLayer(Record):
    """What is needed of a row of `profile --json`."""

    layer: Name
    precision: Name
    ms: Annotated[Float, Field(ge=0, le=MAX_MS)]


class TimedNetwork(Record):
    """What is needed of one of its networks."""

    device: Name
    label: Name = ""  # of `estimate`: its times are no measurements
    batch: Annotated[Count, Field(ge=1)]
    layers: Annotated[list[TimedLayer], Field(max_length=100_000)]


class TimedNetworks(Record):
    """What is needed of the file."""

    layers: Annotated[list[TimedNetwork], Field(min_length=1, max_length=1000)]


def measured_layers(path: Path) -> tuple[dict[tuple[str, str], float], str]:
    """Milliseconds of each layer for one image in "FP16" and `PRECISIONS`, and the device, of `profile --json`.

    Raises:
        InputError: it is no such file, or its networks were timed on several devices.
    """
    advice = f"Write it with: fp4deploy profile --engine FP16.fp4 --engine NVFP4.fp4 --json {path}"
    networks = validated(TimedNetworks, read_json(path, advice), path, advice).layers
    if label := next((network.label for network in networks if network.label), ""):
        raise InputError(
            f"{path} holds {label} times, none that were measured. Without --measured, search estimates them."
        )
    devices = sorted({network.device for network in networks})
    if len(devices) > 1:
        raise InputError(f"{path} holds times of several devices: {', '.join(devices)}. {advice}")
    found: dict[tuple[str, str], float] = {}
    for network in networks:
        own: dict[tuple[str, str], float] = {}
        for row in network.layers:  # a layer that is used twice has two
            own_kernel = row.precision in PRECISIONS
            if not own_kernel and row.precision.startswith(tuple(name.upper() for name in LAYER_FORMATS)):
                continue  # decoded: no time of the format, and none of FP16
            decoded = "FP4" if row.precision.startswith("FP4") else "FP16"
            key = (row.layer, row.precision if own_kernel else decoded)
            own[key] = own.get(key, 0.0) + row.ms / network.batch
        found |= own
    return found, devices[0]


def with_measured(costs: Mapping[str, LayerCost], times: Mapping[tuple[str, str], float]) -> dict[str, LayerCost]:
    """The costs with measured times instead of projected ones.

    Raises:
        InputError: a layer was not measured in FP16, or none in FP4.
    """
    absent = [name for name in costs if (name, "FP16") not in times]
    if absent or not any((name, "FP4") in times for name in costs):
        what = f"{absent[0]} in FP16" if absent else "any layer in FP4"
        raise InputError(
            f"The times are not of {what}. Pack the FP16 model and the same model quantised, and measure both in one "
            "file: fp4deploy profile --engine FP16.fp4 --engine NVFP4.fp4 --json FILE"
        )
    return {
        name: replace(cost, ms={each: times[name, each] for each in (*PRECISIONS, "FP16") if (name, each) in times})
        for name, cost in costs.items()
    }


def projected() -> str:
    """What projected times are, with the error bar of the model."""
    return f"{PROJECTED}, {error_bar('library')}, and nobody knows for other GPUs and libraries"


def layer_costs(
    model: nn.Module, names: Mapping[str, nn.Module], image: torch.Tensor, gpu: Gpu, conv: str
) -> dict[str, LayerCost]:
    """Projected cost of each named layer for one image [1, C, H, W]; `conv` as of `fp4deploy build`."""
    work = work_of_layers(model, names, image[:1])
    return {name: _cost(names[name], each, gpu, conv) for name, each in work.items() if each.written}


def _cost(layer: nn.Module, work: Work, gpu: Gpu, conv: str) -> LayerCost:
    weight, axis = layer.weight, contracted_axis(layer)
    assert isinstance(weight, torch.Tensor)
    outputs = weight.shape[1 - axis]
    product = (work.written / outputs, outputs, work.macs / work.written)
    recipes = {"FP4": RECIPES["nvfp4_qat"]} | {name.upper(): RECIPES[f"{name}_qat"] for name in LAYER_FORMATS}
    stored = {each: _stored(weight, axis, recipe.weight) for each, recipe in recipes.items() if recipe.weight}
    stored["FP16"] = BYTES["FP16"] * weight.numel()

    def milliseconds(compute: str, weights: str) -> float:
        moved = stored[weights] + BYTES[compute] * work.read + BYTES["FP16"] * work.written
        return library_time(compute, *product, moved, gpu).ms

    compute = forecast(layer, conv).compute
    times = {"FP4": milliseconds("FP16" if compute == "FP4" and gpu.fp4 is None else compute, "FP4")}
    for each, recipe in recipes.items():
        if each != "FP4" and not crossed_groups(layer, recipe):
            other = forecast_other(layer, each)
            times[each] = milliseconds(other.compute, other.weights)
    return LayerCost(stored, times | {"FP16": milliseconds("FP16", "FP16")})


def _stored(weight: torch.Tensor, axis: int, spec: QuantSpec) -> float:
    """Bytes of a weight: whole blocks along the contracted axis, and the scales of blocks, of rows or of the tensor."""
    channels = weight.shape[axis]
    padded = channels + -channels % (1 if spec.in_eight_bits else spec.block_size)
    scales = 2 * weight.shape[1 - axis] if spec.row_scaled else 4 * (spec.format == "nvfp4")
    return ELEMENT_BYTES[spec.format] * (weight.numel() // channels * padded) + scales
