"""What each command looks up in a network, and which files it leaves outside of the folders that it is given.

    python -m tests.system.touched --json benchmarks/results/touched_cpu.json

Every command runs on a dataset and two UNets of a few scenes, one command after another, each in a process of its own,
traced by strace in a namespace without a network, where a look-up is seen and fails, and with a new home and temporary
folder. `test_touched` compares the list with the commands that there are, and runs it nightly.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import origin
from tests.cli.command_line import PACKAGE
from tests.cli.test_import_modelopt import of_modelopt
from tests.system.test_usage_reports import left, private

TRACER = ("unshare", "-rn", "strace", "-f", "-qq", "-e", "trace=network", "-o")
LIBRARIES = ("torch", "onnxruntime", "onnx", "matplotlib", "plotly", "huggingface-hub", "accelerate", "tensorrt-rtx")
SWEEP = "config: config.yaml\nseeds: [0]\nagainst: control\nvariants:\n  control: {model: fp16_control}\n"
SETTINGS = (
    "model.scale=0.125",
    "train.epochs=1",
    "train.finetune_epochs=1",
    "train.batch_size=2",
    "train.calibration=1",
)
TRAINED = ("--data", "data", "--size", "32", *(word for each in SETTINGS for word in ("--set", each)))
FP16, PACKED, ONNX = "run/fp16/best.safetensors", "run/export/unet.nvfp4.fp4", "run/export/unet.nvfp4.onnx"
COMMANDS: dict[str, tuple[str, ...]] = {  # each may read what those before it wrote
    "data shapes": ("data", "--train", "4", "--val", "2", "--size", "32"),
    "data check": ("data",),
    "data import": (
        "--train-json", "data/annotations/instances_train2017.json", "--images", "data/train2017",
        "--val-share", "0.4", "--out", "imported",
    ),
    "train": (*TRAINED, "--out", "run"),
    "estimate": (*TRAINED, "--minutes", "0.05"),
    "sweep": ("sweep.yaml", "--data", "data", "--out", "swept"),
    "quantize": (FP16, "--images", "2", "--out", "quantized.safetensors"),
    "search": (FP16, "--budget", "bytes=700000", "--images", "2", "--out", "search"),
    "import-modelopt": ("modelopt.pt", "--like", FP16, "--out", "imported.safetensors"),
    "export": ("run", "--portable", "--images", "1"),
    "export --format packed": ("run", "--images", "1"),
    "build": ("run",),
    "bench": ("run", "--iterations", "1", "--json", "bench.json"),
    "profile": ("--engine", PACKED, "--iterations", "1"),
    "throughput": ("--engine", PACKED),
    "predict": ("data/val2017", "--model", PACKED, "--out", "predicted"),
    "telemetry plot": ("run",),
    "telemetry study": (FP16,),
    "telemetry layers": (FP16, "--images", "2", "--out", "layers"),
    "report": ("run",),
    "open": ("run",),
    "settings": (),
    "check": ("unet:0.125",),
    "verify": ("run",),
    "inspect": (PACKED,),
    "audit": (ONNX, "--target", "onnxruntime"),
    "doctor": (),
    "kernels": ("statistics", "--emulate", "--arch", "sm90"),
    "selftest": (),
    "run": (*TRAINED, "--out", "whole"),
}  # fmt: skip
NOT_TRACED = {"push": "it uploads to a hub"}


@dataclass(frozen=True)
class Touched:
    """What one command touched.

    exit: its status. lookups: addresses that it asked or sent to. home, temporary: what it left there.
    """

    command: str
    exit: int
    lookups: list[str]
    home: list[str]
    temporary: list[str]


def touched(folder: Path, name: str) -> Touched:
    """Run one command of COMMANDS in `folder`, which holds what those before it wrote."""
    if name == "sweep":
        (folder / "config.yaml").write_text((folder / "run" / "config.yaml").read_text(encoding="utf-8"))
        (folder / "sweep.yaml").write_text(SWEEP)
    if name == "import-modelopt":
        of_modelopt(folder / FP16, folder / "modelopt.pt")
    with tempfile.TemporaryDirectory() as own:
        log = Path(own) / "calls.txt"
        call = [*TRACER, str(log), sys.executable, "-m", PACKAGE, *name.split(), *COMMANDS[name]]
        places = Path(own) / "places"
        environment = private(places)
        done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 3):
            raise RuntimeError(f"{name}: {done.stderr[-1000:]}")
        found = left(places)
        temporary = [each for each in found if each.startswith("TMPDIR")]
        home = [each for each in found if each not in temporary]
        return Touched(name, done.returncode, asked(log.read_text(encoding="utf-8")), home, temporary)


def asked(calls: str) -> list[str]:
    """The addresses to which a process connects or sends; sockets inside the machine have none.

    >>> asked('7 connect(3, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("10.0.0.1")}, 16) = -1')
    ['10.0.0.1']
    """
    lines = [line for line in calls.splitlines() if re.search(r"\b(connect|sendto|sendm+sg)\(", line)]
    found = re.findall(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"', "\n".join(lines))
    return sorted({one or other for one, other in found})


def rows() -> Iterator[Touched]:
    """Every command of COMMANDS."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COMMANDS:
            yield touched(Path(folder), name)


def main() -> None:
    """Trace all commands, and print and write what they touched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python -m tests.system.touched {' '.join(sys.argv[1:])}".strip(),
        **origin(),
        "machine": {"system": platform.system(), "python": platform.python_version()},
        "versions": {name: version(name) for name in LIBRARIES},
        "rows": [],
    }
    for row in rows():
        print(f"{row.command}: {row}", flush=True)
        record["rows"].append(asdict(row))
        if chosen.json:
            chosen.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
