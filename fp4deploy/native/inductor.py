"""Triton kernels of a graph of ATen operators, by Inductor, for a GPU that need not be present.

    graph, kernels = generate(module, tensors, gpu)       # fx: allocations, views, `launched(name, ...)`, operators

Inductor decides what is one kernel, and writes its source; it needs a device's properties for that, and no device. So
the graph is of tensors on the CPU, for which Inductor has Triton as a backend too, and for the time of a generation the
CPU's properties are those of the GPU. Nothing is compiled here: `plugins.aot` compiles the sources as it does those of
this package. Of several tilings of a kernel the first of Inductor's list is taken; nothing can be timed.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from fp4deploy.native.plan import Gpu
from fp4deploy.packed.program import OPTIONS
from fp4deploy.plugins.aot.compile import imported
from fp4deploy.plugins.aot.spec import Call, Launch

PATCHES = {**OPTIONS, "fx_wrapper": True, "cpu_backend": "triton", "autotune_local_cache": False}
HEURISTICS = re.compile(r"@triton_heuristics\.\w+\(\n.*?\n\)\n(?=@triton\.jit)", re.DOTALL)
DRIVER = "triton_helpers.set_driver_to_cpu()\n"


def launched(kernel: str, *arguments: object) -> None:
    """Stands for a launch in the graph that `generate` returns."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A generated kernel: its source, and Inductor's tuner, which knows tilings and grids."""

    name: str
    source: str
    tuner: Any

    def call(self, arguments: Sequence[object], aligned: bool = True) -> Call:
        """Its launch with these arguments; aligned: pointers are, to 16 bytes, where Inductor assumes it."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        meta, config = self.tuner.triton_meta, self.tuner.configs[0]
        constants = {**meta["constants"], **config.kwargs}
        positions = list(meta["signature"])
        values = dict(zip((name for name in positions if name not in config.kwargs), arguments, strict=True))
        grid = GridExpr.from_meta(self.tuner.inductor_meta, config).eval_slow(values)
        names = [name for name in values if meta["signature"][name] != "constexpr" and name not in constants]
        even = {positions[at] for found in meta["configs"][0] for at in found}
        even -= {name for name in names if not aligned and isinstance(values[name], torch.Tensor)}
        launch = Launch(
            kernel=f"generated:{self.name}",
            arguments=tuple((name, meta["signature"][name]) for name in names),
            constants=tuple((name, constants[name]) for name in positions if name in constants),
            divisible=tuple(name for name in names if name in even),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            source=self.source,
        )
        x, y, z = grid
        return Call(launch, tuple(values[name] for name in names), (int(x), int(y), int(z)))


def generate(
    module: fx.GraphModule, tensors: Sequence[torch.Tensor], gpu: Gpu
) -> tuple[fx.GraphModule, dict[str, Kernel]]:
    """What Inductor makes of a graph, given a FakeTensor for each of its placeholders.

    Raises:
        UnavailableError: Triton is missing.
    """
    from torch._inductor import config
    from torch._inductor.codegen import common
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    from fp4deploy.native.wrapper import wrapper_class

    mode = next(each.fake_mode for each in tensors if hasattr(each, "fake_mode"))
    kernels: dict[str, str] = {}
    with _assumed(gpu), config.patch(PATCHES), V.set_fake_mode(mode), torch.no_grad():
        lowering = GraphLowering(module, example_inputs=tensors, is_inference=True, fx_wrapper=True)
        common.init_backend_registration()
        known = common.device_codegens["cpu"]
        common.register_backend_for_device(
            "cpu", known.scheduling, known.wrapper_codegen, known.cpp_wrapper_codegen, wrapper_class(kernels)
        )
        debug = DebugContext()
        try:
            with debug, V.set_debug_handler(debug), V.set_graph_handler(lowering):
                lowering.run(*tensors)
                graph: Any = lowering.codegen()[0]
        finally:
            common.device_codegens["cpu"] = known
        return graph.gm, {name: _kernel(name, text) for name, text in kernels.items()}


def _kernel(name: str, body: str) -> Kernel:
    """From the line that defines a kernel: `async_compile.triton(name, source, ...)`."""
    call = ast.parse(body).body[0].value  # type: ignore[attr-defined]
    source = str(ast.literal_eval(call.args[1])).replace(DRIVER, "")
    return Kernel(name, HEURISTICS.sub("", source), getattr(imported(source), name))


@contextmanager
def _assumed(gpu: Gpu) -> Iterator[None]:
    """Properties and compiler target of a GPU, for Inductor."""
    import triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    number = gpu.arch.number
    properties = SimpleNamespace(
        multi_processor_count=gpu.processors, major=number // 10, minor=number % 10, regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=1536 if number in (86, 87, 89, 120, 121) else 2048, max_threads_per_block=1024,
        warp_size=32,
    )  # fmt: skip

    class Interface(device_interface.CpuInterface):
        get_device_properties = staticmethod(lambda device=None: properties)
        get_compute_capability = staticmethod(lambda device=None: number)  # type: ignore[assignment]
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    class Driver(DriverBase):
        """Of no device: Inductor asks it for the target alone."""

        def __init__(self) -> None:
            pass

        is_active = classmethod(lambda cls: True)
        map_python_to_cpp_type = get_benchmarker = None
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        get_current_target = staticmethod(lambda: GPUTarget("cuda", number, 32))

    before, folder = device_interface.get_interface_for_device("cpu"), os.environ.get("TRITON_CACHE_DIR")
    driver = triton.runtime.driver
    active = None if torch.cuda.is_available() else Driver()
    device_interface.register_interface_for_device("cpu", Interface)
    DeviceProperties.create.__func__.cache_clear()  # type: ignore[attr-defined]
    if active is not None:
        driver.set_active(active)
    try:
        yield
    finally:
        device_interface.register_interface_for_device("cpu", before)
        DeviceProperties.create.__func__.cache_clear()  # type: ignore[attr-defined]
        if active is not None:
            driver.set_active(None)  # as it was: asked for again when it is needed
        if folder is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
