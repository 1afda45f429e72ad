"""Whatever looks at a network leaves it as it was: in its mode, with its numbers, and without gradients.

The network is in training mode and has all that depends on it: dropout, the running statistics of a BatchNorm, and
another BatchNorm that is frozen, in evaluation mode for good.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.experiments.search.study import Measurements, Record
from fp4deploy.graph.costs import work_of_layers
from fp4deploy.graph.randomness import refuse_random
from fp4deploy.metrics import SegmentationScore
from fp4deploy.ptq import quantize
from fp4deploy.qat import calibrate, layer_plan, quantized_layers
from fp4deploy.qat.calibration import calibrate_percentile
from fp4deploy.qat.ranges import automatic_rest
from fp4deploy.qat.telemetry.collect import Watcher
from tests.modes import LOOKS, modes

IMAGES = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def network(prepared: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.Dropout(0.5))
    model = nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1))
    if prepared:
        fd.prepare(model, include="4")
        for layer in quantized_layers(model).values():
            layer.input_amax.fill_(3.0)
    model.train()[1].eval()  # type: ignore[index]
    return model


def search(model: nn.Module, out: Path) -> None:
    labels = torch.zeros(2, 16, 16, dtype=torch.int64)
    plain = network(prepared=False).eval()  # as `load_model` gives it
    record, labelled = Record(out / "measured.jsonl", {}), [(each, labels) for each in IMAGES]
    found = Measurements(plain, IMAGES, labelled, lambda: SegmentationScore(4, "abcd"), "miou", "amax", record)
    found.error(("4", "FP4"))
    found.score([("4", "FP8")])


LOOKING: dict[str, Callable[[nn.Module, Path], object]] = {
    "calibrate": lambda model, _: calibrate(model, IMAGES),
    "percentile": lambda model, _: calibrate_percentile(model, IMAGES, 99.0),
    "telemetry": lambda model, _: Watcher(model).probe(IMAGES[0]),
    "plan": lambda model, _: layer_plan(model, example_inputs=IMAGES[0]),
    "ranges": lambda model, _: automatic_rest(model, IMAGES),
    "random": lambda model, _: refuse_random(network(prepared=False), [IMAGES[0]], {}),
    "work": lambda model, _: work_of_layers(model, {"4": model[4]}, IMAGES[0]),  # type: ignore[index]
    "pack": lambda model, out: fd.pack(model, out / "a.fp4", example_inputs=IMAGES[0]),
    "onnx": lambda model, out: fd.export_onnx(model, IMAGES[0], out / "a.onnx"),
    "verify": lambda model, _: fd.verify(model, fd.export_graph(model, IMAGES[0]), IMAGES),
    "compile": lambda model, _: fd.compile(model, IMAGES[0])(IMAGES[0]),
    "search": search,
    **{
        f"quantize {method}": lambda model, _, method=method: quantize(model, IMAGES, method, iterations=2, include="4")
        for method in ("amax", "mse", "gptq", "adaround")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKING)
def test_what_looks_at_a_network_leaves_it_as_it_was(name: str, tmp_path: Path) -> None:
    model = network(prepared=not name.startswith("quantize"))
    states = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {key: module.training for key, module in model.named_modules()}
    with modes() as seen:
        LOOKING[name](model, tmp_path)
    assert seen <= {LOOKS} or name.endswith("adaround"), "gradients are those of its roundings"
    assert {key: module.training for key, module in model.named_modules()} == trained
    may = "4." if name.startswith("quantize") else "4.input_amax" if name in ("calibrate", "percentile") else None
    for key, value in model.state_dict().items():
        assert torch.equal(value, states.get(key, torch.empty(0))) or (may and key.startswith(may)), key
    assert all(each.grad is None and each.requires_grad for each in model.parameters())
