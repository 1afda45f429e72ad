"""Where the files of benchmarks/results come from, and which were measured with code that has changed since.

    python tools/results.py                                  a table: as of when, and changes since in what it measures
    python tools/results.py --stamp FILE [--command TEXT]    write what a new file lacks: the commit it is recorded in

| key | says |
|---|---|
| `commit` | what was measured, where the recorder knew it (`benchmarks/peers.py`, FP4DEPLOY_COMMIT) |
| `recorded_in` | else the commit in which the file was added or last changed: the code is that one's or older |
| `date` | of the measurement, else of that commit |
| `command` | what made it |
| versions | in `machine`, `environment` or `versions`; "not recorded" where nobody wrote them down |

Such a file is not wrong because code has changed: its numbers are those of its date, and the site says so below each
table. Measure again what a change may have moved; remove what nobody can measure again and no page needs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = ("machine", "environment", "versions", "torch", "runs")

_TRAINING = ("qat", "train", "models", "data", "plugins/quantize", "plugins/losses")
_PACKED = ("packed", "export/packing", "fusion", "plugins/gemm", "plugins/quantize")
_ENGINES = ("export/onnx", "export/lowering", "export/engine", "export/ledger")
MEASURED = {  # by script, or command of fp4deploy: folders of fp4deploy
    "accumulator": ("formats",),
    "architectures": ("models", "qat", *_ENGINES, *_PACKED),
    "bench": ("bench", *_PACKED),
    "block_axis": ("formats", "qat"),
    "claim": _TRAINING,
    "coco_samples": _TRAINING,
    "conv_digits": ("formats", "qat"),
    "conv_plans": ("plugins/gemm",),
    "convergence": _TRAINING,
    "cpu_latency": ("bench/runtimes", "packed", "export/onnx"),
    "data_loading": ("data",),
    "decoding": ("predict", "data", "plugins/frames"),
    "depthwise_conv": ("plugins/gemm",),
    "denoiser": ("qat", "ptq", "models", *_PACKED),
    "denoiser_latency": ("qat", "models", *_PACKED),
    "direct_conv": ("plugins/gemm",),
    "emulated": ("plugins",),
    "engine_accuracy": (*_TRAINING, *_ENGINES, "interop"),
    "engine_forms": _ENGINES,
    "estimate": _TRAINING,
    "first_hour": ("data", "models", "ptq", "export", "bench", "predict", "train"),
    "four_over_six_cost": ("plugins/quantize",),
    "fp4_share": ("models", "qat", "graph"),
    "fp4_training": (*_TRAINING, "plugins/gemm"),
    "fuzz": ("system", "data", "packed", "models", "export"),
    "gradient_range": ("formats", "qat"),
    "grouped_linear": ("plugins/gemm", "qat/fp4_gemms"),
    "hazards": ("plugins",),
    "kernels": ("plugins/quantize",),
    "kill_resume": ("train",),
    "language_model": ("formats", "qat", "train", "plugins/quantize"),
    "layer_times": ("plugins/gemm", "plugins/runtime"),
    "large_images": ("predict", "bench/runtimes"),
    "largest_batch": _TRAINING,
    "main_loops": ("plugins/gemm", "plugins/runtime"),
    "modelopt_peer": (*_TRAINING, "ptq"),
    "mutation": (
        "audit",
        "bench",
        "data",
        "export",
        "formats",
        "interop",
        "metrics.py",
        "packed",
        "predict",
        "ptq",
        "train",
    ),
    "native_library": (*_PACKED, "native"),
    "native_networks": (*_PACKED, "native"),
    "packed_digits": _PACKED,
    "packed_latency": _PACKED,
    "packed_unet": _PACKED,
    "nnunet_walk": ("interop/nnunet", "ptq", "data/volumes", *_PACKED),
    "nnunet_hippocampus": ("interop/nnunet", "ptq", *_TRAINING, *_PACKED),
    "nnunet_volume": ("interop/nnunet", *_PACKED),
    "packed_volumes": _PACKED,
    "pipeline": ("predict", "bench", *_PACKED),
    "plain_conv": ("plugins/gemm",),
    "products": ("plugins/gemm",),
    "qdq_placement": ("interop/placement.py", *_ENGINES),
    "ptq": ("ptq", "qat"),
    "random_networks": ("models", "qat", "graph", *_ENGINES, *_PACKED),
    "written_networks": ("models", "qat", "graph", *_ENGINES, *_PACKED),
    "reference_speed": ("formats", "qat/operators"),
    "roofline": ("timing", "plugins/gemm"),
    "roofline_training": ("peaks.py", "graph", "qat"),
    "scaling": _TRAINING,
    "selftest": ("selftest", "plugins", "packed", "export"),
    "small_k_conv": ("plugins/gemm",),
    "sweep": _TRAINING,
    "telemetry": ("qat/telemetry", "experiments/sensitivity"),
    "telemetry_cost": ("qat/telemetry", "train"),
    "tiles": ("plugins/gemm",),
    "train": _TRAINING,
    "time_model": ("timing", "plugins/gemm"),
    "touched": ("system",),
    "training_convolutions": ("plugins/gemm", "qat/operators"),
    "training_models": _TRAINING,
    "training_step": _TRAINING,
    "transformers_table": ("qat", "graph", *_ENGINES, *_PACKED),
    "vit_digits": ("formats", "qat"),
    "volume_training": (*_TRAINING, "plugins"),
    "warpgroup_conv": ("plugins/gemm",),
}
_NAME = re.compile(r"(?:python (?:-m )?(?:benchmarks|examples|tests)[./](?:export\.|system\.)?|fp4deploy )(\w+)")


class Origin(NamedTuple):
    """What a file says of itself. commit: measured, or where `exact` is False recorded in."""

    commit: str
    exact: bool
    date: str
    command: str

    def __str__(self) -> str:
        return f"{self.date} ({'' if self.exact else 'recorded in '}{self.commit[:8]})"


def origin_of(document: dict[str, Any]) -> Origin:
    """Where a result comes from; absent texts are empty."""
    machine = document.get("machine") if isinstance(document.get("machine"), dict) else {}
    commit = document.get("commit") or machine.get("commit") or ""
    recorded = document.get("recorded_in") or {}
    date = document.get("date") or machine.get("date") or document.get("created") or recorded.get("date", "")
    command = document.get("command") or next((each["command"] for each in document.get("runs", [])), "")
    exact = commit not in ("", "unknown")
    return Origin(commit if exact else recorded.get("commit", ""), exact, date[:10], command)


def missing(document: dict[str, Any]) -> list[str]:
    """Names of the facts that a result lacks."""
    found = origin_of(document)._asdict()
    absent = [name for name in ("commit", "date", "command") if not found[name]]
    projected = "Projected" in document.get("statement", "")  # of published peaks: no version matters
    return absent if projected or any(document.get(name) for name in VERSIONS) else [*absent, "versions"]


def measured(command: str) -> tuple[str, ...]:
    """Paths of the checkout that a command measures.

    Raises:
        KeyError: it is of a script that MEASURED does not have.
    """
    names = dict.fromkeys(_NAME.findall(command))
    scripts = [f"{folder}/{name}.py" for name in names for folder in ("benchmarks", "examples")]
    folders = dict.fromkeys(folder for name in names for folder in MEASURED[name])
    native = ["native"] if "native" in folders else []
    return (
        *(path for path in scripts if (ROOT / path).is_file()),
        *(f"fp4deploy/{folder}" for folder in folders if (ROOT / "fp4deploy" / folder).exists()),
        *native,
    )


def commits_since(commit: str, paths: tuple[str, ...]) -> int | None:
    """How many commits after `commit` change one of the paths; None where the history does not have it."""
    call = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def stamp(path: Path, commit: str, date: str, command: str | None) -> None:
    """Put what a file lacks in front of its other keys, which stay as they are written."""
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    new: dict[str, Any] = {}
    if "command" in missing(document) and command is not None:
        new["command"] = command
    if "commit" in missing(document):
        new["recorded_in"] = {"commit": commit, "date": date}
    if "versions" in missing(document):
        new["versions"] = "not recorded"
    indent = re.match(r"\{(\n *|)", text)
    assert indent is not None
    lines = "".join(f"{indent[1]}{json.dumps(name)}: {json.dumps(value)}," for name, value in new.items())
    path.write_text(f"{{{lines}{text[1:]}", encoding="utf-8")


def main() -> None:
    """List the results, or stamp some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamp", type=Path, nargs="+", default=[])
    parser.add_argument("--command")
    options = parser.parse_args()
    for path in options.stamp:
        head = subprocess.run(["git", "log", "-1", "--format=%H %cs"], cwd=ROOT, capture_output=True, text=True)
        stamp(path, *head.stdout.split(), options.command)
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        origin, absent = origin_of(document), missing(document)
        since = None if absent else commits_since(origin.commit, measured(origin.command))
        state = f"lacks {', '.join(absent)}" if absent else f"{since} commits since" if since else "current"
        print(f"{path.stem:<36}{origin!s:<38}{state if absent or since is not None else 'commit not in this history'}")


if __name__ == "__main__":
    sys.exit(main())
