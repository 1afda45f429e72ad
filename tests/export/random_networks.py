"""Random small networks: blocks drawn by a number generator, so that a seed names a network.

    python -m tests.export.random_networks --count 2000 --jobs 24 --json benchmarks/results/fuzz_networks_cpu.json
    python -m tests.export.random_networks --seed 2000 --add --json benchmarks/results/fuzz_networks_cpu.json
    python -m tests.export.random_networks --failed --json benchmarks/results/fuzz_networks_cpu.json

Every network goes prepare -> a training step -> canonical ONNX -> portable ONNX in ONNX Runtime -> packed, its rest in
FP16, BF16 or FP32 by the seed, and each of the two files must compute what torch computes:

| compared | limit |
|---|---|
| portable ONNX, end to end | the gate of `verify`: 0.1 % of the pixels |
| where FP4 amplifies: each quantised layer with reference inputs | 0.1 % of its quantised elements |
| packed, each node with reference inputs | `LAYER_ERROR` of its norm or packed elements; 2 % of the pixels at the end |

A network that a stage refuses in words is counted with them; a traceback or a wrong result ends the run with 1. The
gate of `verify` may refuse a network only where torch differs from itself as much once every layer's output is off by a
last bit of float32 (`_sensitivity`). The
blocks cover one, two and three spatial axes, several inputs and outputs, open and fixed sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from benchmarks.peers import origin
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.nodes import compare_nodes
from fp4deploy.export.verify.outputs import Agreement
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.packed.file import read_packed, write_packed
from fp4deploy.qat import deployed, quantized_layers
from fp4deploy.rest import RESTS, Rest

SIZES = {1: (24,), 2: (16, 24), 3: (4, 8, 8)}
LAYER_ERROR = 1e-3  # of a layer with reference inputs
NOTHING: dict[str, Any] = {"runs": [], "networks": 0, "outcomes": {}, "reasons": {}, "failed_seeds": []}
LOGITS_ERROR = 0.02  # share of the pixels of the last layer, with reference inputs
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.ELU, nn.ReLU6, nn.Hardsigmoid,
    nn.Mish, nn.Softplus, nn.PReLU,
)  # fmt: skip
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOL = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE = {
    1: (F.adaptive_avg_pool1d, F.adaptive_max_pool1d),
    2: (F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
    3: (F.adaptive_avg_pool3d, F.adaptive_max_pool3d),
}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
EVERYWHERE = (
    "conv", "conv", "conv", "grouped", "depthwise", "norm", "norm", "act", "act", "add", "concat", "pool", "resize",
    "nearest", "up", "gate", "excite", "adaptive", "linear", "attention", "pad", "split", "scale",
)  # fmt: skip
IN_THE_PLANE = (
    "shuffle", "unshuffle", "layer_norm_2d", "unequal", "dilated_up", "padding_mode", "residual", "heads", "involution",
    "windows", "queries", "position",
)  # fmt: skip
IN_VOLUMES = ("flat", "flat", "column", "flat_up", "cube_up", "skip", "skip")
Forward = Callable[[nn.Module, torch.Tensor, list[torch.Tensor]], torch.Tensor]


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of a feature map."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Queries(nn.Module):
    """Learned queries, projected by a layer that no input reaches: each mixes all channels."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.queries, self.project = nn.Parameter(torch.randn(count, channels)), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qc,nchw->nqhw", self.project(self.queries).softmax(-1), x)


class Position(nn.Module):
    """A learned map, resized to the image's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.map = nn.Parameter(torch.randn(1, channels, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.interpolate(self.map, x.shape[2:])  # other modes differ by several last bits in ONNX Runtime


class RandomNetwork(nn.Module):
    """Blocks drawn from a seed; each reads the activation before it, and some an earlier one of the same shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.axes = self.draw.choice([2] * 8 + [1, 3])
        self.inputs = self.draw.choice([1] * 9 + [2])
        self.outputs = self.draw.choice(["tensor"] * 8 + ["tuple", "dict"])
        self.plan: list[str] = []
        self.layers = nn.ModuleList()
        channels = self.draw.choice([8, 16, 20, 32])
        self.second = CONV[self.axes](2, channels, 1) if self.inputs == 2 else None
        self.add("first", CONV[self.axes](3, channels, 3, padding=1))
        for _ in range(self.draw.randint(2, 6)):
            channels = self.block(channels)
        self.add("last", CONV[self.axes](channels, self.draw.randint(1, 6), 1))
        self.other = CONV[self.axes](channels, 3, 1) if self.outputs != "tensor" else None
        del self.draw

    def add(self, kind: str, layer: nn.Module) -> None:
        self.plan.append(kind)
        self.layers.append(layer)

    def block(self, channels: int) -> int:
        """Add a block that reads so many channels; how many it gives."""
        draw, axes = self.draw, self.axes
        conv = CONV[axes]
        kind = draw.choice(EVERYWHERE + IN_THE_PLANE * (axes == 2) + IN_VOLUMES * (axes == 3))
        wide = draw.choice([16, 24, 32, 48])
        groups = next(size for size in (8, 4, 2, 1) if channels % size == 0)
        simple: dict[str, tuple[Callable[[], nn.Module], int]] = {
            "unequal": (lambda: nn.Conv2d(channels, wide, (3, 5), (1, 2), (1, 2), bias=False), wide),
            "padding_mode": (
                lambda: nn.Conv2d(channels, wide, 3, 1, 1, padding_mode=draw.choice(["reflect", "replicate"])), wide,
            ),
            "dilated_up": (
                lambda: nn.ConvTranspose2d(channels, wide, 3, (2, 1), 1, (1, 0), groups=draw.choice([1, groups])), wide,
            ),
            "flat": (
                lambda: nn.Conv3d(channels, wide, (1, 3, 3), draw.choice([1, (1, 2, 2), (2, 2, 1)]), (0, 1, 1)), wide,
            ),
            "column": (lambda: nn.Conv3d(channels, wide, (3, 1, 1), (2, 1, 1), (1, 0, 0), bias=False), wide),
            "flat_up": (lambda: nn.ConvTranspose3d(channels, wide, (1, 2, 2), (1, 2, 2)), wide),
            "cube_up": (lambda: nn.ConvTranspose3d(channels, wide, 2, 2), wide),
            "skip": (lambda: nn.ModuleList([conv(channels, 16, 1), conv(channels + 16, wide, 3, 1, 1)]), wide),
            "depthwise": (lambda: conv(channels, channels, 3, 1, 1, groups=channels, bias=False), channels),
            "grouped": (lambda: conv(channels, 2 * wide, 3, 1, 1, groups=2 if channels % 2 == 0 else 1), 2 * wide),
            "act": (lambda: draw.choice(ACTIVATIONS)(), channels),
            "gate": (lambda: conv(channels, channels, 1), channels),
            "attention": (lambda: nn.Linear(channels, 3 * channels), channels),
            "heads": (lambda: nn.Linear(channels, 3 * channels), channels),
            "concat": (lambda: conv(channels, 16, 3, padding=1), channels + 16),
            "linear": (lambda: nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, wide)), wide),
            "layer_norm_2d": (lambda: LayerNorm2d(channels), channels),
            "scale": (lambda: nn.Identity(), channels),
            "involution": (lambda: conv(channels, 9, 1), channels),
            "windows": (lambda: conv(4 * channels, wide, 1), wide),
            "queries": (lambda: Queries(channels, wide), wide),
            "position": (lambda: Position(channels), channels),
            "excite": (
                lambda: nn.Sequential(
                    conv(channels, 16, 1), nn.ReLU(), conv(16, channels, 1), draw.choice([nn.Sigmoid, nn.Hardsigmoid])()
                ),
                channels,
            ),
            "residual": (
                lambda: nn.Sequential(
                    nn.Conv2d(channels, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True),
                    nn.Conv2d(wide, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels),
                ),
                channels,
            ),
        }  # fmt: skip
        if kind == "conv":
            kernel, dilation = draw.choice([(1, 1), (3, 1), (3, 2), (5, 1)])
            padding = draw.choice(["same", 0, 1])
            stride = 1 if padding == "same" else draw.choice([1, 1, 2])
            self.add(kind, conv(channels, wide, kernel, stride, padding, dilation, bias=draw.random() < 0.5))
            return wide
        if kind == "norm":
            affine = draw.random() < 0.7
            norms = (
                BATCH_NORM[axes](channels, affine=affine),
                nn.GroupNorm(groups, channels, affine=affine),
                INSTANCE_NORM[axes](channels, affine=affine),
            )
            self.add(kind, draw.choice(norms))
            return channels
        if kind == "pool":
            pools = (MAX_POOL[axes](2), AVG_POOL[axes](3, 1, 1), MAX_POOL[axes](3, 1, 1), AVG_POOL[axes](2))
            self.add(kind, draw.choice(pools))
            return channels
        if kind == "up":
            kernel, padding = draw.choice([(2, 0), (3, 1), (4, 1)])
            self.add(kind, UP[axes](channels, wide, kernel, 2, padding, kernel % 2))
            return wide
        if kind == "shuffle" and channels % 4 == 0:
            self.add(kind, nn.PixelShuffle(2))
            return channels // 4
        if kind == "unshuffle" and channels <= 16:
            self.add("even", nn.PixelUnshuffle(2))
            return 4 * channels
        layer, after = simple.get(kind, (nn.Identity, channels))
        self.add(kind, layer())
        return after

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> Any:
        earlier: list[torch.Tensor] = []
        for number, (kind, layer) in enumerate(zip(self.plan[:-1], self.layers, strict=False)):
            earlier.append(x)
            x = self.step(kind, layer, x, earlier)
            if number == 0 and self.second is not None and extra is not None:
                x = x + self.second(extra)
        y = self.layers[-1](x)
        if self.other is None:
            return y
        return {"out": y, "aux": self.other(x)} if self.outputs == "dict" else (y, self.other(x))

    def step(self, kind: str, layer: nn.Module, x: torch.Tensor, earlier: list[torch.Tensor]) -> torch.Tensor:
        n, c, *size = x.shape
        if kind == "add":
            return sum((each for each in earlier[:-1] if each.shape == x.shape), x)
        if kind == "residual":
            return torch.relu(x + layer(x))
        if kind == "concat":
            return torch.cat([x, layer(x)], 1)
        if kind == "skip":
            return layer[1](torch.cat([torch.relu(layer[0](x)), x], 1))
        if kind == "gate":
            return x * torch.sigmoid(layer(x))
        if kind == "excite":
            return x * layer(ADAPTIVE[self.axes][0](x, 1))
        if kind == "adaptive":
            small = ADAPTIVE[self.axes][c % 2](x, 2)
            return x + F.interpolate(small, size, mode="nearest")
        if kind == "scale":
            return 0.5 * x.mean(tuple(range(2, x.ndim)), keepdim=True) + x / (1 + x.abs())
        if kind in ("resize", "nearest"):
            mode = {"nearest": "nearest"}.get(kind, LINEAR[self.axes])
            corners = None if mode == "nearest" else c % 3 == 0
            return F.interpolate(x, scale_factor=2.0, mode=mode, align_corners=corners) if max(size) < 32 else x
        if kind == "linear":
            return layer(x.movedim(1, -1)).movedim(-1, 1)
        if kind == "attention":
            q, k, v = layer(x.flatten(2).transpose(1, 2)).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, c, *size)
        if kind == "heads":
            tokens = layer(x.flatten(2).transpose(1, 2)).reshape(n, -1, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
            q, k, v = tokens.unbind(0)
            mixed = ((q * (c // 2) ** -0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
            return mixed.transpose(1, 2).reshape(n, -1, c).transpose(1, 2).reshape(n, c, *size)
        if kind == "involution":  # the weights of a pixel's window are computed from the pixel
            columns = F.unfold(x, 3, padding=1).view(n, c, 9, *size)
            return (columns * layer(x).softmax(1)[:, None]).sum(2)
        if kind == "windows":
            even = x[:, :, : size[0] // 2 * 2, : size[1] // 2 * 2]
            parts = even.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 1, 4, 5, 2, 3).flatten(1, 3)
            y = layer(parts)
            return F.fold(y.repeat(1, 4, 1, 1).flatten(2) / 2, even.shape[2:], 2, stride=2)
        if kind == "pad":
            return F.pad(x, (1, 0, 2, 1)[: 2 * min(self.axes, 2)])
        if kind == "split":
            first, second = x.split([c - c // 2, c // 2], 1)
            return torch.cat([second, first], 1)
        if kind == "even":
            return layer(x[:, :, : size[0] // 2 * 2, : size[1] // 2 * 2])
        return layer(x)


def example_of(model: RandomNetwork) -> tuple[torch.Tensor, ...]:
    """Inputs of FP16 values, as files hold them."""
    found = [torch.randn(2, channels, *SIZES[model.axes]) for channels in (3, 2)]
    return tuple(x.half().float() for x in found[: model.inputs])


def rest_drawn(seed: int) -> Rest:
    """The precision of the rest of a network of this seed."""
    return random.Random(f"rest {seed}").choice(list(RESTS.values()))


def outcome(seed: int, folder: Path, rest: Rest | None = None) -> str:
    """What became of one network, deployed with this rest, or the one that is drawn: "agrees", or "refused by STAGE:
    ..." in words; two where both files are refused.

    Raises:
        AssertionError: a file computes something else than torch.
    """
    torch.manual_seed(seed)
    model, rest = RandomNetwork(seed), rest or rest_drawn(seed)
    x = example_of(model)
    try:
        model.train()(*x)
    except (RuntimeError, ValueError) as error:
        return f"no network: torch refuses it ({type(error).__name__})"
    _learn(model, seed)
    model = deployed(model.eval(), rest)
    outcomes = _onnx(model, x, seed, rest), _packed(model, x, seed, folder, rest)
    refused = [found for found in outcomes if found is not None]
    return "; ".join(refused) or "agrees"


def _learn(model: RandomNetwork, seed: int) -> None:
    """Prepare and take a training step; a network without a layer for FP4 stays in FP16."""
    x = example_of(model)
    if any(plan.precision == "FP4" for plan in fd.layer_plan(model)):
        fd.prepare(model, ("nvfp4_qat", "nvfp4_4o6_weight_qat")[seed % 5 == 0])
        fd.calibrate(model, [(x, None)])
    model.train()
    sum(each.float().square().mean() for each in leaves(model(*x))).backward()
    finite = {
        name: bool(each.grad.isfinite().all()) for name, each in model.named_parameters() if each.grad is not None
    }
    assert all(finite.values()), (seed, "gradient", finite)
    fd.calibrate(model, [(x, None)])


def _onnx(model: RandomNetwork, x: tuple[torch.Tensor, ...], seed: int, rest: Rest) -> str | None:
    try:
        graph = fd.export_graph(model, x, dynamic_size=seed % 3 == 0, rest=rest.name)
    except InputError as error:
        return f"refused by export: {str(error)[:160]}"
    found = fd.verify(model, graph, [x])
    if found.passed:
        return None
    require_undecided(model, found, x, seed)
    return "refused by verify: last bits of float32 decide about more elements than it allows"


def require_undecided(model: nn.Module, found: Agreement, x: tuple[torch.Tensor, ...], seed: int) -> None:
    """Fail unless last bits of float32 explain what differs, layer by layer."""
    assert found.layerwise is not None, (seed, found.sentence(), found.flat)
    own = _sensitivity(model, x)
    wrong = {name: share for name, share in found.layerwise.layers.items() if share > max(4 * own[name], LAYER_ERROR)}
    assert not wrong, (seed, found.sentence(), found.layerwise, own)
    assert found.layerwise.share >= 1 - LOGITS_ERROR, (seed, found.sentence())


@torch.inference_mode()
def _sensitivity(model: nn.Module, x: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Share of a layer's quantised input that changes with the last bits of what it is computed from."""
    layers: Any = quantized_layers(model)
    before: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in layers}
    calls, differing = Counter[str](), dict.fromkeys(layers, 0.0)

    def keep(name: str, layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        before[name].append((inputs[0], layer.quantized_input(inputs[0])))

    def compare(name: str, layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        reference, expected = before[name][calls[name]]
        calls[name] += 1
        share = (layer.quantized_input(inputs[0]) != expected).float().mean().item()
        differing[name] = max(differing[name], share)
        return (reference,)

    def disturb(layer: nn.Module, inputs: Any, y: Any) -> Any:
        return y * (1 + 2**-23 * torch.randn_like(y)) if isinstance(y, torch.Tensor) else y

    handles = [layer.register_forward_pre_hook(partial(keep, name)) for name, layer in layers.items()]
    model(*x)
    for handle in handles:
        handle.remove()
    handles = [layer.register_forward_pre_hook(partial(compare, name)) for name, layer in layers.items()]
    handles += [each.register_forward_hook(disturb) for each in model.modules() if not any(each.children())]
    model(*x)
    for handle in handles:
        handle.remove()
    return differing


def _packed(model: RandomNetwork, x: tuple[torch.Tensor, ...], seed: int, folder: Path, rest: Rest) -> str | None:
    try:
        packed = pack_model(model, x, dynamic_size=seed % 2 == 0, rest=rest)
        file = packed_file(folder / f"random{seed}.fp4", None, *packed)
    except InputError as error:
        return f"refused by pack: {str(error)[:160]}"
    write_packed(file)
    file = read_packed(file.path)
    file.path.unlink()
    network = PackedNetwork(file)
    with torch.inference_mode():
        expected, got = leaves(model(*x)), leaves(network(*x))
        errors = compare_nodes(model, network, *x).errors
    assert [each.shape for each in got] == [each.shape for each in expected], (seed, model)
    assert all(each.isfinite().all() for each in got), (seed, model)
    ends = {f"layers.{len(model.layers) - 1}", "other"}
    limits = {name: LOGITS_ERROR if name in ends else LAYER_ERROR for name in errors}
    wrong = {name: error for name, error in errors.items() if error > limits[name]}
    assert not wrong, (seed, wrong, model)
    return None


def _row(outcome: Callable[[int, Path], str], folder: Path, seed: int) -> tuple[int, str]:
    """(seed, outcome), of a failure its traceback."""
    try:
        return seed, outcome(seed, folder)
    except Exception:
        return seed, f"failed: {traceback.format_exc()[-2000:]}"


def _begin() -> None:
    """In a process of its own."""
    torch.set_num_threads(1)


def reasons(found: str) -> list[str]:
    """What was refused in an outcome, without the names and sizes of one network."""
    if found.startswith("failed"):
        return []
    return [re.sub(r"\b[\w.]*\d[\w.]*\b|'[^']*'", "*", part)[:110] for part in found.split("; ") if "refused" in part]


def main(outcome: Callable[[int, Path], str] = outcome, module: str = "random_networks") -> None:
    """Run so many networks, and print what became of them."""
    parser = argparse.ArgumentParser(
        description=sys.modules[outcome.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first network")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="to the counts of other seeds in --json")
    parser.add_argument("--failed", action="store_true", help="those that failed in --json again, in their place")
    arguments = parser.parse_args()
    totals: Counter[str] = Counter()
    table: Counter[str] = Counter()
    seeds = [*range(arguments.seed, arguments.seed + arguments.count)]
    failed: list[int] = []
    kept = arguments.add or arguments.failed
    earlier = json.loads(arguments.json.read_text(encoding="utf-8")) if kept else NOTHING
    if arguments.failed:
        seeds = earlier["failed_seeds"]
        counts = {name: count for name, count in earlier["outcomes"].items() if name != "failed"}
        earlier |= {"networks": earlier["networks"] - len(seeds), "outcomes": counts, "failed_seeds": []}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(arguments.jobs, initializer=_begin) as pool:
        for seed, found in pool.map(partial(_row, outcome, Path(folder)), seeds, chunksize=1):
            table.update(reasons(found))
            totals[found.partition(":")[0]] += 1
            if found.startswith("failed"):
                failed.append(seed)
                print(f"seed {seed}: {found}", file=sys.stderr, flush=True)
            if arguments.json and (seed == seeds[-1] or (seed % 10 == 9 and not arguments.failed)):
                done = seeds[: seeds.index(seed) + 1]
                found_so_far = _record(module, done, totals, table, failed)
                arguments.json.write_text(json.dumps(merged(earlier, found_so_far), indent=1) + "\n", encoding="utf-8")
    for text, count in [*totals.most_common(), *table.most_common()]:
        print(f"{count:6d} {text}")
    sys.exit(1 if failed else 0)


def _record(
    module: str, seeds: list[int], totals: Counter[str], table: Counter[str], failed: list[int]
) -> dict[str, Any]:
    run = {
        "command": f"python -m tests.export.{module} {' '.join(sys.argv[1:])}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "versions": {name: version(name) for name in ("onnx", "onnxruntime", "onnxscript")},
        "seeds": [seeds[0], seeds[-1]] if seeds[-1] - seeds[0] == len(seeds) - 1 else {"again": seeds},
    }
    counts = {"outcomes": dict(totals), "reasons": dict(table)}
    return {**origin(), "runs": [run], "networks": len(seeds), **counts, "failed_seeds": failed}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The counts of two records of other seeds together, of the second's date."""
    found: dict[str, Any] = {key: other[key] for key in ("commit", "date")} | {
        key: one[key] + other[key] for key in ("runs", "networks")
    }
    for key in ("outcomes", "reasons"):
        found[key] = dict((Counter(one[key]) + Counter(other[key])).most_common())
    return found | {"failed_seeds": one["failed_seeds"] + other["failed_seeds"]}


if __name__ == "__main__":
    main()
