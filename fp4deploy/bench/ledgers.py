"""The ledgers of a run's engines, in the form the report shows."""

from __future__ import annotations

from pathlib import Path

from fp4deploy.export.ledger.ledger import COLUMNS, Ledger, ledger_path, load_ledger
from fp4deploy.runs import Run

TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


def ledger_of(plan: Path) -> Ledger | None:
    """Ledger of a plan; None where the plan has none.

    Raises:
        InputError: the ledger is broken.
    """
    path = ledger_path(plan)
    return load_ledger(path) if path.is_file() else None


def built_by(ledger: Ledger) -> str:
    """Builder and target, such as "TensorRT-RTX 1.7.1 for SM120"."""
    return f"{TITLES.get(ledger.backend, ledger.backend)} {ledger.backend_version} for {ledger.arch.upper()}"


def engines(run: Run) -> list[dict[str, object]]:
    """One entry for every engine of a run that has a ledger, as JSON values."""
    found = []
    for model in run.models():
        for plan in run.engines(model):
            ledger = ledger_of(plan)
            if ledger is not None:
                found.append(_entry(model, plan, ledger))
    return found


def _entry(model: str, plan: Path, ledger: Ledger) -> dict[str, object]:
    totals = ledger.totals()
    fp8 = sum(row.actual == "FP8" for row in ledger.layers)
    fp4 = sum(row.actual == "FP4" for row in ledger.layers)
    return {
        "engine": plan.name,
        "model": model,
        "built": built_by(ledger),
        "statement": ledger.statement,
        "summary": ledger.summary(),
        "fp4_mac_share": totals.fp4_mac_share,
        "counts": {
            "FP4 matrix products": totals.fp4_gemms,
            "FP16 layers, FP4 weights": totals.fp16_with_fp4_weights,
            "FP16 layers": totals.fp16,
            "FP8 layers": fp8,
            "other layers": len(ledger.layers) - fp4 - totals.fp16_with_fp4_weights - totals.fp16 - fp8,
            "fallbacks": totals.fell_back,
        },
        "requested": totals.requested,
        "actual": totals.actual,
        "not_as_requested": totals.not_as_requested,
        "columns": list(COLUMNS),
        "layers": [list(row.values()) for row in ledger.rows()],
    }
