"""Keys and types of the JSON files that a run leaves, from a small run of every stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.contract import internals
from tests.contract.frozen import Facts, schema
from tests.contract.invoke import must

SMALL = (
    "--telemetry-every", "0", "--set", "model.scale=0.125", "--set", "data.height=32", "--set", "data.width=32",
    "--set", "data.workers=0", "--set", "train.epochs=1", "--set", "train.finetune_epochs=1",
    "--set", "train.batch_size=8",
)  # fmt: skip
DATA = ("data", "shapes", "shapes", "--train", "8", "--val", "2", "--size", "32")
# Objects whose keys are data: models, classes, kinds of files, packages, layers.
KEYED = re.compile(r".*/(models|per_class|sizes|packages)|.*/ledgers/\[\]/counts")


def small_run(folder: Path) -> Path:
    """A run of `fp4deploy run` on eight images of 32 x 32 pixels, one epoch a model; beside it what was printed."""
    must(*DATA, folder=folder)
    with internals.short_measurements():
        done = must("run", "--data", "shapes", "--out", "run", *SMALL, folder=folder)
    (folder / "stdout.txt").write_text(done.stdout, encoding="utf-8")
    (folder / "stderr.txt").write_text(done.stderr, encoding="utf-8")
    return folder / "run"


def of_run(run: Path) -> Facts:
    """{"report": ..., "ledger": ... where an engine was built}."""
    found = {"report": of_file(run / "report.json")}
    ledger = run / "engines" / "unet.nvfp4.sm120.ledger.json"
    return found | ({"ledger": of_file(ledger)} if ledger.is_file() else {})


def of_file(path: Path) -> Facts:
    """Schema of one JSON file."""
    return schema(json.loads(path.read_text(encoding="utf-8")), lambda where: KEYED.fullmatch(where) is not None)
