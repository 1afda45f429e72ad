"""The C library on a GPU: the bytes of the Python runtime, also from a CUDA graph and on the host."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.native_calls import Library
from fp4deploy.architecture import Architecture
from fp4deploy.native import Gpu, record, write_bundle
from fp4deploy.packed import PackedNetwork, write_packed
from tests.export.packable_networks import OWN_QUANTIZERS
from tests.native import builds
from tests.native.builds import compiler
from tests.native.replay import replay
from tests.native.test_any_network import packed as any_network
from tests.packed.small_networks import packed
from tests.packed.test_writer import network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or compiler() is None, reason="no NVIDIA GPU, or no compiler"),
]
SHAPES = ((1, 3, 64, 96), (4, 3, 64, 96))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(builds.library(tmp_path_factory.mktemp("library")))


@pytest.mark.parametrize(
    ("everything", "rest"),
    [(False, "fp16"), (True, "fp16"), (False, "bf16")],
    ids=["first and last layer in FP16", "every layer in FP4", "first and last layer in BF16"],
)
@torch.inference_mode()
def test_the_bytes_of_the_python_runtime(library: Library, everything: bool, rest: str, tmp_path: Path) -> None:
    file = dataclasses.replace(packed("nvfp4_qat", 0.25, everything, everything, rest)[1], path=tmp_path / "unet.fp4")
    write_packed(file)
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(Architecture.of_device(0), properties.name, properties.multi_processor_count)
    write_bundle(tmp_path / "unet.kernels", file, [record(file, gpu, shape) for shape in SHAPES])
    native = library.network(file.path, tmp_path / "unet.kernels")
    python = PackedNetwork(file, "cuda", plain="kernel")
    for shape in SHAPES:
        run, x = native.run(shape), torch.randn(shape, device="cuda")
        expected: Any = python(x)
        wanted = expected.to(torch.float16 if rest == "fp16" else torch.float32).contiguous()
        y = torch.empty_like(wanted)
        run.enqueue(x, y)
        assert torch.equal(y.view(torch.uint8), wanted.view(torch.uint8))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run.enqueue(x, y)
        y.zero_()
        graph.replay()
        assert torch.equal(y.view(torch.uint8), wanted.view(torch.uint8))
        classes = torch.empty((shape[0], *shape[2:]), dtype=torch.uint8)
        run.host(x.cpu(), classes)
        assert torch.equal(classes.long(), wanted.argmax(1).cpu())


@torch.inference_mode()
def test_generated_kernels_give_the_bytes_of_the_plan_played_in_python(library: Library, tmp_path: Path) -> None:
    file, inputs = any_network(tmp_path / "small.fp4", "fp16")
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(Architecture.of_device(0), properties.name, properties.multi_processor_count)
    plan = record(file, gpu, *(tuple(x.shape) for x in inputs))
    write_bundle(tmp_path / "small.kernels", file, [plan])
    given = [x.to("cuda") for x in inputs]
    expected = replay(plan, file, given)[0]
    y = torch.empty_like(expected)
    library.network(file.path, tmp_path / "small.kernels").run(*plan.inputs).enqueue(*given, y)
    assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(y.cpu(), PackedNetwork(file)(*inputs), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", OWN_QUANTIZERS)
@torch.inference_mode()
def test_layers_that_quantise_what_they_read(library: Library, name: str, tmp_path: Path) -> None:
    file, x = network(name)
    file = dataclasses.replace(file, path=tmp_path / "own.fp4")
    write_packed(file)
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(Architecture.of_device(0), properties.name, properties.multi_processor_count)
    plan = record(file, gpu, tuple(x.shape))
    write_bundle(tmp_path / "own.kernels", file, [plan])
    expected = replay(plan, file, [x.cuda()])[0]
    y = torch.full_like(expected, float("nan"))
    library.network(file.path, tmp_path / "own.kernels").run(*plan.inputs).enqueue(x.cuda(), y)
    assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
    for wanted, near in ((PackedNetwork(file)(x), 0.1), (PackedNetwork(file, "cuda")(x.cuda()).cpu(), 0.02)):
        assert (y.cpu() - wanted).norm() <= near * wanted.float().norm()
