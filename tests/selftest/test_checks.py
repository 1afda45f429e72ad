"""Each check on the CPU: what it proves, that it fails where something is wrong, and what it says it cannot do."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4deploy import formats
from fp4deploy.errors import GateError, UnavailableError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed import PackedNetwork
from fp4deploy.packed.graph import ConvTranspose2d, Layer
from fp4deploy.plugins.gemm.reference import conv_transpose2d_reference
from fp4deploy.selftest import engines, kernels, latency, networks, reference
from fp4deploy.selftest.context import Context, Size
from fp4deploy.selftest.proof import require_same_bytes

CPU = torch.device("cpu")
TINY = Size(0.125, 32, 32)


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(tmp_path_factory.mktemp("selftest"), CPU, TINY, TINY)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks of kernels run on the CPU, where the reference takes the place of the kernels."""
    monkeypatch.setattr(kernels, "why_unavailable", lambda _: None)
    monkeypatch.setattr(kernels.aot, "why_unavailable", lambda _: None)


def one_wrong_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the last code of its packed result changed."""

    def changed(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        if isinstance(found, Nvfp4Tensor):
            codes = found.codes.clone()
            codes.view(-1)[-1] ^= 1
            return dataclasses.replace(found, codes=codes)
        return found

    return changed


def test_the_reference_gives_the_recorded_bytes(context: Context) -> None:
    assert "9 formats" in reference.recorded_bytes(context).sentence


def test_other_bytes_of_the_reference_are_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "quantize_nvfp4", one_wrong_code(formats.quantize_nvfp4))
    with pytest.raises(GateError, match="^NVFP4, NVFP4, 16 x 16 blocks, .*4/6 by MAE, fast: other bytes"):
        reference.recorded_bytes(context)


def test_the_numbers_cover_what_matters() -> None:
    x = reference.numbers()
    assert torch.equal(x, reference.numbers())
    assert bool((x == 0).any() and (x < 0).any())
    assert x.abs().max() / x[x != 0].abs().min() > 2**17


def test_every_nearest_code(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.nearest_values(context).figures == {"values": 63488}
    exact = formats.encode_e2m1
    monkeypatch.setattr(formats, "encode_e2m1", lambda u: exact(u + (u == 2.5) * 0.01))
    with pytest.raises(GateError, match="1 of 63488 FP16 values .*; 2.5 gets 5 instead of 4"):
        reference.nearest_values(context)


def test_networks_on_the_cpu(context: Context) -> None:
    assert "equal to torch on" in networks.exported(context).sentence
    assert "equal to torch on" in networks.packed_on_cpu(context).sentence
    assert networks.packed_on_cpu(context).figures["images"] == 4


GPU_CHECKS = (
    kernels.quantisation,
    kernels.gemms,
    kernels.packed_outputs,
    networks.packed_on_gpu,
    networks.kernels_that_ran,
    latency.compared,
)


@pytest.mark.parametrize("check", GPU_CHECKS, ids=lambda check: check.__name__)
def test_what_needs_a_gpu_says_so(context: Context, check: Callable[[Context], Any]) -> None:
    with pytest.raises(UnavailableError, match="no CUDA GPU that torch can use|on a GPU"):
        check(context)


@pytest.mark.usefixtures("pretended")
def test_quantisation_finds_one_wrong_code(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.quantisation(context).figures["cases"] == 130
    dispatch = kernels.quantize
    monkeypatch.setattr(dispatch, "quantize_nvfp4", one_wrong_code(dispatch.quantize_nvfp4))
    with pytest.raises(GateError, match=r"codes: 1 of 792 elements differ, the first at \[32, 23\]: "):
        kernels.quantisation(context)


@pytest.mark.usefixtures("pretended")
def test_gemms_find_a_wrong_factor(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = kernels.gemms(context).figures
    assert len(figures) == 7
    assert 0 < max(map(float, figures.values())) < 4e-4  # rounding to FP16
    right = kernels.gemm.conv2d
    monkeypatch.setattr(kernels.gemm, "conv2d", lambda *a, **o: right(*a, **o) * 1.002)
    with pytest.raises(
        GateError, match=r"against float64: 3 x 3: 0.00\d+, 3 x 3, stride and dilation 2: .*two sources"
    ):
        kernels.gemms(context)


@pytest.mark.usefixtures("pretended")
def test_packed_outputs_find_one_wrong_code(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(kernels.packed_outputs(context).figures["compared"]) > 10000
    monkeypatch.setattr(kernels.gemm, "conv2d", one_wrong_code(kernels.gemm.conv2d))
    with pytest.raises(GateError, match="3 x 3, packed output, codes: 1 of "):
        kernels.packed_outputs(context)


def test_nodes_are_compared_one_by_one(context: Context) -> None:
    """A node that is wrong is the only one that differs: the next reads the reference's output."""
    file = context.packed.file
    other = PackedNetwork(file)

    def run(node: Any, inputs: list[Any]) -> list[Any]:
        found = [networks.half(x) for x in networks.on_cpu(other, node, inputs)]
        return [x * 1.01 if node.layer == wrong and isinstance(x, torch.Tensor) else x for x in found]

    wrong = ""
    right = networks.node_errors(file, context.images[:1], run)
    wrong = "decoder.1.conv1"
    errors = networks.node_errors(file, context.images[:1], run)
    assert max(right.values()) < 4e-4
    assert {name for name, error in errors.items() if error > 1e-3} == {wrong}
    assert errors[wrong] == pytest.approx(0.01, rel=0.05)


def test_the_reference_of_a_node_rounds_only_what_it_writes(context: Context) -> None:
    """As a GPU's kernel: operands are what their codes stand for, however many digits that takes."""
    file = context.packed.file
    network, reference = PackedNetwork(file), PackedNetwork(file)
    image, compared = network.graph.inputs[0], 0
    read = network.read_input(image, context.images[:1])
    held: dict[str, Any] = {form.name: networks.half(x) for form, x in zip(image.outputs, read, strict=True)}
    for node in network.graph.nodes:
        inputs = [held[name] for name in node.inputs]
        found = [networks.half(x) for x in networks.on_cpu(reference, node, inputs)]
        held.update(zip([form.name for form in node.outputs], found, strict=True))
        if isinstance(node, ConvTranspose2d) and isinstance(found[0], Nvfp4Tensor):
            weight, bias = network._packed[node.layer], file.tensors[f"{node.layer}.bias"]
            amax = network.amax(node.outputs[0])
            expected: Any = conv_transpose2d_reference(inputs[0], weight, bias, out_amax=amax, accumulate=torch.float64)
            assert torch.equal(found[0].codes, expected.codes)
            compared += 1
    assert compared == 1


@pytest.mark.usefixtures("pretended")
def test_the_profile_is_counted(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = context.packed.file.graph.nodes
    planned = sum(isinstance(node, Layer) and node.precision == "nvfp4" for node in steps)
    ran: dict[str, int] = {"implicit_gemm_kernel": planned - 1, "group_norm": 18}
    monkeypatch.setattr(networks, "profiled", lambda network, images: ran)
    with pytest.raises(GateError, match=f"{planned} FP4 convolutions, and {planned - 1} kernels named implicit_gemm"):
        networks.kernels_that_ran(context)
    ran["implicit_gemm_kernel"] = planned
    assert networks.kernels_that_ran(context).figures["FP4 convolutions"] == planned
    ran.clear()
    with pytest.raises(UnavailableError, match="recorded no kernel"):
        networks.kernels_that_ran(context)


@pytest.mark.rtx
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which may run the engine")
def test_an_engine_without_its_gpu(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    proof = engines.build(context)
    assert proof.sentence.startswith("tensorrt-rtx ")
    assert "0 fallbacks" in proof.sentence
    for check in (engines.run, engines.profile):
        with pytest.raises(UnavailableError, match="this machine has no CUDA GPU"):
            check(context)
    ledger = engines.engine(context).ledger
    fp4 = [row for row in ledger.layers if row.actual == "FP4"]
    ran = {kernel: 1.0 for row in fp4 for kernel in row.kernels} | {"something else": 2.0}
    monkeypatch.setattr(engines, "opened", lambda _: SimpleNamespace(profile=lambda images: ran))
    assert engines.profile(context).figures["FP4 layers"] == len(fp4)
    for kernel in fp4[-1].kernels:
        del ran[kernel]
    with pytest.raises(GateError, match=f"have no kernel in the profile, the first is .*{fp4[-1].layer}"):
        engines.profile(context)


def test_no_library_builds_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {name: SimpleNamespace(why_missing=lambda name=name: f"{name} is missing") for name in engines.LIBRARIES}
    monkeypatch.setattr(engines, "LIBRARIES", missing)
    with pytest.raises(UnavailableError, match="tensorrt_rtx is missing"):
        engines.engine(Context(tmp_path, CPU))


def test_the_first_difference_is_named() -> None:
    x = torch.tensor([[0.0, float("nan")], [2.0, 3.0]])
    assert require_same_bytes(x, torch.tensor([[-0.0, float("nan")], [2.0, 3.0]]), "x") == 4
    with pytest.raises(GateError, match=r"^x: 1 of 4 elements differ, the first at \[1, 0\]: 2.0 instead of 5.0$"):
        require_same_bytes(x, torch.tensor([[0.0, float("nan")], [5.0, 3.0]]), "x")
    with pytest.raises(GateError, match=r"torch.float32 \[2, 2\] instead of torch.float32 \[4\]"):
        require_same_bytes(x, x.flatten(), "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_are_the_same_where_their_bytes_are(dtype: torch.dtype) -> None:
    """But for NaN, of which there are many, and the sign of 0: each value beside each other one."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).tiny], dtype=dtype)
    for one, other in itertools.product(values, values):
        same = torch.equal(one, other) or bool(one.isnan() and other.isnan())
        pair = torch.stack([values[2], one]), torch.stack([values[2], other])
        if same:
            assert require_same_bytes(*pair, "x") == 2
            continue
        with pytest.raises(GateError, match=r"1 of 2 elements differ, the first at \[1\]"):
            require_same_bytes(*pair, "x")
