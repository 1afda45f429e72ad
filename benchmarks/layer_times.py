"""Times of single layers on one GPU: this package's kernels, and cuDNN and cuBLAS in FP16 and FP8 on the same shapes.

    python benchmarks/layer_times.py --json benchmarks/results/layer_times_h200.json        about 4 minutes on an H200

What `fp4deploy.timing` is fitted to and tested on. Shapes are those of UNets, ResNets and SegFormer: 1x1, 3x3, strided,
dilated and transposed convolutions and linear layers, 16 to 2048 channels, one to 16 images. No bias and no ReLU, so
that no side has a pass that another lacks.

| column | what runs |
|---|---|
| `ours` | what a packed network runs here: weights decoded at load (`decoded`), linear layers by `dispatch.matmul` |
| `implicit` | the implicit GEMM that reads packed weights (`dispatch.conv2d`), the kernel that Blackwell runs |
| `pack` | the layer's first source in FP16, packed: what only moves bytes |
| `cudnn_fp16`, `cublas_fp16` | torch, channels_last, `torch.backends.cudnn.benchmark` |
| `cudnn_fp8` | cuDNN by `nvidia-cudnn-frontend`, E4M3 operands, the fastest of its first plans |
| `scaled_mm_fp8` | `torch._scaled_mm`: E4M3 operands, one scale each; linear layers and 1x1 convolutions of stride 1 |

Each is one CUDA graph of several calls. `cold`: every call has operands and an output of its own, together more than
twice the L2 cache, so that all bytes come from memory; `warm`: all calls have the same. Medians in microseconds of a
call. What refuses a shape has its message there instead of a time.

Kernels are compiled first by several processes, then pass 1 times all shapes but in FP8, and pass 2 those. Rows are
written as they come; a file that is there is completed. After `--seconds` what is left is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import captured, kernels_of, machine, median_ms

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight, supports
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4

Computed = tuple[Callable[[Any, Any], Any], tuple[Any, Any]]
CACHES = 2  # times the L2 cache that operands of all cold calls fill
MAX_CALLS, WARM_CALLS, REPEATS = 128, 10, 7
PLANS = 3  # of cuDNN's heuristics that are timed in FP8
UNET, QUARTER, HALF = (64, 128, 256, 512, 1024), (16, 32, 64, 128, 256), (32, 64, 128, 256, 512)
FIRST = ("ours", "implicit", "cudnn_fp16", "cublas_fp16", "pack")
SECOND = ("cudnn_fp8", "scaled_mm_fp8")
EVERY = 20.0  # seconds between two samples of the clocks
FP8 = torch.float8_e4m3fn
FORMS = tuple(itertools.product(("HALF", "FP8_E4M3"), ("FAST_FLOAT_FOR_FP8", "FLOAT")))  # output, accumulation


@dataclass(frozen=True)
class Case:
    """A layer of packed activations.

    channels: of each source; height, width: of the input. A linear layer has a height of 1 and rows as its width.
    """

    batch: int
    height: int
    width: int
    channels: tuple[int, ...]
    outputs: int
    taps: int = 3
    stride: int = 1
    dilation: int = 1
    transposed: bool = False
    linear: bool = False

    @property
    def padding(self) -> int:
        """Of a convolution that keeps the size."""
        return 0 if self.transposed else self.taps // 2 * self.dilation

    @property
    def name(self) -> str:
        """As "16 x 352 x 480, 64 + 64 to 64, 3x3"."""
        if self.linear:
            return f"{self.width} rows, {self.channels[0]} to {self.outputs}"
        more = [f"stride {self.stride}"] if self.stride > 1 and not self.transposed else []
        more += [f"dilation {self.dilation}"] if self.dilation > 1 else []
        more += ["transposed"] if self.transposed else []
        size = " x ".join(map(str, (self.batch, self.height, self.width)))
        channels = " + ".join(map(str, self.channels))
        return ", ".join([size, f"{channels} to {self.outputs}", f"{self.taps}x{self.taps}", *more])

    @property
    def small(self) -> Case:
        """The same kernels on less: for a test without a GPU."""
        return Case(**{**asdict(self), "batch": 1, "height": min(self.height, 6), "width": min(self.width, 8)})


def cases() -> list[Case]:
    """All shapes, those of a network together."""
    found = [*unet(UNET, 1, 512, 512), *unet(UNET, 4, 512, 512, 0), *unet(UNET, 16, 352, 480, 2)]
    found += [*unet(HALF, 1, 512, 512, 1), *unet(HALF, 8, 256, 352, 1), *unet(QUARTER, 1, 352, 480, 0)]
    found += [*unet(QUARTER, 16, 352, 480, 1), *unet(UNET, 1, 1024, 2048, 1)]
    found += [*residual(1, 512, 512), *residual(8, 352, 480), *segformer(1, 512, 512), *segformer(8, 512, 512)]
    return list(dict.fromkeys(found))


def unet(widths: Sequence[int], n: int, h: int, w: int, every: int | None = None) -> Iterator[Case]:
    """Convolutions of our UNet; `every`: of each three one, from this on."""
    found = []
    for level, width in enumerate(widths):
        size = (n, h >> level, w >> level)
        if level:
            found.append(Case(*size, (width // 2,), width))
        found.append(Case(*size, (width,), width))
        if level + 1 < len(widths):
            found.append(Case(*size, (width, width), width))
        if level:
            found.append(Case(*size, (width,), width // 2, taps=2, stride=2, transposed=True))
    yield from found if every is None else found[every::3]


def residual(n: int, h: int, w: int) -> Iterator[Case]:
    """Of ResNet-34 and ResNet-50, whose last level is dilated as in DeepLab."""
    for level, width in enumerate((64, 128, 256, 512)):
        size, before = (n, h >> (level + 2), w >> (level + 2)), (n, h >> (level + 1), w >> (level + 1))
        if level:
            yield Case(*before, (width // 2,), width, stride=2)
            yield Case(*before, (2 * width,), 4 * width, taps=1, stride=2)
        yield Case(*size, (width,), width)
        yield Case(*size, (width,), 4 * width, taps=1)
        yield Case(*size, (4 * width,), width, taps=1)
    yield Case(n, h >> 4, w >> 4, (512,), 512, dilation=2)
    yield Case(n, h >> 3, w >> 3, (256,), 256, dilation=4)


def segformer(n: int, h: int, w: int) -> Iterator[Case]:
    """Of MiT-B0: projections and MLPs, patch embeddings, and the fusing 1x1 convolution."""
    for level, width in enumerate((32, 64, 160, 256)):
        rows = n * (h >> (level + 2)) * (w >> (level + 2))
        for inputs, outputs in ((width, width), (width, 4 * width), (4 * width, width)):
            yield Case(1, 1, rows, (inputs,), outputs, taps=1, linear=True)
        if level:
            yield Case(n, h >> (level + 1), w >> (level + 1), ((32, 64, 160)[level - 1],), width, stride=2)
    yield Case(n, h >> 2, w >> 2, (1024,), 256, taps=1)


class Operands:
    """Of one layer on a device, and what computes it from them; all of the same numbers."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        torch.manual_seed(0)
        spatial = () if case.linear else (case.batch, case.height)
        kernel = () if case.linear else (case.taps, case.taps)
        make = partial(torch.randn, device=device, dtype=torch.half)
        plain = [make(*spatial, case.width, channels) for channels in case.channels]
        weight = make(case.outputs, *kernel, sum(case.channels))
        self.sources: tuple[Nvfp4Tensor, ...] = tuple(quantize_nvfp4(x) for x in plain)
        self.weight: Nvfp4Tensor = quantize_nvfp4(weight)
        self.amax = torch.tensor(40.0, device=device) if case.transposed else None
        self.x, self.filters, self.first = torch.cat(plain, -1), weight, plain[0]
        if not case.linear:
            self.x = self.x.permute(0, 3, 1, 2)
            order = (3, 0, 1, 2) if case.transposed else (0, 3, 1, 2)
            self.filters = weight.permute(order).contiguous(memory_format=torch.channels_last)

    def of(self, column: str) -> Computed | None:
        """A function of activations and weight, and its operands; None where the column is not of this layer."""
        kind = "linear" if self.case.linear else "convolution"
        found = {
            "ours": {"linear": self._implicit, "convolution": self._decoded},
            "implicit": {"convolution": self._implicit},
            "pack": {"linear": self._pack, "convolution": self._pack},
            "cublas_fp16": {"linear": lambda: (F.linear, (self.x, self.filters))},
            "cudnn_fp16": {"convolution": self._cudnn},
            "scaled_mm_fp8": {"linear": self._scaled_mm, "convolution": self._scaled_mm},
            "cudnn_fp8": {"convolution": self._cudnn_fp8},
        }[column].get(kind)
        return None if found is None else found()

    def _implicit(self) -> Computed:
        case, operands = self.case, (self.sources, self.weight)
        if case.linear:
            return lambda x, w: dispatch.matmul(x[0], w), operands
        if case.transposed:
            return lambda x, w: dispatch.conv_transpose2d(x[0], w, out_amax=self.amax), operands
        return lambda x, w: dispatch.conv2d(x, w, None, case.stride, case.padding, case.dilation), operands

    def _decoded(self) -> Computed:
        case = self.case
        taken = supports(case.channels, 1 if case.transposed else case.taps**2)
        if not (taken and decoded.available(self.x.device)):
            return self._implicit()
        place = {"stride": 1 if case.transposed else case.stride, "padding": case.padding, "dilation": case.dilation}
        more = {"transposed": case.transposed, "out_amax": self.amax}
        weight = decode_weight(self.weight, case.channels, case.transposed)
        return lambda x, w: decoded.conv2d(x, w, **place, **more)[0], (self.sources, weight)

    def _pack(self) -> Computed:
        return lambda x, amax: quantize_nvfp4(x, amax=amax), (self.first, torch.tensor(4.0, device=self.first.device))

    def _cudnn(self) -> Computed:
        case, operands = self.case, (self.x, self.filters)
        if case.transposed:
            return partial(F.conv_transpose2d, stride=2), operands
        return partial(F.conv2d, stride=case.stride, padding=case.padding, dilation=case.dilation), operands

    def _scaled_mm(self) -> Computed | None:
        case = self.case
        if not case.linear and (case.taps, case.stride) != (1, 1):
            return None
        rows = (self.x if case.linear else self.x.permute(0, 2, 3, 1)).reshape(-1, sum(case.channels))
        scale = torch.ones((), device=rows.device)
        filters = self.filters.reshape(case.outputs, -1)

        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.half, use_fast_accum=True)

        return multiply, (rows.to(FP8), filters.contiguous().to(FP8))

    def _cudnn_fp8(self) -> Computed | None:
        if self.case.transposed:
            return None
        x = self.x.contiguous(memory_format=torch.channels_last)
        return CudnnFp8(self.case, x.device), (x.to(FP8), self.filters.to(FP8))


class CudnnFp8:
    """An FP8 convolution of cuDNN: `plans` of its heuristics, of which `chosen` computes.

    Of `FORMS` the first that cuDNN has: FP16 out, or FP8 out with scales as in its examples.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.handle = handle()
        refusals = []
        for self.form in FORMS:
            try:
                self.graph, self.tensors = fp8_graph(case, *self.form, self.handle)
                self.plans = self._plans()
                break
            except Exception as error:
                refusals.append(f"{self.form}: {type(error).__name__}: {error}"[:200])
        else:
            raise RuntimeError("; ".join(refusals))
        needed = max(self.graph.get_workspace_size_plan_at_index(each) for each in self.plans)
        self.workspace = torch.empty(max(1, needed), dtype=torch.uint8, device=device)
        self.shape = self.tensors[2].get_dim()
        self.scale = torch.ones(1, 1, 1, 1, device=device)

    def _plans(self) -> list[int]:
        """Numbers of the first plans that build.

        Raises:
            RuntimeError: none does, or cuDNN has no kernel for the graph.
        """
        import cudnn

        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        count, found = self.graph.get_execution_plan_count(), list[int]()
        for number in range(count):
            if len(found) < PLANS:
                with suppress(Exception):  # cuDNN's way to say that a plan is not for this shape
                    self.graph.build_plan_at_index(number)
                    found.append(number)
        if not found:
            raise RuntimeError(f"none of {count} plans builds")
        return found

    def each(self) -> Iterator[CudnnFp8]:
        """Itself, once for each plan, which is chosen."""
        for plan in self.plans:
            self.chosen = plan
            yield self

    @property
    def about(self) -> dict[str, str]:
        """The chosen plan."""
        return {"plan": self.graph.get_plan_name_at_index(self.chosen), "output, compute": ", ".join(self.form)}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        import cudnn

        dtype = FP8 if self.form[0] == "FP8_E4M3" else torch.half
        y = torch.empty(self.shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
        buffers = {key: each.data_ptr() for key, each in zip(self.tensors, (x, weight, y), strict=False)}
        buffers |= dict.fromkeys(self.tensors[3:], self.scale.data_ptr())
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute_plan_at_index(buffers, self.workspace.data_ptr(), self.chosen, handle=self.handle)
        return y


@lru_cache
def handle() -> Any:
    """Of cuDNN, for the current GPU."""
    import cudnn

    return cudnn.create_handle()


def fp8_graph(case: Case, output: str, compute: str, handle: Any) -> tuple[Any, tuple[Any, ...]]:
    """The graph of cuDNN, and its tensors: x, weight, y, and of an FP8 output the two scales."""
    import cudnn

    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )
    c, h, w = sum(case.channels), case.height, case.width
    oh, ow = ((size + 2 * case.padding - (case.taps - 1) * case.dilation - 1) // case.stride + 1 for size in (h, w))

    def tensor(name: str, n: int, channels: int, height: int, width: int) -> Any:
        strides = [channels * height * width, 1, channels * width, channels]
        return graph.tensor(name=name, dim=[n, channels, height, width], stride=strides, data_type=types.FP8_E4M3)

    x = tensor("x", case.batch, c, h, w)
    weight = tensor("weight", case.outputs, c, case.taps, case.taps)
    places = {"padding": case.padding, "stride": case.stride, "dilation": case.dilation}
    pairs = {name: [value, value] for name, value in places.items()}
    y = graph.conv_fprop(image=x, weight=weight, compute_data_type=getattr(types, compute), **pairs)
    scales: tuple[Any, ...] = ()
    if output == "FP8_E4M3":
        names = ("descale", "scale")
        scales = tuple(graph.tensor(name=each, dim=[1] * 4, stride=[1] * 4, data_type=types.FLOAT) for each in names)
        for each in scales:
            y = graph.mul(a=y, b=each)
    y.set_output(True).set_data_type(getattr(types, output))
    k = case.outputs
    y.set_dim([case.batch, k, oh, ow]).set_stride([k * oh * ow, 1, k * ow, k])
    return graph, (x, weight, y, *scales)


def copied(x: Any) -> Any:
    """A deep copy of operands."""
    if isinstance(x, tuple):
        return tuple(copied(each) for each in x)
    if isinstance(x, torch.Tensor):
        return x.clone(memory_format=torch.preserve_format)
    parts = {name: copied(value) for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    return replace(x, **parts)


def bytes_of(x: Any) -> int:
    """Of all tensors of operands or of a result."""
    if isinstance(x, torch.Tensor):
        return x.nbytes
    parts = x if isinstance(x, tuple) else vars(x).values() if hasattr(x, "__dict__") else ()
    return sum(bytes_of(each) for each in parts)


def timed(function: Any, operands: tuple[Any, Any], l2: int) -> dict[str, Any]:
    """Cold and warm microseconds of a call, and the calls of a cold graph."""
    result = function(*operands)
    on_gpu = l2 > 0
    if not on_gpu:
        start = time.perf_counter()
        function(*operands)
        return {"cold_us": 1e6 * (time.perf_counter() - start), "calls": 1}
    size = bytes_of(operands) + bytes_of(result)
    calls = max(2, min(MAX_CALLS, math.ceil(CACHES * l2 / size) + 1))
    del result
    several = [operands, *(copied(operands) for _ in range(calls - 1))]

    def cold() -> list[Any]:
        return [function(*each) for each in several]  # results stay alive: each has memory of its own

    def warm() -> None:
        for _ in range(WARM_CALLS):
            function(*operands)

    found = {"cold_us": 1e3 * median_ms(captured(cold, 1), REPEATS, 1) / calls, "calls": calls, "bytes": size}
    several.clear()
    found["warm_us"] = 1e3 * median_ms(captured(warm, 1), REPEATS, 1) / WARM_CALLS
    return found


def measure(case: Case, column: str, device: torch.device, l2: int) -> dict[str, Any] | None:
    """One column of a row."""
    try:
        found = Operands(case, device).of(column)
        if found is None:
            return None
        function, operands = found
        if isinstance(function, CudnnFp8):
            return min(
                (timed(each, operands, l2) | each.about for each in function.each()), key=lambda row: row["cold_us"]
            )
        row = timed(function, operands, l2)
        if column == "ours" and l2:
            row["kernels"] = [name for name, _ in kernels_of(lambda: function(*operands))]
        return row
    except Exception as error:  # the table says who refuses what
        return {"refused": f"{type(error).__name__}: {error}"[:400]}


def prepare(case: Case) -> str:
    """In a process of its own: one launch of each kernel of this package, so that its variant is compiled."""
    operands = Operands(case, torch.device("cuda"))
    for column in ("ours", "implicit"):
        found = operands.of(column)
        if found is not None:
            try:
                found[0](*found[1])
                torch.cuda.synchronize()
            except Exception as error:
                return f"{case.name}: {type(error).__name__}: {error}"[:300]
    return ""


def run(todo: list[Case], path: Path | None, device: torch.device, seconds: float, processes: int) -> dict[str, Any]:
    """Compile, time, and write as rows come."""
    began = time.monotonic()
    known: dict[str, Any] = {}
    if path is not None and path.exists():
        known = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
    rows = [known.get(case.name) or {"case": case.name, **asdict(case)} for case in todo]
    about = machine() if device.type == "cuda" else {"torch": torch.__version__}
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    document = {
        "command": "python benchmarks/layer_times.py",
        "machine": about | {"l2_bytes": l2, "clocks": []},
        "rows": rows,
    }
    if processes:
        compiled = compile_all(todo, processes, seconds / 2)
        print(f"compiled in {time.monotonic() - began:.0f} s{compiled}", flush=True)
    sampled = -math.inf
    for columns in (FIRST, SECOND):
        for case, row in zip(todo, rows, strict=True):
            for column in columns:
                if time.monotonic() - began > seconds:
                    document["left_out"] = "time was up"
                    write(document, path)
                    return document
                if "cold_us" not in row.get(column, {}):
                    found = measure(case, column, device, l2)
                    row |= {} if found is None else {column: found}
            told = {name: row[name].get("cold_us", "refused") for name in columns if name in row}
            if l2 and time.monotonic() > sampled + EVERY:
                sampled = time.monotonic()
                document["machine"]["clocks"].append(clocks())
            if told:
                print(f"{time.monotonic() - began:5.0f} s  {case.name}: {told}", flush=True)
                write(document, path)
            if l2:
                torch.cuda.empty_cache()
    return document


def clocks() -> str:
    """Of multiprocessors and memory now, and power, as nvidia-smi says."""
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.draw"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()[:200]


def compile_all(todo: list[Case], processes: int, seconds: float) -> str:
    """What failed, or was not ready after so many seconds and is compiled at first use; the largest layers last."""
    end, found = time.monotonic() + seconds, list[str]()
    order = sorted(todo, key=lambda case: case.batch * case.height * case.width)
    with get_context("spawn").Pool(processes) as pool:  # whose processes end with it
        done = pool.imap_unordered(prepare, order)
        try:
            found = [done.next(max(0.0, end - time.monotonic())) for _ in order]
        except TimeoutError:
            found = ["not all were ready in time"]
    return "".join(f"\n  {problem}" for problem in found if problem)


def write(document: dict[str, Any], path: Path | None) -> None:
    """Whole or not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=235)
    parser.add_argument("--processes", type=int, default=14, help="that compile; 0: compile at first use")
    parser.add_argument("--list", action="store_true", help="print the shapes and end")
    options = parser.parse_args()
    todo = cases()
    if options.list:
        print("\n".join(case.name for case in todo), f"\n{len(todo)} layers")
        return
    torch.backends.cudnn.benchmark = True
    with torch.inference_mode():
        run(todo, options.json, torch.device("cuda"), options.seconds, options.processes)


if __name__ == "__main__":
    main()
