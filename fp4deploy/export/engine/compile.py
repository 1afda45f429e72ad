"""Parse an ONNX file and build a plan with TensorRT or TensorRT-RTX, in a process of its own.

Both libraries have the same Python API, so `compile_plan` takes the module. It runs in a child process: a compiler may
abort on a graph that it does not support, and Ctrl-C must stop it at once, while native code does not return to Python
to handle the signal. Every message of the library goes to the log file at once, so that a crash leaves the last ones.

The child imports nothing from the current folder, and ends with the parent (`fp4deploy.children`).

Exchange with the parent: JOB is a JSON file (`CompileJob`); the plan, the list of engine layers and a JSON answer are
written to the same folder.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fp4deploy.children import python_call, start
from fp4deploy.errors import Fp4DeployError, InputError, UnavailableError
from fp4deploy.export.engine.backend import Backend

TAIL_LINES = 12


@dataclass(frozen=True)
class CompileJob:
    """One build: `batch` is (min, opt, max), `folder` holds the ONNX file and takes the results.

    `plugins`: the ONNX file has nodes of this project's plugins.
    """

    backend: str
    arch: str
    batch: tuple[int, int, int]
    folder: str
    plugins: bool = False

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
    """What the child reports: library version, seconds in the compiler, the list of engine layers and its origin."""

    version: str
    seconds: float
    layers: str
    evidence: str


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
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(job.onnx.read_bytes()):
        errors = [_parser_error(parser.get_error(index)) for index in range(parser.num_errors)]
        raise InputError(f"{backend.title} cannot parse the model: {_brief(errors)}")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    backend.configure(trt, config, job.arch)
    _add_profile(builder, network, config, job.batch)
    start = time.perf_counter()
    serialized = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - start
    if serialized is None:
        errors = [text for text in messages if text.startswith(("ERROR", "INTERNAL_ERROR"))]
        raise InputError(f"{backend.title} cannot build this model for {job.arch}: {_brief(errors)}")
    plan = bytes(serialized)
    layers, evidence = backend.layers(trt, plan, messages)
    job.plan.write_bytes(plan)
    return CompileAnswer(str(trt.__version__), seconds, layers, evidence)


def _network_flags(trt: Any) -> int:
    """STRONGLY_TYPED where it is an option (10.x); 11.x and RTX know nothing else."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _logger(trt: Any, log: IO[str], messages: list[str]) -> Any:
    class Logger(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, message: str) -> None:
            text = f"{str(severity).rsplit('.', 1)[-1]} {message}"
            messages.append(text)
            log.write(text + "\n")
            log.flush()

    return Logger()


def _add_profile(builder: Any, network: Any, config: Any, batch: tuple[int, int, int]) -> None:
    """Give every dynamic extent the batch range; only the batch may vary in our files."""
    dynamic = False
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = list(tensor.shape)
        if -1 in shape[1:]:
            raise InputError(
                f"Input '{tensor.name}' has shape {shape}: height and width must be fixed, only the batch may vary. "
                "Export it again: fp4deploy export --format onnx"
            )
        if -1 in shape:
            dynamic = True
            profile.set_shape(tensor.name, *([size, *shape[1:]] for size in batch))
    if dynamic:
        config.add_optimization_profile(profile)


def _parser_error(error: Any) -> str:
    return f"{error.desc()} (node {error.node_name() or error.node()}, operator {error.node_operator()})"


def _brief(errors: list[str]) -> str:
    """The library's own messages, on one line, cut to a readable length."""
    texts = [" ".join(text.split()) for text in errors if text.strip()]
    unique = list(dict.fromkeys(text.removeprefix("ERROR ") for text in texts))
    return " | ".join(text[:300] for text in unique[:3]) or "no reason was given; see --log FILE"


def run_child(job: CompileJob) -> CompileAnswer:
    """Run `job` in a process of its own and read its answer.

    Raises:
        Fp4DeployError: what the child raised.
        InputError: the child died; the message carries the tail of its log.
    """
    path = Path(job.folder, "job.json")
    path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    command = python_call(__name__, "main", str(path))
    with Path(job.folder, "output.txt").open("wb") as output, start(command, output, subprocess.STDOUT) as child:
        code = child.wait()
    answer = json.loads(job.answer.read_text(encoding="utf-8")) if job.answer.is_file() else None  # noqa: TID251  of the own child
    if answer is None:
        raise InputError(_death_message(job, code))
    if "error" in answer:
        raise _ERRORS.get(answer["exit_code"], Fp4DeployError)(answer["error"])
    return CompileAnswer(**answer)


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

    fields = json.loads(Path(path).read_text(encoding="utf-8"))  # noqa: TID251  of the own child
    job = CompileJob(**{**fields, "batch": tuple(fields["batch"])})
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
