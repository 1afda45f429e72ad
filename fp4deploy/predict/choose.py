"""The model to predict with where none was named: the latest run's NVFP4 model in the fastest form that runs here.

    with a GPU       engine, packed network, checkpoint; then ONNX Runtime on the CPU
    without one      decomposed ONNX, canonical ONNX, packed network (decoded), checkpoint

Models of other precision follow where the run has no NVFP4 model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp4deploy.bench.locate import run_artifacts
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.runs import MODELS, Run, latest_run

WITH_GPU = (".plan", ".fp4", ".safetensors", ".portable.onnx", ".onnx")
WITHOUT_GPU = (".portable.onnx", ".onnx", ".fp4", ".safetensors", ".plan")
PREFERRED = ("nvfp4", *(model for model in MODELS if model != "nvfp4"))


def candidates(run: Run, gpu: bool) -> list[Path]:
    """Artefacts of a run, the one to take first."""
    artifacts = run_artifacts(run)
    found = []
    for model in PREFERRED:
        for suffix in WITH_GPU if gpu else WITHOUT_GPU:
            if suffix == ".plan":
                found += run.engines(model)
                continue
            stems = (model,) if suffix == ".safetensors" else run.stems(model)
            found += [artifacts[name] for stem in stems if (name := f"{stem}{suffix}") in artifacts]
    return found


def best_runtime(skipped: Callable[[Path, str], None] | None = None) -> tuple[Path, Runtime]:
    """Open the first artefact of the latest run that this machine can run.

    Args:
        skipped: called with every artefact that this machine cannot run, and the reason.

    Raises:
        InputError: there is no run, or it has no artefact. UnavailableError: none of them runs here.
    """
    import torch

    run = latest_run()
    paths = candidates(run, torch.cuda.is_available())
    if not paths:
        raise InputError(f"{run.path} has no model yet. Continue with: fp4deploy train")
    for path in paths:
        try:
            return path, open_for_images(path)
        except UnavailableError as error:
            if skipped:
                skipped(path, str(error))
    raise UnavailableError(f"None of the artefacts of {run.path} can run on this machine.")
