"""The commands of docs/nnunet.md on a trained folder, with the memory that each takes, and what NVFP4 changes.

    python -m benchmarks.nnunet_walk RAW TRAINED --folder walk --json benchmarks/results/nnunet_walk_cpu.json
    python docs/images/make_nnunet.py walk

RAW is a raw data set of nnU-Net, TRAINED a results folder of it. Every command of the page but those that train is run
as it stands there, each as a process, in `--folder`, on so many volumes of the test set. Seconds are by the clock; the
processor's are what remains on a machine that does other things. Memory is the largest resident set of the process.
Dice and the 95 % Hausdorff distance are means over the volumes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import origin
from fp4deploy.bench.environment import environment
from fp4deploy.data.volumes.nifti import read_labels
from fp4deploy.metrics import hausdorff95
from tests.interop.nnunet_walk import FP32, OUT, RAW, commands

TRAINING = ("nnUNetv2_plan_and_preprocess", "nnUNetv2_train")
ON_DEVICE = ("nnUNetv2_predict_from_modelfolder",)
FORMS = ("fp16", "nvfp4", "torch")  # folders of segmentations that the page's commands write


def begin(raw: Path, trained: Path, folder: Path, volumes: int) -> None:
    """Data set and trained network where the page has them."""
    target = folder / RAW
    target.mkdir(parents=True)
    for name in ("imagesTr", "labelsTr"):
        shutil.copytree(raw / name, target / name)
    shutil.copy(raw / "dataset.json", target)
    for part in ("images", "labels"):
        (target / f"{part}Ts").mkdir()
        for path in sorted((raw / f"{part}Ts").iterdir())[:volumes]:
            shutil.copy(path, target / f"{part}Ts")
    shutil.copytree(trained, folder / FP32)


def measured(words: list[str], folder: Path) -> dict[str, Any]:
    """Seconds, processor seconds and the largest resident set of one command, in MB."""
    name, *arguments = words
    if name == "fp4deploy":
        call = [sys.executable, "-m", "fp4deploy.cli", *arguments]
    else:
        call = [name, *arguments, *(["-device", "cpu"] if name in ON_DEVICE and not torch.cuda.is_available() else [])]
    start = time.perf_counter()
    with open(folder / "walk.log", "ab") as log:
        process = subprocess.Popen(call, cwd=folder, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}: {folder / 'walk.log'}")
    row = {
        "command": " ".join(words),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1e3),
    }
    print(row, flush=True)
    return row


def scores(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Of each form: Dice and distance in mm of each class, and the share of voxels of another class than in FP16."""
    truth = folder / RAW / "labelsTs"
    classes = range(1, len(json.loads((folder / RAW / "dataset.json").read_text())["labels"]))
    found: dict[str, dict[str, list[float]]] = {}
    for form in FORMS:
        dice, away, unlike = [], [], []
        for path in sorted(truth.iterdir()):
            labels, grid = read_labels(path)
            ours, first = (read_labels(folder / each / path.name)[0] for each in (form, FORMS[0]))
            unlike.append((ours != first).mean())
            pairs = [(ours == each, labels == each) for each in classes]
            dice.append([2 * (a & b).sum() / max(1, a.sum() + b.sum()) for a, b in pairs])
            away.append([np.nan if (found95 := hausdorff95(a, b, grid.spacing)) is None else found95 for a, b in pairs])
        means = {"dice": np.mean(dice, 0), "hd95_mm": np.nanmean(away, 0), "unlike_fp16": np.array([np.mean(unlike)])}
        found[form] = {name: [round(float(each), 5) for each in values] for name, values in means.items()}
    return found


def main() -> None:
    """Run every command, and print and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("trained", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("walk"))
    parser.add_argument("--volumes", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    kept = folder / "rows.json"  # of a walk that was interrupted
    if not folder.is_dir():
        begin(arguments.raw, arguments.trained, folder, arguments.volumes)
    rows = json.loads(kept.read_text()) if kept.is_file() else []
    asked = [words for words in commands() if words[0] not in TRAINING and "TrainerNVFP4" not in " ".join(words)]
    for words in asked[len(rows) :]:
        rows.append(measured(words, folder))
        kept.write_text(json.dumps(rows))
    packed = {form: folder / path / "fold_0/network.fp4" for form, path in (("fp16", FP32), ("nvfp4", OUT))}
    said = {
        "command": "python -m benchmarks.nnunet_walk RAW TRAINED --volumes " + str(arguments.volumes),
        "machine": environment(),
        "rows": rows,
        "scores": scores(folder),
        "network_bytes": {form: path.stat().st_size for form, path in packed.items()},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(origin() | said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
