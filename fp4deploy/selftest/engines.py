"""Engines: built from the canonical file, run against ONNX Runtime, and their ledgers against a profile.

An engine is built on any machine that has TensorRT-RTX, and with TensorRT on a GPU with FP4 tensor cores. It runs on
the GPU that it was built for alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fp4deploy.bench.runtimes.ort import OrtRuntime
from fp4deploy.bench.runtimes.tensorrt import TensorRtRuntime, open_plan
from fp4deploy.errors import GateError, UnavailableError
from fp4deploy.export.engine.backends import BACKENDS
from fp4deploy.export.engine.build import BuildResult
from fp4deploy.export.ledger.ledger import LedgerRow
from fp4deploy.models.meaning import known_outputs
from fp4deploy.requirements import LIBRARIES, reasons
from fp4deploy.selftest.context import Context
from fp4deploy.selftest.proof import Proof

AGREEMENT = 0.98  # of what the output means; FP16 instead of FP32 activations alone give 0.996 (see `context`)


@lru_cache(maxsize=1)
def engine(context: Context) -> BuildResult:
    """The engine of this machine: for its GPU where a library builds for it, else for SM120.

    Raises:
        UnavailableError: no library builds one here.
    """
    arch = str(context.architecture) if context.architecture else None
    missing = {name: LIBRARIES[backend.package].why_missing() for name, backend in BACKENDS.items()}
    for name, backend in BACKENDS.items():
        if arch in backend.fp4_arches and not missing[name]:
            return context.build(name, str(arch))
    if missing["tensorrt-rtx"]:
        raise UnavailableError(reasons(*missing.values()) or "no library builds engines here")
    return context.build("tensorrt-rtx", "sm120")


def build(context: Context) -> Proof:
    """An engine in which no layer fell back from its planned precision.

    Raises:
        GateError: one did.
        UnavailableError: no library builds one here.
    """
    built = engine(context)
    built.ledger.require_no_fallback()
    figures: dict[str, Any] = {"layers": len(built.ledger.layers), "bytes": built.size_bytes}
    figures["FP4 share of multiply-accumulates"] = round(built.ledger.totals().fp4_mac_share, 4)
    where = f"{built.ledger.backend} {built.ledger.backend_version} for {built.ledger.arch}"
    return Proof(f"{where}: {built.ledger.summary()}", figures)


def run(context: Context) -> Proof:
    """The engine's outputs against those of the decomposed graph in ONNX Runtime, in what they mean.

    Raises:
        GateError: they differ on more of it than rounding explains.
        UnavailableError: the engine cannot run here.
    """
    runtime = opened(context)
    images = context.images.numpy()
    portable = context.exported.portable_path
    assert portable is not None
    found, expected = runtime.infer(images), OrtRuntime(portable).infer(images)
    pair = torch.from_numpy(expected), torch.from_numpy(found)
    (meaning,) = known_outputs(runtime.card).of(pair[:1], ["logits"])
    share = float(meaning.agreeing(*pair).float().mean())
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not share >= AGREEMENT:
        raise GateError(
            f"{meaning.compared} equal on {100 * share:.3f} % of {meaning.unit} only; relative error of the logits "
            f"{error:.3g}"
        )
    text = f"{runtime.name}: {meaning.compared} equal to ONNX Runtime's on {100 * share:.3f} % of {meaning.unit}"
    return Proof(text, {"agreement": share, "relative error of the logits": error})


def profile(context: Context) -> Proof:
    """The kernels of the ledger's FP4 layers are among those that the library's profiler names.

    Raises:
        GateError: one is not.
        UnavailableError: the engine cannot run here.
    """
    ran = opened(context).profile(context.images[:1].numpy())
    rows = [row for row in engine(context).ledger.layers if row.actual == "FP4"]
    absent = missing_rows(rows, ran)
    if absent:
        raise GateError(
            f"{len(absent)} of {len(rows)} FP4 layers have no kernel in the profile, the first is {absent[0]}; the "
            f"profile names {', '.join(list(ran)[:5])}, ..."
        )
    share = sum(time for name, time in ran.items() if any(name in row.kernels for row in rows)) / sum(ran.values())
    return Proof(
        f"the kernels of {len(rows)} FP4 layers ran, {100 * share:.0f} % of the time of {len(ran)} kernels",
        {"FP4 layers": len(rows), "kernels": len(ran), "FP4 share of the time": round(share, 4)},
    )


def missing_rows(rows: list[LedgerRow], ran: dict[str, float]) -> list[str]:
    """Layers none of whose kernels ran."""
    return [row.layer for row in rows if not any(kernel in ran for kernel in row.kernels)]


def opened(context: Context) -> TensorRtRuntime:
    """The engine, loaded.

    Raises:
        UnavailableError: it cannot run here.
    """
    return open_plan(engine(context).plan)
