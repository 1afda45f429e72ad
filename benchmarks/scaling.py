"""Training on several GPUs: the same loss as on one, and how much faster.

    python benchmarks/scaling.py --data CAMVID --gpus 1,4 --json benchmarks/results/scaling_h200.json

Every case is `fp4deploy train` under torchrun, in FP16 or in NVFP4 from scratch, with epochs that have each training
image --repeat times (`data.repeat`), because an epoch of few steps would mostly measure its start. Two kinds of case:

* `same batch`: 16 images a step in all, 16 / n a GPU. Order, augmentation and initial weights are those of one GPU,
  so that losses differ by rounding alone. With --again the one-GPU case runs twice: how far two such runs are apart, on
  a GPU whose sums have no fixed order, is what the distance of the others is to be compared with.
* `same share`: 16 images a GPU; each image is there n times --share-repeat times, so that the epoch is as long. Where
  that is more than --repeat, one GPU runs it too. Scaling efficiency is images a second over n times those of one GPU.

Each is replayed as one CUDA graph (`train.cuda_graph`), and launched kernel by kernel as well for several GPUs and the
kinds of --launched. A row says whether its training was `captured`.

Images a second are those of the last epoch, from metrics.jsonl; they include waiting for data. Take the repetitions so
large that an epoch takes 20 s or more: its beginning takes a second. With --beside, cases run at the same time where
there are GPUs for them; each then has a share of the CPU's cores. With --resume, cases that the file has are not run
again: `--gpus 1` and then `--gpus 1,4` give what the second alone gives.

Communication is measured alone: the all-reduce of the gradients, FP32 in buckets of 25 MB as DistributedDataParallel
has them, with nothing else on the GPUs. Its share of a step is what it would cost if nothing of it overlapped with the
backward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fp4deploy.models import build_unet

MODELS = ("fp16", "nvfp4")
BATCH = 16
BUCKET = 25 << 20  # bytes
PROGRAM = "fp4deploy.cli" if importlib.util.find_spec("fp4deploy.cli") else "cli"  # not installed, from a checkout


@dataclass(frozen=True)
class Case:
    """One training; batch: images of a GPU; graph: asks for a CUDA graph of the step."""

    gpus: int
    batch: int
    kind: str
    model: str
    graph: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder in the masks layout, such as CamVid's")
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "camvid.yaml")
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--share-repeat", type=int, help="of the same share of images a GPU, times the GPUs; --repeat")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="further settings, KEY=VALUE")
    parser.add_argument("--launched", default="same batch,same share", help="kinds that are trained without graph, too")
    parser.add_argument("--again", action="store_true", help="one GPU twice")
    parser.add_argument("--beside", action="store_true", help="several cases at a time")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--all-reduce", type=float, metavar="SCALE", help=argparse.SUPPRESS)  # a worker's
    arguments = parser.parse_args()
    if arguments.all_reduce:
        time_all_reduce(arguments.all_reduce)
        return
    scale = next((float(each.split("=")[1]) for each in arguments.sets if each.startswith("model.scale=")), 1.0)
    counts = sorted({int(count) for count in arguments.gpus.split(",")} | {1})
    repeats = {count: count * (arguments.share_repeat or arguments.repeat) for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        kinds = [(1, BATCH, "same batch")]
        kinds += [(1, BATCH, "same batch, again")] if arguments.again else []
        kinds += [(1, BATCH, "same share")] if repeats[1] > arguments.repeat else []
        for n in counts[1:]:
            kinds += [(n, BATCH // n, "same batch"), (n, BATCH, "same share")]
        cases = [Case(*kind, model) for kind in kinds for model in MODELS]
        launched = arguments.launched.split(",")
        cases += [dataclasses.replace(each, graph=False) for each in cases if each.gpus > 1 and each.kind in launched]
        report = described(arguments, scale)
        if arguments.resume and arguments.json.exists():
            resume(report, json.loads(arguments.json.read_text()))
        rows: list[dict[str, Any]] = report["rows"]
        cases = [case for case in cases if not any(row.items() >= dataclasses.asdict(case).items() for row in rows)]
        for wave in waves(cases, max(counts[-1], torch.cuda.device_count()) if arguments.beside else 1):
            settings = [f"train.epochs={arguments.epochs}", *arguments.sets]
            with ThreadPoolExecutor() as pool:
                trained: list[Future[dict[str, Any]]] = []
                for first, case in wave:
                    repeat = repeats[case.gpus] if case.kind == "same share" else arguments.repeat
                    out = Path(folder) / f"run{len(rows) + len(trained)}"
                    own = [f"data.repeat={repeat}", *settings]
                    trained.append(pool.submit(train, arguments.config, arguments.data, out, first, case, own))
            for (_, case), training in zip(wave, trained, strict=True):
                rows.append({**dataclasses.asdict(case), **training.result()})
                if case.gpus > 1 and str(case.gpus) not in report["all_reduce_ms"]:
                    report["all_reduce_ms"][str(case.gpus)] = communication(case.gpus, scale)
            compare(rows, report["all_reduce_ms"])
            if arguments.json:  # after each wave: what is interrupted keeps what was measured
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    table(rows)


def described(arguments: argparse.Namespace, scale: float) -> dict[str, Any]:
    """The result, without what is measured."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": " ".join(["python benchmarks/scaling.py", *_options(arguments)]),
        "config": arguments.config.name,
        "repeat": arguments.repeat,
        "scale": scale,
        "beside": arguments.beside,
        "machine": {"gpu": gpu, "torch": torch.__version__, "cpu_cores": os.cpu_count()},
        "all_reduce_ms": {},
        "rows": [],
    }


def resume(report: dict[str, Any], older: dict[str, Any]) -> None:
    """Take over what an older run measured with the same options but for the number of GPUs, and its all-reduce.

    The repetitions of a case that the older run has not measured may differ, too."""
    shared = any(row["kind"] == "same share" for row in older["rows"])
    free = r"--gpus \S+" if shared else r"--(gpus|share-repeat) \S+"
    fixed = [re.sub(free, "", each["command"]) + str(each["machine"]) for each in (report, older)]
    if fixed[0] != fixed[1]:
        sys.exit(f"--resume: the file was made by {older['command']!r} on {older['machine']}")
    report["rows"], report["all_reduce_ms"] = older["rows"], older["all_reduce_ms"]


def _options(arguments: argparse.Namespace) -> list[str]:
    """What decides the numbers, as it is written on a command line."""
    named = ("gpus", "epochs", "repeat", "share_repeat")
    given = {name.replace("_", "-"): getattr(arguments, name) for name in named}
    given["launched"] = f"'{arguments.launched}'"
    found = ["--data CAMVID", *(f"--{name} {value}" for name, value in given.items() if value)]
    found += [f"--{name}" for name in ("again", "beside") if getattr(arguments, name)]
    return [*found, *(f"--set {each}" for each in arguments.sets)]


def communication(gpus: int, scale: float) -> float:
    """Milliseconds of one all-reduce of all gradients over the first `gpus` GPUs."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    done = subprocess.run(
        [*launch, __file__, "--data", ".", "--all-reduce", str(scale)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"the all-reduce failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["all_reduce_ms"])


def time_all_reduce(scale: float, repeats: int = 30, warm: int = 5) -> None:
    """The worker of `communication`: prints the median of the slowest process."""
    from torch import distributed

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    total = sum(each.numel() for each in build_unet(12, scale).parameters())
    buckets = torch.zeros(total, device="cuda").split(BUCKET // 4)
    times = []
    for _ in range(warm + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        distributed.barrier()
        begin.record()
        for bucket in buckets:
            distributed.all_reduce(bucket)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    slowest = torch.tensor(times[warm:], device="cuda")
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"all_reduce_ms": float(slowest.median()), "bytes": 4 * total}), flush=True)
    distributed.destroy_process_group()


def waves(cases: list[Case], room: int) -> list[list[tuple[int, Case]]]:
    """The cases that run at the same time on `room` GPUs, one at least, each with the number of its first GPU."""
    found: list[list[tuple[int, Case]]] = []
    for case in cases:
        taken = sum(each.gpus for _, each in found[-1]) if found else room
        if taken + case.gpus > room:
            found.append([])
            taken = 0
        found[-1].append((taken, case))
    return found


def train(config: Path, data: Path, out: Path, first: int, case: Case, settings: list[str]) -> dict[str, Any]:
    """Train one model on GPUs from the `first` on: the losses by epoch, and the last epoch's mIoU, images a second and
    length."""
    settings = [f"train.batch_size={case.batch}", "train.evaluate_every=1000", "telemetry.every=0", *settings]
    settings += ["train.from_scratch=true", "telemetry.plots=false", f"train.cuda_graph={str(case.graph).lower()}"]
    tree = yaml.safe_load(config.read_text())
    tree["train"]["ema"] = 0  # an average over a few hundred steps says little
    own = out.with_suffix(".yaml")
    own.write_text(yaml.safe_dump(tree))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    command = ["-m", PROGRAM, "train", "--config", own, "--data", data, "--models", case.model]
    sets = [part for setting in settings for part in ("--set", setting)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64)))).split(",")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + case.gpus])}
    begun = time.perf_counter()
    whole = [*launch, *map(str, command), *sets, "--out", str(out)]
    done = subprocess.run(whole, capture_output=True, text=True, env=environment)
    print(f"{case.model}, {case.gpus} GPUs, {time.perf_counter() - begun:.0f} s: {' '.join(settings)}", flush=True)
    if done.returncode:
        sys.exit(f"training failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in (out / case.model / "metrics.jsonl").read_text().splitlines()]
    last = {key: lines[-1][key] for key in ("miou", "images_per_s", "peak_memory_bytes")}
    steps = lines[-1]["step"] - lines[-2]["step"] if len(lines) > 1 else lines[-1]["step"]
    seconds = steps * case.gpus * case.batch / last["images_per_s"]
    refusals = [line for line in done.stderr.splitlines() if "no CUDA graph of the step" in line]
    print(*refusals, sep="\n", end="\n" if refusals else "", flush=True)
    captured = case.graph and not refusals and last["peak_memory_bytes"] is not None  # on a GPU
    return {"captured": captured, "losses": [line["loss"] for line in lines], **last, "epoch_s": round(seconds, 1)}


def compare(rows: list[dict[str, Any]], all_reduce_ms: dict[str, float]) -> None:
    """Add to every row the distance of its losses from one GPU's, its efficiency and communication."""
    first = {row["model"]: row for row in reversed(rows) if row["gpus"] == 1}  # the first case of each
    longest = {row["model"]: row for row in sorted(rows, key=lambda row: row["epoch_s"]) if row["gpus"] == 1}
    for row in rows:
        one = first[row["model"]]
        row["efficiency"] = row["images_per_s"] / (row["gpus"] * longest[row["model"]]["images_per_s"])
        if row["kind"] != "same share" and row is not one:
            pairs = zip(row["losses"], one["losses"], strict=True)
            row["relative_distance"] = [abs(mine - theirs) / theirs for mine, theirs in pairs]
        if str(row["gpus"]) in all_reduce_ms:
            row["step_ms"] = 1000 * row["gpus"] * row["batch"] / row["images_per_s"]
            row["all_reduce_ms"] = all_reduce_ms[str(row["gpus"])]


def table(rows: list[dict[str, Any]]) -> None:
    """Print every row."""
    for row in rows:
        share = f", all-reduce alone {100 * row['all_reduce_ms'] / row['step_ms']:.1f} %" if "step_ms" in row else ""
        distance = ", ".join(f"{100 * d:.2f} %" for d in row.get("relative_distance", ()))
        print(
            f"{row['model']:6s} {row['gpus']} GPUs x {row['batch']:2d}, {row['kind']:18s}"
            f" {'graph' if row['captured'] else 'launched':8s}"
            f" {row['images_per_s']:7.0f} images/s, efficiency {100 * row['efficiency']:5.1f} %{share},"
            f" losses {' '.join(f'{loss:.4f}' for loss in row['losses'])}, from one GPU's {distance or '-'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
