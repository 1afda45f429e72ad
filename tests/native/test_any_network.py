"""Networks of any nodes in the C library: kernels that Inductor generates, executed by the PTX emulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.architecture import Architecture
from fp4deploy.export.to_packed import pack_model
from fp4deploy.native import Gpu, bundle, record
from fp4deploy.native.bundle import Code, write_bundle
from fp4deploy.native.library import Library
from fp4deploy.native.replay import play
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, write_packed
from fp4deploy.plugins.aot.compile import compile_launch, signature
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.rest import rest_of
from tests.export.packable_networks import NETWORKS
from tests.native import builds, emulated
from tests.packed.test_writer import network, written
from tests.plugins.aot.minimal_cubin import minimal_cubin

pytest.importorskip("triton")
SM120 = Gpu(Architecture(12, 0), "", 170)


class Small(nn.Module):
    """A strided convolution, a softmax and a bilinear resize: nodes that only torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(torch.softmax(self.stem(x), 1), scale_factor=2.0, mode="bilinear")


def packed(path: Path, rest: str) -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    graph, tensors = pack_model(Small().eval(), x, dynamic_size=False, rest=rest_of(rest))
    file = packed_file(path, None, graph, tensors)
    write_packed(file)
    return file, x


@pytest.mark.skipif(builds.compiler() is None, reason="no C++ compiler")
def test_the_c_library_gives_the_bytes_of_python(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, x = packed(tmp_path / "small.fp4", "fp32")
    whole = record(file, SM120, tuple(x.shape))
    plan = dataclasses.replace(whole, stages=whole.stages | {"input.float16": (), "output.float16": ()})
    kernels = list(dict.fromkeys(each.kernel for stage in plan.stages.values() for each in stage))
    assert all(isinstance(each, Launch) for each in kernels)
    expected = play(plan, file, [x], emulated.launch)[0]
    reference = PackedNetwork(file)(x)
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
    _, _, failures = kept = emulated.compute(driver, log, names, [x, y, classes])
    run = Library(builds.library(tmp_path)).network(file.path, path).run(x.shape)
    run.enqueue(x, y)
    run.enqueue(x, classes)
    assert not failures
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(classes.long(), expected.argmax(1))
    del kept


@pytest.mark.emulate
@pytest.mark.parametrize("name", NETWORKS)
def test_other_networks_in_fp16(name: str) -> None:
    """Feature maps of two and three axes; a last bit before a quantiser becomes a step of FP4."""
    file, x = network(name)
    x = x[:1]
    found = play(record(file, SM120, tuple(x.shape)), file, [x], emulated.launch)
    for y, expected in zip(found, written(file, x.half(), torch.float16), strict=True):
        assert (y - expected.float()).norm() <= 0.1 * expected.float().norm()


def test_inputs_of_other_shapes_are_refused(tmp_path: Path) -> None:
    file, _ = packed(tmp_path / "small.fp4", "fp16")
    with pytest.raises(Exception, match="takes|not"):
        record(file, SM120, (1, 4, 8, 8))
    two = dataclasses.replace(file, graph=file.graph.model_copy(update={"inputs": file.graph.inputs * 2}))
    with pytest.raises(Exception, match="has 2 inputs, and 1 shapes were given"):
        record(two, SM120, (1, 3, 8, 8))
