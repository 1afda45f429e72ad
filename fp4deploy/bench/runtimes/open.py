"""`open_runtime`: one interface to everything that runs a network: ONNX Runtime, torch, packed, TensorRT, TensorRT-RTX.

A runtime takes normalised images float32 [N, 3, H, W] and gives logits float32 [N, classes, H, W], both in host
memory, whatever it computes in; so accuracy is measured by the same code for every artefact. Its `time` measures
the network alone: input and output stay where the runtime computes (CUDA events on a GPU, a clock on a CPU).
A network of several inputs is called like its module: `runtime(a, b)` (`runtimes.ports`).

| file | runtime | where |
|---|---|---|
| `.onnx` | ONNX Runtime; canonical FP4 files through the portable lowering, in memory | CPU |
| canonical `.onnx`, provider "tensorrt-rtx" | ONNX Runtime's TensorRT-RTX provider | CUDA |
| `.safetensors` | torch with fake quantisation; fp16 autocast on CUDA, FP32 on the CPU | CUDA or CPU |
| `.fp4` | packed NVFP4 kernels; on the CPU the same numbers, decoded in torch | CUDA or CPU |
| `.plan` | the library that built it, named by its ledger; without a ledger, by its first bytes | CUDA |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fp4deploy.bench.runtimes.ports import require_one_input
from fp4deploy.bench.runtimes.protocol import TIMEOUT, OpenRuntime
from fp4deploy.errors import InputError

if TYPE_CHECKING:
    from fp4deploy.bench.runtimes.like import Like


def open_runtime(
    path: Path | str, timeout: float | None = None, provider: str = "cpu", form: str = "eager", rest: str | None = None
) -> OpenRuntime:
    """Load an artefact into the runtime its suffix asks for.

    timeout: most seconds that one inference of an `.onnx` file or an engine may take (default: 600); the graphs of
        other artefacts have no loops.
    provider: what runs an `.onnx` in ONNX Runtime, one of `PROVIDERS`.
    form: how torch runs a checkpoint, "eager", "graph", "compiled" or "max-autotune" (`runtimes.pytorch`).
    rest: of a checkpoint, as of `load_model`.

    Raises:
        InputError: the file is missing, of another kind, or broken; an unknown provider or form.
        UnavailableError: this machine cannot run it.

    >>> import numpy as np
    >>> runtime = open_runtime(checkpoint)
    >>> runtime.infer(np.zeros((1, 3, 32, 32), np.float32)).shape
    (1, 4, 32, 32)
    >>> runtime({"image": np.zeros((1, 3, 32, 32), np.float32)}).shape
    (1, 4, 32, 32)
    """
    path = Path(path)
    opener = RUNTIMES.get(path.suffix.lower())
    if opener is None:
        from fp4deploy.models.checkpoint import PICKLED, state_dict_advice

        if path.is_file() and path.suffix.lower() in PICKLED:
            raise InputError(state_dict_advice(path))
        raise InputError(
            f"{path} is of an unknown kind. Taken are .onnx (canonical or portable), .safetensors "
            "(a checkpoint), .fp4 (a packed network) and .plan (an engine); make one with: fp4deploy export"
        )
    if not path.is_file():
        raise InputError(f"There is no file {path}. Make one with: fp4deploy export, then fp4deploy build")
    if provider not in PROVIDERS:
        raise InputError(f"The provider '{provider}' is unknown. Valid: {', '.join(PROVIDERS)}.")
    if opener is _onnx:
        return _onnx(path, timeout) if provider == "cpu" else _onnx_rtx(path)
    if opener is _plan:
        return _plan(path, timeout)
    if opener is _checkpoint:
        return _checkpoint(path, form, rest)
    return opener(path)


def open_for_images(
    path: Path, timeout: float | None = None, provider: str = "cpu", form: str = "eager", like: Like | None = None,
    rest: str | None = None,
) -> OpenRuntime:  # fmt: skip
    """`open_runtime` of a network that takes images alone, as every command does.

    like: the card of an `.onnx` file that has none, in ONNX Runtime on the CPU.

    Raises:
        InputError: as of `open_runtime`; a network of several inputs, or another one than `like`.
    """
    path = Path(path)
    takes_like = like is not None and path.suffix.lower() == ".onnx" and provider == "cpu" and path.is_file()
    runtime = _onnx(path, timeout, like) if takes_like else open_runtime(path, timeout, provider, form, rest)
    require_one_input(runtime.inputs, path)
    return runtime


def _onnx(path: Path, timeout: float | None = None, like: Like | None = None) -> OpenRuntime:
    from fp4deploy.bench.runtimes.ort import OrtRuntime

    return OrtRuntime(path, TIMEOUT if timeout is None else timeout, like)


def _onnx_rtx(path: Path) -> OpenRuntime:
    from fp4deploy.bench.runtimes.ort_rtx import OrtRtxRuntime

    return OrtRtxRuntime(path)


def _checkpoint(path: Path, form: str = "eager", rest: str | None = None) -> OpenRuntime:
    from fp4deploy.bench.runtimes.pytorch import TorchRuntime

    return TorchRuntime(path, form=form, rest=rest)


def _packed(path: Path) -> OpenRuntime:
    from fp4deploy.bench.runtimes.packed import PackedRuntime

    return PackedRuntime(path)


def _plan(path: Path, timeout: float | None = None) -> OpenRuntime:
    from fp4deploy.bench.runtimes.tensorrt import open_plan

    return open_plan(path, TIMEOUT if timeout is None else timeout)


PROVIDERS = ("cpu", "tensorrt-rtx")  # of ONNX Runtime
RUNTIMES: dict[str, Callable[[Path], OpenRuntime]] = {
    ".onnx": _onnx,
    ".safetensors": _checkpoint,
    ".fp4": _packed,
    ".plan": _plan,
}
