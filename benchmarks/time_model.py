"""Fit `fp4deploy.timing` to layers that were timed on an H200, hold half of them out, and say how far off they are.

    python benchmarks/time_model.py --loops                  machine code of the main loops, no GPU
    python benchmarks/time_model.py benchmarks/results/layer_times_h200.json \\
        --json benchmarks/results/time_model_h200.json --plot docs/images/time_model.svg

The first writes `fp4deploy/timing/loops.json`, the second `fp4deploy/timing/fitted.json` as well. Times are those of
`layer_times.py`, cold and warm, and of norms (`fp4deploy profile`, layers_h200.json). `--networks` packs whole
networks of packed_latency_h200.json and packed_networks_h200.json, none of which was used in the fit, and compares what
`timing.network` says of their steps with what they took as one CUDA graph.

**Held out** is every second layer, with all its columns, in the order of the SHA-256 of their names: no time is looked
at. Factors are the least squares of log(predicted / measured) of the other half, with a loss that outliers do not rule;
none is negative. Of the held-out half the 5th and 95th percentile of predicted / measured are the error bar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peers import origin
from scipy.optimize import least_squares

from fp4deploy.export.to_packed import pack_model
from fp4deploy.formats import Nvfp4Tensor, quantize_fp8, quantize_mxfp4, quantize_mxfp8
from fp4deploy.packed import PackedFile, packed_file
from fp4deploy.peaks import Gpu, find_gpu
from fp4deploy.plugins.aot.compile import compile_launch, triton_version
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm.arguments import gemm_call
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.training import Window, gather_call
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM, Tile, tiles
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.runtime import cubin
from fp4deploy.timing import launches, model
from fp4deploy.timing.launches import PACKED, Shape
from fp4deploy.timing.library import library_work
from fp4deploy.timing.model import Work, microseconds
from fp4deploy.timing.network import estimate_network

ARCHES = (90, 100, 120)
# Forms that a norm writes, the second one pooled -> elements that it packs, and bytes, for each that it reads.
WRITTEN = {("packed",): (1.0, 2.5625), ("packed", "packed"): (1.25, 2.703), ("plain",): (0.0, 4.0)}
STEPS = Path(__file__).parent / "results" / "layers_h200.json"
START = {"launch": 2.0, "power": 0.3, "memory": 1.0, "cache": 0.8}
KINDS = {"tensor": 1.0, "issue": 1.5, "stall": 0.1, "steps": 200.0, "blocks": 4000.0, "epilogue": 9.0, "idle": 0.3}
KINDS |= {"waves": 1000.0, "decode": 5.0, "cycles": 1.0, "packing": 9.0, "sums": 5000.0, "scatter": 5.0}
# Bounds: no kernel is faster than the rates that the GPU was seen to reach.
PRIOR = 0.15  # weight of log(factor / START) beside log(predicted / measured): no factor leaves without a reason
SMALL = (64, 64)  # of images that a network is packed with, for any size
LIMITS = (({"tensor": 1.0, "memory": 0.9}, 1e-6), ({"power": 5.0}, 1e5))


class Sample(NamedTuple):
    """One time of a layer: its column, its works, one after the other, and microseconds."""

    name: str
    column: str
    works: list[Work]
    warm: bool
    measured: float

    @property
    def family(self) -> str:
        return self.works[0].family


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path, nargs="?", help="of layer_times.py")
    parser.add_argument("--loops", action="store_true", help="write the machine code of the main loops, and end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--networks", nargs="*", default=[], help="specifications, or scales of our UNet")
    options = parser.parse_args()
    if options.loops:
        write(launches.LOOPS, {"command": "python benchmarks/time_model.py --loops", **all_loops()})
        return
    document = json.loads(options.times.read_text())
    gpu = find_gpu("sm90")
    samples = [*layers(document["rows"], gpu), *moves(gpu)]
    found = fit(samples, gpu)
    about = {
        "fitted_to": options.times.name,
        "gpu": gpu.name,
        "layers": len({each.name for each in samples}),
        "held_out": len(held_out(samples)),
    }
    write(model.FITTED, about | {"families": found})
    model.fitted.cache_clear()
    rows = predictions(samples, gpu)
    for name, family in found.items():
        print(name, family)
    if options.json:
        more = f" --networks {' '.join(options.networks)}" if options.networks else ""
        command = f"python benchmarks/time_model.py {options.times}{more}"
        found_networks = list(networks(options.networks, gpu))
        content = {**about, "families": found, "networks": found_networks, "rows": rows}
        write(options.json, {"command": command, **origin(), "machine": document["machine"], **content})
    if options.plot:
        plot(rows, options.plot)


def write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    path.write_text(re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text) + "\n")


# Machine code of the main loops.


def all_loops() -> dict[str, Any]:
    """As `launches.loops` reads it."""
    found: dict[str, Any] = {}
    for number in ARCHES:
        families = {"implicit": implicit_launches(number)}
        families |= eight_bit_launches(number) if number >= NATIVE_FROM else {"decoded": decoded_launches()}
        found[f"sm{number}"] = {name: dict(compiled(each, number)) for name, each in families.items()}
    return {"triton": triton_version(), "kernels": found}


def compiled(family: Sequence[Launch], number: int) -> Iterator[tuple[str, list[int]]]:
    for launch in family:
        kernel = compile_launch(launch, f"sm_{number}")
        loop = cubin.main_loop(kernel.cubin, kernel.name)
        facts = dict(launch.constants)
        if loop is not None:
            name = " x ".join(str(facts[each]) for each in ("BM", "BN", "BK")) + f", {facts.get('TAPS', 1)} taps"
            print(f"sm{number} {launch.kernel} {name}: {loop}", flush=True)
            yield name, [*loop, kernel.registers, kernel.shared]


def implicit_launches(number: int) -> list[Launch]:
    """Of every tile, with one tap and several taps a step."""
    found = []
    for tile in {each for flags in ((True, False), (False, True), (False, False)) for each in chosen(number, *flags)}:
        for channels in channels_of(tile):
            x, weight = packed(1, 8, 8, channels), packed(16, 3, 3, channels)
            out = torch.empty(0, dtype=torch.half)
            call = gemm_call(
                *((x,), weight, None, (1, 8, 8), (1, 8, 8), out, None, None, torch.half, number),
                *((3, 3), 1, 1, 1, False, False, tile),
            )
            found.append(call.launch)
    return found


def eight_bit_launches(number: int) -> dict[str, list[Launch]]:
    """Of the kernel of FP8 and W4A8, a filter of 3 x 3."""
    x, weight = torch.zeros(1, 8, 8, 256), torch.zeros(128, 3, 3, 256)
    pairs = {
        "FP8": (quantize_fp8(x), quantize_fp8(weight, 0)),
        "W4A8": (quantize_mxfp8(x), quantize_mxfp4(weight)),
    }
    out, window = torch.empty(1, 8, 8, 128, dtype=torch.half), Window((3, 3), (1, 1), (1, 1), (1, 1))
    return {name: [gather_call(*pair, window, out, None, False, number).launch] for name, pair in pairs.items()}


def chosen(number: int, quantize: bool, transposed: bool) -> Iterator[Tile]:
    for taps, depth in ((1, 128), (9, 128), (9, 32)):
        yield from tiles(number, quantize, transposed, False, taps, depth)


def decoded_launches() -> list[Launch]:
    """Of every tile of `decoded.plan` and of the measured plans."""
    plans = {Tile(*row[:5]) for row in decoded.measured_plans()["NVIDIA H200"].values()}
    plans |= {decoded.LARGE, decoded.SMALL, *(Tile(128, columns, 32, 4, 3) for columns in (16, 32))}
    calls: list[Call] = []
    for tile in plans:
        for channels in channels_of(tile):
            x, weight = quantize_nvfp4(torch.zeros(1, 8, 8, channels)), quantize_nvfp4(torch.zeros(16, 3, 3, channels))
            planes = decode_weight(weight, (channels,))
            decoded.conv2d((x,), planes, padding=1, chosen=decoded.Plan(tile), launch=calls.append)
    return [call.launch for call in calls]


def channels_of(tile: Tile) -> list[int]:
    """So that a step has one tap, and that it has several."""
    return [256, *(channels for channels in (64, 32, 16) if channels // 2 < tile.bk)]


def packed(*shape: int) -> Nvfp4Tensor:
    return quantize_nvfp4(torch.zeros(*shape))


# Samples.


def layers(rows: Sequence[dict[str, Any]], gpu: Gpu) -> Iterator[Sample]:
    """Times of all columns of `layer_times.py`."""
    seen = set[float]()
    for row in rows:
        shape = shape_of(row)
        for column, works in works_of(shape, gpu).items():
            times = row.get(column, {})
            if column == "pack" and works[0].moved in seen:
                continue  # the same feature map as another layer's, which may be in the other half
            seen |= {works[0].moved} if column == "pack" else set()
            for state in ("cold", "warm"):
                if f"{state}_us" in times:
                    yield Sample(row["case"], column, works, state == "warm", times[f"{state}_us"])


def works_of(shape: Shape, gpu: Gpu) -> dict[str, list[Work]]:
    """Of each column."""
    found = {"ours": launches.works(shape, gpu)}
    if shape.taps:
        found["implicit"] = [launches.implicit(shape, gpu)]
    read = shape.batch * math.prod(shape.sizes) * sum(shape.channels)
    first = read * shape.channels[0] / sum(shape.channels)
    found["pack"] = [launches.moving(first * (2 + PACKED), first, gpu)]
    elements = read + shape.moved[1]
    outputs = shape.rows * shape.places * shape.outputs
    product = (shape.rows, shape.places * shape.outputs, sum(shape.channels) * shape.summed)
    for precision, columns in (("FP16", ("cudnn_fp16", "cublas_fp16")), ("FP8", ("cudnn_fp8", "scaled_mm_fp8"))):
        moved = (2 if precision == "FP16" else 1) * elements + 2 * outputs
        work = library_work(precision, *product, moved, gpu, shape.transposed)
        found |= {column: [work] for column in columns}
    return found


def shape_of(row: dict[str, Any]) -> Shape:
    """The layer of a row."""
    if row["linear"]:
        return Shape(row["width"], (), tuple(row["channels"]), row["outputs"])
    padding = 0 if row["transposed"] else row["taps"] // 2 * row["dilation"]
    pairs = ((each, each) for each in (row["taps"], row["stride"], padding))
    return Shape(
        *(row["batch"], (row["height"], row["width"]), tuple(row["channels"]), row["outputs"], *pairs),
        *(row["dilation"], row["transposed"], row["transposed"]),
    )


def moves(gpu: Gpu) -> Iterator[Sample]:
    """GroupNorm with ReLU and pooling, of a network that was profiled: warm."""
    for network in json.loads(STEPS.read_text())["layers"]:
        for row in network["layers"]:
            if not row["operations"]:
                packed, size = WRITTEN[tuple(row["writes"])]
                work = launches.moving(row["bytes"], packed * row["bytes"] / size, gpu, norm=True)
                yield Sample(row["layer"], "norm", [work], True, 1e3 * row["ms"])


# The fit.


def held_out(samples: Sequence[Sample]) -> set[str]:
    """Names of every second layer, in the order of the SHA-256 of their names."""
    names = sorted({each.name for each in samples}, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return set(names[1::2])


def fit(samples: Sequence[Sample], gpu: Gpu) -> dict[str, Any]:
    """Factors and errors of each family; those whose works have a second kernel after it."""
    found: dict[str, Any] = {}
    apart = held_out(samples)
    for family in sorted(families(samples), key=lambda name: (name != "moves", name)):
        own = [each for each in samples if each.family == family]
        names = [*START, *own[0].works[0].cycles]
        fitting = [each for each in own if each.name not in apart]
        factors = least(fitting, names, {name: each["factors"] for name, each in found.items()}, gpu)
        known = {name: each["factors"] for name, each in found.items()} | {family: factors}
        errors = {
            key: percentiles([ratio(each, known, gpu) for each in part])
            for key, part in (("fit", fitting), ("held_out", [each for each in own if each.name in apart]))
        }
        found[family] = {"factors": factors, **errors}
    return found


def least(samples: Sequence[Sample], names: list[str], known: dict[str, Any], gpu: Gpu) -> dict[str, float]:
    """The factors of one family."""
    family, start = samples[0].family, [math.log(1.01 * (START | KINDS)[name]) for name in names]

    def residuals(values: np.ndarray) -> list[float]:
        factors = known | {family: dict(zip(names, map(math.exp, values), strict=True))}
        kept = [PRIOR * (own - first) for own, first in zip(values, start, strict=True)]
        return [*(math.log(ratio(each, factors, gpu)) for each in samples), *kept]

    bounds = [[math.log(limits.get(name, other)) for name in names] for limits, other in LIMITS]
    done = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1)
    return {name: float(f"{math.exp(value):.4g}") for name, value in zip(names, done.x, strict=True)}


def ratio(sample: Sample, factors: dict[str, Any], gpu: Gpu) -> float:
    """Predicted over measured."""
    return sum(microseconds(work, factors[work.family], gpu, sample.warm) for work in sample.works) / sample.measured


def percentiles(ratios: Sequence[float]) -> dict[str, float]:
    """And the number of times."""
    p5, p50, p95 = np.percentile(ratios, (5, 50, 95))
    return {
        "times": len(ratios),
        **{name: round(float(each), 4) for name, each in (("p5", p5), ("p50", p50), ("p95", p95))},
    }


def predictions(samples: Sequence[Sample], gpu: Gpu) -> list[dict[str, Any]]:
    """A row for each time."""
    apart = held_out(samples)
    return [
        {
            "layer": each.name,
            "column": each.column,
            "family": each.family,
            "held_out": each.name in apart,
            "warm": each.warm,
            "measured_us": round(each.measured, 3),
            "predicted_us": round(sum(1e3 * model.time_of(work, gpu, each.warm).ms for work in each.works), 3),
        }
        for each in samples
    ]


def networks(names: Sequence[str], gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Whole networks that were timed by steps of our kernels, predicted."""
    from packed_latency import model as deployed

    files: dict[str, PackedFile] = {}
    for result in ("packed_latency_h200", "packed_networks_h200"):
        for case in json.loads((STEPS.parent / f"{result}.json").read_text())["cases"]:
            name, _, size = case["case"].rpartition(":")
            batch, height, width = map(int, size.split("x"))
            measured = case["runs"].get("packed nvfp4", {}).get("graph_ms")
            if name in names and measured is not None:
                if name not in files:
                    parts = pack_model(deployed(name, "nvfp4", SMALL), torch.zeros(1, 3, *SMALL))
                    files[name] = packed_file(Path("network.fp4"), None, *parts)
                total = estimate_network(files[name], gpu, (height, width), batch).total
                found = {"ms": total.ms, "low_ms": total.low, "high_ms": total.high, "measured_ms": measured}
                print(case["case"], found, flush=True)
                yield {"network": name, "size": size} | {key: round(value, 4) for key, value in found.items()}


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Predicted against measured; what was held out is filled."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fp4deploy"
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    names = sorted({row["family"] for row in rows})
    figure, axes = plt.subplots(2, (len(names) + 1) // 2, figsize=(12, 6.6), layout="constrained", squeeze=False)
    for name, place in zip(names, axes.flat, strict=False):
        own, ranges = [row for row in rows if row["family"] == name], []
        for apart, colour, filled in ((False, "#1f77b4", "none"), (True, "#d62728", "#d62728")):
            part = [row for row in own if row["held_out"] == apart]
            x, y = ([row[key] for row in part] for key in ("measured_us", "predicted_us"))
            error = percentiles([b / a for a, b in zip(x, y, strict=True)])
            ranges.append(f"{error['p5']:.2f} to {error['p95']:.2f}")
            place.plot(x, y, "o", ms=3.5, mfc=filled, mec=colour, mew=0.8, label="held out" if apart else "fitted")
        ends = [min(row["measured_us"] for row in own) / 1.5, max(row["measured_us"] for row in own) * 1.5]
        for factor, width in ((0.8, 0.5), (1.0, 0.8), (1.25, 0.5)):
            place.plot(ends, [factor * end for end in ends], color="black", lw=width, ls="-" if factor == 1 else ":")
        place.set(xscale="log", yscale="log", xlabel="measured, µs", ylabel="predicted, µs")
        place.set_title(f"{name}\nfitted {ranges[0]}, held out {ranges[1]}", fontsize=8)
        place.xaxis.set_minor_formatter(NullFormatter())
        place.yaxis.set_minor_formatter(NullFormatter())
    for place in axes.flat[len(names) :]:
        place.set_axis_off()
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower right", fontsize=9)
    figure.suptitle(
        "Predicted against measured times of layers on one H200; predicted / measured, 5 to 95 %", fontsize=10
    )
    figure.savefig(out, metadata={"Date": None})


def families(samples: Sequence[Sample]) -> list[str]:
    return sorted({each.family for each in samples})


if __name__ == "__main__":
    main()
