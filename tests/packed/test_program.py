"""Compiled networks: which are compiled, what is chosen and remembered, what a failure leaves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.models import build_unet
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, program, program_cache
from fp4deploy.packed.producers import plan
from fp4deploy.packed.program import choice_key, compile_mode, compile_program, left_to_torch, trace
from fp4deploy.packed.program_cache import keep_program, program_key, read_program
from fp4deploy.packed.writer import Writer
from fp4deploy.qat import calibrate, prepare
from tests.export.packable_networks import NETWORKS, OWN_QUANTIZERS
from tests.packed.test_writer import CPU, network, packed
from tests.samples import sample


def test_what_the_variable_may_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP4DEPLOY_COMPILE", raising=False)
    assert compile_mode() == "auto"
    for value in ("auto", "on", "off"):
        monkeypatch.setenv("FP4DEPLOY_COMPILE", value)
        assert compile_mode() == value
    monkeypatch.setenv("FP4DEPLOY_COMPILE", "yes")
    with pytest.raises(InputError, match="Valid: auto"):
        compile_mode()


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_networks_of_kernels_are_not_compiled(name: str) -> None:
    assert left_to_torch(plan(network("INT8")[0].graph)[1])  # no kernel multiplies its codes
    covered = name.startswith("InstanceNorm UNet")  # the others resize, average, attend, or concatenate parts of blocks
    assert left_to_torch(plan(network(name)[0].graph)[1]) != covered


def test_our_unet_is_not_compiled() -> None:
    x = torch.zeros(1, 3, 32, 32)
    assert not left_to_torch(plan(packed(build_unet(4, 0.25), x).graph)[1])


def test_a_choice_is_of_a_network_a_size_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("NVIDIA H200", "NVIDIA H200", "NVIDIA H100"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names, "NVIDIA H200"))
    file, x = network("FPN")
    one = choice_key(file, [x], True)
    assert one == choice_key(file, [x], True)
    assert one != choice_key(file, [x], True)  # another GPU
    assert one != choice_key(file, [x[:1]], True)
    assert one != choice_key(file, [x], False)  # launched one by one
    assert one != choice_key(network("ASPP")[0], [x], True)


def test_a_choice_is_of_a_width_and_not_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    x = torch.randn(1, 3, 8, 8)

    def named(width: int) -> str:
        layers = nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.Conv2d(width, 4, 1)
        return choice_key(packed(nn.Sequential(*layers), x), [x], True)

    assert named(16) == named(16)
    assert named(16) != named(32)


def test_parts_of_blocks_are_not_compiled_for_a_cpu() -> None:
    x = torch.randn(1, 3, 8, 8)
    file = packed(nn.Sequential(nn.Conv2d(3, 24, 3), nn.Conv2d(24, 16, 3), nn.Conv2d(16, 4, 1)), x)
    with pytest.raises(UnavailableError, match="compiled for GPUs alone"):
        compile_program(file, [x])


def test_what_the_compiler_cannot_do_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(torch._inductor, "standalone_compile", fail)
    file, x = network("FPN")
    with pytest.raises(UnavailableError, match="was not compiled.*no C compiler"):
        compile_program(file, [x])


def test_a_program_is_of_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    file, x = network("FPN")
    names = [
        program_key(network("ASPP")[0], [x], torch.float32),
        program_key(file, [x[:1]], torch.float32),
        program_key(file, [x.contiguous(memory_format=torch.channels_last)], torch.float32),
        program_key(file, [x.half()], torch.float32),
        program_key(file, [x], torch.float16),
        program_key(file, [x.to("meta")], torch.float32),
    ]
    first = program_key(file, [x], torch.float32)
    for function in ("versions", "_source"):
        with monkeypatch.context() as patch:
            patch.setattr(program_cache, function, lambda: "another")
            names.append(program_key(file, [x], torch.float32))
    assert len({first, *names}) == 1 + len(names)
    assert first == program_key(file, [x.clone()], torch.float32)


def test_a_program_is_kept_with_the_tensors_that_were_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The entry of one file is not read for another, nor once it is damaged."""
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))

    class Compiled:
        def save(self, path: str, format: str) -> None:
            Path(path).write_bytes(b"code")

    file, x = network("FPN")
    writer = Writer(file, CPU, torch.float32)
    _, tensors, keys = trace(writer, [x])
    assert None in keys
    assert len(set(keys)) > 2
    name = program_key(file, [x], torch.float32)
    keep_program(name, Compiled(), keys, tensors)
    kind = importlib.import_module("torch._inductor.standalone_compile").CompiledArtifact
    monkeypatch.setattr(kind, "load", lambda *, path, format: Path(path).read_bytes())
    code, taken = read_program(name, writer.tensors(), CPU) or (b"", [])
    assert code == b"code"
    assert all(torch.equal(*pair) for pair in zip(taken, tensors, strict=True))
    entry = tmp_path / "programs" / f"{name}.tensors"
    entry.write_bytes(entry.read_bytes()[:-1])
    assert read_program(name, writer.tensors(), CPU) is None


def whole_blocks(name: str) -> tuple[PackedFile, torch.Tensor]:
    """Layers that quantise what they read, of channels that are whole blocks."""
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 4, 1))
    model = prepare(model, "w4a8_qat" if name == "W4A8" else f"{name.lower()}_qat", include="2")
    calibrate(model, [x])
    return packed_file(Path("own.fp4"), None, *pack_model(model.eval(), x, dynamic_size=False)), x


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["FPN", "SegFormer block", "W4A8", "INT8"])
def test_compiled_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And once more, from what was kept: nothing is traced."""
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    file, x = whole_blocks(name) if name in OWN_QUANTIZERS else network(name)
    compiled = compile_program(file, [x])
    assert compiled.weights_bytes > 0
    outputs = compiled(x)
    for y, expected in zip(outputs, tree_leaves(PackedNetwork(file)(x)), strict=True):
        assert (y - expected).norm() <= 1e-6 * expected.norm()
    monkeypatch.setattr(program, "trace", None)
    assert all(torch.equal(*pair) for pair in zip(compile_program(file, [x])(x), outputs, strict=True))
