"""Compiled networks on a GPU: against the same operators uncompiled, the choice, the second start."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import fp4deploy as fd
from fp4deploy.packed import PackedNetwork, capture, program
from fp4deploy.packed.capture import CapturedNetwork, Replay
from fp4deploy.packed.program import choice_key, compile_program
from fp4deploy.packed.writer import Writer
from fp4deploy.plugins.runtime import choices
from tests.export.packable_networks import NETWORKS, OWN_QUANTIZERS, deployed
from tests.packed.test_writer import dense, network, operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


OTHERS = {"operators": operators, "dense": dense}


@pytest.mark.parametrize("name", [*NETWORKS, *OWN_QUANTIZERS, *OTHERS])
def test_what_is_compiled_is_what_is_written(name: str) -> None:
    file, images = OTHERS[name]() if name in OTHERS else network(name)
    x = images.half().to(GPU)
    writer = Writer(file, GPU, torch.float16)
    with torch.no_grad():
        expected = writer.outputs(writer.tensors(), [x])
    compiled = compile_program(file, [x])
    for y, eager in zip(compiled(x), expected, strict=True):
        assert y.dtype == torch.float16
        assert y.shape == eager.shape
        # What lies between layers is rounded less often; FP4 amplifies that.
        assert (y.float() - eager.float()).norm() <= 0.25 * eager.float().norm()


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    file, images = network("FPN")
    x = images.to(GPU)
    captured = CapturedNetwork(PackedNetwork(file, GPU), compiled="auto")
    y = tree_leaves(captured(x))
    name = choice_key(file, [x], True)
    choice = choices.remembered(name, program.CHOICES)
    assert choice in program.CHOICES
    assert bool(captured.programs) == (choice == "program")
    monkeypatch.setattr(capture, "fastest", None)  # would be called again
    again = CapturedNetwork(PackedNetwork(file, GPU), compiled="auto")
    assert all(torch.equal(*pair) for pair in zip(tree_leaves(again(x)), y, strict=True))
    assert captured.replays
    assert again.replays


def test_a_program_is_captured_and_owns_what_it_reads() -> None:
    file, images = network("SegFormer block")
    captured = CapturedNetwork(PackedNetwork(file, GPU), compiled="on")
    run = captured.prepared(images)
    assert isinstance(run, Replay)
    (expected,) = tree_map(torch.clone, tree_leaves(run()))
    assert captured.weights_bytes > PackedNetwork(file, GPU).weights_bytes
    del captured
    torch.cuda.empty_cache()
    held = [torch.full((1 << 22,), 9.0, device=GPU) for _ in range(8)]
    assert torch.equal(tree_leaves(run())[0], expected)
    del held


def test_compile_of_a_module() -> None:
    factory, size = NETWORKS["ASPP"]
    x = torch.randn(1, 3, *size)
    model = deployed(factory(), x).to(GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a size that is fixed
        outputs = fd.compile(model, x.to(GPU))(x.to(GPU))
    assert set(outputs) == {"out", "aux"}  # type: ignore[arg-type]
    assert all(y.is_cuda and y.isfinite().all() for y in outputs.values())  # type: ignore[union-attr]
