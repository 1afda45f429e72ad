"""TensorRT (10.8 .. 11.x): builds for the GPU it runs on.

The API is that of TensorRT-RTX but for the target: there is no `set_compute_capability`, tactics are timed on the GPU
present, so `--arch` must name that GPU. 10.x is told to be strongly typed, 11.x always is; precision is decided in the
graph. FP4 needs SM100 or later, and only GEMMs run in it; `--conv plugin` brings convolutions, also for older
GPUs, where they decode. The list of engine layers comes from the engine inspector, whose ONELINE format is the one of
the build log.

Written against the API of the 10.8 to 11.4 bindings; not run so far, for want of a machine with the full library.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fp4deploy.architecture import Architecture
from fp4deploy.errors import UnavailableError
from fp4deploy.export.engine.backend import Backend

ARCHES = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")
FP4_ARCHES = ("sm100", "sm103", "sm110", "sm120", "sm121")
ELSEWHERE = "To build on a machine without that GPU use: fp4deploy build MODEL.onnx --backend tensorrt-rtx --arch sm120"


def present_arch() -> str | None:
    """Architecture of the first GPU of this machine, such as "sm100"; None without one."""
    import torch

    return str(Architecture.of_device(0)) if torch.cuda.is_available() else None


def default_arch() -> str:
    """The GPU present, the only one TensorRT can build for.

    Raises:
        UnavailableError: there is none.
    """
    arch = present_arch()
    if arch is None:
        raise UnavailableError(f"TensorRT builds for the GPU it runs on, and this machine has none. {ELSEWHERE}")
    return arch


def configure(trt: object, config: object, arch: str) -> None:
    """Check that the GPU present is the one asked for; TensorRT has no other target.

    Raises:
        UnavailableError: it is another one, or there is none.
    """
    present = default_arch()
    if present != arch:
        raise UnavailableError(
            f"TensorRT builds for the GPU it runs on, which is {present}, not {arch}. Give --arch {present}. "
            f"{ELSEWHERE}"
        )


def add_plugins(trt: Any, arch: str, onnx: Path) -> None:
    """Compile the kernels of the plugins in an ONNX file, then register the plugins with TensorRT.

    In this order, so that a kernel that does not compile is an error of this project and not one inside TensorRT, which
    asks for kernels while it times layers; by then they come from the cache.

    Raises:
        InputError: there are no kernels for this architecture.
        UnavailableError: a kernel does not compile here, or this TensorRT has no such plugins.
    """
    from fp4deploy.export.engine.plugin_nodes import plugin_nodes
    from fp4deploy.plugins.tensorrt import register_plugins
    from fp4deploy.plugins.tensorrt.kernels import node_kernels

    try:
        trtp = importlib.import_module(f"{trt.__name__}.plugin")
    except (ImportError, AttributeError) as error:
        raise UnavailableError(
            f"TensorRT {trt.__version__} has no Python plugins ({error}). Install a newer one: "
            "pip install --upgrade tensorrt"
        ) from None
    for node in plugin_nodes(onnx):
        node_kernels(node.plugin, node.attributes, arch)
    register_plugins(trt, trtp, arch)


def engine_layers(trt: Any, plan: bytes, messages: list[str]) -> tuple[str, str]:
    """The list of engine layers from the engine inspector, on the GPU that the plan was built for.

    Raises:
        UnavailableError: the plan cannot be loaded.
    """
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise UnavailableError("TensorRT built the engine but cannot load it on this GPU; see the log with --log FILE.")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.ONELINE)
    return text, "engine inspector"


BACKEND = Backend(
    name="tensorrt",
    title="TensorRT",
    package="tensorrt",
    arches=ARCHES,
    fp4_arches=FP4_ARCHES,
    default_arch=default_arch,
    configure=configure,
    layers=engine_layers,
    plugins=add_plugins,
    times_kernels=True,
)
