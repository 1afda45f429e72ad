"""Packed UNets whose rest is BF16 or FP32: on a CPU with the activations of a GPU, and on a GPU against that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed import PackedNetwork
from fp4deploy.packed.capture import CapturedNetwork
from fp4deploy.packed.file import read_packed, write_packed
from fp4deploy.packed.graph import Conv2d, Layer
from fp4deploy.packed.wide import wide_activations
from fp4deploy.rest import BF16, FP16, FP32, rest_of
from tests.packed.small_networks import images, packed

OTHERS = ("bf16", "fp32")
WITHOUT_GPU = not torch.cuda.is_available()


def on_cpu(x: Any) -> Any:
    if isinstance(x, Nvfp4Tensor):
        return replace(x, codes=x.codes.cpu(), scales=x.scales.cpu(), amax=x.amax.cpu())
    return x.cpu()


def values(x: Any) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Nvfp4Tensor) else x.float()


@pytest.mark.parametrize("rest", OTHERS)
@pytest.mark.parametrize(("recipe", "digits"), [(None, False), ("nvfp4_qat", False), ("nvfp4_qat", True)])
def test_activations_of_a_gpu_are_near_those_of_a_cpu(recipe: str | None, digits: bool, rest: str) -> None:
    """Each node from the same inputs: a plain one is rounded, of a packed one a few elements move."""
    file = packed(recipe, 0.25, digits, digits, rest)[1]
    wide, narrow = PackedNetwork(file), PackedNetwork(file, dtype=rest_of(rest).dtype)
    x = images(2)
    live = {narrow.graph.inputs[0].outputs[0].name: narrow.read(x)}
    for node in narrow.graph.nodes:
        inputs: list[Any] = [live[name] for name in node.inputs]
        got = narrow.run_node(node, inputs)
        expected = wide.run_node(node, [each if isinstance(each, Nvfp4Tensor) else each.float() for each in inputs])
        for one, other in zip(got, expected, strict=True):
            difference = (values(one) - values(other)).norm() / values(other).norm()
            limit = 1e-6 if rest == "fp32" else 0.08 if isinstance(one, Nvfp4Tensor) else 5e-3
            assert float(difference) < limit, node
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    assert live[narrow.graph.outputs[0].activation].dtype == rest_of(rest).dtype  # type: ignore[union-attr]


def test_digits_are_those_of_the_image_and_not_of_its_rounding() -> None:
    """BF16 would round the image before its terms are taken."""
    file = packed("nvfp4_qat", 0.25, True)[1]
    expected = PackedNetwork(file, dtype=torch.float16).read(images(1))
    for rest in OTHERS:
        other = replace(file, graph=file.graph.model_copy(update={"rest": rest}))
        read = PackedNetwork(other, dtype=rest_of(rest).dtype).read(images(1))
        assert torch.equal(read.float(), expected.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("rest", OTHERS)
def test_a_file_says_its_rest_and_is_checked(rest: str, tmp_path: Any) -> None:
    file = replace(packed("nvfp4_qat", rest=rest)[1], path=tmp_path / "a.fp4")
    write_packed(file)
    graph = read_packed(file.path).graph
    assert graph.rest == rest
    assert {node.precision for node in graph.nodes if isinstance(node, Layer)} == {"nvfp4", rest}
    nodes = [node.model_copy(update={"precision": "fp16"}) if isinstance(node, Conv2d) and node.precision != "nvfp4"
             else node for node in graph.nodes]  # fmt: skip
    write_packed(replace(file, graph=graph.model_copy(update={"nodes": nodes})))
    with pytest.raises(InputError, match=f"it is fp16 in a network whose rest is {rest}"):
        read_packed(file.path)


@pytest.mark.parametrize("rest", OTHERS)
def test_what_the_network_says_it_computes_in(rest: str) -> None:
    network = PackedNetwork(packed("nvfp4_qat", rest=rest)[1], dtype=rest_of(rest).dtype)
    said = {network.precision_of(node) for node in network.graph.nodes}
    assert said == {rest.upper(), "FP4 as FP32"}


def test_numbers_that_are_held() -> None:
    assert [FP16.holds(number) for number in (1e-8, 1e9, 257, 2047)] == [False, False, True, True]
    numbers = (1e-8, 1e9, 256, 257, 2047, 4097)
    assert [BF16.holds(number) for number in numbers] == [True, True, True, False, False, True]
    assert all(FP32.holds(number) for number in (1e-8, 1e9, 257, 2047))
    table = torch.arange(600.0)
    assert (FP16.holds_tensor(table), BF16.holds_tensor(table), BF16.holds_tensor(table[:257])) == (True, False, True)
    assert BF16.holds_tensor(torch.rand(600))
    file = packed()[1]
    assert not wide_activations(file.graph, file.tensors, FP32)


@pytest.mark.gpu
@pytest.mark.skipif(WITHOUT_GPU, reason="no NVIDIA GPU")
@pytest.mark.parametrize("rest", OTHERS)
@pytest.mark.parametrize("weights", ["decoded", "packed"])
@pytest.mark.parametrize(("recipe", "digits"), [(None, False), ("nvfp4_qat", False), ("nvfp4_qat", True)])
def test_every_step_on_a_gpu(
    recipe: str | None, digits: bool, weights: Literal["decoded", "packed"], rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in (torch.backends.cudnn, torch.backends.cuda.matmul):
        monkeypatch.setattr(library, "allow_tf32", False)  # as `PackedNetwork` does around all of its nodes
    file = packed(recipe, 0.25, digits, digits, rest)[1]
    network, reference = PackedNetwork(file, "cuda", weights), PackedNetwork(file, dtype=rest_of(rest).dtype)
    assert network.dtype == rest_of(rest).dtype
    reference._as_given = network._as_given  # an image that no kernel of the GPU reads rounded
    moments: dict[str, Any] = {}
    live: dict[str, Any] = {network.graph.inputs[0].outputs[0].name: network.read(images(2, size=64).cuda())}
    for node in network.graph.nodes:
        inputs = [live[name] for name in node.inputs]
        got = network.run_node(node, inputs, moments=moments)
        expected = reference.run_node(node, [on_cpu(each) for each in inputs])
        for one, other in zip(got, expected, strict=True):
            difference = values(on_cpu(one)) - values(other)
            if isinstance(one, Nvfp4Tensor):
                assert float((difference != 0).float().mean()) < 5e-3, node
            else:
                # A bias is added to a sum that is rounded already: twice half of BF16's step.
                assert float(difference.norm() / values(other).norm()) < (1e-5 if rest == "fp32" else 4e-3), node
        live.update(zip([form.name for form in node.outputs], got, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(WITHOUT_GPU, reason="no NVIDIA GPU")
@pytest.mark.parametrize("rest", OTHERS)
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_as_one_graph_on_a_gpu(compiled: str, rest: str) -> None:
    model, file = packed(None, 0.25, rest=rest)
    network = CapturedNetwork(PackedNetwork(file, "cuda"), compiled=compiled)
    x = images(4, size=64)
    with torch.inference_mode():
        expected = model(x)
    found = network(x.cuda()).float().cpu()  # type: ignore[union-attr]
    limit = 1e-4 if rest == "fp32" else 0.05
    assert float((found - expected).norm() / expected.norm()) < limit


def test_what_a_file_says_is_wide_is_wide() -> None:
    """Whatever operator writes it; and what reads it computes in FP32 up to the next layer."""
    graph, file = packed("nvfp4_qat", 0.125)[1].graph, packed("nvfp4_qat", 0.125)[1]
    for node in graph.nodes:
        said = graph.model_copy(update={"wide": {"a.module": [node.outputs[0].name]}})
        found = wide_activations(said, file.tensors, FP16)
        assert {form.name for form in node.outputs} <= found
        assert not wide_activations(graph, file.tensors, FP16)
        assert not wide_activations(said, file.tensors, FP32)
