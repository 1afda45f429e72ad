"""What a report says of a run's engines: every layer is counted once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fp4deploy.bench.ledgers import engines
from fp4deploy.export.ledger.ledger import Ledger, LedgerRow, ledger_path
from fp4deploy.precisions import OF_ENGINES
from fp4deploy.runs import Run

HELD = (*OF_ENGINES, "FP16")


def ledger(*rows: tuple[str, str, str]) -> Ledger:
    """Of layers with these precisions: requested, actual, and of their weights."""
    layers = [
        LedgerRow(f"layer{at}", "Conv2d", requested, requested, actual, weights, "qdq", "", 10 + at, False, (), ())
        for at, (requested, actual, weights) in enumerate(rows)
    ]
    return Ledger(
        *("tensorrt-rtx", "1.7.1", "sm120", "auto", "build log", "a.onnx", "0" * 64, "a.plan", "1" * 64, 1, 0.1),
        (1, 1, 8), None, tuple(layers), (),
    )  # fmt: skip


def entry(found: Ledger, run: Path) -> dict[str, object]:
    for path in (Run(run).checkpoint("nvfp4"), plan := Run(run).engine("nvfp4", "sm120")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    ledger_path(plan).write_text(found.to_json())
    (only,) = engines(Run(run))
    return only


def test_every_layer_is_counted_once(tmp_path: Path) -> None:
    """Also of precisions and pairs of precisions that no name stands for."""
    for rows in ([("FP4", *each)] for each in itertools.product((*HELD, "FP16 x FP4", "unknown"), HELD)):
        found = ledger(*rows, ("FP4", "FP4", "FP4"), ("FP8", "FP8", "FP8"), ("FP16", "FP16", "FP16"))
        counts: dict[str, int] = entry(found, tmp_path)["counts"]  # type: ignore[assignment]
        named = [count for name, count in counts.items() if name not in ("FP4 matrix products", "fallbacks")]
        assert min(named) >= 0
        assert sum(named) + sum(row.actual == "FP4" for row in found.layers) == len(found.layers), rows


@pytest.mark.parametrize(("requested", "actual"), [*itertools.product(HELD, (*HELD, "unknown"))])
def test_a_layer_of_any_quantised_precision_is_held_to_it(requested: str, actual: str, tmp_path: Path) -> None:
    found = ledger((requested, actual, actual), ("FP16", "FP16", "FP16"))
    missed = requested != "FP16" and actual != requested
    assert [row.layer for row in found.not_as_requested()] == ["layer0"] * missed
    assert found.totals().not_as_requested == entry(found, tmp_path)["not_as_requested"] == missed
    assert (f"1 layer requested {requested} and got another" in found.summary()) == missed
