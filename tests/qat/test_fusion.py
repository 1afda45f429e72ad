"""Quantisation in operators that a compiler fuses, and the passes that place it: the bits of the plain path."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import fp4deploy as fd
from fp4deploy.formats import FourOverSix, fake_quantize_nvfp4, finite_amax, quantize_nvfp4
from fp4deploy.fusion.expand import expand
from fp4deploy.qat import calibrate, prepare, quantized_layers
from fp4deploy.qat.fusion import norms, operators, traced
from fp4deploy.qat.fusion.codes import keep_codes
from fp4deploy.qat.fusion.compiler import BALANCED, backend, codes_kept
from fp4deploy.qat.fusion.fuse import _warm_up, mark_fusible
from fp4deploy.qat.operators.learned import fake_quantize_learned
from fp4deploy.qat.recipes import QuantSpec
from tests.samples import sample

pytestmark = pytest.mark.filterwarnings("error:A part of the network could not be compiled")

SHAPES = [(2, 48, 5, 3), (1, 16, 1, 1), (3, 24, 4, 5), (2, 7, 3, 3), (2, 33, 6)]
CHOICES: list[traced.Choice] = [None, ("mae", 256, False), ("mse", 448, True)]


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def hard_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values of very different size, with ties of E2M1, zeros, and a NaN and an Inf in blocks of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 8 - 6)
    flat = x.flatten()
    flat[::7] = torch.tensor([0.25, 0.75, 1.25, 2.5, 5.0, -3.5, 0.0]).repeat(len(flat))[: len(flat[::7])]
    if len(flat) > 500:
        flat[3], flat[401] = float("nan"), float("-inf")
    return flat.view(shape).to(dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """Contiguous, channels_last where there are four axes, and strided."""
    strided = torch.stack([x, x], -1)[..., 0]
    last = [x.to(memory_format=torch.channels_last)] if x.ndim == 4 else []
    return [x, strided, *last]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_the_references(
    shape: tuple[int, ...], dtype: torch.dtype, choice: traced.Choice
) -> None:
    axis = 1 - len(shape)
    for seed, (x, amax) in enumerate(
        (x, amax) for x in layouts(hard_values(shape, dtype)) for amax in (None, 2.7, 0.3)
    ):
        static = finite_amax(x) if amax is None else torch.tensor(amax)
        four_over_six = FourOverSix(*choice) if choice else None
        expected, mask = fake_quantize_nvfp4(x, (axis,), static, four_over_six=four_over_six)
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for clips in (True, False):
            given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            if not traced.supports(given, axis, 1, choice):
                continue
            values = traced.quantize(given, static, axis, 1, clips, choice)
            values.backward(upstream)
            assert same(values, expected)
            assert values.dtype == dtype
            assert given.grad is not None
            assert torch.equal(given.grad, upstream * mask if clips else upstream)


@pytest.mark.parametrize("amax", [0.0, float("nan"), 1e-30, 3e38, 1e-38])
def test_extreme_global_scales(amax: float) -> None:
    x = hard_values((4, 32), torch.float32).nan_to_num(0, 0, 0)
    x[0] *= amax if amax == amax else 1
    expected, _ = fake_quantize_nvfp4(x, (-1,), torch.tensor(amax))
    assert same(traced.quantize(x, torch.tensor(amax), -1, 1, True, None), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_give_the_values_back(shape: tuple[int, ...]) -> None:
    axis = 1 - len(shape)
    for dtype, amax in ((torch.float32, 2.7), (torch.float16, 300.0), (torch.float32, 0.0)):
        x = hard_values(shape, dtype)
        values, _, codes, scales = operators.quantize_and_keep(x, torch.tensor(amax), axis, 1, True, False)
        again = operators.decode(codes, scales, torch.tensor(amax), axis, shape[1], dtype)
        assert same(again, values)
        assert again.stride() == values.stride()


@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_the_references_bytes(dtype: torch.dtype, rectified: bool) -> None:
    """Also of negative values that round to zero, of -0.0, NaN and Inf; and the zeros that they decode to."""
    for size, amax in ((64, 2.7), (24, 300.0), (16, 0.0)):
        x = hard_values((5, 7, size), dtype)
        x[0, :3] = -x[0, :3].abs() * 1e-6
        x[0, 3] = -0.0
        static = torch.tensor(amax)
        _, _, codes, scales = operators.quantize_and_keep(x, static, -1, 1, True, rectified)
        reference = quantize_nvfp4(torch.relu(x) if rectified else x, amax=static)
        assert torch.equal(codes[..., 0, :].contiguous().view(torch.uint8), reference.codes)
        assert same(scales[..., 0, :].float(), reference.scales.float())
        again = operators.decode(codes, scales, static, -1, size, dtype)
        expected = reference.dequantize(dtype)
        assert same(again, expected)
        assert torch.equal(torch.signbit(again.nan_to_num(0)), torch.signbit(expected.nan_to_num(0)))


def test_every_e4m3_scale_and_tie() -> None:
    """Blocks whose scale lies on, and an ulp beside, every E4M3 value and every midpoint between two."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([scales, (scales[1:] + scales[:-1]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(0.0))])
    x = torch.randn(len(points), 16, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
    x[:, 3] = 1.0
    x = x * (points / 448 * 5.1)[:, None]
    expected, _ = fake_quantize_nvfp4(x, (-1,), torch.tensor(5.1))
    assert torch.equal(traced.quantize(x, torch.tensor(5.1), -1, 1, True, None), expected)


def test_no_block_crosses_a_group() -> None:
    x = hard_values((2, 40, 3, 3), torch.float32).nan_to_num(0, 0, 0)
    found = traced.quantize(x, torch.tensor(2.0), -3, 2, True, None)
    halves = [fake_quantize_nvfp4(half, (1,), torch.tensor(2.0))[0] for half in x.chunk(2, 1)]
    assert torch.equal(found, torch.cat(halves, 1))


def test_relu_and_quantiser_share_a_bit() -> None:
    x, upstream = hard_values((2, 40, 5, 5), torch.float16).nan_to_num(0, 0, 0), torch.randn(2, 40, 5, 5).half()
    sides = []
    for function in (
        lambda x: traced.quantize(torch.relu(x), torch.tensor(1.5), -3, 1, True, None),
        lambda x: traced.relu_and_quantize(x, torch.tensor(1.5), -3, 1, True, None),
    ):
        given = x.clone().requires_grad_()
        y = function(given)
        y.backward(upstream)
        sides.append((y.detach(), given.grad))
    assert torch.equal(sides[0][0], sides[1][0])
    assert torch.equal(sides[0][1], sides[1][1])  # type: ignore[arg-type]


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_a_relu_with_bits(slope: float) -> None:
    x, upstream = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = traced.rectify(one, slope), F.leaky_relu(other, slope)
    y.backward(upstream)
    z.backward(upstream)
    assert torch.equal(y, z)
    assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_learned_amax_has_the_same_gradient() -> None:
    x, upstream = torch.randn(2, 40, 5, 5), torch.randn(2, 40, 5, 5)
    sides = []
    for function in (
        lambda x, amax: traced.quantize_learned(x, amax, -3, 1, None),
        lambda x, amax: fake_quantize_learned(x, QuantSpec(scale="static"), -3, amax),
    ):
        given, amax = x.clone().requires_grad_(), torch.tensor(1.1, requires_grad=True)
        y = function(given, amax)
        y.backward(upstream)
        sides.append((y.detach(), given.grad, amax.grad))
    (y, dx, damax), (expected, expected_dx, expected_damax) = sides
    assert torch.equal(y, expected)  # type: ignore[arg-type]
    assert torch.equal(dx, expected_dx)  # type: ignore[arg-type]
    torch.testing.assert_close(damax, expected_damax, rtol=1e-5, atol=0)  # sums in another order


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("groups", [0, 1, 4, 12])
def test_amax_from_moments(groups: int, slope: float) -> None:
    """Of BatchNorm (0), GroupNorm and InstanceNorm, also with negative weights: never below that of the output."""
    x, weight, bias = torch.randn(3, 12, 7, 5) * 3 + 1, torch.randn(12), torch.randn(12)
    if groups:
        y, mean, rstd = norms.group_norm(x, groups, weight, bias, 1e-5, True)
        torch.testing.assert_close(y, F.group_norm(x, groups, weight, bias))
    else:
        running = [torch.zeros(12), torch.ones(12)]
        y, mean, rstd = norms.batch_norm(x, *(each.clone() for each in running), weight, bias, 0.1, 1e-5)
        assert torch.equal(y, F.batch_norm(x, *running, weight, bias, True))
    found = norms.amax_of_norm(x, mean, rstd, weight, bias, y, slope)
    expected = finite_amax(F.leaky_relu(y, slope))
    assert expected <= found <= expected * (1 + 4 * (norms.MARGIN - 1))


@pytest.mark.parametrize("groups", [1, 4, 12])
def test_the_gradient_of_a_group_norm(groups: int) -> None:
    x, weight, bias = torch.randn(2, 12, 4, 3).double(), torch.randn(12).double(), torch.randn(12).double()
    sides = []
    for function in (
        lambda x, w, b: norms.group_norm(x, groups, w, b, 1e-5, True)[0],
        lambda x, w, b: F.group_norm(x, groups, w, b),
    ):
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        function(*leaves).backward(torch.linspace(-1, 1, x.numel()).view(x.shape).double())
        sides.append([leaf.grad for leaf in leaves])
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # the sums are in float32


def test_repeated_pixels() -> None:
    x = torch.randn(2, 5, 3, 4).to(memory_format=torch.channels_last)
    found = norms.repeat_pixels(x, 2, 3)
    assert torch.equal(found, F.interpolate(x, scale_factor=(2, 3)))
    assert found.is_contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    """Two readers of one tensor, an addition in place, a ReLU in place."""

    def __init__(self, before: int, after: int, norm: Any) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1, bias=False), norm(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1, bias=False), norm(after)
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, bias=False), norm(after))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


class Network(nn.Module):
    def __init__(self, norm: Any, activation: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), norm(24), activation())
        self.block = nn.Sequential(nn.MaxPool2d(3, 2, 1), Residual(24, 48, norm))
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Sequential(nn.Conv2d(72, 16, 3, padding=1), norm(16), nn.Dropout(0.0), activation())
        self.head = nn.Sequential(nn.Conv2d(16, 16, 1), nn.SiLU(), nn.Conv2d(16, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.stem(x)
        return self.head(self.last(torch.cat([self.up(self.block(skip)), skip], 1)))


def run_expanded(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """What inductor would generate kernels for, run operator by operator."""
    expand(module.graph, operators.EXPANSIONS)
    module.recompile()
    assert not [node for node in module.graph.nodes if "fp4deploy.traced" in str(node.target)]
    return make_boxed_func(module.forward)


def decompositions() -> dict[Any, Any]:
    """Inductor's, imported late: every process of the tests imports this file, and few need a compiler."""
    import torch._inductor.lowering  # noqa: F401  they use it
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compiled(model: nn.Module, seen: list[Counter[str]]) -> Any:
    mark_fusible(model)

    def inner(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(Counter(getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes))
        return aot_autograd(fw_compiler=run_expanded, decompositions=decompositions())(module, inputs)

    return torch.compile(model, backend=backend(inner), fullgraph=True, dynamic=False)


def step(model: nn.Module, x: torch.Tensor, forward: Any = None) -> list[torch.Tensor]:
    model.zero_grad()
    y = (model if forward is None else forward)(x)
    y.square().mean().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return [y.detach(), torch.cat(gradients)]


def images(seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last)


def prepared(norm: Any, activation: Any, recipe: str, part: bool = False) -> nn.Module:
    """part: the stem, the block and one layer more, which compile in half the time."""
    torch.manual_seed(0)
    network: nn.Module = Network(norm, activation)
    if part:
        network = nn.Sequential(network.stem, network.block, nn.Conv2d(48, 4, 1))
    model = prepare(network, recipe).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    calibrate(model, images())
    return model.train()


CASES = [
    (nn.BatchNorm2d, nn.ReLU, "nvfp4_qat"),
    pytest.param(
        lambda channels: nn.InstanceNorm2d(channels, affine=True),
        lambda: nn.LeakyReLU(0.1, True),
        "nvfp4_qat_delayed",
        marks=pytest.mark.nightly,
    ),
    pytest.param(lambda channels: nn.GroupNorm(4, channels), nn.ReLU, "nvfp4_qat+learned", marks=pytest.mark.variants),
]


@pytest.mark.parametrize(("norm", "activation", "recipe"), CASES, ids=["batch", "instance", "group"])
def test_a_network_through_all_passes(norm: Any, activation: Any, recipe: str) -> None:
    """With an amax above every element, then with that of the step, beyond which the largest element may lie."""
    model = prepared(norm, activation, recipe)
    eager, seen = copy.deepcopy(model), list[Counter[str]]()
    forward = compiled(model, seen)
    for seed, factor in enumerate((1.5, 1.0 if recipe == "nvfp4_qat+learned" else 0.1)):
        with torch.no_grad():
            for each in (model, eager):
                for layer in quantized_layers(each).values():
                    layer.input_amax.mul_(factor)  # type: ignore[union-attr]
        found, expected = step(model, images(seed), forward), step(eager, images(seed))
        compared = 1 if factor < 1 else 2  # an ulp decides whether the element on the edge has a gradient
        for one, other in list(zip(found, expected, strict=True))[:compared]:
            assert (one - other).norm() <= 1e-5 * other.norm()
    for (name, one), (_, other) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6, msg=name)
    assert len(seen) == 1
    assert seen[0]["repeat_pixels"] == 1
    assert not {"relu", "leaky_relu", "dropout", "interpolate"} & seen[0].keys()
    if recipe != "nvfp4_qat+learned":  # two layers read what the pooling gives, one reads two parts of a concatenation
        assert seen[0]["quantize"] + seen[0]["relu_and_quantize"] == len(quantized_layers(model)) - 1 + 1
        assert seen[0]["amax"] == (1 if recipe == "nvfp4_qat" else 3)  # of a sum; two of a pooling that may be negative
    if recipe == "nvfp4_qat":
        assert seen[0]["relu_and_quantize"] == 2


@pytest.mark.parametrize("recipe", sample(["nvfp4_qat", "nvfp4_qat+dynamic"], every=2))
def test_the_backward_keeps_codes_and_computes_the_same_bits(recipe: str) -> None:
    """The default share keeps no more than the values alone take, without the bits of the quantisers."""
    plain, kept, results = prepared(nn.BatchNorm2d, nn.ReLU, recipe, part=True), {}, {}
    for share in (0.0, BALANCED, 1.0):
        model = copy.deepcopy(plain)
        forward, kept[share] = compiled_and_kept(model, partial(keep_codes, share=share) if share else lambda _: None)
        results[share] = [each for seed in range(2) for each in step(model, images(seed), forward)]
    for share in (BALANCED, 1.0):
        assert all(map(torch.equal, results[share], results[0.0]))
    assert {each.dtype for each in kept[1.0]} - {each.dtype for each in kept[0.0]} == {torch.int64, torch.float16}
    size = {share: sum(each.nbytes for each in found) for share, found in kept.items()}
    assert size[1.0] < 0.9 * size[0.0]
    assert size[BALANCED] < size[0.0]


@pytest.mark.parametrize(("recompute", "share"), [(None, BALANCED), (True, 1.0), (False, 0.0)])
def test_the_setting_decides_on_the_share(recompute: bool | None, share: float) -> None:
    assert codes_kept(recompute) == share


def compiled_and_kept(model: nn.Module, change: Any) -> tuple[Any, list[torch.Tensor]]:
    """The compiled forward, its joint graph changed; feature maps that it keeps for the backward, once it has run."""
    found: list[torch.Tensor] = []

    def divide(joint: Any, inputs: Any, **how: Any) -> Any:
        change(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)
        values = [node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder"]
        found.extend(each for each in values if each.ndim > 3 and each.shape[0] == 2)
        return forward, backward

    def inner(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_autograd(fw_compiler=run_expanded, decompositions=decompositions(), partition_fn=divide)(
            module, inputs
        )

    mark_fusible(model)
    return torch.compile(model, backend=backend(inner), fullgraph=True, dynamic=False), found


def test_a_shared_quantiser_takes_the_larger_amax() -> None:
    model = prepared(nn.BatchNorm2d, nn.ReLU, "nvfp4_qat+delayed", part=True)
    block: Any = model[1][1]  # type: ignore[index]
    block.conv1.input_amax.fill_(4.0)
    block.short[0].input_amax.fill_(6.0)
    eager = copy.deepcopy(model)
    eager[1][1].conv1.input_amax.fill_(6.0)  # type: ignore[index, union-attr]
    found, expected = step(model, images(), compiled(model, [])), step(eager, images())
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=1e-6)
    assert block.conv1.input_amax < block.short[0].input_amax, "each follows its own"


class InPlace(nn.Module):
    """What overwrites a tensor that is read again must stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.conv(F.relu_(y))
        return z + y


def test_an_overwritten_tensor_that_is_read_again() -> None:
    torch.manual_seed(0)
    model = prepare(InPlace(), "nvfp4_qat", include="conv").train()
    calibrate(model, torch.randn(2, 16, 4, 4))
    eager = copy.deepcopy(model)
    x = torch.randn(2, 16, 4, 4)
    for one, other in zip(step(model, x, compiled(model, [])), step(eager, x), strict=True):
        torch.testing.assert_close(one, other)


def test_without_a_gpu_fuse_changes_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = prepared(nn.BatchNorm2d, nn.ReLU, "nvfp4_qat")
    assert fd.fuse(model) is model
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("fails", [False, True])
def test_warming_up_leaves_no_trace(fails: bool) -> None:
    """Gradients, by value and by identity, also those of the inputs; buffers; and where the forward raises."""
    model = prepared(nn.BatchNorm2d, nn.ReLU, "nvfp4_qat").train()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    model(x).sum().backward()
    leaves = [x, *model.parameters()]
    *gradients, _ = [leaf.grad for leaf in leaves]
    leaves[-1].grad = None
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    assert len(values) == len(gradients) > 4
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if fails:
        model.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        _warm_up(model, (x,))
    assert all(leaf.grad is each for leaf, each in zip(leaves, [*gradients, None], strict=True))
    assert all(map(torch.equal, values, gradients))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def fail(*_: Any) -> None:
    raise ZeroDivisionError
