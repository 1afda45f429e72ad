"""Random networks in the style of code that people write, beside `random_networks`, whose layers are modules in a row.

    python -m tests.export.written_networks --count 2000 --jobs 24 --json benchmarks/results/written_networks_cpu.json

Weights are shared or computed, modules called several times or registered in another order than executed, functions
called in place of modules, sizes computed from sizes; numbers are such that FP16 does not hold them; groups do not fill
blocks; outputs are maps, tokens, classes, or several of them. Each network is prepared, calibrated, exported (every
second one with open sizes) and packed, the rest in FP16, BF16 or FP32 by the seed, which compares each file with torch,
and then run at more sizes, compared anew. Allowed are agreement and refusals in words that name an operator or a layer;
`random_networks` says what a difference may be where last bits of float32 decide about FP4.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.verify.packed import verify_packed
from fp4deploy.packed.file import read_packed
from fp4deploy.qat import deployed, quantized_layers
from fp4deploy.rest import Rest
from tests.export.random_networks import main, require_undecided, rest_drawn

SIZE = (16, 24)
SIZES = ((20, 36), (29, 18))  # neither multiples of each other's sides nor those at which the product compares
RECIPES = ("nvfp4_qat", "nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_qat_2d", "nvfp4_4o6_weight_qat", "fp8_qat")
Step = Callable[["Written", torch.Tensor], Any]
Block = Callable[["Written", random.Random, int], tuple[Step, int]]
BLOCKS: dict[str, Block] = {}
HEADS: dict[str, Block] = {}


def block(function: Block) -> Block:
    """Between layers: a feature map of so many channels becomes one of other channels."""
    BLOCKS[function.__name__] = function
    return function


def head(function: Block) -> Block:
    """What a network returns."""
    HEADS[function.__name__] = function
    return function


class Written(nn.Module):
    """Steps drawn from a seed. A step finds its modules by name, so that copies of the network have their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.made: dict[str, nn.Module] = {}
        self.halved = 0
        channels = draw.choice([16, 24, 32, 36])
        stem = self.add("stem", nn.Conv2d(3, channels, 3, padding=1))
        self.plan, self.steps = ["stem"], [lambda net, x: net.of(stem)(x)]
        for _ in range(draw.randint(2, 5)):
            kind = draw.choice(sorted(BLOCKS))
            step, channels = BLOCKS[kind](self, draw, channels)
            self.plan.append(kind)
            self.steps.append(step)
        kind = draw.choice(sorted(HEADS))
        self.plan.append(kind)
        self.steps.append(HEADS[kind](self, draw, channels)[0])
        names = list(self.made)
        draw.shuffle(names)
        for name in names:
            self.add_module(name, self.made[name])
        del self.made

    def add(self, name: str, module: nn.Module) -> str:
        """A module under a name of its own."""
        free = f"{name}{len(self.made)}"
        self.made[free] = module
        return free

    def of(self, name: str) -> Any:
        """The module of this copy."""
        return getattr(self, name)

    def forward(self, x: torch.Tensor) -> Any:
        for step in self.steps:
            x = step(self, x)
        return x


class Parameters(nn.Module):
    """Parameters that a function reads."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / max(1, shape[-1]) ** 0.5))


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def back(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(like.shape[0], -1, *like.shape[2:])


def wide(draw: random.Random) -> int:
    return draw.choice([16, 24, 32, 48])


@block
def convolution(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    out, act = wide(draw), draw.choice([F.relu, F.silu, F.gelu, torch.tanh, F.hardswish, F.softplus, F.elu, F.mish])
    kernel, stride = draw.choice([(1, 1), (3, 1), (3, 2), ((1, 5), 1), ((5, 3), 1)])
    stride = 1 if net.halved > 1 else stride
    net.halved += stride == 2
    padding = kernel // 2 if isinstance(kernel, int) else tuple(each // 2 for each in kernel)
    conv = net.add("conv", nn.Conv2d(c, out, kernel, stride, padding, bias=draw.random() < 0.5))
    norm = net.add("norm", nn.BatchNorm2d(out, eps=draw.choice([1e-3, 1e-5, 1e-8])))
    return lambda net, x: act(net.of(norm)(net.of(conv)(x))), out


@block
def called_twice(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    conv = net.add("twice", nn.Conv2d(c, c, 3, padding=1))
    times = draw.choice([2, 3])

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = x + F.relu(net.of(conv)(x))
        return x

    return step, c


@block
def tied(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    one, other = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=draw.choice([1, 1, 0]))
    other.weight = one.weight
    a, b = net.add("tied", one), net.add("tied", other)
    return lambda net, x: net.of(b)(F.relu(net.of(a)(x)) * 3), c


@block
def tied_transposed(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    down, up = nn.Conv2d(c, 32, 2, 2), nn.ConvTranspose2d(32, c, 2, 2)
    up.weight = down.weight
    a, b = net.add("encode", down), net.add("decode", up)

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        y = net.of(b)(F.gelu(net.of(a)(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)))))
        return x + y[:, :, : x.shape[2], : x.shape[3]]

    return step, c


@block
def tied_linear(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    linear = net.add("embed", nn.Linear(c, 48))
    functional = draw.random() < 0.5

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        layer = net.of(linear)
        if functional:
            return x + F.conv2d(
                F.relu(layer(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2), layer.weight.t()[..., None, None]
            )
        return x + back(F.linear(F.relu(layer(tokens(x))), layer.weight.t()), x)

    return step, c


@block
def odd_groups(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    groups = draw.choice([each for each in (1, 2, 3, 4, 5, 6, 8) if c % each == 0][-3:])
    conv = net.add("grouped", nn.Conv2d(c, groups * draw.choice([5, 8, 16]), 3, padding=1, groups=groups))
    return lambda net, x: F.leaky_relu(net.of(conv)(x), 0.1), net.made[conv].out_channels  # type: ignore[return-value]


@block
def depthwise_multiplied(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    depth, point = nn.Conv2d(c, 2 * c, 3, padding=2, dilation=2, groups=c), nn.Conv2d(2 * c, c, 1)
    a, b = net.add("depth", depth), net.add("point", point)
    return lambda net, x: net.of(b)(F.relu6(net.of(a)(x))), c


@block
def functional_convolution(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    held = net.add("held", Parameters(weight=(32, c, 3, 3), bias=(32,)))
    standardised = draw.random() < 0.5

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        weight = net.of(held).weight
        if standardised:
            std, mean = torch.std_mean(weight, (1, 2, 3), keepdim=True)
            weight = (weight - mean) / (std + 1e-10)
        return F.relu(F.conv2d(x, weight / 8, net.of(held).bias, padding="same"))

    return step, 32


@block
def blur(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    holder = nn.Module()
    holder.register_buffer("kernel", torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16)
    name = net.add("blur", holder)
    mode = draw.choice(["reflect", "replicate", "constant"])
    return lambda net, x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode), net.of(name).kernel.expand(c, 1, 3, 3), groups=c), c


@block
def rms_norm(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    scale, eps = net.add("scale", Parameters(gain=(c, 1, 1))), draw.choice([1e-6, 1e-8, 1e-12])
    return lambda net, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + eps) * (1 + net.of(scale).gain), c


@block
def small_numbers(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    return draw.choice([
        lambda net, x: F.normalize(x, dim=1) * 4,
        lambda net, x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-9),
        lambda net, x: x / (x.abs().sum(1, keepdim=True) + 1e-12) * 8,
        lambda net, x: torch.log(x.relu().clamp(min=1e-9)) / 8,
        lambda net, x: torch.sqrt(F.relu(x) + 1e-8),
        lambda net, x: x / torch.maximum(x.abs().amax((2, 3), keepdim=True), x.new_tensor(1e-10)),
        lambda net, x: (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True, unbiased=False) + 1e-8).sqrt(),
        lambda net, x: F.cosine_similarity(x, x.roll(1, 1), dim=1, eps=1e-8)[:, None] * x,
    ]), c  # fmt: skip


@block
def small_norm(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    eps = draw.choice([1e-8, 1e-12])
    if draw.random() < 0.5:
        name = net.add("norm", nn.GroupNorm(next(each for each in (4, 3, 5, 1) if c % each == 0), c, eps=eps))
        return lambda net, x: F.relu(net.of(name)(x)), c
    name = net.add("norm", nn.LayerNorm(c, eps=eps))
    return lambda net, x: net.of(name)(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), c


@block
def masked_attention(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    project, out = net.add("qkv", nn.Linear(c, 3 * c, bias=False)), net.add("out", nn.Linear(c, c))
    low, kind = draw.choice([-1e9, -1e4, float("-inf")]), draw.choice(["causal", "threshold", "band"])
    if kind == "threshold":  # equal scores may all be below their rounded mean: a last bit would decide about NaN
        low = max(low, -1e9)

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        q, k, v = net.of(project)(tokens(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / c**0.5
        at = torch.arange(scores.shape[-1], device=x.device)
        if kind == "causal":
            mask = at[None, :] > at[:, None]
        elif kind == "band":
            mask = (at[None, :] - at[:, None]).abs() > 7
        else:
            mask = scores < scores.mean(-1, keepdim=True)
        y = scores.masked_fill(mask, low).softmax(-1) @ v
        return x + back(net.of(out)(y), x)

    return step, c


@block
def multihead(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    heads = draw.choice([each for each in (1, 2, 4) if c % each == 0])
    attention = net.add("attention", nn.MultiheadAttention(c, heads, batch_first=True))
    norm = net.add("norm", nn.LayerNorm(c, eps=1e-6))

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        y = net.of(norm)(tokens(x))
        return x + back(net.of(attention)(y, y, y, need_weights=False)[0], x)

    return step, c


@block
def encoder_layer(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    first = draw.random() < 0.5
    name = net.add(
        "encoder", nn.TransformerEncoderLayer(c, 2 - c % 2, 48, 0.0, "gelu", batch_first=True, norm_first=first)
    )
    return lambda net, x: back(net.of(name)(tokens(x)), x), c


@block
def class_token(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    held = net.add("token", Parameters(token=(1, 1, c), place=(1, c, 4, 6)))
    mlp = net.add("mlp", nn.Sequential(nn.Linear(c, 64), nn.GELU("tanh"), nn.Linear(64, c)))

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        place = F.interpolate(net.of(held).place, x.shape[2:], mode="nearest")
        y = torch.cat([net.of(held).token.expand(x.shape[0], -1, -1), tokens(x + place)], 1)
        y = y + net.of(mlp)(y)
        return back(y[:, 1:] * y[:, :1].sigmoid(), x)

    return step, c


@block
def pyramid(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    sizes = draw.sample([1, 2, 3, (1, 4), (2, 3), (None, 1), 6], 2)
    pool = draw.choice([F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
    convs = [net.add("pyramid", nn.Conv2d(c, 16, 1)) for _ in sizes]
    mode: dict[str, Any] = draw.choice(
        [{"mode": "nearest"}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}]
    )

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        levels = [net.of(name)(pool(x, size)) for name, size in zip(convs, sizes, strict=True)]
        return torch.cat([x, *(F.interpolate(each, x.shape[-2:], **mode) for each in levels)], 1)

    return step, c + 32


@block
def resized(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    given: dict[str, Any] = draw.choice([
        {"mode": "area"}, {"mode": "bilinear", "antialias": True}, {"mode": "bilinear"}, {"mode": "nearest"},
        {"mode": "bicubic"}, {"mode": "nearest-exact"}, {"mode": "bilinear", "align_corners": True},
    ])  # fmt: skip
    how = draw.choice(["0.5", "0.8", "half", "ceil", "four"])

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[2:]
        if how in ("0.5", "0.8"):
            y = F.interpolate(x, scale_factor=float(how), **given)
        elif how == "half":
            y = F.interpolate(x, size=(h // 2, w // 2), **given)
        elif how == "ceil":
            y = F.interpolate(x, size=(-(-h // 2), (w + 1) // 2), **given)
        else:
            y = F.interpolate(x, size=(4, 5), **given)
        return x + F.interpolate(y, size=(h, w))

    return step, c


@block
def divided(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    axis, parts = draw.choice([1, 2, 3, -1]), draw.choice([2, 3, 4])
    divide = draw.choice([torch.tensor_split, torch.chunk])
    return lambda net, x: torch.cat([each * (1 + at) for at, each in enumerate(divide(x, parts, axis))][::-1], axis), c


@block
def sliced(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    return draw.choice([
        lambda net, x: torch.cat([x[:, 0::2], x[:, 1::2]], 1),
        lambda net, x: x.roll((1, -2), (2, 3)),
        lambda net, x: x + x.flip(3),
        lambda net, x: x[..., 1:-1, 1:] + x[..., 2:, :-1],
        lambda net, x: x + F.pad(x, (1, 0))[..., :-1],
        lambda net, x: x.narrow(2, 1, x.shape[2] - 2),
        lambda net, x: x[:, :, : -(-x.shape[2] // 2)],
        lambda net, x: x[:, torch.arange(c - 1, -1, -1)],
        lambda net, x: x.unflatten(1, (c // 2 if c % 2 == 0 else c, -1)).transpose(1, 2).flatten(1, 2),
        lambda net, x: x.index_select(1, torch.tensor([0, *range(1, c)][::-1], device=x.device)),
    ]), c  # fmt: skip


@block
def windows(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    name, side = net.add("window", nn.Linear(c, c)), draw.choice([2, 3, 4])

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        n, _, h, w = x.shape
        y = F.pad(x, (0, (side - w % side) % side, 0, (side - h % side) % side))
        rows, columns = y.shape[2] // side, y.shape[3] // side
        y = y.reshape(n, c, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1).reshape(-1, side * side, c)
        y = net.of(name)(y - y.mean(1, keepdim=True))
        y = y.reshape(n, rows, columns, side, side, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, rows * side, -1)
        return x + y[:, :, :h, :w]

    return step, c


@block
def positions(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    name, whole = net.add("coord", nn.Conv2d(c + 2, c, 3, padding=1)), draw.random() < 0.5

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[-2:]
        if whole:
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            grid = torch.stack([ys / max(h - 1, 1), xs / max(w - 1, 1)]).to(x)
        else:
            ys, xs = torch.linspace(-1, 1, h, device=x.device), torch.linspace(-1, 1, w, device=x.device)
            grid = torch.stack([ys[:, None].expand(h, w), xs[None].expand(h, w)])
        return net.of(name)(torch.cat([x, grid[None].expand(x.shape[0], -1, -1, -1)], 1))

    return step, c


@block
def pooled(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    return draw.choice([
        lambda net, x: F.avg_pool2d(x, 2, 1, divisor_override=3),
        lambda net, x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        lambda net, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda net, x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda net, x: F.max_pool2d(x, (1, 3), 1, (0, 1), dilation=(1, 1)),
        lambda net, x: F.lp_pool2d(x.abs(), 2, 2, 1),
        lambda net, x: F.max_pool2d(x, 2, 1) - -F.max_pool2d(-x, 2, 1),
    ]), c  # fmt: skip


@block
def transposed(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    out, groups = 32, draw.choice([1, *(each for each in (1, 2, 4) if c % each == 0)])
    given = draw.choice(
        [(3, 1, 1, 1, groups, True, 2), (3, 2, 1, 1, groups), (4, 1, 2, 0, groups), (3, (2, 1), 1, (1, 0), groups)]
    )
    name = net.add("up", nn.ConvTranspose2d(c, out, *given))
    return lambda net, x: F.silu(net.of(name)(x)), out


@block
def squeezed(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    a, b = net.add("reduce", nn.Linear(c, 16)), net.add("expand", nn.Linear(16, c))

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(net.of(b)(F.relu(net.of(a)(x.mean((-2, -1))))))
        return x * gate.view(x.size(0), -1, 1, 1)

    return step, c


@block
def products(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    held = net.add("mix", Parameters(matrix=(c, c), vector=(c,)))
    return draw.choice([
        lambda net, x: torch.einsum("nchw,cd->ndhw", x, net.of(held).matrix),
        lambda net, x: back(torch.matmul(tokens(x), net.of(held).matrix), x),
        lambda net, x: torch.addcmul(x, x.tanh(), net.of(held).vector.view(1, -1, 1, 1), value=0.5),
        lambda net, x: torch.lerp(x, x.mean(1, keepdim=True).expand_as(x), 0.25),
        lambda net, x: torch.where(x > net.of(held).vector[:, None, None], x, 0.1 * x),
        lambda net, x: back(torch.baddbmm(tokens(x), tokens(x), net.of(held).matrix.expand(x.shape[0], c, c)), x),
        lambda net, x: back(F.linear(tokens(x), net.of(held).matrix, net.of(held).vector), x),
    ]), c  # fmt: skip


@block
def elementwise(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    return draw.choice([
        lambda net, x: F.glu(torch.cat([x, -x], 1), 1),
        lambda net, x: x.clamp(-3, 3) ** 2 - x.abs().sqrt(),
        lambda net, x: torch.exp(-x.square()) + torch.erf(x),
        lambda net, x: x - x.logsumexp(1, keepdim=True),
        lambda net, x: x * (x > 0) + torch.sign(x) * 0.1,
        lambda net, x: torch.stack([x, x.neg()], 2).amax(2),
        lambda net, x: x.cumsum(1) / c,
        lambda net, x: F.softmax(x, dim=1) * 16,
        lambda net, x: F.softmin(x.flatten(2), dim=-1).view_as(x) * x.shape[2] * x.shape[3],
        lambda net, x: F.hardtanh(x) + F.softsign(x) + F.threshold(x, 0.2, -0.1) + F.logsigmoid(x),
        lambda net, x: x - x.std((2, 3), keepdim=True),
        lambda net, x: F.dropout(x, 0.5, training=net.training),
        lambda net, x: torch.floor(x * 4) / 4 + torch.remainder(x, 1.5),
        lambda net, x: F.local_response_norm(x, 3),
        lambda net, x: F.celu(x).mul(2).add_(1).sub_(0.5),
    ]), c  # fmt: skip


@block
def in_place(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    name = net.add("placed", nn.Conv2d(c, c, 3, padding=1))

    def step(net: Written, x: torch.Tensor) -> torch.Tensor:
        y = net.of(name)(x)
        y += x
        y[:, : c // 2] *= 0.5
        y[:, :, 0] = 0
        return y.relu_()

    return step, c


@block
def over_the_width(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    """Its width is the example's, if nothing before it changed it."""
    name = net.add("mixer", nn.LazyLinear(16))
    return lambda net, x: x + net.of(name)(x).mean(-1, keepdim=True), c


@block
def shuffled(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    if net.halved and c % 4 == 0:
        net.halved -= 1
        return lambda net, x: F.pixel_shuffle(x, 2), c // 4
    return lambda net, x: F.channel_shuffle(x, 2 - c % 2), c


@head
def several_maps(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    names = [net.add("head", nn.Conv2d(c, draw.choice([1, 3, 4]), 1)) for _ in range(2)]
    kind = draw.choice(["tuple", "dict", "one"])

    def step(net: Written, x: torch.Tensor) -> Any:
        first, second = (net.of(name)(x) for name in names)
        return {"tuple": (first, second), "dict": {"mask": first, "edge": second}, "one": first}[kind]

    return step, 0


@head
def levels(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    """Of a pyramid, by one head."""
    name, lateral = net.add("head", nn.Conv2d(c, 5, 3, padding=1)), net.add("lateral", nn.Conv2d(c, c, 1))

    def step(net: Written, x: torch.Tensor) -> Any:
        low = net.of(lateral)(F.max_pool2d(x, 2))
        merged = x + F.interpolate(low, x.shape[2:], mode="nearest")
        return [net.of(name)(level) for level in (merged, low)]

    return step, 0


@head
def classes(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    side = draw.choice([1, 2, 3])
    name = net.add("classifier", nn.Linear(c * side * side, 7))
    return lambda net, x: net.of(name)(torch.flatten(F.adaptive_avg_pool2d(x, side), 1)), 0


@head
def token_outputs(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    norm, name = net.add("norm", nn.LayerNorm(c)), net.add("head", nn.Linear(c, 6))
    both = draw.random() < 0.5

    def step(net: Written, x: torch.Tensor) -> Any:
        y = net.of(name)(net.of(norm)(tokens(x)))
        return (y, y.mean(1)) if both else y

    return step, 0


@head
def queries(net: Written, draw: random.Random, c: int) -> tuple[Step, int]:
    """Masks of learned queries, and their classes."""
    held, name = net.add("queries", Parameters(query=(5, c))), net.add("head", nn.Linear(c, 4))

    def step(net: Written, x: torch.Tensor) -> Any:
        weights = torch.einsum("qc,nchw->nqhw", net.of(held).query, x).flatten(2)
        found = weights.softmax(-1) @ tokens(x)
        return {"classes": net.of(name)(found), "masks": torch.einsum("nqc,nchw->nqhw", found, x)}

    return step, 0


def outcome(seed: int, folder: Path, rest: Rest | None = None) -> str:
    """What became of one network, its rest as given or drawn: "agrees", or "refused by STAGE: ..." in words; two where
    both files are refused.

    Raises:
        AssertionError: a file computes something else than torch, or a refusal names nothing.
    """
    torch.manual_seed(seed)
    model, x = Written(seed), torch.randn(2, 3, *SIZE).half().float()
    try:
        model.train()(x)
        model.eval()(x)
    except (RuntimeError, ValueError) as error:
        return f"no network: torch refuses it ({type(error).__name__})"
    draw, rest = random.Random(seed), rest or rest_drawn(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fd.prepare(model, draw.choice(RECIPES), include=draw.choice([None, "*"]), example_inputs=x)
        except InputError as error:
            _require_names(model, str(error))
        if quantized_layers(model):
            fd.calibrate(model, [(x, None)], rest=rest.name)
        reference = deployed(model.eval(), rest)
        found = (_onnx(model, reference, x, seed, folder, rest), _packed(model, reference, x, seed, folder, rest))
    return "; ".join(each for each in found if each is not None) or "agrees"


def _others(model: nn.Module, x: torch.Tensor, axes: Collection[int]) -> list[torch.Tensor]:
    """Inputs of another count, and of other sizes of these axes that torch takes."""
    found = [torch.cat([x, x[:1].flip(3)])]
    for size in SIZES if axes else ():
        other = torch.randn(1, 3, *(size[at] if at + 2 in axes else SIZE[at] for at in (0, 1))).half().float()
        try:
            model(other)
        except (RuntimeError, ValueError):
            continue
        found.append(other)
    return found


@torch.no_grad()
def _onnx(model: Written, reference: nn.Module, x: torch.Tensor, seed: int, folder: Path, rest: Rest) -> str | None:
    is_open, path = seed % 2 == 0, folder / f"written{seed}.onnx"
    try:
        fd.export_onnx(model, x, path, dynamic_size=is_open, rest=rest.name)
    except (InputError, GateError) as error:
        if isinstance(error, InputError) or "of open size" in str(error) or "beyond" in str(error):
            return _refused("export", model, error)
        graph = fd.export_graph(reference, x, rest=rest.name)
        require_undecided(reference, fd.verify(reference, graph, [x]), (x,), seed)
        return "refused by verify: last bits of float32 decide about more elements than it allows"
    graph = onnx.load(path)
    for other in _others(reference, x, (2, 3) if is_open else ()):
        found = fd.verify(reference, graph, [other])
        if not found.passed:
            require_undecided(reference, found, (other,), seed)
    return None


@torch.no_grad()
def _packed(model: Written, reference: nn.Module, x: torch.Tensor, seed: int, folder: Path, rest: Rest) -> str | None:
    path = folder / f"written{seed}.fp4"
    try:
        fd.pack(model, path, example_inputs=x, rest=rest.name)
    except (InputError, GateError) as error:
        return _refused("pack", model, error)
    file = read_packed(path)
    for other in _others(reference, x, {2, 3} & set(file.graph.inputs[0].free)):
        found = verify_packed(reference, file, [other])
        assert found.passed, (seed, model.plan, tuple(other.shape), found.sentence(), found.place, found.flat)
    return None


def _refused(stage: str, model: Written, error: Exception) -> str:
    _require_names(model, str(error))
    return f"refused by {stage}: {str(error)[:200]}"


def _require_names(model: nn.Module, text: str) -> None:
    """That a message names a layer of the network, or the line that calls the operator."""
    named = [name for name, _ in model.named_modules() if name and re.search(rf"\b{re.escape(name)}\b", text)]
    assert named or re.search(r"\.py,? line \d+|\.py:\d+", text), f"names nothing: {text}"


if __name__ == "__main__":
    main(outcome, "written_networks")
