"""The fused operations on channels_last feature maps against torch in float64 and against the reference quantiser."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fp4deploy.formats import ZEROS_AMAX, FourOverSix, fake_quantize_nvfp4
from fp4deploy.models import build_unet
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.dispatch import mask_gradient
from fp4deploy.plugins.quantize.weights import fake_quantize_weights
from fp4deploy.qat import QuantSpec, calibrate_percentile, prepare, quantized_layers
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet
from fp4deploy.qat.operators.quantizers import quantize_operand
from fp4deploy.train.losses.segmentation import SegmentationLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

SHAPES = [(3, 64, 13, 17), (1, 16, 1, 1), (2, 48, 5, 3), (2, 1024, 4, 6), (1, 128, 64, 80)]


def feature_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator) * 3 + 1
    return x.to(dtype).to(memory_format=torch.channels_last)


def vector(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def poison() -> None:
    torch.full((1 << 22,), float("nan"), device="cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_group_norm_relu_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    channels = shape[1]
    x, dy = feature_map(shape, dtype), feature_map(shape, dtype, 1)
    bias, weight, beta = (vector(channels, seed) for seed in (2, 3, 4))
    poison()
    y, ab, moments, mean, largest = torch.ops.fp4deploy.group_norm_relu(
        x, bias, weight, beta, 8, 1e-5, None, None, 0.0, False
    )
    poison()
    dx, sums = torch.ops.fp4deploy.group_norm_relu_backward(x, dy, ab, moments, mean, bias, weight, largest, False)
    exact = [t.double().requires_grad_() for t in (x, weight, beta, bias)]
    expected = torch.relu(F.group_norm(exact[0] + exact[3].view(1, -1, 1, 1), 8, exact[1], exact[2], 1e-5))
    expected.backward(dy.double())
    rounding = 1e-3 if dtype == torch.float16 else 6e-3
    assert relative(y, expected.detach()) < rounding
    assert largest == y.abs().max()
    if shape[2] * shape[3] > 1:
        assert relative(dx, exact[0].grad) < 2 * rounding
        for got, want in zip(sums.unbind(), (exact[1].grad, exact[2].grad), strict=False):
            assert relative(got, want) < 1e-4


def test_moments_survive_a_mean_far_from_zero() -> None:
    x = (torch.randn(2, 32, 31, 33, device="cuda") + 1000).half().to(memory_format=torch.channels_last)
    one, zero = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
    y, *_ = torch.ops.fp4deploy.group_norm_relu(x, None, one, zero, 8, 1e-5, None, None, 0.0, False)
    assert relative(y, torch.relu(F.group_norm(x.double(), 8))) < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_output_is_the_reference_of_its_own_arithmetic(shape: tuple[int, ...]) -> None:
    x = feature_map(shape)
    weight, beta = vector(shape[1], 3), vector(shape[1], 4)
    tracked = torch.tensor(0.5, device="cuda")
    y, ab, _, _, amax = torch.ops.fp4deploy.group_norm_relu(x, None, weight, beta, 8, 1e-5, None, tracked, 0.9, True)
    a, b = ab.double().unbind(1)
    unquantised = torch.relu(a[..., None, None] * x.double() + b[..., None, None]).float()
    assert tracked == amax[0] == max(float(unquantised.max()), float(torch.tensor(0.5) * torch.tensor(0.9)))
    expected, _ = fake_quantize_nvfp4(unquantised, (1,), amax[0])
    assert torch.equal(y, expected.half())


def test_gradient_of_the_quantised_output_stops_where_it_saturates() -> None:
    x, dy = feature_map((2, 32, 9, 7)), feature_map((2, 32, 9, 7), seed=1)
    weight, beta = vector(32, 3), vector(32, 4)
    given = torch.tensor([0.8], device="cuda")
    _, ab, moments, mean, _ = torch.ops.fp4deploy.group_norm_relu(
        x, None, weight, beta, 8, 1e-5, given, None, 0.0, True
    )
    dx, _ = torch.ops.fp4deploy.group_norm_relu_backward(x, dy, ab, moments, mean, None, weight, given, True)
    a, b = ab.double().unbind(1)
    y = torch.relu(a[..., None, None] * x.double() + b[..., None, None]).float()
    _, inside = fake_quantize_nvfp4(y, (1,), 0.8)
    assert not inside.all()
    exact = x.double().requires_grad_()
    torch.relu(F.group_norm(exact, 8, weight.double(), beta.double(), 1e-5)).backward(dy.double() * inside)
    assert relative(dx, exact.grad) < 2e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_with_the_mask_of_another_kernel(shape: tuple[int, ...]) -> None:
    x, dy, given = feature_map(shape), feature_map(shape, seed=1), torch.tensor(0.8, device="cuda")
    weight, beta = vector(shape[1], 3), vector(shape[1], 4)
    y, *saved, largest = torch.ops.fp4deploy.group_norm_relu(x, None, weight, beta, 8, 1e-5, None, None, 0.0, False)
    spec = QuantSpec(scale="static", four_over_six=FourOverSix())
    _, inside = quantize_operand(y, spec, (1,), given)
    assert inside is not None
    masked = mask_gradient(dy, inside, y.stride(), 1)
    assert not torch.equal(masked, dy) or y.max() < 0.8
    poison()
    found = torch.ops.fp4deploy.group_norm_relu_backward_clipped(x, dy, *saved, None, weight, inside)
    wanted = torch.ops.fp4deploy.group_norm_relu_backward(x, masked, *saved, None, weight, largest, False)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("amax", [None, 2.0])
def test_pooling_and_its_gradient(amax: float | None) -> None:
    y = feature_map((2, 32, 10, 14))
    y[0, :, 2:4, 2:4] = 1.0  # equal values: the first takes the gradient, as in torch
    scale = None if amax is None else torch.tensor([amax], device="cuda")
    poison()
    pooled = torch.ops.fp4deploy.pool(y, scale)
    expected = F.max_pool2d(y, 2)
    inside = torch.ones_like(expected, dtype=torch.bool)
    if amax is not None:
        expected, inside = fake_quantize_nvfp4(expected, (1,), amax)
    assert torch.equal(pooled, expected)
    dskip, dpooled = feature_map((2, 32, 10, 14), seed=1), feature_map((2, 32, 5, 7), seed=2)
    exact = y.float().requires_grad_()
    F.max_pool2d(exact, 2).backward(dpooled.float() * inside)
    poison()
    assert torch.equal(torch.ops.fp4deploy.pool_backward(y, dskip, dpooled, scale), (exact.grad + dskip).half())
    assert torch.equal(torch.ops.fp4deploy.pool_backward(y, None, dpooled, scale), exact.grad.half())


@pytest.mark.parametrize("amax", [None, 2.0])
def test_concatenation_and_its_gradient(amax: float | None) -> None:
    a, b = feature_map((2, 32, 5, 7)), feature_map((2, 48, 5, 7), seed=1)
    scale = None if amax is None else torch.tensor([amax], device="cuda")
    poison()
    out, bits = torch.ops.fp4deploy.concat(a, b, scale)
    expected = torch.cat([a, b], 1)
    inside = torch.ones_like(expected, dtype=torch.bool)
    if amax is not None:
        expected, inside = fake_quantize_nvfp4(expected, (1,), amax)
    assert torch.equal(out, expected)
    gradient = feature_map((2, 80, 5, 7), seed=2)
    da, db, _ = torch.ops.fp4deploy.separate(gradient, bits if amax is not None else None, 32)
    assert torch.equal(torch.cat([da, db], 1), gradient * inside)


# N, channels of both parts, H, W.
PARTS = [(2, 32, 48, 5, 7), (3, 64, 64, 64, 66), (1, 16, 16, 1, 1), (2, 1024, 1024, 3, 5), (1, 16, 240, 9, 11)]


def with_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x + bias.to(x.dtype)[:, None, None]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("amax", [None, 2.0])
def test_concatenation_with_a_bias(parts: tuple[int, ...], dtype: torch.dtype, amax: float | None) -> None:
    """The bits of a bias that torch adds before, and the sums of the gradient in the same order each time."""
    n, first, second, h, w = parts
    a, b = feature_map((n, first, h, w), dtype), feature_map((n, second, h, w), dtype, 1)
    bias, ab = vector(second, 2), vector(n * 2 * first, 3).view(n, 2, first)
    scale, ops = None if amax is None else torch.tensor([amax], device="cuda"), torch.ops.fp4deploy
    added = with_bias(b, bias)
    poison()
    found = (*ops.concat(a, b, scale, bias=bias), ops.concat_again(a, ab, b, scale, bias))
    poison()
    wanted = (*ops.concat(a, added, scale), ops.concat_again(a, ab, added, scale))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    gradient, bits = feature_map((n, first + second, h, w), dtype, 4), None if amax is None else found[1]
    da, db, nothing = ops.separate(gradient, bits, first)
    assert nothing.numel() == 0
    sums = []
    for _ in range(2):
        poison()
        *separated, dbias = ops.separate(gradient, bits, first, True)
        assert torch.equal(separated[0], da)
        assert torch.equal(separated[1], db)
        assert relative(dbias, db.double().sum((0, 2, 3))) < 2e-6
        sums.append(dbias)
    assert torch.equal(*sums)
    assert sums[0].shape == (second,)
    assert sums[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_added_by_the_concatenation_has_the_bits_of_the_convolution(dtype: torch.dtype) -> None:
    x, a, bias = feature_map((2, 64, 9, 11), dtype), feature_map((2, 32, 18, 22), dtype, 1), vector(48, 2)
    weight = (feature_map((64, 48, 2, 2), torch.float32, 3) / 32).to(dtype)
    with torch.backends.cudnn.flags(deterministic=True):
        whole = F.conv_transpose2d(x, weight, bias.to(dtype), 2)
        alone = F.conv_transpose2d(x, weight, None, 2)
    out, _ = torch.ops.fp4deploy.concat(a, alone, None, bias=bias)
    assert torch.equal(out, torch.cat([a, whole], 1))


def test_weights_of_every_layout_in_one_launch() -> None:
    make = torch.randn
    weights = [
        make(40, 24, 3, 3),
        make(40, 24, 3, 3),
        make(32, 17, 2, 2),
        make(10, 33),
        make(1, 1, 1, 1),
        make(64, 600),
    ]
    weights = [weight.cuda() for weight in weights]
    weights[0] = weights[0].to(memory_format=torch.channels_last)
    weights[2] = weights[2].to(memory_format=torch.channels_last)
    weights[5][3, 7] = float("nan")
    axes = [1, 1, 0, 1, 1, 1]
    poison()
    for got, weight, axis in zip(fake_quantize_weights(weights, axes, torch.half), weights, axes, strict=True):
        expected = fake_quantize_nvfp4(weight, (axis,))[0].half()
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


def test_tracked_amax_skips_what_is_not_finite() -> None:
    x = feature_map((2, 16, 5, 7))
    x[0, 3, 2, 1] = float("inf")
    finite = x[x.isfinite()].abs().max()
    tracked = torch.tensor(1.0, device="cuda")
    assert torch.ops.fp4deploy.track_amax(x, None, tracked, 0.5, True)[0] == finite == tracked
    other = torch.tensor([99.0], device="cuda")
    assert torch.ops.fp4deploy.track_amax(x, other, None, 0.5, True)[0] == 99.0


@pytest.mark.parametrize("shape", [(2, 16, 5, 7), (2, 48, 64, 66), (1, 2032, 3, 3), (3, 64, 33, 35), (4, 80, 128, 160)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tracked_amax_of_a_sum_with_a_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, bias = feature_map(shape, dtype), vector(shape[1], 1)
    bias[3], bias[5] = 4e4, float("nan")
    x[0, 3, 2, 1], x[0, 4, 1, 1], x[-1, 6, 2, 2] = 6e4, float("inf"), float("nan")  # in FP16 the first overflows
    added, ops = with_bias(x, bias), torch.ops.fp4deploy
    finite = added[added.isfinite()].abs().max().float()
    for given in (x, x.contiguous()):
        tracked = torch.tensor(1.0, device="cuda")
        poison()
        assert ops.track_amax(given, None, tracked, 0.5, True, bias=bias)[0] == finite == tracked
        assert ops.previous_amax(given, None, torch.tensor(0.0, device="cuda"), bias)[0] == finite
        assert ops.previous_amax(given, None, torch.tensor(0.25, device="cuda"), bias)[0] == 0.25
    for channel in (0, shape[1] - 1):  # of every channel its own bias
        alone, bias = torch.zeros_like(x), torch.zeros_like(bias)
        bias[channel] = 3.0
        alone[-1, channel, -1, -1] = 4.0
        assert ops.track_amax(alone, None, None, 0.0, True, bias=bias)[0] == 7.0


# Tracked amax before, what a delayed step with an own maximum of 4 quantises with, the tracked amax after; decay 0.5.
MOVES = [(0.0, 4.0, 4.0), (1.0, 1.0, 4.0), (6.0, 6.0, 4.0), (16.0, 16.0, 8.0)]


@pytest.mark.parametrize(("before", "used", "after"), MOVES)
def test_a_delayed_amax_of_a_tensor(before: float, used: float, after: float) -> None:
    x = (feature_map((2, 16, 5, 7)).float().clamp(-1, 1) * 4).half()
    x[1, 2, 3, 4] = float("inf")
    tracked = torch.tensor(before, device="cuda")
    assert torch.ops.fp4deploy.previous_amax(x, None, tracked)[0] == used
    assert tracked == before
    assert torch.ops.fp4deploy.track_amax(x, None, tracked, 0.5, True, True)[0] == used
    assert tracked == after
    other = torch.tensor([9.0], device="cuda")
    tracked.fill_(before)
    assert torch.ops.fp4deploy.previous_amax(x, other, tracked)[0] == (used if before else 9.0)
    assert torch.ops.fp4deploy.track_amax(x, other, tracked, 0.5, False, True)[0] == (used if before else 9.0)
    assert tracked == max(9.0, before / 2)


def test_a_delayed_amax_of_zeros_is_small_and_not_taken_for_the_next_step() -> None:
    x, tracked = torch.zeros_like(feature_map((2, 16, 5, 7))), torch.tensor(0.0, device="cuda")
    assert torch.ops.fp4deploy.previous_amax(x, None, tracked) == ZEROS_AMAX
    assert torch.ops.fp4deploy.track_amax(x, None, tracked, 0.5, True, True) == ZEROS_AMAX
    assert tracked == ZEROS_AMAX
    assert torch.ops.fp4deploy.previous_amax(x + 2, None, tracked) == 2
    assert torch.ops.fp4deploy.track_amax(x + 2, None, tracked, 0.5, True, True) == 2
    assert tracked == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_delayed_amax_of_a_normalised_image(shape: tuple[int, ...]) -> None:
    x = feature_map(shape)
    weight, beta = vector(shape[1], 3), vector(shape[1], 4)
    arguments = (x, None, weight, beta, 8, 1e-5, None)
    own = torch.ops.fp4deploy.group_norm_relu(*arguments, None, 0.0, True)[4][0]
    tracked = torch.tensor(0.0, device="cuda")
    for before in (0.0, 0.25 * float(own), 4 * float(own)):
        tracked.fill_(before)
        used = tracked.clone() if before else own
        y, ab, _, _, largest = torch.ops.fp4deploy.group_norm_relu(*arguments, tracked, 0.5, True, True)
        assert largest[0] == used
        assert tracked == max(own, torch.tensor(before, device="cuda") * 0.5)
        a, b = ab.double().unbind(1)
        unquantised = torch.relu(a[..., None, None] * x.double() + b[..., None, None]).float()
        assert torch.equal(y, fake_quantize_nvfp4(unquantised, (1,), used)[0].half())


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 64, 66), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_concatenation_moves_the_tracked_amax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n, h, w = shape
    a, b = feature_map((n, 32, h, w), dtype), feature_map((n, 48, h, w), dtype, 1)
    b[0, 5, 0, 0] = float("nan")
    finite = b[b.isfinite()].abs().max().float()
    amax = torch.tensor([2.0], device="cuda")
    for other, before in ((0.0, 0.0), (99.0, 1.0), (0.5, 400.0)):
        largest, tracked = torch.tensor([other], device="cuda"), torch.tensor(before, device="cuda")
        poison()
        out, bits = torch.ops.fp4deploy.concat(a, b, amax, largest, tracked, 0.5)
        expected, expected_bits = torch.ops.fp4deploy.concat(a, b, amax)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(bits, expected_bits)
        assert tracked == max(finite, largest[0], torch.tensor(before / 2, device="cuda"))


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 64, 66), (1, 1, 1)])
def test_a_concatenation_with_a_bias_moves_the_tracked_amax(shape: tuple[int, ...]) -> None:
    n, h, w = shape
    a, b, bias = feature_map((n, 32, h, w)), feature_map((n, 48, h, w), seed=1), vector(48, 2)
    b[:, 6], bias[6] = -1e4, 2e4  # the bias alone is larger than every sum
    b[0, 5, 0, 0] = float("nan")
    added, amax = with_bias(b, bias), torch.tensor([2.0], device="cuda")
    for other, before in ((0.0, 0.0), (2e4, 1.0), (0.5, 1e5)):
        largest, moved = torch.tensor([other], device="cuda"), []
        for second, how in ((b, bias), (added, None)):
            tracked = torch.tensor(before, device="cuda")
            poison()
            out, bits = torch.ops.fp4deploy.concat(a, second, amax, largest, tracked, 0.5, how)
            moved.append((out.nan_to_num(7), bits, tracked))
        assert all(torch.equal(one, two) for one, two in zip(*moved, strict=True))
        assert moved[0][2] == max(1e4, other, before / 2)


def amaxes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of the layers that track one."""
    layers = quantized_layers(model).items()
    return {name: layer.input_amax.clone() for name, layer in layers if layer.input_amax is not None}


def decayed(model: torch.nn.Module, decay: float) -> torch.nn.Module:
    model = copy.deepcopy(model)
    for layer in quantized_layers(model).values():
        layer.recipe = replace(layer.recipe, amax_decay=decay)
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_a_delayed_step_computes_what_evaluation_before_it_does(fused: bool) -> None:
    """Bitwise; and the amaxes move by the largest value of the step, which a copy without a memory finds."""
    torch.manual_seed(0)
    model = prepare(build_unet(5, 0.25), "nvfp4_qat_delayed").cuda().to(memory_format=torch.channels_last).train()
    model = fuse_unet(model) if fused else model
    with torch.backends.cudnn.flags(deterministic=True), torch.autocast("cuda", dtype=torch.float16), torch.no_grad():
        for seed, factor in enumerate((1.0, 0.3, 3.0, 1.0)):
            images = feature_map((2, 3, 64, 96), torch.float32, seed) * factor
            before, fresh = amaxes(model), decayed(model, 0.0)
            # Before the first step nothing is calibrated.
            evaluated = copy.deepcopy(model).eval()(images) if seed else None
            logits = model(images)
            fresh(images)
            assert evaluated is None or torch.equal(logits, evaluated)
            assert logits.isfinite().all()
            for name, own in amaxes(fresh).items():
                assert amaxes(model)[name] == torch.maximum(own, before[name] * 0.99), name


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_qat_delayed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_fused_unet_recomputes_what_it_computed(recipe: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = fuse_unet(prepare(build_unet(5, 0.25), recipe).cuda().to(memory_format=torch.channels_last).train())
    other = copy.deepcopy(model)
    with torch.backends.cudnn.flags(deterministic=True):
        for seed, factor in enumerate((1.0, 0.3, 3.0)):
            images = (feature_map((2, 3, 64, 96), torch.float32, seed) * factor).requires_grad_()
            for each in (model, other):
                each.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    again = each is other
                    logits = checkpoint(each, images, use_reentrant=reentrant) if again else each(images)
                    (logits.float().square().mean() * 1024).backward()
            for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
                assert relative(two.grad, one.grad.double()) < 1e-6, name
            assert amaxes(model) == amaxes(other)


RECOMPUTED = (None, "nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_qat+dynamic", "nvfp4_qat+learned", "nvfp4_4o6_qat")


def unet_of(recipe: str | None) -> torch.nn.Module:
    """On the GPU, in training; its transposed convolutions have biases."""
    torch.manual_seed(0)
    model = build_unet(5, 0.25)
    for up in model.up:
        torch.nn.init.normal_(up.bias)
    model = (prepare(model, recipe) if recipe else model).cuda().to(memory_format=torch.channels_last).train()
    if recipe and "learned" in recipe:
        calibrate_percentile(model, [feature_map((2, 3, 64, 96), torch.float32, 9)], 99.0)
    return model


def gradients_of_steps(
    one: torch.nn.Module, other: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of every parameter in three steps with the UNet's own loss, whose logits and amaxes are the same bits."""
    masks = torch.randint(0, 5, (2, 64, 96), device="cuda")
    with torch.backends.cudnn.flags(deterministic=True):
        for seed in range(3):
            images = feature_map((2, 3, 64, 96), torch.float32, seed)
            logits = []
            for each in (one, other):
                each.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    logits.append(each(images))
                (SegmentationLoss()(logits[-1], masks) * 1024).backward()
            assert torch.equal(*logits)
            assert amaxes(one) == amaxes(other)
            for (name, mine), others in zip(one.named_parameters(), other.parameters(), strict=True):
                yield name, mine.grad, others.grad


@pytest.mark.parametrize("recipe", RECOMPUTED)
def test_inputs_computed_again_give_the_bits_of_those_kept(recipe: str | None) -> None:
    """Logits, amaxes and every gradient."""
    plain = unet_of(recipe)
    kept, again = fuse_unet(copy.deepcopy(plain)), fuse_unet(copy.deepcopy(plain), recompute=True)
    for name, one, two in gradients_of_steps(kept, again):
        assert torch.equal(one, two), name


class AddedBefore(FusedUNet):
    """Torch adds the biases of the transposed convolutions."""

    def _joined(self, upwards: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        assert bias is not None
        return super()._joined(with_bias(upwards, bias), None, *rest)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECOMPUTED)
def test_biases_of_transposed_convolutions_have_the_bits_of_those_added_before(
    recipe: str | None, recompute: bool
) -> None:
    """Logits, amaxes and every gradient but theirs."""
    plain = unet_of(recipe)
    fused, before = (fuse_unet(copy.deepcopy(plain), recompute=recompute) for _ in range(2))
    before.__class__ = AddedBefore
    for name, one, two in gradients_of_steps(fused, before):
        if name.startswith("up.") and name.endswith(".bias"):
            assert relative(one, two.double()) < 2e-3, name
        else:
            assert torch.equal(one, two), name


OTHER_RECIPES = ("nvfp4_qat+dynamic", "nvfp4_qat_2d", "nvfp4_4o6_weight_qat", "nvfp4_4o6_qat", "nvfp4_4o6_qat+delayed")


@pytest.mark.parametrize("quantised", ["nothing", "by default", "all layers", *OTHER_RECIPES])
def test_the_fused_unet_is_as_exact_as_the_plain_one(quantised: str) -> None:
    """Against FP32; FP4 amplifies the last bit of FP16, so both are far from it, and equally far."""
    torch.manual_seed(0)
    exact = build_unet(5, 0.25)
    if quantised in OTHER_RECIPES:
        prepare(exact, quantised)
    elif quantised != "nothing":
        prepare(exact, include=["*"] if quantised == "all layers" else None)
    exact = exact.cuda().to(memory_format=torch.channels_last).train()
    plain, fused = copy.deepcopy(exact), fuse_unet(copy.deepcopy(exact))
    assert isinstance(fused, FusedUNet)
    assert fused._fusable()
    images = torch.randn(4, 3, 96, 128, device="cuda")
    masks = torch.randint(0, 5, (4, 96, 128), device="cuda")
    gradients = {}
    for name, model in (("exact", exact), ("plain", plain), ("fused", fused)):
        with torch.autocast("cuda", dtype=torch.float16, enabled=name != "exact"):
            logits = model(images)
        (SegmentationLoss()(logits, masks) * 65536).backward()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
    error = {name: relative(gradients[name], gradients["exact"]) for name in ("plain", "fused")}
    assert error["fused"] < 1.15 * error["plain"]
    amaxes = {name: amaxes_of(model) for name, model in (("exact", exact), ("plain", plain), ("fused", fused))}
    if len(amaxes["exact"]):  # of single layers they move by 15 % with the rounding of what is in front of them
        error = {name: (amaxes[name] / amaxes["exact"] - 1).abs().mean() for name in ("plain", "fused")}
        assert error["fused"] < 2 * error["plain"]
        assert (amaxes["fused"] / amaxes["exact"] - 1).abs().max() < 0.3
    if quantised == "all layers":
        first = next(iter(quantized_layers(fused).values()))
        assert first.input_amax == images.half().abs().max().float()


def amaxes_of(model: torch.nn.Module) -> torch.Tensor:
    """The tracked amax of each layer's input, float32 [layers]."""
    tracked = [layer.input_amax for layer in quantized_layers(model).values() if layer.input_amax is not None]
    return torch.stack(tracked) if tracked else torch.empty(0)


def test_hooks_and_calibration_take_the_plain_path() -> None:
    model = fuse_unet(prepare(build_unet(3, 0.25)).cuda().to(memory_format=torch.channels_last))
    assert model._fusable()
    handle = model.encoder[1].conv1.register_forward_hook(lambda *_: None)
    assert not model._fusable()
    handle.remove()
    assert model._fusable()
    model.encoder[1].conv1.observing = True
    assert not model._fusable()


def test_two_runs_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        x, dy = feature_map((2, 64, 33, 35)), feature_map((2, 64, 33, 35), seed=1)
        weight, beta = vector(64, 3), vector(64, 4)
        y, ab, moments, mean, amax = torch.ops.fp4deploy.group_norm_relu(
            x, None, weight, beta, 8, 1e-5, None, None, 0.0, True
        )
        dx, sums = torch.ops.fp4deploy.group_norm_relu_backward(x, dy, ab, moments, mean, None, weight, amax, True)
        results.append((y, dx, sums))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
