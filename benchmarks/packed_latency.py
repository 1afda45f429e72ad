"""Latency of packed networks against FP16 of torch in every form, batch by batch.

    python benchmarks/packed_latency.py --json benchmarks/results/packed_latency_h200.json

Networks of random weights, calibrated on random images: latency and memory do not depend on the values (agreement of
trained models: `packed_unet.py`). A case is MODEL:BATCHxHEIGHTxWIDTH, MODEL being the scale of our UNet, or a network
of a library such as smp:Unet/resnet34. In one process, packed networks first, then form by form. With --gpus, each case
is a process: --jobs of them compile at the same time, and then have a GPU one after another.

* `fp16, FORM`: torch's FP16 model, in all forms of `peers`, with and without a CUDA graph;
* `packed fp16`: the same FP16 weights in a packed file (`unet.fp16.fp4`): our executor and norm kernels, convolutions
  of cuDNN. What it gains over torch is the runtime's, not FP4's;
* `packed nvfp4`: the packed file, first and last layer in FP16 and the others in NVFP4, by kernels of this package;
* `packed nvfp4, compiled`: the same compiled by Inductor (`fp4deploy/packed/program.py`), where single operators of
  torch are left between its layers; of both the faster one is what `predict` and `bench` run;
* `packed nvfp4, node by node`: the same without the steps of several nodes (`fp4deploy/packed/producers.py`);
* `..., rest bf16`, with `--rest fp16 bf16`: the same network whose rest is BF16. `over_fp16` has its time over that of
  the FP16 rest, run by run, and in the faster form of each as `packed nvfp4, faster`.

`best` is the fastest FP16 form of torch, `ratio` the packed network's time over it, in its faster form, CUDA graphs on
both sides: below 1 the packed network is faster. `difference` is that of the outputs of both its forms, over the norm,
null where they are not finite. `--cases networks` measures networks of other libraries. On GPUs before Blackwell FP4
is decoded to FP16, in registers or by what computes an activation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import peers
import torch
from peers import FORMS, Run, captured, command, forward, machine, measured
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import Fp4DeployError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.packed import packed_file, read_packed, write_packed
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.packed.program import compile_program
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from fp4deploy.rest import RESTS, rest_of

RECIPE, CLASSES = "nvfp4_qat", tuple(f"class {i}" for i in range(12))
NODES, COMPILED = "packed nvfp4, node by node", "packed nvfp4, compiled"
PACKED = ("packed nvfp4", COMPILED, "packed fp16", NODES)
REST = ", rest "  # between the name of a run and its precision of the rest, where that is not FP16
CASES = (
    *("1.0:16x352x480", "1.0:1x1024x2048", "1.0:4x512x512"),
    *("1.0:1x352x480", "0.25:16x352x480", "0.25:1x352x480"),
)
NETWORKS = tuple(  # each one image at a time, and several
    f"{name}:{batch}x{size}"
    for name, size, several in (
        ("smp:Segformer/mit_b0", "512x512", 8),
        ("timm:convnext_tiny", "512x512", 8),
        ("smp:FPN/resnet50", "512x512", 8),
        ("torchvision:fcn_resnet50", "352x480", 8),
        ("smp:MAnet/resnet34", "512x512", 8),
        ("torchvision:deeplabv3_resnet50", "352x480", 16),
        ("smp:UnetPlusPlus/resnet34", "512x512", 8),
        ("smp:Unet/resnet34", "352x480", 16),
        ("monai:BasicUNet", "352x480", 16),
        ("smp:UPerNet/resnet34", "512x512", 8),
        ("timm:swin_tiny_patch4_window7_224", "224x224", 8),
        ("timm:vit_small_patch16_224", "224x224", 8),
        ("smp:PSPNet/resnet34", "480x480", 8),
        ("smp:Unet/efficientnet-b0", "512x512", 8),
        ("smp:DeepLabV3Plus/mobilenet_v2", "512x512", 8),
        ("timm:hrnet_w18", "512x512", 8),
        ("torchvision:fcos_resnet50_fpn", "512x512", 8),
        ("torchvision:retinanet_resnet50_fpn", "512x512", 8),
    )
    for batch in (1, several)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:NxHxW")
    parser.add_argument("--packed", nargs="*", default=list(PACKED), choices=PACKED, help="packed networks, in order")
    parser.add_argument("--rest", nargs="+", default=["fp16"], choices=RESTS, help="of packed networks; default: fp16")
    parser.add_argument("--forms", nargs="*", default=list(reversed(FORMS)), choices=FORMS, help="of torch, in order")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="nothing is begun after so many; with --gpus, of compiling"
    )
    parser.add_argument("--gpus", nargs="*", default=[], metavar="GPU", help="numbers of the GPUs to use")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="with --gpus: N cases at once (default: all)")
    parser.add_argument("--profiles", type=Path, help="with --gpus: folder for the kernels of every run, as JSON")
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.cases == ["networks"]:
        arguments.cases = list(NETWORKS)
    torch.backends.cudnn.benchmark = True
    if arguments.turn:
        os.environ["CUDA_VISIBLE_DEVICES"] = arguments.gpu
        in_turn(
            arguments.cases[0], names_of(arguments), Path(arguments.turn[0]), int(arguments.turn[1]), arguments.profiles
        )
        return
    rows: dict[str, dict[str, Any]] = {case: {"case": case, "runs": {}} for case in arguments.cases}
    found: dict[str, Any] = {"command": command("--seconds", "--profiles"), "machine": machine(), "recipe": RECIPE}
    (on_gpus if arguments.gpus else here)(arguments, rows, partial(keep, arguments.json, found, rows))
    for case, row in rows.items():
        ratios = {precision: row.get(f"ratio_{precision}") for precision in ("nvfp4", "fp16")}
        print(f"{case:18s} best of torch: {row.get('best')}   packed / best: {ratios}   {row.get('over_fp16') or ''}")


def keep(path: Path | None, found: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Write what has been measured so far: a run that is cut off keeps it."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**found, "cases": list(rows.values())}, indent=1) + "\n")


def names_of(arguments: argparse.Namespace) -> list[str]:
    """The runs of a case, in order."""
    packed = [name if rest == "fp16" else f"{name}{REST}{rest}" for name in arguments.packed for rest in arguments.rest]
    return [*packed, *(f"fp16, {form}" for form in arguments.forms)]


def applies(case: str, name: str) -> bool:
    """Our UNet has no single operators of torch: nothing is left to a compiler, and no step is of several nodes."""
    return not (name.partition(REST)[0] in (NODES, COMPILED) and case[0].isdecimal())


def here(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]], kept: Callable[[], None]) -> None:
    """Measure every case in this process."""
    began = time.perf_counter()
    for name in names_of(arguments):
        for case, row in rows.items():
            if not applies(case, name):
                continue
            if time.perf_counter() - began > arguments.seconds:
                continue
            row["runs"][name] = measure(case, name)
            compare(row)
            kept()


def on_gpus(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]], kept: Callable[[], None]) -> None:
    """Measure each case in a process of its own (`peers.at_once`)."""
    cases, jobs = list(rows), arguments.jobs or len(rows)
    names = ["--packed", *arguments.packed, "--forms", *arguments.forms, "--rest", *arguments.rest]
    threads = str(max((os.cpu_count() or 1) // jobs, 1))
    os.environ |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    for first in range(0, len(cases), jobs):
        some = cases[first : first + jobs]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            commands = []
            for number, case in enumerate(some):
                own = ["--gpu", arguments.gpus[number % len(arguments.gpus)], "--turn", name, str(number)]
                profiles = ["--profiles", str(arguments.profiles)] if arguments.profiles else []
                commands.append([sys.executable, __file__, "--cases", case, *names, *own, *profiles])
            late = peers.at_once(commands, folder, arguments.seconds, 60.0 * len(some))
            for number, case in enumerate(some):
                path = folder / f"{number}.json"
                if path.is_file():
                    rows[case] = json.loads(path.read_text())
                else:
                    rows[case]["error"] = "not compiled in time" if number in late else "ended without a result"
            kept()


def in_turn(case: str, names: Sequence[str], folder: Path, number: int, profiles: Path | None) -> None:
    """A case of `on_gpus`: compiled while others are, timed alone; the row is a file of `folder`."""
    row: dict[str, Any] = {"case": case, "runs": {}}
    runs: dict[str, Run] = {}
    with peers.tuning_alone(folder):
        for name in filter(partial(applies, case), names):
            began = time.perf_counter()
            row["runs"][name] = {}
            try:
                run = prepared(case, name)
                run()
                torch.cuda.synchronize()
                runs[name] = run
            except Exception as error:  # a form that torch or the machine lacks: the row says so
                row["runs"][name]["error"] = f"{type(error).__name__}: {error}"[:300]
            row["runs"][name]["first_call_s"] = time.perf_counter() - began
    with peers.turn(folder, number):
        for name, run in runs.items():
            row["runs"][name] |= {**measured(run), "first_call_s": row["runs"][name]["first_call_s"]}
        if PACKED[0] in runs and COMPILED in runs:
            y, expected = (tree_leaves(runs[name]())[0].float() for name in (COMPILED, PACKED[0]))
            difference = float((y - expected).norm() / expected.norm())
            row["difference"] = difference if math.isfinite(difference) else None
        compare(row)
        (folder / f"{number}.json").write_text(json.dumps(row))
        for name, run in runs.items() if profiles else ():
            profiles.mkdir(parents=True, exist_ok=True)
            file = profiles / f"{case}, {name}.json".replace("/", "-").replace(":", "-")
            file.write_text(json.dumps(peers.kernels_of(captured(run))))


@lru_cache
def model(name: str, precision: str, size: tuple[int, int], rest: str = "fp16") -> nn.Module:
    """A network of random weights as it is deployed for images of this size, on the CPU."""
    made = peers.network(name, len(CLASSES)).eval()
    if precision == "nvfp4":
        prepare(made, RECIPE)
        calibrate(made, [torch.randn(1, 3, *size)])
    round_to_deployed(made, rest_of(rest))
    return made.eval()


@lru_cache
def network(name: str, precision: str, size: tuple[int, int], rest: str = "fp16") -> PackedNetwork:
    """Its packed network on the GPU."""
    folder = Path(tempfile.gettempdir(), "fp4deploy_packed_latency")
    path = folder / f"{name.replace(':', '-').replace('/', '-')}-{precision}-{rest}-{size[0]}x{size[1]}.fp4"
    if path.is_file():  # of an earlier run
        return PackedNetwork(read_packed(path), "cuda")
    folder.mkdir(exist_ok=True)
    example = torch.zeros(1, 3, *size)
    parts = pack_model(model(name, precision, size, rest), example, dynamic_size=False, rest=rest_of(rest))
    file = packed_file(path, None, *parts)
    write_packed(file)
    return PackedNetwork(file, "cuda")


def node_by_node(whole: PackedNetwork) -> PackedNetwork:
    """The same network, running the nodes of its graph."""
    made = PackedNetwork(whole.file, "cuda")
    made.schedule(made.graph.inputs, list(made.graph.nodes))
    return made


def measure(case: str, name: str) -> dict[str, Any]:
    """One run of one case."""
    began = time.perf_counter()
    try:
        found = measured(prepared(case, name))
    except Fp4DeployError as error:
        found = {"error": str(error)}
    took = time.perf_counter() - began
    told = found.get("error") or "launched {launched_ms:8.3f} ms  graph {graph_ms:8.3f} ms".format(**found)
    print(f"{case:18s} {name:28s} {told}   ({took:.1f} s)", flush=True)
    return found


def prepared(case: str, name: str) -> Run:
    """The forward pass of a case in the form of this name, compiled at the latest by its first call.

    Raises:
        Fp4DeployError: it has no packed form, or that is not compiled here.
    """
    spec, _, size = case.rpartition(":")
    batch, height, width = (int(part) for part in size.split("x"))
    name, _, rest = name.partition(REST)
    torch.manual_seed(1)
    x = torch.randn(batch, 3, height, width, device="cuda", dtype=rest_of(rest or "fp16").dtype)
    if not name.startswith("packed "):
        return no_gradients(forward(model(spec, "fp16", (height, width)), name.removeprefix("fp16, "), x))
    made = network(spec, name.removeprefix("packed ").partition(",")[0], (height, width), rest or "fp16")
    run: Callable[..., Any] = node_by_node(made) if name == NODES else made
    return no_gradients(partial(compile_program(made.file, [x]) if name == COMPILED else run, x))


def no_gradients(run: Run) -> Run:
    """`run` under inference mode."""
    return torch.inference_mode()(run)  # type: ignore[no-any-return]


def compare(row: dict[str, Any]) -> None:
    """The fastest form of torch in a CUDA graph, and the packed networks' times over its; rests beside each other."""
    times = {name: run["graph_ms"] for name, run in row["runs"].items() if "graph_ms" in run}
    for rest in [""] + [f"{REST}{rest}" for rest in RESTS]:
        either = [times[name] for name in (f"{PACKED[0]}{rest}", f"{COMPILED}{rest}") if name in times]
        if either:
            times[f"{PACKED[0]}, faster{rest}"] = min(either)
    others = {name: (name.partition(REST)[0], ms) for name, ms in times.items() if REST in name}
    row["over_fp16"] = {name: ms / times[beside] for name, (beside, ms) in others.items() if beside in times}
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
