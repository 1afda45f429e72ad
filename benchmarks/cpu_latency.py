"""Latency of every artefact that a CPU runs, beside torch's own FP32 model.

    python benchmarks/cpu_latency.py --compile --json benchmarks/results/cpu_latency_cpu.json

Networks of random weights, calibrated on random images, one after another in one process. A case is MODEL:HEIGHTxWIDTH,
MODEL being the scale of our UNet, or a network of a library such as smp:Unet/resnet34. Each is timed at batch 1 and 4,
on one thread and on two:

* `torch eager`: the FP16-deployed weights in FP32, NCHW, which every ratio is taken to; `torch eager, channels_last`;
  `torch.compile`, with `--compile`;
* `onnx fp16`, `packed fp16`: the exported file of the unquantised network, run in FP32;
* `portable onnx`: the NVFP4 network decomposed; a canonical file, whose FP4 ONNX Runtime does not run, is lowered to
  the same graph when it is opened (`canonical onnx`, with `--canonical`);
* `packed nvfp4`: the `.fp4` file.

The C library has no CPU path.

Runs are interleaved: turn by turn each form runs a few times, the first of a turn not counted, because the caches are
another form's. Threads of ONNX Runtime do not spin, which would take the cores from torch's. torch.compile comes last,
with turns of torch eager: it brings an OpenMP runtime of its own. `ratio` is the median over the turns of the quotient
of that turn's medians, `low` and `high` are its quartiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from torch import nn

from fp4deploy.bench.environment import environment
from fp4deploy.export.onnx.canonical import read_onnx
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.to_onnx import export_onnx
from fp4deploy.export.to_packed import pack_model
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from fp4deploy.system.onnx_runtime import ort

RECIPE, CLASSES = "nvfp4_qat", 12
EAGER, COMPILED = "torch eager", "torch.compile"
CASES = ("0.25:96x96", "0.25:352x480", "1.0:96x96", "smp:Unet/resnet34:128x128")
Run = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:HxW")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one form in one turn, at least two runs")
    parser.add_argument("--forms", nargs="+", help="only these, and torch eager")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--canonical", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": "python benchmarks/cpu_latency.py",
        "date": date.today().isoformat(),
        "recipe": RECIPE,
    }
    found["command"] += "".join(f" --{name}" for name in ("compile", "canonical") if getattr(options, name))
    machine = {key: value for key, value in environment().items() if key not in ("platform", "threads", "gpus")}
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            for row in measured(case, Path(folder), options):
                rows.append(row)
                print_row(row)
        if options.json:  # after each: a run that is cut off keeps what it has
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({**found, "machine": machine, "rows": rows}, indent=1) + "\n")


def network(name: str, precision: str) -> nn.Module:
    """A network of random weights as it is deployed."""
    made = peers.network(name, CLASSES).eval()
    if precision == "nvfp4":
        prepare(made, RECIPE)
        calibrate(made, [torch.randn(2, 3, 96, 96)])
    round_to_deployed(made)
    return made.eval()


def measured(case: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of a case."""
    name, _, size = case.rpartition(":")
    height, width = (int(part) for part in size.split("x"))
    example = torch.zeros(1, 3, height, width)
    models = {precision: network(name, precision) for precision in ("fp16", "nvfp4")}
    for precision, model in models.items():
        export_onnx(model, example, folder / f"{precision}.onnx", verify=False, portable=True)
    packed = {
        precision: PackedNetwork(packed_file(folder / f"{precision}.fp4", None, *pack_model(model, example, False)))
        for precision, model in models.items()
    }
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        sessions = {"onnx fp16": session(folder / "fp16.portable.onnx", threads)}
        sessions["portable onnx"] = session(folder / "nvfp4.portable.onnx", threads)
        if options.canonical:
            sessions["canonical onnx"] = session(folder / "nvfp4.onnx", threads)
        for batch in options.batches:
            runs = forms(models["fp16"], packed, sessions, torch.randn(batch, 3, height, width))
            if options.forms:
                runs = {each: run for each, run in runs.items() if each in (EAGER, *options.forms)}
            about = {"case": case, "batch": batch, "threads": threads}
            times = interleaved(runs, options.turns, options.seconds)
            rows += [about | {"form": form, **summary(own, times[EAGER])} for form, own in times.items()]
            if options.compile:
                times = interleaved(compiled(models["fp16"], runs[EAGER], batch, size), options.turns, options.seconds)
                rows.append(about | {"form": COMPILED, **summary(times[COMPILED], times[EAGER])})
    return rows


def compiled(model: nn.Module, eager: Run, batch: int, size: str) -> dict[str, Run]:
    """torch.compile beside torch eager."""
    height, width = (int(part) for part in size.split("x"))
    torch.compiler.reset()  # after eight compilations of one `forward` torch runs it eager
    x, made = torch.randn(batch, 3, height, width), torch.compile(model, dynamic=False)
    return {EAGER: eager, COMPILED: lambda: made(x)}


def session(path: Path, threads: int) -> ort.InferenceSession:
    """ONNX Runtime on so many threads; a canonical file is lowered first."""
    model = read_onnx(path)
    if not path.name.endswith(".portable.onnx"):
        model = to_portable(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def forms(
    model: nn.Module,
    packed: dict[str, PackedNetwork],
    sessions: dict[str, ort.InferenceSession],
    x: torch.Tensor,
) -> dict[str, Run]:
    """What is timed, by name, on images `x`."""
    layout: Any = torch.channels_last
    like: Any = copy.deepcopy(model)
    wide, last = like.to(memory_format=layout), x.contiguous(memory_format=layout)
    runs: dict[str, Run] = {EAGER: partial(model, x), f"{EAGER}, channels_last": partial(wide, last)}
    runs |= {f"packed {precision}": partial(each, x) for precision, each in packed.items()}
    return runs | {
        form: partial(each.run, None, {each.get_inputs()[0].name: x.numpy()}) for form, each in sessions.items()
    }


@torch.inference_mode()
def interleaved(runs: dict[str, Run], turns: int, seconds: float) -> dict[str, list[float]]:
    """The median milliseconds of each form in each turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(turns):
        for name, run in runs.items():
            run()
            taken: list[float] = []
            stop = time.perf_counter() + seconds
            while len(taken) < 2 or time.perf_counter() < stop:
                start = time.perf_counter()
                run()
                taken.append(1e3 * (time.perf_counter() - start))
            times[name].append(statistics.median(taken))
    return times


def summary(medians: list[float], peer: list[float]) -> dict[str, float]:
    """Median of the turns, and the ratio to the peer turn by turn."""
    ratios = [own / other for own, other in zip(medians, peer, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ms": statistics.median(medians), "ratio": middle, "low": low, "high": high}


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    where = f"{row['case']:40s} batch {row['batch']} threads {row['threads']}  {row['form']:28s}"
    print(f"{where} {row['ms']:9.2f} ms  {row['ratio']:6.2f} [{row['low']:.2f}, {row['high']:.2f}]", flush=True)


if __name__ == "__main__":
    main()
