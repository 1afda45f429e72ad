"""Dice of the hippocampus in FP16 and NVFP4: nnU-Net's own plan and trainer, shortened, and three seeds.

    python -m benchmarks.nnunet_hippocampus RAW --seconds 400 --json benchmarks/results/nnunet_hippocampus_h200.json
    python -m benchmarks.nnunet_hippocampus RAW --seeds 0 --epochs 1 1 --iterations 2 --volumes 2 --folder short

RAW is nnUNet_raw/Dataset004_Hippocampus with imagesTs and labelsTs. For each seed:

| form | what it is | command |
|---|---|---|
| `base` | 3d_fullres, fold 0, FP16 as nnU-Net mixes it | `nnUNetv2_train 4 3d_fullres 0` |
| `control` | the base, trained on as long as `nvfp4` and at its rates | `nnUNetv2_train` |
| `nvfp4` | the base, trained on in NVFP4 | `nnUNetv2_train -tr` a subclass of nnUNetTrainerNVFP4 |
| `ptq` | the base, quantised without training | `fp4deploy quantize` |

Everything that trains is nnU-Net's but the number of steps, the seed and the rate that fine-tuning starts with
(`nnunet_trainers`). `nnUNetv2_predict_from_modelfolder` segments the test volumes with all four; with --packed
`fp4deploy predict --nnunet` does so, too, with the packed networks of `nvfp4` and `ptq`. On a CPU nnU-Net trains in
FP32.

An epoch has so many iterations that everything takes about --seconds: a first training of both forms on each GPU tells
how long a step takes. With --iterations none is made. Every training takes the GPU with fewest of them; the file is
written after each step, and a step that fails is in it with its error.

Dice is the mean over volumes of each class, then over both (`bench.evidence.VoxelCounts`). A drop is `control`, or
`base`, of the same seed minus the row, in points; its intervals are those of `engine_accuracy.drops`: the gate's paired
bootstrap over volumes, of each seed and of the mean, and Student's t over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.engine_accuracy import drops
from fp4deploy.bench.environment import environment
from fp4deploy.bench.evidence import VoxelCounts, write_pixels
from fp4deploy.bench.gate.bootstrap import value
from fp4deploy.data.volumes.nifti import read_labels
from fp4deploy.interop.nnunet import TRAINERS
from fp4deploy.metrics import hausdorff95
from fp4deploy.system.processors import cores

NAME, CONFIGURATION, FOLD = "Dataset004_Hippocampus", "3d_fullres", "0"
SHORT = Path(__file__).resolve().parent / "nnunet_trainers"
TRAINER = {"base": "nnUNetTrainerBase", "control": "nnUNetTrainerControl", "nvfp4": "nnUNetTrainerTuned"}
RATE = {"base": 1e-2, "control": 1e-3, "nvfp4": 1e-3}  # the first is nnU-Net's
FORMS = (*TRAINER, "ptq")
PACKED = ("nvfp4", "ptq")
ENTRY = {
    "plan": "from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import plan_and_preprocess_entry as run",
    "train": "from nnunetv2.run.run_training import run_training_entry as run",
    "predict": "from nnunetv2.inference.predict_from_raw_data import predict_entry_point_modelfolder as run",
}
APART = 75.0  # seconds that are no steps: starts of processes, first steps, predictions
EPOCH = re.compile(r"Epoch time: ([\d.]+) s")


class Benchmark:
    """Commands of one run, on the GPU with fewest of them, and what they gave."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.began = time.monotonic()
        self.devices: list[str] = [str(index) for index in range(torch.cuda.device_count())] or ["cpu"]
        self.running = dict.fromkeys(self.devices, 0)
        self.lock = threading.Lock()
        told = " ".join("RAW" if each == str(options.raw) else each for each in peers.command("--folder").split(" "))
        self.report: dict[str, Any] = {"command": told, **peers.origin(), "machine": environment(), "seconds": {}}
        if gpus := self.report["machine"]["gpus"]:
            self.report["machine"] |= {"gpu": gpus[0]["name"], "torch": torch.__version__}
        self.report["scores"] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def raw(self) -> Path:
        return self.folder / "raw" / NAME

    def results(self, seed: int, form: str, run: str = "results") -> Path:
        """The results folder of a form."""
        if form == "ptq":
            return self.folder / f"{run}{seed}" / "ptq"
        return self.folder / f"{run}{seed}" / NAME / f"{TRAINER[form]}__nnUNetPlans__{CONFIGURATION}"

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @contextmanager
    def device(self) -> Iterator[str]:
        """The GPU with fewest commands."""
        with self.lock:
            found = min(self.devices, key=lambda each: self.running[each])
            self.running[found] += 1
        try:
            yield found
        finally:
            with self.lock:
                self.running[found] -= 1

    def call(self, name: str, words: list[str], device: str = "", **more: str) -> str:
        """Run one command to its end; its output, which logs/NAME.log has as well.

        Raises:
            RuntimeError: it failed.
        """
        variables = {
            "nnUNet_raw": str(self.folder / "raw"),
            "nnUNet_preprocessed": str(self.folder / "preprocessed"),
            "nnUNet_results": str(self.folder / "results"),
            "nnUNet_extTrainer": os.pathsep.join((str(SHORT), str(TRAINERS))),
            "nnUNet_compile": "t" if self.options.compile else "f",
            "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": device} if device not in ("", "cpu") else {}),
            **more,
        }
        log, began = self.folder / "logs" / f"{name}.log", time.monotonic()
        with open(log, "wb") as file:
            code = subprocess.call(words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **variables})
        text = log.read_text(errors="replace")
        print(f"{self.elapsed():6.1f} s  {name}: {time.monotonic() - began:.1f} s, exit code {code}", flush=True)
        if code:
            raise RuntimeError(f"exit code {code}: {text[-600:]}")
        with self.lock:
            self.report["seconds"][name] = round(time.monotonic() - began, 1)
        return text

    def keep(self) -> None:
        """Write the report as it is."""
        if self.options.json is not None:
            with self.lock:
                text = json.dumps(self.report, indent=1)
                whole = self.options.json.with_suffix(".part")
                whole.write_text(text + "\n", encoding="utf-8")
                whole.replace(self.options.json)

    def prepare(self) -> None:
        """The raw data, the test volumes that are asked for, and nnU-Net's plans and preprocessed volumes."""
        for part in ("imagesTr", "labelsTr", "imagesTs", "labelsTs"):
            (self.raw / part).mkdir(parents=True)
            for path in sorted((self.options.raw / part).iterdir())[: self.options.volumes if "Ts" in part else None]:
                shutil.copy(path, self.raw / part)
        shutil.copy(self.options.raw / "dataset.json", self.raw)
        if self.options.preprocessed is not None:
            shutil.copytree(self.options.preprocessed, self.folder / "preprocessed" / NAME)
            return
        workers = str(min(8, cores()))
        self.call("plan", [*nnunet("plan"), "-d", "4", "-c", CONFIGURATION, "-npfp", workers, "-np", workers])

    def train(self, name: str, seed: int, form: str, epochs: int, iterations: int, device: str, run: str) -> str:
        """A training of a form; what it printed."""
        steps = {"SEED": seed, "EPOCHS": epochs, "ITERATIONS": iterations, "RATE": RATE[form]}
        more = {f"NNUNET_SHORT_{key}": str(each) for key, each in steps.items()}
        more["nnUNet_results"] = str(self.folder / f"{run}{seed}")
        together = len(self.options.seeds) * (1 if form == "base" else 2)
        more["nnUNet_n_proc_DA"] = str(0 if device == "cpu" else max(2, min(10, cores() // together)))
        if form != "base" and run == "results":
            more["FP4DEPLOY_NNUNET_INIT"] = str(self.results(seed, "base") / f"fold_{FOLD}" / "checkpoint_final.pth")
        kind = ["-device", "cpu" if device == "cpu" else "cuda"]
        words = [*nnunet("train"), "4", CONFIGURATION, FOLD, "-tr", TRAINER[form], *kind]
        return self.call(name, words, device, **more)

    def probe(self) -> int:
        """Iterations of an epoch with which everything takes `--seconds`.

        With two trainings on a GPU a step takes twice the GPU's time. The GPU with two bases is busy for their steps,
        and six trainings, of which two GPUs share the time, follow.
        """

        steps = self.options.probe

        def timed(seed: int, form: str, device: str) -> float:
            text = self.train(f"probe-{form}-{seed}", seed, form, 2, steps, device, "probe")
            return float(EPOCH.findall(text)[-1]) / steps

        with ThreadPoolExecutor() as pool:
            asked = {
                form: [pool.submit(timed, seed, form, each) for seed, each in enumerate(self.devices)]
                for form in ("base", "nvfp4")
            }
        step: dict[str, float] = {}
        for form, futures in asked.items():
            spent = [each.result() for each in futures if each.exception() is None]
            for each in futures:
                if (error := each.exception()) is not None:
                    self.report.setdefault("errors", {})[f"probe-{form}"] = str(error)
            step[form] = max(spent) if spent else 2 * step.get("base", 0.05)
        self.report["step_s"] = step
        first, second = self.options.epochs
        seeds, devices = len(self.options.seeds), len(self.devices)
        rounds = -(-seeds // devices) / 2  # of a GPU's time, of which a step of two has half
        an_iteration = first * rounds * step["base"] + second * seeds / devices / 2 * sum(step.values())
        left = self.options.seconds - self.elapsed() - APART
        print(f"steps of two trainings a GPU, s: {step}; {left:.0f} s are left for steps", flush=True)
        return max(20, int(left / an_iteration))

    def predicted(self, seed: int, form: str, device: str) -> None:
        """Segment the test volumes and score them."""
        out = self.folder / f"masks{seed}" / form
        words = ["-i", str(self.raw / "imagesTs"), "-o", str(out), "-m", str(self.results(seed, form)), "-f", FOLD]
        words += ["-npp", "2", "-nps", "2", "-device", "cpu" if device == "cpu" else "cuda"]
        words += ["--disable_tta"] if self.options.no_mirror else []
        self.call(f"predict-{form}-{seed}", [*nnunet("predict"), *words, "--disable_progress_bar"], device)
        self.score(seed, form, out)

    def packed(self, seed: int, form: str, device: str) -> None:
        """The same by the packed network and fp4deploy's predictor."""
        folder, out = str(self.results(seed, form)), self.folder / f"masks{seed}" / f"{form}, packed"
        if form != "ptq":  # whose folder has the packed network
            export = ["export", folder, "--format", "packed", "--data", str(self.raw)]
            self.call(f"export-{form}-{seed}", [*OURS, *export], device, OMP_NUM_THREADS="4")
        words = ["predict", str(self.raw / "imagesTs"), "--nnunet", folder, "--out", str(out)]
        words += ["--no-mirror"] if self.options.no_mirror else []
        self.call(f"packed-{form}-{seed}", [*OURS, *words], device)
        self.score(seed, f"{form}, packed", out)

    def quantized(self, seed: int, device: str) -> None:
        """The base quantised without training."""
        words = [str(self.results(seed, "base")), "--data", str(self.raw), "--out", str(self.results(seed, "ptq"))]
        words += [] if self.options.images is None else ["--images", str(self.options.images)]
        self.call(f"quantize-{seed}", [*OURS, "quantize", *words], device, OMP_NUM_THREADS="4")

    def score(self, seed: int, form: str, masks: Path) -> None:
        found = scored(masks, self.raw / "labelsTs")
        with self.lock:
            self.report["scores"].setdefault(form, {})[str(seed)] = found
            rows = self.report["scores"]
            self.report["forms"] = {name: summary(rows, name) for name in rows}
        print(f"{self.elapsed():6.1f} s  {form}, seed {seed}: Dice {100 * found['value']:.2f}", flush=True)
        self.keep()

    def safely(self, seed: int, form: str, run: Callable[..., None], *given: Any) -> bool:
        """Run a step on some GPU; whether it ended well. What failed is in the report."""
        try:
            with self.device() as device:
                run(seed, *given, device)
        except Exception as error:  # the other steps go on
            with self.lock:
                self.report.setdefault("errors", {})[f"{form}, seed {seed}"] = f"{type(error).__name__}: {error}"[:700]
            print(f"{form}, seed {seed}: {error}", flush=True)
            self.keep()
            return False
        return True

    def run(self) -> None:
        """Everything, the seeds beside each other."""
        self.prepare()
        iterations = self.options.iterations or self.probe()
        first, second = self.options.epochs
        self.report["steps"] = {"base": first * iterations, "fine-tuning": second * iterations}
        print(f"{self.elapsed():6.1f} s  epochs of {iterations} iterations: {self.report['steps']}", flush=True)
        self.keep()

        def base(seed: int, device: str) -> None:
            self.train(f"base-{seed}", seed, "base", first, iterations, device, "results")

        def tune(seed: int, form: str, device: str) -> None:
            self.train(f"{form}-{seed}", seed, form, second, iterations, device, "results")
            self.predicted(seed, form, device)

        def quantize(seed: int, form: str, device: str) -> None:
            self.quantized(seed, device)
            self.predicted(seed, form, device)

        def seed_of(seed: int) -> None:
            if self.safely(seed, "base", base):
                steps = [("control", tune), ("nvfp4", tune), ("ptq", quantize), ("base", self.predicted)]
                wait([pool.submit(self.safely, seed, form, step, form) for form, step in steps])

        with ThreadPoolExecutor(5 * len(self.options.seeds)) as pool:
            wait([pool.submit(seed_of, seed) for seed in self.options.seeds])
            if self.options.packed:
                done = [(seed, form) for form in PACKED for seed in self.options.seeds if str(seed) in self.ended(form)]
                wait([pool.submit(self.safely, seed, f"{form}, packed", self.packed, form) for seed, form in done])
        self.report["whole_s"] = round(self.elapsed())
        self.keep()

    def ended(self, form: str) -> dict[str, Any]:
        found: dict[str, Any] = self.report["scores"].get(form, {})
        return found


OURS = [sys.executable, "-m", "fp4deploy.cli"]


def nnunet(entry: str) -> list[str]:
    """A command of nnU-Net, which may be installed where no script of it is found."""
    return [sys.executable, "-c", f"{ENTRY[entry]}\nrun()"]


def scored(masks: Path, truth: Path) -> dict[str, Any]:
    """Dice of volumes [N] and of all, the 95 % Hausdorff distance, and the counts that intervals are made of."""
    classes = list(json.loads((truth.parent / "dataset.json").read_text())["labels"])
    names, counts, away = [], [], []
    for path in sorted(truth.iterdir()):
        labels, grid = read_labels(path)
        found, _ = read_labels(masks / path.name)
        pairs = [(found == each, labels == each) for each in range(len(classes))]
        counts.append([[(a & b).sum(), b.sum(), a.sum()] for a, b in pairs])
        away += [hausdorff95(a, b, grid.spacing) for a, b in pairs[1:]]
        names.append(path.name)
    voxels = VoxelCounts(names, classes, np.array(counts, np.int64))
    dice = np.nanmean(voxels.per_class(np.eye(len(names)))[:, 1:], 1)
    whole = value(voxels)
    distance = statistics.fmean(apart) if (apart := [each for each in away if each is not None]) else None
    evidence = write_pixels(voxels).model_dump(mode="json")
    return {"value": whole, "dice": dice.round(5).tolist(), "hd95_mm": distance, "evidence": evidence}


def summary(rows: dict[str, dict[str, Any]], form: str) -> dict[str, Any]:
    """Mean over seeds and drops of a form."""
    values = [each["value"] for each in rows[form].values()]
    found: dict[str, Any] = {"mean": statistics.fmean(values)}
    found["sd"] = statistics.stdev(values) if len(values) > 1 else None
    distances = [each["hd95_mm"] for each in rows[form].values() if each["hd95_mm"] is not None]
    found["hd95_mm"] = statistics.fmean(distances) if distances else None
    for other in ("control", "base"):
        if other in rows and other != form and set(rows[other]) & set(rows[form]):
            found[f"drop_from_{other}"] = drops(rows[other], rows[form])
    return found


def main() -> None:
    """Train, predict and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs=2, default=[16, 6], help="of the base, and of fine-tuning")
    parser.add_argument("--iterations", type=int, help="of an epoch; else as many as --seconds allow")
    parser.add_argument("--probe", type=int, default=100, help="iterations of an epoch of the first training, of two")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--volumes", type=int, help="of the test split")
    parser.add_argument("--images", type=int, help="of `quantize`")
    parser.add_argument("--no-mirror", action="store_true", help="predict without mirroring")
    parser.add_argument(
        "--compile", action="store_true", help="as nnU-Net does on a GPU; takes longer than this training"
    )
    parser.add_argument("--packed", action="store_true", help="predict with packed networks, too")
    parser.add_argument("--preprocessed", type=Path, help="nnUNet_preprocessed/Dataset004_Hippocampus, made before")
    parser.add_argument("--folder", type=Path, help="to keep what is made")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp())).resolve()
    try:
        Benchmark(options, folder).run()
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
