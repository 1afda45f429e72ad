"""What the contract tests need from inside the package, and the only file here whose imports may follow a move.

Everything else in this folder imports public names: `fp4deploy.formats`, `.qat`, `.plugins`, `.export`, `torch.ops`
and the command line. The functions below return plain data, so that a rename inside the package ends here.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
KERNEL_PACKAGES = ("fp4deploy.plugins", "fp4deploy.native")
CAPABILITIES = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120a"}  # Triton's name: nvcc's name


def command_line() -> Any:
    """The module of the command line, of an installation or of a plain checkout."""
    try:
        return importlib.import_module("fp4deploy.cli.main")
    except ModuleNotFoundError:
        sys.path.insert(0, str(ROOT))
        return importlib.import_module("cli.main")


def commands() -> dict[str, Any]:
    """Every command by its full name, and "" for the options of the program itself."""
    import typer.main

    def walk(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, command in getattr(group, "commands", {}).items():
            yield f"{prefix}{name}", command
            yield from walk(command, f"{prefix}{name} ")

    program = typer.main.get_command(command_line().app)
    return {"": program, **dict(walk(program, ""))}


def import_every_kernel_module() -> None:
    """Register all operators of `torch.ops.fp4deploy`; modules of kernels in Triton need Triton."""
    for package in KERNEL_PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "triton":
                    raise


def unet(classes: int, scale: float) -> nn.Module:
    """The UNet, with whatever weights."""
    from fp4deploy.models import build_unet

    return build_unet(classes, scale)


def save_checkpoint(path: Path, model: nn.Module, recipe: str | None, classes: int, scale: float, size: int) -> None:
    """Write a checkpoint with a model card."""
    from fp4deploy.models import ModelCard, save_checkpoint

    names = tuple(f"class {number}" for number in range(classes))
    rgb = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    card = ModelCard("nvfp4" if recipe else "fp16", scale, names, size, size, *rgb, False, recipe)
    save_checkpoint(path, model, card)


def tensorrt_plugins() -> tuple[str, str, dict[str, Any]]:
    """Namespace, version and plugins by name; a plugin has inputs, outputs, attributes, types()."""
    from fp4deploy.plugins.tensorrt import NAMESPACE, PLUGINS, VERSION

    return NAMESPACE, VERSION, dict(PLUGINS)


def decoded_weights(path: Path) -> dict[str, torch.Tensor]:
    """Layer -> weight of a packed network, float32, as its products see it."""
    from fp4deploy.packed import PackedNetwork, read_packed

    network = PackedNetwork(read_packed(path))
    packed = {name: weight.dequantize(torch.float32) for name, weight in network._packed.items()}
    decoded = {name: weight.float() for (name, _), weight in network._wide.items()}  # of layers without a kernel
    return packed | decoded | {name: weight.float() for name, weight in network._plain.items()}


@contextmanager
def short_measurements() -> Iterator[None]:
    """Time artefacts with as few calls as `bench` ever makes."""
    from fp4deploy.bench import artifact, latency

    with mock.patch.object(artifact, "measure", partial(latency.measure, max_seconds=0.0)):
        yield


def run_packed(path: Path, images: torch.Tensor) -> torch.Tensor:
    """Logits [N, classes, H, W] of a packed network on the CPU."""
    from fp4deploy.packed import PackedNetwork, read_packed

    return PackedNetwork(read_packed(path))(images)


def nvcc() -> Path | None:
    """The CUDA compiler."""
    from fp4deploy.plugins.runtime import nvcc as compiler

    return compiler.find_nvcc()


def nvcc_version(program: Path) -> str:
    """Such as "V13.0.88"."""
    from fp4deploy.plugins.runtime import nvcc as compiler

    return next(word for word in compiler.nvcc_version(program).split() if word.startswith("V"))


def supported(program: Path, arch: str) -> bool:
    """Whether this nvcc knows an architecture."""
    from fp4deploy.plugins.runtime import nvcc as compiler

    return compiler.supported(program, arch)


def triton_version() -> str | None:
    """Version of the Triton that imports here."""
    from fp4deploy.plugins.aot.compile import triton_version

    return triton_version()


def cuda_variants(arch: str) -> list[tuple[str, dict[str, Any]]]:
    """(source, macros) of every compilation that the tests of the CUDA kernels list, each once, for "sm_90a"."""
    from tests.plugins.runtime.launch_variants import BESIDES, launched

    return [(each.source, dict(each.macros)) for each in (*launched(), *BESIDES) if each.runs_on(arch)]


def smallest_cuda_variant(arch: str) -> tuple[str, dict[str, Any]]:
    """The variant with the shortest source, which compiles in about a second."""
    from fp4deploy.plugins.runtime import nvcc as compiler

    return min(cuda_variants(arch), key=lambda variant: compiler.source_path(variant[0]).stat().st_size)


def triton_variants(arch: str) -> list[Any]:
    """Launch descriptions of every Triton kernel that is compiled for an architecture such as "sm_90"."""
    from fp4deploy.plugins.gemm.triton.variants import all_variants

    return all_variants(arch)


def triton_name(launch: Any) -> str:
    """A launch in one line, for people."""
    constants = " ".join(f"{name}={value}" for name, value in launch.constants)
    return f"{launch.kernel} {constants} warps={launch.num_warps} stages={launch.num_stages}"


def compile_triton(kernels: list[tuple[Any, str]], jobs: int) -> Iterator[tuple[int, bytes, int]]:
    """Compile launches for architectures in new processes: (position in `kernels`, cubin, bytes of shared memory)."""
    from fp4deploy.plugins.aot.build import build

    for index, made in build(kernels, jobs=jobs):
        if made.compiled is None:
            raise RuntimeError(f"{triton_name(kernels[index][0])}: {made.failure}")
        yield index, made.compiled.cubin, made.compiled.shared


@contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Compile instead of reading what an earlier run left."""
    before = {name: os.environ.get(name) for name in ("FP4DEPLOY_CACHE", "FP4DEPLOY_KERNEL_PATH")}
    os.environ["FP4DEPLOY_CACHE"] = str(folder)
    os.environ.pop("FP4DEPLOY_KERNEL_PATH", None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
