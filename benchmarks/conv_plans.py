"""The best plan of every convolution of the UNet with decoded weights, among tiles and divisions of K.

    python benchmarks/conv_plans.py --json benchmarks/results/conv_plans_h200.json --plans plans.json

For each layer of each case (SCALE:BATCHxHEIGHTxWIDTH): the time of every candidate, with the kernel that adds the
parts of a division of K, of `plugins.gemm.convolution.decoded.plan`'s choice, of the kernel that decodes both operands
(`plugins.gemm.dispatch`), and of cuDNN in FP16. Ten launches are replayed from one CUDA graph, so that no launch
overhead of the host counts. Several processes compile the variants first (`--compile-only`: and nothing else).
`--plans` writes the fastest of each shape in the form of `fp4deploy/plugins/gemm/convolution/plans.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import machine

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.unet import channel_widths
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded import Plan
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.triton.tiles import Tile
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4 as pack

Shape = tuple[int, tuple[int, ...], int, int, int, int]  # batch, channels, outputs, height, width, size
LARGE = (Tile(256, 128, 64, 8, 3), Tile(256, 128, 32, 8, 3))
MIDDLE = (Tile(128, 128, 64, 8, 3),)
SMALL = (Tile(128, 64, 32, 4, 4), Tile(64, 64, 64, 4, 3))
MORE = (Tile(128, 256, 32, 8, 3), Tile(128, 128, 32, 8, 3), Tile(128, 128, 32, 4, 4), Tile(256, 64, 32, 8, 3))
THIN = tuple(Tile(bm, bn, 32, 4, 3) for bm in (256, 128) for bn in (32, 16))
LARGEST_ERROR, LARGEST_ERROR_PACKED = 7e-4, 5e-2  # of the norm, against cuDNN in FP16
SPLITS = (1, 2, 3, 4, 5, 8)
MAX_PROGRAMS = 264
CASES = ("1.0:1x352x480", "0.25:1x352x480", "1.0:16x352x480", "0.25:16x352x480", "1.0:4x512x512")


def shapes(case: str) -> dict[str, Shape]:
    """The quantised convolutions of a case by name, each shape once."""
    scale, _, size = case.partition(":")
    batch, height, width = (int(part) for part in size.split("x"))
    widths = channel_widths(float(scale))
    found: dict[str, Shape] = {}
    for level, (before, after) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
        h, w = height >> level, width >> level
        if level:
            found[f"encoder.{level}.conv1"] = (batch, (before,), after, h, w, 3)
        found[f"conv2 of level {level}"] = (batch, (after,), after, h, w, 3)
        if level + 1 < len(widths):
            found[f"up to level {level}"] = (batch, (widths[level + 1],), after, h // 2, w // 2, 2)
            found[f"decoder.conv1 of level {level}"] = (batch, (after, after), after, h, w, 3)
    return found


def candidates(shape: Shape, more: bool = False) -> list[Plan]:
    """Tiles and splits worth trying."""
    batch, channels, outputs, h, w, size = shape
    rows, transposed = batch * h * w, size == 2
    tiles: tuple[Tile, ...] = SMALL if outputs >= 64 else ()
    tiles += (*LARGE, *MIDDLE, *(MORE if more else ())) if outputs >= 128 else ()
    tiles += THIN if outputs <= 32 else ()
    steps32 = sum(-(-(1 if transposed else size * size) * c // 64) for c in channels)
    found = []
    for tile in tiles:
        if tile.bn > max(16, outputs) or (tile.bk == 64 and any(c % 128 for c in channels)) or tile.bm > 2 * rows:
            continue
        programs = -(-rows // tile.bm) * -(-outputs // tile.bn) * (4 if transposed else 1)
        for splits in SPLITS if not transposed else (1,):
            if splits == 1 or (programs * splits <= MAX_PROGRAMS and programs < 100 and splits * 4 <= steps32):
                found.append(Plan(tile, splits))
    return found


class Layer:
    """Operands of one shape on the GPU."""

    def __init__(self, shape: Shape) -> None:
        batch, channels, outputs, h, w, size = shape
        torch.manual_seed(0)
        self.size, self.transposed = size, size == 2
        self.sources = tuple(packed(batch, h, w, c) for c in channels)
        self.weight = packed(outputs, size, size, sum(channels))
        self.decoded = decode_weight(self.weight, channels, self.transposed)
        maps = torch.cat([source.dequantize(torch.float16) for source in self.sources], -1)
        self.maps = maps.permute(0, 3, 1, 2)
        filters = self.weight.dequantize(torch.float16).permute((3, 0, 1, 2) if self.transposed else (0, 3, 1, 2))
        self.filters = filters.contiguous(memory_format=torch.channels_last)
        self.amax = torch.tensor(40.0, device="cuda") if self.transposed else None  # as in the UNet: with bias, packed
        self.bias = torch.randn(outputs, device="cuda") if self.transposed else None

    def run(self, plan: Plan | None = None) -> Any:
        return decoded.conv2d(
            self.sources, self.decoded, self.bias, padding=0 if self.transposed else self.size // 2, out_amax=self.amax,
            moments=not self.transposed, transposed=self.transposed, chosen=plan,
        )[0]  # fmt: skip

    def former(self) -> Any:
        if self.transposed:
            return dispatch.conv_transpose2d(self.sources[0], self.weight, self.bias, out_amax=self.amax)
        return dispatch.conv2d(self.sources, self.weight, padding=self.size // 2)

    def fp16(self) -> torch.Tensor:
        if self.transposed:
            return F.conv_transpose2d(self.maps, self.filters, None, 2)
        return F.conv2d(self.maps, self.filters, None, padding=self.size // 2)


def packed(*shape: int) -> Nvfp4Tensor:
    """A random packed tensor."""
    return pack(torch.randn(*shape, device="cuda", dtype=torch.float16))


def graph_us(run: Callable[[], Any], launches: int = 10, repeats: int = 5) -> float:
    """Median microseconds of one launch in a CUDA graph of ten."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / launches)
    return sorted(times[1:])[repeats // 2]


def compile_plan(job: tuple[Shape, Plan]) -> str:
    """In a process of its own: one launch, so that Triton's cache has the variant."""
    (_, channels, outputs, _, _, size), plan = job
    batch = 2 if variant(*job)[-1] == 2 else 1
    try:
        small = Layer((batch, channels, outputs, 20, 20, size))
        small.run(plan)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{plan}: {type(error).__name__}: {error}"[:200]
    return ""


def variant(shape: Shape, plan: Plan) -> tuple[Any, ...]:
    """What decides about machine code."""
    batch, channels, outputs, h, w, size = shape
    depth = tuple(min(c, 64) for c in channels)
    items = 0 if plan.splits > 1 else 1 if batch == 1 or h * w % plan.tile.bm == 0 else 2
    return (depth, outputs % plan.tile.bn == 0, outputs % 16 == 0, size, plan.tile, plan.splits > 1, items)


def measure(shape: Shape, more: bool, peers: bool) -> dict[str, Any]:
    """Times of one shape in microseconds."""
    layer = Layer(shape)
    row: dict[str, Any] = {"shape": shape, "plans": []}
    expected = layer.fp16().permute(0, 2, 3, 1)
    limit = LARGEST_ERROR
    if layer.transposed:  # packed: an element may be rounded to the neighbouring code
        expected, limit = pack((expected + layer.bias).half(), amax=layer.amax), LARGEST_ERROR_PACKED
    plain = expected.dequantize() if isinstance(expected, Nvfp4Tensor) else expected.float()
    for plan in candidates(shape, more):
        found: dict[str, Any]
        try:
            y = layer.run(plan)
            y = y.dequantize() if isinstance(y, Nvfp4Tensor) else y.float()
            error = float((y - plain).norm() / plain.norm())
            found = {"tile": vars(plan.tile), "splits": plan.splits, "us": graph_us(lambda p=plan: layer.run(p))}
            found |= {"error": error, "right": error <= limit}
        except Exception as error:
            found = {"tile": vars(plan.tile), "splits": plan.splits, "failed": f"{type(error).__name__}: {error}"[:200]}
        row["plans"].append(found)
    row["plan_us"] = graph_us(layer.run)
    if peers:
        row["former_us"], row["cudnn_us"] = graph_us(layer.former), graph_us(layer.fp16)
    return row


def table(result: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """The fastest plan of each shape, as `decoded.measured_plans` reads it; a plan whose values are off is left out."""
    found: dict[str, list[int]] = {}
    for rows in result["cases"].values():
        for row in rows.values():
            batch, channels, outputs, h, w, size = row["shape"]
            plans = [plan for plan in row["plans"] if plan.get("right")]
            if plans:
                best = min(plans, key=lambda plan: plan["us"])
                taps = 1 if size == 2 else size * size
                shape = decoded.key(batch * h * w, outputs, tuple(c // 2 for c in channels), taps, size == 2)
                found[shape] = [*best["tile"].values(), best["splits"]]
    return {result["machine"]["gpu"]: found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--layers", nargs="+", default=[""], help="parts of the names of layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=14, help="that compile; 0: compile at first use")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--more", action="store_true", help="more tiles")
    parser.add_argument("--peers", action="store_true", help="cuDNN, and the kernel that decodes both operands")
    parser.add_argument("--plans", type=Path, help="write the table that FP4DEPLOY_PLANS names")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = arguments.peers
    began = time.perf_counter()
    wanted = {
        case: {name: shape for name, shape in shapes(case).items() if any(part in name for part in arguments.layers)}
        for case in arguments.cases
    }
    jobs = {
        variant(s, plan): (s, plan)
        for case in wanted.values()
        for s in case.values()
        for plan in candidates(s, arguments.more)
    }
    if arguments.processes:
        with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
            for problem in filter(None, pool.map(compile_plan, jobs.values(), chunksize=2)):
                print(problem)
    print(f"{len(jobs)} variants compiled in {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.compile_only:
        return
    result: dict[str, Any] = {"command": "python benchmarks/conv_plans.py", "machine": machine(), "cases": {}}
    for case, found in wanted.items():
        rows = result["cases"][case] = {}
        for name, shape in found.items():
            rows[name] = row = measure(shape, arguments.more, arguments.peers)
            timed = sorted((plan for plan in row["plans"] if "us" in plan), key=lambda plan: plan["us"])
            best = " ; ".join(
                "{us:.1f} {tile[bm]}x{tile[bn]}x{tile[bk]}w{tile[warps]}s{tile[stages]}/{splits}{same}".format(
                    **plan, same="" if plan["right"] else f" WRONG {plan['error']:.0e}"
                )
                for plan in timed[:4]
            )
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(result) + "\n")
            if arguments.plans:
                arguments.plans.write_text(json.dumps(table(result), indent=0) + "\n")
            print(f"{case} {name:24s} cuDNN {row.get('cudnn_us', 0):7.1f} former {row.get('former_us', 0):7.1f} "
                  f"plan {row['plan_us']:7.1f} | {best}", flush=True)  # fmt: skip
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
