"""What TensorRT launches for a plugin and its attributes: PTX, kernel name, grid, block, shared memory.

Two properties of Triton's PTX do not fit TensorRT's launches.

**Scratch pointers.** Triton ends every kernel's parameter list with two pointers to scratch memory, which TensorRT does
not pass. Kernels that use no scratch memory never read them, so they are removed from the entry point's declaration.
The kernel then has exactly the parameters that TensorRT passes; what TensorRT does about missing ones is not
documented. A kernel that reads one is refused.

**Shared memory.** More than 48 KiB needs a driver call before the launch. It is not documented whether TensorRT makes
it, so that only tiles that need less are offered; TensorRT times them as tactics and keeps the fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp4deploy.plugins.aot.compile import compile_launch
from fp4deploy.plugins.aot.spec import Launch, Value
from fp4deploy.plugins.aot.store import supported
from fp4deploy.plugins.gemm.arguments import ALIGNED, SIZES
from fp4deploy.plugins.gemm.triton.tiles import (
    MIDDLE,
    NARROW,
    NATIVE_FROM,
    NATIVE_NARROW,
    NATIVE_WIDE,
    SMALL,
    Tile,
    k_step_constants,
)
from fp4deploy.plugins.runtime.cubin import entry_point
from fp4deploy.plugins.runtime.nvcc import KernelError
from fp4deploy.plugins.tensorrt.definitions import QUANTIZE, Attributes, Plugin

SCRATCH = 2  # trailing parameters of every Triton kernel
MAX_SHARED = 48 * 1024
POINTERS = {"FP16": "*fp16", "FP32": "*fp32", "INT8": "*u8"}
PACKING = Tile(64, 64, 0, 4, 1)  # pixels x channels that one program of the quantiser packs


@dataclass(frozen=True)
class PluginKernel:
    """A kernel as TensorRT launches it: its parameters are inputs, integers and outputs, in this order."""

    name: str
    ptx: str
    threads: int
    shared: int


Compile = Callable[[Launch, str], PluginKernel]


def tactics(plugin: Plugin, arch: str) -> tuple[Tile, ...]:
    """The tiles that TensorRT may choose from; tactic 1 is the first."""
    if plugin is QUANTIZE:
        return (PACKING,)
    if supported(arch).number >= NATIVE_FROM:
        return (NATIVE_NARROW, NATIVE_WIDE)
    return (NARROW, SMALL) if plugin.packed else (NARROW, SMALL, MIDDLE)


def plugin_launch(plugin: Plugin, attributes: Attributes, tile: Tile, arch: str, asm: bool = True) -> Launch:
    """The kernel variant for one node of a network."""
    kinds = [POINTERS[kind] for kind in plugin.types()]
    count = len(plugin.inputs)
    inputs = dict(zip(plugin.inputs, kinds[:count], strict=True))
    outputs = dict(zip(plugin.outputs, kinds[count:], strict=True))
    if plugin is QUANTIZE:
        types = {**inputs, "C": "i32", "pixels": "i32", **outputs}
        constants: dict[str, Value] = {"BP": tile.bm, "BC": tile.bn, "ASM": asm}
        return _launch(plugin.entry, types, constants, tile, ("x",))
    sizes = [name for name in SIZES if plugin.sources == 2 or name != "CB2"]
    types = {**inputs, **dict.fromkeys(sizes, "i32"), **outputs}
    taps, bytes_of = attributes["kernel"], source_bytes(attributes)
    constants = {
        "KH": taps[0],
        "KW": taps[1],
        "UP": plugin.transposed,
        **k_step_constants(tile, 1 if plugin.transposed else taps[0] * taps[1], tuple(bytes_of)),
        "RELU": bool(attributes["relu"][0]),
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "NATIVE": supported(arch).number >= NATIVE_FROM,
        "ASM": asm,
    }
    wide = ("CB", "CB2") if all(size % 16 == 0 for size in bytes_of) else ()
    return _launch(plugin.entry, types, constants, tile, tuple(name for name in types if name in (*ALIGNED, *wide)))


def source_bytes(attributes: Attributes) -> list[int]:
    """Bytes of codes of one pixel in each source."""
    return [8 * -(-channels // 16) for channels in attributes["channels"]]


def integers(plugin: Plugin, inputs: Sequence[Any], attributes: Attributes) -> list[object]:
    """The kernel's integer arguments, between input and output pointers; symbolic where shapes are."""
    x = inputs[0]
    if plugin is QUANTIZE:
        return [attributes["channels"][0], x[2] * x[3]]
    n, oh, ow, count = plugin.pixels(x, attributes)
    geometry = (
        (1, 0, 1) if plugin.transposed else tuple(attributes[name][0] for name in ("stride", "padding", "dilation"))
    )
    return [x[1], x[2], *source_bytes(attributes), oh, ow, n * oh * ow, count, *geometry]


def grid(
    plugin: Plugin, inputs: Sequence[Any], attributes: Attributes, tile: Tile, cdiv: Callable[[Any, int], Any]
) -> tuple[Any, int]:
    """Programs of the grid along x (symbolic) and along y."""
    x = inputs[0]
    if plugin is QUANTIZE:
        channels = -(-attributes["channels"][0] // 16) * 16
        return x[0] * cdiv(x[2] * x[3], tile.bm), -(-channels // tile.bn)
    n, oh, ow, count = plugin.pixels(x, attributes)
    columns = -(-count // tile.bn) * (4 if plugin.transposed else 1)
    return cdiv(n * oh * ow, tile.bm) * columns, 1


def compile_plugin(launch: Launch, arch: str) -> PluginKernel:
    """Compile for an architecture, present or not.

    Raises:
        KernelError: it does not compile, Triton is missing, or TensorRT could not launch it.
    """
    compiled = compile_launch(launch, arch)
    if compiled.shared > MAX_SHARED:
        raise KernelError(
            f"{launch.kernel} needs {compiled.shared} bytes of shared memory, and a plugin can have {MAX_SHARED}."
        )
    ptx = without_parameters(compiled.ptx, SCRATCH)
    return PluginKernel(compiled.name, ptx, 32 * compiled.num_warps, compiled.shared)


def node_kernels(plugin: Plugin, attributes: Attributes, arch: str) -> list[PluginKernel]:
    """Every kernel that TensorRT may ask for at one node, in the order of its tactics.

    Raises:
        InputError: an architecture that the kernels do not support.
        KernelError: as `compile_plugin`.
    """
    return [compile_plugin(plugin_launch(plugin, attributes, tile, arch), arch) for tile in tactics(plugin, arch)]


def without_parameters(ptx: str, count: int) -> str:
    """PTX of one kernel without its last `count` parameters.

    Raises:
        KernelError: the kernel reads one of them.
    """
    name, types = entry_point(ptx)
    head, declared, body = _split(ptx)
    for position in range(len(types) - count, len(types)):
        if re.search(rf"\b{re.escape(name)}_param_{position}\b", body):
            raise KernelError(f"{name} reads its parameter {position}, scratch memory that TensorRT does not give.")
    return head + ",".join(declared.split(",")[: len(types) - count]) + "\n" + body


def _split(ptx: str) -> tuple[str, str, str]:
    """(up to the parameters' parenthesis, the parameters, from the closing one on)."""
    found = re.search(r"\.entry\s+\w+\s*\(", ptx)
    assert found is not None
    end = ptx.index(")", found.end())
    return ptx[: found.end()], ptx[found.end() : end], ptx[end:]


def _launch(
    entry: str, types: dict[str, str], constants: dict[str, Value], tile: Tile, divisible: tuple[str, ...]
) -> Launch:
    return Launch(
        f"plugin_entries:{entry}", tuple(types.items()), tuple(constants.items()), divisible, tile.warps, tile.stages
    )
