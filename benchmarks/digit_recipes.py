"""FP32 and all recipes on scikit-learn's digits, several at a time, and their losses by epoch as a picture.

    python -m benchmarks.digit_recipes --jobs 16                       the transformer and the convolutional network
    python -m benchmarks.digit_recipes --curves docs/images/digits.png           the picture, of what is there

Each process is `examples/vit_digits.py` or `examples/conv_digits.py` with one recipe. A run depends on recipe and seed
alone, so that the files are those of the examples with all recipes; FP32, which every process trains, is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claim import draw_curves
from benchmarks.peers import origin
from fp4deploy.qat import RECIPES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LABELS = {"vit": "transformer of one block", "conv": "convolutional network"}
FP32 = "fp32"
SHOWN = (("loss", "loss of the training", 1.0),)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--epochs", type=int, help="of both; by default the examples' own")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=0, help="processes of one thread each; 0: nothing is trained")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of digits_NETWORK_cpu.json")
    parser.add_argument("--curves", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    if options.jobs:
        more = [f"--seeds={options.seeds}", *([f"--epochs={options.epochs}"] if options.epochs else [])]
        for network in options.networks:
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
                parts = list(pool.map(partial(trained, network, more, Path(folder)), options.recipes))
            text = json.dumps(joined(parts), indent=1) + "\n"
            (options.folder / f"digits_{network}_cpu.json").write_text(text, encoding="utf-8")
    if options.curves:
        rows = [row for network in options.networks for row in rows_of(options.folder, network)]
        draw_curves(rows, LABELS, options.curves, SHOWN)


def trained(network: str, more: Sequence[str], folder: Path, recipe: str) -> dict[str, Any]:
    """What an example writes of one recipe."""
    path = folder / f"{recipe}.json"
    call = [sys.executable, f"examples/{network}_digits.py", "--recipes", recipe, "--json", str(path), *more]
    subprocess.run(call, cwd=ROOT, check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document of all recipes.

    Raises:
        ValueError: FP32 came out otherwise in one of the processes.
    """
    controls = [[run["loss"] for run in part["runs"][FP32]] for part in parts]
    if any(control != controls[0] for control in controls):
        raise ValueError("FP32 is not the same in all processes, so that they cannot be compared.")
    runs = {name: rows for part in parts for name, rows in part["runs"].items()}
    return {**parts[0], **origin(), "date": parts[0]["date"], "runs": {FP32: runs.pop(FP32), **runs}}


def rows_of(folder: Path, network: str) -> list[dict[str, Any]]:
    """The runs as rows of `draw_curves`."""
    document = json.loads((folder / f"digits_{network}_cpu.json").read_text(encoding="utf-8"))
    return [
        {
            "data": "digits",
            "network": network,
            "recipe": recipe,
            "curve": [{"epoch": at, "loss": loss} for at, loss in enumerate(run.get("losses", ()), start=1)],
        }
        for recipe, runs in document["runs"].items()
        for run in runs
    ]


if __name__ == "__main__":
    main()
