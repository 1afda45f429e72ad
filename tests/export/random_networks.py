"""Random small networks: a list of layers drawn by a number generator, so that a seed names a network.

    python -m tests.export.random_networks --count 2000 --seed 0

packs every network, compares it with torch and prints the table of outcomes; it ends with 1 if one disagreed or failed
otherwise than in words.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.packed import compare_nodes
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.packed.describe import describe_packed
from fp4deploy.packed.file import read_packed, write_packed
from tests.export.packable_networks import deployed

SIZE = (16, 24)
LAYER_ERROR = 1e-3  # of a layer with reference inputs
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.ELU, nn.ReLU6, nn.Hardsigmoid,
)  # fmt: skip


class RandomNetwork(nn.Module):
    """Blocks drawn from a seed; each reads the activation before it, and some an earlier one of the same shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.plan: list[str] = []
        self.layers = nn.ModuleList()
        channels = self.draw.choice([8, 16, 20, 32])
        self.add("first", nn.Conv2d(3, channels, 3, padding=1))
        for _ in range(self.draw.randint(2, 6)):
            channels = self.block(channels)
        self.add("last", nn.Conv2d(channels, self.draw.randint(2, 6), 1))
        del self.draw

    def add(self, kind: str, layer: nn.Module) -> None:
        self.plan.append(kind)
        self.layers.append(layer)

    def block(self, channels: int) -> int:
        draw = self.draw
        kind = draw.choice(
            ["conv", "conv", "conv", "grouped", "depthwise", "norm", "act", "add", "concat", "pool", "resize", "up",
             "gate", "linear", "attention", "shuffle", "pad", "split"]
        )  # fmt: skip
        wide = draw.choice([16, 24, 32, 48])
        if kind == "conv":
            kernel, dilation = draw.choice([(1, 1), (3, 1), (3, 2), (5, 1), ((1, 3), 1)])
            padding = draw.choice(["same", 0, 1])
            stride = 1 if padding == "same" else draw.choice([1, 1, 2])
            self.add(kind, nn.Conv2d(channels, wide, kernel, stride, padding, dilation, bias=draw.random() < 0.5))
            return wide
        if kind == "grouped" and channels % 2 == 0:
            self.add("conv", nn.Conv2d(channels, 2 * wide, 3, 1, 1, groups=2))
            return 2 * wide
        if kind == "depthwise":
            self.add("conv", nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False))
        elif kind == "norm":
            groups = next(size for size in (8, 4, 2, 1) if channels % size == 0)
            norms = (nn.BatchNorm2d(channels), nn.GroupNorm(groups, channels), nn.InstanceNorm2d(channels, affine=True))
            self.add(kind, draw.choice(norms))
        elif kind == "act":
            self.add(kind, draw.choice(ACTIVATIONS)())
        elif kind == "pool":
            self.add(kind, draw.choice([nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1)]))
        elif kind == "up":
            kernel, padding = draw.choice([(2, 0), (3, 1), (4, 1)])
            self.add(kind, nn.ConvTranspose2d(channels, wide, kernel, 2, padding, kernel % 2))
            return wide
        elif kind == "linear":
            self.add(kind, nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, wide)))
            return wide
        elif kind == "attention":
            self.add(kind, nn.Linear(channels, 3 * channels))
        elif kind == "gate":
            self.add(kind, nn.Conv2d(channels, channels, 1))
        elif kind == "shuffle" and channels % 4 == 0:
            self.add(kind, nn.PixelShuffle(2))
            return channels // 4
        elif kind == "concat":
            self.add(kind, nn.Conv2d(channels, 16, 3, padding=1))
            return channels + 16
        else:
            self.add(kind, nn.Identity())
        return channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier: list[torch.Tensor] = []
        for kind, layer in zip(self.plan, self.layers, strict=True):
            earlier.append(x)
            x = self.step(kind, layer, x, earlier)
        return x

    @staticmethod
    def step(kind: str, layer: nn.Module, x: torch.Tensor, earlier: list[torch.Tensor]) -> torch.Tensor:
        n, c, h, w = x.shape
        if kind == "add":
            return sum((each for each in earlier[:-1] if each.shape == x.shape), x)
        if kind == "concat":
            return torch.cat([x, layer(x)], 1)
        if kind == "gate":
            return x * torch.sigmoid(layer(F.adaptive_avg_pool2d(x, 1)))
        if kind == "resize":
            return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False) if h < 32 else x
        if kind == "linear":
            return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if kind == "attention":
            q, k, v = layer(x.flatten(2).transpose(1, 2)).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, c, h, w)
        if kind == "pad":
            return F.pad(x, (1, 0, 2, 1))
        if kind == "split":
            first, second = x.split([c - c // 2, c // 2], 1)
            return torch.cat([second, first], 1)
        return layer(x)


def outcome(seed: int, folder: Path) -> str:
    """What became of one network: "agrees", or "refused: ..." in words.

    Raises:
        AssertionError: the packed network computes something else than torch.
    """
    torch.manual_seed(seed)
    model, x = RandomNetwork(seed), torch.randn(2, 3, *SIZE)
    try:
        model.eval()(x)
    except RuntimeError:
        return "no network: torch refuses it"
    try:
        deployed(model, x)
        file = packed_file(folder / "random.fp4", None, *pack_model(model, x, dynamic_size=seed % 2 == 0))
    except InputError as error:
        return f"refused: {str(error)[:160]}"
    write_packed(file)
    file = read_packed(file.path)
    describe_packed(file)
    network = PackedNetwork(file)
    with torch.inference_mode():
        expected, got = leaves(model(x)), leaves(network(x))
        errors = compare_nodes(model, network, x)
    assert [each.shape for each in got] == [each.shape for each in expected], (seed, model)
    assert all(each.isfinite().all() for each in got), (seed, model)
    logits = errors.pop(f"layers.{len(model.layers) - 1}", 0.0)
    assert logits <= 0.02, (seed, logits, model)
    assert max(errors.values(), default=0.0) <= LAYER_ERROR, (seed, errors, model)
    return "agrees"


def main() -> None:
    """Pack so many networks, and print what became of them."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    table: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            try:
                found = outcome(seed, Path(folder))
                table[found.partition(":")[0]] += 1
                if found.startswith("refused"):
                    print(f"seed {seed}: {found}")
            except Exception:
                table["failed"] += 1
                print(f"seed {seed}:\n{traceback.format_exc()}", file=sys.stderr)
    print(dict(table))
    sys.exit(1 if table["failed"] else 0)


if __name__ == "__main__":
    main()
