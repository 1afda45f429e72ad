"""Cases of the CUDA kernels for channels_last feature maps: GroupNorm, pooling, concatenation, gradients, packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from fp4deploy import formats
from fp4deploy.plugins.quantize import (
    channels_last,
    layer_norm,
    learned,
    norm_pack,
    pointwise_pack,
    statistics,
    window,
)
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, normal
from fp4deploy_emulator.cases.cuda import AMAX, HALF, emulated
from fp4deploy_emulator.faults import Fault


def _image(setting: Setting, *shape: int, seed: int = 0) -> torch.Tensor:
    return (normal(setting, *shape, seed=seed) * 2 + 0.5).to(HALF).to(memory_format=torch.channels_last)


def group_norm(setting: Setting, outcome: Outcome) -> None:
    """GroupNorm, ReLU and fake quantisation; a and b of y = relu(a x + b) are near those of float64.

    Statistics are sums in an order of the kernel's own, so that a and b have no bits that they must have. Everything
    after them has: the output is compared with the reference on the kernel's a and b.
    """
    x, weight, beta = _image(setting, 2, 32, 5, 4), normal(setting, 32, seed=3), normal(setting, 32, seed=4)
    tracked = torch.tensor(0.5)
    with emulated(setting, outcome):
        y, ab, _, _, largest = channels_last._group_norm_relu(x, None, weight, beta, 8, 1e-5, None, tracked, 0.9, True)
    exact = norm_pack.affine(x.permute(0, 2, 3, 1).double(), None, weight.double(), beta.double(), 8, 1e-5)
    if not torch.allclose(ab.double(), exact, rtol=2e-6, atol=2e-6):
        raise Fault(f"a and b differ from float64 by {float((ab - exact).abs().max())}.")
    rounded = _relu(x, ab)
    outcome.compare(largest[0], torch.maximum(rounded.max(), torch.tensor(0.5) * torch.tensor(0.9)))
    outcome.compare(y, formats.fake_quantize_nvfp4(rounded, (1,), largest[0])[0].to(HALF))


def _relu(x: torch.Tensor, ab: torch.Tensor) -> torch.Tensor:
    """relu(a x + b) of NCHW in float32, rounded once."""
    a, b = ab.double()[..., None, None].unbind(1)
    return torch.relu(a * x.double() + b).float()


def group_norm_gradient(setting: Setting, outcome: Outcome) -> None:
    """The gradients of GroupNorm, ReLU and fake quantisation are near those of float64, stopped where y is clipped."""
    x, dy, amax = _image(setting, 2, 32, 5, 4), _image(setting, 2, 32, 5, 4, seed=1), torch.tensor([0.8])
    bias, weight, beta = (normal(setting, 32, seed=seed) for seed in (2, 3, 4))
    with emulated(setting, outcome):
        how = (x, bias, weight, beta, 8, 1e-5, amax, None, 0.0, True)
        _, ab, mean_rstd, channel_mean, _ = channels_last._group_norm_relu(*how)
        dx, sums = channels_last._group_norm_relu_backward(x, dy, ab, mean_rstd, channel_mean, bias, weight, amax, True)
    inside = formats.fake_quantize_nvfp4(_relu(x, ab), (1,), amax[0])[1]
    exact = [each.double().requires_grad_() for each in (x, weight, beta, bias)]
    y = torch.relu(F.group_norm(exact[0] + exact[3][:, None, None], 8, exact[1], exact[2], 1e-5))
    y.backward(dy.double() * inside)
    outcome.compare(_near(dx, exact[0].grad, 2**-10), torch.ones(dx.shape, dtype=torch.uint8))
    in_range = _bits(inside)
    with emulated(setting, outcome):
        norm = (ab, mean_rstd, channel_mean, bias, weight)
        dx, _ = channels_last._group_norm_relu_backward_clipped(x, dy, *norm, in_range)
        wanted, _ = channels_last._group_norm_relu_backward(x, torch.where(inside, dy, 0), *norm, amax, False)
    outcome.compare(dx, wanted)
    for clips, quantize in ((True, True), (False, True), (False, False)):
        given, gradient = x.clone(), dy.clone()
        saved = (ab, mean_rstd, channel_mean, bias, weight, amax)
        with emulated(setting, outcome):
            wanted, _ = channels_last._group_norm_relu_backward(x, dy, *saved, clips)
            written = channels_last._group_norm_relu_again(x, ab, amax, quantize)
            channels_last._group_norm_relu_backward_in_place(given, gradient, *saved, clips, quantize)
        outcome.compare(given, written)
        outcome.compare(gradient, wanted)
    for got, each in zip(sums, exact[1:], strict=True):
        outcome.compare(_near(got, each.grad, 1e-5), torch.ones(32, dtype=torch.uint8))


def _bits(inside: torch.Tensor) -> torch.Tensor:
    """A mask [N, C, H, W] as the kernels write it: uint8, a bit an element, channels last."""
    eights = inside.permute(0, 2, 3, 1).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (eights << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _near(got: torch.Tensor, exact: torch.Tensor | None, share: float) -> torch.Tensor:
    """uint8: within a share of the value, or of the root of the mean square."""
    assert exact is not None
    return ((got.double() - exact).abs() <= share * exact.abs().maximum(exact.square().mean().sqrt())).byte()


def pooling(setting: Setting, outcome: Outcome) -> None:
    """2 x 2 maximum with fake quantisation."""
    x, amax = _image(setting, 1, 32, 6, 4), torch.tensor([AMAX])
    with emulated(setting, outcome):
        pooled = channels_last._pool(x, amax)
        plain = channels_last._pool(x, None)
    expected = F.max_pool2d(x.float(), 2)
    outcome.compare(plain, expected.to(HALF))
    outcome.compare(pooled, formats.fake_quantize_nvfp4(expected, (1,), amax[0])[0].to(HALF))


def pooling_gradient(setting: Setting, outcome: Outcome) -> None:
    """The gradient of the maximum goes to the first of equal values, and is added to that of the other branch."""
    y, dskip = _image(setting, 1, 32, 6, 4), _image(setting, 1, 32, 6, 4, seed=1)
    y[0, :, 2:4, 2:4] = 1.0
    dpooled, amax = _image(setting, 1, 32, 3, 2, seed=2), torch.tensor([AMAX])
    with emulated(setting, outcome):
        both = channels_last._pool_backward(y, dskip, dpooled, amax)
        alone = channels_last._pool_backward(y, None, dpooled, None)
    for got, skipped, quantised in ((both, dskip, True), (alone, torch.zeros_like(dskip), False)):
        exact = y.float().requires_grad_()
        pooled = F.max_pool2d(exact, 2)
        inside = formats.fake_quantize_nvfp4(pooled.detach(), (1,), amax[0])[1] if quantised else 1.0
        pooled.backward(dpooled.float() * inside)
        assert exact.grad is not None
        outcome.compare(got, (exact.grad + skipped).to(HALF))
    ab = normal(setting, 1, 2, 32, seed=3)
    with emulated(setting, outcome):
        again = channels_last._pool_backward(y, dskip, dpooled, amax, ab)
        wanted = channels_last._pool_backward(_relu(y, ab).to(HALF), dskip, dpooled, amax)
    outcome.compare(again, wanted)


def concatenation(setting: Setting, outcome: Outcome) -> None:
    """Concatenation with fake quantisation, and its gradient; from what a norm reads, the same bits."""
    a, b, amax = _image(setting, 2, 32, 3, 5), _image(setting, 2, 48, 3, 5, seed=1), torch.tensor([AMAX])
    gradient, ab = _image(setting, 2, 80, 3, 5, seed=2), normal(setting, 2, 2, 32, seed=3)
    with emulated(setting, outcome):
        out, bits = channels_last._concat(a, b, amax)
        da, db, _ = channels_last._separate(gradient, bits, 32)
        again = [channels_last._concat_again(a, ab, b, scale) for scale in (amax, None)]
        written = _relu(a, ab).to(HALF)
        wanted = channels_last._concat(written, b, amax)[0], torch.cat([written, b], 1)
    for got, each in zip(again, wanted, strict=True):
        outcome.compare(got, each)
    expected, inside = formats.fake_quantize_nvfp4(torch.cat([a, b], 1).float(), (1,), amax[0])
    outcome.compare(out, expected.to(HALF))
    masked = torch.where(inside, gradient, 0)
    outcome.compare(da, masked[:, :32])
    outcome.compare(db, masked[:, 32:])


def biased_concatenation(setting: Setting, outcome: Outcome) -> None:
    """A bias of the second input has the bits of one that was added before; its gradient is near that of float64."""
    amax, other, bias = torch.tensor([AMAX]), torch.tensor([0.5]), normal(setting, 48, seed=4)
    bias[7], bias[8] = 2e4, -2e4
    for n, h, w in ((2, 3, 5), (3, 7, 5)):  # one chunk of pixels, and two
        a, b = _image(setting, n, 32, h, w), _image(setting, n, 48, h, w, seed=1)
        gradient, ab = _image(setting, n, 80, h, w, seed=2), normal(setting, n, 2, 32, seed=3)
        added, measured = _added(b, bias), b.clone()
        measured[:, 7], measured[:, 8] = -1e4, 1e4  # a bias alone is larger than every sum
        measured[0, 8, 0, 1], measured[-1, 3, 2, 2] = -6e4, float("nan")  # the first overflows with its bias
        tracked = torch.tensor(0.5)
        with emulated(setting, outcome):
            for scale in (amax, None):
                found = (
                    *channels_last._concat(a, b, scale, bias=bias),
                    channels_last._concat_again(a, ab, b, scale, bias),
                )
                wanted = *channels_last._concat(a, added, scale), channels_last._concat_again(a, ab, added, scale)
                for got, each in zip(found, wanted, strict=True):
                    outcome.compare(got, each)
            channels_last._concat(a, measured, amax, other, tracked, 0.5, bias)
            for bits in (channels_last._concat(a, b, amax)[1], None):
                da, db, nothing = channels_last._separate(gradient, bits, 32)
                *parts, dbias = channels_last._separate(gradient, bits, 32, True)
                for got, each in zip(parts, (da, db), strict=True):
                    outcome.compare(got, each)
                exact = db.double().sum((0, 2, 3))
                outcome.compare(_near(dbias, exact, 1e-6), torch.ones(48, dtype=torch.uint8))
                outcome.compare(nothing, torch.empty(0))
        outcome.compare(tracked, formats.finite_amax(_added(measured, bias)))


def _added(b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """b + bias as a convolution in FP16 gives it."""
    return (b.float() + bias.to(HALF).float()[:, None, None]).to(HALF)


def learned_amax(setting: Setting, outcome: Outcome) -> None:
    """The gradient of a learned amax of all three, and 0 where nothing saturates."""
    x, b, ab = _image(setting, 2, 32, 4, 6), _image(setting, 2, 48, 4, 6, seed=1), normal(setting, 2, 2, 32, seed=3)
    dy, dpooled = _image(setting, 2, 32, 4, 6, seed=2), _image(setting, 2, 32, 2, 3, seed=3)
    gradient, amax, above = _image(setting, 2, 80, 4, 6, seed=4), torch.tensor([1.3]), torch.tensor([1e9])
    bias = normal(setting, 48, seed=5)
    with emulated(setting, outcome):
        normalized = learned._group_norm_relu_damax(x, dy, ab, amax, above)
        pooled = learned._pool_damax(x, dpooled, amax, above)
        joined = learned._concat_damax(x, b, gradient, amax, None)
        biased = learned._concat_damax(x, b, gradient, amax, None, bias)
        added = learned._concat_damax(x, _added(b, bias), gradient, amax, None)
        nothing = learned._group_norm_relu_damax(x, dy, ab, amax, amax)
    parts = (
        (normalized, _relu(x, ab), dy),
        (pooled, F.max_pool2d(x.float(), 2), dpooled),
        (joined, torch.cat([x, b], 1).float(), gradient),
    )
    for got, value, upstream in parts:
        exact = _gradient_of_amax(value, upstream, amax)
        outcome.compare(torch.isclose(got.double(), exact, rtol=1e-4).byte(), torch.tensor(1, dtype=torch.uint8))
    outcome.compare(nothing, torch.tensor(0.0))
    outcome.compare(biased, added)


def _gradient_of_amax(value: torch.Tensor, upstream: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """float64 []: the sum over saturated blocks of g q / A where an element is clipped, of g (q - v) / A elsewhere."""
    quantized = formats.fake_quantize_nvfp4(value, (1,), amax[0])[0].to(HALF).double()
    moved = torch.where(value.abs() > amax, quantized, quantized - value.double())
    blocks = (moved * upstream.double()).unflatten(1, (-1, 16))
    saturated = value.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True) > amax
    return (blocks * saturated).sum() / amax[0] / value.numel() ** 0.5


def tracking(setting: Setting, outcome: Outcome) -> None:
    """The running amax of a tensor, and of a tensor with a bias."""
    x = _image(setting, 2, 16, 5, 3)
    tracked = torch.tensor(0.5)
    with emulated(setting, outcome):
        amax = channels_last._track_amax(x, None, tracked, 0.9, True)
        first = channels_last._previous_amax(x, None, torch.tensor(0.0))
        later = channels_last._previous_amax(x, None, torch.tensor(0.25))
    outcome.compare(amax[0], formats.finite_amax(x))
    outcome.compare(first[0], formats.finite_amax(x))
    outcome.compare(later[0], torch.tensor(0.25))
    for shape in ((2, 16, 5, 3), (2, 48, 13, 17)):  # one block, and two that are made three for 48 channels
        x, bias = _image(setting, *shape), normal(setting, shape[1], seed=1)
        bias[5], bias[9] = -4e4, float("nan")
        x[0, 5, 1, 1], x[0, 2, 1, 1], x[1, 3, 0, 0] = -6e4, float("inf"), float("nan")
        wanted = formats.finite_amax(_added(x, bias))
        with emulated(setting, outcome):
            amax = channels_last._track_amax(x, None, None, 0.0, True, bias=bias)
            first = channels_last._previous_amax(x, None, torch.tensor(0.0), bias)
            later = channels_last._previous_amax(x, None, torch.tensor(0.25), bias)
        outcome.compare(torch.cat([amax, first, later]), torch.stack([wanted, wanted, torch.tensor(0.25)]))


def norm_statistics(*shape: int, groups: int = 8) -> Callable[[Setting, Outcome], None]:
    """a and b of a norm for inference are near those of float64: from chunks, from runs of pixels and from tiles."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x, channels = _image(setting, *shape).permute(0, 2, 3, 1).contiguous(), shape[1]
        bias, weight, beta = (normal(setting, channels, seed=seed) for seed in (3, 4, 5))
        exact = norm_pack.affine(x.double(), bias.double(), weight.double(), beta.double(), groups, 1e-5)
        for tiles in (None, _run_moments(x, 16), _run_moments(x, 32), _tile_moments(x, 4, 8)):
            with emulated(setting, outcome):
                moments = tiles or statistics.chunk_moments(x)
                ab = statistics.combine(moments, x.shape, bias, weight, beta, groups, 1e-5)
            near = torch.isclose(ab.double(), exact, rtol=2e-6, atol=2e-6).byte()
            outcome.compare(near, torch.ones_like(near))

    return case


def _tile_moments(x: torch.Tensor, height: int, width: int) -> statistics.Moments:
    """Moments of tiles of each feature map, as a convolution that works in tiles has them."""
    parts = [
        torch.stack([tile.mean(0), (tile - tile.mean(0)).square().sum(0)])
        for item in x.double()
        for rows in item.split(height)
        for tile in (each.flatten(0, 1) for each in rows.split(width, 1))
    ]
    found = torch.full((len(parts), 2, 2, x.shape[-1]), float("nan"))
    found[:, 0] = torch.stack(parts)
    return statistics.Moments(found, height * width, len(parts) // len(x), (height, width))


def _run_moments(x: torch.Tensor, rows: int) -> statistics.Moments:
    """Moments of runs of `rows` pixels of the whole batch, as the tiles of an implicit GEMM have them."""
    n, h, w, c = x.shape
    flat, item = x.double().reshape(-1, c), torch.arange(n * h * w) // (h * w)
    parts = torch.full((-(-len(flat) // rows), 2, 2, c), float("nan"))
    for tile, first in enumerate(range(0, len(flat), rows)):
        part, items = flat[first : first + rows], item[first : first + rows]
        for index, one in enumerate(items.unique()):
            pixels = part[items == one]
            parts[tile, index] = torch.stack([pixels.mean(0), (pixels - pixels.mean(0)).square().sum(0)])
    return statistics.Moments(parts, rows)


def norm_packing(setting: Setting, outcome: Outcome) -> None:
    """relu(a x + b) packed, plain and pooled, in one pass."""
    half = _image(setting, 2, 32, 4, 6).permute(0, 2, 3, 1).contiguous()
    ab = normal(setting, 2, 2, 32, seed=3)
    form, amax = norm_pack.OutputForm, torch.tensor(AMAX)
    for forms in ([form(amax), form(None)], [form(amax), form(torch.tensor(4.0), pooled=True)]):
        for x in (half, half.bfloat16()):
            with emulated(setting, outcome):
                got = norm_pack.apply_kernels(x, ab, forms)
            _compare_forms(got, norm_pack.apply_reference(x, ab, forms), outcome)


def layer_norms(setting: Setting, outcome: Outcome) -> None:
    """LayerNorm of rows: sums are those of torch, the norm is near float64, and the values are those of the norm."""
    amax = torch.tensor(AMAX)
    for number, (width, dtype) in enumerate(((16, HALF), (96, HALF), (384, torch.bfloat16))):
        x, other = (normal(setting, 11, width, seed=seed).to(dtype) * 2 for seed in (number, number + 5))
        weight, bias = normal(setting, width, seed=8), normal(setting, width, seed=9)
        x[3, 2], x[4, width - 1] = float("nan"), float("inf")
        with emulated(setting, outcome):
            total, y, values = layer_norm.layer_norm(x, other, weight, bias, amax, 1e-5, 0.0, True)
            _, _, scaled = layer_norm.layer_norm(total, None, weight, bias, amax, 1e-5, 2.0**-12, False)
        outcome.compare(_numbers(total), _numbers(x + other))
        exact = F.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5)
        near = torch.isclose(y.double(), exact, rtol=2.0 * torch.finfo(dtype).eps, atol=1e-3, equal_nan=True)
        outcome.compare(near.byte(), torch.ones_like(near, dtype=torch.uint8))
        packed = formats.quantize_nvfp4(y, amax=amax)
        outcome.compare(_numbers(values), _numbers(packed.dequantize(dtype)))
        exponent = torch.tensor(2688.0 * 2.0**-12)
        outcome.compare(_numbers(scaled), _numbers(replace(packed, amax=exponent).dequantize(dtype)))


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """One NaN and one zero: a NaN has any payload, and a decoded zero here the sign of its element."""
    return torch.where(x.isnan(), float("nan"), x) + 0.0


def _compare_forms(got: list[norm_pack.FeatureMap], wanted: list[norm_pack.FeatureMap], outcome: Outcome) -> None:
    for mine, expected in zip(got, wanted, strict=True):
        if isinstance(mine, formats.Nvfp4Tensor) and isinstance(expected, formats.Nvfp4Tensor):
            outcome.compare_packed(mine, expected)
        else:
            assert isinstance(mine, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            outcome.compare(mine, expected)


def elementwise_layers(setting: Setting, outcome: Outcome) -> None:
    """relu(a x + b + c r + d), and a leaky ReLU of x, packed and plain."""
    halves = [_image(setting, 2, 32, 3, 5).permute(0, 2, 3, 1).contiguous() for _ in range(2)]
    first, second = normal(setting, 2, 2, 32, seed=3), normal(setting, 1, 2, 32, seed=4)
    form, work = norm_pack.OutputForm, pointwise_pack.Pointwise
    forms = [form(torch.tensor(AMAX)), form(None)]
    for dtype in (HALF, torch.bfloat16):
        x, other = (each.to(dtype) for each in halves)
        for each in (work(first, other.flip(1), second, "relu"), work(None, None, None, "leaky_relu", 0.1)):
            with emulated(setting, outcome):
                got = pointwise_pack.apply_kernels(x, each, forms)
            _compare_forms(got, pointwise_pack.apply_reference(x, each, forms), outcome)


def pooled_layers(setting: Setting, outcome: Outcome) -> None:
    """A leaky ReLU of a x + b, and a sum, with their maxima of 2 x 2 pixels; -0 and 0 are among the values."""
    x, other = (_image(setting, 2, 32, 4, 6, seed=seed).permute(0, 2, 3, 1).contiguous() for seed in (0, 1))
    x[0, :2, :2, :16] = torch.tensor([[-0.0, 0.0], [0.0, -0.0]])[..., None]
    ab, form, amax = normal(setting, 2, 2, 32, seed=3), norm_pack.OutputForm, torch.tensor(AMAX)
    work = pointwise_pack.Pointwise
    for each in (work(ab, None, None, "leaky_relu", 0.1), work(None, other), work()):
        for forms in ([form(amax), form(amax, pooled=True)], [form(None), form(None, pooled=True)]):
            with emulated(setting, outcome):
                got = pointwise_pack.apply_kernels(x, each, forms)
            _compare_forms(got, pointwise_pack.apply_reference(x, each, forms), outcome)


def windows(setting: Setting, outcome: Outcome) -> None:
    """Maximum pooling over windows that overlap, reach beyond the image, have gaps, or end with `ceil_mode`."""
    x = _image(setting, 2, 16, 7, 9)
    x[0, :8, :2, :3], x[1, 0, 3, 4], x[1, 1, :3, :3] = 0.0, float("nan"), float("-inf")
    x[0, :8, 0, 1] = -0.0
    for how in (((3, 3), (2, 2), (1, 1), (1, 1), False), ((2, 3), (1, 2), (0, 1), (2, 1), True)):
        with emulated(setting, outcome):
            got = window.max_pool_kernel(x, *how)
        wanted = F.max_pool2d(x.float(), *how).to(HALF)
        wanted.view(torch.int16)[wanted.isnan()] = 0x7FFF  # the NaN of a GPU's conversions; a CPU's is another
        outcome.compare(got, wanted)


def nearest(setting: Setting, outcome: Outcome) -> None:
    """Nearest resizing of codes and scales, to sizes and by factors."""
    x = formats.quantize_nvfp4(normal(setting, 2, 5, 3, 32))
    parts = [part.permute(0, 3, 1, 2) for part in (x.codes, x.scales.view(torch.uint8))]
    for size, scale in ((None, [2.0, 2.0]), (None, [1.7, 0.6]), ([7, 11], None)):
        for exact in (False, True):
            with emulated(setting, outcome):
                got = window.resize_kernel(x, size, scale, exact)
            mode = "nearest-exact" if exact else "nearest"
            for one, part in zip((got.codes, got.scales.view(torch.uint8)), parts, strict=True):
                outcome.compare(one, F.interpolate(part, size, scale, mode).permute(0, 2, 3, 1))


MAPS = "channels_last"
CASES = (
    Case("GroupNorm, ReLU, fake quantisation", MAPS, group_norm),
    Case("gradients of GroupNorm", MAPS, group_norm_gradient),
    Case("pool", MAPS, pooling),
    Case("gradient of pool", MAPS, pooling_gradient),
    Case("concatenate and separate", MAPS, concatenation),
    Case("concatenate and separate, with a bias", MAPS, biased_concatenation),
    Case("running amax", MAPS, tracking),
    Case("gradient of a learned amax", MAPS, learned_amax),
    Case("GroupNorm and pack", "norm and pack", norm_packing),
    Case("LayerNorm and values", "norm and pack", layer_norms),
    Case("elementwise layers and pack", "norm and pack", elementwise_layers),
    Case("elementwise layers, pool and pack", "norm and pack", pooled_layers),
    Case("maximum over windows", "norm and pack", windows),
    Case("nearest resizing of packed maps", "norm and pack", nearest),
    Case("statistics of GroupNorm", "statistics", norm_statistics(3, 32, 5, 7)),
    Case("statistics of GroupNorm, 6 channels a group", "statistics", norm_statistics(1, 48, 9, 13)),
    Case("statistics of InstanceNorm", "statistics", norm_statistics(2, 16, 6, 11, groups=16)),
    Case("statistics of GroupNorm, 3 channels a group", "statistics", norm_statistics(2, 48, 6, 11, groups=16)),
)
