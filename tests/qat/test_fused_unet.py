"""The fused UNet's order of operations on a CPU, its kernels written in torch: the gradients of the plain UNet.

In float64 both are the same, parameter by parameter. In FP16 they round at other places, and quantisers turn a last bit
into another FP4 value, which the layers behind amplify. Neither is nearer to float64 then: one step of UNet 0.25 with a
learned amax, 4 x 96 x 128, relative distance to the same step in float64, six seeds (lowest to highest),

    gradients of         plain, FP32    plain, FP16    fused, FP16    fused against plain, both FP16
    all learned amaxes   0.08 - 0.56    0.72 - 1.46    0.84 - 1.71    0.66 - 1.31
    all other weights    0.05 - 0.49    0.70 - 0.79    0.72 - 0.80    0.69 - 0.79

so that a comparison of whole networks in FP16 cannot tell a mistake from rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.models import build_unet
from fp4deploy.qat import QuantSpec, calibrate_percentile, prepare, quantized_layers, recipes
from fp4deploy.qat.fused_unet import KEPT_CONCATENATIONS, FusedUNet, fuse_unet, has_kernels
from fp4deploy.qat.operators.learned import fake_quantize_learned
from fp4deploy.qat.operators.recompute import Call, Recomputed, recomputing
from tests.samples import sample


def clipped(y: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fake_quantize_nvfp4(y, (1,), amax.reshape(()))


def follow(largest: torch.Tensor, tracked: torch.Tensor | None, decay: float, delayed: bool) -> torch.Tensor:
    """What `track_amax` of the kernels does."""
    before = None if tracked is None else tracked.clone()
    moved = largest if before is None else torch.maximum(largest, before * decay)
    if tracked is not None:
        tracked.copy_(moved)
    return (before if delayed and before is not None and before > 0 else moved).reshape(1)


def normalized(x: torch.Tensor, bias: Any, weight: Any, beta: Any, groups: int, eps: float) -> torch.Tensor:
    return F.group_norm(x if bias is None else x + bias.view(1, -1, 1, 1), groups, weight, beta, eps).relu()


def coefficients(x: torch.Tensor, bias: Any, weight: Any, beta: Any, groups: int, eps: float) -> torch.Tensor:
    """[N, 2, C]: a and b of `normalized`, relu(a x + b)."""
    shift = torch.zeros_like(weight) if bias is None else bias
    grouped = (x + shift.view(1, -1, 1, 1)).unflatten(1, (groups, -1)).flatten(2)
    repeats = x.shape[1] // groups
    mean = grouped.mean(2).repeat_interleave(repeats, 1)
    a = weight * (grouped.var(2, correction=0) + eps).rsqrt().repeat_interleave(repeats, 1)
    return torch.stack([a, beta + (shift - mean) * a], 1)


def group_norm_relu(
    x: Any, bias: Any, weight: Any, beta: Any, groups: Any, eps: Any, amax: Any, tracked: Any, decay: Any,
    quantize: Any, delayed: Any = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    ab = coefficients(x, bias, weight, beta, groups, eps)
    largest = follow(affine_relu(x, ab).amax(), tracked, decay, delayed)
    y = group_norm_relu_again(x, ab, largest if amax is None else amax, quantize)
    return y, ab, torch.tensor([groups, eps]), beta.clone(), largest


def affine_relu(x: torch.Tensor, ab: torch.Tensor) -> torch.Tensor:
    a, b = ab[..., None, None].unbind(1)
    return torch.relu(a * x + b)


def group_norm_relu_again(x: Any, ab: Any, amax: Any, quantize: Any) -> torch.Tensor:
    y = affine_relu(x, ab)
    return clipped(y, amax)[0] if quantize else y


def group_norm_relu_backward(
    x: Any, dy: Any, ab: Any, settings: Any, beta: Any, bias: Any, weight: Any, amax: Any, quantize: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    dy = dy.contiguous(memory_format=torch.channels_last)
    with torch.enable_grad():
        given = [None if each is None else each.detach().requires_grad_() for each in (x, bias, weight, beta)]
        y = normalized(*given, int(settings[0]), float(settings[1]))
        found = torch.autograd.grad(
            y, [each for each in given if each is not None], dy * (clipped(y.detach(), amax)[1] if quantize else 1)
        )
    dx, *others = found
    dbias = others.pop(0) if bias is not None else torch.zeros_like(weight)
    return dx, torch.stack([*others, dbias])


def group_norm_relu_backward_clipped(
    x: Any, dy: Any, ab: Any, settings: Any, beta: Any, bias: Any, weight: Any, inside: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    dy = dy.contiguous(memory_format=torch.channels_last)
    return group_norm_relu_backward(x, dy * inside, ab, settings, beta, bias, weight, None, False)


def group_norm_relu_backward_(x: Any, dy: Any, ab: Any, *how: Any) -> torch.Tensor:
    *settings, clips, quantize = how
    dx, sums = group_norm_relu_backward(x, dy, ab, *settings, clips)
    x.copy_(group_norm_relu_again(x, ab, settings[-1], quantize))
    dy.copy_(dx)
    return sums


def pool(y: Any, amax: Any) -> torch.Tensor:
    pooled = F.max_pool2d(y, 2)
    return pooled if amax is None else clipped(pooled, amax)[0]


def pool_backward(y: Any, dskip: Any, dpooled: Any, amax: Any) -> torch.Tensor:
    dpooled = dpooled.contiguous(memory_format=torch.channels_last)
    with torch.enable_grad():
        given = y.detach().requires_grad_()
        pooled = F.max_pool2d(given, 2)
        mask = 1 if amax is None else clipped(pooled.detach(), amax)[1]
        (dy,) = torch.autograd.grad(pooled, given, dpooled * mask)
    return dy if dskip is None else dy + dskip


def biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.to(x.dtype)[:, None, None]


def track_amax(
    x: Any, other: Any, tracked: Any, decay: Any, read: Any, delayed: Any = False, bias: Any = None
) -> torch.Tensor:
    largest = torch.maximum(biased(x, bias).abs().amax(), other) if read else other.clone()
    return follow(largest.reshape(()), tracked, decay, delayed)


def previous_amax(x: Any, other: Any, tracked: Any, bias: Any = None) -> torch.Tensor:
    return (tracked if tracked > 0 else torch.maximum(biased(x, bias).abs().amax(), other)).reshape(1).clone()


def concat(
    a: Any, b: Any, amax: Any, other: Any = None, tracked: Any = None, decay: Any = 0.0, bias: Any = None
) -> Any:
    b = biased(b, bias)
    out = torch.cat([a, b], 1)
    if tracked is not None:
        follow(torch.maximum(b.abs().amax(), other).reshape(()), tracked, decay, False)
    return (out, torch.zeros(0, dtype=torch.uint8)) if amax is None else clipped(out, amax)


def concat_again(x: Any, ab: Any, b: Any, amax: Any, bias: Any = None) -> Any:
    return concat(affine_relu(x, ab), b, amax, bias=bias)[0]


def pool_backward_again(x: Any, ab: Any, dskip: Any, dpooled: Any, amax: Any) -> torch.Tensor:
    return pool_backward(affine_relu(x, ab), dskip, dpooled, amax)


def separate(gradient: Any, inside: Any, first: Any, bias: Any = False) -> Any:
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    masked = gradient if inside is None else gradient * inside
    da, db = (part.contiguous(memory_format=torch.channels_last) for part in (masked[:, :first], masked[:, first:]))
    return da, db, db.sum((0, 2, 3)) if bias else torch.empty(0)


def damax(value: torch.Tensor, gradient: torch.Tensor, amax: torch.Tensor, largest: Any) -> torch.Tensor:
    """By the definition; a bound that nothing exceeds means that no block saturates."""
    assert largest is None or value.amax() <= largest * (1 + 1e-6)
    learned = amax.detach().reshape(()).clone().requires_grad_()
    with torch.enable_grad():
        fake_quantize_learned(value, QuantSpec(scale="static"), 1, learned).backward(gradient)
    assert learned.grad is not None
    return learned.grad


def group_norm_relu_damax(x: Any, dy: Any, ab: Any, amax: Any, largest: Any) -> torch.Tensor:
    return damax(affine_relu(x, ab), dy, amax, largest)


def pool_damax(y: Any, dpooled: Any, amax: Any, largest: Any) -> torch.Tensor:
    return damax(F.max_pool2d(y, 2), dpooled, amax, largest)


def concat_damax(a: Any, b: Any, gradient: Any, amax: Any, largest: Any, bias: Any = None) -> torch.Tensor:
    return damax(torch.cat([a, biased(b, bias)], 1), gradient, amax, largest)


def fake_quantize_weights(weights: Any, axes: Any, dtype: Any) -> torch.Tensor:
    found = [fake_quantize_nvfp4(weight, (axis,))[0] for weight, axis in zip(weights, axes, strict=True)]
    flat = [F.pad(each.permute(_order(each)).flatten(), (0, -each.numel() % 16)) for each in found]
    return torch.cat(flat).to(dtype)


def _order(weight: torch.Tensor) -> tuple[int, ...]:
    """Its axes in the order of memory."""
    return (0, 1, 2, 3) if weight.is_contiguous() else (0, 2, 3, 1)


KERNELS = (
    *(group_norm_relu, group_norm_relu_backward, pool, pool_backward, track_amax, previous_amax, concat, separate),
    *(group_norm_relu_damax, pool_damax, concat_damax, fake_quantize_weights, group_norm_relu_again),
    *(group_norm_relu_backward_, group_norm_relu_backward_clipped, concat_again, pool_backward_again),
)


@pytest.fixture(autouse=True)
def _kernels_in_torch() -> Iterator[None]:
    library = torch.library.Library("fp4deploy", "IMPL")
    for kernel in KERNELS:
        library.impl(kernel.__name__, kernel, "CPU")
    yield
    library._destroy()


RECIPES = (
    *("nvfp4_qat_delayed", "nvfp4_qat+dynamic", "nvfp4_qat+learned", "nvfp4_qat_2d", "nvfp4_4o6_qat"),
    *("nvfp4_4o6_qat+delayed", "nvfp4_train", "tetrajet"),
)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def step(model: Any, x: torch.Tensor, fused: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradient of every parameter that has one."""
    model.zero_grad()
    torch.manual_seed(7)  # of stochastic rounding
    y = model._fused(model.read_image(x)) if fused else model(x)
    y.square().mean().backward()
    return y.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("recipe", sample(RECIPES, every=2))
def test_a_step_of_every_recipe_with_kernels(recipe: str) -> None:
    """Two steps, since the amax of a delayed scale is another one from the second on.

    In float64, so that the orders of sums do not decide how an element is rounded to FP4.
    """
    torch.manual_seed(0)
    plain = prepare(build_unet(3, 0.25), recipe).train()
    assert has_kernels(plain)
    plain = plain.double()
    if "learned" in recipe:
        calibrate_percentile(plain, [torch.randn(2, 3, 32, 32).double()], 99.0)
    fused: Any = fuse_unet(copy.deepcopy(plain))
    for seed in range(2 if "delayed" in recipe else 1):
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).double()
        (logits, gradients), (expected, wanted) = step(fused, x, True), step(plain, x, False)
        assert distance(logits, expected) < 1e-3
        assert gradients.keys() == wanted.keys()
        assert all("learned" not in recipe or f"{name}.input_amax" in wanted for name in quantized_layers(plain))
        wrong = {name: distance(gradients[name], wanted[name]) for name in wanted}
        assert max(wrong.values()) < 1e-3, max(wrong.items(), key=lambda each: each[1])
    for one, other in zip(quantized_layers(plain).values(), quantized_layers(fused).values(), strict=True):
        if one.input_amax is not None and other.input_amax is not None:
            torch.testing.assert_close(one.input_amax, other.input_amax, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "recipe",
    sample(
        ["nvfp4_qat_delayed", None, "nvfp4_qat", *(each for each in RECIPES if each != "nvfp4_qat_delayed")], every=4
    ),
)
def test_inputs_computed_again_give_the_same_bits(recipe: str | None) -> None:
    torch.manual_seed(0)
    plain: Any = build_unet(3, 0.25)
    fused: Any = fuse_unet((prepare(plain, recipe) if recipe else plain).train())
    x = torch.randn(2, 3, 32, 32)
    if recipe and "learned" in recipe:
        calibrate_percentile(fused, [x], 99.0)
    kept, again = (copy.deepcopy(fused) for _ in range(2))
    for _ in range(2):  # the second with other weights, and with a delayed amax
        expected = step(kept, x, True)
        with recomputing():
            found = step(again, x, True)
        assert torch.equal(expected[0], found[0])
        assert all(torch.equal(value, found[1][name]) for name, value in expected[1].items())
        for model in (kept, again):
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad


class AddedBefore(FusedUNet):
    """Torch adds the biases of the transposed convolutions."""

    def _joined(self, upwards: Any, bias: Any, *rest: Any) -> torch.Tensor:
        return super()._joined(upwards + bias.to(upwards.dtype)[:, None, None], None, *rest)


@pytest.mark.parametrize(("recipe", "again"), sample([None, *RECIPES], [False, True], every=4))
def test_biases_of_transposed_convolutions_have_the_bits_of_those_added_before(recipe: str | None, again: bool) -> None:
    torch.manual_seed(0)
    plain: Any = build_unet(3, 0.25)
    fused: Any = fuse_unet((prepare(plain, recipe) if recipe else plain).train())
    for up in fused.up:
        torch.nn.init.normal_(up.bias)
    x = torch.randn(2, 3, 32, 32)
    if recipe and "learned" in recipe:
        calibrate_percentile(fused, [x], 99.0)
    before = copy.deepcopy(fused)
    before.__class__ = AddedBefore
    for _ in range(2):  # the second with a delayed amax
        results = []
        for model in (fused, before):
            with recomputing() if again else nullcontext():
                results.append(step(model, x, True))
        (found, gradients), (expected, wanted) = results
        assert torch.equal(found, expected)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            if name.startswith("up.") and name.endswith(".bias"):
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-7)
            else:
                assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("frozen", [False, True])
def test_transposed_convolutions_without_a_bias_or_with_a_frozen_one(frozen: bool) -> None:
    torch.manual_seed(0)
    plain: Any = prepare(build_unet(3, 0.25), "nvfp4_qat_delayed").train().double()
    for up in plain.up:
        up.bias = up.bias.requires_grad_(False) if frozen else None
    fused: Any = fuse_unet(copy.deepcopy(plain))
    x = torch.randn(2, 3, 32, 32).double()
    (logits, gradients), (expected, wanted) = step(fused, x, True), step(plain, x, False)
    assert distance(logits, expected) < 1e-3
    assert gradients.keys() == wanted.keys()
    assert not any(name.startswith("up.") and name.endswith(".bias") for name in gradients)
    assert max(distance(gradients[name], wanted[name]) for name in wanted) < 1e-3


def test_observed_inputs_are_those_of_the_plain_forward() -> None:
    torch.manual_seed(0)
    plain: Any = build_unet(3, 0.25).double()
    fused, x = copy.deepcopy(plain), torch.randn(2, 3, 32, 32).double()
    expected: dict[torch.nn.Module, torch.Tensor] = {}
    pairs = dict(zip(plain.modules(), fused.modules(), strict=True))
    for layer in plain.modules():
        layer.register_forward_pre_hook(lambda layer, read: expected.update({pairs[layer]: read[0]}))
    fuse_unet(fused)
    found: dict[torch.nn.Module, torch.Tensor] = {}
    with torch.no_grad(), fused.observe_inputs(lambda layer, shape, read: found.update({layer: read(slice(None))})):
        fused._fused(fused.read_image(x))
        plain(x)
    convolutions = torch.nn.Conv2d | torch.nn.ConvTranspose2d
    assert found.keys() == {layer for layer in fused.modules() if isinstance(layer, convolutions)}
    for layer, read in found.items():
        torch.testing.assert_close(read, expected[layer])


def test_outputs_of_layers_that_quantise_gradients_are_observed() -> None:
    torch.manual_seed(0)
    fused: Any = fuse_unet(prepare(build_unet(3, 0.25), "nvfp4_train").train().double())
    found: dict[torch.nn.Module, torch.Size] = {}
    x = torch.randn(2, 3, 32, 32).double()
    with fused.observe_inputs(
        lambda *_: None,
        lambda layer, read, y: y.register_hook(lambda gradient: found.update({layer: gradient.shape})),
    ):
        fused._fused(fused.read_image(x)).square().mean().backward()
    assert found.keys() == set(quantized_layers(fused).values())


def test_a_second_backward_is_refused() -> None:
    """The first one overwrites what the forward kept."""
    model: Any = fuse_unet(build_unet(3, 0.25).train())
    with recomputing():
        loss = model._fused(torch.randn(1, 3, 32, 32)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"train.recompute .* runs once"):
        loss.backward()


@pytest.mark.usefixtures("whole_unets")
def test_which_inputs_of_convolutions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, pack = [], Recomputed.pack

    def watched(self: Recomputed, x: torch.Tensor) -> torch.Tensor | Call:
        kept.append((x, pack(self, x)))
        return kept[-1][1]

    monkeypatch.setattr(Recomputed, "pack", watched)
    layout: Any = {"memory_format": torch.channels_last}
    model: Any = fuse_unet(build_unet(3, 0.25).train()).to(**layout)
    with recomputing():
        y = model._fused(torch.randn(2, 3, 32, 32).to(**layout))
    assert y.grad_fn is not None
    maps = [(x, packed) for x, packed in kept if x.ndim == 4 and x.shape[0] == 2]
    values = {x.data_ptr(): x.numel() for x, packed in maps if not isinstance(packed, Call)}
    again = {x.data_ptr(): x.numel() for x, packed in maps if isinstance(packed, Call)}
    levels = [2 * 32 * 32 * 16 / 2**level for level in range(5)]
    images, pooled = 2 * 32 * 32 * 3, sum(levels[:4]) / 4
    convolutions, transposed = 2 * sum(levels) + 2 * sum(levels[:4]), sum(levels[: 4 - KEPT_CONCATENATIONS])
    concatenations = [2 * level for level in levels[:4]]
    joined, joined_again = sum(concatenations[-KEPT_CONCATENATIONS:]), sum(concatenations[:-KEPT_CONCATENATIONS])
    assert sum(values.values()) == convolutions + transposed + images + pooled + joined
    # and skip connections; the input of a convolution behind a norm is never saved
    assert sum(again.values()) == sum(levels[:4]) + joined_again


WITH_KERNELS = ("nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_qat_2d", "nvfp4_4o6_qat", "nvfp4_4o6_weight_qat")


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_which_recipes_have_kernels(recipe: str) -> None:
    """A layer that quantises its gradients quantises everything itself, between the same kernels."""
    known = recipe in WITH_KERNELS or not recipes.RECIPES[recipe].straight_through
    assert has_kernels(prepare(build_unet(3, 0.25), recipe)) == known


def test_a_learned_amax_has_kernels() -> None:
    assert has_kernels(prepare(build_unet(3, 0.25), "nvfp4_qat+learned"))
    assert not has_kernels(prepare(build_unet(3, 0.25), "nvfp4_4o6_qat+learned"))
