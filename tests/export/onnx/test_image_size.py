"""One checkpoint, any image size: open height and width, and a size fixed afterwards."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.onnx.size import fix_size, has_open_size
from fp4deploy.export.verify.exported import verify
from fp4deploy.models import build_unet
from tests.export.exported_models import images, prepared
from tests.export.own_networks import DilatedBranches

SIZES = ((32, 48), (16, 16), (64, 32))


@cache
def open_sized(name: str) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    network = build_unet(4, 0.125) if name == "unet" else DilatedBranches()
    model = prepared(network, "nvfp4_qat", (3, *SIZES[0]))
    return model, export_graph(model, (3, *SIZES[0]), dynamic_size=True)


@pytest.mark.parametrize("name", ["unet", "ASPP"])
def test_an_open_file_computes_what_torch_computes_at_every_size(name: str) -> None:
    model, canonical = open_sized(name)
    onnx.checker.check_model(canonical, full_check=True)
    names = [size.dim_param or size.dim_value for size in canonical.graph.input[0].type.tensor_type.shape.dim]
    assert names == ["N", 3, "H", "W"]
    for size in SIZES:
        agreement = verify(model, canonical, images(2, (3, *size)))
        assert agreement.passed, (size, agreement)
        assert agreement.pixels == 2 * size[0] * size[1]


def test_a_fixed_size_gives_the_same_numbers_and_can_be_lowered() -> None:
    _, canonical = open_sized("unet")
    assert has_open_size(canonical)
    fixed = fix_size(canonical, (64, 32))
    assert not has_open_size(fixed)
    onnx.checker.check_model(fixed, full_check=True)
    image = {"image": images(1, (3, 64, 32)).numpy()}
    expected = portable_session(to_portable(canonical)).run(None, image)[0]
    got = portable_session(to_portable(fixed)).run(None, image)[0]
    assert np.mean(np.abs(got - expected) < 1e-4 * np.abs(expected).max()) > 0.9
    assert {layer.form for layer in lower(fixed, "gemm").layers if layer.requested == "FP4"} == {"gemm"}


def test_what_cannot_be_fixed_is_refused() -> None:
    _, canonical = open_sized("unet")
    with pytest.raises(InputError, match="does not take images of 20x32"):
        fix_size(canonical, (20, 32))
    with pytest.raises(InputError, match="is fixed"):
        fix_size(fix_size(canonical, (32, 32)), (64, 64))
    with pytest.raises(InputError, match="--size"):
        lower(canonical)
