"""Engines of every form that a model can have on one GPU, to be timed side by side (`bench --forms`).

Which form of an FP4 convolution is fastest depends on the GPU and on the network, and no cost model was checked against
one. So the forms are built and measured: NAME-auto.plan of every model, and of one that requests FP4 also
NAME-gemm.plan, NAME-fp8.plan and NAME-qdq.plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine.backends import BACKENDS
from fp4deploy.export.engine.build import BuildResult, build_engine
from fp4deploy.export.onnx.layers import inspect_onnx
from fp4deploy.requirements import LIBRARIES, reasons

FIRST, OTHERS = "auto", ("gemm", "fp8", "qdq")


def backend_for(arch: str) -> str:
    """The library that builds engines with FP4 for a GPU.

    Raises:
        UnavailableError: none does, or it is not installed.
    """
    able = [backend for backend in BACKENDS.values() if arch in backend.fp4_arches]
    missing = {backend.name: LIBRARIES[backend.package].why_missing() for backend in able}
    for name, reason in missing.items():
        if not reason:
            return name
    raise UnavailableError(
        reasons(*missing.values()) or f"No library builds engines with FP4 for {arch}: that needs SM100 or later."
    )


def expected(models: Sequence[Path]) -> list[str]:
    """File names of the engines that `build_forms` would build of canonical ONNX files.

    Raises:
        InputError: a file is no canonical ONNX.
    """
    names = []
    for model in models:
        quantised = any(layer.precision == "FP4" for layer in inspect_onnx(model))
        forms = (FIRST, *OTHERS) if quantised else (FIRST,)
        names += [f"{model.stem}-{form}.plan" for form in forms]
    return names


def build_forms(
    models: Sequence[Path], folder: Path, backend: str, arch: str, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Path], dict[str, str]]:
    """Build all engines into a folder.

    Args:
        models: canonical ONNX files.
        say: gets a line for each engine, and the reason of one that does not build.

    Returns:
        The plans, in the order of the models; and the names of those that did not build, each with the reason.

    Raises:
        UnavailableError: the library or the GPU is missing.
    """
    plans: list[Path] = []
    refused: dict[str, str] = {}

    def add(model: Path, form: str) -> BuildResult | None:
        target = folder / f"{model.stem}-{form}.plan"
        try:
            built = build_engine(model, target, backend, arch, form)
        except InputError as error:
            refused[target.name] = str(error)
            say(f"{target.name} was not built: {error}")
            return None
        say(f"{target.name}: {built.ledger.summary()}")
        plans.append(built.plan)
        return built

    for model in models:
        first = add(model, FIRST)
        if first is not None and any(row.requested == "FP4" for row in first.ledger.layers):
            for form in OTHERS:
                add(model, form)
    return plans, refused
