"""What differs between TensorRT 10.8 to 11.4 and TensorRT-RTX 1.x, in one place.

| | TensorRT 10.x | TensorRT 11.x | TensorRT-RTX 1.7 |
|---|---|---|---|
| strongly typed | a flag | always | always |
| version-compatible plan | flag | flag | flag, refused: its wheel has no lean runtime |
| stripped of weights, refittable | flags | flags | flags, on a machine with a GPU |
| timing cache | measured times of kernels | the same | none: kernels are compiled when the engine is loaded |
| runtime cache | none | none | compiled kernels, kept by the application |
| progress | IProgressMonitor | the same | the same |

A capability is asked of the module, never of its version. The rows of TensorRT are from its bindings' API and were not
run; those of TensorRT-RTX were tried with 1.7.1, on a machine without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from fp4deploy.errors import UnavailableError

FLAGS = {"version_compatible": "VERSION_COMPATIBLE", "stripped": "STRIP_PLAN", "refittable": "REFIT"}
OPTIONS = {"version_compatible": "--version-compatible", "stripped": "--strip-weights", "refittable": "--refittable"}


def network_flags(trt: Any) -> int:
    """STRONGLY_TYPED where it is an option (10.x); 11.x and RTX know nothing else."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def set_flags(trt: Any, config: Any, options: tuple[str, ...], title: str) -> None:
    """Set the builder flags of `options`, keys of `FLAGS`.

    Raises:
        UnavailableError: this library has no such flag.
    """
    for option in options:
        flag = getattr(getattr(trt, "BuilderFlag", None), FLAGS[option], None)
        if flag is None:
            raise UnavailableError(f"{title} {trt.__version__} does not offer {OPTIONS[option]}.")
        config.set_flag(flag)


def monitor(trt: object, log: IO[str]) -> object:
    """An IProgressMonitor that writes a JSON line for every phase and step; None where the library has none.

    Its methods are called from several threads, and a line is one write.
    """
    base = getattr(trt, "IProgressMonitor", None)
    if base is None:
        return None

    class Monitor(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._write({"phase": phase_name, "parent": parent_phase, "steps": num_steps, "done": 0})

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._write({"phase": phase_name, "done": step + 1})
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._write({"phase": phase_name, "finished": True})

        @staticmethod
        def _write(line: dict[str, object]) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

    return Monitor()


def set_timing_cache(config: Any, content: bytes) -> None:
    """Give the builder the times of earlier builds; those that it does not take are left out."""
    if not config.set_timing_cache(config.create_timing_cache(content), ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def timing_cache(config: Any) -> bytes:
    """The times of this build and of those before."""
    return bytes(config.get_timing_cache().serialize())


def runtime_cache(engine: object, content: bytes) -> tuple[object, object]:
    """(runtime configuration, cache) of a TensorRT-RTX engine, with what an earlier process compiled.

    (None, None) where the library has no runtime cache.
    """
    if not hasattr(engine, "create_runtime_config"):
        return None, None
    config = engine.create_runtime_config()
    if not hasattr(config, "create_runtime_cache"):
        return None, None
    cache = config.create_runtime_cache()
    if content:
        cache.deserialize(content)
    config.set_runtime_cache(cache)
    return config, cache


def refit(trt: Any, engine: Any, logger: Any, onnx: Path) -> None:
    """Fill the weights of a stripped engine from the ONNX file that it was built of.

    Raises:
        UnavailableError: the library refuses them.
    """
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(onnx)) or not refitter.refit_cuda_engine():
        raise UnavailableError(f"The weights of {onnx} do not fit the engine; build it again with: fp4deploy build")
