"""Every kernel in the PTX emulator: bytes against the reference, and against those of the GPU at hand.

    python benchmarks/emulated.py --arch sm120 --arch sm100 --brief sm103 --json benchmarks/results/emulated_cpu.json
    python benchmarks/emulated.py --arch sm90 --gpu --json benchmarks/results/emulated_h200.json

Without a GPU: a line for each case, as `fp4deploy kernels --emulate` prints them, with seeds and times (CPU time of the
emulating process, in which Triton compiles where the cache has nothing; nvcc and ptxas are processes of their own).
--brief: an architecture of which only the first case of each family runs, with the first seed. docs/emulator.md shows
the families.

With --gpu each launch also runs on the GPU, which must be of that architecture: the same PTX, the same bytes in every
tensor before. Every byte of every tensor is compared after. The cases have exact sums, so that every accumulator gives
the same. So the GEMM families are repeated with values whose large products cancel each other: what is left depends on
how the tensor core aligns, cuts off and rounds. These are emulated twice, with the model of the hardware's accumulator
and with one that sums exactly; the bytes that differ with the latter show that the comparison has power.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import time
from pathlib import Path
from typing import Any

import torch
from peers import origin

from fp4deploy.architecture import Architecture
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy_emulator.cases import cases
from fp4deploy_emulator.cases.case import Setting

GEMMS = ("linear", "conv", "several taps", "two sources", "transposed", "packed output", "volumes", "W4A16", "GEMV")
GEMMS += ("decoded weights", "split-K", "dgrad", "wgrad", "grouped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases or families (default: all)")
    parser.add_argument("--without", action="append", default=[], help="a case to leave out; repeatable")
    parser.add_argument("--arch", action="append", required=True)
    parser.add_argument("--brief", action="append", default=[], help="an architecture; repeatable")
    parser.add_argument("--seed", type=int, action="append", help="repeatable (default: 0)")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="to the cases that the file has, in the place of older ones")
    arguments = parser.parse_args()
    seeds, work = arguments.seed or [0], []
    for seed in seeds:
        for arch in arguments.arch:
            common = {"arch": Architecture.parse(arch).triton_name, "seed": seed}
            settings = [Setting(**common, gpu=0 if arguments.gpu else None)]
            if arguments.gpu:
                settings += [Setting(**common, gpu=0, inexact=True, model=model) for model in ("hardware", "exact")]
            for setting in settings:
                work += [
                    (case.name, setting)
                    for case in cases(arguments.names, setting.capability)
                    if case.family in GEMMS or not setting.inexact
                ]
    for arch in arguments.brief:
        setting = Setting(arch=Architecture.parse(arch).triton_name, seed=seeds[0])
        families: dict[str, str] = {}
        for case in cases(arguments.names, setting.capability):
            families.setdefault(case.family, case.name)
        work += [(name, setting) for name in families.values()]
    work = [item for item in work if item[0] not in arguments.without]
    start, older = time.perf_counter(), older_run(arguments)
    rows: list[dict[str, Any]] = []
    # A child for each few cases: a launch that fails on the GPU leaves its process without a usable context.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=8) as pool:
        for row in pool.imap(one, work):
            print(json.dumps(row), flush=True)
            rows.append(row)
            save(arguments, rows, start, older)


def older_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the file has, with --add."""
    if not arguments.add:
        return {"command": "", "seconds": 0, "cases": []}
    content: dict[str, Any] = json.loads(arguments.json.read_text())
    return content


def one(item: tuple[str, Setting]) -> dict[str, Any]:
    """A case, with what it showed."""
    torch.set_num_threads(1)
    name, setting = item
    (case,) = cases([name], setting.capability)[:1]
    try:
        outcome = case.outcome(setting)
    except Exception as error:
        return row_of(item, {"error": f"{type(error).__name__}: {error}"[:600]})
    statistics = outcome.statistics
    found: dict[str, Any] = {"family": case.family, "entries": sorted(statistics.entries), "launches": outcome.kernels}
    found |= {"instructions": statistics.instructions, "lines": statistics.lines}
    if setting.inexact:
        found |= {"values": "inexact", "model": setting.model}
    else:
        found |= {"compared": outcome.values, "different": outcome.wrong}
    if setting.gpu is not None:
        found |= {"device_bytes": statistics.device_bytes, "device_different": statistics.device_wrong}
    found |= {
        "unavailable": outcome.unavailable,
        "hazard": outcome.fault,
        "remarks": sorted(statistics.remarks),
        "seconds": round(outcome.seconds, 2),
    }
    return row_of(item, found)


def row_of(item: tuple[str, Setting], found: dict[str, Any]) -> dict[str, Any]:
    """The case, the architecture, the seed, and what was found."""
    name, setting = item
    return {"kernel": name, "for": setting.arch, "seed": setting.seed} | found | {"commit": origin()["commit"]}


def save(arguments: argparse.Namespace, rows: list[dict[str, Any]], start: float, older: dict[str, Any]) -> None:
    """Write what is there by now, after the cases of an older run that did not run again."""
    if not arguments.json:
        return
    machine: dict[str, Any] = {**origin(), "torch": torch.__version__, "triton": triton_version()}
    machine |= {"cores": len(os.sched_getaffinity(0)), "processes": arguments.jobs, "python": platform.python_version()}
    if arguments.gpu:
        machine["device"] = torch.cuda.get_device_name()
    command = " ".join(
        ["python benchmarks/emulated.py", *map(shlex.quote, arguments.names), *(f"--arch {a}" for a in arguments.arch)]
        + [f"--brief {arch}" for arch in arguments.brief]
        + [f"--without {shlex.quote(name)}" for name in arguments.without]
        + [f"--seed {seed}" for seed in arguments.seed or [0]]
        + ["--gpu"] * arguments.gpu
        + [f"--jobs {arguments.jobs}"]
    )
    ran = {tuple(row[key] for key in ("kernel", "for", "seed")) for row in rows}
    kept = [row for row in older["cases"] if tuple(row[key] for key in ("kernel", "for", "seed")) not in ran]
    content = {"command": " && ".join(filter(None, (older["command"], command))), "machine": machine}
    content |= {"seconds": round(older["seconds"] + time.perf_counter() - start, 1), "cases": kept + rows}
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
