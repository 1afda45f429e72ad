"""What commands print of fixed files, in one process: python -m tests.contract.lines FILE.

`recorded/lines.json` has the exit code and the output of command lines with all kinds of options, so that an option
that is passed on wrongly, a default, a dropped argument or another result is seen where a user would see it, and which
inputs the files that they wrote name (`provenance.jsonl`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
ANYTHING = "*"
VERSION = re.compile(r"(?<=Runtime )[\d.]+|\d+\.\d+\.\d+(\+\w+)?|(?<=\"limit\": \")\w+")  # of a library; of a machine
FP16, NVFP4 = "runs/r/fp16/best.safetensors", "runs/r/nvfp4/q.safetensors"
TINY = "--data data --epochs 1 --batch-size 2 --set data.workers=0 --set model.scale=0.125 --size 32x48"
LINES = (  # of files that `prepared` makes
    "data check data --json",
    "data check damaged",
    "data check data --task detection --json",
    f"train {TINY} --models fp16,nvfp4 --out runs/t --telemetry-every 1 --set train.finetune_epochs=1"
    " --set train.ema=0.9",
    "train --resume --out runs/t",
    f"train {TINY} --task instance --models nvfp4 --from-scratch --out runs/i --classes c3 --set train.accumulate=2",
    f"train {TINY} --task detection --models fp16 --out runs/d --set augment.mosaic=0.5",
    f"estimate {TINY} --models fp16 --steps 1 --gpus 2 --images 100 --val-images 10 --json",
    f"quantize {FP16} --data data --images 2 --method amax --out {NVFP4}",
    f"quantize {FP16} --data data --images 2 --method 4/6 --correction bias --activations percentile --seed 3"
    " --exclude encoder* --fp8 decoder* --out runs/r/nvfp4/p.safetensors --compare 2",
    f"quantize {FP16} --data in --images 1 --method mse --int8 decoder* --fp16-macs 0.2 --digits --rest bf16"
    " --out runs/r/nvfp4/m.safetensors --batch 1",
    f"check {NVFP4} --json",
    f"check {FP16} --target tensorrt --conv gemm --size 64x96 --recipe nvfp4_qat",
    f"export {NVFP4} --format packed --no-verify --out runs/r/export/q.fp4",
    f"export {NVFP4} --format onnx --portable --data data --images 2 --batch 2 --out runs/r/export/q.onnx",
    "verify runs/r --json",
    "verify runs/t",
    "inspect runs/r/export/q.fp4 --json",
    "inspect runs/r/export/q.onnx --json",
    "audit runs/r/export/q.onnx --target onnxruntime --json",
    "audit layers.json",
    f"predict in --model {FP16} --out out --json",
    f"predict in --model {FP16} --out out2 --tile --overlap 8 --batch 2 --no-overlays --times",
    "predict in --model runs/i/nvfp4/best.safetensors --out out3 --min-score 0.01 --json",
    "predict in --model runs/d/fp16/best.safetensors --out out4 --min-score 0.01 --json",
    f"bench --engine {FP16} --engine runs/r/export/q.fp4 --data data --iterations 1 --batch 2 --limit 1"
    " --results seen --json",
    f"bench --engine runs/r/export/q.fp4 --baseline {FP16} --max-drop 50 --data data --iterations 1 --json -",
    "bench --engine runs/i/nvfp4/best.safetensors --data data --iterations 1 --max-dets 5 --json",
    f"search {FP16} --budget bytes=20000 --data data --images 2 --method amax --arch sm120 --out found",
    "report runs/t --json page.json --out page.html",
    "report runs/t runs/r --out both.html",
    "push runs/t --out hub",
    f"telemetry study {FP16} --data data --images 1 --out studied",
    "settings",
)


def outcomes() -> dict[str, Any]:
    """Line -> its exit code and output; inputs of what the lines wrote."""
    from tests.contract.internals import short_measurements
    from tests.contract.invoke import fp4deploy
    from tests.contract.results.of_commands import CHANGING as OF_TIME
    from tests.contract.results.of_commands import kept, prepared
    from tests.shallow import levels

    printed = {}
    with tempfile.TemporaryDirectory() as name, short_measurements(), levels(3):
        folder = Path(name).resolve()
        prepared(folder)
        for line in LINES:
            start = time.process_time()
            done = fp4deploy(*line.split(), folder=folder)
            text = " ".join(OF_TIME.sub("#", VERSION.sub("#", done.stdout.replace(str(folder), "."))).split())
            printed[line] = [done.code, kept(json.loads(text)) if text[:1] in "{[" and text else text]
            if "--verbose" in sys.argv:
                print(f"{time.process_time() - start:.1f} s {line}: {done.code}", file=sys.stderr)
                print(done.stderr[-600:] if done.code else "", file=sys.stderr)
        lines = [
            json.loads(line)
            for each in ("r", "t")
            for line in (folder / "runs" / each / "provenance.jsonl").read_text().splitlines()
        ]
        inputs = [[line["stage"], line["path"], [each["path"] for each in line["inputs"]]] for line in lines]
    return {"printed": printed, "inputs": json.loads(json.dumps(inputs).replace(str(folder), "."))}


def alike(before: Any, now: Any) -> bool:
    """Whether two values are the same: fractions to 2 %, since other machines round otherwise; keys may be added."""
    if before == ANYTHING:
        return True
    if isinstance(before, float) and isinstance(now, float | int) and not isinstance(now, bool):
        return abs(before - now) <= 0.02 * abs(before) + 0.002
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() <= now.keys() and all(alike(before[key], now[key]) for key in before)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(alike, before, now))
    return type(before) is type(now) and bool(before == now)


def common(one: Any, other: Any) -> Any:
    """What two runs have in common: anything in the place of what differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: common(each, other[key]) for key, each in one.items() if key in other}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return list(map(common, one, other))
    return one if alike(one, other) else ANYTHING


# Sums in an order that does not follow from the width of the processor's vectors: a training of two epochs shows it.
ANY_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}


def run(target: Path) -> dict[str, Any]:
    """`outcomes` in a process of its own, where nothing was called before."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **ANY_PROCESSOR}
    command = [sys.executable, "-m", "tests.contract.lines", str(target)]
    subprocess.run(command, cwd=ROOT, env=own, check=True, capture_output=True)
    return dict(json.loads(target.read_text(encoding="utf-8")))


def recorded() -> dict[str, Any]:
    """What two runs have in common."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = (run(Path(folder, name)) for name in ("one", "other"))
    found = common(one, other)
    return {**found, "printed": {line: json.dumps(each) for line, each in found["printed"].items()}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(outcomes()), encoding="utf-8")
