"""A packed network on a GPU: every node against torch's reference of it, and replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.packed import network as network_module
from fp4deploy.packed.capture import CapturedNetwork
from fp4deploy.packed.graph import GroupNormReLU, Layer, Norm
from fp4deploy.packed.producers import Produce
from fp4deploy.packed.program import compile_program
from fp4deploy.plugins.gemm import reference
from fp4deploy.plugins.quantize import norm_pack, statistics
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy.plugins.runtime import pdl
from tests.export.packable_networks import NETWORKS, deployed
from tests.export.test_packed_operators import FUNCTIONS, Around
from tests.export.test_wide_numbers import NETWORKS as WIDE
from tests.export.test_wide_numbers import Masked
from tests.export.test_wide_numbers import network as wide_network
from tests.packed.small_networks import CLASSES, images, packed
from tests.packed.test_producers import padded, pooled, positioned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def values(activation: Any) -> torch.Tensor:
    return activation.dequantize() if isinstance(activation, Nvfp4Tensor) else activation.float()


def by_reference(
    network: PackedNetwork,
    node: Any,
    inputs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int] | None = None,
) -> list[Any]:
    reading = PackedNetwork(network.file, "cuda", "packed")
    with monkeypatch.context() as patch:
        exact = reference.conv2d_reference
        patch.setattr(network_module, "conv2d", lambda *args, measured: exact(*args))  # of one way there is no fastest
        patch.setattr(network_module, "conv_transpose2d", reference.conv_transpose2d_reference)
        patch.setattr(network_module, "matmul", reference.matmul_reference)
        patch.setattr(norm_pack.fallback, "runs", lambda _: False)
        return reading.run_node(node, inputs, sizes)


FIRST = [(False, False), (True, False), (False, True), (True, True)]  # the image as digits; every layer quantised


@pytest.mark.parametrize("weights", ["decoded", "packed"])
@pytest.mark.parametrize("recipe", [None, "nvfp4_qat", "nvfp4_4o6_weight_qat"])
@pytest.mark.parametrize("scale", [0.125, 0.25, 0.5])
@pytest.mark.parametrize(("digits", "everything"), FIRST)
def test_every_step_against_its_reference(
    recipe: str | None,
    scale: float,
    digits: bool,
    everything: bool,
    weights: Literal["decoded", "packed"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each from the same inputs: of packed activations a thousandth of the elements may differ by a rounding."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    _, file = packed(recipe, scale, digits, everything)
    network = PackedNetwork(file, "cuda", weights)
    moments: dict[str, Any] = {}
    live: dict[str, Any] = {network.graph.inputs[0].outputs[0].name: network.read(images(2, size=64).cuda())}
    for node in network.graph.nodes:
        inputs = [live[name] for name in node.inputs]
        expected = by_reference(network, node, inputs, monkeypatch)
        got = network.run_node(node, inputs, moments=moments)
        for one, other in zip(got, expected, strict=True):
            assert type(one) is type(other)
            difference = values(one) - values(other)
            if isinstance(one, Nvfp4Tensor):
                # cuDNN's volumes are rounded to FP16 before they are quantised: some are another FP4 number then.
                rounded = weights is None and isinstance(node, Layer) and len(one.shape) == 5
                # Where the scale of a block is rounded otherwise, most of its 16 numbers are.
                few = 3 * 16 / difference.numel()
                assert float((difference != 0).float().mean()) < max(1e-2 if rounded else 1e-3, few), node
            else:
                assert float(difference.norm() / values(other).norm()) < 1e-3, node
        live.update(zip([form.name for form in node.outputs], got, strict=True))


def test_what_the_first_step_reads_has_the_bytes_of_the_cpu() -> None:
    """Digits packed on the GPU; without digits the image is FP16 there and FP32 on the CPU."""
    _, file = packed("nvfp4_qat", 0.25, True, True)
    here, there = (PackedNetwork(file, device).read(images(3, size=48)) for device in ("cuda", "cpu"))
    assert isinstance(here, Nvfp4Tensor)
    assert isinstance(there, Nvfp4Tensor)
    assert here.shape == there.shape == (3, 48, 48, 13)
    assert torch.equal(here.codes.cpu(), there.codes)
    assert torch.equal(here.scales.view(torch.uint8).cpu(), there.scales.view(torch.uint8))


@pytest.mark.parametrize("recipe", [None, "nvfp4_qat"])
@pytest.mark.parametrize(("digits", "everything"), [(False, False), (True, True)])
def test_classes_are_those_of_torch(recipe: str | None, digits: bool, everything: bool) -> None:
    """Free-running, FP16 against FP32: the same bound as between torch's own precisions on an untrained model."""
    model, file = packed(recipe, 0.25, digits, everything)
    x = images(4, size=64)
    with torch.inference_mode():
        expected = model(x)
    got = PackedNetwork(file, "cuda")(x.cuda()).float().cpu()
    assert got.shape == expected.shape
    bound = 0.998 if recipe is None else 0.8  # FP16 instead of FP32 between the steps of an untrained model
    assert float((got.argmax(1) == expected.argmax(1)).float().mean()) > bound


@pytest.mark.parametrize("recipe", [None, "nvfp4_qat"])
@pytest.mark.parametrize(("digits", "everything"), [(False, False), (True, True)])
def test_a_recorded_network_gives_the_same_bits(
    recipe: str | None, digits: bool, everything: bool, recwarn: pytest.WarningsRecorder
) -> None:
    _, file = packed(recipe, 0.25, digits, everything)
    network = PackedNetwork(file, "cuda")
    recorded = CapturedNetwork(network)
    results = []
    for seed, size, count in ((1, 32, 1), (2, 32, 1), (3, 64, 2), (4, 32, 1)):
        x = images(count, seed, size).cuda()
        results.append((recorded(x), network(x)))
    assert all(torch.equal(one, other) for one, other in results)
    assert [str(warning.message) for warning in recwarn if "one by one" in str(warning.message)] == []


def test_recording_can_be_switched_off_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = packed()
    network = PackedNetwork(file, "cuda")
    x = images(1).cuda()
    assert torch.equal(CapturedNetwork(network, enabled=False)(x), network(x))

    def synchronise(node: Any, inputs: list[Any], *others: Any) -> list[Any]:
        if isinstance(node, GroupNormReLU):
            torch.cuda.synchronize()
        return PackedNetwork.run_node(network, node, inputs, *others)

    monkeypatch.setattr(network, "run_node", synchronise)
    with pytest.warns(UserWarning, match="as a CUDA graph failed"):
        logits = CapturedNetwork(network)(x)
    torch.cuda.synchronize()
    assert logits.shape == (1, len(CLASSES), 32, 32)
    assert torch.randn(8, device="cuda").isfinite().all()  # the generator knows that the recording is over


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, None) for name in NETWORKS), ("InstanceNorm UNet, volumes", "packed")]
)
def test_every_node_of_other_networks(name: str, weights: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of linear layers, strides and dilations, decoded layers, and torch's operators in FP16."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    factory, size = NETWORKS[name]
    x = torch.randn(2, 3, *size)
    model = deployed(factory(), x)
    network = PackedNetwork(packed_file(Path("own.fp4"), None, *pack_model(model, x)), "cuda", weights)
    sizes = {f"{network.graph.inputs[0].name}.{axis}": extent for axis, extent in enumerate(x.shape)}
    image = network.graph.inputs[0]
    live = dict(zip([form.name for form in image.outputs], network.read_input(image, x.cuda()), strict=True))
    for node in network.graph.nodes:
        inputs = [live[name] for name in node.inputs]
        got, expected = (
            network.run_node(node, inputs, sizes), by_reference(network, node, inputs, monkeypatch, sizes)
        )  # fmt: skip
        for one, other in zip(got, expected, strict=True):
            difference = values(one) - values(other)
            if isinstance(one, Nvfp4Tensor):
                # cuDNN's volumes are rounded to FP16 before they are quantised: some are another FP4 number then.
                rounded = weights is None and isinstance(node, Layer) and len(one.shape) == 5
                # Where the scale of a block is rounded otherwise, most of its 16 numbers are.
                few = 3 * 16 / difference.numel()
                assert float((difference != 0).float().mean()) < max(1e-2 if rounded else 1e-3, few), node
            else:
                assert float(difference.norm()) <= 2e-3 * float(values(other).norm()), node
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    captured = CapturedNetwork(network)
    for one, other in zip(leaves(captured(x.cuda())), leaves(network(x.cuda())), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_of_several_nodes(name: str) -> None:
    """Each step from the inputs that the nodes give: the same bytes, but for the sums of a norm."""
    torch.manual_seed(0)
    factory, size = NETWORKS[name]
    x = torch.randn(2, 3, *size)
    network = PackedNetwork(packed_file(Path("own.fp4"), None, *pack_model(deployed(factory(), x), x)), "cuda")
    image, graph = x.cuda(), network.graph
    sizes = {f"{graph.inputs[0].name}.{axis}": extent for axis, extent in enumerate(x.shape)}
    live: dict[str, Any] = {}
    for inputs in (graph.inputs[0], network.inputs[0]):
        live.update(zip([form.name for form in inputs.outputs], network.read_input(inputs, image), strict=True))
    for node in graph.nodes:
        got = network.run_node(node, [live[each] for each in node.inputs], sizes)
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    for step in network.steps:
        got = network.run_step(step, [live[each] for each in step.inputs], sizes)
        for form, one in zip(step.outputs, got, strict=True):
            other = live.setdefault(form.name, one)
            exact = not isinstance(step, Produce) or not isinstance(step.first, Norm)
            different = float((values(one).nan_to_num(7) != values(other).nan_to_num(7)).float().mean())
            assert different == 0 if exact else different < 0.02, step


@pytest.mark.parametrize("made", [padded, pooled, positioned], ids=lambda made: made.__name__)
def test_the_bytes_of_steps(made: Callable[[], Any]) -> None:
    """Those of the nodes one by one: a transposed convolution packs what it writes, a step pools what it writes, and
    what all items of a batch share is added to each of them.
    """
    file, x = made()
    network, nodes = PackedNetwork(file, "cuda"), PackedNetwork(file, "cuda")
    nodes.schedule(nodes.graph.inputs, list(nodes.graph.nodes))
    assert any(step not in nodes.steps for step in network.steps)
    for size in ((32, 48), (70, 34), (96, 130)):
        image = F.interpolate(x, size).cuda()
        for one, other in zip(leaves(network(image)), leaves(nodes(image)), strict=True):
            assert torch.equal(one, other)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "InstanceNorm, LeakyReLU": lambda c: nn.Sequential(nn.InstanceNorm2d(c, affine=True), nn.LeakyReLU(0.1)),
    "InstanceNorm without parameters": lambda c: nn.InstanceNorm2d(c),
    "GroupNorm, SiLU": lambda c: nn.Sequential(nn.GroupNorm(4, c), nn.SiLU()),
    "GroupNorm": lambda c: nn.GroupNorm(8, c),
}


def normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Convolutions of every kernel that gives moments, a norm after each but the last."""
    sizes = ((3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 1))
    layers = [nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), norm(after)) for before, after, stride in sizes]
    return nn.Sequential(*layers, nn.Conv2d(128, 5, 1))


@pytest.mark.parametrize("size", [(37, 53), (203, 301)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_take_the_moments_of_convolutions(
    name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass of their own over a feature map, and the results of the nodes; also in a CUDA graph."""
    torch.manual_seed(0)
    example = torch.randn(2, 3, 32, 48)
    model = deployed(normed(NORMS[name]), example)
    network = PackedNetwork(packed_file(Path("own.fp4"), None, *pack_model(model, example)), "cuda")
    if not network._decodes:
        pytest.skip("only kernels of decoded weights give moments")
    read: list[torch.Size] = []

    def chunk_moments(x: torch.Tensor) -> Moments:
        read.append(x.shape)
        return statistics.chunk_moments(x)

    monkeypatch.setattr(norm_pack, "chunk_moments", chunk_moments)
    x = torch.randn(2, 3, *size, device="cuda")
    graph, sizes = network.graph, {f"{network.graph.inputs[0].name}.{axis}": each for axis, each in enumerate(x.shape)}
    live: dict[str, Any] = {}
    for inputs in (graph.inputs[0], network.inputs[0]):
        live.update(zip([form.name for form in inputs.outputs], network.read_input(inputs, x), strict=True))
    moments: dict[str, Any] = {}
    for node in graph.nodes:
        got = network.run_node(node, [live[each] for each in node.inputs], sizes, moments)
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    assert not moments
    produced = 0
    for step in network.steps:
        got = network.run_step(step, [live[each] for each in step.inputs], sizes, moments)
        takes = isinstance(step, Produce) and isinstance(step.first, Norm)
        produced += takes
        for form, one in zip(step.outputs, got, strict=True):
            assert (form.name in moments) == (form.name in network._normed)
            different = float((values(one).nan_to_num(7) != values(live[form.name]).nan_to_num(7)).float().mean())
            # torch's GroupNorm rounds mean and 1/std to FP16: the last bit of many plain values is another one
            loose = takes and step.first.op == "group_norm" and not isinstance(one, Nvfp4Tensor)
            assert loose or different < 0.02 if takes else different == 0, step
            if not isinstance(one, Nvfp4Tensor):
                difference = values(one) - values(live[form.name])
                assert float(difference.norm()) < 2e-3 * float(values(one).norm()), step
    assert produced == 5
    assert not moments
    assert read == []
    expected = leaves(network(x))[0]
    captured = CapturedNetwork(network)
    assert torch.equal(leaves(captured(x))[0], expected)
    assert read == []
    assert expected.isfinite().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_in_half_precision(name: str) -> None:
    """Those of `FUNCTIONS` agree with FP32 on the CPU, and replayed as a CUDA graph.

    Truncated numbers and positions are not continuous: what FP16 rounds across an integer or a tie is far away.
    """
    tolerance = 5e-2 if name in ("casts", "positions") else 1e-2
    torch.manual_seed(0)
    model, x = Around(FUNCTIONS[name]).eval(), torch.randn(2, 3, 8, 8)
    file = packed_file(Path("own.fp4"), None, *pack_model(model, x))
    network = PackedNetwork(file, "cuda")
    got, expected = leaves(network(x.cuda())), leaves(PackedNetwork(file)(x))
    for one, other in zip(got, expected, strict=True):
        assert float((one.cpu().float() - other).norm()) <= tolerance * float(other.norm())
    for one, other in zip(leaves(CapturedNetwork(network)(x.cuda())), got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", WIDE)
def test_numbers_that_fp16_does_not_hold(kind: type[nn.Module]) -> None:
    """An image without contrast gives finite numbers, node by node and compiled."""
    model, images = wide_network(kind)  # type: ignore[arg-type]
    file = packed_file(Path("own.fp4"), None, *pack_model(model, images["random"]))
    network, reference = PackedNetwork(file, "cuda"), PackedNetwork(file)
    for image in images.values():
        (expected,) = leaves(reference(image))
        for run in (network, CapturedNetwork(network), compile_program(file, [image.cuda().half()])):
            (got,) = leaves(run(image.cuda().half()))
            assert got.isfinite().all()
            if kind is not Masked:  # which score of an image without contrast is the largest, a last bit says
                assert float((got.cpu().float() - expected).norm()) <= 0.1 * float(expected.norm())


def test_no_more_memory_than_the_graph_says() -> None:
    """Weights, images and logits; kernels have scratch, and an allocator rounds up: half as much again is allowed."""
    from fp4deploy.packed import activation_bytes

    _, file = packed("nvfp4_qat", 0.5)
    network, x = PackedNetwork(file, "cuda"), images(4, size=256).cuda().half()
    for _ in range(2):
        network(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    network(x)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.5 * activation_bytes(file.graph, 256, 256, batch=4)


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_secondary_kernels_give_the_bits_of_launches_in_stream_order(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched one by one and replayed as a graph, behind kernels that still write what the first one reads."""
    _, file = packed("nvfp4_qat", scale)
    network, x = PackedNetwork(file, "cuda"), images(2, size=96).cuda()
    with monkeypatch.context() as patch:
        patch.setattr(pdl, "enabled", False)
        expected = network(x)
    assert isinstance(expected, torch.Tensor)
    captured = CapturedNetwork(network)
    other = torch.randn(2048, 2048, device="cuda").half()
    for run in (network, captured, captured, captured):
        late = torch.zeros_like(x)
        torch.cuda._sleep(1_000_000)
        other @ other
        late.copy_(x)
        got = run(late)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, expected)
