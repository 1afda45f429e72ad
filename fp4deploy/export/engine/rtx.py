"""TensorRT for RTX: builds engines for GeForce RTX and DGX Spark on any machine, with or without a GPU.

`set_compute_capability` aims the compiler at a GPU that need not be present. What it cannot do without one: load the
engine again (so no engine inspector) and strip the plan. The actual precision comes from the verbose build log
instead. FP4 graphs build for SM120 and SM121 only; there are no plugins. Measured with TensorRT-RTX 1.7.1.
"""

from __future__ import annotations

from typing import Any

from fp4deploy.export.engine.backend import Backend

ARCHES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")


def configure(trt: Any, config: Any, arch: str) -> None:
    """Aim the build at one compute capability, present or not."""
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, arch.upper()), 0)


def engine_layers(trt: object, plan: bytes, messages: list[str]) -> tuple[str, str]:
    """The list of engine layers out of the build log, where verbosity DETAILED puts it."""
    return "\n".join(text for text in messages if "LayerType: " in text), "build log"


def default_arch() -> str:
    """GeForce RTX 50, the smallest Blackwell."""
    return "sm120"


BACKEND = Backend(
    name="tensorrt-rtx",
    title="TensorRT-RTX",
    package="tensorrt_rtx",
    arches=ARCHES,
    fp4_arches=("sm120", "sm121"),
    default_arch=default_arch,
    configure=configure,
    layers=engine_layers,
    options=("stripped", "refittable"),
)
