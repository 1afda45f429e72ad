"""Every launch of a packed network of any nodes, recorded for a GPU that need not be present.

The nodes of the file are written down as ATen operators (`packed.writer`), as for a compiled network in Python. GEMMs,
convolutions and attention become `contraction`; Inductor generates kernels for everything else (`inductor`). The graph
that it returns, run on tensors without data, gives the launches. What an input or output is in another type of the
caller's is generated in the same way, as stages of their own.

Weights are decoded when a plan is recorded, and lie in the bundle: it is of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fp4deploy.errors import InputError, UnavailableError, named_cause
from fp4deploy.fusion.concatenate import register_lowering
from fp4deploy.fusion.group_norm import group_norm_map
from fp4deploy.native import contraction
from fp4deploy.native.plan import MAX_CLASSES, Gpu, Plan
from fp4deploy.native.recording import META, Recording
from fp4deploy.packed import PackedFile
from fp4deploy.packed.program import EXPANSIONS, trace
from fp4deploy.packed.shapes import Shape
from fp4deploy.packed.writer import Writer
from fp4deploy.plugins.aot.compile import INSTALL_TRITON, triton_version
from fp4deploy.plugins.runtime.cache import keep_compiled_private
from fp4deploy.rest import rest_of

CPU = torch.device("cpu")
TYPES = {"int64": torch.int64, "bool": torch.bool}  # of inputs that are no images
CALLER = {"float32": torch.float32, "float16": torch.float16}


def record_program(file: PackedFile, gpu: Gpu, shapes: Sequence[Shape]) -> Plan:
    """The plan of a network for shapes of all its inputs.

    Raises:
        InputError: the network does not take the shapes, or has an operator that nothing here compiles.
        UnavailableError: Triton is missing.
    """
    if triton_version() is None:
        raise UnavailableError(f"Triton is missing, and it compiles the kernels: {INSTALL_TRITON}  (Linux).")
    graph = file.graph
    dtype = rest_of(graph).dtype
    image = torch.float32 if graph.digits and dtype != torch.float16 else dtype
    return _Program(file, gpu, dtype, image).plan(tuple(tuple(shape) for shape in shapes))


class _Program:
    def __init__(self, file: PackedFile, gpu: Gpu, dtype: torch.dtype, image: torch.dtype) -> None:
        self.file, self.gpu, self.dtype, self.image = file, gpu, dtype, image
        self.recording = Recording()

    def plan(self, shapes: tuple[Shape, ...]) -> Plan:
        inputs = [self.read(number, shape) for number, shape in enumerate(shapes)]
        writer = Writer(self.file, CPU, self.dtype)
        module, tensors, _ = trace(writer, [torch.empty(x.shape, dtype=x.dtype) for x in inputs], "fake")
        constants = [self.recording.stored(tensor) for tensor in tensors]
        outputs = self.run(module, [*constants, *inputs])
        for number, y in enumerate(outputs):
            self.write(number, y)
        stages, arena = self.recording.placed()
        found = tuple(tuple(y.shape) for y in outputs)
        return Plan(self.gpu, shapes, found, arena, tuple(self.recording.constants), stages, self.recording.contents)

    def read(self, number: int, shape: Shape) -> torch.Tensor:
        """An input in the type that the network reads, from either of the caller's."""
        kept = TYPES.get(self.file.graph.inputs[number].dtype)
        found = []
        for name, dtype in CALLER.items():
            x = self.recording.role(torch.empty(shape, dtype=kept or dtype, device=META), "input", number)
            with self.recording.at(f"input.{name}"):
                found += self.copied(lambda x: x.to(kept or self.image), x)
        self.recording.same(found[1], found[0])
        return found[0]

    def write(self, number: int, y: torch.Tensor) -> None:
        for name, dtype in CALLER.items():
            with self.recording.at(f"output.{name}"):
                self.recording.role(self.copied(lambda y, dtype=dtype: y.to(dtype), y)[0], "output", number)  # type: ignore[misc]
        if number == 0 and y.ndim > 1 and y.shape[1] <= MAX_CLASSES and y.is_floating_point():
            with self.recording.at("output.classes"):
                self.recording.role(self.copied(lambda y: y.argmax(1).to(torch.uint8), y)[0], "output", 0)

    def copied(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        """A function of one tensor, contiguous in memory of its own."""

        def run(x: torch.Tensor) -> list[torch.Tensor]:
            return [torch.ops.aten.clone.default(function(x), memory_format=torch.contiguous_format)]

        return self.run(run, [x])

    def run(self, function: Callable[..., object], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Record what a function launches, and return its results."""
        keep_compiled_private()
        from torch._decomp import decomposition_table
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        from fp4deploy.fusion.expand import expand
        from fp4deploy.native.inductor import generate

        register_lowering()
        compiled = _compiled()
        table: dict[Any, Any] = {each: found for each, found in decomposition_table.items() if each not in compiled}
        table |= {**select_decomp_table(), **REPLACED}
        for operator in contraction.REPLACED:
            table.pop(operator, None)
        # A tensor of no axes on the CPU would be an argument by value: its kernels get one axis to point at.
        lines = [x if x.ndim else x[None] for x in tensors]
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fake = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CPU) for x in lines]
            try:
                axes = [x.ndim for x in tensors]
                module = make_fx(_replacing(function, axes), decomposition_table=table)(*fake)
                expand(module.graph, EXPANSIONS)
                module.graph.eliminate_dead_code()
                module.recompile()
                _refuse_unknown(module.graph)
                graph, kernels = generate(module, fake, self.gpu)
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"This network has no launch plan ({named_cause(error)}). {BY_PYTHON}") from error
        found = _Launches(graph, kernels, self.recording).run(*lines, enable_io_processing=False)
        return list(found) if isinstance(found, (list, tuple)) else [found]


class _Launches(fx.Interpreter):
    """Runs the graph of a wrapper on tensors without data and records its launches."""

    def __init__(self, graph: fx.GraphModule, kernels: dict[str, Any], recording: Recording) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # which would become part of the text of an error
        self.kernels, self.recording = kernels, recording

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> object:
        return self.recording.stored(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        from fp4deploy.native.inductor import launched

        if target is launched:
            aligned = self.recording.stage == "body"  # the caller's pointers are, to elements alone
            self.recording.triton(self.kernels[args[0]].call(args[1:], aligned))
            return None
        if target is torch.empty_strided:
            return torch.empty_strided(*args, dtype=kwargs["dtype"], device=META)
        if target is torch.ops.fp4deploy.contract.default:
            y = target(*args, **kwargs)
            self.recording.triton(contraction.call(args, y))
            return y
        if target in VIEWS:
            return target(*args, **kwargs)
        raise InputError(UNKNOWN.format(target))


VIEWS = (torch.as_strided,)
BY_PYTHON = "Run the file with Python: fp4deploy predict IMAGES --model FILE."
UNKNOWN = f"Nothing compiles {{}} for the C library. {BY_PYTHON}"


def _compiled() -> set[object]:
    """Operators that Inductor generates code for; not random numbers, whose seeds are torch's."""
    from torch._inductor.lowering import lowerings

    return {
        each
        for each, lowering in lowerings.items()
        if not getattr(lowering, "_is_fallback_handler", False)
        and torch.Tag.nondeterministic_seeded not in getattr(each, "tags", ())
    }


def _refuse_unknown(graph: fx.Graph) -> None:
    """Refuse what Inductor would leave to a library."""
    called = {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    known = _compiled() | {torch.ops.fp4deploy.contract.default}
    if unknown := sorted(str(each) for each in called - known):
        raise InputError(UNKNOWN.format(", ".join(unknown)))


def _coefficients(x, bias, weight, beta, groups, eps):  # type: ignore[no-untyped-def]
    """`fp4deploy::norm_coefficients` by Inductor's reductions."""
    return torch.stack(group_norm_map(x.flatten(1, -2), bias, weight, beta, groups, eps), 1)


REPLACED: dict[Any, Callable[..., Any]] = {torch.ops.fp4deploy.norm_coefficients.default: _coefficients}


def _replacing(function: Callable[..., Any], axes: Sequence[int]) -> Callable[..., object]:
    """A function with the operators of `contraction.REPLACED` written otherwise.

    axes: of each tensor; one that has none is given with one.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Replace(TorchDispatchMode):
        def __torch_dispatch__(self, called, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return contraction.REPLACED.get(called, called)(*args, **kwargs or {})

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return contraction.REPLACED.get(target, target)(*args, **kwargs)

    run = Interpreter(function).run if isinstance(function, fx.GraphModule) else function

    def replaced(*tensors: torch.Tensor) -> Any:
        with Replace():
            return run(*(x if count else x[0] for x, count in zip(tensors, axes, strict=True)))

    return replaced
