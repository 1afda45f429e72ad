"""`--conv gemm` on networks whose FP4 convolutions follow each other: the numbers of the canonical graph, in ORT."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.verify.exported import verify
from fp4deploy.qat import layer_plan
from tests.export.exported_models import images, prepared
from tests.export.own_networks import NETWORKS, SHAPE, random_norms
from tests.samples import sample


@cache
def exported(name: str) -> tuple[nn.Module, onnx.ModelProto]:
    """A prepared and calibrated network and its canonical graph."""
    torch.manual_seed(0)
    model = prepared(random_norms(NETWORKS[name]()), "nvfp4_qat", SHAPE)
    return model, export_graph(model, SHAPE)


def run(model: onnx.ModelProto) -> np.ndarray:
    return portable_session(to_portable(model)).run(None, {"image": images(2, SHAPE).numpy()})[0]


@pytest.mark.parametrize("name", sample(NETWORKS, every=2))
def test_gemms_give_the_numbers_of_the_convolutions(name: str) -> None:
    _, canonical = exported(name)
    found = lower(canonical, "gemm")
    fp4 = [layer for layer in found.layers if layer.requested == "FP4"]
    assert len(fp4) > 3
    assert {layer.form for layer in fp4} == {"gemm"}
    lowered = found.model
    lowered.functions.extend(canonical.functions)  # what the engine's quantiser means
    expected, got = run(canonical), run(lowered)
    scale = np.abs(expected).max()
    assert scale > 0.01
    # FP4 turns a last bit of a sum into a whole step now and then; a wrong lowering changes every number
    assert np.mean(np.abs(got - expected) < 1e-5 * scale) > 0.9
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("conv", ["auto", "gemm", "qdq"])
def test_layers_in_groups_are_lowered_and_say_what_they_are(conv: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=2), nn.Conv2d(32, 64, 1, groups=2)]
    model = prepared(
        nn.Sequential(*layers, nn.ConvTranspose2d(64, 32, 2, 2, groups=2), nn.Conv2d(32, 5, 1)),
        "nvfp4_qat",
        SHAPE,
    )
    canonical = export_graph(model, SHAPE)
    found = lower(canonical, conv, "tensorrt")  # global scales as they are, for ONNX Runtime
    plans = {layer.name: layer for layer in found.layers}
    assert [plans[name].compute for name in "123"] == ["FP16"] * 3
    assert [plans[name].weights for name in "123"] == ["FP4", "FP16", "FP4"]
    assert plans["2"].reason.endswith("not a single GEMM: decoded")
    lowered = found.model
    lowered.functions.extend(canonical.functions)
    expected, got = run(canonical), run(lowered)
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_canonical_graph_computes_what_torch_computes(name: str) -> None:
    model, canonical = exported(name)
    agreement = verify(model, canonical, images(4, SHAPE))
    assert agreement.passed, agreement


def test_inspect_lists_the_layers_that_check_plans() -> None:
    model, canonical = exported("conv-conv")
    planned = {layer.name: (layer.kind, layer.precision) for layer in layer_plan(model)}
    listed = {layer.name: (layer.kind, layer.precision) for layer in layers_of(canonical)}
    assert listed == planned
    assert listed["norm"] == ("BatchNorm2d", "FP16")


def test_a_model_is_verified_with_its_weights_as_deployed() -> None:
    model, canonical = exported("conv-conv")
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.startswith(("stem", "norm", "head")):  # weights that FP16 has to round
                parameter.mul_(1 + 2.0**-13)
    assert not torch.equal(trained.stem.weight, trained.stem.weight.half().float())
    assert verify(trained, export_graph(trained, SHAPE), images(4, SHAPE)).passed
    with torch.no_grad():
        trained.head.bias[0] += 1
    assert not verify(trained, canonical, images(4, SHAPE)).passed


@pytest.mark.parametrize("name", NETWORKS)
def test_plugins_read_activations_that_others_replaced(name: str) -> None:
    _, canonical = exported(name)
    found = lower(canonical, "plugin", "tensorrt")
    onnx.checker.check_model(found.model)
    assert {layer.form for layer in found.layers if layer.requested == "FP4"} == {"plugin"}
