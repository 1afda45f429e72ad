"""What folders of the package ask of each other while commands run: python -m tests.contract.calls FILE.

`recorded/calls.json` has, for each function that another folder calls, its first distinct calls: the arguments as
they come and what is returned, tensors as shape, type and sum. Command lines with all kinds of options run in one
process, so that an option that is passed on wrongly, a default, a dropped argument or another result anywhere between
two folders is seen, though no file says so. Functions within a folder may change as they like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from fp4deploy.errors import Fp4DeployError

ROOT = Path(__file__).resolve().parents[2]
MOST, DEPTH, LENGTH = 6, 3, 8  # distinct calls of a function; levels and elements of a value
ANYTHING = "*"
LEFT_OUT = (
    "system",
    "plugins",
    "native",
    "errors",
    "tracing",
    "bench/environment",
    "requirements",
    "about",
)  # of the machine
KEPT = (torch.nn.Module, torch.autograd.Function, BaseModel)  # classes whose methods others call by their signature
CHANGING = re.compile(r"[0-9a-f]{64}|\d{4}-\d\d-\d\dT[^\"\s]+|0x[0-9a-f]+")
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
    f"search {FP16} --budget bytes=280000 --data data --images 2 --method amax --arch sm120 --out found",
    "report runs/t --json page.json --out page.html",
    "report runs/t runs/r --out both.html",
    "push runs/t --out hub",
    f"telemetry study {FP16} --data data --images 1 --out studied",
    "settings",
)


def called() -> dict[str, Any]:
    """Function -> its calls; line -> its exit code and output; inputs of what the lines wrote."""
    from tests.contract.internals import short_measurements
    from tests.contract.invoke import fp4deploy
    from tests.contract.results.of_commands import CHANGING as OF_TIME
    from tests.contract.results.of_commands import kept, prepared

    calls, printed = Calls(), {}
    with tempfile.TemporaryDirectory() as name, short_measurements():
        folder = Path(name).resolve()
        prepared(folder)
        calls.folder = str(folder)
        calls.wrap()
        for line in LINES:
            start = time.process_time()
            done = fp4deploy(*line.split(), folder=folder)
            text = " ".join(OF_TIME.sub("#", done.stdout.replace(str(folder), ".")).split())
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
    found = {name: each for name, each in sorted(calls.found.items()) if each}
    return {"calls": found, "printed": printed, "inputs": json.loads(json.dumps(inputs).replace(str(folder), "."))}


def alike(before: Any, now: Any) -> bool:
    """Whether two values are the same: numbers to 2 %, since other machines round otherwise; keys may be added."""
    if before == ANYTHING:
        return True
    if isinstance(before, float | int) and isinstance(now, float | int) and not isinstance(before, bool):
        near = 0.02 * abs(before) if isinstance(before, float) or abs(before) > 100 else 0
        return abs(before - now) <= near + (0.02 if isinstance(before, float) else 0)
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


def lost(before: list[Any], now: list[Any]) -> list[Any]:
    """The recorded calls that nobody makes now, or that answer otherwise."""
    return [call for call in before if not any(alike(call, each) for each in now)]


def run(target: Path) -> dict[str, Any]:
    """`called` in a process of its own, where nothing was called before."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.contract.calls", str(target)]
    subprocess.run(command, cwd=ROOT, env=own, check=True, capture_output=True)
    return dict(json.loads(target.read_text(encoding="utf-8")))


def recorded() -> dict[str, Any]:
    """What two runs have in common, each call as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = (run(Path(folder, name)) for name in ("one", "other"))
    found = common(one, other)
    found["calls"] = {name: list(map(json.dumps, each)) for name, each in found["calls"].items() if each != ANYTHING}
    return {**found, "printed": {line: json.dumps(each) for line, each in found["printed"].items()}}


class Calls:
    """What is seen of calls from one folder of the package into another: functions are wrapped, one by one."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {}
        self.folder = "/nowhere"
        self._places: dict[str, str | None] = {}
        self._wrapped: dict[Any, Any] = {}

    def wrap(self) -> None:
        """Put a wrapper in the place of every function of the package, wherever a module or class names it."""
        import fp4deploy

        for each in pkgutil.walk_packages(fp4deploy.__path__, "fp4deploy."):
            if not _left_out(each.name.removeprefix("fp4deploy.").replace(".", "/")):
                with contextlib.suppress(ImportError, Fp4DeployError):
                    importlib.import_module(each.name)
        for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in ("fp4deploy", "cli")]:
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value):
                    setattr(module, name, self._recording(value))
                elif inspect.isclass(value) and value.__module__ == module.__name__ and not issubclass(value, KEPT):
                    for inner, method in list(vars(value).items()):
                        if inspect.isfunction(method) and not inner.startswith("__"):
                            setattr(value, inner, self._recording(method))

    def _recording(self, function: Any) -> Any:
        callee = self._place(function.__code__.co_filename)
        if (
            callee is None
            or _left_out(callee)
            or function in self._wrapped.values()
            or inspect.isgeneratorfunction(function)
        ):
            return function
        if function in self._wrapped:
            return self._wrapped[function]
        folder, names = callee.rpartition("/")[0], function.__code__.co_varnames

        @functools.wraps(function)
        def recording(*arguments: Any, **named: Any) -> Any:
            origin = self._place(sys._getframe(1).f_code.co_filename)
            found = self.found.setdefault(f"{callee}.{function.__qualname__}", [])
            if origin is None or origin.rpartition("/")[0] == folder or len(found) >= MOST:
                return function(*arguments, **named)
            given = {name: self._value(value) for name, value in (*zip(names, arguments, strict=False), *named.items())}
            try:
                answer = function(*arguments, **named)
            except Exception as error:
                self._add(found, [given, type(error).__name__])
                raise
            self._add(found, [given, self._value(answer)])
            return answer

        self._wrapped[function] = recording
        return recording

    @staticmethod
    def _add(found: list[Any], call: list[Any]) -> None:
        if call not in found and len(found) < MOST:
            found.append(call)

    def _place(self, file: str) -> str | None:
        """The module of a file as a path from the package, None of other code."""
        if file not in self._places:
            own = [file[len(f"{ROOT}/") :] for start in ("fp4deploy", "cli") if file.startswith(f"{ROOT}/{start}/")]
            self._places[file] = own[0].removeprefix("fp4deploy/").removesuffix(".py") if own else None
        return self._places[file]

    def _value(self, value: Any, depth: int = DEPTH) -> Any:
        if isinstance(value, torch.Tensor):
            return _of_tensor(value)
        if isinstance(value, np.ndarray):
            kind = f"{value.dtype}{list(value.shape)}"
            return [kind, _number(value.sum(dtype="f8"))] if value.dtype.kind in "biuf" else [kind]
        if isinstance(value, bool | int | None):
            return value
        if isinstance(value, float | np.generic):
            return _number(value) if isinstance(value, float) else self._value(value.item())
        if isinstance(value, str | Path | bytes):
            text = CHANGING.sub("#", str(value).replace(self.folder, "."))
            return text if len(text) < 80 else f"{text[:70]}... {len(text)}"
        if not depth or isinstance(value, torch.nn.Module):
            return type(value).__name__
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
            return {"": type(value).__name__, **{name: self._value(each, depth - 1) for name, each in fields.items()}}
        if isinstance(value, Mapping):
            few = list(value.items())[:LENGTH]
            return {str(self._value(key)): self._value(each, depth - 1) for key, each in few} | {"#": len(value)}
        if isinstance(value, list | tuple):
            few = [self._value(each, depth - 1) for each in value[:LENGTH]]
            return [*few, f"of {len(value)}"] if len(value) > LENGTH else few
        if isinstance(value, set | frozenset):
            return sorted(str(self._value(each, depth - 1)) for each in value)[:LENGTH]
        if hasattr(type(value), "model_fields"):
            return {name: self._value(getattr(value, name), depth - 1) for name in type(value).model_fields}
        return type(value).__name__


def _left_out(place: str) -> bool:
    return any(place == each or place.startswith(f"{each}/") for each in LEFT_OUT)


def _number(value: Any) -> Any:
    return float(f"{float(value):.4g}") if np.isfinite(value) else str(value)


def _of_tensor(x: torch.Tensor) -> Any:
    kind = f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]"
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu" or not x.dtype.is_floating_point:
        return [kind]
    return [kind, _number(x.detach().double().sum()), _number(x.detach().double().abs().sum())]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(called()), encoding="utf-8")
