"""Parse an ONNX file and build a plan with TensorRT or TensorRT-RTX, in a process of its own.

Both libraries have the same Python API, so `compile_plan` takes the module. It runs in a child process: a compiler may
abort on a graph that it does not support, and Ctrl-C must stop it at once, while native code does not return to Python
to handle the signal. Every message of the library goes to the log file at once, so that a crash leaves the last ones.

The child imports nothing from the current folder, and ends with the parent (`fp4deploy.system.children`).

Exchange with the parent: JOB is a JSON file (`CompileJob`); the plan, the list of engine layers and a JSON answer are
written to the same folder.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fp4deploy.errors import Fp4DeployError, InputError, UnavailableError
from fp4deploy.export.engine import adapter, caches
from fp4deploy.export.engine.backend import Backend
from fp4deploy.export.engine.profile import Profile, Sizes
from fp4deploy.system.children import python_call, start

TAIL_LINES = 12


@dataclass(frozen=True)
class CompileJob:
    """One build: `batch` is (min, opt, max), `folder` holds the ONNX file and takes the results.

    `plugins`: the ONNX file has nodes of this project's plugins.
    `sizes`: (height, width) as (min, opt, max), where the file leaves them open.
    `options`: keys of `adapter.FLAGS`.
    """

    backend: str
    arch: str
    batch: tuple[int, int, int]
    folder: str
    plugins: bool = False
    sizes: Sizes | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> CompileJob:
        """What `dataclasses.asdict` and `json.dumps` made, with tuples again."""
        fields = json.loads(text)  # noqa: TID251  of the own process
        sizes = fields["sizes"] and tuple(tuple(size) for size in fields["sizes"])
        return cls(**{**fields, "batch": tuple(fields["batch"]), "sizes": sizes, "options": tuple(fields["options"])})

    @property
    def profile(self) -> Profile:
        """The shapes that the engine takes."""
        return Profile(self.batch, self.sizes)

    @property
    def progress(self) -> Path:
        """Phases of the builder as JSON lines."""
        return Path(self.folder, "progress.jsonl")

    @property
    def onnx(self) -> Path:
        """Lowered ONNX file, written by the parent."""
        return Path(self.folder, "lowered.onnx")

    @property
    def plan(self) -> Path:
        """Serialised engine."""
        return Path(self.folder, "engine.plan")

    @property
    def log(self) -> Path:
        """All messages of the library."""
        return Path(self.folder, "build.log")

    @property
    def answer(self) -> Path:
        """`CompileAnswer` as JSON, or {"error": ..., "exit_code": ...}."""
        return Path(self.folder, "answer.json")


@dataclass(frozen=True)
class CompileAnswer:
    """What the child reports: library version, seconds in the compiler, the list of engine layers and its origin.

    profile: (min, opt, max) shapes of every input with an open extent, as the library gives them back.
    """

    version: str
    seconds: float
    layers: str
    evidence: str
    profile: dict[str, list[list[int]]] = field(default_factory=dict)


# TensorRT-RTX 1.7 for sm120, 2026-11-29: networks of one attention with heads of 4 and 8 channels, and of 12 to 36.
NARROW_HEADS = (
    "it has no kernel for attention whose heads have 8 channels or fewer, as files of other exporters may have: "
    "export the network again, which pads its heads"
)


def compile_plan(trt: Any, backend: Backend, job: CompileJob, log: IO[str]) -> CompileAnswer:
    """Build `job.onnx` into `job.plan` with the module `trt`; writes nothing but the plan and the log.

    Raises:
        InputError: the parser or the compiler refuses the graph; the message quotes it.
        UnavailableError: the architecture cannot be built for on this machine.
    """
    messages: list[str] = []
    logger = _logger(trt, log, messages)
    if job.plugins:
        backend.add_plugins(trt, job.arch, job.onnx)
    builder = trt.Builder(logger)
    network = builder.create_network(adapter.network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(job.onnx.read_bytes()):
        errors = [_parser_error(parser.get_error(index)) for index in range(parser.num_errors)]
        raise InputError(f"{backend.title} cannot parse the model: {_brief(errors)}")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    backend.configure(trt, config, job.arch)
    adapter.set_flags(trt, config, job.options, backend.title)
    profile = _add_profile(builder, network, config, job.profile)
    cached = caches.entry("timing", backend.name, str(trt.__version__)) if backend.times_kernels else None
    before = caches.read(cached)
    if cached is not None:
        adapter.set_timing_cache(config, before)
    with job.progress.open("a", encoding="utf-8") as phases:
        monitor = adapter.monitor(trt, phases)
        if monitor is not None:
            config.progress_monitor = monitor
        start = time.perf_counter()
        serialized = builder.build_serialized_network(network, config)
        seconds = time.perf_counter() - start
    if serialized is not None and cached is not None:
        caches.keep(cached, adapter.timing_cache(config), before)
    if serialized is None:
        errors = [text for text in messages if text.startswith(("ERROR", "INTERNAL_ERROR"))]
        if job.options and not _gpu_present():
            flags = ", ".join(adapter.OPTIONS[option] for option in job.options)
            raise UnavailableError(
                f"{backend.title} cannot build with {flags} on this machine, which has no GPU: {_brief(errors)} "
                "Build without, or where there is a GPU."
            )
        raise InputError(f"{backend.title} cannot build this model for {job.arch}: {_brief(errors)}")
    plan = bytes(serialized)
    layers, evidence = backend.layers(trt, plan, messages)
    job.plan.write_bytes(plan)
    return CompileAnswer(str(trt.__version__), seconds, layers, evidence, profile)


def _gpu_present() -> bool:
    import torch

    return torch.cuda.is_available()


def _logger(trt: Any, log: IO[str], messages: list[str]) -> object:
    class Logger(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: object, message: str) -> None:
            text = f"{str(severity).rsplit('.', 1)[-1]} {message}"
            messages.append(text)
            log.write(text + "\n")
            log.flush()

    return Logger()


def _add_profile(builder: Any, network: Any, config: Any, wanted: Profile) -> dict[str, list[list[int]]]:
    """Give every input with an open extent its (min, opt, max) shapes; returns them as the library has them."""
    names = []
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = list(tensor.shape)
        shapes = wanted.shapes(shape, tensor.name)
        if -1 in shape:
            names.append(tensor.name)
            profile.set_shape(tensor.name, *shapes)
    if names:
        config.add_optimization_profile(profile)
    return {name: [list(shape) for shape in profile.get_shape(name)] for name in names}


def _parser_error(error: Any) -> str:
    return f"{error.desc()} (node {error.node_name() or error.node()}, operator {error.node_operator()})"


def _brief(errors: list[str]) -> str:
    """The library's own messages, on one line, cut to a readable length."""
    texts = [" ".join(text.split()) for text in errors if text.strip()]
    unique = list(dict.fromkeys(text.removeprefix("ERROR ") for text in texts))
    if any("Attention operation was not supported" in text for text in unique):
        unique.insert(0, NARROW_HEADS)
    return " | ".join(text[:300] for text in unique[:3]) or "no reason was given; see --log FILE"


Progress = Callable[[str, int, int], None]
POLL = 0.1  # seconds between two looks at the builder's progress


def run_child(job: CompileJob, progress: Progress | None = None) -> CompileAnswer:
    """Run `job` in a process of its own and read its answer.

    progress: is called with the builder's running phase, its steps done, and all of its steps.

    Raises:
        Fp4DeployError: what the child raised.
        InputError: the child died; the message carries the tail of its log.
    """
    path = Path(job.folder, "job.json")
    path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    command = python_call(__name__, "main", str(path))
    with Path(job.folder, "output.txt").open("wb") as output, start(command, output, subprocess.STDOUT) as child:
        code = child.wait() if progress is None else _watch(child, job.progress, progress)
    answer = json.loads(job.answer.read_text(encoding="utf-8")) if job.answer.is_file() else None  # noqa: TID251  of the own child
    if answer is None:
        raise InputError(_death_message(job, code))
    if "error" in answer:
        raise _ERRORS.get(answer["exit_code"], Fp4DeployError)(answer["error"])
    return CompileAnswer(**answer)


def _watch(child: Any, path: Path, progress: Progress) -> int:
    """Wait for the child, and say meanwhile how far the builder is."""
    steps: dict[str, int] = {}
    place = 0
    while True:
        try:
            code = child.wait(POLL)
        except subprocess.TimeoutExpired:
            code = None
        text = path.read_bytes()[place:] if path.is_file() else b""
        whole = text[: text.rfind(b"\n") + 1]
        place += len(whole)
        for line in map(json.loads, whole.splitlines()):  # noqa: TID251  of the own child
            phase = line["phase"]
            steps[phase] = line.get("steps", steps.get(phase, 0))
            if "done" in line:
                progress(phase, line["done"], steps[phase])
        if code is not None:
            return code


_ERRORS: dict[int, type[Fp4DeployError]] = {2: InputError, 3: UnavailableError}


def _death_message(job: CompileJob, code: int) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines: list[str] = []
    for path in (job.log, Path(job.folder, "output.txt")):
        if path.is_file():
            lines += [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][
                -TAIL_LINES:
            ]
    tail = "\n".join(f"  {line[:200]}" for line in lines[-TAIL_LINES:])
    return (
        f"The {job.backend} compiler {how} while building for {job.arch}; no engine was written. It may not support an "
        f"operator of this graph; try --conv qdq, and keep its whole log with --log FILE. Its last messages:\n{tail}"
    )


def main(path: str) -> int:
    """Entry of the child process: run the job of a JSON file and write the answer to the same folder."""
    from fp4deploy.export.engine.backends import BACKENDS

    job = CompileJob.from_json(Path(path).read_text(encoding="utf-8"))
    backend = BACKENDS[job.backend]
    try:
        with job.log.open("w", encoding="utf-8") as log:
            answer = dataclasses.asdict(compile_plan(backend.load(), backend, job, log))
    except Fp4DeployError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        answer = {"error": f"The engine could not be written: {error.strerror or error}.", "exit_code": 2}
    job.answer.write_text(json.dumps(answer), encoding="utf-8")
    return 0
