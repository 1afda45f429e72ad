"""The reference under torch.compile: loops may be fused and reordered, no rounding may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch

from fp4deploy.formats import fake_quantize_mxfp4, fake_quantize_nvfp4
from tests.formats.hard_cases import hard_cases


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: fake_quantize_nvfp4(x, row_scaled=True)[0],
    "static": lambda x: fake_quantize_nvfp4(x, amax=3.0)[0],
    "mxfp4": lambda x: fake_quantize_mxfp4(x, scale_rule="ceil"),
}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch.compile on a CPU, g++, is missing")
@pytest.mark.parametrize("name", COMPILED)
def test_same_values_out_of_the_compiler(name: str) -> None:
    x = torch.cat(list(hard_cases().values()))
    expected = COMPILED[name](x)
    found = torch.compile(COMPILED[name], fullgraph=True)(x)
    assert torch.equal(found.nan_to_num(1), expected.nan_to_num(1))
