"""Engines of every form that a model can have on one GPU: timed side by side (`bench --forms`), or the smallest.

Which form of an FP4 convolution is fastest depends on the GPU and on the network, and no cost model was checked against
one. So the forms are built and measured: NAME-auto.plan of every model, and of one that requests FP4 also
NAME-gemm.plan, NAME-fp8.plan and NAME-qdq.plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine.backends import BACKENDS
from fp4deploy.export.engine.build import BuildResult, PreparedEngine, build_engine
from fp4deploy.export.engine.compile import Progress
from fp4deploy.export.ledger.ledger import Ledger, load_ledger
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


def smallest(prepare: Callable[[str], PreparedEngine], progress: Progress | None = None) -> PreparedEngine:
    """The engine, of all forms of a network, whose plan has the fewest bytes; every form is compiled to know that.

    Args:
        prepare: gives the engine of a form.

    Raises:
        InputError: no form builds; the first one's reason.
    """
    first = prepare(FIRST)
    if not first.lowered.requests_fp4:
        return first
    sizes: list[tuple[int, PreparedEngine]] = []
    refused: list[InputError] = []
    for form in (FIRST, *OTHERS):
        try:
            engine = prepare(form)
            sizes.append((engine.plan_bytes(progress), engine))
        except InputError as error:
            refused.append(error)
    if not sizes:
        raise refused[0]
    return min(sizes, key=lambda pair: pair[0])[1]


def smaller_in_fp16(plan: Path, ledger: Ledger, is_smallest: bool = False) -> str:
    """Why a quantised plan is larger than the FP16 plan of the same network in its folder; "" where it is not.

    Where the folder has none: whether most of the plan is code, which FP16 has less of.

    is_smallest: no other form of the network has a smaller plan.
    """
    if ledger.precision == "fp16" or ledger.card is None:
        return ""
    offer = "No form is smaller." if is_smallest else "The form of the smallest plan: --conv smallest."
    compared = False
    alike = [ledger.backend, ledger.arch, ledger.batch, ledger.sizes, _network(ledger)]
    for path in sorted(plan.parent.glob("*.ledger.json")):
        try:
            other = load_ledger(path)
        except InputError:
            continue
        same = [other.backend, other.arch, other.batch, other.sizes, _network(other)] == alike
        if other.precision != "fp16" or not same:
            continue
        compared = True
        if other.plan_bytes < ledger.plan_bytes:
            return (
                f"{plan.name} is larger than the FP16 plan {other.plan}, {_megabytes(ledger.plan_bytes)} against "
                f"{_megabytes(other.plan_bytes)}: of it {_parts(ledger)}; of FP16's {_parts(other)}. "
                f"{offer}"
            )
    if compared or 2 * ledger.totals().constant_bytes > ledger.plan_bytes:
        return ""
    return (
        f"Of {plan.name} {_parts(ledger)}: the plan of FP16, with fewer, may be smaller. Build it into this folder "
        "to see."
    )


def _network(ledger: Ledger) -> list[object]:
    card = ledger.card or {}
    return [card.get(key) for key in ("architecture", "scale", "height", "width", "class_names", "digits")]


def _parts(ledger: Ledger) -> str:
    constants = ledger.totals().constant_bytes
    code = max(ledger.plan_bytes - constants, 0)
    return f"{_megabytes(constants)} are constants and {_megabytes(code)} {len(ledger.engine)} compiled kernels"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


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
