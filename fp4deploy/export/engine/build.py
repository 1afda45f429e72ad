"""Build an engine from a canonical ONNX file: check, lower, compile, and write the plan with its ledger.

    unet.onnx -> checks (lowering.pattern) -> lowering (lowering.gemm or lowering.plugin) -> compiler, a process
    (compile)
              -> unet.plan + unet.ledger.json (ledger)

Nothing is written until all of it succeeded, and both files appear together; a failed or interrupted build leaves what
was there before.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from fp4deploy import provenance
from fp4deploy.about import ABOUT_KEY, about
from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError, UnavailableError, suggest
from fp4deploy.export.engine.adapter import OPTIONS
from fp4deploy.export.engine.backend import Backend
from fp4deploy.export.engine.backends import BACKENDS
from fp4deploy.export.engine.compile import CompileAnswer, CompileJob, Progress, run_child
from fp4deploy.export.engine.profile import Profile, Range, Sizes
from fp4deploy.export.ledger.actual import match_kernels
from fp4deploy.export.ledger.build_log import parse_engine_layers
from fp4deploy.export.ledger.ledger import Ledger, PlannedLayer, ledger_path, load_ledger
from fp4deploy.export.lowering.interface import Interface, with_interface
from fp4deploy.export.lowering.lower import LoweredModel, check_conv_mode, lower, read_buildable
from fp4deploy.export.onnx.canonical import metadata_object
from fp4deploy.export.onnx.size import fix_size, has_open_size
from fp4deploy.models.card import ModelCard
from fp4deploy.plugins.aot.store import supported
from fp4deploy.system.children import owned_folder
from fp4deploy.system.files import atomic_write, file_digest

PLAN_MAGIC = {b"vtrt": "tensorrt-rtx", b"ftrt": "tensorrt"}


@dataclass(frozen=True)
class BuildResult:
    """A finished build; `seconds` is the time in the compiler, `size_bytes` that of the plan."""

    plan: Path
    ledger_path: Path
    ledger: Ledger
    seconds: float
    size_bytes: int


def build_engine(
    onnx_path: Path | str,
    out: Path | str,
    backend: str = "tensorrt-rtx",
    arch: str | None = None,
    conv: str = "auto",
    strict: bool = False,
    batch: tuple[int, int, int] = (1, 1, 8),
    log: Path | None = None,
    size: tuple[int, int] | None = None,
    require_fp4: float | None = None,
    sizes: Sizes | None = None,
    interface: Interface | None = None,
    options: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> BuildResult:
    """Build a plan and its ledger from an ONNX file.

    Args:
        onnx_path: what `export_onnx` wrote (NVFP4 or FP16), or any FP16 ONNX file of opset 23 or below.
        out: the plan; its ledger is written to the same folder as <stem>.ledger.json.
        backend: "tensorrt-rtx" (any machine) or "tensorrt" (the GPU present).
        arch: such as "sm120"; by default sm120 for TensorRT-RTX and the GPU present for TensorRT.
        conv: form of FP4 convolutions, see `lowering`.
        strict: fail where a layer does not have the precision that it requests; then nothing is written.
        batch: smallest, most frequent and largest batch.
        log: keep the compiler's verbose log here, also of a failed build.
        size: height and width of the images, for a file that leaves them open.
        require_fp4: least share of the multiply-accumulates that FP4 tensor cores must do, 0 to 1; else as `strict`.
        sizes: smallest, most frequent and largest (height, width), for a file that leaves them open and an engine that
            takes all of them; not with `size`.
        interface: types and layouts of input and output, see `lowering.interface`; as in the file by default.
        options: "version_compatible", "stripped" (of weights, which are kept as NAME.weights.onnx and needed to load
            the engine), "refittable".
        progress: is called with the running phase of the compiler, its steps done, and all of its steps.

    Raises:
        InputError: a wrong value, a file that is no canonical ONNX, a graph that the compiler refuses.
        UnavailableError: the library or the GPU is missing.
        GateError: `strict`, and a layer is not as requested; or less than `require_fp4` is in FP4.

    >>> engine = build_engine(folder / "unet.onnx", folder / "unet.plan", arch="sm120")
    >>> engine.ledger_path.name
    'unet.ledger.json'
    """
    prepared = prepare_engine(onnx_path, backend, arch, conv, batch, size, sizes, interface, options)
    return prepared.build(out, strict, log, require_fp4, progress)


@dataclass(frozen=True)
class PreparedEngine:
    """An engine that is lowered and checked, and not compiled yet; nothing of it is written."""

    source: Path
    lowered: LoweredModel
    job: CompileJob
    conv: str
    interface: Interface
    about: dict[str, Any]

    def build(
        self,
        out: Path | str,
        strict: bool = False,
        log: Path | None = None,
        require_fp4: float | None = None,
        progress: Progress | None = None,
    ) -> BuildResult:
        """Compile it, and write plan and ledger; arguments and errors as of `build_engine`."""
        out = Path(out)
        BACKENDS[self.job.backend].require_installed()
        with owned_folder() as folder:
            job = replace(self.job, folder=str(folder))
            answer = _compile(self.lowered, job, log, progress)
            ledger = _ledger(self.source, out, self.lowered, job, answer, self.conv, self.interface)
            ledger = replace(ledger, about=self.about)
            if strict:
                ledger.require_requested()
            if require_fp4 is not None:
                ledger.require_fp4_share(require_fp4)
            _write(job, out, ledger)
        provenance.record("build", out, [self.source])
        return BuildResult(out, ledger_path(out), ledger, answer.seconds, ledger.plan_bytes)

    def plan_bytes(self, progress: Progress | None = None) -> int:
        """The size of its plan, which is compiled for it and not kept; errors as of `build_engine`."""
        BACKENDS[self.job.backend].require_installed()
        with owned_folder() as folder:
            job = replace(self.job, folder=str(folder))
            _compile(self.lowered, job, None, progress)
            return job.plan.stat().st_size


def prepare_engine(
    onnx_path: Path | str,
    backend: str = "tensorrt-rtx",
    arch: str | None = None,
    conv: str = "auto",
    batch: tuple[int, int, int] = (1, 1, 8),
    size: tuple[int, int] | None = None,
    sizes: Sizes | None = None,
    interface: Interface | None = None,
    options: tuple[str, ...] = (),
) -> PreparedEngine:
    """What of `build_engine` comes before the compiler, with its arguments and errors."""
    chosen, target = _check_choices(backend, arch, conv, batch, options)
    onnx_path, interface = Path(onnx_path), interface or Interface()
    profile = _profile(batch, size, sizes)
    usual = profile.sizes[1] if profile.sizes else None
    graph = _sized(read_buildable(onnx_path), onnx_path, size, usual)
    lowered = lower(graph, conv, backend, usual)
    if usual is not None and lowered.card is not None:  # the size that bench and predict give it
        lowered = replace(lowered, card={**lowered.card, "height": usual[0], "width": usual[1]})
    lowered = replace(lowered, model=with_interface(lowered.model, interface, lowered.card))
    if lowered.fp4 and target not in chosen.fp4_arches:
        raise InputError(
            f"{onnx_path} holds FP4 layers, and {target} has no FP4 tensor cores that {chosen.title} can use. "
            f"Valid --arch values for it: {', '.join(chosen.fp4_arches)}; or build the FP16 model."
        )
    plugins = any(layer.form == "plugin" for layer in lowered.layers)
    if plugins:
        supported(target)
    job = CompileJob(chosen.name, target, batch, "", plugins, profile.sizes, options)
    return PreparedEngine(onnx_path, lowered, job, conv, interface, _about(graph, lowered.card))


def open_plan(plan: Path) -> Ledger:
    """Ledger of a plan, checked to belong to it: says backend, arch and model card before any library is loaded.

    Raises:
        InputError: the file is missing, is no plan, has no ledger, or is not the plan the ledger was written for.
    """
    plan = Path(plan)
    if not plan.is_file():
        raise InputError(f"{plan} does not exist. Build it with: fp4deploy build MODEL.onnx --out {plan}")
    with plan.open("rb") as file:
        magic = file.read(4)
    if magic not in PLAN_MAGIC:
        raise InputError(f"{plan} is not an engine plan. Build one with: fp4deploy build MODEL.onnx")
    ledger_file = ledger_path(plan)
    if not ledger_file.is_file():
        raise InputError(
            f"{plan} has no ledger ({ledger_file.name}) in its folder, which has its GPU and input. Keep "
            "the two files together, or build it again with: fp4deploy build MODEL.onnx"
        )
    ledger = load_ledger(ledger_file)
    if ledger.plan_bytes != plan.stat().st_size or ledger.plan_sha256 != file_digest(plan):
        raise InputError(
            f"{plan} is not the plan that {ledger_file.name} was written for. Build it again: fp4deploy build"
        )
    return ledger


def require_device(ledger: Ledger, capability: tuple[int, int] | None) -> None:
    """Refuse a plan that the GPU present cannot run; `capability` is (major, minor), None without a GPU.

    A TensorRT-RTX plan runs on its own generation from its own capability on (sm120 on 12.0 and 12.1); a TensorRT plan
    on the capability it was built on.

    Raises:
        UnavailableError: one sentence that says which GPU is needed and which is present.
    """
    need = Architecture.parse(ledger.arch)
    present = Architecture(*capability) if capability is not None else None
    same = present is not None and present.major == need.major and present >= need
    if not same or (ledger.backend == "tensorrt" and present != need):
        here = "no GPU" if present is None else f"a GPU of {present}"
        raise UnavailableError(
            f"{ledger.plan} was built for {ledger.arch} ({ledger.backend}), and this machine has {here}."
        )


def _about(graph: onnx.ModelProto, card: dict[str, object] | None) -> dict[str, object]:
    """Where an engine comes from: this version, and the checkpoint that its source names."""
    checkpoint = (metadata_object(graph, ABOUT_KEY) or {}).get("checkpoint_sha256")
    known = isinstance(checkpoint, str) and re.fullmatch("[0-9a-f]{64}", checkpoint)
    found = ModelCard.from_json(json.dumps(card), "The model card of the file") if card else None
    return about(found, checkpoint if known else None)


def _profile(batch: Range, size: tuple[int, int] | None, sizes: Sizes | None) -> Profile:
    if sizes is not None and size is not None:
        raise InputError("--size is one image size, and --min-size to --max-size are a range: give one or the other.")
    if sizes is not None and len(set(sizes)) == 1:
        raise InputError("The smallest and the largest image size are the same; give it as --size HxW.")
    return Profile(batch, sizes)


def _sized(
    model: onnx.ModelProto, path: Path, size: tuple[int, int] | None, usual: tuple[int, int] | None
) -> onnx.ModelProto:
    if size is not None:
        return fix_size(model, size)
    if has_open_size(model) != (usual is not None):
        raise InputError(
            f"An engine is built for one image size, and {path} leaves height and width open. Give one: --size HxW; or "
            "build for a range, with --min-size, --opt-size and --max-size."
            if usual is None
            else f"{path} has one image size, so the engine has no range. Export one with: fp4deploy export "
            "--dynamic-size"
        )
    return model


def _check_choices(
    backend: str, arch: str | None, conv: str, batch: tuple[int, int, int], options: tuple[str, ...]
) -> tuple[Backend, str]:
    chosen = _backend(backend)
    check_conv_mode(conv, backend)
    target = check_arch(arch, backend) if arch is not None else None
    Profile(batch)
    lacking = [OPTIONS[option] for option in options if option not in chosen.options]
    if lacking:
        raise InputError(
            f"{chosen.title} does not offer {', '.join(lacking)}: its package has no lean runtime, and its engines run "
            "on every GPU of their generation. Leave it out, or use --backend tensorrt."
        )
    return chosen, target if target is not None else target_arch(backend)


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise InputError(f"--backend {name} is unknown.{suggest(name, BACKENDS)} Valid values: {', '.join(BACKENDS)}.")
    return BACKENDS[name]


def target_arch(backend: str = "tensorrt-rtx", arch: str | None = None) -> str:
    """The architecture that `build_engine` builds for: `arch`, or the library's default.

    Raises:
        InputError: there is no such library, or it builds no engine for `arch`.
        UnavailableError: no `arch` is given, and the library is not installed or there is no GPU.
    """
    chosen = _backend(backend)
    if arch is not None:
        return check_arch(arch, backend)
    chosen.require_installed()
    return chosen.default_arch()


def check_arch(arch: str, backend: str = "tensorrt-rtx") -> str:
    """The architecture's own name.

    Raises:
        InputError: the library builds no engine for it.
    """
    chosen = BACKENDS[backend]
    target = str(Architecture.find(arch))
    if target not in chosen.arches:
        raise InputError(
            f"--arch {arch} is unknown to {chosen.title}.{suggest(arch, chosen.arches)} "
            f"Valid values: {', '.join(chosen.arches)}."
        )
    return target


def _compile(lowered: LoweredModel, job: CompileJob, log: Path | None, progress: Progress | None) -> CompileAnswer:
    onnx.save(lowered.model, job.onnx)
    try:
        return run_child(job, progress)
    finally:
        if log is not None and job.log.is_file():
            with atomic_write(Path(log)) as temporary:
                shutil.copyfile(job.log, temporary)


def _ledger(
    onnx_path: Path,
    out: Path,
    lowered: LoweredModel,
    job: CompileJob,
    answer: CompileAnswer,
    conv: str,
    interface: Interface,
) -> Ledger:
    engine = parse_engine_layers(answer.layers)
    layers = lowered.layers if job.arch in BACKENDS[job.backend].fp4_arches else decoded(lowered.layers, job.arch)
    return Ledger(
        backend=job.backend,
        backend_version=answer.version,
        arch=job.arch,
        conv=conv,
        evidence=answer.evidence,
        source=onnx_path.name,
        source_sha256=file_digest(onnx_path),
        plan=out.name,
        plan_sha256=file_digest(job.plan),
        plan_bytes=job.plan.stat().st_size,
        build_seconds=round(answer.seconds, 3),
        batch=job.batch,
        card=lowered.card,
        layers=match_kernels(layers, engine),
        engine=engine,
        sizes=job.sizes,
        interface=None if interface.as_in_file else interface.to_json(),
        options=job.options,
    )


def decoded(layers: Iterable[PlannedLayer], arch: str) -> tuple[PlannedLayer, ...]:
    """The plan for a GPU without FP4 tensor cores: plugins read packed operands there and multiply them in FP16."""
    return tuple(
        dataclasses.replace(layer, compute="FP16", reason=f"{layer.reason}; {arch} decodes to FP16 in registers")
        if layer.form == "plugin"
        else layer
        for layer in layers
    )


def weights_path(plan: Path) -> Path:
    """Where the weights of a stripped plan lie: engines/unet.plan -> engines/unet.weights.onnx."""
    return plan.with_name(f"{plan.stem}.weights.onnx")


def _write(job: CompileJob, out: Path, ledger: Ledger) -> None:
    """Put plan and ledger in place together; of a stripped plan also the graph that has its weights."""
    if "stripped" in job.options:
        with atomic_write(weights_path(out)) as weights:
            shutil.copyfile(job.onnx, weights)
    with atomic_write(out) as plan, atomic_write(ledger_path(out)) as text:
        shutil.copyfile(job.plan, plan)
        text.write_text(ledger.to_json(), encoding="utf-8")
