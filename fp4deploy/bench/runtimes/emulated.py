"""The arithmetic of an engine that this machine cannot run, on the CPU: `export.lowering.emulation` in ONNX Runtime.

The engine's source says what it computes: the canonical file that its ledger names, by digest. It is looked for beside
the plan, and in the run that holds the plan.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from fp4deploy.bench.runtimes.ort import OrtRuntime
from fp4deploy.bench.runtimes.precision import of_engine
from fp4deploy.bench.runtimes.protocol import TIMEOUT
from fp4deploy.errors import UnavailableError
from fp4deploy.export.ledger.ledger import Ledger
from fp4deploy.export.lowering.emulation import emulated_engine
from fp4deploy.export.lowering.lower import read_buildable
from fp4deploy.export.onnx.size import fix_size, has_open_size
from fp4deploy.runs import run_of
from fp4deploy.system.children import owned_folder
from fp4deploy.system.files import file_digest


def source_of(plan: Path, ledger: Ledger) -> Path:
    """The canonical file that a plan was built of.

    Raises:
        UnavailableError: it is not there, or was changed since.
    """
    run = run_of(plan)
    folders = [plan.parent, *([run.export_dir] if run is not None else [])]
    found = [path for folder in folders if (path := folder / Path(ledger.source).name).is_file()]
    if not found:
        raise UnavailableError(f"its source {ledger.source} is not beside it, so its arithmetic cannot be emulated")
    same = next((path for path in found if file_digest(path) == ledger.source_sha256), None)
    if same is None:
        raise UnavailableError(f"{found[0]} has changed since, so its arithmetic cannot be emulated")
    return same


def open_emulated(source: Path, ledger: Ledger, timeout: float | None = None) -> OrtRuntime:
    """A runtime that answers as the engine would, up to the order of FP32 sums and what its compiler fuses.

    source: as of `source_of`. timeout: most seconds that one inference may take (default: 600).

    Raises:
        InputError: the source cannot be lowered as the ledger says.
    """
    model = read_buildable(source)
    card = ledger.model_card()
    if card is not None and has_open_size(model):
        model = fix_size(model, card.size)
    with owned_folder() as folder:
        path = folder / f"{source.stem}.emulated.onnx"
        onnx.save(emulated_engine(model, ledger.conv), path)
        runtime = OrtRuntime(path, timeout or TIMEOUT)
    runtime.precision = f"{of_engine(ledger, ledger.precision)}, emulated"
    return runtime
