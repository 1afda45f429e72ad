"""What is gathered over batches depends on all of them, in whatever order they come."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.bench.detail import SegmentationDetail
from fp4deploy.metrics import SegmentationScore
from fp4deploy.ptq.activations import calibrate_activations
from fp4deploy.ptq.correction import correct
from fp4deploy.ptq.quantize import hessians_of
from fp4deploy.qat import prepare, quantized_layers
from fp4deploy.qat.ranges import Ranges, automatic_rest
from fp4deploy.rest import FP16

Batches = Sequence[torch.Tensor]
torch.manual_seed(0)
SMALL, TAILED = 0.1 * torch.randn(2, 16, 8, 8), torch.randn(2, 16, 8, 8).pow(5)  # most of the second lies near 0


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    return prepare(nn.Sequential(*layers), include=["0", "3"]).eval()


def amaxes(choice: str) -> Callable[[Batches], list[float]]:
    def of(batches: Batches) -> list[float]:
        model = network()
        calibrate_activations(model, batches, choice, 95.0)
        return [float(layer.input_amax) for layer in quantized_layers(model).values()]

    return of


def calibrated() -> nn.Module:
    model = network()
    fd.calibrate(model, [SMALL, TAILED])
    return model


def corrected(kind: str) -> Callable[[Batches], list[float]]:
    def of(batches: Batches) -> list[float]:
        model = calibrated()
        correct(model, fd.restore(copy.deepcopy(model)), list(batches), kind, lambda *_: None)
        return [value for each in model.parameters() if each.ndim == 1 for value in each.tolist()]

    return of


def largest(batches: Batches) -> list[float]:
    with Ranges(calibrated(), FP16) as ranges, torch.no_grad():
        for batch in batches:
            ranges.model(batch)
    return [*ranges.largest.values()]


def scored(kind: type[Any]) -> Callable[[Batches], list[float]]:
    def of(batches: Batches) -> list[float]:
        found = kind(3, "abc") if kind is SegmentationScore else kind("abc", True)
        for batch in batches:
            classes = batch[:, 0].abs().mul(9).long().clamp(max=2)
            found.update(batch[:, :3].argmax(1), classes)
        if kind is SegmentationScore:
            return found.matrix().flatten().tolist()
        counts = found.counts([str(at) for at in range(4)])
        return sorted(map(float, counts.predicted.sum(1))) + counts.hit.sum(0).tolist() + [found.boundary_f1() or 0.0]

    return of


GATHERED: dict[str, Callable[[Batches], list[float]]] = {
    **{choice: amaxes(choice) for choice in ("amax", "percentile", "mse")},
    **{f"correction {kind}": corrected(kind) for kind in ("bias", "norm")},
    "hessians": lambda batches: [float(each.double().norm()) for each in hessians_of(calibrated(), batches).values()],
    "ranges": largest,
    "rest": lambda batches: [automatic_rest(fd.restore(network()), [1e4 * each for each in batches]).largest],
    "score": scored(SegmentationScore),
    "detail": scored(SegmentationDetail),
}


@pytest.mark.parametrize("name", GATHERED)
def test_no_batch_is_forgotten(name: str) -> None:
    of = GATHERED[name]
    both = of([SMALL, TAILED])
    np.testing.assert_allclose(of([TAILED, SMALL]), both, rtol=1e-5)
    alone = [of([each]) for each in (SMALL, TAILED)]
    assert any(len(each) != len(both) or not np.allclose(each, both, rtol=1e-6) for each in alone)


def test_hessians_are_of_what_a_layer_multiplies() -> None:
    model = prepare(nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 4)), include="0").eval()
    x = torch.randn(40, 32)
    fd.calibrate(model, x)
    rows = model[0].quantized_input(x)
    assert not torch.equal(rows, x)
    torch.testing.assert_close(hessians_of(model, [x[:30], x[30:]])["0"], rows.T @ rows / 40)


def test_a_batch_is_whatever_maps_names_to_tensors() -> None:
    class Encoding(UserDict[str, torch.Tensor]):
        """As a tokenizer of transformers returns."""

    batch = Encoding(input=SMALL[:, :, 0, 0])
    for given in ([batch], [(batch,)]):
        model = prepare(nn.Sequential(nn.Linear(16, 16)), include=["0"]).eval()
        fd.quantize(model, given, method="gptq")
        assert float(quantized_layers(model)["0"].input_amax) > 0
