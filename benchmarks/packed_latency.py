"""Latency of packed networks against FP16 of torch in every form, batch by batch.

    python benchmarks/packed_latency.py --json benchmarks/results/packed_latency_h200.json

Networks of random weights, calibrated on random images: latency and memory do not depend on the values (agreement of
trained models: `packed_unet.py`). A case is MODEL:BATCHxHEIGHTxWIDTH, MODEL being the scale of our UNet, or a network
of a library such as smp:Unet/resnet34. In one process, packed networks first, then form by form; with --gpus, each case
in a process and on a GPU of its own, as many at a time; with --jobs too, so many processes compile everything before,
untimed, since compiling takes minutes where timing takes seconds:

* `fp16, FORM`: torch's FP16 model, in all forms of `peers`, with and without a CUDA graph;
* `packed fp16`: the same FP16 weights in a packed file (`unet.fp16.fp4`): our executor and norm kernels, convolutions
  of cuDNN. What it gains over torch is the runtime's, not FP4's;
* `packed nvfp4`: the packed file, first and last layer in FP16 and the others in NVFP4, by kernels of this package;
* `packed nvfp4, compiled`: the same compiled by Inductor (`fp4deploy/packed/program.py`), where single operators of
  torch are left between its layers; of both the faster one is what `predict` and `bench` run;
* `packed nvfp4, node by node`: the same without the steps of several nodes (`fp4deploy/packed/producers.py`).

`best` is the fastest FP16 form of torch, `ratio` the packed network's time over it, in its faster form, CUDA graphs on
both sides: below 1 the packed network is faster. `--cases networks` measures networks of other libraries. On GPUs
before Blackwell FP4 is decoded to FP16, in registers or by what computes an activation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import peers
import torch
from peers import FORMS, command, forward, machine, measured
from torch import nn

from fp4deploy.errors import Fp4DeployError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.packed import packed_file, read_packed, write_packed
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.packed.program import compile_program
from fp4deploy.qat import calibrate, prepare, round_to_deployed

RECIPE, CLASSES = "nvfp4_qat", tuple(f"class {i}" for i in range(12))
NODES, COMPILED = "packed nvfp4, node by node", "packed nvfp4, compiled"
PACKED = ("packed nvfp4", COMPILED, "packed fp16", NODES)
CASES = (
    *("1.0:16x352x480", "1.0:1x1024x2048", "1.0:4x512x512"),
    *("1.0:1x352x480", "0.25:16x352x480", "0.25:1x352x480"),
)
NETWORKS = (
    *("smp:Segformer/mit_b0:1x512x512", "smp:Segformer/mit_b0:8x512x512", "timm:convnext_tiny:1x512x512"),
    *("timm:convnext_tiny:8x512x512", "smp:FPN/resnet50:1x512x1024", "smp:FPN/resnet50:8x512x512"),
    *("torchvision:fcn_resnet50:1x352x480", "torchvision:fcn_resnet50:8x352x480", "smp:MAnet/resnet34:4x512x512"),
    *("torchvision:deeplabv3_resnet50:1x352x480", "torchvision:deeplabv3_resnet50:16x352x480"),
    *("smp:UnetPlusPlus/resnet34:1x512x512", "smp:Unet/resnet34:1x352x480", "smp:Unet/resnet34:16x352x480"),
    *("monai:BasicUNet:1x352x480", "monai:BasicUNet:16x352x480", "smp:UPerNet/resnet34:1x512x512"),
    *(
        "timm:swin_tiny_patch4_window7_224:1x224x224",
        "timm:vit_small_patch16_224:8x224x224",
        "smp:PSPNet/resnet34:1x480x480",
    ),
    *("smp:Unet/efficientnet-b0:1x512x512", "smp:DeepLabV3Plus/mobilenet_v2:1x512x512", "timm:hrnet_w18:1x512x512"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:NxHxW")
    parser.add_argument("--packed", nargs="*", default=list(PACKED), choices=PACKED, help="packed networks, in order")
    parser.add_argument("--forms", nargs="*", default=list(reversed(FORMS)), choices=FORMS, help="of torch, in order")
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after so many")
    parser.add_argument("--gpus", nargs="*", default=[], metavar="GPU", help="numbers of the GPUs to use")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="with --gpus: compile in N processes before")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.cases == ["networks"]:
        arguments.cases = list(NETWORKS)
    rows: dict[str, dict[str, Any]] = {case: {"case": case, "runs": {}} for case in arguments.cases}
    found: dict[str, Any] = {"command": command("--seconds"), "machine": machine(), "recipe": RECIPE}
    (on_gpus if arguments.gpus else here)(arguments, rows, partial(keep, arguments.json, found, rows))
    for case, row in rows.items():
        ratios = {precision: row.get(f"ratio_{precision}") for precision in ("nvfp4", "fp16")}
        print(f"{case:18s} best of torch: {row.get('best')}   packed / best: {ratios}")


def keep(path: Path | None, found: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Write what has been measured so far: a run that is cut off keeps it."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**found, "cases": list(rows.values())}, indent=1) + "\n")


def here(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]], kept: Callable[[], None]) -> None:
    """Measure every case in this process."""
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    for name in (*arguments.packed, *(f"fp16, {form}" for form in arguments.forms)):
        for case, row in rows.items():
            if name in (NODES, COMPILED) and case[0].isdecimal():
                continue  # our UNet has no such steps, and nothing is left to a compiler
            if time.perf_counter() - began > arguments.seconds:
                continue
            row["runs"][name] = measure(case, name)
            compare(row)
            kept()


def on_gpus(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]], kept: Callable[[], None]) -> None:
    """Measure each case in a process of its own, on the first GPU that is free; the compilers' caches are shared."""
    packed, forms = arguments.packed, arguments.forms
    whole = ["--seconds", str(arguments.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.jobs:
            gpus = [arguments.gpus[number % len(arguments.gpus)] for number in range(arguments.jobs)]
            one = [["--packed", name, "--forms"] for name in packed] + [["--packed", "--forms", form] for form in forms]
            for _ in each_alone([["--cases", case, *names] for case in rows for names in one], gpus, folder):
                pass
        jobs = [["--cases", case, "--packed", *packed, "--forms", *forms, *whole] for case in rows]
        for row in each_alone(jobs, arguments.gpus, folder):
            rows[row["case"]] = row
            kept()


def each_alone(jobs: Sequence[Sequence[str]], gpus: Sequence[str], folder: str) -> Iterator[dict[str, Any]]:
    """Run this program with the options of each job, one at a time for each of `gpus`; their rows as they come."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    threads = str(max((os.cpu_count() or 1) // len(gpus), 1))

    def run(options: Sequence[str]) -> dict[str, Any]:
        gpu = free.get()
        try:
            with tempfile.TemporaryDirectory() as own:
                path = Path(own, "case.json")
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "TMPDIR": folder}
                environment |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
                subprocess.run([sys.executable, __file__, *options, "--json", str(path)], env=environment, check=True)
                row: dict[str, Any] = json.loads(path.read_text())["cases"][0]
                return row
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        for done in as_completed([pool.submit(run, job) for job in jobs]):
            yield done.result()


@lru_cache
def model(name: str, precision: str, size: tuple[int, int]) -> nn.Module:
    """A network of random weights as it is deployed for images of this size, on the CPU."""
    made = peers.network(name, len(CLASSES)).eval()
    if precision == "nvfp4":
        prepare(made, RECIPE)
        calibrate(made.cuda(), [torch.randn(1, 3, *size, device="cuda")])
    round_to_deployed(made.cpu())
    return made.eval()


@lru_cache
def network(name: str, precision: str, size: tuple[int, int]) -> PackedNetwork:
    """Its packed network on the GPU."""
    folder = Path(tempfile.gettempdir(), "fp4deploy_packed_latency")
    path = folder / f"{name.replace(':', '-').replace('/', '-')}-{precision}-{size[0]}x{size[1]}.fp4"
    if path.is_file():  # of an earlier run
        return PackedNetwork(read_packed(path), "cuda")
    folder.mkdir(exist_ok=True)
    parts = pack_model(model(name, precision, size), torch.zeros(1, 3, *size), dynamic_size=False)
    file = packed_file(path, None, *parts)
    write_packed(file)
    return PackedNetwork(file, "cuda")


def node_by_node(whole: PackedNetwork) -> PackedNetwork:
    """The same network, running the nodes of its graph."""
    made = PackedNetwork(whole.file, "cuda")
    made.schedule(made.graph.inputs, list(made.graph.nodes))
    return made


@torch.inference_mode()
def measure(case: str, name: str) -> dict[str, Any]:
    """One run of one case."""
    spec, _, size = case.rpartition(":")
    batch, height, width = (int(part) for part in size.split("x"))
    x = torch.randn(batch, 3, height, width, device="cuda", dtype=torch.float16)
    began = time.perf_counter()
    if name.startswith("packed "):
        try:
            made = network(spec, name.removeprefix("packed ").partition(",")[0], (height, width))
            run: Callable[..., Any] = node_by_node(made) if name == NODES else made
            found = measured(partial(compile_program(made.file, [x]) if name == COMPILED else run, x))
        except Fp4DeployError as error:
            found = {"error": str(error)}
    else:
        found = measured(forward(model(spec, "fp16", (height, width)), name.removeprefix("fp16, "), x))
    took = time.perf_counter() - began
    told = found.get("error") or "launched {launched_ms:8.3f} ms  graph {graph_ms:8.3f} ms".format(**found)
    print(f"{case:18s} {name:28s} {told}   ({took:.1f} s)", flush=True)
    return found


def compare(row: dict[str, Any]) -> None:
    """The fastest form of torch in a CUDA graph, and the packed networks' times over its."""
    times = {name: run["graph_ms"] for name, run in row["runs"].items() if "graph_ms" in run}
    forms = {name: ms for name, ms in times.items() if name.startswith("fp16, ")}
    if not forms:
        return
    row["best"] = min(forms, key=forms.__getitem__)
    for precision in ("fp16", "nvfp4"):
        packed = [times[name] for name in (f"packed {precision}", f"packed {precision}, compiled") if name in times]
        if packed:
            row[f"ratio_{precision}"] = min(packed) / forms[row["best"]]


if __name__ == "__main__":
    main()
