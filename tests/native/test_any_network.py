"""Networks of any nodes in the C library: kernels that Inductor generates, executed by the PTX emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.native_calls import Library
from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.native import Gpu, bundle, record
from fp4deploy.native.bundle import Code, write_bundle
from fp4deploy.native.program import UNKNOWN, _Program
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, write_packed
from fp4deploy.plugins.aot.compile import compile_launch, signature
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.rest import rest_of
from tests.export.packable_networks import OWN_QUANTIZERS
from tests.native import builds, emulated
from tests.native.replay import play
from tests.packed.test_writer import network, written
from tests.plugins.aot.minimal_cubin import minimal_cubin

pytest.importorskip("triton")
SM120 = Gpu(Architecture(12, 0), "", 170)


class Small(nn.Module):
    """A strided convolution, a table that a second input looks up, a softmax and a bilinear resize."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.table = nn.Conv2d(3, 5, 3, 2, 1), nn.Embedding(7, 5)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        y = self.stem(x) + self.table(kind)[:, :, None, None]
        return F.interpolate(torch.softmax(y, 1), scale_factor=2.0, mode="bilinear")


def packed(path: Path, rest: str) -> tuple[PackedFile, list[torch.Tensor]]:
    torch.manual_seed(0)
    inputs = (torch.randn(1, 3, 8, 8), torch.tensor([4]))
    graph, tensors = pack_model(Small().eval(), inputs, dynamic_size=False, rest=rest_of(rest))
    file = packed_file(path, None, graph, tensors)
    write_packed(file)
    return file, list(inputs)


@pytest.mark.emulate
@pytest.mark.skipif(builds.compiler() is None, reason="no C++ compiler")
def test_the_c_library_gives_the_bytes_of_python(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, inputs = packed(tmp_path / "small.fp4", "fp32")
    whole = record(file, SM120, *(tuple(x.shape) for x in inputs))
    plan = dataclasses.replace(whole, stages=whole.stages | {"input.float16": (), "output.float16": ()})
    kernels = list(dict.fromkeys(each.kernel for stage in plan.stages.values() for each in stage))
    assert all(isinstance(each, Launch) for each in kernels)
    expected = play(plan, file, inputs, emulated.launch)[0]
    reference = PackedNetwork(file)(*inputs)
    assert (expected - reference).norm() <= 1e-5 * reference.norm()

    def code(number: int, kernel: Launch) -> Code:
        """Names tell kernels apart; the recording driver reads no machine code."""
        found = compile_launch(kernel, "sm_120")
        cubin = minimal_cubin(f"kernel_{number}", 120, found.num_warps, bytes(64))
        return Code(cubin, f"kernel_{number}", signature(found.parameters), 32 * found.num_warps, found.shared)

    path, log = tmp_path / "small.kernels", tmp_path / "log"
    with patch.object(bundle, "compiled", lambda made, plan, jobs=None: [code(*each) for each in enumerate(made)]):
        write_bundle(path, file, [plan])
    monkeypatch.setenv("RECORDING_DRIVER_LOG", str(log))
    monkeypatch.setenv("RECORDING_DRIVER_ARCH", "120")
    y, classes = torch.empty_like(expected), torch.empty((1, 8, 8), dtype=torch.uint8)
    names = {f"kernel_{number}": kernel for number, kernel in enumerate(kernels)}
    _, _, failures = kept = emulated.compute(driver, log, names, [*inputs, y, classes])
    opened = Library(builds.library(tmp_path)).network(file.path, path)
    with pytest.raises(InputError, match="has 2 inputs, and 1 shapes were given"):
        opened.run(inputs[0].shape)
    run = opened.run(*(x.shape for x in inputs))
    for wrong in ((), (y, y), (y.half(), y)):
        with pytest.raises(InputError, match="2 inputs and 1 output, each of one type"):
            run.enqueue(*inputs, *wrong)
    run.enqueue(*inputs, y)
    run.enqueue(*inputs, classes)
    assert not failures
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(classes.long(), expected.argmax(1))
    del kept


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["ASPP", "SegFormer block", "InstanceNorm UNet, volumes", "MobileNet"])
def test_other_networks(name: str) -> None:
    """Feature maps and volumes, norms, pools, attention. In FP32: in FP16 a last bit becomes a step of FP4."""
    file, x = network(name)
    wide = dataclasses.replace(file, graph=file.graph.model_copy(update={"rest": "fp32"}))
    found = play(record(wide, SM120, tuple(x[:1].shape)), wide, [x[:1]], emulated.launch)
    for y, expected in zip(found, written(file, x[:1], torch.float32), strict=True):
        assert (y - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.emulate
@pytest.mark.parametrize("name", OWN_QUANTIZERS)
def test_layers_that_quantise_what_they_read(name: str) -> None:
    """Against the network node by node: a plan that multiplied codes, or what is not quantised, is far from it."""
    file, x = network(name)
    wide = dataclasses.replace(file, graph=file.graph.model_copy(update={"rest": "fp32"}))
    found = play(record(wide, SM120, (1, 3, 8, 8)), wide, [x[:1, :, :8, :8]], emulated.launch)[0]
    expected = PackedNetwork(file)(x[:1, :, :8, :8])
    assert (found - expected).norm() <= 1e-5 * expected.norm()


class One(nn.Module):
    """A convolution, and what a function makes of its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.function = nn.Conv2d(3, 4, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.stem(x))


NODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumulative_sum": lambda y: torch.cumsum(y, 1),
    "argmax": lambda y: y.argmax(1).float(),
    "fold": lambda y: F.fold(F.unfold(y, 3, padding=1) * 0.5, (6, 6), 3, padding=1),
    "resize": lambda y: F.interpolate(y, scale_factor=2.0, mode="bicubic"),
    "adaptive_pool": lambda y: F.adaptive_avg_pool2d(y, 4),
    "variance": lambda y: torch.roll(y, 1, 2).var((2, 3)),
}


@pytest.mark.emulate
@pytest.mark.parametrize("op", NODES)
def test_other_nodes(op: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 6, 6)
    graph, tensors = pack_model(One(NODES[op]).eval(), x, dynamic_size=False, rest=rest_of("fp32"))
    assert op in {node.op for node in graph.nodes}
    file = packed_file(Path("one.fp4"), None, graph, tensors)
    found, expected = play(record(file, SM120, (1, 3, 6, 6)), file, [x], emulated.launch)[0], PackedNetwork(file)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inputs_of_other_shapes_are_refused(tmp_path: Path) -> None:
    file, _ = packed(tmp_path / "small.fp4", "fp16")
    with pytest.raises(InputError, match="takes|not"):
        record(file, SM120, (1, 4, 8, 8), (1,))
    with pytest.raises(InputError, match="has 2 inputs, and 1 shapes were given"):
        record(file, SM120, (1, 3, 8, 8))


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten._linalg_check_errors.default, aten.linalg_inv_ex.default": torch.linalg.inv,
    "aten.topk.default": lambda x: torch.topk(x, 2)[0],
    "aten.rand.default": lambda x: x + torch.rand_like(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_nothing_compiles_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file, _ = packed(tmp_path / "small.fp4", "fp32")
    program = _Program(file, SM120, torch.float32, torch.float32)
    with pytest.raises(InputError) as refused:
        program.run(lambda x: [REFUSED[name](x)], [torch.empty(4, 4, device="meta")])
    assert str(refused.value) == UNKNOWN.format(name)
